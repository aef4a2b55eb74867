"""One versioned file format, and one writer, for all that is kept: rounds, snapshots, experiments.

A file holds its schema, what kind of thing it is, and a tree of plain values: dictionaries, lists,
strings, numbers, None, and numpy arrays. As JSON it is readable, with float32 numbers written such
that they read back bit for bit; as npz the arrays are stored as they are.

A JSON record written elsewhere is an object of "schema", "kind" and "content"; an array in it is
`{"$array": "float32", "shape": [2, 3], "data": [...]}`, the numbers in row-major order.

A file is not trusted. Sizes are compared before anything of that size is built: `load_lazily` gives
arrays by dtype and shape, and `jaxspec.storage.typed` checks these against the other fields before it reads
the numbers.
"""

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import reprlib
import secrets
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

try:
    import fcntl
except ImportError:  # Windows has none: files that killed processes left are not removed there
    fcntl = None  # type: ignore[assignment]

SCHEMA = "jaxspec/1"
"""Name and version of the format. A reader refuses any other."""

MOST_NESTED = 64
"""How deep lists and dictionaries may be nested in each other."""

MOST_DIGITS = 4000
"""Decimal digits of an integer; Python itself reads no more than 4300."""

_HEADER = "header"
_HEADER_GROWTH = 300
_HEADER_FLOOR = 1 << 20
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 6
_SHORT.maxlevel = 3


class RecordError(ValueError):
    """A file is not a record of the wanted kind and version, or what it holds is malformed."""


@dataclasses.dataclass(frozen=True, eq=False)
class StoredArray:
    """An array of a file, its numbers not read yet: compare the shape before they are.

    Attributes:
      dtype: name of the numbers' type as stored.
      shape: the sizes that the file declares.
      read: reads the numbers, all finite. Raises `RecordError`.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def shown(value: Any) -> str:
    """Return a value as it is shown in an error: its repr, shortened if it is long.

    >>> shown([1, "two"]), len(shown("x" * 10_000))
    ("[1, 'two']", 80)
    """
    return _SHORT.repr(value)


def shortened(text: str) -> str:
    """Return a text with its middle left out if it is too long for an error."""
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}"


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
    where = f"{path}: {kind}"
    if _is_npz(path):
        arrays: dict[str, np.ndarray] = {}

        def put_aside(array: np.ndarray, where: str) -> dict[str, str]:
            del where
            name = f"array{len(arrays)}"
            arrays[name] = array
            return {"$npz": name}

        header = _document(kind, _encode(content, where, put_aside))
        parts: dict[str, Any] = {_HEADER: np.frombuffer(header, np.uint8), **arrays}
        replace_files({path: lambda file: np.savez_compressed(file, **parts)})
    else:
        text = _document(kind, _encode(content, where, _array_to_plain))
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
    return _load(path, kind, lambda array: array.read())


def load_lazily(path: str | Path, kind: str) -> Any:
    """Read a record whose arrays are not read yet: each is a `StoredArray`.

    Args:
      path: a file written by `save`.
      kind: the kind that is wanted.

    Raises:
      RecordError: the file is no record, of another version, or of another kind.
      OSError: it cannot be read.
    """
    return _load(path, kind, lambda array: array)


def kind_of(path: str | Path) -> str:
    """Return what kind of record a file holds.

    Raises:
      RecordError: the file is no record, or of another version.
      OSError: it cannot be read.
    """
    return _read(Path(path))[0]["kind"]


def plain(value: Any, where: str) -> Any:
    """Return plain values as a record would give them back: tuples as lists, no arrays.

    Raises:
      RecordError: a value cannot be stored, or is an array; the message says where it is.
    """

    def refuse(array: np.ndarray, place: str) -> Any:
        raise RecordError(f"{place}: an array of {array.dtype} where a plain value must be")

    return _encode(value, where, refuse)


def _load(path: str | Path, kind: str, use: Callable[[StoredArray], Any]) -> Any:
    document, arrays = _read(Path(path))
    if document["kind"] != kind:
        raise RecordError(f"{path}: holds {shown(document['kind'])}, wanted {kind!r}")
    return _decode(document["content"], arrays, f"{path}: {kind}", use)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    """Read a file and check that it is a whole record of this version."""
    is_npz = _is_npz(path)
    if path.exists() and not path.is_file() and not path.is_dir():  # a folder is the system's error
        # A pipe would be waited for, and a device may never end.
        raise OSError(errno.EINVAL, "is a device or a pipe, not a file", str(path))
    raw = path.read_bytes()
    arrays: dict[str, StoredArray] = {}
    try:
        if is_npz:
            arrays, raw = _open_npz(raw, str(path))
        document = json.loads(
            raw.decode(), parse_constant=_refuse_constant, object_pairs_hook=_object
        )
    except RecursionError as error:
        raise RecordError(f"{path}: not a record: nested too deep to be read") from error
    except Exception as error:  # at damaged bytes zip, zlib, npy and json raise a dozen kinds
        raise RecordError(f"{path}: not a record: {shortened(str(error))}") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise RecordError(f"{path}: not a record: it names no schema")
    if document["schema"] != SCHEMA:
        raise RecordError(
            f"{path}: schema is {shown(document['schema'])}, this reader knows {SCHEMA!r}"
        )
    if not isinstance(document.get("kind"), str) or "content" not in document:
        raise RecordError(f"{path}: not a whole record: it needs a kind and a content")
    return document, arrays


def _open_npz(raw: bytes, path: str) -> tuple[dict[str, StoredArray], bytes]:
    """List the arrays of an npz without reading them, and read its header."""
    archive = zipfile.ZipFile(io.BytesIO(raw))
    arrays = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in arrays:
            raise ValueError(f"it holds {shown(name)} twice")
        arrays[name] = _member(archive, member, shown(name), path)
    if _HEADER not in arrays:
        raise ValueError(f"{_HEADER!r} is missing")
    header = arrays.pop(_HEADER)
    size = math.prod(header.shape)
    # Text of records shrinks to a hundredth at best (a state of many equal rounds), and numbers made
    # of it take tens of times its memory: what grows more than that is there for its size.
    if header.dtype != "uint8" or size > _HEADER_FLOOR + _HEADER_GROWTH * len(raw):
        raise ValueError(f"its header is {size} numbers of type {header.dtype}")
    return arrays, header.read().tobytes()


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, path: str) -> StoredArray:
    """Read what an array of an npz declares about itself, and hold its size against the file's."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed by method {member.compress_type}")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name} is an array of version {version}")
        is_first = version == (1, 0)
        read_header = (
            np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(file)
        size = member.file_size - file.tell()
    if dtype.name not in _DTYPES:
        raise ValueError(f"{name} is an array of {dtype}, and allow_pickle=False")
    if math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name} has shape {shown(shape)}, and {size} bytes of {dtype}")

    def read() -> np.ndarray:
        try:
            with archive.open(member) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # of the same dozen kinds, memory that is not there among them
            raise RecordError(f"{path}: {name}: not an array: {shortened(str(error))}") from error
        _assert_storable(array, f"{path}: {name}")
        return array

    return StoredArray(dtype=dtype.name, shape=tuple(int(size) for size in shape), read=read)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"a dictionary holds {shown(twice)} twice")
    return found


