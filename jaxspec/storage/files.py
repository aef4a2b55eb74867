"""Files that are replaced whole or not at all."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jaxspec.storage.place import shown

try:
    import fcntl
except ImportError:  # Windows has none: parts that killed processes left are not removed there
    fcntl = None  # type: ignore[assignment]


def wrong_name(path: str | Path) -> str | None:
    """Return what is wrong with the name of a file, if anything."""
    if not str(path):
        return "the name of the file is empty"
    return "the name of a file cannot hold a NUL character" if "\0" in str(path) else None


def destination(place: str | Path) -> Path:
    """Return the path at which a file is written: where a link points, else `place`.

    Call it before long work, to check that `replace_file` will be able to write there.

    Raises:
      OSError: no file can be written there: the name is empty or too long, a folder, device or pipe
        has it, its folder is missing or not writable.
    """
    if wrong := wrong_name(place):
        raise OSError(errno.EINVAL, wrong, shown(str(place)))
    path = Path(os.path.realpath(place))
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # raises if the name is too long, or a part of it is not a folder
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file to replace", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is a device or a pipe, not a file to replace", str(path))
    if path.parent == Path(os.devnull).parent:  # its files are lost with the machine's memory
        raise OSError(errno.EINVAL, "is in the folder of the devices", str(path))
    if not path.parent.is_dir():
        folder = Path(place).parent
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {folder}", str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "the folder is not writable", str(path.parent))
    return path


def replace_file(place: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file next to its destination and move it there once it is complete.

    While it is written the file is called `.jaxspec-*.part` and is locked. If the process is killed,
    the part is left unlocked, and the next call for the same folder removes it.

    Raises:
      OSError: the file cannot be written; see `destination`. An existing one stays as it was.
    """
    path = destination(place)
    _remove_abandoned(path.parent)
    with _new_part(path.parent) as file:
        part = Path(file.name)
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, part)
            if fcntl is None:
                file.close()  # Windows cannot move an open file
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _new_part(folder: Path) -> BinaryIO:
    while True:
        file = (folder / f".jaxspec-{secrets.token_hex(8)}.part").open("xb")
        _lock(file.fileno(), wait=True)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process removed it before it was locked


def _remove_abandoned(folder: Path) -> None:
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
    """Lock an open file until it is closed; return whether that worked."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # locked by another process, or the file system has no locks
        return False
    return True
