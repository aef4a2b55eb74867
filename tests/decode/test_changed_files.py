"""Stored files with a change in them: a `RecordError` that names file and field, or a usable record.

Changes are made at random from fixed seeds: a value replaced, taken out or repeated, an array of
another type, shape or entry.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.toys import DRAFTERS, VOCAB, draft, target

from jaxspec import experiments
from jaxspec.decode import (
    Decoder,
    chances_of,
    differences,
    load_rounds,
    load_state,
    metrics_of,
    save_rounds,
    save_state,
)
from jaxspec.storage.files import RecordError

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
    return Decoder(target().provider, DRAFTERS[name](draft().provider), 7)


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
    spoilt = array.copy()
    if spoilt.size:
        numbers = (
            (np.nan, np.inf, -1, 0, 1e-45, 1e30) if array.dtype.kind == "f" else (-1, 1, 99, -9)
        )
        spoilt.flat[chance.randrange(spoilt.size)] = chance.choice(numbers)
    return spoilt


def write(file: Path, document: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    text = json.dumps(document).encode()
    if file.suffix == ".json":
        file.write_bytes(text)
    else:
        np.savez(file, header=np.frombuffer(text, np.uint8), **arrays)


def resume(file: Path, name: str) -> None:
    state = load_state(file, decoder_of(name).describe())
    if max(state.tokens) < VOCAB:  # a snapshot does not know the vocabulary
        metrics_of(decoder_of(name).resume(state).rounds)


def replay(file: Path, name: str) -> None:
    rounds = load_rounds(file)
    assert all(str(each) for each in differences(rounds))
    for each in rounds:
        if each.rule in ("token", "point_mass"):
            chances_of(each)


def report(file: Path, name: str) -> None:
    runs = experiments.load(file)
    json.dumps([dataclasses.asdict(run) for run in runs])
    experiments.table(runs)


def save_some_state(file: Path, name: str) -> None:
    decoder = decoder_of(name)
    state = decoder.start(PROMPT, jax.random.key(1))
    for _ in range(2):
        state, _ = decoder.step(state)
    save_state(file, state, decoder.describe())


def save_some_rounds(file: Path, name: str) -> None:
    decoder = decoder_of(name)
    start = decoder.start(PROMPT, jax.random.key(1))
    save_rounds(file, [record for _, record in decoder.rounds(start)][:2])


def save_some_runs(file: Path, name: str) -> None:
    experiments.save(
        file, [experiments.run(decoder_of(name), PROMPT, jax.random.key(0), name=name)]
    )


@pytest.mark.parametrize(
    ("form", "save", "use", "count"),
    [
        ("json", save_some_state, resume, 40),
        ("json", save_some_rounds, replay, 60),
        ("npz", save_some_rounds, replay, 60),
        ("json", save_some_runs, report, 40),
    ],
)
def test_a_changed_file_is_refused_by_file_and_field_or_can_be_used(
    tmp_path: Path, form: str, save: Callable[..., None], use: Callable[..., None], count: int
) -> None:
    chance = random.Random(f"{form} {save.__name__}")
    file = tmp_path / f"x.{form}"
    refused = 0
    for name in NAMES:
        save(file, name)
        use(file, name)
        arrays: dict[str, np.ndarray] = {}
        if form == "npz":
            arrays = dict(np.load(file))
            document = json.loads(arrays.pop("header").tobytes())
        else:
            document = json.loads(file.read_text())
        for _ in range(count):
            content, others = document["content"], dict(arrays)
            if arrays and chance.random() < 0.5:
                spoilt = chance.choice(sorted(arrays))
                others[spoilt] = changed_array(arrays[spoilt], chance)
            else:
                content = changed(content, chance)
            write(file, {**document, "content": content}, others)
            try:
                use(file, name)
            except RecordError as error:
                refused += 1
                assert str(error).startswith(f"{file}: ")
                assert len(str(error)) < 800
    assert count / 2 < refused < 2 * count  # some are refused and some are not
