"""Snapshots: immutable, independent of what goes on, and resumed to the identical outcome."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers.toys import DRAFTERS, POLICY, VOCAB, draft, target

import jaxspec as js
from jaxspec import storage
from jaxspec.decode import Decoder, DecodeState, load_state, save_rounds, save_state, score_layered
from jaxspec.draft import AdaptiveTree, FixedTree, NoDraft, SampledPath
from jaxspec.models.provider import Provider
from jaxspec.storage import RecordError

PROMPT = (0, 2)
KEY = jax.random.key(7)
each_drafter = pytest.mark.parametrize("name", DRAFTERS)
each_form = pytest.mark.parametrize("form", ["json", "npz"])


def decoder_of(name: str, **options: Any) -> Decoder:
    return Decoder(
        target().provider, DRAFTERS[name](draft().provider), **{"new_tokens": 9, **options}
    )


def halfway(decoder: Decoder, key: jax.Array = KEY) -> DecodeState:
    state = decoder.start(PROMPT, key)
    for _ in range(2):
        state, _ = decoder.step(state)
    assert not state.finished
    return state


def test_a_state_cannot_be_changed() -> None:
    state = halfway(decoder_of("path by token"))
    for field in dataclasses.fields(state):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(state, field.name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.rounds[0].num_emitted = 5  # type: ignore[misc]
    hash(state)  # tuples all the way down


@each_drafter
def test_a_step_leaves_the_state_it_starts_from_as_it_was(name: str) -> None:
    decoder = decoder_of(name)
    state = halfway(decoder)
    before = copy.deepcopy(state)
    ends = [decoder.resume(state) for _ in range(2)]
    assert state == before
    assert ends[0] == ends[1] == decoder.run(PROMPT, KEY)


@each_drafter
def test_two_that_go_on_from_one_snapshot_do_not_know_of_each_other(name: str) -> None:
    decoder = decoder_of(name)
    snapshot = halfway(decoder)
    one, other = snapshot, dataclasses.replace(snapshot, key_data=(1, 2))
    while not (one.finished and other.finished):
        one, other = (each if each.finished else decoder.step(each)[0] for each in (one, other))
    assert one == decoder.run(PROMPT, KEY)
    assert other == decoder.resume(dataclasses.replace(snapshot, key_data=(1, 2)))
    assert one.tokens != other.tokens


@each_drafter
@each_form
def test_a_snapshot_on_file_resumes_to_the_identical_outcome(
    tmp_path: Path, name: str, form: str
) -> None:
    decoder = decoder_of(name)
    file = tmp_path / f"snapshot.{form}"
    state = decoder.start(PROMPT, KEY)
    while not state.finished:
        save_state(file, state, decoder.describe())
        read = load_state(file, decoder_of(name).describe())
        assert read == state
        assert repr(read) == repr(state)  # the same types too
        state, _ = decoder.step(read)
    assert state == decoder.run(PROMPT, KEY)
    save_state(file, state, decoder.describe())
    assert load_state(file, decoder.describe()) == state


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_of_any_type_is_resumed_as_it_is(tmp_path: Path, kind: str) -> None:
    key = jax.random.key(3, impl=kind)
    decoder = decoder_of("path by token")
    state = halfway(decoder, key)
    assert str(jax.random.key_impl(state.key)) == kind
    assert (jax.random.key_data(state.key) == jax.random.key_data(key)).all()
    save_state(tmp_path / "s.json", state, decoder.describe())
    read = load_state(tmp_path / "s.json", decoder.describe())
    assert decoder.resume(read) == decoder.run(PROMPT, key)


def test_texts_of_the_three_key_types_differ() -> None:
    decoder = decoder_of("path by token", new_tokens=12)
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    texts = {decoder.run(PROMPT, jax.random.key(3, impl=kind)).new_tokens for kind in kinds}
    assert len(texts) == 3


# --- another decoder


def other_draft() -> Provider:
    return dataclasses.replace(draft().provider, name="other draft")


MODEL = draft().provider
OTHERS: dict[str, tuple[Decoder, Decoder]] = {
    "target": (
        Decoder(target().provider),
        Decoder(dataclasses.replace(target().provider, name="other")),
    ),
    "new_tokens": (Decoder(target().provider), Decoder(target().provider, new_tokens=65)),
    "bonus": (Decoder(target().provider), Decoder(target().provider, bonus=False)),
    "stop_tokens": (
        Decoder(target().provider),
        Decoder(target().provider, stop_tokens=frozenset([1])),
    ),
    "max_context": (Decoder(target().provider), Decoder(target().provider, max_context=99)),
    "drafter": (
        Decoder(target().provider, FixedTree(MODEL, (2,))),
        Decoder(target().provider, AdaptiveTree(MODEL, POLICY)),
    ),
    "draft": (
        Decoder(target().provider, SampledPath(MODEL, 2)),
        Decoder(target().provider, SampledPath(other_draft(), 2)),
    ),
    "depth": (
        Decoder(target().provider, SampledPath(MODEL, 2)),
        Decoder(target().provider, SampledPath(MODEL, 3)),
    ),
    "rule": (
        Decoder(target().provider, SampledPath(MODEL, 2)),
        Decoder(target().provider, SampledPath(MODEL, 2, rule=js.RULES["block"])),
    ),
    "widths": (
        Decoder(target().provider, FixedTree(MODEL, (2, 1))),
        Decoder(target().provider, FixedTree(MODEL, (1, 3))),
    ),
    "max_nodes": (
        Decoder(target().provider, FixedTree(MODEL, (2, 1))),
        Decoder(target().provider, FixedTree(MODEL, (2, 1), node_budget=4)),
    ),
    "policy": (
        Decoder(target().provider, AdaptiveTree(MODEL, POLICY)),
        Decoder(target().provider, AdaptiveTree(MODEL, dataclasses.replace(POLICY, deepen_at=0.5))),
    ),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_decoder_that_would_go_on_differently_is_refused_and_the_field_is_named(
    tmp_path: Path, field: str
) -> None:
    mine, other = OTHERS[field]
    file = tmp_path / "s.json"
    save_state(file, mine.start(PROMPT, KEY), mine.describe())
    assert load_state(file, mine.describe()) == mine.start(PROMPT, KEY)
    with pytest.raises(RecordError, match=rf"s\.json: {field} was .* when this was saved, is now"):
        load_state(file, other.describe())


def test_who_asks_the_target_and_when_does_not_decide_the_text(tmp_path: Path) -> None:
    # Another adapter may take a snapshot over: the description does not hold it.
    mine, other = decoder_of("fixed tree"), decoder_of("fixed tree", score=score_layered)
    save_state(tmp_path / "s.npz", halfway(mine), mine.describe())
    read = load_state(tmp_path / "s.npz", other.describe())
    assert other.resume(read).tokens == mine.run(PROMPT, KEY).tokens


# --- files that are no snapshot


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    decoder = decoder_of("path by token")
    file = tmp_path / "s.json"
    save_state(file, halfway(decoder), decoder.describe())
    return file, json.loads(file.read_text()), decoder.describe()


def first_round(**changes: Any) -> Any:
    return lambda content: content["state"]["rounds"][0].update(changes)


CHANGES: dict[str, Any] = {
    "no state": lambda content: content.pop("state"),
    "no decoder": lambda content: content.pop("decoder"),
    "a decoder that is a list": lambda content: content.update(decoder=[1]),
    "a state that is a list": lambda content: content.update(state=[1]),
    "no tokens": lambda content: content["state"].pop("tokens"),
    "tokens that are words": lambda content: content["state"].update(tokens=["a", "b", "c"]),
    "a token that is no whole number": lambda content: content["state"]["tokens"].append(0.5),
    "a negative token": lambda content: content["state"]["tokens"].append(-1),
    "one token more than was emitted": lambda content: content["state"]["tokens"].append(1),
    "an empty prompt": lambda content: content["state"].update(prompt_length=0),
    "a prompt longer than the text": lambda content: content["state"].update(prompt_length=99),
    "a depth that is a word": lambda content: content["state"].update(depth="2"),
    "no depth": lambda content: content["state"].pop("depth"),
    "an end that is none": lambda content: content["state"].update(finished="tired"),
    "a key of three words": lambda content: content["state"].update(key_data=[1, 2, 3]),
    "a key of four words": lambda content: content["state"].update(key_data=[1, 2, 3, 4]),
    "a key word of 33 bits": lambda content: content["state"].update(key_data=[1, 2**32]),
    "a key type that is none": lambda content: content["state"].update(key_type="dice"),
    "no key type": lambda content: content["state"].update(key_type=None),
    "a field too many": lambda content: content["state"].update(mood=1),
    "rounds that are none": lambda content: content["state"].update(rounds=[1, 2]),
    "a round without usage": lambda content: content["state"]["rounds"][0].pop("target"),
    "a usage of words": lambda content: content["state"]["rounds"][0].update(
        target={"queries": "1", "calls": "2"}
    ),
    "tests that are no pairs": lambda content: content["state"]["rounds"][0].update(tested=[[1]]),
    "tests of words": lambda content: content["state"]["rounds"][0].update(tested=[["a", True]]),
    "a verdict of a test that is a word": lambda content: content["state"]["rounds"][0].update(
        tested=[[1, "no"]]
    ),
    "a round at another position": first_round(position=7),
    "more accepted than drafted": first_round(num_accepted=9, num_emitted=9),
    "a round that emitted nothing": first_round(num_emitted=0),
    "candidates tested without end": first_round(tested=[[10**12, False]]),
    "a decoder of arrays": lambda content: content["decoder"].update(
        widths={"$array": "int32", "shape": [2], "data": [2, 1]}
    ),
    "a token beyond 32 bits": lambda content: content["state"]["tokens"].__setitem__(0, 2**31),
    "an end that the budget contradicts": lambda content: content["state"].update(
        finished="budget"
    ),
    "an end without a stop token": lambda content: content["state"].update(finished="stop"),
    "a key without end": lambda content: content["state"].update(key_data=[1] * 10**5),
    "nested too deep for Python": lambda content: content["state"].update(
        depth=json.loads("[" * 60 + "]" * 60)
    ),
    "a count that is a word": lambda content: content["state"]["rounds"][0].update(status="fine"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_that_is_not_whole_is_refused(tmp_path: Path, change: str) -> None:
    file, document, decoder = saved(tmp_path)
    CHANGES[change](document["content"])
    file.write_text(json.dumps(document))
    with pytest.raises(RecordError, match=r"s\.json: not a whole snapshot"):
        load_state(file, decoder)


def test_a_finished_text_is_not_gone_on_with_beyond_its_budget(tmp_path: Path) -> None:
    decoder = decoder_of("fixed tree")
    file = tmp_path / "s.json"
    save_state(file, decoder.run(PROMPT, KEY), decoder.describe())
    document = json.loads(file.read_text())
    document["content"]["state"]["finished"] = None
    file.write_text(json.dumps(document))
    with pytest.raises(RecordError, match="9 tokens and goes on, and the budget is 9"):
        load_state(file, decoder.describe())


def test_a_description_in_tuples_is_that_in_lists(tmp_path: Path) -> None:
    decoder = decoder_of("path by token")
    described = {**decoder.describe(), "mine": (1, (2, 3))}
    save_state(tmp_path / "s.json", halfway(decoder), described)
    assert load_state(tmp_path / "s.json", described) == halfway(decoder)
    with pytest.raises(RecordError, match=r"mine was \[1, \[2, 3\]\] .* is now \[1\]") as caught:
        load_state(tmp_path / "s.json", {**described, "mine": (1,)})
    long = {**described, "mine": ["x" * 10_000] * 1000}
    with pytest.raises(RecordError, match="mine was") as caught:
        load_state(tmp_path / "s.json", long)
    assert len(str(caught.value)) < 1000


def test_a_content_that_is_no_object_is_refused(tmp_path: Path) -> None:
    for content in (None, [], "state", 3):
        storage.save(tmp_path / "s.json", "snapshot", content)
        with pytest.raises(RecordError, match="not a whole snapshot"):
            load_state(tmp_path / "s.json", {})


@each_form
def test_a_truncated_file_is_refused(tmp_path: Path, form: str) -> None:
    decoder = decoder_of("path by token")
    file = tmp_path / f"s.{form}"
    save_state(file, halfway(decoder), decoder.describe())
    whole = file.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 3):
        file.write_bytes(whole[:size])
        with pytest.raises(RecordError, match="not a record"):
            load_state(file, decoder.describe())


def test_a_record_of_rounds_is_no_snapshot(tmp_path: Path) -> None:
    save_rounds(tmp_path / "r.json", [])
    with pytest.raises(RecordError, match="holds 'rounds', wanted 'snapshot'"):
        load_state(tmp_path / "r.json", {})


def test_a_plain_decoder_may_be_saved_before_its_first_round(tmp_path: Path) -> None:
    decoder = Decoder(target().provider, NoDraft(), new_tokens=1)
    state = decoder.start((VOCAB - 1,), KEY)
    save_state(tmp_path / "s.json", state, decoder.describe())
    assert load_state(tmp_path / "s.json", decoder.describe()) == state
