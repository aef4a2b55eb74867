"""Targets from callables: which contexts are asked about, in how many calls, where the rows land."""

import dataclasses
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.providers import CountingModel

import jaxspec as js
from jaxspec.decode import CallableTarget
from jaxspec.decode.target import as_target, node_contexts
from jaxspec.models.provider import (
    Answer,
    AnswerError,
    Context,
    Provider,
    Query,
    Softmax,
    Usage,
)

Group = Literal["all", "depth", "node"]
GROUPS: tuple[Group, ...] = ("all", "depth", "node")
each_group = pytest.mark.parametrize("group", GROUPS)
VOCAB = 5


def row_after(context: Context) -> np.ndarray:
    """A row that no other context has."""
    weights = np.random.default_rng([3, *context]).random(VOCAB)
    return (weights / weights.sum()).astype(np.float32)


def counting(row: Any = row_after) -> CountingModel:
    return CountingModel("target", row, vocab=VOCAB, is_batched=True)


#   0: token 4 (root)
#   +- 1: token 0
#   |  +- 3: token 2
#   |  |  +- 5: token 1 (leaf)
#   |  +- 4: token 3 (leaf)
#   +- 2: token 1 (leaf)
TREE = js.make_tree([4, 0, 1, 2, 3, 1], [-1, 0, 0, 1, 1, 3], max_nodes=8, max_depth=4)
CONTEXT = (2, 4)
C = {0: (2, 4), 1: (2, 4, 0), 2: (2, 4, 1), 3: (2, 4, 0, 2), 4: (2, 4, 0, 3), 5: (2, 4, 0, 2, 1)}


