"""Terminal input and output shared by the commands: arguments, errors, progress, tables."""

import argparse
import contextlib
import difflib
import errno
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

WIDTH = 96
"""Columns printed to a file or a pipe, and at most to a terminal."""

LEAST_WIDTH = 30

BAD_INPUT = 2
"""Exit status: arguments or files are wrong, or the output cannot be written."""

GREATEST_FLOAT32 = (2 - 2**-23) * 2.0**127
"""Temperatures are float32 in the loops; a larger one would be infinite there."""

SMALLEST_FLOAT32 = 2.0**-126
"""Smaller positive numbers count as 0 on devices that flush denormals."""

_REASONS = {
    errno.ENOENT: "there is no such file",
    errno.ENOTDIR: "part of its path is not a directory",
    errno.EISDIR: "it is a directory, not a file",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOSPC: "there is no space left on the device",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "it is a link that leads back to itself",
    errno.EROFS: "the file system is read-only",
}


# --- errors


class UserError(Exception):
    """An error that the user can fix: printed on one line, without a traceback."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Raise errors of arguments, files and missing packages as `UserError`."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        raise UserError(explain(error)) from error


def program() -> str:
    """Return how the user calls this program: `jaxspec`, or `python -m jaxspec`."""
    name = Path(sys.argv[0] if sys.argv else "").stem
    return "jaxspec" if name == "jaxspec" else "python -m jaxspec"


def reason(error: BaseException) -> str:
    """Return in plain words why something failed, without the name of the file."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    words = str(error.strerror)
    is_from_system = words == os.strerror(error.errno)
    return _REASONS.get(error.errno, words[:1].lower() + words[1:]) if is_from_system else words


def explain(error: BaseException) -> str:
    """Return an error in plain words; for an OSError, the file name and the reason.

    >>> explain(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "rounds.npz"))
    'rounds.npz: there is no such file'
    """
    filename = getattr(error, "filename", None)
    return reason(error) if filename is None else f"{filename}: {reason(error)}"


def fail(why: str, command: str = "") -> int:
    """Print an error as one line on standard error; return the exit status for it."""
    line = f"{program()} {command}".rstrip() + f": error: {_printable(why)}"
    with contextlib.suppress(OSError):  # standard error may be full
        print(line, file=sys.stderr, flush=True)
    return BAD_INPUT


def _printable(text: str) -> str:
    """Return a text as one line that cannot move the cursor."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in " ".join(text.split("\n"))
    )


# --- arguments


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests what an unknown word may have meant."""

    def __init__(self, **kwargs: Any) -> None:
        """Create a parser that keeps the paragraphs of its description apart."""
        self._given: list[str] = []
        super().__init__(formatter_class=_Paragraphs, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, all of which must be known."""
        self._given = [str(word) for word in (sys.argv[1:] if args is None else args)]
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """End the process with an error that suggests options for those that are not known."""
        known = self._option_string_actions
        words = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        hints = [_suggestion(w, known) for w in words if not any(k.startswith(w) for k in known)]
        super().error(message + next(filter(None, hints), ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = _suggestion(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from error

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is sys.stdout:
            file.write(message)  # argparse would ignore that it cannot be written to
        else:
            super()._print_message(message, file)


class _Paragraphs(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join(super(_Paragraphs, self)._fill_text(p, width, indent) for p in parts)


def _suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of an error that suggests the nearest known word; empty if none is near.

    >>> _suggestion("adit", ["audit", "replay"])
    "; did you mean 'audit'?"
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def option(
    parser: argparse._ActionsContainer,
    flag: str,
    purpose: str,
    kind: Callable[[str], Any] | None = None,
    default: Any = None,
    **more: Any,
) -> None:
    """Add an argument "--name VALUE" with its purpose, and its default if that is a single value.

    `kind` parses the value; the default is any text that is not empty.
    """
    name, _, value = flag.partition(" ")
    if default is not None and not isinstance(default, list):
        purpose += " (default: %(default)s)"
    parser.add_argument(
        name, metavar=value or None, help=purpose, type=kind or _text, default=default, **more
    )


def _text(text: str) -> str:
    if text == "":
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def number(
    kind: type[int] | type[float], least: float, most: float, wanted: str
) -> Callable[[str], Any]:
    """Return the parser of a number from `least` to `most`; `wanted` describes it in the error.

    Float arguments are float32 in the loops: a positive one must not be denormal there.
    """

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= most and not 0 < value < SMALLEST_FLOAT32:
                return value
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """Return the parser of an integer argument that is at least `least`."""
    return number(int, least, math.inf, f"an integer >= {least}")


seed = number(int, 0, 2**31 - 1, f"an integer from 0 to {2**31 - 1}")

temperature = number(
    float,
    0,
    GREATEST_FLOAT32,
    f"0 (greedy), or a number from {SMALLEST_FLOAT32:.1e} to {GREATEST_FLOAT32:.1e} (float32)",
)


# --- output


class Progress:
    """A status line on standard error that is overwritten; shown only on a terminal."""

    def __init__(self) -> None:
        """Look whether standard error is a terminal."""
        self.is_shown = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is being done; clear the line once all is done."""
        if self.is_shown:
            line = f"{done}/{total}  {what}" if done < total else ""
            columns = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:columns]:<{columns}}\r", end="", file=sys.stderr, flush=True)


