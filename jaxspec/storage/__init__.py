"""Records in JSON and npz files: `save`, `load`, and `read` into dataclasses, checked by field."""

from jaxspec.storage.files import destination
from jaxspec.storage.place import Place, RecordError, shortened, shown
from jaxspec.storage.records import SCHEMA, StoredArray, kind_of, load, plain, save
from jaxspec.storage.typed import INT32, Range, Token, assert_shape, axes_of, numbers, read

__all__ = (
    "INT32",
    "SCHEMA",
    "Place",
    "Range",
    "RecordError",
    "StoredArray",
    "Token",
    "assert_shape",
    "axes_of",
    "destination",
    "kind_of",
    "load",
    "numbers",
    "plain",
    "read",
    "save",
    "shortened",
    "shown",
)
