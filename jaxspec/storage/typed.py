"""Reading of plain values into dataclasses, driven by the annotations of their fields.

Known annotations: bool, int, float, str, None and unions with it, `Literal`, enums (a member's name
in lower case), tuples, dictionaries with string keys, dataclasses, `Any` (plain values),
`StoredArray`, `Annotated[int, Range(...)]`. An int without a range is a count, from 0 on.
"""

import dataclasses
import enum
import functools
import itertools
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np

from jaxspec.storage.place import Place, RecordError, shown
from jaxspec.storage.records import StoredArray

T = TypeVar("T")

MOST_TOKENS = 1 << 22
"""Tokens of one text that is stored as an array."""


class Range(NamedTuple):
    """The integers that a field may hold, from `least` to `most`."""

    least: int
    most: int

    def __str__(self) -> str:
        """Describe it for an error."""
        return f"an integer from {self.least} to {self.most}"


INT32 = Range(-(2**31), 2**31 - 1)

Token = Annotated[int, Range(0, 2**31 - 1)]
"""A token id, or a position in a text."""

_PLAIN = {
    bool: ((bool,), "true or false"),
    str: ((str,), "a string"),
    float: ((int, float), "a number"),
}


def read(cls: type[T], value: Any, place: Place, *, extras: bool = False) -> T:
    """Build a dataclass from an object of its fields.

    Args:
      cls: a dataclass; its annotations say what each field must be.
      value: the object, as `load` returns it.
      place: where it is in the file.
      extras: whether the object may hold fields that the dataclass does not have.

    Raises:
      RecordError: a field is missing, unknown, or does not match its annotation.
    """
    if not isinstance(value, dict):
        raise RecordError(f"{place}: a {type(value).__name__}, wanted an object")
    hints, optional = _fields(typing.cast(Any, cls))
    for name in value:
        if not extras and name not in hints:
            raise place.error(f"holds an unknown field: {shown(name)}")
    for name in hints:
        if name not in value and name not in optional:
            raise place.missing(name)
    found = {
        name: _read(hints[name], value[name], place.field(name)) for name in hints if name in value
    }
    return cls(**found)


