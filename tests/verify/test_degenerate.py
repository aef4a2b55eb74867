"""Where two rules must come to one outcome, they do: draw for draw, over hundreds of rounds."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.random_rounds import (
    BATCH,
    CHILDREN,
    DEPTH,
    DRAFTED,
    NODES,
    VOCAB,
    Rounds,
    emitted,
    play,
    random_rounds,
)

import jaxspec as js

TOKEN, BLOCK = js.RULES["token"], js.RULES["block"]


def in_a_tree(paths: Rounds) -> Rounds:
    """Lay paths of at most D tokens out in the capacity of a tree, everything else padding.

    Padding holds values that would show if they were read.
    """
    tree = paths.copy()
    more = NODES - DRAFTED - 1
    pad = ((0, 0), (0, more))
    tree.tokens = np.pad(paths.tokens, pad, constant_values=-1)
    tree.parents = np.pad(paths.parents, pad, constant_values=-1)
    slots = ((0, 0), (0, more), (0, CHILDREN - 1))
    tree.children = np.pad(paths.children, slots, constant_values=-1)
    tree.level_sizes = paths.level_sizes[:, : DEPTH + 1]
    tree.target = np.pad(paths.target, (*pad, (0, 0)), constant_values=np.nan)
    tree.draft = np.pad(paths.draft, (*pad, (0, 0)), constant_values=np.nan)
    tree.accept = np.pad(paths.accept, pad, constant_values=np.nan)
    return tree


def assert_same_outcome(first: js.Verdict, second: js.Verdict) -> None:
    """Assert equality of two batches of verdicts of maybe different capacity, field by field."""
    for b in range(len(first.num_tokens)):
        assert emitted(first, b) == emitted(second, b), f"round {b}"
        depth = first.num_accepted[b]
        assert depth == second.num_accepted[b], f"round {b}"
        assert (first.path[b, : depth + 1] == second.path[b, : depth + 1]).all(), f"round {b}"
    assert (first.stop_node == second.stop_node).all()
    assert (first.status == second.status).all()


def batched(verify: Callable[..., js.Verdict], rounds: Rounds, kind: type) -> js.Verdict:
    return jax.tree.map(np.asarray, jax.vmap(verify)(*rounds.arguments(kind)))


@pytest.mark.parametrize("tree_rule", ["with_replacement", "without_replacement"])
@pytest.mark.parametrize("seed", [40, 41])
def test_a_path_in_a_tree_of_any_kind_is_verified_as_the_path(tree_rule: str, seed: int) -> None:
    paths = random_rounds(TOKEN, seed, max_depth=DEPTH)
    assert_same_outcome(play(TOKEN, paths), play(js.RULES[tree_rule], in_a_tree(paths)))


def test_a_path_of_point_masses_in_a_tree_is_verified_as_the_path() -> None:
    paths = random_rounds(TOKEN, 42, max_depth=DEPTH)
    as_path = batched(js.verify_path, paths, js.PointMass)
    assert_same_outcome(as_path, play(js.RULES["point_mass"], in_a_tree(paths)))


def test_a_sure_draft_is_verified_as_a_point_mass() -> None:
    # Where the draft row is one token, sampling from it and choosing that token are the same.
    paths = random_rounds(TOKEN, 43, max_depth=DEPTH)
    for b, parent in np.argwhere(paths.children[..., 0] >= 0):
        paths.draft[b, parent] = np.eye(VOCAB)[paths.tokens[b, paths.children[b, parent, 0]]]
    assert_same_outcome(play(TOKEN, paths), play(js.RULES["point_mass"], in_a_tree(paths)))


@pytest.mark.parametrize("seed", [44, 45])
def test_traversal_of_a_path_is_block_verification(seed: int) -> None:
    paths = random_rounds(BLOCK, seed, max_depth=DEPTH)
    assert_same_outcome(play(BLOCK, paths), play(js.RULES["traversal"], in_a_tree(paths)))


@pytest.mark.parametrize("seed", [46, 47])
def test_a_block_of_one_token_is_verified_as_that_token(seed: int) -> None:
    paths = random_rounds(TOKEN, seed, max_depth=1)
    assert_same_outcome(play(TOKEN, paths), play(BLOCK, paths))


@pytest.mark.parametrize("name", js.RULES)
def test_a_tree_of_the_root_alone_emits_one_token_of_the_target_row(name: str) -> None:
    rule = js.RULES[name]
    rounds = random_rounds(rule, 49)
    rounds.tokens[:] = rounds.parents[:] = rounds.children[:] = -1
    rounds.level_sizes[:, 1:] = 0
    verdict = play(rule, rounds)
    pairs = jnp.asarray(rounds.final)
    wanted = jax.vmap(js.draw_token)(pairs, jnp.asarray(rounds.target[:, 0]))
    assert (verdict.tokens[:, 0] == wanted).all()
    assert (verdict.num_tokens == 1).all()
    assert not verdict.num_accepted.any()


def test_rows_in_one_slab_by_offset_are_verified_as_separate_arrays() -> None:
    rule = TOKEN
    rounds = random_rounds(rule, 50)
    draws, proposal, target, bonus = rounds.arguments(rule.proposal)
    nodes = rounds.target.shape[1]
    # Sequences are in the slab in reverse, behind rows of no sequence.
    first = jnp.arange(BATCH, dtype=jnp.int32)[::-1] * nodes + 7

    def packed(rows: jax.Array) -> js.Probabilities:
        others = jnp.full((7, VOCAB), jnp.nan)
        slab = jnp.concatenate([others, rows[::-1].reshape(-1, VOCAB)])
        return js.Probabilities(values=slab, first=first)

    rows_axes = js.Probabilities(values=None, first=0)
    proposal = dataclasses.replace(proposal, draft_rows=packed(proposal.draft_rows))
    axes = (0, dataclasses.replace(proposal, tree=0, draft_rows=rows_axes), rows_axes, 0)
    verdict = jax.vmap(rule.verify, in_axes=axes)(draws, proposal, packed(target), bonus)
    assert_same_outcome(play(rule, rounds), jax.tree.map(np.asarray, verdict))
