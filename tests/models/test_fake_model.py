"""The fake model: exact rows for correct callers, NaN for each violation of the protocol."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fake_model import FakeCache, fake_model, row_after

from jaxspec.models import Block, LanguageModel

SLOTS = 16
WIDTH = 8
TEXT = (3, 1, 4, 1, 0, 2, 3)
PLAIN = fake_model()
kept = jax.jit(PLAIN.keep)


@functools.partial(jax.jit, static_argnums=0)
def run(forward: Any, params: Any, *arguments: Any) -> Any:
    return forward(params, *arguments)


def ask(
    model: LanguageModel,
    cache: FakeCache,
    tokens: Sequence[int],
    at: int,
    *,
    positions: Sequence[int] | None = None,
    mask: Any = None,
) -> tuple[np.ndarray, FakeCache]:
    """Run a block, padded to one width; by default a span of text."""
    count = len(tokens)
    padded = jnp.zeros(WIDTH, jnp.int32).at[:count].set(jnp.asarray(tokens, jnp.int32))
    block = Block.of_text(padded, at, SLOTS)
    changed = {"positions": positions, "mask": mask}
    for name, values in changed.items():
        if values is not None:
            field = getattr(block, name).at[:count].set(jnp.asarray(values))
            block = dataclasses.replace(block, **{name: field})
    logits, cache = run(model.forward, model.params, cache, block)
    return np.asarray(logits)[:count], cache


def keep(cache: FakeCache, at: int, path: Sequence[int]) -> FakeCache:
    return kept(cache, np.int32(at), np.array(path, np.int32))


def seen_from(at: int, slots: dict[int, bool]) -> np.ndarray:
    """The mask of a token at a slot that sees all up to it, but for some slots."""
    mask = np.arange(SLOTS) <= at
    for slot, is_seen in slots.items():
        mask[slot] = is_seen
    return mask[None]


def after(model: LanguageModel, tokens: Sequence[int], **options: Any) -> FakeCache:
    return ask(model, model.init_cache(SLOTS), tokens, 0, **options)[1]


def expected(*contexts: Sequence[int]) -> np.ndarray:
    return np.stack([row_after(context) for context in contexts])


SIBLINGS = np.tile(np.arange(SLOTS) <= 2, (3, 1))  # a root at slot 2, two children of it
SIBLINGS[[1, 2], [3, 4]] = True


def test_rows_are_those_of_the_text_seen_in_one_block_or_several() -> None:
    texts = [TEXT[: n + 1] for n in range(len(TEXT))]
    rows, _ = ask(PLAIN, PLAIN.init_cache(SLOTS), TEXT, 0)
    np.testing.assert_array_equal(rows, expected(*texts))
    rows, _ = ask(PLAIN, after(PLAIN, TEXT[:4]), TEXT[4:], 4)
    np.testing.assert_array_equal(rows, expected(*texts[4:]))
    assert len(np.unique(expected(*texts))) == len(TEXT) * 5  # no two logits alike


def test_a_tree_has_the_rows_of_its_paths_and_what_is_kept_is_text() -> None:
    rows, cache = ask(
        PLAIN, after(PLAIN, TEXT[:2]), (4, 1, 0), 2, positions=(2, 3, 3), mask=SIBLINGS
    )
    np.testing.assert_array_equal(rows, expected((3, 1, 4), (3, 1, 4, 1), (3, 1, 4, 0)))
    cache = keep(cache, 2, (0, 2, -1))
    rows, _ = ask(PLAIN, cache, (2,), 4)
    np.testing.assert_array_equal(rows, expected((3, 1, 4, 0, 2)))


def test_a_noisy_fake_is_another_model_that_often_takes_the_same_token() -> None:
    noisy = fake_model(noise=0.25)
    contexts = [tuple(c) for c in np.random.default_rng(0).integers(5, size=(200, 4)).tolist()]
    plain = np.stack([row_after(c) for c in contexts])
    other = np.stack([row_after(c, noise=0.25) for c in contexts])
    agree = (plain.argmax(1) == other.argmax(1)).mean()
    assert 0.5 < agree < 1
    rows, _ = ask(noisy, noisy.init_cache(SLOTS), contexts[0], 0)
    np.testing.assert_array_equal(rows[-1], other[0])


def test_a_path_model_looks_at_neither_mask_nor_positions() -> None:
    path_model = fake_model(takes_trees=False)
    nothing = np.zeros((3, SLOTS), bool)
    rows, _ = ask(path_model, after(path_model, TEXT[:2]), TEXT[2:5], 2, positions=(0, 0, 0))
    np.testing.assert_array_equal(rows, expected(TEXT[:3], TEXT[:4], TEXT[:5]))
    again, _ = ask(path_model, after(path_model, TEXT[:2]), TEXT[2:5], 2, mask=nothing)
    np.testing.assert_array_equal(again, rows)


# --- violationes: (what, a block's rows, which of them must be NaN)


def stale_slot() -> np.ndarray:
    return ask(PLAIN, after(PLAIN, TEXT), TEXT[2:3], 2, mask=seen_from(2, {11: True}))[0]


def slot_never_written() -> np.ndarray:
    mask = seen_from(2, {0: False, 12: True})
    return ask(PLAIN, after(PLAIN, TEXT[:2]), TEXT[2:3], 2, mask=mask)[0]


def gap_in_the_text() -> np.ndarray:
    mask = seen_from(3, {2: False})
    return ask(PLAIN, after(PLAIN, TEXT), TEXT[3:4], 3, mask=mask)[0]


def own_slot_unseen() -> np.ndarray:
    # As many slots as there should be, each position once: but another token at its own.
    mask = seen_from(2, {2: False, 3: True})
    return ask(PLAIN, after(PLAIN, TEXT), TEXT[2:4], 2, mask=[*mask, *mask], positions=(2, 2))[0][
        :1
    ]


def siblings_in_a_row() -> np.ndarray:
    return ask(PLAIN, after(PLAIN, TEXT[:2]), (4, 1, 0), 2, positions=(2, 3, 3))[0][2:]


def flat_positions() -> np.ndarray:
    return ask(PLAIN, after(PLAIN, TEXT[:2]), (4, 1, 0), 2, mask=SIBLINGS)[0][2:]


def block_over_the_end() -> np.ndarray:
    return ask(PLAIN, after(PLAIN, TEXT), TEXT[:3], SLOTS - WIDTH + 1)[0]


def block_before_the_start() -> np.ndarray:
    return ask(PLAIN, PLAIN.init_cache(SLOTS), TEXT[:3], -1)[0]


def beyond_its_positions() -> np.ndarray:
    short = fake_model(max_context=3)
    return ask(short, short.init_cache(SLOTS), TEXT, 0)[0][3:]


def after_an_unknown_id() -> np.ndarray:
    return ask(PLAIN, after(PLAIN, (3, 1, -1)), TEXT[2:3], 2)[0]


def written_twice_without_roll_back() -> np.ndarray:
    forward_only = fake_model(rolls_back=False)
    return ask(forward_only, after(forward_only, TEXT), TEXT[2:3], 2)[0]


def slot_given_up_by_keep() -> np.ndarray:
    cache = keep(after(PLAIN, TEXT[:4]), 2, (0, 1, -1))
    return ask(PLAIN, cache, TEXT[5:6], 5)[0]


def path_that_falls() -> np.ndarray:
    cache = keep(after(PLAIN, TEXT), 2, (0, 2, 1))
    return ask(PLAIN, cache, TEXT[3:4], 3)[0]


def path_with_a_hole() -> np.ndarray:
    cache = keep(after(PLAIN, TEXT), 2, (0, -1, 3))
    return ask(PLAIN, cache, TEXT[3:4], 3)[0]


VIOLATIONS = [
    stale_slot,
    slot_never_written,
    gap_in_the_text,
    own_slot_unseen,
    siblings_in_a_row,
    flat_positions,
    block_over_the_end,
    block_before_the_start,
    beyond_its_positions,
    after_an_unknown_id,
    written_twice_without_roll_back,
    slot_given_up_by_keep,
    path_that_falls,
    path_with_a_hole,
]


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda violation: violation.__name__)
def test_a_violation_of_the_protocol_makes_every_row_nan(violation: Any) -> None:
    rows = violation()
    assert rows.size
    assert np.isnan(rows).all()


def test_a_token_of_another_text_makes_another_row() -> None:
    rows, _ = ask(PLAIN, after(PLAIN, (3, 0)), TEXT[2:3], 2)
    assert (rows != expected(TEXT[:3])).all()
