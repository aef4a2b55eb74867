"""One row: the draw of a token by a pair of uniforms; dense rows of a slab."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from helpers.random_rounds import VOCAB, WIDE, WIDE_BATCH, play, random_rounds

import jaxspec as js

TILE = 512
SIZE = 1600
BELOW_ONE = np.float32(1 - 2**-24)


@functools.cache
def drawer() -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Draw for every pair [K, 2] from one row [V]."""
    return jax.jit(jax.vmap(js.draw_token, in_axes=(0, None)))


def draw(pairs: npt.ArrayLike, row: npt.ArrayLike) -> np.ndarray:
    """Draw from one row with pairs [K, 2], padded to one size so that a row's size compiles once."""
    pairs = np.asarray(pairs, np.float32)
    padded = np.pad(pairs, ((0, SIZE - len(pairs)), (0, 0)))
    return np.asarray(drawer()(jnp.asarray(padded), jnp.asarray(row)))[: len(pairs)]


def midpoints(num: int) -> np.ndarray:
    return ((np.arange(num) + 0.5) / num).astype(np.float32)


def grid(first: int, second: int) -> np.ndarray:
    return np.stack(np.meshgrid(midpoints(first), midpoints(second), indexing="ij"), -1).reshape(
        -1, 2
    )


def sparse_row(vocab: int, seed: int) -> np.ndarray:
    """Draw a row half of whose tokens, and half of whose tiles, have no weight."""
    generator = np.random.default_rng(seed)
    row = generator.random(vocab) ** 3 * (generator.random(vocab) < 0.5)
    if vocab > TILE:
        row *= np.repeat(generator.random(vocab // TILE + 1) < 0.5, TILE)[:vocab]
    row[vocab // 2] += 0.01
    return (row / row.sum()).astype(np.float32)


def test_counts_over_a_grid_are_exactly_the_row() -> None:
    weights = np.array([3, 0, 1, 0, 8, 4, 0])
    tokens = draw(grid(1, 16 * 64), (weights / 16).astype(np.float32))
    assert np.bincount(tokens, minlength=7).tolist() == (weights * 64).tolist()


def test_counts_over_a_grid_of_pairs_are_exactly_the_row_of_three_tiles() -> None:
    # Tiles of mass 1/4, 1/2, 1/4, the last of 76 tokens; inside, 8, 4 and 2 equal tokens.
    row = np.zeros(2 * TILE + 76, np.float32)
    row[3:11], row[TILE : TILE + 4], row[-2:] = 1 / 32, 1 / 8, 1 / 8
    counts = np.bincount(draw(grid(8, 32), row), minlength=len(row))
    assert counts.tolist() == (row * 256).tolist()


def test_the_row_need_not_be_normalised() -> None:
    weights = np.array([3, 0, 1, 0, 8, 4, 0], np.float32)
    pairs = grid(1, 99)
    assert (draw(pairs, weights) == draw(pairs, weights / 16)).all()


@pytest.mark.parametrize("vocab", [7, TILE, 5000, 33380])
def test_a_draw_is_the_inverse_cdf_of_tiles_then_of_tokens(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    row = sparse_row(vocab, vocab)
    pairs = generator.random((400, 2)).astype(np.float32)
    exact = row.astype(np.float64)
    sums = np.add.reduceat(exact, np.arange(0, vocab, TILE))
    num_compared = 0
    for (first, second), token in zip(pairs.astype(np.float64), draw(pairs, row), strict=True):
        running = np.cumsum(sums) / sums.sum()
        block = int(np.argmax(running > first)) if vocab > TILE else 0
        inside = exact[block * TILE : (block + 1) * TILE]
        within = np.cumsum(inside) / inside.sum()
        if min(np.abs(running[:-1] - first).min(initial=1), np.abs(within - second).min()) < 1e-6:
            continue
        num_compared += 1
        assert token == block * TILE + np.argmax(within > second)
    assert num_compared > 380


@pytest.mark.parametrize("vocab", [7, 64, TILE, 2 * TILE, 5000])
def test_a_token_of_weight_zero_is_never_drawn_at_any_edge(vocab: int) -> None:
    for seed in range(8):
        row = sparse_row(vocab, seed)
        blocks = [row[at : at + TILE] for at in range(0, vocab, TILE)]
        sums = np.array([block.sum(dtype=np.float64) for block in blocks])
        edges = [np.array([0.0, -0.0, 2**-24, BELOW_ONE])]
        for block in range(len(blocks)):
            if sums[block] == 0:
                continue
            first = (sums[:block].sum() + sums[block] / 2) / sums.sum()
            running = np.asarray(jnp.cumsum(jnp.asarray(blocks[block])))
            inside = running / running[-1]
            inside = [
                inside,
                np.nextafter(inside, np.float32(0)),
                np.nextafter(inside, np.float32(1)),
            ]
            second = np.concatenate([*inside, *edges]).astype(np.float32)
            second = second[second < 1]
            pairs = np.stack([np.full_like(second, first), second], axis=1)
            tokens = draw(pairs, row)
            assert (row[tokens] > 0).all()
            assert (tokens // TILE == block).all()


def test_a_tile_of_mass_zero_is_never_drawn_from_at_any_edge() -> None:
    vocab = 300 * TILE + 1
    for seed in range(3):
        row = sparse_row(vocab, seed)
        sums = jnp.asarray(np.add.reduceat(row, np.arange(0, vocab, TILE)))
        running = np.asarray(jnp.cumsum(sums))
        edges = running / running[-1]
        edges = [edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1))]
        first = np.concatenate([*edges, [0.0, BELOW_ONE]]).astype(np.float32)
        first = np.where(first < 1, first, 0)
        tokens = draw(np.stack([first, np.full_like(first, 0.5)], axis=1), row)
        assert (row[tokens] > 0).all()


@pytest.mark.parametrize("vocab", [7, 2 * TILE + 5])
def test_a_draw_just_below_one_takes_the_last_token_of_positive_weight(vocab: int) -> None:
    row = np.zeros(vocab, np.float32)
    row[[1, 3]], row[-4] = 0.25, 0.5
    assert draw([[BELOW_ONE, BELOW_ONE]], row) == vocab - 4
    assert draw([[0.0, 0.0]], row) == 1


@pytest.mark.parametrize("vocab", [7, 2 * TILE + 5])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_an_entry_that_is_not_finite_yields_no_token(vocab: int, bad: float) -> None:
    row = np.full(vocab, 1 / vocab, np.float32)
    for place in (0, vocab // 2, vocab - 1):
        corrupt = row.copy()
        corrupt[place] = bad
        assert draw([[0.1, 0.1]], corrupt) == -1


def test_a_row_without_mass_yields_no_token() -> None:
    assert draw([[0.1, 0.1]], np.zeros(7, np.float32)) == -1
    assert draw([[0.1, 0.1]], np.zeros(2 * TILE + 5, np.float32)) == -1


@pytest.mark.parametrize("bad", [np.nan, 1.0, -0.1, np.inf])
def test_a_bad_number_of_the_pair_yields_no_token_if_it_is_used(bad: float) -> None:
    small, large = (np.full(vocab, 1 / vocab, np.float32) for vocab in (7, 2 * TILE + 5))
    assert draw([[0.1, bad]], small) == -1
    assert draw([[bad, 0.1]], small) == 0  # one tile: the first number is not read
    assert draw([[0.1, bad]], large) == -1
    assert draw([[bad, 0.1]], large) == -1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_rows_of_half_precision_are_drawn_from_in_float32(dtype: jnp.dtype) -> None:
    row = jnp.asarray(sparse_row(TILE, 1)).astype(dtype)
    pairs = np.random.default_rng(1).random((400, 2)).astype(np.float32)
    assert (draw(pairs, row) == draw(pairs, row.astype(jnp.float32))).all()


def test_a_pair_and_a_row_of_wrong_rank_or_size_are_rejected() -> None:
    pair, row = jnp.zeros(2), jnp.ones(3)
    for bad_pair, bad_row in ((jnp.zeros(3), row), (jnp.float32(0), row), (pair, row[None])):
        with pytest.raises(AssertionError):
            js.draw_token(bad_pair, bad_row)


def test_dense_rows_beyond_a_slab_are_rejected_or_nan() -> None:
    slab = jnp.full((3, 2), 0.5)
    with pytest.raises(ValueError, match="num_rows is 7: the slab has 3 rows"):
        js.dense_rows(slab, 7)
    with pytest.raises(ValueError, match="rows is of type list: must be an array"):
        js.dense_rows([[0.5, 0.5]], 1)
    for first, known in (
        (0, [True, True]),
        (2, [True, False]),
        (-1, [False, False]),
        (3, [False] * 2),
    ):
        rows = js.dense_rows(js.Probabilities(values=slab, first=jnp.int32(first)), 2)
        assert (~jnp.isnan(rows).any(axis=1)).tolist() == known


@pytest.mark.parametrize("rule", js.RULES.values(), ids=js.RULES)
def test_entries_beyond_the_vocabulary_of_a_padded_slab_are_never_read(rule: js.Rule) -> None:
    rounds = random_rounds(rule, 90)
    draws, proposal, target, bonus = rounds.arguments(rule.proposal)

    def padded(rows: jax.Array, more: int) -> js.Probabilities:
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, more)), constant_values=jnp.nan)
        return js.Probabilities(values=rows, vocab=VOCAB)

    if proposal.draft_rows is not None:
        proposal = dataclasses.replace(proposal, draft_rows=padded(proposal.draft_rows, 5))
    found = jax.vmap(rule.verify)(draws, proposal, padded(target, 3), bonus)
    for name, values in vars(play(rule, rounds)).items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)


