"""States: immutable, independent of what goes on, and resumed to the identical outcome."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.toys import DRAFTERS, POLICY, VOCAB, draft, target

import jaxspec as js
from jaxspec.decode import CallableTarget, Decoder, DecodeState, load, save
from jaxspec.draft import AdaptiveTree, FixedTree, NoDraft, SampledPath

PROMPT = (0, 2)
KEY = jax.random.key(7)
OPTIONS: dict[str, Any] = {
    "new_tokens": 9,
    "stop_tokens": [1],
    "temperature": 1.25,
    "top_k": 2,
    "top_p": np.float32(0.99),
}
each_drafter = pytest.mark.parametrize("name", DRAFTERS)


def decoder_of(name: str, **options: Any) -> Decoder:
    return Decoder(target().provider, DRAFTERS[name](draft().provider), **options)


def halfway(decoder: Decoder, key: jax.Array = KEY, **options: Any) -> DecodeState:
    state = decoder.start(PROMPT, key, **{"new_tokens": 9, **options})
    for _ in range(2):
        state, _ = decoder.step(state)
    assert not state.ending
    return state


def loaded(path: Path, state: DecodeState) -> DecodeState:
    save(path, state)
    read = load(path)
    assert isinstance(read, DecodeState)
    return read


def test_a_state_cannot_be_changed() -> None:
    state = halfway(decoder_of("path by token"))
    for field in dataclasses.fields(state):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(state, field.name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.rounds[0].num_emitted = 5  # type: ignore[misc]
    hash(state)


@each_drafter
def test_a_step_leaves_its_state_as_it_was_and_two_that_go_on_from_it_are_independent(
    name: str,
) -> None:
    decoder = decoder_of(name)
    state = halfway(decoder)
    before = copy.deepcopy(state)
    ends = [decoder.resume(state) for _ in range(2)]
    assert state == before
    assert ends[0] == ends[1] == decoder.run(PROMPT, KEY, new_tokens=9)
    request = dataclasses.replace(state.request, key_data=(1, 2))
    one, other = state, dataclasses.replace(state, request=request)
    while not (one.ending and other.ending):
        one, other = (each if each.ending else decoder.step(each)[0] for each in (one, other))
    assert one == ends[0]
    assert other == decoder.resume(dataclasses.replace(state, request=request))
    assert one.tokens != other.tokens


@each_drafter
@pytest.mark.parametrize("form", ["json", "npz"])
def test_a_state_on_file_resumes_to_the_identical_outcome(
    tmp_path: Path, name: str, form: str
) -> None:
    decoder = decoder_of(name, max_context=9)
    file = tmp_path / f"state.{form}"
    state = decoder.start(PROMPT, KEY, **OPTIONS)
    whole = decoder.run(PROMPT, KEY, **OPTIONS)
    while not state.ending:
        read = loaded(file, state)
        assert read == state
        assert repr(read) == repr(state)  # the same types too
        state, _ = decoder_of(name, max_context=9).step(read)
    assert state == whole == loaded(file, state)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_of_any_type_is_resumed_as_it_is(tmp_path: Path, kind: str) -> None:
    key = jax.random.key(3, impl=kind)
    decoder = decoder_of("path by token")
    state = halfway(decoder, key)
    again = state.request.key
    assert str(jax.random.key_impl(again)) == kind
    assert (jax.random.key_data(again) == jax.random.key_data(key)).all()
    read = loaded(tmp_path / "s.json", state)
    assert decoder.resume(read) == decoder.run(PROMPT, key, new_tokens=9)


def test_texts_of_the_three_key_types_differ() -> None:
    decoder = decoder_of("path by token")
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    keys = [jax.random.key(3, impl=kind) for kind in kinds]
    assert len({decoder.run(PROMPT, key, new_tokens=12).new_tokens for key in keys}) == 3


def test_a_state_may_be_saved_before_its_first_round(tmp_path: Path) -> None:
    state = Decoder(target().provider, NoDraft()).start((VOCAB - 1,), KEY, new_tokens=1)
    assert loaded(tmp_path / "s.json", state) == state


# --- another decoder

TARGET, MODEL = target().provider, draft().provider
PATH = SampledPath(MODEL, 2)
OTHERS: dict[str, tuple[Decoder, Decoder]] = {
    "target": (Decoder(TARGET), Decoder(dataclasses.replace(TARGET, name="other"))),
    "bonus": (Decoder(TARGET), Decoder(TARGET, bonus=False)),
    "max_context": (Decoder(TARGET), Decoder(TARGET, max_context=99)),
    "drafter": (
        Decoder(TARGET, FixedTree(MODEL, (2,))),
        Decoder(TARGET, AdaptiveTree(MODEL, POLICY)),
    ),
    "draft": (
        Decoder(TARGET, PATH),
        Decoder(TARGET, SampledPath(dataclasses.replace(MODEL, name="other draft"), 2)),
    ),
    "depth": (Decoder(TARGET, PATH), Decoder(TARGET, SampledPath(MODEL, 3))),
    "rule": (
        Decoder(TARGET, PATH),
        Decoder(TARGET, SampledPath(MODEL, 2, rule=js.RULES["block"])),
    ),
    "shape": (
        Decoder(TARGET, FixedTree(MODEL, (2, 1))),
        Decoder(TARGET, FixedTree(MODEL, (1, 3))),
    ),
    "max_nodes": (
        Decoder(TARGET, FixedTree(MODEL, (2, 1))),
        Decoder(TARGET, FixedTree(MODEL, (2, 1), max_nodes=4)),
    ),
    "policy": (
        Decoder(TARGET, AdaptiveTree(MODEL, POLICY)),
        Decoder(TARGET, AdaptiveTree(MODEL, dataclasses.replace(POLICY, deepen_at=0.5))),
    ),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_decoder_that_would_go_on_differently_is_an_error_that_names_the_field(
    tmp_path: Path, field: str
) -> None:
    mine, other = OTHERS[field]
    state = mine.start(PROMPT, KEY, new_tokens=1)
    read = loaded(tmp_path / "s.json", state)
    assert mine.resume(read) == mine.resume(state)
    for use in (other.step, other.resume, lambda state: next(other.rounds(state))):
        with pytest.raises(ValueError, match=f"begun by another decoder: {field} was .*, is now"):
            use(read)


def test_how_the_target_is_asked_does_not_decide_the_text(tmp_path: Path) -> None:
    mine = decoder_of("fixed tree")
    drafter = DRAFTERS["fixed tree"](draft().provider)
    other = Decoder(CallableTarget(target().provider, "depth"), drafter)
    read = loaded(tmp_path / "s.npz", halfway(mine))
    assert other.resume(read).tokens == mine.run(PROMPT, KEY, new_tokens=9).tokens


def test_a_description_in_tuples_is_that_in_lists_and_a_long_one_is_shortened(
    tmp_path: Path,
) -> None:
    class Described(NoDraft):
        mine: Any = (1, (2, 3))

        def describe(self) -> dict[str, Any]:
            return {**super().describe(), "mine": self.mine}

    decoder = Decoder(target().provider, Described())
    state = decoder.start(PROMPT, KEY, new_tokens=2)
    assert decoder.resume(loaded(tmp_path / "s.json", state)) == decoder.resume(state)
    Described.mine = ["x" * 10_000] * 1000
    with pytest.raises(ValueError, match=r"mine was \[1, \[2, 3\]\], is now \['x") as caught:
        Decoder(target().provider, Described()).step(state)
    assert len(str(caught.value)) < 1000
