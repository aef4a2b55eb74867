"""Files are replaced whole or not at all, and only where a file can be."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import storage
from jaxspec.storage import RecordError, files, kind_of, load, save

each_form = pytest.mark.parametrize("form", ["json", "npz"])


@each_form
def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"x.{form}"
    save(file, "k", {"rows": np.zeros(1000)})
    before = file.read_bytes()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for step in ("fsync", "replace"):  # half-way through, and just before the end
        with monkeypatch.context() as broken:
            broken.setattr(os, step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                save(file, "k", {"rows": np.ones(1000)})
    with pytest.raises(RecordError):
        save(file, "k", {"rows": np.ones(1000), "last": object()})
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_killed_save_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    code = (
        "import os, signal, sys\nfrom jaxspec.storage import files\n"
        "def write(file):\n    file.write(b'half')\n    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.replace_file(sys.argv[1], write)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".jaxspec-")

    def meanwhile(out: Any) -> None:  # another save to the folder, before this one is complete
        save(tmp_path / "y.json", "k", 1)
        assert not left.exists()
        out.write(b"whole")

    files.replace_file(file, meanwhile)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "y.json"]
    assert file.read_bytes() == b"whole"


def test_permissions_and_links_are_kept(tmp_path: Path) -> None:
    usual, file = tmp_path / "usual", tmp_path / "x.json"
    usual.touch()
    save(file, "k", 1)
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    file.chmod(0o640)
    save(file, "k", 2)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    link = tmp_path / "latest.json"
    link.symlink_to(file)
    save(link, "k", 3)
    assert link.is_symlink()
    assert load(file, "k") == 3


@each_form
def test_a_name_as_long_as_the_file_system_allows_is_written(tmp_path: Path, form: str) -> None:
    file = tmp_path / ("x" * (255 - len(form) - 1) + f".{form}")
    save(file, "k", 1)
    assert load(file, "k") == 1
    with pytest.raises(OSError, match="too long"):
        save(tmp_path / f"x{file.name}", "k", 1)
    assert list(tmp_path.iterdir()) == [file]


def test_only_files_are_replaced_and_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.npz").symlink_to(os.devnull)
    for name, message in (
        ("pipe.json", "is a device or a pipe"),
        ("device.npz", "is a device or a pipe"),
        ("folder.json", "is a folder"),
        ("no/x.json", "there is no folder"),
        (f"{os.path.dirname(os.devnull)}/full.json", "in the folder of the devices"),
    ):
        for act in (lambda path: save(path, "k", 1), storage.destination):
            with pytest.raises(OSError, match=message):
                act(tmp_path / name)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert stat.S_ISFIFO((tmp_path / "pipe.json").stat().st_mode)
    for name, message in (
        ("pipe.json", "is a device or a pipe"),
        ("device.npz", "is a device or a pipe"),
        ("folder.json", "is a folder|Is a directory"),
        ("nothing.json", "No such file"),
    ):
        for read in (lambda path: load(path, "k"), kind_of):
            with pytest.raises(OSError, match=message) as found:
                read(tmp_path / name)
            assert found.value.filename == str(tmp_path / name)
