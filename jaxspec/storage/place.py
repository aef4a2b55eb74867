"""Errors of stored files: which file, which field, what was expected."""

import reprlib
from typing import Any, NamedTuple

MOST_NESTED = 64
"""Levels of lists and dictionaries in a record."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 6
_SHORT.maxlevel = 3


class RecordError(ValueError):
    """A file is not a record of the expected kind and version, or its content is malformed."""


def shown(value: Any) -> str:
    """Return the repr of a value for an error message, shortened if it is long.

    >>> shown([1, "two"]), len(shown("x" * 10_000))
    ("[1, 'two']", 80)
    """
    return _SHORT.repr(value)


def shortened(text: str) -> str:
    """Return a text without its middle if it is too long for an error message."""
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}"


class Place(NamedTuple):
    """Position of a value: the file and which of its records, the field in it, the field's level."""

    source: str
    path: str = ""
    depth: int = 0

    def __str__(self) -> str:
        """File and field."""
        return f"{self.source}: {shortened(self.path)}" if self.path else self.source

    def field(self, name: str) -> "Place":
        """Return the place of a field of this one."""
        name = name if len(name) <= 80 else shown(name)
        return self._below(f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> "Place":
        """Return the place of an item of this list."""
        return self._below(f"{self.path}[{index}]")

    def _below(self, path: str) -> "Place":
        if self.depth == MOST_NESTED:
            raise RecordError(f"{self}: nested deeper than {MOST_NESTED}")
        return Place(self.source, path, self.depth + 1)

    def error(self, what: str) -> RecordError:
        """Return an error about this place."""
        return RecordError(f"{self} {what}" if self.path else f"{self}: {what}")

    def missing(self, name: str) -> RecordError:
        """Return the error for a field that is missing here."""
        return RecordError(f"{self}: {name!r} is missing")

    def wrong(self, value: Any, wanted: str) -> RecordError:
        """Return the error that shows a value and what was expected instead."""
        given = f"a {type(value).__name__}" if isinstance(value, dict | list) else shown(value)
        return self.error(f"is {given}, wanted {wanted}")
