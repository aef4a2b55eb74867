"""Stored records: bit for bit what was saved, and an error that says where for anything else."""

import io
import json
import os
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import storage
from jaxspec.storage import RecordError, StoredArray, kind_of, load, save

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


def numbers_in(value: Any) -> None:
    """Read every array of a loaded content."""
    if isinstance(value, StoredArray):
        value.read()
    for item in value.values() if isinstance(value, dict) else value if type(value) is list else ():
        numbers_in(item)


def rejected(file: Path, message: str) -> None:
    with pytest.raises(RecordError, match=message) as caught:
        numbers_in(load(file, "k"))
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 600


def as_json(**fields: Any) -> str:
    return json.dumps({"schema": "jaxspec/1", "kind": "k", "content": 1} | fields)


def zipped(file: Path, content: Any, **arrays: np.ndarray) -> None:
    header = np.frombuffer(as_json(content=content).encode(), np.uint8)
    np.savez_compressed(file, header=header, **arrays)


# --- what is read back


@each_form
def test_arrays_and_plain_values_read_back_bit_for_bit(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"a.{form}"
    save(str(file), "k", {"plain": PLAIN, "arrays": [ARRAYS]})
    assert kind_of(str(file)) == "k"
    content = load(str(file), "k")
    assert repr(content["plain"]) == repr(PLAIN)  # distinguishes 1 from True and -0.0 from 0.0
    for name, stored in content["arrays"][0].items():
        array = ARRAYS[name]
        assert (stored.dtype, stored.shape) == (array.dtype.name, array.shape)
        assert bits(stored.read()) == bits(array)
    other = tmp_path / f"b.{form}"
    save(other, "k", {"plain": PLAIN, "arrays": [ARRAYS]})
    assert form == "npz" or other.read_bytes() == file.read_bytes()


@each_form
def test_tuples_read_back_as_lists_and_numpy_scalars_as_numbers(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"p.{form}"
    save(file, "k", (np.int32(3), np.float32(0.1), np.bool_(True), (1, 2)))
    assert repr(load(file, "k")) == repr([3, float(np.float32(0.1)), True, [1, 2]])


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
    file = tmp_path / "r.json"
    file.write_text(as_json(content={"$array": "float32", "shape": [2, 1], "data": [0.1, 1]}))
    np.testing.assert_array_equal(load(file, "k").read(), np.float32([[0.1], [1]]))


# --- what cannot be stored


@each_form
def test_a_value_that_cannot_be_read_back_is_an_error_with_its_place(
    tmp_path: Path, form: str
) -> None:
    circle: list[Any] = []
    circle.append(circle)
    deep = json.loads("[" * 500 + "]" * 500)
    for content, message in (
        ({"rows": [1.0, float("nan")]}, r"k\.rows\[1\]: nan is not finite"),
        ({"rows": float("inf")}, r"k\.rows: inf is not finite"),
        ([np.float32([[0, 1], [2, np.nan]])], r"k\[0\]: entry \[1, 1\] is nan, not finite"),
        ([np.array(-np.inf)], r"k\[0\]: entry \[\] is -inf, not finite"),
        (np.float32(np.nan), "k: nan is not finite"),
        (np.array([None]), "k: an array of object cannot be stored"),
        (np.array(["a"]), "k: an array of <U1 cannot be stored"),
        (np.array([1j]), "k: an array of complex128 cannot be stored"),
        (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), "a MaskedArray is neither"),
        ({"a": {1, 2}}, r"k\.a: a set is neither a plain value nor a numpy array"),
        ({"a": 1j}, r"k\.a: a complex is neither"),
        ({1: "a"}, "k: a key must be a plain string, not 1"),
        ({"$array": "a"}, r"k: a key must be a plain string, not '\$array'"),
        ({"a": "\ud800"}, r"k\.a: .*is not valid Unicode"),
        ({"\ud800": 1}, "k: a key must be a plain string"),
        ({"a": 10**4001}, r"k\.a: an integer of more than 4000 digits"),
        (deep, "nested deeper than 64"),
        ({"a": {"b": deep}}, "nested deeper than 64"),
        (circle, "nested deeper than 64"),
    ):
        with pytest.raises(RecordError, match=message):
            save(tmp_path / f"x.{form}", "k", content)
    assert list(tmp_path.iterdir()) == []


def test_a_name_without_the_right_suffix_with_a_nul_or_empty_is_an_error(tmp_path: Path) -> None:
    for name, message in (
        *((str(tmp_path / end), r"a record is a \.json or a \.npz") for end in ("x.txt", "x.JSON")),
        ("a\0b.json", r"'a\\x00b\.json': .*NUL"),
        ("", "the name of the file is empty"),
    ):
        for act in (lambda n: load(n, "k"), lambda n: save(n, "k", 1), kind_of):
            with pytest.raises(RecordError, match=message):
                act(name)
    for name, message in (("a\0b.json", "NUL"), ("", "the name of the file is empty")):
        with pytest.raises(OSError, match=message):
            storage.destination(name)


# --- files that are not a record


@each_form
def test_a_record_of_another_kind_or_version_is_an_error(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"x.{form}"
    save(file, "snapshot", 1)
    rejected(file, "holds 'snapshot', wanted 'k'")
    with monkeypatch.context() as other:
        other.setattr("jaxspec.storage.records.SCHEMA", "jaxspec/2")
        save(file, "k", 1)
    rejected(file, "schema is 'jaxspec/2', this reader knows 'jaxspec/1'")
    with pytest.raises(RecordError, match="schema is 'jaxspec/2'"):
        kind_of(file)


LONG = "x" * 20_000
TEXTS = (
    ("", "not a record"),
    ("[1, 2", "not a record"),
    ("[1, 2]", "names no schema"),
    ("{}", "names no schema"),
    ('{"schema": "jaxspec/1", "content": 1}', "needs a kind and a content"),
    ('{"schema": "jaxspec/1", "kind": "k"}', "needs a kind and a content"),
    ('{"schema": "jaxspec/1", "kind": ["k"], "content": 1}', "needs a kind and a content"),
    ('{"schema": "jaxspec/1", "kind": "k", "content": NaN}', "NaN is not a number of JSON"),
    ('{"schema": "jaxspec/1", "kind": "k", "content": -Infinity}', "-Infinity is not"),
    ('{"schema": "jaxspec/1", "kind": "k", "content": [1e999]}', r"k\[0\]: a number is too"),
    ("[" * 100_000, "not a record"),
    (as_json(content=json.loads("[" * 500 + "]" * 500)), "nested deeper than 64"),
    (as_json(content=0)[:-2] + "[" * 10**5 + "]" * 10**5 + "}", "nested too deep"),
    (json.dumps({"schema": LONG, "kind": "k", "content": 1}), "schema is 'xxx"),
    (as_json(kind=LONG), "holds 'xxx"),
    (as_json(content={LONG: {"$array": LONG, "shape": [1], "data": [1]}}), "not an array"),
    (as_json(content=1)[:-1] + "9" * 5000 + "}", "not a record"),
    ('{"a": 1, "a": 2}', "a dictionary holds 'a' twice"),
)


def test_json_that_is_not_a_record_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text, message in TEXTS:
        file.write_text(text)
        rejected(file, message)
    file.write_bytes(as_json(content="é").encode("utf-16"))
    rejected(file, "not a record: 'utf-8' codec")


def test_an_invalid_array_in_json_is_an_error_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for changes, message in (
        ({"$array": "object"}, "'object' is none of bool, float16"),
        ({"$array": ["int8"]}, "not an array"),
        ({"shape": [2]}, "cannot reshape"),
        ({"shape": [-1]}, "must be sizes"),
        ({"shape": [1.0]}, "must be sizes"),
        ({"shape": [1] * 100}, "must be sizes"),
        ({"shape": list(range(9999))}, "shape"),
        *(({"shape": s}, "cannot reshape") for s in ([10**12], [2**62, 2**62], [0, 10**12, 2])),
        ({"data": ["1"]}, "must be float32 numbers"),
        ({"data": [True]}, "must be float32 numbers"),
        ({"data": [[1.0]]}, "in one list"),
        ({"data": 1.0, "shape": []}, "not an array"),
        ({"data": [1e39]}, r"entry \[0\] is inf, not finite"),
        ({"$array": "int32", "data": [1.5]}, "must be int32 numbers"),
        ({"$array": "int32", "data": [1.0]}, "must be int32 numbers"),
        ({"$array": "int8", "data": [300]}, "not an array"),
        ({"$array": "uint8", "data": [-1]}, "not an array"),
        ({"$array": "bool", "data": [1]}, "must be bool numbers"),
        ({"$npz": "array0"}, "not an array"),
    ):
        array = {"$array": "float32", "shape": [1], "data": [1.0]} | changes
        file.write_text(as_json(content={"a": [array]}))
        rejected(file, rf"x\.json: k\.a\[0\]: .*{message}")
    file.write_text(as_json(content={"$array": "float32", "data": [1.0]}))
    rejected(file, "'shape'")


def test_an_npz_that_would_run_code_is_an_error(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    file = tmp_path / "x.npz"
    np.savez(file, allow_pickle=True, header=np.array([Trap()], object))
    rejected(file, "allow_pickle=False")
    np.save(tmp_path / "x.npy", np.array([Trap()], object), allow_pickle=True)
    os.replace(tmp_path / "x.npy", file)
    rejected(file, "not a record")
    assert not (tmp_path / "sprung").exists()


def test_an_npz_of_another_program_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez(file, rows=np.ones(3))
    rejected(file, "not a record: 'header'")
    np.savez(file, header=np.array([1.5, 2.5]))
    rejected(file, "not a record")
    np.save(tmp_path / "x.npy", np.ones(3))
    os.replace(tmp_path / "x.npy", file)
    rejected(file, "not a record")
    zipped(file, {"$npz": "array0"}, array0=np.array([np.nan]))
    rejected(file, r"entry \[0\] is nan")
    zipped(file, {"$npz": "array0"})
    rejected(file, "k: not an array: 'array0'")
    zipped(file, [{"$npz": "a"}] * 2, a=np.zeros(3))
    rejected(file, r"k\[1\]: not an array: 'a'")  # one array would become as many copies


@each_form
def test_a_truncated_or_damaged_file_raises_only_record_errors(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"x.{form}"
    save(file, "k", {"rows": ARRAYS["rows"], "words": PLAIN["words"]})
    whole = file.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 97)):
        file.write_bytes(whole[:size])
        rejected(file, "not a record")
    generator = np.random.default_rng(7)
    num_rejected = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for place in generator.integers(len(whole), size=generator.integers(1, 5)):
            damaged[place] = generator.integers(256)
        file.write_bytes(damaged)
        try:
            numbers_in(load(file, "k"))
        except RecordError:
            num_rejected += 1
    assert num_rejected > 50


# --- what a file may ask for


def test_an_array_is_not_read_before_its_numbers_are_needed(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    zipped(file, {"$npz": "big"}, big=np.zeros((10**4, 10**4), np.int8))
    assert file.stat().st_size < 10**5 + 2000
    tracemalloc.start()
    array = load(file, "k")
    assert (array.dtype, array.shape) == ("int8", (10**4, 10**4))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    assert not array.read().any()


def test_a_header_that_expands_more_than_any_record_is_an_error_before_it_is_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "x.npz"
    zipped(file, [[]] * 10**6)
    assert file.stat().st_size < 20_000
    tracemalloc.start()
    rejected(file, "its header is 4000[0-9]+ numbers of type uint8")
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    part = {"emitted": 1, "drafted": 0, "tested": [], "target": {"queries": 1, "calls": 1}}
    content = [{**part, "position": position} for position in range(20_000)]
    save(file, "k", content)  # a long record of equal parts is none of these
    assert load(file, "k") == content


def test_an_array_whose_declared_shape_does_not_match_its_size_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    for shape in ((10**12,), (2**62, 2**62), (3,), (0,)):
        false = io.BytesIO()
        declared = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(false, declared)
        false.write(b"\0" * 8)
        zipped(file, {"$npz": "a"})
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("a.npy", false.getvalue())
        rejected(file, r"not a record: 'a' has shape \(.*\), and 8 bytes of float32")
