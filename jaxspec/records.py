"""One versioned file format, and one writer, for all that is kept: rounds, snapshots, experiments.

A file holds its schema, what kind of thing it is, and a tree of plain values: dictionaries, lists,
strings, numbers, None, and numpy arrays. As JSON it is readable, with float32 numbers written such
that they read back bit for bit; as npz the arrays are stored as they are.

A JSON record written elsewhere is an object of "schema", "kind" and "content"; an array in it is
`{"$array": "float32", "shape": [2, 3], "data": [...]}`, the numbers in row-major order.
"""

import io
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SCHEMA = "jaxspec/1"
"""Name and version of the format. A reader refuses any other."""

_HEADER = "header"
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


class RecordError(ValueError):
    """A file is not a record of the wanted kind and version, or what it holds is malformed."""


def save(path: str | Path, kind: str, content: Any) -> None:
    """Write a record; a file that exists is replaced only once the new one is whole.

    Args:
      path: ends in .json or .npz, which decides the form.
      kind: what the content is, "rounds" for instance; `load` asks for it.
      content: a tree of plain values and numpy arrays (bool, integers, float16 to float64). Floats
        must be finite. Tuples read back as lists, numpy scalars as plain numbers.

    Raises:
      RecordError: the suffix is another, or a value cannot be stored; the message says where it is.
      OSError: the file cannot be written.
    """
    path = Path(path)
    if _is_npz(path):
        arrays: dict[str, np.ndarray] = {}

        def put_aside(array: np.ndarray) -> dict[str, str]:
            name = f"array{len(arrays)}"
            arrays[name] = array
            return {"$npz": name}

        header = _document(kind, _encode(content, kind, put_aside))
        parts: dict[str, Any] = {_HEADER: np.frombuffer(header, np.uint8), **arrays}
        replace_files({path: lambda file: np.savez_compressed(file, **parts)})
    else:
        text = _document(kind, _encode(content, kind, _array_to_plain))
        replace_files({path: lambda file: file.write(text)})


def load(path: str | Path, kind: str) -> Any:
    """Read a record back.

    Args:
      path: a file written by `save`.
      kind: the kind that is wanted.

    Returns:
      The content, its tuples as lists.

    Raises:
      RecordError: the file is no record, of another version, or of another kind.
      OSError: it cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/a.json", "rows", {"model": "coin", "row": np.float32([0.1, 0.9])})
    ...     load(f"{folder}/a.json", "rows")
    {'model': 'coin', 'row': array([0.1, 0.9], dtype=float32)}
    """
    document, arrays = _read(Path(path))
    if document["kind"] != kind:
        raise RecordError(f"{path}: holds {document['kind']!r}, wanted {kind!r}")
    return _decode(document["content"], arrays, f"{path}: {kind}")


def kind_of(path: str | Path) -> str:
    """Return what kind of record a file holds.

    Raises:
      RecordError: the file is no record, or of another version.
      OSError: it cannot be read.
    """
    return _read(Path(path))[0]["kind"]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a file and check that it is a whole record of this version."""
    is_npz = _is_npz(path)
    raw = path.read_bytes()
    arrays: dict[str, np.ndarray] = {}
    try:
        if is_npz:
            with np.load(io.BytesIO(raw), allow_pickle=False) as data:
                arrays = {name: np.asarray(data[name]) for name in data.files}
            raw = arrays.pop(_HEADER).tobytes()
        document = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except Exception as error:  # at damaged bytes zip, zlib, npy and json raise a dozen kinds
        raise RecordError(f"{path}: not a record: {error}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise RecordError(f"{path}: not a record: it names no schema")
    if document["schema"] != SCHEMA:
        raise RecordError(f"{path}: schema is {document['schema']!r}, this reader knows {SCHEMA!r}")
    if not isinstance(document.get("kind"), str) or "content" not in document:
        raise RecordError(f"{path}: not a whole record: it needs a kind and a content")
    return document, arrays


def _is_npz(path: Path) -> bool:
    if path.suffix not in (".json", ".npz"):
        raise RecordError(f"{path}: a record is a .json or a .npz file")
    return path.suffix == ".npz"


def _document(kind: str, content: Any) -> bytes:
    return _to_json({"schema": SCHEMA, "kind": kind, "content": content}).encode()


def _encode(value: Any, where: str, store: Callable[[np.ndarray], Any]) -> Any:
    if type(value) is np.ndarray:
        _assert_storable(value, where)
        return store(value)
    if isinstance(value, np.generic) and value.dtype.name in _DTYPES:
        value = value.item()
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or name.startswith("$") or not _is_unicode(name):
                raise RecordError(f"{where}: a key must be a plain string, not {name!r}")
        return {name: _encode(item, f"{where}.{name}", store) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]", store) for i, item in enumerate(value)]
    if isinstance(value, str) and not _is_unicode(value):
        raise RecordError(f"{where}: {value!r} is not valid Unicode")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: {value} is not finite")
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    raise RecordError(
        f"{where}: a {type(value).__name__} is neither a plain value nor a numpy array"
    )


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _assert_storable(array: np.ndarray, where: str) -> None:
    if array.dtype.name not in _DTYPES:
        raise RecordError(f"{where}: an array of {array.dtype} cannot be stored")
    if not np.isfinite(array).all():
        at = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
        raise RecordError(f"{where}: entry {list(at)} is {array[at]}, not finite")


def _array_to_plain(array: np.ndarray) -> dict[str, Any]:
    return {"$array": array.dtype.name, "shape": list(array.shape), "data": array.ravel().tolist()}


def _decode(value: Any, arrays: dict[str, np.ndarray], where: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: a number is too large")
    if not isinstance(value, dict):
        return value
    if "$npz" not in value and "$array" not in value:
        return {name: _decode(item, arrays, f"{where}.{name}") for name, item in value.items()}
    try:
        array = arrays[value["$npz"]] if "$npz" in value else _plain_to_array(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{where}: not an array: {error}") from error
    _assert_storable(array, where)
    return array


def _plain_to_array(plain: dict[str, Any]) -> np.ndarray:
    dtype, data, shape = plain["$array"], plain["data"], plain["shape"]
    if dtype not in _DTYPES:
        raise ValueError(f"{dtype!r} is none of {', '.join(sorted(_DTYPES))}")
    with np.errstate(over="ignore"):  # an infinity is refused by its place
        array = np.array(data, dtype)
    # Floats may be rounded to their type; whole numbers, which numpy 1 wraps, and truth values not.
    wanted = {float, int} if array.dtype.kind == "f" else {type(array.dtype.type(0).item())}
    is_exact = array.dtype.kind == "f" or array.tolist() == data
    if not is_exact or not {type(item) for item in data} <= wanted:
        raise ValueError(f"its data must be {dtype} numbers in one list")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape {shape} must be sizes")
    return array.reshape(shape)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _to_json(value: Any, indent: str = "") -> str:
    """Write JSON with one line for what holds no further structure, arrays among that."""
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


def replace_files(writers: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Write files beside their places and move them there once all are written; a link stays one."""
    parts: dict[Path, Path] = {}
    try:
        for place, write in writers.items():
            path = Path(os.path.realpath(place))
            if path.is_dir():
                raise IsADirectoryError(f"{path} is a directory, not a file to replace")
            part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
            parts[part] = path
            with part.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, part)
        for part, path in parts.items():
            os.replace(part, path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