def _is_npz(path: Path) -> bool:
    if "\0" in str(path):
        raise RecordError(f"{shown(str(path))}: a name of a file holds no NUL character")
    if path.suffix not in (".json", ".npz"):
        raise RecordError(f"{path}: a record is a .json or a .npz file")
    return path.suffix == ".npz"


def _document(kind: str, content: Any) -> bytes:
    return _to_json({"schema": SCHEMA, "kind": kind, "content": content}).encode()


def _encode(value: Any, where: str, store: Callable[[np.ndarray, str], Any], depth: int = 0) -> Any:
    _assert_shallow(depth, where)
    if type(value) is np.ndarray:
        _assert_storable(value, where)
        return store(value, where)
    if isinstance(value, np.generic) and value.dtype.name in _DTYPES:
        value = value.item()
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or name.startswith("$") or not _is_unicode(name):
                raise RecordError(f"{where}: a key must be a plain string, not {shown(name)}")
        return {
            name: _encode(item, _below(where, name), store, depth + 1)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]", store, depth + 1) for i, item in enumerate(value)]
    if isinstance(value, str) and not _is_unicode(value):
        raise RecordError(f"{where}: {shown(value)} is not valid Unicode")
    if isinstance(value, int) and value.bit_length() > MOST_DIGITS * math.log2(10):
        raise RecordError(f"{where}: an integer of more than {MOST_DIGITS} digits")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: {value} is not finite")
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    raise RecordError(
        f"{where}: a {type(value).__name__} is neither a plain value nor a numpy array"
    )


def _assert_shallow(depth: int, where: str) -> None:
    if depth > MOST_NESTED:
        raise RecordError(f"{shortened(where)}: nested deeper than {MOST_NESTED}")


def _below(where: str, name: str) -> str:
    return f"{where}.{name if len(name) <= 80 else shown(name)}"


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _assert_storable(array: np.ndarray, where: str) -> None:
    if array.dtype.name not in _DTYPES:
        raise RecordError(f"{where}: an array of {array.dtype} cannot be stored")
    if not np.isfinite(array).all():
        first = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
        at = tuple(int(place) for place in first)
        raise RecordError(f"{where}: entry {list(at)} is {array[at]}, not finite")


