"""Files with a fault in them: a `RecordError` that names file and field, or a usable record.

Faults are those of one table each, and changes at random from fixed seeds: a value replaced, taken out
or repeated, an array of another type, shape or entry.
"""

import functools
import io
import json
import random
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.toys import DRAFTERS, VOCAB, draft, target

from jaxspec import storage
from jaxspec.decode import (
    Decoder,
    DecodeState,
    RoundRecord,
    differences,
    load,
    metrics_of,
    save,
)
from jaxspec.storage import RecordError

PROMPT = (0, 2)
NAMES = ("path by block", "fixed tree")
DEEP = json.loads("[" * 500 + "]" * 500)
VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 5, 2**31, 2**63, 10**40, 0.5, -0.0, 1e-45, 1e39, 1e300),
    *("", "x" * 20_000, "\0", "token", "traversal", "rbg", "stop", "budget"),
    *([], [[]], [1], {}, {"a": 1}, [[0.5, 0.5]], [[1], [1, 2]], ["a"], DEEP),
    {"$array": "float32", "shape": [2], "data": [0.5, 0.5]},
    {"$array": "int32", "shape": [], "data": [3]},
    {"$array": "int8", "shape": [0, 5], "data": []},
    *({"$npz": "array0"}, {"$npz": "array1"}, {"$npz": ["a"]}),
]


def decoder_of(name: str) -> Decoder:
    return Decoder(target().provider, DRAFTERS[name](draft().provider), max_context=20)


@functools.cache
def state_of(name: str, rounds: int = 2) -> DecodeState:
    decoder = decoder_of(name)
    state = decoder.start(PROMPT, jax.random.key(7), new_tokens=9, temperature=1.5)
    for _ in range(rounds):
        state, _ = decoder.step(state)
    return state


@functools.cache
def rounds_of(name: str) -> list[RoundRecord]:
    decoder = decoder_of(name)
    start = decoder.start(PROMPT, jax.random.key(0), new_tokens=8)
    return [record for _, record in decoder.rounds(start)]


