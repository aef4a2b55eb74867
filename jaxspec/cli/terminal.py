"""What the commands write on a terminal: progress, notes, tables, errors; and how they end."""

import argparse
import contextlib
import difflib
import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

WIDTH = 96
"""Columns of what is printed to a file or a pipe, and at most to a terminal."""

LEAST_WIDTH = 30

REFUSED = 2
"""Exit status: arguments or files are wrong, or the output cannot be written."""

INTERRUPTED = 130
"""Exit status after an interrupt (128 + SIGINT)."""

NOBODY_READS = 141
"""Exit status where what reads the output has left, as `head` does (128 + SIGPIPE)."""

GREATEST_FLOAT32 = (2 - 2**-23) * 2.0**127
"""Temperatures are float32 in the loops: one above this would be infinite there."""

SMALLEST_FLOAT32 = 2.0**-126
"""Smaller numbers above 0 count as 0 on devices that flush denormal ones."""

_REASONS = {
    errno.ENOENT: "there is no such file",
    errno.ENOTDIR: "a part of its path is no folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.EACCES: "there is no permission",
    errno.EPERM: "there is no permission",
    errno.ENOSPC: "there is no space left on the device",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "it is a link that leads back to itself",
    errno.EROFS: "the file system is read-only",
}


class Progress:
    """A line on standard error that is written over, if that is a terminal."""

    def __init__(self) -> None:
        """Find out whether anybody watches."""
        self.is_shown = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is being done; wipe the line once all is done."""
        if self.is_shown:
            line = f"{done}/{total}  {what}" if done < total else ""
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)


def program() -> str:
    """Return what the user calls this program: `jaxspec`, or `python -m jaxspec`."""
    name = Path(sys.argv[0] if sys.argv else "").stem
    return "jaxspec" if name == "jaxspec" else "python -m jaxspec"


def reason(error: BaseException) -> str:
    """Return why something failed in plain words, without the name of the file that it was."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    words = str(error.strerror)
    is_of_the_system = words == os.strerror(error.errno)
    return _REASONS.get(error.errno, words[:1].lower() + words[1:]) if is_of_the_system else words


def explain(error: BaseException) -> str:
    """Return an error in plain words: for one of the system the name of the file, then the reason.

    >>> explain(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "rounds.npz"))
    'rounds.npz: there is no such file'
    """
    filename = getattr(error, "filename", None)
    return reason(error) if filename is None else f"{filename}: {reason(error)}"


def refuse(why: str, command: str = "") -> int:
    """Print in one line on standard error what is wrong; return the exit status for it."""
    line = f"{program()} {command}".rstrip() + f": error: {_printable(why)}"
    with contextlib.suppress(OSError):  # nothing more can be done where standard error is full
        print(line, file=sys.stderr, flush=True)
    return REFUSED


def _printable(text: str) -> str:
    """Return a text as one line, which cannot move the cursor."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in " ".join(text.split("\n"))
    )


def drop_output() -> None:
    """Lead standard output nowhere: what is left in its buffer would raise again at exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def leave(status: int) -> NoReturn:
    """End the process at once, what was printed written out.

    A thread that compiles cannot be stopped, and crashes if the process is taken down around it.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class Parser(argparse.ArgumentParser):
    """A parser of arguments that suggests what an unknown one may have meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make one; paragraphs of its description stay apart."""
        kwargs.setdefault("formatter_class", _Paragraphs)
        self._given: list[str] = []
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, all of which must be known."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse_unknown(rest)
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and keep them for the error that they may lead to."""
        self._given = [str(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(args, namespace)

    def refuse_unknown(self, rest: Sequence[str]) -> NoReturn:
        """End the process with an error for arguments that nothing takes."""
        self.error(f"unrecognized arguments: {' '.join(rest)}")

    def error(self, message: str) -> NoReturn:
        """End the process with an error, and suggest options for those that are not known."""
        known = self._option_string_actions
        words = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        hints = [suggestion(w, known) for w in words if not any(k.startswith(w) for k in known)]
        super().error(f"{message}{next(filter(None, hints), '')}")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse passes over a standard output that cannot be written to.
        if message and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = suggestion(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from error


class _Paragraphs(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join(super(_Paragraphs, self)._fill_text(p, width, indent) for p in parts)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of an error that suggests the known word nearest to one; empty if none is.

    >>> suggestion("adit", ["audit", "replay"])
    "; did you mean 'audit'?"
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_seed(seed: int) -> None:
    """Refuse a `--seed` that makes no key."""
    if not 0 <= seed < 2**31:
        raise ValueError(f"--seed is {seed}: must be from 0 to {2**31 - 1}")


def check_temperature(temperature: float) -> None:
    """Refuse a `--temperature` that is negative, or no number, in float32."""
    if not 0 <= temperature <= GREATEST_FLOAT32:
        raise ValueError(
            f"--temperature is {temperature}: must be finite in float32 and at least 0 (0 is greedy)"
        )
    if 0 < temperature < SMALLEST_FLOAT32:
        raise ValueError(
            f"--temperature is {temperature}: counts as 0 in float32; give 0 for greedy, or at least "
            f"{SMALLEST_FLOAT32:.1e}"
        )


def count(number: int, thing: str) -> str:
    """Return a number of things in words."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def mark(holds: bool) -> str:
    """Return the word for a line that holds or does not."""
    return "ok" if holds else "FAIL"


def width() -> int:
    """Return the columns to print in: those of the terminal, if it is one, up to `WIDTH`."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size().columns))


def print_line(line: str) -> None:
    """Print a line, broken where a terminal is narrower; whole into a file or a pipe."""
    if len(line) > width() and sys.stdout.isatty():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        line = textwrap.fill(line, width(), subsequent_indent=indent, replace_whitespace=False)
    print(line)


def print_table(lines: Sequence[str], rows: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Print a table, or its rows one by one where the terminal is too narrow for it.

    Args:
      lines: the table as laid out.
      rows: the same, for each row its name and its cells by their heads.
    """
    if max(map(len, lines), default=0) <= width() or not sys.stdout.isatty():
        print("\n".join(lines))
        return
    for name, cells in rows:
        print(textwrap.fill(name, width(), initial_indent="  ", subsequent_indent="    "))
        words = ", ".join(f"{head} {cell}" for head, cell in cells.items() if cell)
        if words:
            print(textwrap.fill(words, width(), initial_indent="    ", subsequent_indent="    "))


def print_note(note: str) -> None:
    """Print a note below a table."""
    print(textwrap.fill(note, width(), initial_indent="  ", subsequent_indent="  "))


def print_text(name: str, text: str) -> None:
    """Print a text with a label, its line feeds as strokes."""
    words = " ".join(text.replace("\n", " / ").split())
    print(textwrap.fill(f"  {name:<14} {words}", width(), subsequent_indent=" " * 17))
