"""Scoring adapters: which contexts are asked about, in how many calls, and where the rows land."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js
from jaxspec.decode import Scores, node_contexts, score_batched, score_layered, score_sequential
from jaxspec.draft import build_top_k
from jaxspec.models import fit_ngram
from jaxspec.models.provider import (
    Answer,
    Context,
    MissingRowError,
    NonFiniteRowError,
    Provider,
    Query,
    Softmax,
    Usage,
)

ADAPTERS: dict[str, Callable[..., Scores]] = {
    "sequential": score_sequential,
    "batched": score_batched,
    "layered": score_layered,
}
each_adapter = pytest.mark.parametrize("name", ADAPTERS)
VOCAB = 5


def row_after(context: Context) -> np.ndarray:
    """A row that no other context has."""
    weights = np.random.default_rng([3, *context]).random(VOCAB)
    return (weights / weights.sum()).astype(np.float32)


class Asked:
    """A target model that notes the contexts of each call."""

    def __init__(self, row: Callable[[Context], Any] = row_after) -> None:
        self.calls: list[list[Context]] = []
        self.row = row
        self.batched = Provider("target", VOCAB, self._many, is_batched=True)
        self.single = Provider("target", VOCAB, self._one)

    def _many(self, queries: list[Query]) -> list[Answer]:
        self.calls.append([query.context for query in queries])
        return [Answer(query.id, self.row(query.context)) for query in queries]

    def _one(self, context: Context) -> Any:
        self.calls.append([context])
        return self.row(context)


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


# --- who is asked, in how many calls


def test_without_bonus_the_calls_are_those_of_the_inner_nodes() -> None:
    # inner nodes: 0, 1, 3, one at each depth
    for name, calls, batches in (
        ("sequential", [[C[0]], [C[1]], [C[3]]], 1),
        ("batched", [[C[0], C[1], C[3]]], 1),
        ("layered", [[C[0]], [C[1]], [C[3]]], 3),
    ):
        asked = Asked()
        scores = ADAPTERS[name](asked.batched, TREE, CONTEXT)
        assert asked.calls == calls
        assert scores.usage == Usage(queries=3, calls=len(calls))
        assert scores.batches == batches


def test_with_bonus_leaves_are_asked_about_and_counted() -> None:
    # leaves: 2 at depth 1, 4 at depth 2, 5 at depth 3
    for name, calls, batches in (
        ("sequential", [[C[n]] for n in range(6)], 1),
        ("batched", [[C[n] for n in range(6)]], 1),
        ("layered", [[C[0]], [C[1], C[2]], [C[3], C[4]], [C[5]]], 4),
    ):
        asked = Asked()
        scores = ADAPTERS[name](asked.batched, TREE, CONTEXT, bonus=True)
        assert asked.calls == calls
        assert scores.usage == Usage(queries=6, calls=len(calls))
        assert scores.batches == batches


def test_a_provider_that_is_not_batched_is_called_once_for_each_context_by_any_adapter() -> None:
    for name, bonus, batches in (
        ("sequential", False, 1),
        ("batched", False, 1),
        ("layered", False, 3),
        ("layered", True, 4),
    ):
        asked = Asked()
        scores = ADAPTERS[name](asked.single, TREE, CONTEXT, bonus=bonus)
        contexts = sorted(C.values(), key=len) if bonus else [C[0], C[1], C[3]]
        assert asked.calls == [[context] for context in contexts]
        assert scores.usage == Usage(queries=len(contexts), calls=len(contexts))
        assert scores.batches == batches


@each_adapter
def test_without_candidates_the_root_alone_is_asked_about(name: str) -> None:
    for bonus in (False, True):
        asked = Asked()
        tree = js.make_tree([4], [-1], max_nodes=3, max_children=2, max_depth=2)
        scores = ADAPTERS[name](asked.batched, tree, [4], bonus=bonus)
        assert asked.calls == [[(4,)]]
        assert scores.usage == Usage(queries=1, calls=1)
        assert scores.batches == 1
        np.testing.assert_array_equal(scores.rows[0], row_after((4,)))


def test_siblings_of_one_token_share_their_query() -> None:
    # drawn with replacement: 0, 0, 1 below the root; each 0 has a child 2, each 2 a leaf
    tree = js.make_tree(
        [-1, 0, 0, 1, 2, 2, 3, 4], [-1, 0, 0, 0, 1, 2, 4, 5], distinct_siblings=False
    )
    root, zero, two = (1,), (1, 0), (1, 0, 2)
    for name, calls, batches in (
        ("sequential", [[root], [zero], [two]], 1),
        ("batched", [[root, zero, two]], 1),
        ("layered", [[root], [zero], [two]], 3),
    ):
        asked = Asked()
        scores = ADAPTERS[name](asked.batched, tree, root)
        assert asked.calls == calls
        assert scores.usage == Usage(queries=3, calls=len(calls))
        assert scores.batches == batches
        np.testing.assert_array_equal(scores.rows[1], scores.rows[2])
        np.testing.assert_array_equal(scores.rows[4], row_after(two))
        np.testing.assert_array_equal(scores.rows[5], row_after(two))
    asked = Asked()
    scores = score_layered(asked.batched, tree, root, bonus=True)
    # leaves: token 1 at depth 1, tokens 3 and 4 at depth 3
    assert asked.calls == [[root], [zero, (1, 1)], [two], [(*two, 3), (*two, 4)]]
    assert scores.usage == Usage(queries=6, calls=4)


@each_adapter
def test_no_query_holds_the_candidate_that_it_scores(name: str) -> None:
    asked = Asked()
    ADAPTERS[name](asked.batched, TREE, CONTEXT)
    for node in range(1, 6):
        parent = int(TREE.parents[node])
        assert C[node] == (*C[parent], int(TREE.tokens[node]))
        assert sum(C[parent] in call for call in asked.calls) == 1
    for leaf in (2, 4, 5):
        assert all(C[leaf] not in call for call in asked.calls)


# --- where the rows land


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
def test_every_row_is_that_of_its_node_and_all_adapters_agree_bit_for_bit(
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
        for name, adapter in ADAPTERS.items():
            asked = Asked()
            provider = asked.batched if is_batched else asked.single
            scores = adapter(provider, tree, context, bonus=bonus)
            assert scores.rows.dtype == np.float32
            np.testing.assert_array_equal(scores.rows, expected)
            assert scores.usage == Usage(len(distinct), len(asked.calls))
            assert sorted(itertools.chain(*asked.calls)) == sorted(distinct)
            depths = {len(each) for each in distinct}
            assert scores.batches == (len(depths) if name == "layered" else 1)


@each_adapter
def test_rows_from_logits_are_rows_of_probabilities(name: str) -> None:
    model = fit_ngram("the cat sat on the mat and the rat sat on the cat ", 3)
    context = tuple(model.alphabet.index(letter) for letter in "the c")

    def logits(queries: list[Query]) -> list[Answer]:
        return [Answer(q.id, np.log(np.asarray(model.row(q.context)))) for q in queries]

    def rows(queries: list[Query]) -> list[Answer]:
        return [Answer(q.id, model.row(q.context)) for q in queries]

    target = Provider("3-gram", model.vocabulary, rows, is_batched=True)
    tree = build_top_k(target, context, widths=[3, 2, 1]).tree
    expected = ADAPTERS[name](target, tree, context)
    warm = Provider("3-gram", model.vocabulary, logits, is_batched=True, transform=Softmax())
    np.testing.assert_allclose(ADAPTERS[name](warm, tree, context).rows, expected.rows, rtol=1e-5)
    cold = Provider("3-gram", model.vocabulary, logits, is_batched=True, transform=Softmax(0))
    greedy = ADAPTERS[name](cold, tree, context).rows[:10]  # 1 + 3 + 6 inner nodes
    np.testing.assert_array_equal(greedy.argmax(axis=1), expected.rows[:10].argmax(axis=1))
    assert set(greedy.ravel().tolist()) == {0.0, 1.0}


def test_rows_that_were_not_asked_for_are_never_read_by_a_verifier() -> None:
    rows = score_batched(Asked().batched, TREE, CONTEXT).rows
    is_asked = rows.any(axis=1)
    assert is_asked.tolist() == [True, True, False, True, False, False, False, False]
    poisoned = np.where(is_asked[:, None], rows, np.nan)
    uniforms = np.random.default_rng(0).random((60, 10), np.float32)
    num_emitted = set()
    for each in uniforms:
        draws = js.Draws(accept=jnp.asarray(each[:8]), final=jnp.asarray(each[8:]))
        clean, other = (
            js.verify_tree(draws, js.PointMass(tree=TREE), jnp.asarray(r)) for r in (rows, poisoned)
        )
        assert int(other.status) == 0
        assert other.tokens.tolist() == clean.tokens.tolist()
        num_emitted.add(int(clean.num_tokens))
    assert num_emitted == {1, 2, 3}  # every depth was visited


# --- what is refused


@each_adapter
@pytest.mark.parametrize(
    ("tree", "context", "message"),
    [
        (TREE, (), "context is empty"),
        (TREE, (2, 3), "the tree's root is token 4, the context ends with 3"),
        (TREE, (9, 4), "context entry 0 is 9, outside the vocabulary of 5"),
        (js.make_tree([4, 0, 5], [-1, 0, 1]), (4,), "node 2: token 5 is outside target's vocab"),
        (js.chain(jnp.array([0, -1])), (4,), "node 2: token -1 is outside target's vocabulary"),
        (TREE.replace(parents=TREE.parents.at[2].set(3)), (2, 4), "node 2: parent 3 must be"),
        (TREE.replace(parents=TREE.parents.at[2].set(-1)), (2, 4), "node 2: parent -1 must be"),
        (TREE.replace(level_sizes=TREE.level_sizes * 3), (2, 4), "counts 18 nodes"),
        (TREE.replace(level_sizes=TREE.level_sizes * 0), (2, 4), "counts 0 nodes"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused_before_anything_is_asked(
    name: str, tree: js.Tree, context: Context, message: str
) -> None:
    asked = Asked()
    with pytest.raises(ValueError, match=message):
        ADAPTERS[name](asked.batched, tree, context)
    assert asked.calls == []


@each_adapter
def test_a_batch_of_trees_is_refused(name: str) -> None:
    trees = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), TREE)
    with pytest.raises(AssertionError):
        ADAPTERS[name](Asked().batched, trees, CONTEXT)


@each_adapter
def test_a_bad_row_fails_with_its_context_and_the_tree_can_be_scored_again(name: str) -> None:
    is_broken = [True]

    def row(context: Context) -> np.ndarray:
        broken = is_broken[0] and context == C[3]
        return np.full(VOCAB, np.nan, np.float32) if broken else row_after(context)

    target = Asked(row).batched
    with pytest.raises(NonFiniteRowError, match=r"row for context \(2, 4, 0, 2\): entry 0 is nan"):
        ADAPTERS[name](target, TREE, CONTEXT)
    is_broken[0] = False
    again = ADAPTERS[name](target, TREE, CONTEXT)
    np.testing.assert_array_equal(again.rows, score_sequential(Asked().single, TREE, CONTEXT).rows)


def test_a_row_missing_from_a_batch_is_named_by_its_context() -> None:
    def ask(queries: list[Query]) -> list[Answer]:
        return [Answer(q.id, row_after(q.context)) for q in queries if q.context != C[1]]

    target = Provider("target", VOCAB, ask, is_batched=True)
    for adapter in ADAPTERS.values():
        with pytest.raises(MissingRowError, match=r"no row for id \d, context \(2, 4, 0\)"):
            adapter(target, TREE, CONTEXT)