def saved(file: Path, thing: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Save, and return the document and the arrays of an npz."""
    save(file, thing)
    if file.suffix == ".json":
        return json.loads(file.read_text()), {}
    arrays = dict(np.load(file))
    return json.loads(arrays.pop("header").tobytes()), arrays


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """Make the change that puts a value at a place."""

    def change(plain: Any) -> None:
        for step in path[:-1]:
            plain = plain[step]
        plain[path[-1]] = value

    return change


def add(*path: Any, value: Any) -> Callable[[Any], None]:
    """Make the change that appends a value to a list."""

    def change(plain: Any) -> None:
        for step in path:
            plain = plain[step]
        plain.append(value)

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    def change(plain: Any) -> None:
        for step in path[:-1]:
            plain = plain[step]
        del plain[path[-1]]

    return change


def children_in_a_circle(plain: Any) -> None:
    """The first child's child is itself: a walk over it would not end."""
    width = plain["tree"]["children"]["shape"][1]
    plain["tree"]["children"]["data"][width] = 1


ROUND = ("rounds", 0)
STATE_CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "no request": (drop("request"), "'request' is missing"),
    "no decoder": (drop("decoder"), "'decoder' is missing"),
    "a decoder that is a list": (put("decoder", value=[1]), "decoder is a list, wanted an object"),
    "a request that is a list": (put("request", value=[1]), "request: a list, wanted an object"),
    "no tokens": (drop("tokens"), "'tokens' is missing"),
    "tokens that are words": (put("tokens", value=["a", "b"]), r"tokens\[0\] is 'a', wanted"),
    "half a token": (add("tokens", value=0.5), r"tokens\[\d\] is 0.5, wanted an integer"),
    "a negative token": (add("tokens", value=-1), r"tokens\[\d\] is -1, wanted an integer"),
    "a token beyond 32 bits": (put("tokens", 0, value=2**31), r"tokens\[0\] is 2147483648"),
    "a token more than was emitted": (add("tokens", value=0), "tokens are . after the prompt"),
    "an empty prompt": (
        put("request", "prompt", value=[]),
        r"request is not valid: prompt is \(\)",
    ),
    "another prompt": (put("request", "prompt", value=[0, 0]), "do not begin with the prompt"),
    "a budget of nothing": (put("request", "new_tokens", value=0), "not valid: new_tokens is 0"),
    "a temperature below 0": (
        put("request", "temperature", value=-0.5),
        "request is not valid: temperature is -0.5",
    ),
    "a temperature of words": (put("request", "temperature", value="hot"), "wanted a number"),
    "a top_p of 0": (put("request", "top_p", value=0.0), "not valid: top_p is 0.0"),
    "a depth that is a word": (put("depth", value="2"), "depth is '2', wanted an integer"),
    "no depth": (drop("depth"), "'depth' is missing"),
    "an unknown ending": (put("ending", value="tired"), "ending is 'tired', wanted one of 'none'"),
    "an ending of no state": (put("ending", value="undecided"), "ending is 'undecided'"),
    "a key of three words": (put("request", "key_data", value=[1, 2, 3]), "has 3 words: they are"),
    "a key without end": (put("request", "key_data", value=[1] * 10**5), "has 100000 words"),
    "a key word of 33 bits": (put("request", "key_data", value=[1, 2**32]), r"key_data\[1\] is"),
    "a key type that is none": (put("request", "key_type", value="dice"), "one key of type 'dice'"),
    "no key type": (put("request", "key_type", value=None), "key_type is None, wanted a string"),
    "a field too many": (put("mood", value=1), "an unknown field: 'mood'"),
    "rounds that are numbers": (
        put("rounds", value=[1, 2]),
        r"rounds\[0\]: a int, wanted an object",
    ),
    "a round without usage": (drop(*ROUND, "target"), r"rounds\[0\]: 'target' is missing"),
    "a usage of words": (put(*ROUND, "target", "calls", value="1"), r"target.calls is '1'"),
    "tests that are no pairs": (put(*ROUND, "tested", value=[[1]]), "has 1 items, wanted 2"),
    "a test that is a word": (put(*ROUND, "tested", value=[[1, "no"]]), "wanted true or false"),
    "a round at another position": (put(*ROUND, "position", value=7), "and its root is at 1"),
    "more accepted than emitted": (
        put(*ROUND, "num_accepted", value=9),
        "must satisfy num_accepted",
    ),
    "a round that emitted nothing": (
        put(*ROUND, "num_emitted", value=0),
        "satisfy num_emitted >= 1",
    ),
    "tests without end": (put(*ROUND, "tested", value=[[10**12, False]]), "sum of tested <="),
    "a status that is a word": (put(*ROUND, "status", value="fine"), "status is 'fine'"),
    "a decoder of arrays": (
        put("decoder", "widths", value={"$array": "int32", "shape": [2], "data": [2, 1]}),
        "decoder.widths is an array",
    ),
    "an end that the budget contradicts": (
        put("ending", value="budget"),
        "'budget': . tokens of 9",
    ),
    "an end without a stop token": (
        put("ending", value="stop"),
        "'stop', and the last token is not",
    ),
    "a text beyond its budget": (
        put("request", "new_tokens", value=2),
        "has . tokens and goes on, and the budget is 2",
    ),
    "a text beyond its context": (
        put("decoder", "max_context", value=3),
        "has . tokens and goes on, and the capacity is 3",
    ),
    "nested too deep for Python": (put("depth", value=json.loads("[" * 60 + "]" * 60)), "depth is"),
}


@pytest.mark.parametrize("change", STATE_CHANGES)
def test_a_malformed_state_is_an_error_that_names_the_field(tmp_path: Path, change: str) -> None:
    file = tmp_path / "s.json"
    document, _ = saved(file, state_of("path by token"))
    make, message = STATE_CHANGES[change]
    make(document["content"])
    file.write_text(json.dumps(document))
    with pytest.raises(RecordError, match=rf"s\.json: not a whole state.*(?:{message})"):
        load(file)


