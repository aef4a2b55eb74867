"""The header of a GGUF file, read within bounds.

A file is untrusted: each length and count is compared with the bytes that are left before anything of
that size is made, so that reading takes time and memory in proportion to the file. Versions 2 and 3:
magic, version, tensor count, key count, the keys with their values, the tensors' names, shapes, types
and offsets, padding, the tensors' data.

References:
  GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.models.load.fields import CheckpointError, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 has lengths of 32 bits
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 256  # more would only be seen in a damaged file, and in its error
_STRING, _ARRAY = 8, 9
_SCALARS = {
    **dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    **dict(enumerate(("<u8", "<i8", "<f8"), start=10)),
}
"""The number type of each value type except strings and arrays."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]  # outermost axis first, each at least 1
    kind: int  # its type, as in `gguf.GGMLQuantizationType`
    begin: int  # first byte of its data in the file
    size: int  # bytes of its data


def read_header(
    path: object, data: np.ndarray, sizes: Mapping[int, tuple[int, int]]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Read what a file says before its data.

    Args:
      path: the file, for messages.
      data: uint8, its bytes.
      sizes: for each tensor type (entries of a block, bytes of a block).

    Returns:
      The metadata, a string that is not UTF-8 as bytes, and the tensors by name. The bytes of each
      tensor are within the file and belong to no other.
    """
    cursor = _Cursor(path, data)
    if bytes(cursor.take(4, "its first bytes")) != _MAGIC:
        raise CheckpointError(path, f"not a GGUF file: it does not begin with {_MAGIC!r}")
    version = cursor.number("<u4", "version")
    if version not in _VERSIONS:
        order = " (its bytes are in big-endian order)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(path, f"GGUF version is {version}{order}; this package reads 2, 3")
    tensor_count = cursor.count("tensor_count", 24)
    values: dict[str, Any] = {}
    for index in range(cursor.count("kv_count", 13)):
        key = cursor.name(f"key {index}")
        if key in values:
            raise CheckpointError(path, f"key {key} is there twice")
        values[key] = cursor.value(key)
    listed = [cursor.tensor(f"tensor {index}") for index in range(tensor_count)]
    step = values.get("general.alignment", 32)
    if type(step) is not int or step < 1 or step & (step - 1):
        raise CheckpointError(path, f"general.alignment is {shown(step)}, must be a power of two")
    start = at = -(-cursor.at // step) * step
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in listed:
        tensor = f"{path}: tensor {name}"
        if name in tensors:
            raise CheckpointError(tensor, "it is there twice")
        if kind not in sizes:
            raise CheckpointError(tensor, f"its type {kind} is not one of the gguf library")
        entries, width = sizes[kind]
        if shape[-1] % entries:
            raise CheckpointError(tensor, f"{shape[-1]} entries a row, not a multiple of {entries}")
        if start + offset != at:
            raise CheckpointError(
                tensor, f"offset {offset}, but the data before ends at {at - start}"
            )
        size = math.prod(shape) // entries * width
        if at + size > len(data):
            raise CheckpointError(tensor, f"shape {shape} reaches beyond the file's end")
        tensors[name] = StoredTensor(name, shape, kind, at, size)
        at += -(-size // step) * step
    return values, tensors


class _Cursor:
    """Reads one value after another, none beyond the end."""

    def __init__(self, path: object, data: np.ndarray) -> None:
        self.path = path
        self.data = np.asarray(data).data
        self.at = 0

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(self.path, reason)

    def take(self, count: int, what: str) -> memoryview:
        left = len(self.data) - self.at
        if count > left:
            raise self.error(f"{what} takes {count} bytes, and {left} are left of the file")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, dtype: str, what: str) -> Any:
        return self.numbers(dtype, 1, what)[0]

    def numbers(self, dtype: str, count: int, what: str) -> list[Any]:
        taken = self.take(count * np.dtype(dtype).itemsize, what)
        if dtype == "?" and any(byte > 1 for byte in taken):
            raise self.error(f"{what} has a truth value other than 0 or 1")
        return np.frombuffer(taken, dtype).tolist()

    def count(self, what: str, least: int) -> int:
        """Return how many things follow, each of at least `least` bytes."""
        count = int.from_bytes(self.take(8, what), "little")
        if count * least > len(self.data) - self.at:
            raise self.error(f"{what} is {count}, more than the rest of the file can hold")
        return count

    def string(self, what: str) -> str | bytes:
        """Return a string; bytes where it is not UTF-8, for keys that nothing reads."""
        found = bytes(self.take(self.count(f"length of {what}", 1), what))
        try:
            return found.decode()
        except UnicodeDecodeError:
            return found

    def name(self, what: str) -> str:
        found = self.string(what)
        if isinstance(found, bytes) or len(found) > _LONGEST_NAME:
            wanted = f"UTF-8 of at most {_LONGEST_NAME} characters"
            raise self.error(f"name of {what} is {shown(found)}, must be {wanted}")
        return found

    def value(self, key: str) -> Any:
        """Return a value: a number, a bool, a string, or a list of these."""
        kind, count = self.number("<u4", f"type of {key}"), 1
        if is_list := kind == _ARRAY:
            kind = self.number("<u4", f"type of the items of {key}")
            count = self.count(f"number of items of {key}", 8 if kind == _STRING else 1)
        if kind == _STRING:
            items: list[Any] = [self.string(key) for _ in range(count)]
        elif kind in _SCALARS:
            items = self.numbers(_SCALARS[kind], count, key)
        else:
            raise self.error(
                f"{key} is of type {kind}, must be a number, a string or a list of these"
            )
        return items if is_list else items[0]

    def tensor(self, what: str) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape, type, and offset from the start of the data."""
        name = self.name(what)
        dimensions = self.number("<u4", f"dimensions of tensor {name}")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self.error(f"tensor {name} has {dimensions} dimensions, must be 1 to 4")
        shape = tuple(reversed(self.numbers("<u8", dimensions, f"shape of {name}")))
        if 0 in shape:
            raise self.error(f"tensor {name} has shape {shape}: it is empty")
        kind = self.number("<u4", f"type of {name}")
        return name, shape, kind, self.number("<u8", f"offset of {name}")
