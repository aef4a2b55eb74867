"""The header of a GGUF file, read within bounds.

A file is untrusted: each length and count is compared with the bytes that are left before anything of
that size is made, so that reading takes time and memory in proportion to the file. What is wrong is a
`CheckpointError` that names the file and the key or tensor. The layout is that of versions 2 and 3:
magic, version, tensor count, key count, the keys with their values, the tensors' names, shapes, types
and offsets, padding, the tensors' data.

References:
  GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxspec.models.load.tensors import CheckpointError, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 has lengths of 32 bits
_ALIGNMENT = "general.alignment"
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 256  # bytes; more would only be seen in a damaged file, and in its error
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""The number type of each value type but strings and arrays."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
      name: its name.
      shape: outermost axis first, each at least 1.
      kind: the number of its type, as `gguf.GGMLQuantizationType` has it.
      offset: first byte, counted from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Metadata(Mapping[str, Any]):
    """The keys of a file; strings are decoded when a key is looked up.

    Keys that nobody looks up, such as an author's name, may be in any encoding.
    """

    def __init__(self, path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
        """Take the raw values: numbers, bools, bytes for strings, and lists of these."""
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        try:
            if isinstance(value, bytes):
                return value.decode()
            if isinstance(value, list):
                return [each.decode() if isinstance(each, bytes) else each for each in value]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {key} is not UTF-8: {error}") from error
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def read_header(
    path: str | os.PathLike[str], data: np.ndarray, sizes: Mapping[int, tuple[int, int]]
) -> tuple[Mapping[str, Any], dict[str, StoredTensor]]:
    """Read what a file says before its data.

    Args:
      path: the file, for messages.
      data: uint8, its bytes.
      sizes: for each tensor type (entries of a block, bytes of a block).

    Returns:
      The metadata, and the tensors by name. The bytes of each tensor lie within the file and belong
      to no other.

    Raises:
      CheckpointError: it is not a GGUF file, is cut short, or contradicts itself.
    """
    cursor = _Cursor(path, data)
    if bytes(cursor.take(4, "its first bytes")) != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file: it does not begin with {_MAGIC!r}")
    version = cursor.number("<u4", "version")
    if version not in _VERSIONS:
        order = " (its bytes are in big-endian order)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{path}: GGUF version is {version}{order}; this package reads 2, 3")
    tensor_count = cursor.count("tensor_count", least=24)
    key_count = cursor.count("kv_count", least=13)
    values: dict[str, Any] = {}
    for number in range(key_count):
        key = cursor.text(f"key {number}")
        if key in values:
            raise CheckpointError(f"{path}: key {key} is there twice")
        values[key] = cursor.value(key)
    found = [cursor.tensor(f"tensor {number}") for number in range(tensor_count)]
    alignment = values.get(_ALIGNMENT, 32)
    is_whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not is_whole or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: {_ALIGNMENT} is {shown(alignment)}, not a power of two")
    return _Metadata(path, values), _placed(path, found, cursor.at, len(data), alignment, sizes)


def _placed(
    path: str | os.PathLike[str],
    tensors: list[StoredTensor],
    end: int,
    size: int,
    alignment: int,
    sizes: Mapping[int, tuple[int, int]],
) -> dict[str, StoredTensor]:
    """Check types and places: the data of each tensor follows that of the one before."""
    start = -(-end // alignment) * alignment
    at = 0
    placed: dict[str, StoredTensor] = {}
    for tensor in tensors:
        where = f"{path}: tensor {tensor.name}"
        if tensor.name in placed:
            raise CheckpointError(f"{where} is there twice")
        if tensor.kind not in sizes:
            raise CheckpointError(f"{where} is of type {tensor.kind}, which the gguf library lacks")
        block, width = sizes[tensor.kind]
        if tensor.shape[-1] % block:
            raise CheckpointError(
                f"{where} has rows of {tensor.shape[-1]} entries, not whole blocks of {block}"
            )
        count = 1
        for length in tensor.shape:  # Python's integers: no product is too large
            count *= length
        if tensor.offset != at:
            raise CheckpointError(
                f"{where} has offset {tensor.offset}, where the data before it ends at {at}"
            )
        place = start + at
        if place + count // block * width > size:
            raise CheckpointError(f"{where} of shape {tensor.shape} reaches beyond the file's end")
        placed[tensor.name] = dataclasses.replace(tensor, offset=place)
        at += -(-(count // block * width) // alignment) * alignment
    return placed


class _Cursor:
    """Reads one value after another, none beyond the end."""

    def __init__(self, path: str | os.PathLike[str], data: np.ndarray) -> None:
        self.path = path
        self.data = np.asarray(data).data
        self.at = 0

    def take(self, count: int, what: str) -> memoryview:
        """Return the next bytes."""
        left = len(self.data) - self.at
        if count > left:
            raise CheckpointError(
                f"{self.path}: {what} takes {count} bytes, and {left} are left of the file"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str, what: str) -> Any:
        """Return a number of a type that numpy names so."""
        dtype = np.dtype(kind)
        (value,) = np.frombuffer(self.take(dtype.itemsize, what), dtype).tolist()
        return value

    def count(self, what: str, least: int) -> int:
        """Return how many things follow, each of at least so many bytes."""
        (count,) = struct.unpack("<Q", self.take(8, what))
        if count * least > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path}: {what} is {count}, more than the rest of the file can hold"
            )
        return count

    def string(self, what: str) -> bytes:
        return bytes(self.take(self.count(f"length of {what}", least=1), what))

    def text(self, what: str) -> str:
        found = self.string(what)
        if len(found) > _LONGEST_NAME:
            raise CheckpointError(
                f"{self.path}: name of {what} has {len(found)} bytes, more than {_LONGEST_NAME}"
            )
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: name of {what} is not UTF-8: {error}") from error

    def value(self, key: str) -> Any:
        """Return a value: a number, a bool, bytes, or a list of these."""
        kind = self.number("<u4", f"type of {key}")
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            return self.scalars(kind, 1, key)[0]
        inner = self.number("<u4", f"type of the items of {key}")
        if inner == _STRING:
            count = self.count(f"number of items of {key}", least=8)
            return [self.string(f"{key}[{index}]") for index in range(count)]
        return self.scalars(inner, self.count(f"number of items of {key}", least=1), key)

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        """Return numbers or bools."""
        if kind not in _SCALARS:
            raise CheckpointError(
                f"{self.path}: {key} is of type {kind}, not a number, string or a list of these"
            )
        dtype = np.dtype(_SCALARS[kind])
        taken = self.take(count * dtype.itemsize, key)
        if dtype == np.bool_ and any(byte > 1 for byte in taken):
            raise CheckpointError(f"{self.path}: {key} has a truth value other than 0 or 1")
        return np.frombuffer(taken, dtype).tolist()

    def tensor(self, what: str) -> StoredTensor:
        """Return what is said of a tensor, its offset as stored: from the start of the data."""
        name = self.text(what)
        dimensions = self.number("<u4", f"dimensions of tensor {name}")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise CheckpointError(
                f"{self.path}: tensor {name} has {dimensions} dimensions, not 1 to "
                f"{_MOST_DIMENSIONS}"
            )
        lengths = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions, f"shape of {name}"))
        if 0 in lengths:
            raise CheckpointError(f"{self.path}: tensor {name} has shape {lengths}: it is empty")
        kind, offset = struct.unpack("<IQ", self.take(12, f"type and offset of {name}"))
        return StoredTensor(name=name, shape=lengths[::-1], kind=kind, offset=offset)
