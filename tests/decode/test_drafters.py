"""Drafters: what each proposes, what it asks of the draft, and what it may not be."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toys import DRAFTERS, POLICY, VOCAB, WITH_A_DRAFT, Model, draft, draw_token, likely_up

import jaxspec as js
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, Drafter, FixedTree, NoDraft, SampledPath
from jaxspec.models.provider import Usage

CONTEXT = (2, 0)


def pairs_of(*numbers: float) -> jnp.ndarray:
    """Pairs for a path of two: nothing for the root, then a number for each node."""
    return jnp.array([(0.9, u) for u in (0.9, *numbers)], jnp.float32)


def tokens_of(drafter: Drafter, depth: int, pairs: Any = None) -> list[int]:
    pairs = jnp.full((drafter.max_nodes, 2), 0.5) if pairs is None else pairs
    return np.asarray(drafter.propose(CONTEXT, depth, pairs).proposal.tree.tokens)[1:].tolist()


def test_a_path_is_drawn_token_by_token_with_the_pair_of_its_node() -> None:
    path = SampledPath(Model("draft", likely_up).provider, depth=2)
    # After 0 the row is (0.2, 0.5, 0.3): running totals 0.2, 0.7, 1. After 1: (0.3, 0.2, 0.5).
    assert tokens_of(path, 2, pairs_of(0.1, 0.1)) == [0, 0]
    assert tokens_of(path, 2, pairs_of(0.6, 0.1)) == [1, 0]
    assert tokens_of(path, 2, pairs_of(0.6, 0.4)) == [1, 1]
    assert tokens_of(path, 2, pairs_of(0.8, 0.6)) == [2, 1]


def test_the_row_on_record_is_the_row_that_each_token_was_drawn_from() -> None:
    model = draft()
    made = SampledPath(model.provider, depth=2).propose(CONTEXT, 2, pairs_of(0.3, 0.8))
    first = int(made.proposal.tree.tokens[1])
    assert model.asked == [CONTEXT, (*CONTEXT, first)]
    expected = np.float32([model.row(context) for context in model.asked])
    np.testing.assert_allclose(np.asarray(made.proposal.draft_rows), expected, rtol=3e-7)
    for node, pair in enumerate(pairs_of(0.3, 0.8)[1:], start=1):
        row = made.proposal.draft_rows[node - 1]
        assert int(draw_token(pair, row)) == int(made.proposal.tree.tokens[node])


def test_a_row_of_half_precision_is_recorded_as_the_law_that_is_drawn_from() -> None:
    half = np.float16([0.5, 0.3, 0.1992])
    assert half.sum(dtype=np.float64) < 0.9995  # within the tolerance of the type
    path = SampledPath(Model("draft", lambda _: half).provider, depth=2)
    rows = np.asarray(path.propose(CONTEXT, 2, pairs_of(0.3, 0.8)).proposal.draft_rows)
    np.testing.assert_allclose(rows.sum(axis=1, dtype=np.float64), 1, atol=1e-7)
    np.testing.assert_allclose(rows[0], half / half.sum(dtype=np.float64), rtol=1e-7)


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_a_path_of_any_depth_up_to_its_own_has_one_capacity(depth: int) -> None:
    model = draft()
    made = SampledPath(model.provider, depth=2).propose(CONTEXT, depth, pairs_of(0.3, 0.8))
    tree = made.proposal.tree
    drafted = min(depth, 2)
    assert (tree.max_nodes, tree.max_children, tree.max_depth) == (3, 1, 2)
    assert made.depth == made.batches == int(tree.num_nodes) - 1 == drafted
    assert made.usage == Usage(queries=drafted, calls=drafted) == Usage(len(model.asked), drafted)


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_fixed_tree_takes_the_most_probable_after_each_prefix(is_batched: bool) -> None:
    model = Model("draft", likely_up, is_batched=is_batched)
    tree = FixedTree(model.provider, widths=(2, 1))
    made = tree.propose(CONTEXT, 2, jnp.zeros((5, 2)))
    # After 0 the best two are 1 and 2; after 1 the best is 2, after 2 it is 0.
    assert np.asarray(made.proposal.tree.tokens).tolist() == [0, 1, 2, 2, 0]
    assert np.asarray(made.proposal.tree.parents).tolist() == [-1, 0, 0, 1, 2]
    assert model.asked == [(2, 0), (2, 0, 1), (2, 0, 2)]
    assert made.usage == Usage(queries=3, calls=2 if is_batched else 3)
    assert (made.depth, made.batches) == (2, 2)


def test_an_adaptive_tree_is_wide_where_the_draft_is_unsure() -> None:
    rows = {(2, 0): [0.0, 1.0, 0.0], (2, 0, 1): [0.4, 0.3, 0.3]}
    model = Model("draft", rows.__getitem__)
    made = AdaptiveTree(model.provider, POLICY).propose(CONTEXT, 2, jnp.zeros((5, 2)))
    # A sure row, h = 0: one candidate, the least width. Then h = 0.99: two.
    assert np.asarray(made.proposal.tree.tokens).tolist() == [0, 1, 0, 1, -1]
    assert np.asarray(made.proposal.tree.parents).tolist() == [-1, 0, 1, 1, -1]
    assert (made.usage, made.depth, made.batches) == (Usage(2, 2), 2, 2)


def test_no_draft_proposes_the_root_alone() -> None:
    made = NoDraft().propose(CONTEXT, 5, jnp.zeros((1, 2)))
    assert np.asarray(made.proposal.tree.tokens).tolist() == [0]
    assert (made.depth, made.usage, made.batches) == (0, Usage(), 0)
    assert NoDraft().next_depth(3, 1, 1) == 0


@pytest.mark.parametrize("name", WITH_A_DRAFT)
def test_at_depth_0_nothing_is_asked_and_the_root_stands_alone(name: str) -> None:
    model = draft()
    drafter = DRAFTERS[name](model.provider)
    made = drafter.propose(CONTEXT, 0, jnp.zeros((drafter.max_nodes, 2)))
    assert (int(made.proposal.tree.num_nodes), made.depth, made.batches) == (1, 0, 0)
    assert made.usage == Usage()
    assert model.calls == []


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_all_proposals_of_a_drafter_have_one_shape(name: str, depth: int) -> None:
    drafter = DRAFTERS[name](draft().provider)
    shapes = [
        [
            leaf.shape
            for leaf in dataclasses.astuple(drafter.propose(context, d, pairs).proposal.tree)
        ]
        for context, d in ((CONTEXT, depth), ((1,), drafter.first_depth))
        for pairs in [jnp.zeros((drafter.max_nodes, 2))]
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0][0] == (drafter.max_nodes,)


def test_the_nodes_of_a_tree_are_those_asked_for_within_the_budget() -> None:
    provider = draft().provider
    assert FixedTree(provider, (3, 2)).max_nodes == 1 + 3 + 6
    assert FixedTree(provider, (3, 2), node_budget=6).max_nodes == 6
    assert FixedTree(provider, (3, 2), node_budget=99).max_nodes == 10
    wide = AdaptiveTreePolicy(max_width=2, max_depth=3, first_depth=1, max_nodes=99)
    assert AdaptiveTree(provider, wide).max_nodes == 1 + 2 + 4 + 8
    assert AdaptiveTree(provider, POLICY).max_nodes == 5
    made = FixedTree(provider, (2, 2), node_budget=4).propose(CONTEXT, 2, jnp.zeros((4, 2)))
    assert int(made.proposal.tree.num_nodes) == 4


def test_a_width_beyond_the_vocabulary_drafts_each_token_once() -> None:
    tree = FixedTree(draft().provider, widths=(VOCAB + 4,))
    assert sorted(t for t in tokens_of(tree, 1) if t >= 0) == [0, 1, 2]


def test_fixed_depths_stay_and_the_adaptive_depth_follows_the_policy() -> None:
    provider = draft().provider
    assert SampledPath(provider, 2).next_depth(1, 0, 2) == 2
    assert FixedTree(provider, (2, 1)).next_depth(1, 0, 2) == 2
    adaptive = AdaptiveTree(provider, POLICY)
    assert [adaptive.next_depth(1, 1, 1), adaptive.next_depth(2, 0, 2)] == [2, 1]
    assert adaptive.first_depth == POLICY.first_depth


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: SampledPath(p, depth=0), "depth is 0"),
        (
            lambda p: SampledPath(p, 2, rule=js.RULES["point_mass"]),
            "'point_mass' is not for tokens",
        ),
        (lambda p: SampledPath(p, 2, rule=js.RULES["traversal"]), "'traversal' is not for tokens"),
        (lambda p: FixedTree(p, widths=()), r"widths are \(\)"),
        (lambda p: FixedTree(p, widths=(2, 0)), r"widths are \(2, 0\)"),
        (lambda p: FixedTree(p, (2,), node_budget=1), "node_budget is 1"),
        (lambda p: FixedTree(p, (2,), rule=js.RULES["token"]), "'token' is not for candidates"),
        (lambda p: AdaptiveTree(p, rule=js.RULES["block"]), "'block' is not for candidates"),
        (lambda p: NoDraft(rule=js.RULES["without_replacement"]), "is not for candidates"),
    ],
)
def test_a_drafter_that_could_not_be_verified_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(draft().provider)


def test_drafters_that_draft_differently_describe_themselves_differently() -> None:
    one, other = draft().provider, Model("another", likely_up).provider
    drafters = [
        NoDraft(),
        SampledPath(one, 2),
        SampledPath(one, 3),
        SampledPath(other, 2),
        SampledPath(one, 2, rule=js.RULES["block"]),
        FixedTree(one, (2, 1)),
        FixedTree(one, (2, 1), node_budget=4),
        FixedTree(one, (2, 2)),
        AdaptiveTree(one),
        AdaptiveTree(one, POLICY),
        AdaptiveTree(other),
    ]
    described = [repr(drafter.describe()) for drafter in drafters]
    assert len(set(described)) == len(drafters)
    assert SampledPath(one, 2).describe() == SampledPath(draft().provider, 2).describe()
