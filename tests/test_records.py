"""Records: what is saved comes back bit for bit, and what is no record is refused."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.storage import files as records
from jaxspec.storage.files import RecordError, kind_of, load, save

each_form = pytest.mark.parametrize("form", ["json", "npz"])

FLOAT32 = np.finfo(np.float32)
ARRAYS = {
    "float32 extremes": np.array(
        [FLOAT32.max, FLOAT32.min, FLOAT32.tiny, FLOAT32.smallest_subnormal, 1 / 3, 1 - 2**-24],
        np.float32,
    ),
    "negative zero": np.array([-0.0, 0.0], np.float32),
    "float16": np.array([65504, 6e-8, 1 / 3], np.float16),
    "float64": np.array([[1e308, 5e-324], [0.1, np.pi]]),
    "int64": np.array([-(2**63), 2**63 - 1, 2**53 + 1]),
    "uint64": np.array([2**64 - 1], np.uint64),
    "int8": np.array([-128, 127], np.int8),
    "bool": np.array([[True, False]]),
    "empty": np.zeros(0, np.float32),
    "no rows": np.zeros((0, 73), np.float32),
    "no columns": np.zeros((3, 0), np.int32),
    "scalar": np.array(0.1, np.float32),
    "rows": np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7,
    "columns first": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
    "a view": np.arange(20, dtype=np.int16)[::-3],
    "big-endian": np.array([1.5, -2.25], ">f4"),
}
PLAIN = {
    "numbers": [0, -1, 2**70, 0.1, -0.0, 5e-324, 1e308],
    "words": ["", "naïve", "統計", "🎲", "a\nb\t\"'\\", "\u2028", "\x00"],
    "naïve \x07 key": None,
    "nested": {"a": [[], {}, [[]], {"b": {"c": [True, False, None]}}]},
}


def bits(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


# --- what comes back


@each_form
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_bit_for_bit(tmp_path: Path, form: str, name: str) -> None:
    file, array = tmp_path / f"a.{form}", ARRAYS[name]
    save(file, "arrays", {"deep": [array]})
    (back,) = load(file, "arrays")["deep"]
    assert back.dtype.name == array.dtype.name
    assert back.shape == array.shape
    assert bits(back) == bits(array)


@each_form
def test_plain_values_come_back_as_they_are(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"p.{form}"
    save(file, "plain", PLAIN)
    back = load(file, "plain")
    assert repr(back) == repr(PLAIN)  # tells 1 from True and -0.0 from 0.0


@each_form
def test_tuples_come_back_as_lists_and_numpy_scalars_as_numbers(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"p.{form}"
    save(file, "plain", (np.int32(3), np.float32(0.1), np.bool_(True), (1, 2)))
    assert repr(load(file, "plain")) == repr([3, float(np.float32(0.1)), True, [1, 2]])


@each_form
def test_a_record_says_its_kind(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"k.{form}"
    save(str(file), "rounds", [])
    assert kind_of(str(file)) == "rounds"
    assert load(str(file), "rounds") == []


def test_the_json_of_a_record_is_plain_json_with_an_array_to_a_line(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    save(file, "rounds", {"é": np.float32([[0.5, 0.25]]), "list": [{"a": 1}, [1, 2]], "none": []})
    text = file.read_text(encoding="utf-8")
    assert json.loads(text) == {
        "schema": "jaxspec/1",
        "kind": "rounds",
        "content": {
            "é": {"$array": "float32", "shape": [1, 2], "data": [0.5, 0.25]},
            "list": [{"a": 1}, [1, 2]],
            "none": [],
        },
    }
    assert '  "é": {"$array": "float32", "shape": [1, 2], "data": [0.5, 0.25]},\n' in text


def test_an_array_written_by_hand_is_read(tmp_path: Path) -> None:
    array = {"$array": "float32", "shape": [2, 1], "data": [0.1, 1]}
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"schema": "jaxspec/1", "kind": "k", "content": array}))
    np.testing.assert_array_equal(load(file, "k"), np.float32([[0.1], [1]]))


# --- what cannot be stored


@each_form
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rows": [1.0, float("nan")]}, r"k\.rows\[1\]: nan is not finite"),
        ({"rows": float("inf")}, r"k\.rows: inf is not finite"),
        ([np.float32([[0, 1], [2, np.nan]])], r"k\[0\]: entry \[1, 1\] is nan, not finite"),
        ([np.array(-np.inf)], r"k\[0\]: entry \[\] is -inf, not finite"),
        (np.float32(np.nan), "k: nan is not finite"),
        (np.array([None]), "k: an array of object cannot be stored"),
        (np.array(["a"]), "k: an array of <U1 cannot be stored"),
        (np.array([1j]), "k: an array of complex128 cannot be stored"),
        (np.array([0], "datetime64[s]"), "k: an array of datetime64.* cannot be stored"),
        (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), "a MaskedArray is neither"),
        ({"a": {1, 2}}, r"k\.a: a set is neither a plain value nor a numpy array"),
        ({"a": 1j}, r"k\.a: a complex is neither"),
        ({"a": b"raw"}, r"k\.a: a bytes is neither"),
        ({1: "a"}, "k: a key must be a plain string, not 1"),
        ({"$array": "a"}, r"k: a key must be a plain string, not '\$array'"),
        ({"a": "\ud800"}, r"k\.a: .*is not valid Unicode"),
        ({"\ud800": 1}, "k: a key must be a plain string"),
    ],
)
def test_what_cannot_be_read_back_is_refused_by_its_place(
    tmp_path: Path, form: str, content: Any, message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        save(tmp_path / f"x.{form}", "k", content)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.txt", "x", "x.json.gz", "x.JSON", "x.pkl"])
def test_a_file_of_another_suffix_is_neither_written_nor_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordError, match=r"a record is a \.json or a \.npz file"):
        save(tmp_path / name, "k", 1)
    (tmp_path / name).write_text('{"schema": "jaxspec/1", "kind": "k", "content": 1}')
    for read in (lambda: load(tmp_path / name, "k"), lambda: kind_of(tmp_path / name)):
        with pytest.raises(RecordError, match=r"a record is a \.json or a \.npz file"):
            read()


# --- what is no record


def refused(file: Path, message: str) -> None:
    with pytest.raises(RecordError, match=message) as caught:
        load(file, "k")
    assert str(file) in str(caught.value)


def as_json(**fields: Any) -> str:
    return json.dumps({"schema": "jaxspec/1", "kind": "k", "content": 1} | fields)


@each_form
def test_a_record_of_another_kind_is_refused(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"x.{form}"
    save(file, "snapshot", 1)
    refused(file, "holds 'snapshot', wanted 'k'")


@each_form
def test_a_record_of_another_version_is_refused(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"x.{form}"
    with monkeypatch.context() as other:
        other.setattr(records, "SCHEMA", "jaxspec/2")
        save(file, "k", 1)
    refused(file, "schema is 'jaxspec/2', this reader knows 'jaxspec/1'")
    with pytest.raises(RecordError, match="schema is 'jaxspec/2'"):
        kind_of(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a record"),
        ("[1, 2", "not a record"),
        ("[1, 2]", "names no schema"),
        ('"jaxspec/1"', "names no schema"),
        ("{}", "names no schema"),
        ('{"schema": "jaxspec/1", "content": 1}', "needs a kind and a content"),
        ('{"schema": "jaxspec/1", "kind": "k"}', "needs a kind and a content"),
        ('{"schema": "jaxspec/1", "kind": ["k"], "content": 1}', "needs a kind and a content"),
        ('{"schema": "jaxspec/1", "kind": "k", "content": NaN}', "NaN is not a number of JSON"),
        ('{"schema": "jaxspec/1", "kind": "k", "content": -Infinity}', "-Infinity is not"),
        ('{"schema": "jaxspec/1", "kind": "k", "content": [1e999]}', r"k\[0\]: a number is too"),
        ("[" * 100_000, "not a record"),
    ],
)
def test_json_that_is_no_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    refused(file, message)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ({"$array": "object", "shape": [1], "data": [1]}, "'object' is none of bool, float16"),
        ({"$array": ["int8"], "shape": [1], "data": [1]}, "not an array"),
        ({"$array": "float32", "data": [1.0]}, "'shape'"),
        ({"$array": "float32", "shape": [2], "data": [1.0]}, "cannot reshape"),
        ({"$array": "float32", "shape": [-1], "data": [1.0]}, "must be sizes"),
        ({"$array": "float32", "shape": [2.0], "data": [1.0, 2.0]}, "must be sizes"),
        ({"$array": "float32", "shape": [1], "data": ["1"]}, "must be float32 numbers"),
        ({"$array": "float32", "shape": [1], "data": [True]}, "must be float32 numbers"),
        ({"$array": "float32", "shape": [1, 1], "data": [[1.0]]}, "in one list"),
        ({"$array": "float32", "shape": [1], "data": [1e39]}, r"entry \[0\] is inf, not finite"),
        ({"$array": "float32", "shape": [], "data": 1.0}, "not an array"),
        ({"$array": "int32", "shape": [1], "data": [1.5]}, "must be int32 numbers"),
        ({"$array": "int32", "shape": [1], "data": [1.0]}, "must be int32 numbers"),
        ({"$array": "int8", "shape": [1], "data": [300]}, "not an array"),
        ({"$array": "uint8", "shape": [1], "data": [-1]}, "not an array"),
        ({"$array": "bool", "shape": [1], "data": [1]}, "must be bool numbers"),
        ({"$npz": "array0"}, "not an array"),
    ],
)
def test_an_array_that_is_none_is_refused_by_its_place(
    tmp_path: Path, array: Any, message: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(as_json(content={"a": [array]}))
    refused(file, rf"x\.json: k\.a\[0\]: .*{message}")


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(as_json(content="é").encode("utf-16"))
    refused(file, "not a record: 'utf-8' codec")


def test_an_npz_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    file = tmp_path / "x.npz"
    np.savez(file, allow_pickle=True, header=np.array([Trap()], object))
    refused(file, "allow_pickle=False")
    np.save(tmp_path / "x.npy", np.array([Trap()], object), allow_pickle=True)
    os.replace(tmp_path / "x.npy", file)
    refused(file, "not a record")
    assert not (tmp_path / "sprung").exists()


def test_an_npz_of_somebody_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez(file, rows=np.ones(3))
    refused(file, "not a record: 'header'")
    np.savez(file, header=np.array([1.5, 2.5]))
    refused(file, "not a record")
    np.save(tmp_path / "x.npy", np.ones(3))
    os.replace(tmp_path / "x.npy", file)
    refused(file, "not a record")
    header = as_json(content={"$npz": "array0"}).encode()
    np.savez(file, header=np.frombuffer(header, np.uint8), array0=np.array([np.nan]))
    refused(file, r"entry \[0\] is nan")
    np.savez(file, header=np.frombuffer(header, np.uint8))
    refused(file, "k: not an array: 'array0'")


@each_form
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"x.{form}"
    save(file, "k", {"rows": ARRAYS["rows"], "words": PLAIN["words"]})
    whole = file.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 97)):
        file.write_bytes(whole[:size])
        refused(file, "not a record")


@each_form
def test_a_damaged_file_never_fails_but_as_a_bad_record(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"x.{form}"
    save(file, "k", {"rows": ARRAYS["rows"], "words": PLAIN["words"]})
    whole = file.read_bytes()
    generator = np.random.default_rng(7)
    num_refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for place in generator.integers(len(whole), size=generator.integers(1, 5)):
            damaged[place] = generator.integers(256)
        file.write_bytes(damaged)
        try:
            load(file, "k")
        except RecordError:
            num_refused += 1
    assert num_refused > 50


@each_form
def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path, form: str) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / f"x.{form}", "k")
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "no" / f"x.{form}", "k", 1)


# --- how it is written


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


def test_a_new_file_has_the_usual_permissions_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    usual, file = tmp_path / "usual", tmp_path / "x.json"
    usual.touch()
    save(file, "k", 1)
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    file.chmod(0o640)
    save(file, "k", 2)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_saving_through_a_link_replaces_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "run1").mkdir()
    link, file = tmp_path / "latest.json", tmp_path / "run1" / "x.json"
    link.symlink_to(file)
    save(link, "k", 3)
    assert link.is_symlink()
    assert load(file, "k") == 3


def test_equal_contents_are_equal_files(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        save(tmp_path / name, "k", {"plain": PLAIN, "arrays": ARRAYS})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


# --- what a file may ask for


def zipped(file: Path, content: Any, **arrays: np.ndarray) -> None:
    header = np.frombuffer(as_json(content=content).encode(), np.uint8)
    np.savez_compressed(file, header=header, **arrays)


def test_an_array_is_not_read_before_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    zipped(file, {"$npz": "big"}, big=np.zeros((10**4, 10**4), np.int8))
    assert file.stat().st_size < 10**5 + 2000
    tracemalloc.start()
    array = records.load_lazily(file, "k")
    assert (array.dtype, array.shape) == ("int8", (10**4, 10**4))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    assert not array.read().any()


def test_a_header_that_grows_beyond_that_of_any_record_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "x.npz"
    zipped(file, [[]] * 10**6)
    assert file.stat().st_size < 20_000
    tracemalloc.start()
    refused(file, "its header is 4000[0-9]+ numbers of type uint8")
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_a_long_record_of_equal_parts_is_read_back(tmp_path: Path) -> None:
    part = {"emitted": 1, "drafted": 0, "tested": [], "target": {"queries": 1, "calls": 1}}
    content = [{**part, "position": position} for position in range(20_000)]
    save(tmp_path / "x.npz", "k", content)
    assert load(tmp_path / "x.npz", "k") == content


def test_one_array_for_many_places_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    zipped(file, [{"$npz": "a"}] * 2, a=np.zeros(3))
    refused(file, r"k\[1\]: not an array: 'a'")


@pytest.mark.parametrize("shape", [(10**12,), (2**62, 2**62), (3,), (0,)])
def test_an_array_whose_declared_shape_is_not_its_size_is_refused(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    file = tmp_path / "x.npz"
    lie = io.BytesIO()
    declared = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(lie, declared)
    lie.write(b"\0" * 8)
    zipped(file, {"$npz": "a"})
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("a.npy", lie.getvalue())
    refused(file, r"not a record: 'a' has shape \(.*\), and 8 bytes of float32")


def test_json_shapes_are_compared_with_the_data_before_an_array_is_made(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for shape in ([10**12], [2**62, 2**62], [0, 10**12, 2]):
        file.write_text(as_json(content={"$array": "int8", "shape": shape, "data": [1]}))
        refused(file, "cannot reshape 1 numbers into shape")
    file.write_text(as_json(content={"$array": "int8", "shape": [1] * 100, "data": [1]}))
    refused(file, "must be sizes")


@each_form
def test_content_nested_too_deep_is_refused_in_writing_and_in_reading(
    tmp_path: Path, form: str
) -> None:
    deep = json.loads("[" * 500 + "]" * 500)
    for content in (deep, {"a": {"b": deep}}, circle()):
        with pytest.raises(RecordError, match="nested deeper than 64"):
            save(tmp_path / f"x.{form}", "k", content)
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / f"x.{form}"
    for depth, message in ((500, "nested deeper than 64"), (100_000, "nested too deep")):
        text = f'{{"schema": "jaxspec/1", "kind": "k", "content": {"[" * depth + "]" * depth}}}'
        if form == "json":
            file.write_text(text)
        else:
            np.savez(file, header=np.frombuffer(text.encode(), np.uint8))
        refused(file, message)
    fine = json.loads("[" * 60 + "]" * 60)
    save(file, "k", fine)
    assert load(file, "k") == fine


def circle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def test_errors_are_short_whatever_the_file_holds(tmp_path: Path) -> None:
    file, long = tmp_path / "x.json", "x" * 20_000
    texts = {
        json.dumps({"schema": long, "kind": "k", "content": 1}): "schema is 'xxx",
        json.dumps({"schema": "jaxspec/1", "kind": long, "content": 1}): "holds 'xxx",
        as_json(content={long: {"$array": long, "shape": [1], "data": [1]}}): "not an array",
        as_json(content={"$array": "int8", "shape": list(range(9999)), "data": [1]}): "shape",
        as_json(content=1)[:-1] + "9" * 5000 + "}": "not a record",
        '{"a": 1, "a": 2}': "a dictionary holds 'a' twice",
    }
    for text, message in texts.items():
        file.write_text(text)
        with pytest.raises(RecordError, match=message) as caught:
            load(file, "k")
        assert len(str(caught.value)) < 600
    with pytest.raises(RecordError, match=r"x\.json: k\.a: an integer of more than 4000 digits"):
        save(file, "k", {"a": 10**4001})


# --- where a file may be written


def test_a_killed_save_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom jaxspec import records\n"
        "def write(file):\n    file.write(b'half')\n    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "records.replace_files({Path(sys.argv[1]): write})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".jaxspec-")

    def meanwhile(out: Any) -> None:  # another save to the folder, while this one is not through
        save(tmp_path / "y.json", "k", 1)
        assert not left.exists()
        out.write(b"whole")

    records.replace_files({file: meanwhile})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "y.json"]
    assert file.read_bytes() == b"whole"


@each_form
def test_a_name_as_long_as_the_file_system_takes_is_written(tmp_path: Path, form: str) -> None:
    file = tmp_path / ("x" * (255 - len(form) - 1) + f".{form}")
    save(file, "k", 1)
    assert load(file, "k") == 1
    with pytest.raises(OSError, match="too long"):
        save(tmp_path / f"x{file.name}", "k", 1)
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.json").symlink_to(os.devnull)
    for name, message in (
        ("pipe.json", "is a device or a pipe"),
        ("device.json", "is a device or a pipe"),
        ("folder.json", "is a folder"),
        ("no/x.json", "there is no folder"),
        (f"{os.path.dirname(os.devnull)}/full.json", "lies in the folder of the devices"),
    ):
        with pytest.raises(OSError, match=message):
            save(tmp_path / name, "k", 1)
        with pytest.raises(OSError, match=message):
            records.destination(tmp_path / name)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert stat.S_ISFIFO((tmp_path / "pipe.json").stat().st_mode)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    # A pipe would be waited for, and a device of zeros fill the memory.
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.npz").symlink_to(os.devnull)
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


def test_a_name_with_a_nul_character_is_refused(tmp_path: Path) -> None:
    for act in (lambda: load("a\0b.json", "k"), lambda: save("a\0b.json", "k", 1)):
        with pytest.raises(RecordError, match=r"'a\\x00b\.json': .* no NUL"):
            act()
    with pytest.raises(OSError, match="no NUL"):
        records.destination("a\0b.json")