ROUND_CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "no rule": (drop("rule"), "'rule' is missing"),
    "an unknown rule": (put("rule", value="guess"), "rule 'guess' is none of token, block"),
    "a rule that is a list": (put("rule", value=["token"]), "rule is a list, wanted a string"),
    "a rule that needs draft rows": (
        put("rule", value="token"),
        "tree has 5 nodes, 2 child slots and .* for single paths",
    ),
    "no draws": (drop("draws"), "'draws' is missing"),
    "no final draw": (drop("draws", "final"), "draws: 'final' is missing"),
    "a draw of 1": (put("draws", "accept", 1, value=1.0), r"accept\[1\] is 1.0, outside"),
    "draws for another tree": (
        put(
            "draws",
            value={"draft": [[0, 0], [0, 0]], "accept": [0, 0], "final": [0, 0]},
        ),
        r"draws\.draft has shape \(2, 2\), wanted \(5, 2\)",
    ),
    "no tree": (drop("tree"), "'tree' is missing"),
    "a tree that is a word": (put("tree", value="oak"), "tree is 'oak', wanted an object"),
    "no level sizes": (drop("tree", "level_sizes"), "'level_sizes' is missing"),
    "a parent after its child": (put("tree", "parents", "data", 1, value=4), "node 1: parent 4"),
    "siblings of one token": (put("tree", "tokens", "data", value=[2, 1, 1, 0, 0]), "siblings"),
    "children in a circle": (children_in_a_circle, "children do not follow"),
    "level sizes of another tree": (
        put("tree", "level_sizes", "data", value=[1, 3, 1]),
        "level_sizes do not follow",
    ),
    "a token outside the vocabulary": (
        put("tree", "tokens", "data", value=[2, 7, 1, 0, 0]),
        r"tree.tokens\[1\] is 7, wanted an integer from .* to 2",
    ),
    "half a token": (put("tree", "tokens", value=[2, 0.5, 1, 0, 0]), "wanted 32-bit integers"),
    "no target rows": (drop("target_rows"), "'target_rows' is missing"),
    "target rows of another tree": (
        put("target_rows", value=[[0.5, 0.25, 0.25]] * 4),
        r"target_rows has shape \(4, 3\), wanted \(5, 3\)",
    ),
    "one target row": (put("target_rows", value=[0.5, 0.25, 0.25]), "rank"),
    "words for target rows": (put("target_rows", value=[["a"]]), "wanted numbers"),
    "a target row beyond float32": (
        put("target_rows", value=[[1e300] * 3] * 5),
        r"target_rows\[0\]\[0\] is 1e\+300, wanted a number finite in float32",
    ),
    "ragged target rows": (
        put("target_rows", value=[*[[0.5, 0.25, 0.25]] * 4, [1.0]]),
        "inhomogeneous: 1 items along axis 1",
    ),
    "a position that is a word": (
        put("position", value="3"),
        "position is '3', wanted an integer from 0",
    ),
    "a bonus that is a word": (
        put("bonus", value="false"),
        "bonus is 'false', wanted true or false",
    ),
    "a target that is a number": (put("target", value=3), "target is 3, wanted a string"),
    "a draft that is a number": (put("draft", value=3), "draft is 3, wanted a string"),
    "no verdict": (drop("verdict"), "'verdict' is missing"),
    "a verdict without status": (drop("verdict", "status"), "'status' is missing"),
    "half a token emitted": (put("verdict", "tokens", value=[0.5, 1, 1]), "wanted 32-bit integers"),
    "child slots of another tree": (
        put("tree", "children", value=[[-1] * 20_000]),
        r"tree.children has shape \(1, 20000\)",
    ),
    "child slots for each node of a wider tree": (
        put("tree", "children", value=[[-1] * 9] * 4),
        r"tree.children has shape \(4, 9\), wanted \(5, 9\)",
    ),
    "a tree of no nodes": (put("tree", "tokens", value=[]), r"tree.tokens has shape \(0,\)"),
    "more nodes than there is room for": (
        put("tree", "level_sizes", "data", value=[1, 2, 3]),
        "tree.level_sizes count 6 nodes, wanted 1 to 5",
    ),
    "draft rows of point masses": (
        put("draft_rows", value=[[0.5, 0.25, 0.25]] * 5),
        "draft_rows must be null: candidates of rule 'point_mass' are point masses",
    ),
    "a draw beyond float32": (put("draws", "final", value=[1e300, 0.5]), r"final\[0\] is 1e\+300"),
    "a path through no node": (
        put("verdict", "path", value=[0, 7, -1]),
        r"verdict.path\[1\] is 7, wanted an integer from -1 to 4",
    ),
    "a field too many": (put("mood", value=1), "holds an unknown field: 'mood'"),
    "a long word for a rule": (put("rule", value="x" * 10_000), r"rule 'x+\.\.\.x+' is none of"),
    "a verdict of another depth": (put("verdict", "path", value=[0, 1]), r"path has shape \(2,\)"),
    "no draft rows of a path": (put("rule", value="block"), "for single paths"),
}