def _array_to_plain(array: np.ndarray, where: str) -> dict[str, Any]:
    del where
    return {"$array": array.dtype.name, "shape": list(array.shape), "data": array.ravel().tolist()}


def _decode(
    value: Any,
    arrays: dict[str, StoredArray],
    where: str,
    use: Callable[[StoredArray], Any],
    depth: int = 0,
) -> Any:
    _assert_shallow(depth, where)
    if isinstance(value, list):
        return [_decode(v, arrays, f"{where}[{i}]", use, depth + 1) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: a number is too large")
    if not isinstance(value, dict):
        return value
    if "$npz" not in value and "$array" not in value:
        return {
            name: _decode(item, arrays, _below(where, name), use, depth + 1)
            for name, item in value.items()
        }
    try:
        # Taken out: of one array that many places name, each place would hold a copy.
        array = arrays.pop(value["$npz"]) if "$npz" in value else _from_plain(value, where)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{where}: not an array: {shortened(str(error))}") from error
    return use(array)


def _from_plain(plain: dict[str, Any], where: str) -> StoredArray:
    """Describe an array of JSON once its shape is found to be that of its data."""
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

    def read() -> np.ndarray:
        try:
            array = _numbers(data, dtype).reshape(shape)
        except (TypeError, ValueError, OverflowError) as error:
            raise RecordError(f"{where}: not an array: {shortened(str(error))}") from error
        _assert_storable(array, where)
        return array

    return StoredArray(dtype=dtype, shape=tuple(shape), read=read)


def _numbers(data: list[Any], dtype: str) -> np.ndarray:
    # Floats may be rounded to their type; whole numbers, which numpy 1 wraps, and truth values not.
    kind = np.dtype(dtype).kind
    wanted = {float, int} if kind == "f" else {bool} if kind == "b" else {int}
    if not {type(item) for item in data} <= wanted:
        raise ValueError(f"its data must be {dtype} numbers in one list")
    with np.errstate(over="ignore"):  # an infinity is refused by its place
        array = np.array(data, dtype)
    if kind != "f" and array.tolist() != data:
        raise ValueError(f"its data must be {dtype} numbers")
    return array


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


def destination(place: str | Path) -> Path:
    """Return the path that a file written to a place gets: where a link points, else the place.

    Call it before long work, to learn whether `replace_files` will be able to write there.

    Raises:
      OSError: no file can be written there: a folder, device or pipe has the name, there is no
        folder for it, it must not be written to, or the name is too long.
    """
    if "\0" in str(place):
        raise OSError(errno.EINVAL, "a name of a file holds no NUL character", shown(str(place)))
    path = Path(os.path.realpath(place))
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # raises where the name is too long, or a part of it is no folder
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file to replace", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is a device or a pipe, not a file to replace", str(path))
    if path.parent == Path(os.devnull).parent:  # files there are lost with the machine's memory
        raise OSError(errno.EINVAL, "lies in the folder of the devices", str(path))
    if not path.parent.is_dir():
        folder = Path(place).parent
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}", str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "the folder must not be written to", str(path.parent))
    return path


def replace_files(writers: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Write files beside their places and move them there once all are written; a link stays one.

    While it is written a file is called `.jaxspec-*.part` and is locked. A process that is killed
    then leaves it unlocked: the next call for the same folder removes it.

    Raises:
      OSError: a file cannot be written; see `destination`. Files of these names stay as they were.
    """
    with contextlib.ExitStack() as stack:
        parts: dict[Path, Path] = {}
        for place, write in writers.items():
            path = destination(place)
            _remove_abandoned(path.parent)
            file = stack.enter_context(_new_part(path.parent))
            part = Path(file.name)
            stack.callback(part.unlink, missing_ok=True)
            parts[part] = path
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, part)
            if fcntl is None:
                file.close()  # Windows moves no open file
        for part, path in parts.items():
            os.replace(part, path)


def _new_part(folder: Path) -> BinaryIO:
    """Open a new file that no other process takes for abandoned."""
    while True:
        file = (folder / f".jaxspec-{secrets.token_hex(8)}.part").open("xb")
        _lock(file.fileno(), wait=True)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # removed by another process before it was locked


def _remove_abandoned(folder: Path) -> None:
    """Remove the files in a folder that killed processes left half written."""
    if fcntl is None:
        return
    for part in folder.glob(".jaxspec-*.part"):
        with contextlib.suppress(OSError):  # another process was faster, or it is another user's
            handle = os.open(part, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if _lock(handle, wait=False):
                    part.unlink()
            finally:
                os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file until it is closed; say whether that worked."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # somebody holds it, or the file system knows no locks
        return False
    return True
