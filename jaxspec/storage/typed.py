"""What a file holds, built into dataclasses: every field is checked against its annotation first.

One reader serves every kind of record. It knows these annotations: bool, int, float, str, None and
unions with it, `Literal`, enums (a member's name in lower case), tuples, dictionaries with string
keys, dataclasses, `Any` (plain values), `StoredArray`, and `Annotated[int, Range(...)]`. An int
without a range is a count, from 0 on.

Arrays are compared by shape before their numbers are read, so that a file cannot ask for memory that
its other fields do not account for.
"""

import dataclasses
import enum
import functools
import itertools
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from jaxspec.storage.files import RecordError, StoredArray, shortened, shown

T = TypeVar("T")

MOST_TOKENS = 1 << 22
"""Tokens of one text that is stored as an array."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The integers that a field may hold.

    Attributes:
      least: the least.
      most: the greatest.
    """

    least: int
    most: int

    @property
    def words(self) -> str:
        """Say it in an error."""
        return f"a whole number from {self.least} to {self.most}"


COUNT = Range(0, 2**63 - 1)
TOKEN = Range(0, 2**31 - 1)
INT32 = Range(-(2**31), 2**31 - 1)

Token = Annotated[int, TOKEN]
"""A token id, or a position in a text."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in a file a value is, for errors.

    Attributes:
      source: the file, and which of its records.
      path: the field in it; empty for the record itself.
    """

    source: str
    path: str = ""

    def __str__(self) -> str:
        """Name it."""
        return f"{self.source}: {shortened(self.path)}" if self.path else self.source

    def field(self, name: str) -> "Place":
        """Return the place of a field of this one."""
        name = name if len(name) <= 80 else shown(name)
        return Place(self.source, f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> "Place":
        """Return the place of an item of this list."""
        return Place(self.source, f"{self.path}[{index}]")

    def error(self, what: str) -> RecordError:
        """Return the error that says what is wrong here."""
        return RecordError(f"{self} {what}" if self.path else f"{self}: {what}")

    def missing(self, name: str) -> RecordError:
        """Return the error for a field that is not there."""
        return RecordError(f"{self}: {name!r} is missing")

    def wrong(self, value: Any, wanted: str) -> RecordError:
        """Return the error that shows a value and says what must be there."""
        if isinstance(value, StoredArray):
            given = f"an array of shape {shown(value.shape)}"
        else:
            given = f"a {type(value).__name__}" if isinstance(value, dict | list) else shown(value)
        return self.error(f"is {given}, wanted {wanted}")


def build(cls: type[T], value: Any, place: Place, *, extras: bool = False) -> T:
    """Build a dataclass from an object of its fields.

    Args:
      cls: a dataclass; its annotations say what each field must be.
      value: what the file holds.
      place: where.
      extras: whether the object may hold fields that the dataclass has not.

    Raises:
      RecordError: a field is missing, not known, or not what its annotation says.
    """
    if not isinstance(value, dict):
        raise RecordError(f"{place}: a {type(value).__name__}, wanted an object")
    kinds = _kinds(typing.cast(Any, cls))
    strange = [] if extras else [name for name in value if name not in kinds]
    if strange:
        raise place.error(f"holds a field that is not known here: {shown(strange[0])}")
    found = {}
    for name, (kind, is_optional) in kinds.items():
        if name in value:
            found[name] = read(kind, value[name], place.field(name))
        elif not is_optional:
            raise place.missing(name)
    return cls(**found)


@functools.cache
def _kinds(cls: Any) -> Mapping[str, tuple[Any, bool]]:
    """Return the annotation of each field, and whether it may be left out."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: (
            hints[field.name],
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    }


def read(kind: Any, value: Any, place: Place) -> Any:
    """Check a value against an annotation and return what it stands for.

    Raises:
      RecordError: it is something else.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if (within := _range_of(kind)) is not None:
        return _integer(value, within, place)
    if kind is float:
        if type(value) not in (int, float):
            raise place.wrong(value, "a number")
        return float(value)
    if kind in (bool, str):
        if type(value) is not kind:
            raise place.wrong(value, "true or false" if kind is bool else "a string")
        return value
    if kind is Any:
        _assert_plain(value, place)
        return value
    if kind is StoredArray:
        return value if isinstance(value, StoredArray) else _listed(value, place)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        names = [each.name.lower() for each in kind]
        return kind[read(Literal[*names], value, place).upper()]
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in arguments):
            raise place.wrong(value, f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin in (typing.Union, types.UnionType):
        (other,) = [each for each in arguments if each is not types.NoneType]
        return None if value is None else read(other, value, place)
    if origin is tuple:
        return _tuple(arguments, value, place)
    if origin is dict:
        if not isinstance(value, dict):
            raise place.wrong(value, "an object")
        return {name: read(arguments[1], v, place.field(name)) for name, v in value.items()}
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, place)
    raise TypeError(f"{place.path}: no reader for {kind}")  # an annotation of ours, not of the file