@pytest.mark.parametrize("change", ROUND_CHANGES)
def test_a_malformed_round_is_an_error_that_names_the_field(tmp_path: Path, change: str) -> None:
    file = tmp_path / "r.json"
    document, _ = saved(file, rounds_of("fixed tree")[:2])
    make, message = ROUND_CHANGES[change]
    make(document["content"][1])
    file.write_text(json.dumps(document))
    with pytest.raises(RecordError, match=rf"r\.json: round 1: .*(?s:.*)(?:{message})"):
        load(file)


def test_draft_rows_of_a_path_that_are_missing_or_do_not_fit_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    document, _ = saved(file, rounds_of("path by block"))
    for rows in (None, [[0.5, 0.5]] * 2):
        document["content"][0]["draft_rows"] = rows
        file.write_text(json.dumps(document))
        with pytest.raises(RecordError, match=r"round 0: draft_rows (must be there|has shape)"):
            load(file)


def test_a_file_of_something_else_or_cut_short_is_an_error(tmp_path: Path) -> None:
    for form in ("json", "npz"):
        file = tmp_path / f"s.{form}"
        save(file, state_of("path by block"))
        whole = file.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 3):
            file.write_bytes(whole[:size])
            with pytest.raises(RecordError, match="not a record"):
                load(file)
    for kind, content, message in (
        ("runs", [], "holds 'runs', wanted 'decode state' or 'rounds'"),
        ("rounds", {"rounds": []}, "rounds must be a list"),
        ("rounds", [[1]], "round 0: a list, wanted an object"),
        *(("decode state", each, "not a whole state: a ") for each in (None, [], "state", 3)),
    ):
        storage.save(tmp_path / "x.json", kind, content)
        with pytest.raises(RecordError, match=message):
            load(tmp_path / "x.json")


def test_no_rounds_are_a_file_too(tmp_path: Path) -> None:
    save(tmp_path / "none.json", [])
    assert load(tmp_path / "none.json") == []


def test_a_round_written_elsewhere_in_plain_lists_is_read(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    document, _ = saved(file, rounds_of("path by block"))

    def plainly(value: Any) -> Any:
        if isinstance(value, dict) and "$array" in value:
            return np.array(value["data"]).reshape(value["shape"]).tolist()
        if isinstance(value, dict):
            return {name: plainly(item) for name, item in value.items()}
        return [plainly(item) for item in value] if isinstance(value, list) else value

    file.write_text(json.dumps(plainly(document)))
    assert "$array" not in file.read_text()
    read = load(file)
    assert isinstance(read, list)
    assert differences(read) == []


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("children", (5, 2 * 10**6)),
        ("children", (10**7, 1)),
        ("tokens", (10**7,)),
        ("level_sizes", (10**7,)),
        ("target_rows", (10**7, 1)),
    ],
)
def test_a_small_file_cannot_ask_for_the_memory_of_a_large_array(
    tmp_path: Path, field: str, shape: tuple[int, ...]
) -> None:
    file = tmp_path / "r.npz"
    save(file, rounds_of("fixed tree")[:1])
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files}
    (plain,) = json.loads(arrays["header"].tobytes())["content"]
    name = {**plain["tree"], **plain}[field]["$npz"]
    lie = io.BytesIO()
    declared = {"descr": "|i1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(lie, declared)
    del arrays[name]
    np.savez_compressed(file, **arrays)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", lie.getvalue() + bytes(10**7))
    assert file.stat().st_size < 20_000
    tracemalloc.start()
    with pytest.raises(RecordError, match=rf"r\.npz: round 0: .*{field} has shape"):
        load(file)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


# --- changes at random


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    if len(place) < 12 and isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*place, key))