@functools.cache
def _fields(cls: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the annotation of each field, and the names of those with a default."""
    hints, unset = typing.get_type_hints(cls, include_extras=True), dataclasses.MISSING
    fields = dataclasses.fields(cls)
    optional = [f.name for f in fields if (f.default, f.default_factory) != (unset, unset)]
    return {field.name: hints[field.name] for field in fields}, frozenset(optional)


def _read(kind: Any, value: Any, place: Place) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if (within := _range_of(kind)) is not None:
        return _integers([value], within, lambda _: place)[0]
    if kind in _PLAIN:
        accepted, wanted = _PLAIN[kind]
        if type(value) not in accepted:
            raise place.wrong(value, wanted)
        return kind(value)
    if kind is Any:
        return _plain(value, place)
    if kind is StoredArray:
        return value if isinstance(value, StoredArray) else _nested(value, place)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[_read(Literal[*(each.name.lower() for each in kind)], value, place).upper()]
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in arguments):
            raise place.wrong(value, f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin in (typing.Union, types.UnionType):
        (other,) = [each for each in arguments if each is not types.NoneType]
        return None if value is None else _read(other, value, place)
    if origin is tuple:
        return _tuple(arguments, value, place)
    if origin is dict:
        if not isinstance(value, dict):
            raise place.wrong(value, "an object")
        return {name: _read(arguments[1], v, place.field(name)) for name, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return read(typing.cast(type, kind), value, place)
    raise TypeError(f"{place.path}: no reader for {kind}")  # an annotation here, not in the file


def _range_of(kind: Any) -> Range | None:
    """Return the integers that an annotation allows; None if it is not one of integers."""
    if typing.get_origin(kind) is Annotated:
        return typing.get_args(kind)[1]
    return Range(0, 2**63 - 1) if kind is int else None


def _integers(values: list[Any], within: Range, at: Any) -> tuple[int, ...]:
    least, most = within
    for index, value in enumerate(values):
        if type(value) is not int or not least <= value <= most:
            raise at(index).wrong(value, str(within))
    return tuple(values)


def _tuple(kinds: Sequence[Any], value: Any, place: Place) -> tuple[Any, ...]:
    if isinstance(value, StoredArray):
        if len(value.shape) != 1 or value.shape[0] > MOST_TOKENS:
            raise place.wrong(value, f"a list, or an array of one axis of up to {MOST_TOKENS}")
        value = value.read().tolist()
    if not isinstance(value, list):
        raise place.wrong(value, "a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        if (within := _range_of(kinds[0])) is not None:
            return _integers(value, within, place.item)
        kinds = [kinds[0]] * len(value)
    if len(value) != len(kinds):
        raise place.error(f"has {len(value)} items, wanted {len(kinds)}")
    pairs = zip(kinds, value, strict=True)
    return tuple(_read(kind, item, place.item(index)) for index, (kind, item) in enumerate(pairs))


def _plain(value: Any, place: Place) -> Any:
    if isinstance(value, StoredArray):
        raise place.wrong(value, "a plain value")
    if isinstance(value, dict):
        return {name: _plain(item, place.field(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, place.item(index)) for index, item in enumerate(value)]
    return value


# --- arrays


def _nested(value: Any, place: Place) -> StoredArray:
    """Describe nested lists of numbers as an array."""
    shape: list[int] = []
    level = [value]
    while level and isinstance(level[0], list):
        size = len(level[0])
        for item in level:
            if not isinstance(item, list) or len(item) != size:
                got = f"{len(item)} items" if isinstance(item, list) else shown(item)
                raise place.error(
                    f"is inhomogeneous: {got} along axis {len(shape)}, wanted {size} items"
                )
        shape.append(size)
        level = list(itertools.chain.from_iterable(level))
    for item in level:
        if type(item) not in (int, float):
            raise place.wrong(item, "numbers")

    def numbers() -> np.ndarray:
        dtype = np.float64 if any(type(item) is float for item in level) else np.int64
        try:
            return np.array(level, dtype).reshape(shape)
        except OverflowError as error:
            raise place.error("holds a number that is too large") from error

    return StoredArray(dtype="", shape=tuple(shape), read=numbers)


def assert_shape(array: StoredArray, shape: Sequence[int], place: Place) -> None:
    """Compare the shape that a file declares with the one that its other fields require."""
    if array.shape != tuple(shape):
        raise place.error(f"has shape {shown(array.shape)}, wanted {tuple(shape)}")


def axes_of(array: StoredArray, most: Sequence[int], place: Place) -> tuple[int, ...]:
    """Return the shape of an array that decides other sizes, each axis from 1 to its greatest."""
    sizes = array.shape
    if len(sizes) != len(most) or any(not 1 <= n <= m for n, m in zip(sizes, most, strict=True)):
        raise place.error(
            f"has shape {shown(sizes)}, wanted an array of rank {len(most)} with axes of 1 "
            f"to {' and '.join(map(str, most))}"
        )
    return sizes


def numbers(
    array: StoredArray, shape: Sequence[int], place: Place, within: Range | None = None
) -> np.ndarray:
    """Read an array of a known shape: float32, or int32 if `within` says which integers.

    Raises:
      RecordError: it has another shape, another type, or a number out of range.
    """
    assert_shape(array, shape, place)
    given = array.read()
    if given.dtype.kind not in ("fiu" if within is None else "iu"):
        wanted = "numbers" if within is None else "32-bit integers"
        raise place.error(f"holds {given.dtype}, wanted {wanted}")
    with np.errstate(over="ignore", under="ignore"):
        found = given.astype(np.float32 if within is None else np.int32)
    if within is None:
        is_valid = np.isfinite(found)
    else:
        is_valid = (given >= within.least) & (given <= within.most)
    if not is_valid.all():
        at = np.unravel_index(int(np.argmin(is_valid)), given.shape)
        for index in at:
            place = place.item(int(index))
        raise place.error(f"is {given[at]}, wanted {within or 'a number finite in float32'}")
    return found
