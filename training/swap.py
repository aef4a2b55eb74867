"""Replace the files of a checkpoint together, so that no mixture of two can be loaded."""

import contextlib
import glob
import os
import pathlib
import secrets
import shutil
from collections.abc import Mapping

_NEW, _OLD = "new", "old"


def swap_files(folder: pathlib.Path, contents: Mapping[str, bytes], key: str) -> None:
    """Replace files of a folder; at every moment all of them are old or new, or one is missing.

    The new files are written under temporary names. Then the file `key`, without which the others
    are not read, is moved away first and its successor moved in last. If anything fails, the old
    files are moved back. A process that is killed leaves the old files, the new ones, or a folder
    without `key`; the next call removes its temporary files.

    Args:
      folder: an existing folder; one call at a time. Links in it stay links.
      contents: what to write, by the name of the file.
      key: one of these names.

    Raises:
      OSError: a file cannot be written or moved.
    """
    names = [name for name in contents if name != key] + [key]
    places = {name: pathlib.Path(os.path.realpath(folder / name)) for name in names}
    for place in places.values():
        if place.is_dir():
            raise IsADirectoryError(f"{place} is a directory, not a file to replace")
        for left in _left(place, _NEW):
            left.unlink()
    abandoned = [left for place in places.values() for left in _left(place, _OLD)]
    token = secrets.token_hex(4)
    new, old = (
        {name: place.with_name(_beside(place, token, what)) for name, place in places.items()}
        for what in (_NEW, _OLD)
    )
    moved_out: list[str] = []
    moved_in: list[str] = []
    try:
        for name, place in places.items():
            with new[name].open("xb") as file:
                file.write(contents[name])
                file.flush()
                os.fsync(file.fileno())
            if place.exists():
                shutil.copymode(place, new[name])
        for name in reversed(names):
            if places[name].exists():
                os.replace(places[name], old[name])
                moved_out.append(name)
                _sync(places[name].parent)
        for name in names:
            if name == key:
                _sync(places[name].parent)  # after a power failure, too, it must not come first
            os.replace(new[name], places[name])
            moved_in.append(name)
    except BaseException:
        for name in reversed(moved_in):
            places[name].unlink()
        for name in reversed(moved_out):
            os.replace(old[name], places[name])
        raise
    finally:
        for path in new.values():
            path.unlink(missing_ok=True)
    for path in (*(old[name] for name in moved_out), *abandoned):
        path.unlink()


def _left(place: pathlib.Path, what: str) -> list[pathlib.Path]:
    """Return what calls that were killed left next to a file."""
    return list(place.parent.glob(f".{glob.escape(place.name)}.*.{what}"))


def _beside(place: pathlib.Path, token: str, what: str) -> str:
    return f".{place.name}.{token}.{what}"


def _sync(folder: pathlib.Path) -> None:
    """Have the folder's entries on the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
