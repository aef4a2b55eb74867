"""A cached network in the host loop: the text of plain decoding, and errors before a forward."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from helpers.fake_model import fake_model, row_after

import jaxspec as js
from jaxspec.decode import CachedNetwork, Decoder, metrics_of
from jaxspec.decode.target import as_target
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, Drafter, FixedTree, NoDraft, SampledPath
from jaxspec.models import CacheError, Provider, Softmax

VOCAB = 5
SLOTS = 40
NOISE = 0.25
PROMPT = (3, 1, 4)
POLICY = AdaptiveTreePolicy(
    min_width=1, max_width=2, min_depth=1, max_depth=2, first_depth=1, max_nodes=5
)
FAKE = fake_model(VOCAB, name="target")
NOISY = fake_model(VOCAB, name="draft", noise=NOISE)
PATH_ONLY = fake_model(VOCAB, name="path model", takes_trees=False, has_keep=False)


def drafters(draft: Provider) -> dict[str, Drafter]:
    return {
        "none": NoDraft(),
        "path by token": SampledPath(draft, depth=4),
        "path by block": SampledPath(draft, depth=4, rule=js.RULES["block"]),
        "fixed tree": FixedTree(draft, (2, 1)),
        "adaptive tree": AdaptiveTree(draft, POLICY),
    }


each_drafter = pytest.mark.parametrize("name", drafters(Provider("any", VOCAB, ask=len)))


def cached(model: Any = FAKE, **options: Any) -> CachedNetwork:
    """Cache and chunks of one size everywhere, so that little is compiled."""
    return CachedNetwork(model, **{"slots": SLOTS, "chunk": 4, **options})


def by_hand(name: str, noise: float, transform: Softmax) -> Provider:
    """The rows of a fake, from the text alone."""
    row = functools.partial(row_after, vocab=VOCAB, noise=noise)
    return Provider(name, VOCAB, ask=row, transform=transform)


def decoders(name: str, temperature: float, target: Any = FAKE) -> tuple[Decoder, Decoder]:
    """The same decoder with cached networks and with rows made by hand."""
    softmax = Softmax(temperature)
    draft = cached(NOISY, transform=softmax).provider()
    ours = Decoder(cached(target, transform=softmax), drafters(draft)[name])
    plain = drafters(by_hand("draft", NOISE, softmax))[name]
    return ours, Decoder(by_hand("target", 0.0, softmax), plain)


def greedy_text(count: int) -> tuple[int, ...]:
    text = PROMPT
    for _ in range(count):
        text = (*text, int(row_after(text, VOCAB).argmax()))
    return text


# --- the host loop


@each_drafter
def test_at_temperature_zero_the_text_is_that_of_plain_greedy_decoding(name: str) -> None:
    decoder, _ = decoders(name, 0.0)
    state = decoder.run(PROMPT, jax.random.key(0), new_tokens=24)
    assert state.tokens == greedy_text(24)
    if name != "none":
        accepted = [each.num_accepted for each in state.rounds]
        assert 0 in accepted  # both a rejection and more than one acceptance were lived through
        assert max(accepted) > 1


@each_drafter
def test_text_and_counts_are_those_of_rows_made_by_hand(name: str) -> None:
    for seed in range(2):
        ours, by_hand = (
            decoder.run(PROMPT, jax.random.key(seed), new_tokens=24)
            for decoder in decoders(name, 1.0)
        )
        assert ours.tokens == by_hand.tokens
        for mine, other in zip(ours.rounds, by_hand.rounds, strict=True):
            assert mine.tested == other.tested
            assert mine.target.queries == other.target.queries
            assert mine.target_batches == other.target_batches == 1
        assert metrics_of(ours.rounds).target_calls >= len(ours.rounds)


@pytest.mark.parametrize("name", ["none", "path by token", "path by block"])
def test_a_network_that_takes_no_mask_decodes_by_paths(name: str) -> None:
    decoder, _ = decoders(name, 0.0, PATH_ONLY)
    assert decoder.run(PROMPT, jax.random.key(0), new_tokens=24).tokens == greedy_text(24)


def test_a_decode_resumed_with_an_empty_cache_goes_on_as_it_would_have() -> None:
    decoder, _ = decoders("fixed tree", 1.0)
    states = list(decoder.rounds(decoder.start(PROMPT, jax.random.key(4), new_tokens=24)))
    again, _ = decoders("fixed tree", 1.0)
    assert again.resume(states[2][0]).tokens == states[-1][0].tokens


# --- errors, before anything is fed

TREE = js.make_tree([4, 0, 1], [-1, 0, 0], max_nodes=5, max_depth=2)
LONG = (*PROMPT, *[0, 3, 2, 1] * 9)  # one less than the cache has slots
ROW = Softmax()(row_after(PROMPT, VOCAB))


def assert_untouched(target: CachedNetwork, forwards: int) -> None:
    """The cache is as it was: the same context costs one forward and has the right row."""
    assert target.forwards == forwards
    scores = target.rows(js.make_tree([4], [-1]), PROMPT)
    np.testing.assert_array_equal(scores.rows[0], ROW)
    assert scores.usage.calls == 1


def test_too_small_a_cache_is_an_error_before_anything_is_overwritten() -> None:
    target = cached()
    target.rows(TREE, (*LONG[:35], 4))  # just fits
    target.rows(TREE, PROMPT)
    forwards = target.forwards
    message = "a context of 37 tokens and a tree with room for 5 nodes, the root in both, need 41"
    with pytest.raises(CacheError, match=f"target: {message} slots; the cache has 40"):
        target.rows(TREE, (*LONG[:36], 4))
    with pytest.raises(CacheError, match=r"a context of 41 tokens .* need 41 slots; the cache has"):
        target.provider().rows([(*LONG, 1, 1)])
    assert_untouched(target, forwards)
    full = (*LONG, 1)
    np.testing.assert_array_equal(
        target.provider().rows([full])[0][0], Softmax()(row_after(full, VOCAB))
    )


def test_more_positions_than_a_network_was_made_for_are_an_error() -> None:
    target = cached(dataclasses.replace(FAKE, name="short", max_context=5))
    target.rows(TREE, (3, 1, 1, 4), bonus=True)  # reaches position 4
    target.rows(TREE, PROMPT)
    message = "a context of 5 tokens and a tree 1 deep reach 6 positions; it was made for 5"
    with pytest.raises(CacheError, match=f"short: {message}"):
        target.rows(TREE, (3, 1, 1, 1, 4))
    assert_untouched(target, 2)


def test_a_tree_for_a_network_that_takes_none_is_an_error() -> None:
    for model, why in (
        (PATH_ONLY, "takes no mask, so it verifies paths only: propose a path"),
        (dataclasses.replace(FAKE, keep=None), "has a cache whose slots cannot move"),
    ):
        target = cached(model)
        path = js.make_tree([4, 0], [-1, 0], max_nodes=5, max_children=2, max_depth=2)
        target.rows(path, PROMPT)
        with pytest.raises(CacheError, match=why):
            target.rows(TREE, PROMPT)
        assert_untouched(target, 1)


def test_a_cache_that_cannot_roll_back_is_an_error_at_once() -> None:
    with pytest.raises(CacheError, match="its cache cannot roll back"):
        CachedNetwork(fake_model(rolls_back=False), slots=8)


def test_bad_contexts_are_errors_before_a_forward() -> None:
    target = cached()
    target.rows(TREE, PROMPT)
    for context, message in (
        ((), "context is empty"),
        ((9, 4), "entry 0 is 9, outside"),
        ((1, 1), "the tree's root is token 4, the context ends with 1"),
    ):
        with pytest.raises(ValueError, match=message):
            target.rows(TREE, context)
    for context, message in (((), "context is empty"), ((9, 4), "entry 0 is 9, outside")):
        with pytest.raises(ValueError, match=message):
            target.provider().rows([context])
    assert_untouched(target, 1)


@pytest.mark.parametrize("name", ["slots", "chunk"])
def test_sizes_without_room_for_a_token_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        cached(**{name: 0})


def test_a_forward_that_fails_is_forgotten() -> None:
    target = cached()
    tree = js.make_tree([2, 0, 1], [-1, 0, 0], max_nodes=5, max_depth=2)
    context = (3, 1, 4, 0, 1, 1, 2, 3, 1, 2)
    expected = target.rows(tree, context).rows
    target.model = dataclasses.replace(FAKE, params={})
    with pytest.raises(KeyError):
        target.rows(tree, (*context[:5], 2))
    target.model = dataclasses.replace(FAKE, params={"noise": np.float32("nan")})
    with pytest.raises(js.RowError, match=r"target: row for context .*: logit 0 is nan"):
        target.rows(tree, context)
    target.model = FAKE
    np.testing.assert_array_equal(target.rows(tree, context).rows, expected)


def test_the_transform_of_the_target_counts() -> None:
    rows = cached(transform=Softmax(0)).rows(TREE, PROMPT, bonus=True).rows
    by_rows = as_target(by_hand("target", 0.0, Softmax(0))).rows(TREE, PROMPT, bonus=True).rows
    np.testing.assert_array_equal(rows, by_rows)