def _integer(value: Any, within: Range, place: Place) -> int:
    if type(value) is not int or not within.least <= value <= within.most:
        raise place.wrong(value, within.words)
    return value


def _range_of(kind: Any) -> Range | None:
    """Return the integers that an annotation allows; None if it is not one of integers."""
    if typing.get_origin(kind) is Annotated:
        return typing.get_args(kind)[1]
    return COUNT if kind is int else None


def _integers_of(values: list[Any], within: Range, place: Place) -> tuple[int, ...]:
    """Return a list of integers as a tuple; a text may have millions."""
    least, most = within.least, within.most
    for index, value in enumerate(values):
        if type(value) is not int or not least <= value <= most:
            raise place.item(index).wrong(value, within.words)
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
            return _integers_of(value, within, place)
        kinds = [kinds[0]] * len(value)
    if len(value) != len(kinds):
        raise place.error(f"has {len(value)} items, wanted {len(kinds)}")
    pairs = zip(kinds, value, strict=True)
    return tuple(read(kind, item, place.item(index)) for index, (kind, item) in enumerate(pairs))


def _assert_plain(value: Any, place: Place) -> None:
    if isinstance(value, StoredArray):
        raise place.wrong(value, "a plain value")
    if isinstance(value, dict):
        for name, item in value.items():
            _assert_plain(item, place.field(name))
    if isinstance(value, list):
        for index, item in enumerate(value):
            _assert_plain(item, place.item(index))


# --- arrays


def _listed(value: Any, place: Place) -> StoredArray:
    """Take nested lists of numbers for an array, its shape that of the first list of each level."""
    shape: list[int] = []
    first = value
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else 0
    if type(first) not in (int, float):
        raise place.wrong(first, "numbers")

    def numbers() -> np.ndarray:
        level = [value]
        for axis, size in enumerate(shape):
            ragged = [item for item in level if not isinstance(item, list) or len(item) != size]
            if ragged:
                got = f"{len(ragged[0])} items" if isinstance(ragged[0], list) else shown(ragged[0])
                raise place.error(f"is inhomogeneous: {got} along axis {axis}, wanted {size} items")
            level = list(itertools.chain.from_iterable(level))
        kinds = {type(item) for item in level}
        if not kinds <= {int, float}:
            strange = next(item for item in level if type(item) not in (int, float))
            raise place.wrong(strange, "numbers")
        try:
            return np.array(level, np.float64 if float in kinds else np.int64).reshape(shape)
        except OverflowError as error:
            raise place.error("holds a number that is too large") from error

    return StoredArray(dtype="", shape=tuple(shape), read=numbers)


def assert_shape(array: StoredArray, shape: Sequence[int], place: Place) -> None:
    """Compare the shape that a file declares with what its other fields ask for."""
    if array.shape != tuple(shape):
        raise place.error(f"has shape {shown(array.shape)}, wanted {tuple(shape)}")


def axes_of(array: StoredArray, most: Sequence[int], place: Place) -> tuple[int, ...]:
    """Return the sizes of an array that decides on them, each from 1 to a greatest one."""
    fits = len(array.shape) == len(most) and all(
        1 <= size <= greatest for size, greatest in zip(array.shape, most, strict=True)
    )
    if not fits:
        raise place.error(
            f"has shape {shown(array.shape)}, wanted an array of rank {len(most)} with axes of 1 "
            f"to {' and '.join(map(str, most))}"
        )
    return array.shape


def integers(
    array: StoredArray, shape: Sequence[int], place: Place, within: Range = INT32
) -> np.ndarray:
    """Read an array of integers of a known shape, int32.

    Raises:
      RecordError: it has another shape, holds other numbers than integers, or one out of the range.
    """
    assert_shape(array, shape, place)
    given = array.read()
    if given.dtype.kind not in "iu":
        raise place.error(f"holds {given.dtype}, wanted whole numbers of 32 bits")
    _assert_all((given >= within.least) & (given <= within.most), given, place, within.words)
    return given.astype(np.int32)


def numbers(array: StoredArray, shape: Sequence[int], place: Place) -> np.ndarray:
    """Read an array of numbers of a known shape, float32.

    Raises:
      RecordError: it has another shape, holds something else, or a number too large for float32.
    """
    assert_shape(array, shape, place)
    given = array.read()
    if given.dtype.kind not in "fiu":
        raise place.error(f"holds {given.dtype}, wanted numbers")
    with np.errstate(over="ignore", under="ignore"):
        single = given.astype(np.float32)
    _assert_all(np.isfinite(single), given, place, "a number finite in float32")
    return single


def _assert_all(is_fine: np.ndarray, given: np.ndarray, place: Place, wanted: str) -> None:
    if is_fine.all():
        return
    at = np.unravel_index(int(np.argmin(is_fine)), given.shape)
    for index in at:
        place = place.item(int(index))
    raise place.error(f"is {given[at]}, wanted {wanted}")