def random_tree(seed: int) -> js.Tree:
    """A tree of up to 12 nodes whose siblings may repeat, as draws with replacement do."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 13))
    parents = [-1, *(int(rng.integers(node)) for node in range(1, size))]
    tokens = rng.integers(VOCAB, size=size)
    return js.make_tree(
        tokens, parents, max_nodes=15, max_children=12, max_depth=12, distinct_siblings=False
    )


# --- contexts


def test_the_context_after_a_node_is_the_prompt_its_ancestors_and_itself() -> None:
    assert node_contexts(TREE, CONTEXT) == list(C.values())
    assert node_contexts(TREE, np.array(CONTEXT)) == list(C.values())


def test_padding_has_no_context_and_a_root_of_unknown_token_fits_any() -> None:
    path = js.chain(jnp.array([1, 3, 2]), num_drafted=2)
    assert node_contexts(path, (2, 0)) == [(2, 0), (2, 0, 1), (2, 0, 1, 3)]
    assert node_contexts(js.chain(jnp.array([1]), num_drafted=0), (2,)) == [(2,)]


# --- which contexts are asked, in how many calls


def assert_calls(group: Group, bonus: bool, calls: list[list[Context]], batches: int) -> None:
    asked = counting()
    scores = CallableTarget(asked.batched, group).rows(TREE, CONTEXT, bonus=bonus)
    assert asked.calls == calls
    assert scores.usage == Usage(queries=sum(map(len, calls)), calls=len(calls))
    assert scores.batches == batches


def test_without_bonus_the_calls_are_those_of_the_inner_nodes() -> None:
    # inner nodes: 0, 1, 3, one at each depth
    assert_calls("node", False, [[C[0]], [C[1]], [C[3]]], batches=1)
    assert_calls("all", False, [[C[0], C[1], C[3]]], batches=1)
    assert_calls("depth", False, [[C[0]], [C[1]], [C[3]]], batches=3)


def test_with_bonus_leaves_are_asked_about_and_counted() -> None:
    # leaves: 2 at depth 1, 4 at depth 2, 5 at depth 3
    assert_calls("node", True, [[C[n]] for n in range(6)], batches=1)
    assert_calls("all", True, [[C[n] for n in range(6)]], batches=1)
    assert_calls("depth", True, [[C[0]], [C[1], C[2]], [C[3], C[4]], [C[5]]], batches=4)


@each_group
def test_without_candidates_the_root_alone_is_asked_about(group: Group) -> None:
    for bonus in (False, True):
        asked = counting()
        tree = js.make_tree([4], [-1], max_nodes=3, max_children=2, max_depth=2)
        scores = CallableTarget(asked.batched, group).rows(tree, [4], bonus=bonus)
        assert asked.calls == [[(4,)]]
        assert (scores.usage, scores.batches) == (Usage(queries=1, calls=1), 1)
        np.testing.assert_array_equal(scores.rows[0], row_after((4,)))


def test_siblings_of_one_token_share_their_query() -> None:
    # drawn with replacement: 0, 0, 1 below the root; each 0 has a child 2, each 2 a leaf
    tree = js.make_tree(
        [-1, 0, 0, 1, 2, 2, 3, 4], [-1, 0, 0, 0, 1, 2, 4, 5], distinct_siblings=False
    )
    root, zero, two = (1,), (1, 0), (1, 0, 2)
    asked = counting()
    scores = CallableTarget(asked.batched).rows(tree, root)
    assert asked.calls == [[root, zero, two]]
    assert scores.usage == Usage(queries=3, calls=1)
    np.testing.assert_array_equal(scores.rows[1], scores.rows[2])
    np.testing.assert_array_equal(scores.rows[4], row_after(two))
    np.testing.assert_array_equal(scores.rows[5], row_after(two))
    asked = counting()
    scores = CallableTarget(asked.batched, "depth").rows(tree, root, bonus=True)
    # leaves: token 1 at depth 1, tokens 3 and 4 at depth 3
    assert asked.calls == [[root], [zero, (1, 1)], [two], [(*two, 3), (*two, 4)]]
    assert scores.usage == Usage(queries=6, calls=4)


# --- where the rows land


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
def test_every_row_is_that_of_its_node_and_all_groups_agree_bit_for_bit(
    is_batched: bool, bonus: bool
) -> None:
    for seed in range(40):
        tree = random_tree(seed)
        context = (1, 2, int(tree.tokens[0]))
        contexts = node_contexts(tree, context)
        inner = {0, *np.asarray(tree.parents)[1 : len(contexts)].tolist()}
        expected = np.zeros((15, VOCAB), np.float32)
        for node, each in enumerate(contexts):
            if bonus or node in inner:
                expected[node] = row_after(each)
        distinct = {each for node, each in enumerate(contexts) if bonus or node in inner}
        depths = {len(each) for each in distinct}
        for group in GROUPS:
            asked = counting()
            provider = asked.batched if is_batched else asked.single
            scores = CallableTarget(provider, group).rows(tree, context, bonus=bonus)
            assert scores.rows.dtype == np.float32
            np.testing.assert_array_equal(scores.rows, expected)
            assert scores.usage == Usage(len(distinct), len(asked.calls))
            assert sorted(itertools.chain(*asked.calls)) == sorted(distinct)
            assert scores.batches == (len(depths) if group == "depth" else 1)


def test_rows_from_logits_are_rows_of_probabilities() -> None:
    def logits(context: Context) -> np.ndarray:
        return np.log(row_after(context)) + 3

    expected = as_target(counting().single).rows(TREE, CONTEXT).rows
    warm = Provider("target", VOCAB, logits, transform=Softmax())
    np.testing.assert_allclose(as_target(warm).rows(TREE, CONTEXT).rows, expected, rtol=1e-5)
    cold = Provider("target", VOCAB, logits, transform=Softmax(0))
    greedy = as_target(cold).rows(TREE, CONTEXT).rows[[0, 1, 3]]
    np.testing.assert_array_equal(greedy, np.eye(VOCAB)[expected[[0, 1, 3]].argmax(axis=1)])


def test_rows_that_were_not_asked_for_are_never_read_by_a_verifier() -> None:
    rows = CallableTarget(counting().batched).rows(TREE, CONTEXT).rows
    is_asked = rows.any(axis=1)
    assert is_asked.tolist() == [True, True, False, True, False, False, False, False]
    corrupted = np.where(is_asked[:, None], rows, np.nan)
    uniforms = np.random.default_rng(0).random((60, 10), np.float32)
    num_emitted = set()
    for each in uniforms:
        draws = js.Draws(accept=jnp.asarray(each[:8]), final=jnp.asarray(each[8:]))
        clean, other = (
            js.verify_tree(draws, js.PointMass(tree=TREE), jnp.asarray(r))
            for r in (rows, corrupted)
        )
        assert int(other.status) == 0
        assert other.tokens.tolist() == clean.tokens.tolist()
        num_emitted.add(int(clean.num_tokens))
    assert num_emitted == {1, 2, 3}  # every depth was visited


# --- errors


@pytest.mark.parametrize(
    ("tree", "context", "message"),
    [
        (TREE, (), "context is empty"),
        (TREE, (2, 3), "the tree's root is token 4, the context ends with 3"),
        (TREE, (9, 4), "context entry 0 is 9, outside the vocabulary of 5"),
        (js.make_tree([4, 0, 5], [-1, 0, 1]), (4,), "node 2: token 5 is outside target's vocab"),
        (js.chain(jnp.array([0, -1])), (4,), "node 2: token -1 is outside target's vocabulary"),
        (
            dataclasses.replace(TREE, parents=TREE.parents.at[2].set(3)),
            (2, 4),
            "node 2: parent 3 must be",
        ),
        (dataclasses.replace(TREE, level_sizes=TREE.level_sizes * 3), (2, 4), "counts 18 nodes"),
        (dataclasses.replace(TREE, level_sizes=TREE.level_sizes * 0), (2, 4), "counts 0 nodes"),
    ],
)
def test_a_tree_that_does_not_fit_is_an_error_before_anything_is_asked(
    tree: js.Tree, context: Context, message: str
) -> None:
    asked = counting()
    with pytest.raises(ValueError, match=message):
        CallableTarget(asked.batched).rows(tree, context)
    assert asked.calls == []


def test_a_batch_of_trees_and_arguments_of_another_kind_are_errors() -> None:
    trees = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), TREE)
    with pytest.raises(AssertionError):
        as_target(counting().batched).rows(trees, CONTEXT)
    with pytest.raises(ValueError, match="group is 'level'"):
        CallableTarget(counting().batched, "level")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target is of type function: must be a Target or a Prov"):
        as_target(row_after)  # type: ignore[arg-type]


@each_group
def test_a_bad_row_fails_with_its_context_and_the_tree_can_be_scored_again(group: Group) -> None:
    asked = counting(lambda c: np.full(VOCAB, np.nan) if c == C[3] else row_after(c))
    target = CallableTarget(asked.batched, group)
    with pytest.raises(js.RowError, match=r"row for context \(2, 4, 0, 2\): entry 0 is nan"):
        target.rows(TREE, CONTEXT)
    asked.row = row_after
    expected = CallableTarget(counting().single, "node").rows(TREE, CONTEXT)
    np.testing.assert_array_equal(target.rows(TREE, CONTEXT).rows, expected.rows)


@each_group
def test_a_row_missing_from_a_batch_is_named_by_its_context(group: Group) -> None:
    def ask(queries: list[Query]) -> list[Answer]:
        return [Answer(q.id, row_after(q.context)) for q in queries if q.context != C[1]]

    target = CallableTarget(Provider("target", VOCAB, ask, is_batched=True), group)
    with pytest.raises(AnswerError, match=r"no row for id \d, context \(2, 4, 0\)"):
        target.rows(TREE, CONTEXT)