def count(number: int, thing: str) -> str:
    """Return a number of things in words."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def mark(holds: bool) -> str:
    """Return the word that marks whether a line holds."""
    return "ok" if holds else "FAIL"


def width() -> int:
    """Return the columns to print in: those of a terminal, up to `WIDTH`."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(LEAST_WIDTH, min(WIDTH, shutil.get_terminal_size().columns))


def wrapped(line: str, first: str = "", rest: str = "") -> str:
    """Return a line wrapped to the columns, with these indents."""
    return textwrap.fill(line, width(), initial_indent=first, subsequent_indent=rest)


def print_line(line: str) -> None:
    """Print a line, wrapped where a terminal is narrower; unwrapped to a file or a pipe."""
    if len(line) > width() and sys.stdout.isatty():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        line = textwrap.fill(line, width(), subsequent_indent=indent, replace_whitespace=False)
    print(line)


def print_table(
    columns: Mapping[str, str], rows: Iterable[Sequence[Any]], indent: str = ""
) -> None:
    """Print a table, or its rows one by one where the terminal is too narrow for it.

    `columns` gives the format of each by its head; a head that ends with ":" is not printed. A row is
    its name and its values; None is blank, as is a name equal to the one above.
    """
    heads = ["" if head.endswith(":") else head for head in columns]
    specs = [spec.partition(".")[0] for spec in columns.values()]
    cells = [
        ["" if value is None else format(value, spec).strip() for value, spec in pairs]
        for pairs in (zip(row, columns.values(), strict=True) for row in rows)
    ]
    lines, above = [], None
    for name, *rest in [heads, *cells]:
        shown = ["" if name == above else name, *rest]
        lines.append(indent + " ".join(map(format, shown, specs)))
        above = name
    lines[0] = lines[0].rstrip()
    print_rows(list(columns), cells, lines if lines[0] else lines[1:])


def print_rows(heads: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str]) -> None:
    """Print rows that are laid out as lines, or one by one where the terminal is too narrow."""
    if max(map(len, lines), default=0) <= width() or not sys.stdout.isatty():
        print("\n".join(lines))
        return
    for name, *cells in rows:
        words = (f"{head} {cell}" for head, cell in zip(heads[1:], cells, strict=True) if cell)
        print(wrapped(name, "  ", "    "))
        print(wrapped(", ".join(words), "    ", "    "))


def print_text(label: str, text: str) -> None:
    """Print a labelled text, its line feeds as slashes."""
    words = " ".join(text.replace("\n", " / ").split())
    print(wrapped(f"  {label:<14} {words}", rest=" " * 17))
