"""The file format of all that is stored: rounds, states, experiments.

A file holds its schema, what kind of record it is, and a tree of plain values: dictionaries, lists,
strings, numbers, None, and numpy arrays. JSON is an object of "schema", "kind" and "content"; an array
in it is `{"$array": "float32", "shape": [2, 3], "data": [...]}`, the numbers in row-major order and
such that they read back bit for bit. In npz the arrays are stored as they are.

A file is not trusted. Arrays are loaded as dtype and shape, to be compared with the other fields
before the numbers are read, so that a file cannot ask for memory that its fields do not explain.
"""

import dataclasses
import errno
import io
import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.storage.files import replace_file, wrong_name
from jaxspec.storage.place import Place, RecordError, shortened, shown

SCHEMA = "jaxspec/1"
"""Name and version of the format. A reader rejects any other."""

_MOST_DIGITS = 4000  # of an integer; Python reads at most 4300
_HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredArray:
    """An array in a file: what it declares of itself, and a function that reads its numbers.

    `read` raises `RecordError` unless they match and are finite.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def __repr__(self) -> str:
        """Type and shape."""
        return f"an array of shape {shown(self.shape)}"


def save(path: str | Path, kind: str, content: Any) -> None:
    """Write a record; an existing file is replaced only once the new one is complete.

    Args:
      path: ends in .json or .npz, which decides the form.
      kind: what the content is, "rounds" for instance; `load` asks for it.
      content: a tree of plain values and numpy arrays (bool, integers, float16 to float64). Floats
        must be finite. Tuples read back as lists, numpy scalars as plain numbers.

    Raises:
      RecordError: the suffix is another, or a value cannot be stored; the message says where it is.
      OSError: the file cannot be written.
    """
    is_npz = _is_npz(path)
    arrays: dict[str, np.ndarray] = {}

    def store(array: np.ndarray, place: Place) -> dict[str, Any]:
        if not is_npz:
            data = array.ravel().tolist()
            return {"$array": array.dtype.name, "shape": list(array.shape), "data": data}
        arrays[name := f"array{len(arrays)}"] = array
        return {"$npz": name}

    encoded = _encode(content, Place(str(path), kind), store)
    text = _to_json({"schema": SCHEMA, "kind": kind, "content": encoded}).encode()
    if is_npz:
        parts: dict[str, Any] = {"header": np.frombuffer(text, np.uint8), **arrays}
        replace_file(path, lambda file: np.savez_compressed(file, **parts))
    else:
        replace_file(path, lambda file: file.write(text))


def load(path: str | Path, kind: str) -> Any:
    """Read a record of an expected kind back: tuples as lists, each array as a `StoredArray`.

    Raises:
      RecordError: the file is not a record, of another version, or of another kind.
      OSError: it cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.json", "rows", {"model": "coin", "row": np.float32([0.1, 0.9])})
    ...     content = load(f"{folder}/a.json", "rows")
    >>> content["model"], content["row"].shape, content["row"].read()
    ('coin', (2,), array([0.1, 0.9], dtype=float32))
    """
    document, arrays = _document(path)
    if document["kind"] != kind:
        raise RecordError(f"{path}: holds {shown(document['kind'])}, wanted {kind!r}")
    return _decode(document["content"], arrays, Place(str(path), kind))


def kind_of(path: str | Path) -> str:
    """Return the kind of record in a file; raises as `load`."""
    return _document(path)[0]["kind"]


def plain(value: Any, where: str) -> Any:
    """Return plain values as they would read back; RecordError for an array and as in `save`."""

    def reject(array: np.ndarray, place: Place) -> Any:
        raise RecordError(f"{place}: an array of {array.dtype}, wanted a plain value")

    return _encode(value, Place("", where), reject)


def _is_npz(path: str | Path) -> bool:
    if wrong := wrong_name(path):
        raise RecordError(f"{shown(str(path))}: {wrong}")
    suffix = Path(path).suffix
    if suffix not in (".json", ".npz"):
        raise RecordError(f"{path}: a record is a .json or a .npz file")
    return suffix == ".npz"


# --- writing


def _encode(value: Any, place: Place, store: Callable[[np.ndarray, Place], Any]) -> Any:
    if type(value) is np.ndarray:
        _assert_storable(value, str(place))
        return store(value, place)
    if isinstance(value, np.generic) and value.dtype.name in _DTYPES:
        value = value.item()
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or name.startswith("$") or not _is_unicode(name):
                raise RecordError(f"{place}: a key must be a plain string, not {shown(name)}")
        return {name: _encode(item, place.field(name), store) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, place.item(index), store) for index, item in enumerate(value)]
    wrong = None
    if isinstance(value, str):
        wrong = None if _is_unicode(value) else f"{shown(value)} is not valid Unicode"
    elif isinstance(value, int):
        if value.bit_length() > _MOST_DIGITS * math.log2(10):
            wrong = f"an integer of more than {_MOST_DIGITS} digits"
    elif isinstance(value, float):
        wrong = None if math.isfinite(value) else f"{value} is not finite"
    elif value is not None:
        wrong = f"a {type(value).__name__} is neither a plain value nor a numpy array"
    if wrong:
        raise RecordError(f"{place}: {wrong}")
    return value


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _assert_storable(array: np.ndarray, where: str) -> None:
    if array.dtype.name not in _DTYPES:
        raise RecordError(f"{where}: an array of {array.dtype} cannot be stored")
    if not np.isfinite(array).all():
        first = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
        at = [int(index) for index in first]
        raise RecordError(f"{where}: entry {at} is {array[first]}, not finite")


def _to_json(value: Any, indent: str = "") -> str:
    """Write JSON with one line for each array and each list or dictionary without structure."""
    is_dict = isinstance(value, dict)
    items = value.values() if is_dict else value if isinstance(value, list) else ()
    if (is_dict and "$array" in value) or not any(isinstance(item, dict | list) for item in items):
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    inner = indent + " "
    lines = [_to_json(item, inner) for item in items]
    if is_dict:
        lines = [f"{_to_json(name)}: {line}" for name, line in zip(value, lines, strict=True)]
    first, last = "{}" if is_dict else "[]"
    return f"{first}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{last}"


# --- reading


def _document(path: str | Path) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    """Read a file and check that it is a complete record of this version."""
    is_npz = _is_npz(path)
    file = Path(path)
    if file.exists() and not file.is_file() and not file.is_dir():  # a folder fails when opened
        # Reading a pipe would wait, and a device may never end.
        raise OSError(errno.EINVAL, "is a device or a pipe, not a file", str(path))
    raw = file.read_bytes()
    arrays: dict[str, StoredArray] = {}
    try:
        if is_npz:
            arrays, raw = _open_npz(raw, str(path))
        document = json.loads(raw.decode(), parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError as error:
        raise RecordError(f"{path}: not a record: nested too deep to be read") from error
    except Exception as error:  # zip, zlib, npy and json raise a dozen types for damaged bytes
        raise RecordError(f"{path}: not a record: {shortened(str(error))}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise RecordError(f"{path}: not a record: it names no schema")
    if document["schema"] != SCHEMA:
        schema = shown(document["schema"])
        raise RecordError(f"{path}: schema is {schema}, this reader knows {SCHEMA!r}")
    if not isinstance(document.get("kind"), str) or "content" not in document:
        raise RecordError(f"{path}: not a whole record: it needs a kind and a content")
    return document, arrays


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"a dictionary holds {shown(name)} twice")
        found[name] = value
    return found


def _open_npz(raw: bytes, path: str) -> tuple[dict[str, StoredArray], bytes]:
    """List the arrays of an npz without reading them, and read its header."""
    archive = zipfile.ZipFile(io.BytesIO(raw))
    arrays: dict[str, StoredArray] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in arrays:
            raise ValueError(f"it holds {shown(name)} twice")
        arrays[name] = _member(archive, member, shown(name), path)
    if "header" not in arrays:
        raise ValueError("'header' is missing")
    header = arrays.pop("header")
    size = math.prod(header.shape)
    # The text of a record compresses to a hundredth at best (a state of many equal rounds), and the
    # values parsed from it take tens of times its memory: what grows more is not a record.
    if header.dtype != "uint8" or size > 2**20 + 300 * len(raw):
        raise ValueError(f"its header is {size} numbers of type {header.dtype}")
    return arrays, header.read().tobytes()


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, path: str) -> StoredArray:
    """Read the declared type and shape of an array and compare them with the size of its data."""
    if (method := member.compress_type) not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by method {method}")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADER_READERS:
            raise ValueError(f"{name} is an array of version {version}")
        shape, _, dtype = _HEADER_READERS[version](file)
        size = member.file_size - file.tell()
    if dtype.name not in _DTYPES:
        raise ValueError(f"{name} is an array of {dtype}, and allow_pickle=False")
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name} has shape {shown(shape)}, and {size} bytes of {dtype}")

    def read() -> np.ndarray:
        with archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return _stored(dtype.name, shape, read, f"{path}: {name}")


def _decode(value: Any, arrays: dict[str, StoredArray], place: Place) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays, place.item(index)) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{place}: a number is too large")
    if not isinstance(value, dict):
        return value
    if "$npz" not in value and "$array" not in value:
        return {name: _decode(item, arrays, place.field(name)) for name, item in value.items()}
    try:
        # Removed: if many places named one array, each would hold a copy.
        return arrays.pop(value["$npz"]) if "$npz" in value else _from_json(value, str(place))
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{place}: not an array: {shortened(str(error))}") from error


def _from_json(plain: dict[str, Any], where: str) -> StoredArray:
    dtype, data, shape = plain["$array"], plain["data"], plain["shape"]
    if dtype not in _DTYPES:
        raise ValueError(f"{shown(dtype)} is none of {', '.join(sorted(_DTYPES))}")
    if type(data) is not list:
        raise ValueError(f"its data must be {dtype} numbers in one list")
    is_shape = isinstance(shape, list) and len(shape) <= 32
    if not is_shape or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape {shown(shape)} must be sizes")
    if math.prod(shape) != len(data):
        raise ValueError(f"cannot reshape {len(data)} numbers into shape {shown(shape)}")
    return _stored(dtype, shape, lambda: _numbers(data, dtype).reshape(shape), where)


def _numbers(data: list[Any], dtype: str) -> np.ndarray:
    # Floats may be rounded to their type; integers, which numpy 1 wraps, and truth values may not.
    kind = np.dtype(dtype).kind
    wanted = {float, int} if kind == "f" else {bool} if kind == "b" else {int}
    if not {type(item) for item in data} <= wanted:
        raise ValueError(f"its data must be {dtype} numbers in one list")
    with np.errstate(over="ignore"):  # an infinity is reported with its place
        array = np.array(data, dtype)
    if kind != "f" and array.tolist() != data:
        raise ValueError(f"its data must be {dtype} numbers")
    return array


def _stored(dtype: str, shape: Any, numbers: Callable[[], np.ndarray], where: str) -> StoredArray:
    def read() -> np.ndarray:
        try:
            array = numbers()
        except Exception as error:  # damaged bytes, values outside the type, too little memory
            raise RecordError(f"{where}: not an array: {shortened(str(error))}") from error
        _assert_storable(array, where)
        return array

    return StoredArray(dtype=dtype, shape=tuple(int(size) for size in shape), read=read)
