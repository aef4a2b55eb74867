"""What the commands write on a terminal: progress, notes, marks, refusals."""

import shutil
import sys
import textwrap

WIDTH = 96

GREATEST_FLOAT32 = (2 - 2**-23) * 2.0**127
"""Temperatures are float32 in the loops: one above this would be infinite there."""

SMALLEST_FLOAT32 = 2.0**-126
"""Smaller numbers above 0 count as 0 on devices that flush denormal ones."""


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


def refuse(why: str, command: str) -> int:
    """Say on standard error what is wrong with the arguments; return the exit status for it."""
    print(f"python -m jaxspec {command}: error: {why}", file=sys.stderr)
    return 2


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
            f"--temperature is {temperature}: 0 in float32; give 0 for greedy, or at least "
            f"{SMALLEST_FLOAT32:.1e}"
        )


def count(number: int, thing: str) -> str:
    """Return a number of things in words."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def mark(holds: bool) -> str:
    """Return the word for a line that holds or does not."""
    return "ok" if holds else "FAIL"


def print_note(note: str) -> None:
    """Print a note below a table."""
    print(textwrap.fill(note, WIDTH, initial_indent="  ", subsequent_indent="  "))


def print_text(name: str, text: str) -> None:
    """Print a text with a label, its line feeds as strokes."""
    words = " ".join(text.replace("\n", " / ").split())
    print(textwrap.fill(f"  {name:<14} {words}", WIDTH, subsequent_indent=" " * 17))
