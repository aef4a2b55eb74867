"""Candidates and the law they were drawn from, as a type."""

import itertools
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js

KINDS = sorted({rule.proposal for rule in js.RULES.values()}, key=lambda kind: kind.__name__)
SAMPLED = [kind for kind in KINDS if kind is not js.PointMass]


def count_siblings(kind: type[js.Proposal], row: list[float], num: int, cells: int) -> np.ndarray:
    """Count the ordered siblings drawn over a grid of their draws, int [V] * num."""
    axis = ((np.arange(cells) + 0.5) / cells).astype(np.float32)
    inside = np.array(list(itertools.product(axis, repeat=num)), np.float32)
    pairs = jnp.asarray(np.stack([np.zeros_like(inside), inside], axis=-1))
    tokens = np.asarray(jax.vmap(kind.draw, in_axes=(0, None))(pairs, jnp.array(row)))
    counts = np.zeros([len(row)] * num, int)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


def test_siblings_with_replacement_are_independent() -> None:
    row = [0.5, 0.25, 0.0, 0.25]
    counts = count_siblings(js.WithReplacement, row, 2, 8)
    assert counts.tolist() == (np.outer(row, row) * 64).tolist()


def test_siblings_without_replacement_follow_the_row_without_the_earlier_ones() -> None:
    row = [Fraction(1, 2), Fraction(1, 4), Fraction(0), Fraction(1, 4)]
    counts = count_siblings(js.WithoutReplacement, [float(x) for x in row], 2, 24)
    for first, second in itertools.product(range(4), repeat=2):
        wanted = Fraction(0)
        if first != second and row[first]:
            wanted = row[first] * row[second] / (1 - row[first])
        assert counts[first, second] == wanted * 24**2


def test_siblings_of_an_exhausted_draft_are_uniform_over_what_was_not_drawn() -> None:
    counts = count_siblings(js.WithoutReplacement, [0.0, 1.0, 0.0, 0.0], 3, 6)
    assert counts.sum(axis=(1, 2)).tolist() == [0, 216, 0, 0]
    for second, third in itertools.permutations((0, 2, 3), 2):
        assert counts[1, second, third] == 36


def test_every_token_is_drawn_once_without_replacement_even_beyond_one_block() -> None:
    vocab = 515
    row = jnp.zeros(vocab).at[jnp.array([3, 514])].set(0.5)
    pairs = jax.random.uniform(jax.random.key(0), (vocab, 2))
    tokens = np.asarray(js.WithoutReplacement.draw(pairs, row))
    assert set(tokens[:2]) == {3, 514}
    assert sorted(tokens) == list(range(vocab))


@pytest.mark.parametrize("kind", [js.WithReplacement, js.WithoutReplacement, js.PointMass])
def test_drawing_siblings_outside_of_a_trace_compiles_once(
    kind: type[js.Proposal], caplog: pytest.LogCaptureFixture
) -> None:
    pairs, row = jnp.array([[0.0, 0.3], [0.0, 0.6]]), jnp.array([0.25, 0.5, 0.25])
    kind.draw(pairs, row)
    with jax.log_compiles():
        kind.draw(pairs, row)
    assert not [each for each in caplog.messages if "compil" in each.lower()]


def test_point_masses_are_the_tokens_of_greatest_probability_the_lowest_first_among_equals() -> (
    None
):
    row = jnp.array([0.125, 0.25, 0.125, 0.25, 0.25])
    pairs = jnp.full((4, 2), jnp.nan)  # nothing is drawn
    assert js.PointMass.draw(pairs, row).tolist() == [1, 3, 4, 0]


def test_more_siblings_than_tokens_cannot_be_drawn_without_replacement() -> None:
    with pytest.raises(AssertionError):
        js.WithoutReplacement.draw(jnp.zeros((3, 2)), jnp.array([0.5, 0.5]))


def test_a_sampled_path_is_a_chain_drawn_with_replacement() -> None:
    tokens, rows = jnp.array([1, 0, 1]), jnp.full((3, 2), 0.5)
    path = js.sampled_path(tokens, rows, 2)
    assert isinstance(path, js.WithReplacement)
    wanted = js.chain(tokens, 2)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, path.tree, wanted))
    assert path.draft_rows is rows


