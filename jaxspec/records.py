"""One versioned file format, and one writer, for all that is kept: rounds, snapshots, experiments.

A file holds its schema, what kind of thing it is, and a tree of plain values: dictionaries, lists,
strings, numbers, None, and numpy arrays. As JSON it is readable, with float32 numbers written such
that they read back bit for bit; as npz the arrays are stored as they are.
"""

import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = "jaxspec/1"
"""Name and version of the format. A reader refuses any other."""

_HEADER = "header"


class RecordError(ValueError):
    """A file is not a record of the wanted kind and version, or what it holds is malformed."""


def save(path: str | Path, kind: str, content: Any) -> None:
    """Write a record; a file that exists is replaced only once the new one is whole.

    Args:
      path: ends in .json or .npz, which decides the form.
      kind: what the content is, "rounds" for instance; `load` asks for it.
      content: a tree of plain values and numpy arrays. Floats must be finite.

    Raises:
      RecordError: the suffix is another, or a value cannot be stored.
    """
    path = Path(path)
    document = {"schema": SCHEMA, "kind": kind, "content": content}
    if path.suffix == ".json":
        text = _to_json(_encode(document, kind, _array_to_plain))
        _replace(path, text.encode())
    elif path.suffix == ".npz":
        arrays: dict[str, np.ndarray] = {}

        def put_aside(array: np.ndarray, where: str) -> dict[str, str]:
            _assert_storable(array, where)
            name = f"array{len(arrays)}"
            arrays[name] = array
            return {"$npz": name}

        header = _to_json(_encode(document, kind, put_aside))
        parts: dict[str, Any] = {_HEADER: header, **arrays}
        _replace(path, lambda file: np.savez_compressed(file, **parts))
    else:
        raise RecordError(f"{path}: a record is a .json or a .npz file")


def load(path: str | Path, kind: str) -> Any:
    """Read a record back.

    Args:
      path: a file written by `save`.
      kind: the kind that is wanted.

    Raises:
      RecordError: the file is no record, of another version, or of another kind.
      OSError: it cannot be read.
    """
    path = Path(path)
    arrays: dict[str, np.ndarray] = {}
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as data:
                arrays = {name: data[name] for name in data.files}
            document = json.loads(str(arrays.pop(_HEADER)))
        else:
            document = json.loads(path.read_text(encoding="utf-8"))
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RecordError(f"{path}: not a record: {error}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise RecordError(f"{path}: not a record: it names no schema")
    if document["schema"] != SCHEMA:
        raise RecordError(f"{path}: schema is {document['schema']!r}, this reader knows {SCHEMA!r}")
    if document.get("kind") != kind:
        raise RecordError(f"{path}: holds {document.get('kind')!r}, wanted {kind!r}")
    return _decode(document.get("content"), arrays, str(path))


def kind_of(path: str | Path) -> str:
    """Return what kind of record a file holds.

    Raises:
      RecordError: the file is no record.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as data:
                return str(json.loads(str(data[_HEADER]))["kind"])
        return str(json.loads(path.read_text(encoding="utf-8"))["kind"])
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RecordError(f"{path}: not a record: {error}") from error


def _encode(value: Any, where: str, store: Any) -> Any:
    if isinstance(value, np.ndarray):
        return store(value, where)
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or name.startswith("$"):
                raise RecordError(f"{where}: a key must be a plain string, not {name!r}")
        return {name: _encode(item, f"{where}.{name}", store) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]", store) for i, item in enumerate(value)]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        _assert_storable(np.asarray(value), where)
        return value
    raise RecordError(f"{where}: a {type(value).__name__} cannot be stored")


def _assert_storable(array: np.ndarray, where: str) -> None:
    if array.dtype.kind not in "biuf":
        raise RecordError(f"{where}: an array of {array.dtype} cannot be stored")
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        raise RecordError(f"{where}: holds a number that is not finite")


def _array_to_plain(array: np.ndarray, where: str) -> dict[str, Any]:
    _assert_storable(array, where)
    return {"$array": array.dtype.name, "shape": list(array.shape), "data": array.ravel().tolist()}


def _decode(value: Any, arrays: dict[str, np.ndarray], where: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    try:
        if "$npz" in value:
            return arrays[value["$npz"]]
        if "$array" in value:
            data = np.asarray(value["data"], dtype=value["$array"])
            return data.reshape(value["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{where}: not an array: {error}") from error
    return {name: _decode(item, arrays, f"{where}.{name}") for name, item in value.items()}


def _to_json(document: Any) -> str:
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)


def _replace(path: Path, content: Any) -> None:
    """Write a file beside its place and move it there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