def changed(content: Any, chance: random.Random) -> Any:
    """Return a copy of plain values with one to three changes."""
    content = json.loads(json.dumps(content))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not (found := list(places(content))):
            break
        *way, last = chance.choice(found)
        at = content
        for step in way:
            at = at[step]
        old, kind = at[last], chance.random()
        if kind < 0.2:
            del at[last]
        elif kind < 0.4 and isinstance(at, list):
            at.insert(last, old)
        elif kind < 0.6 and type(old) in (int, float):
            at[last] = old + chance.choice((-1, 1, 0.5, 1000))
        else:
            at[last] = json.loads(json.dumps(chance.choice(VALUES)))
    return content


def changed_array(array: np.ndarray, chance: random.Random) -> np.ndarray:
    kind = chance.randrange(4)
    if kind == 0:
        return array.astype(
            chance.choice(("float64", "int64", "uint8", "bool", "<U3", "complex64"))
        )
    if kind == 1:
        return chance.choice((array[None], array.reshape(-1), np.tile(array, 2)))
    corrupted = array.copy()
    if corrupted.size:
        numbers = (
            (np.nan, np.inf, -1, 0, 1e-45, 1e30) if array.dtype.kind == "f" else (-1, 1, 99, -9)
        )
        corrupted.flat[chance.randrange(corrupted.size)] = chance.choice(numbers)
    return corrupted


def write(file: Path, document: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    text = json.dumps(document).encode()
    if file.suffix == ".json":
        file.write_bytes(text)
    else:
        np.savez(file, header=np.frombuffer(text, np.uint8), **arrays)


def use(file: Path, name: str) -> None:
    thing = load(file)
    if isinstance(thing, list):
        assert all(str(each) for each in differences(thing))
        return
    ours = decoder_of(name)
    is_own = thing.decoder == ours.start(PROMPT, jax.random.key(0)).decoder
    if is_own and max(thing.tokens) < VOCAB:  # a state does not know the vocabulary
        metrics_of(ours.resume(thing).rounds)


@pytest.mark.parametrize(
    ("form", "make", "count"),
    [
        ("json", state_of, 40),
        ("json", lambda name: rounds_of(name)[:2], 60),
        ("npz", lambda name: rounds_of(name)[:2], 60),
    ],
    ids=["state", "rounds", "rounds in npz"],
)
def test_a_changed_file_is_an_error_that_names_file_and_field_or_can_be_used(
    tmp_path: Path, form: str, make: Callable[[str], Any], count: int
) -> None:
    file = tmp_path / f"x.{form}"
    chance = random.Random(f"{form} {count}")
    errors = 0
    for name in NAMES:
        document, arrays = saved(file, make(name))
        use(file, name)
        for _ in range(count):
            content, others = document["content"], dict(arrays)
            if arrays and chance.random() < 0.5:
                corrupted = chance.choice(sorted(arrays))
                others[corrupted] = changed_array(arrays[corrupted], chance)
            else:
                content = changed(content, chance)
            write(file, {**document, "content": content}, others)
            try:
                use(file, name)
            except RecordError as error:
                errors += 1
                assert str(error).startswith(f"{file}: ")
                assert len(str(error)) < 800
    assert count / 2 < errors < 2 * count  # some are errors and some are not


@pytest.mark.parametrize("thing", [5, None, [1], "rounds"])
def test_what_is_neither_a_state_nor_rounds_is_not_saved(tmp_path: Path, thing: Any) -> None:
    with pytest.raises(ValueError, match="must be a"):
        save(tmp_path / "x.json", thing)
    assert not list(tmp_path.iterdir())