def test_a_padded_slab_of_a_large_vocabulary_is_verified_as_without_its_padding() -> None:
    rule = js.RULES["token"]
    rounds = random_rounds(rule, 91, batch=WIDE_BATCH, vocab=WIDE)
    draws, proposal, target, bonus = rounds.arguments(rule.proposal)

    def padded(rows: jax.Array) -> js.Logits:
        rows = jnp.pad(jnp.log(rows), ((0, 0), (0, 0), (0, 28)), constant_values=jnp.inf)
        return js.Logits(values=rows, temperature=jnp.ones(WIDE_BATCH), vocab=WIDE)

    proposal = dataclasses.replace(proposal, draft_rows=padded(proposal.draft_rows))
    found = jax.vmap(rule.verify)(draws, proposal, padded(target), bonus)
    assert not found.status.any()
    rounds.target, rounds.draft = (np.asarray(jnp.log(x)) for x in (rounds.target, rounds.draft))
    for name, values in vars(play(rule, rounds, logits=True)).items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)


@pytest.mark.parametrize("vocab", [0, 3, 1.0, True])
def test_a_vocabulary_that_the_slab_cannot_hold_is_an_error(vocab: Any) -> None:
    rows = js.Probabilities(values=jnp.ones((1, 2)) / 2, vocab=vocab)
    with pytest.raises(ValueError, match="vocab of the given rows is"):
        js.dense_rows(rows, 1)