@pytest.mark.parametrize("verify", [js.verify_path, js.verify_block], ids=["token", "block"])
def test_a_path_of_no_tokens_needs_no_draft_rows(verify: Callable[..., js.Verdict]) -> None:
    # A path of T drafted tokens takes T draft rows; a round without a draft has T = 0.
    path = js.sampled_path(jnp.zeros(0, jnp.int32), draft_rows=jnp.zeros((0, 2)))
    draws = js.Draws(accept=jnp.zeros(1), final=jnp.array([0.0, 0.6]))
    verdict = verify(draws, path, jnp.array([[0.5, 0.5]]))
    assert verdict.tokens.tolist() == [1]
    assert int(verdict.status) == 0


@pytest.mark.parametrize("verify", [js.verify_path, js.verify_block], ids=["token", "block"])
def test_a_proposal_that_branches_is_rejected_by_path_verifiers(
    verify: Callable[..., js.Verdict],
) -> None:
    tree = js.make_tree([-1, 0, 1], [-1, 0, 0])
    rows = jnp.full((3, 2), 0.5)
    draws = js.round_draws(jax.random.key(0), 3).verify
    with pytest.raises(AssertionError, match="3 nodes, 2 child slots and depth 1"):
        verify(draws, js.WithReplacement(tree=tree, draft_rows=rows), rows)


def test_draft_rows_of_leaves_may_be_left_out_and_other_counts_are_rejected() -> None:
    kind = js.WithReplacement
    tree = js.make_tree([-1, 0, 1], [-1, 0, 1])
    target = jnp.full((3, 2), 0.5)
    draws = js.round_draws(jax.random.key(0), 3).verify
    verdicts = [
        js.verify_tree(draws, kind(tree=tree, draft_rows=target[:num]), target, True)
        for num in (2, 3)
    ]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *verdicts))
    for num in (0, 1, 4):
        rows = jnp.full((num, 2), 0.5)
        with pytest.raises(AssertionError, match=f"draft rows: {num} given, must be 2 or 3"):
            js.verify_tree(draws, kind(tree=tree, draft_rows=rows), target)
    with pytest.raises(AssertionError, match="target rows: 2 given, must be 3"):
        js.verify_tree(draws, kind(tree=tree, draft_rows=target), target[:2])


@pytest.mark.parametrize("kind", SAMPLED)
def test_rows_of_different_vocabularies_or_not_of_floats_are_rejected(
    kind: type[js.Proposal],
) -> None:
    tree = js.make_tree([-1, 0], [-1, 0])
    draws = js.round_draws(jax.random.key(0), 2).verify
    rows = jnp.full((2, 2), 0.5)
    for draft, target in (
        (jnp.full((2, 3), 1 / 3), rows),
        (rows, jnp.full((2, 2), 1, jnp.int32)),
        (jnp.full((2, 2), 1, jnp.int32), rows),
        (rows[0], rows),
        (rows, rows[None]),
    ):
        proposal = kind(tree=tree, draft_rows=draft)
        for verify in (js.verify_tree, js.checked(js.verify_tree)):
            with pytest.raises(AssertionError):
                verify(draws, proposal, target)


def test_a_first_row_or_temperature_that_is_not_a_scalar_is_rejected() -> None:
    tree, rows = js.make_tree([-1, 0], [-1, 0]), jnp.full((2, 2), 0.5)
    draws = js.round_draws(jax.random.key(0), 2).verify
    for target in (
        js.Probabilities(values=rows, first=jnp.array([0])),
        js.Probabilities(values=rows, first=jnp.float32(0)),
        js.Logits(values=rows, temperature=jnp.ones(2)),
    ):
        with pytest.raises(AssertionError):
            js.verify_tree(draws, js.PointMass(tree=tree), target)


def test_the_bonus_must_be_a_bool() -> None:
    tree, rows = js.make_tree([-1, 0], [-1, 0]), jnp.full((2, 2), 0.5)
    draws = js.round_draws(jax.random.key(0), 2).verify
    for bonus in (1, 1.0, jnp.array([True, False])):
        with pytest.raises(AssertionError):
            js.verify_tree(draws, js.PointMass(tree=tree), rows, bonus)
