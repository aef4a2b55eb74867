"""Read a file's keys by a table of types, ranges and meanings; the errors of all loaders.

Each kind of file has one table, see `jaxspec.models.load.metadata`. A null counts as absent.
"""

import contextlib
import dataclasses
import fnmatch
import inspect
import json
import os
import pathlib
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

shown = reprlib.repr
"""A value as a message shows it, long ones cut."""

_PACKAGE = os.path.join(pathlib.Path(__file__).parents[2], "")
_LARGEST = float(np.finfo(np.float32).max)
_REQUIRED: Any = object()


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or of a network this package does not have."""

    def __init__(self, file: object, reason: str) -> None:
        """Take the file, or the part of it, and what is wrong with it."""
        super().__init__(str(file), reason)

    def __str__(self) -> str:
        """Return both."""
        return ": ".join(self.args)


class CheckpointWarning(UserWarning):
    """A checkpoint says something that this package neither knows nor applies."""


@contextlib.contextmanager
def wrapped(file: object) -> Iterator[None]:
    """Raise what a library raises, of whatever type, as a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        # A panic of a library written in Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(file, str(error)[:300] or type(error).__name__) from error


def report(file: object, message: str) -> None:
    """Warn at the line that called this package."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{file}: {message}", CheckpointWarning, stacklevel=level)


@dataclasses.dataclass(frozen=True)
class Field:
    """How a key is read."""

    accepts: Callable[[Any], bool] = lambda value: True
    wanted: str = ""  # the accepted values in words
    name: str | None = None  # its meaning, by which a loader looks it up; None: it is not read
    default: Any = None  # of an absent key
    is_advice: bool = False  # other values recommend how to sample: they are reported, not rejected

    def of(self, keys: str) -> "dict[str, Field]":
        """Return this field for each of several keys, separated by spaces."""
        return dict.fromkeys(keys.split(), self)


Table = Mapping[str, Field]
"""The field of each key, or of all keys that match a pattern such as `general.*`."""

NO_EFFECT = Field()
"""It changes neither the network nor the tokens of a text."""

OFF = Field(lambda value: not value, "this package has no support for it")
"""False, 0 or empty; every other value asks for something that this package does not do."""


def given(name: str) -> Field:
    """Any value; the loader checks it."""
    return Field(name=name)


def integer(
    name: str, least: int = 1, most: int | None = None, *, default: Any = _REQUIRED
) -> Field:
    """An integer from `least` to `most`."""
    upper = float("inf") if most is None else most
    words = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    return Field(lambda x: type(x) is int and least <= x <= upper, words, name, default)


def number(name: str, default: Any = _REQUIRED, *, or_zero: bool = False) -> Field:
    """A number above 0, or from 0 on, that float32 holds."""

    def accepts(value: Any) -> bool:
        is_in_range = type(value) in (int, float) and 0 <= value <= _LARGEST
        return is_in_range and (or_zero or value > 0)

    return Field(accepts, f"a finite number {'>=' if or_zero else '>'} 0", name, default)


def boolean(name: str, default: bool | None = None) -> Field:
    """True or false."""
    return Field(lambda value: isinstance(value, bool), "true or false", name, default)


def strings(name: str, default: Any = _REQUIRED) -> Field:
    """A list of strings."""

    def accepts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)

    return Field(accepts, "a list of strings", name, default)


def mapping(name: str) -> Field:
    """A JSON object, by default an empty one."""
    return Field(lambda value: isinstance(value, dict), "an object", name, {})


def only(*neutral: Any) -> Field:
    """Values without effect; every other asks for something that this package does not do."""
    words = " or ".join(map(str, neutral)) or "no support for it"
    return Field(lambda value: value in neutral, f"this package has {words}")


def advice(field: Field) -> Field:
    """A recommendation for sampling: values that are not accepted are reported, not rejected."""
    return dataclasses.replace(field, is_advice=True)


class Values(dict[str, Any]):
    """What a file says, by the meaning of its keys."""

    def __init__(self, path: object, keys: Mapping[str, str], values: Mapping[str, Any]) -> None:
        """Take the file, and the key and the value of each meaning."""
        super().__init__(values)
        self.path, self.keys_of = path, keys

    def error(self, name: str, why: str) -> CheckpointError:
        """Return the error that names the file, a key and its value."""
        return CheckpointError(self.path, f"{self.keys_of[name]} is {shown(self[name])}, {why}")


def read(path: object, stored: Mapping[str, Any], table: Table, *, prefix: str = "") -> Values:
    """Read the keys of a file that begin with `prefix`.

    Raises:
      CheckpointError: a value that its field does not accept, or a key that is missing.

    Warns:
      CheckpointWarning: once, naming the keys that are not in the table, which may matter, and the
        recommendations that are not followed.
    """
    notes: dict[str, list[str]] = {}
    for key, value in stored.items():
        if value is None or not key.startswith(prefix):
            continue
        field = table.get(key) or next(
            (table[pattern] for pattern in table if fnmatch.fnmatchcase(key, pattern)), None
        )
        if field is None:
            what = "unknown keys, which may change the network or its text"
            notes.setdefault(what, []).append(f"{shown(key)} ({shown(value)})")
        elif field.name is None and not field.accepts(value):
            if not field.is_advice:
                raise CheckpointError(path, f"{key} is {shown(value)}; {field.wanted}")
            what = "sampling recommendations that are not applied"
            notes.setdefault(what, []).append(f"{key} ({shown(value)})")
    found = Values(path, {field.name: key for key, field in table.items() if field.name}, {})
    for name, key in found.keys_of.items():
        value, field = stored.get(key), table[key]
        if value is None and field.default is _REQUIRED:
            raise CheckpointError(path, f"{key} is missing, must be {field.wanted}")
        if isinstance(value, bytes):
            raise CheckpointError(path, f"{key} is not UTF-8: {shown(value)}")
        if value is not None and not field.accepts(value):
            raise CheckpointError(path, f"{key} is {shown(value)}, must be {field.wanted}")
        found[name] = field.default if value is None else value
    if notes:
        report(path, "; ".join(f"{what}: {_listed(keys)}" for what, keys in notes.items()))
    return found


def _listed(names: list[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    assert_file(path)
    with wrapped(path):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise CheckpointError(path, "not an object")
    return content


def assert_file(path: pathlib.Path) -> None:
    """Raise unless a path leads to a file: reading a pipe would block, a device never end."""
    if not path.is_file():
        raise CheckpointError(path, "not a file" if path.exists() else "there is no such file")
