"""Builders: which candidates, in which order, and who was asked for them."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.providers import CountingModel

from jaxspec.checks import RowError
from jaxspec.draft import (
    Capacity,
    Drafted,
    build_adaptive,
    build_from_depth_logits,
    build_top_k,
    normalised_entropy,
    top_k,
)
from jaxspec.models import fit_ngram
from jaxspec.models.provider import Context, Provider, Usage


def Asked(vocab: int, row: Callable[[Context], Any]) -> CountingModel:  # noqa: N802
    """A draft model that records the contexts of each call."""
    return CountingModel("draft", row, vocab=vocab)


def never(vocab: int = 3) -> Provider:
    """A draft model that must not be asked."""
    return Provider("draft", vocab, lambda context: pytest.fail(f"was asked about {context}"))


def quarters(context: Context) -> np.ndarray:
    """Rows over 4 tokens in quarters, ties and zeros among them, other ones after each prefix."""
    rng = np.random.default_rng([7, *context])
    return (np.bincount(rng.integers(4, size=4), minlength=4) / 4).astype(np.float32)


def nodes_of(drafted: Drafted) -> list[tuple[int, int]]:
    """Token and parent of each node that is not padding."""
    count = int(drafted.tree.num_nodes)
    tokens, parents = np.asarray(drafted.tree.tokens), np.asarray(drafted.tree.parents)
    assert np.all(tokens[count:] == -1)
    assert np.all(parents[count:] == -1)
    return list(zip(tokens[:count].tolist(), parents[:count].tolist(), strict=True))


def paths_of(drafted: Drafted, context: Context) -> list[Context]:
    """The context after each node."""
    paths = [context]
    for token, parent in nodes_of(drafted)[1:]:
        paths.append((*paths[parent], token))
    return paths


# --- which tokens


def test_top_k_orders_by_probability_then_by_id_and_takes_positive_entries_only() -> None:
    counts = [c for c in itertools.product(range(5), repeat=4) if sum(c) == 4]
    assert len(counts) == 35
    for row, k in itertools.product(counts, range(7)):
        expected = sorted((x for x in range(4) if row[x]), key=lambda x: (-row[x], x))[:k]
        for dtype in (np.float32, np.float64):
            assert top_k(np.array(row, dtype) / 4, k) == tuple(expected)


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        (np.float32([0.1, 0.1, 0.8, 0.0]), 2, (2, 0)),  # float32(0.1) twice: equal bits
        (np.float32([0.1, np.nextafter(np.float32(0.1), np.float32(1)), 0.8]), 2, (2, 1)),
        (np.float32([-0.0, 1.0, 0.0]), 3, (1,)),
        (np.float32([-0.0, 0.5, -0.0, 0.5]), 3, (1, 3)),
        (np.float32([0.0, 1e-45, 1.0]), 3, (2,)),  # a subnormal counts as 0, as in a verifier
        (np.float32([1.0]), 5, (0,)),
        (np.float32([0.5, 0.5]), 0, ()),
        (np.float16([0.25, 0.5, 0.25]), 2, (1, 0)),
        (jnp.array([0.25, 0.5, 0.25], jnp.bfloat16), 3, (1, 0, 2)),
        ([0.25, 0.5, 0.25], 1, (1,)),
    ],
)
def test_top_k_at_the_edges(row: Any, k: int, expected: tuple[int, ...]) -> None:
    found = top_k(row, k)
    assert found == expected
    assert all(type(token) is int for token in found)


def test_top_k_of_a_large_vocabulary_equals_a_full_sort() -> None:
    weights = np.random.default_rng(0).integers(0, 40, 100_000).astype(np.float32)  # many ties
    order = np.argsort(-weights, kind="stable")
    for k in (1, 17, 5000, 99_999):
        expected = order[:k][weights[order[:k]] > 0]
        assert top_k(weights, k) == tuple(expected.tolist())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_top_k_refuses_a_row_that_is_not_finite(bad: float) -> None:
    with pytest.raises(RowError, match=f"entry 1 of the row is {bad}"):
        top_k([0.5, bad, 0.5], 1)


def test_top_k_refuses_what_is_no_row_or_no_count() -> None:
    for row, k in (([[0.5, 0.5]], 1), (0.5, 1), ([0.5, 0.5], -1)):
        with pytest.raises(ValueError, match="wanted a row"):
            top_k(row, k)


# --- how sure a row is


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0], 0.0),
        ([0.0, 1.0, 0.0], 0.0),
        ([0.5, 0.5, 0.0, 0.0], 0.5),
        ([0.5, 0.25, 0.25, 0.0], 0.75),
        ([0.25] * 4, 1.0),
        ([1 / 3] * 3, 1.0),
    ],
)
def test_the_normalised_entropy_is_h_over_log_v(row: list[float], expected: float) -> None:
    for dtype in (np.float32, np.float64):
        found = normalised_entropy(np.array(row, dtype))
        assert found == pytest.approx(expected, abs=1e-7)
        assert math.copysign(1, found) == 1
        assert found <= 1


def test_the_normalised_entropy_never_leaves_the_unit_interval() -> None:
    for size in range(2, 200):
        assert normalised_entropy(np.full(size, 1 / size, np.float32)) <= 1


def test_the_normalised_entropy_does_not_depend_on_a_mass_that_rounding_left_near_1() -> None:
    for mass in (1 - 2**-7, 1 + 2**-7):
        row = jnp.array([mass / 2, mass / 4, mass / 4, 0.0], jnp.bfloat16)
        assert normalised_entropy(row) == 0.75


# --- fixed widths


def toy_row(context: Context) -> list[float]:
    """Depends on the last two tokens."""
    rows = {
        (2,): [0.25, 0.75, 0.0],
        (2, 1): [0.5, 0.0, 0.5],
        (2, 0): [0.0, 1.0, 0.0],
        (1, 0): [0.125, 0.25, 0.625],
        (1, 2): [0.0, 0.5, 0.5],
        (0, 1): [0.25, 0.5, 0.25],
    }
    return rows[context[-2:]]


def test_each_parent_prefix_is_asked_about_a_level_in_one_call() -> None:
    asked = Asked(3, toy_row)
    drafted = build_top_k(asked.batched, [2], widths=[2, 2, 1])
    # depth 1: 1 (3/4) before 0 (1/4). Below 1: 0 and 2 tie, lowest first; below 0: only 1.
    # depth 3: after 2 1 0 it is 2, after 2 1 2 1 and 2 tie, after 2 0 1 it is 1.
    assert nodes_of(drafted) == [
        (2, -1), (1, 0), (0, 0), (0, 1), (2, 1), (1, 2), (2, 3), (1, 4), (1, 5),
    ]  # fmt: skip
    assert asked.calls == [
        [(2,)],
        [(2, 1), (2, 0)],
        [(2, 1, 0), (2, 1, 2), (2, 0, 1)],
    ]  # 1 + 2 + 3 parents; the three leaves are not asked about
    assert drafted.usage == Usage(queries=6, calls=3)
    assert drafted.tree.children.tolist()[:3] == [[1, 2], [3, 4], [5, -1]]
    assert drafted.tree.level_sizes.tolist() == [1, 2, 3, 3]


def test_a_provider_that_is_not_batched_is_called_for_each_parent() -> None:
    asked = Asked(3, toy_row)
    drafted = build_top_k(asked.single, [2], widths=[2, 2, 1])
    assert nodes_of(drafted) == nodes_of(build_top_k(asked.batched, [2], widths=[2, 2, 1]))
    assert drafted.usage == Usage(queries=6, calls=6)


def test_the_whole_context_is_asked_about_and_its_last_token_is_the_root() -> None:
    asked = Asked(3, toy_row)
    drafted = build_top_k(asked.batched, np.array([0, 1, 1, 2, 0]), widths=[1, 1])
    assert asked.calls == [[(0, 1, 1, 2, 0)], [(0, 1, 1, 2, 0, 1)]]
    assert nodes_of(drafted) == [(0, -1), (1, 0), (1, 1)]


def expected_tree(
    row: Callable[[Context], np.ndarray], context: Context, widths: Sequence[int], max_nodes: int
) -> tuple[list[tuple[int, int]], list[Context]]:
    """The breadth-first tree cut at its budget, and the prefixes that have children in it."""
    nodes, paths, depths = [(context[-1], -1)], [context], [0]
    parents = []
    node = 0
    while node < len(nodes) < max_nodes and depths[node] < len(widths):
        weights = row(paths[node]).tolist()
        positive = sorted((x for x in range(len(weights)) if weights[x]), key=lambda x: -weights[x])
        for token in positive[: widths[depths[node]]]:
            if len(nodes) < max_nodes:
                nodes.append((token, node))
                paths.append((*paths[node], token))
                depths.append(depths[node] + 1)
        parents.append(paths[node])
        node += 1
    return nodes, parents


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2), (3, 1, 4), (4, 4), (9, 2, 1)])
def test_under_any_budget_the_tree_is_the_breadth_first_one_and_only_its_parents_are_asked(
    widths: tuple[int, ...],
) -> None:
    for seed, max_nodes in itertools.product(range(4), (1, 2, 3, 4, 5, 7, 8, 11, 16, 30, 1000)):
        asked, context = Asked(4, quarters), (seed, 3)
        drafted = build_top_k(asked.batched, context, widths=widths, max_nodes=max_nodes)
        nodes, parents = expected_tree(quarters, context, widths, max_nodes)
        assert nodes_of(drafted) == nodes
        assert [each for call in asked.calls for each in call] == parents
        assert drafted.usage == Usage(len(parents), len(asked.calls))


def test_a_budget_spent_within_a_level_stops_there() -> None:
    asked = Asked(3, toy_row)
    drafted = build_top_k(asked.batched, [2], widths=[2, 2, 1], max_nodes=5)
    assert nodes_of(drafted) == [(2, -1), (1, 0), (0, 0), (0, 1), (2, 1)]
    # 2 nodes of room at depth 1, width 2: node 1 alone can have children, node 2 is not asked about
    assert asked.calls == [[(2,)], [(2, 1)]]
    assert drafted.usage == Usage(queries=2, calls=2)


def test_a_budget_that_ends_among_the_children_of_a_parent_takes_no_further_call() -> None:
    asked = Asked(4, lambda context: [0.25] * 4)
    drafted = build_top_k(asked.batched, [0], widths=[4, 3], max_nodes=10)
    # 5 nodes of room at depth 1, width 3: node 1 takes 3, node 2 the other 2
    assert asked.calls == [[(0,)], [(0, 0), (0, 1)]]
    assert nodes_of(drafted)[5:] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]


def test_a_parent_with_few_tokens_leaves_its_room_to_later_ones_at_the_price_of_a_call() -> None:
    asked = Asked(4, lambda c: [0.25] * 4 if len(c) == 1 else [0.0, 1.0, 0.0, 0.0])
    drafted = build_top_k(asked.batched, [0], widths=[4, 3], max_nodes=8)
    # room for 3 nodes at depth 1, width 3: node 1 is asked about and gives 1; room for 2: node 2 is
    # asked about and gives 1; room for 1: node 3
    assert asked.calls == [[(0,)], [(0, 0)], [(0, 1)], [(0, 2)]]
    assert nodes_of(drafted)[5:] == [(1, 1), (1, 2), (1, 3)]
    assert drafted.usage == Usage(queries=4, calls=4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"widths": []},
        {"widths": [0]},
        {"widths": [0, 3]},
        {"widths": [2, 2], "max_nodes": 1},
        {"widths": [2, 2], "capacity": (1, 2, 2)},
    ],
)
def test_of_no_depth_width_or_budget_comes_the_root_alone_and_nothing_is_asked(
    arguments: dict[str, Any],
) -> None:
    drafted = build_top_k(never(), (1, 2), **arguments)
    assert nodes_of(drafted) == [(2, -1)]
    assert drafted.usage == Usage(queries=0, calls=0)
    assert np.isnan(drafted.entropies).all()


def test_a_width_of_0_ends_the_tree_above_it() -> None:
    asked = Asked(3, toy_row)
    drafted = build_top_k(asked.batched, [2], widths=[2, 0, 5])
    assert nodes_of(drafted) == [(2, -1), (1, 0), (0, 0)]
    assert asked.calls == [[(2,)]]


def test_a_width_beyond_the_vocabulary_takes_what_there_is() -> None:
    drafted = build_top_k(Asked(3, toy_row).batched, [2], widths=[10**6, 7])
    assert nodes_of(drafted) == [(2, -1), (1, 0), (0, 0), (0, 1), (2, 1), (1, 2)]
    for widest in (3, 10**6):  # a capacity for the vocabulary is enough
        build_top_k(Asked(3, toy_row).batched, [2], widths=[widest], capacity=(4, 3, 1))
    alone = Provider("draft", 1, lambda context: [1.0])
    assert nodes_of(build_top_k(alone, [0], widths=[5, 5])) == [(0, -1), (0, 0), (0, 1)]


def test_trees_of_one_capacity_have_one_shape_whatever_their_depth() -> None:
    draft = Asked(4, quarters).batched
    capacity = Capacity(max_nodes=12, max_children=3, max_depth=3)
    shapes = set()
    for context, widths in itertools.product([(0,), (1, 2)], [(), (1,), (3, 1), (2, 2, 2)]):
        drafted = build_top_k(draft, context, widths=widths, capacity=capacity)
        shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(drafted.tree)))
        assert drafted.entropies.shape == (12,)
    for depth in range(4):
        tree = build_adaptive(
            draft, (0,), depth=depth, width_of=lambda e: 2, capacity=capacity
        ).tree
        shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(tree)))
    fixture = build_from_depth_logits(np.zeros((3, 4)), [2, 1], capacity=(12, 3, 3)).tree
    shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(fixture)))
    assert shapes == {((12, 3), (4,), (12,), (12,))}  # children, level sizes, parents, tokens


def test_the_capacity_is_the_budget_unless_a_smaller_one_is_given() -> None:
    draft = Asked(4, lambda context: [0.25] * 4).batched
    full = build_top_k(draft, [0], widths=[4, 4], capacity=(10, 4, 2))
    less = build_top_k(draft, [0], widths=[4, 4], capacity=(10, 4, 2), max_nodes=6)
    assert len(nodes_of(full)) == 10
    assert nodes_of(less) == nodes_of(full)[:6]
    assert less.tree.max_nodes == 10


@pytest.mark.parametrize(
    ("widths", "capacity", "message"),
    [
        ([1, -2], None, "the width at depth 1 is -2: it must be an integer, at least 0"),
        ([1.5], None, "the width at depth 0 is 1.5: it must be an integer"),
        ([True], None, "the width at depth 0 is True: it must be an integer"),
        ([1, 3], (9, 2, 2), "the width at depth 1 is 3: more than the capacity's 2 child slots"),
    ],
)
def test_widths_that_are_none_or_do_not_fit_are_refused_before_anything_is_asked(
    widths: Any, capacity: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_top_k(never(), (0,), widths=widths, capacity=capacity)


@pytest.mark.parametrize(
    ("context", "depth", "sizes", "message"),
    [
        ((), 1, {}, "context is empty"),
        ((0, 3), 1, {}, "context entry 1 is 3, outside the vocabulary of 3"),
        ((-1,), 1, {}, "context entry 0 is -1, outside the vocabulary of 3"),
        ((0,), 1, {"max_nodes": 0}, "max_nodes is 0: it counts the root"),
        ((0,), 1, {"capacity": (9, 2, 1), "max_nodes": 10}, "max_nodes is 10: .*from 1 to 9"),
        ((0,), 2, {"capacity": (9, 2, 1)}, "2 levels do not fit a capacity of depth 1"),
        ((0,), 0, {"capacity": (0, 2, 1)}, "no room for the root"),
        ((0,), 0, {"capacity": (9, 0, 1)}, "no room for the root"),
        ((0,), 0, {"capacity": (9, 2, -1)}, "no room for the root"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_asked(
    context: Context, depth: int, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_top_k(never(), context, widths=[1] * depth, **sizes)
    with pytest.raises(ValueError, match=message):
        build_adaptive(never(), context, depth=depth, width_of=lambda e: 1, **sizes)


def test_a_draft_with_a_bad_row_fails_with_its_context_and_can_be_asked_again() -> None:
    is_broken = [True]

    def row(context: Context) -> list[float]:
        return [np.nan, 1, 0] if is_broken[0] and context == (2, 0) else toy_row(context)

    draft = Asked(3, row).batched
    with pytest.raises(RowError, match=r"draft: row for context \(2, 0\): entry 0 is nan"):
        build_top_k(draft, [2], widths=[2, 1])
    is_broken[0] = False
    assert len(nodes_of(build_top_k(draft, [2], widths=[2, 1]))) == 5


# --- adaptive widths


def test_the_width_below_each_parent_follows_from_its_own_entropy() -> None:
    rows = {
        (0,): [0.25, 0.25, 0.25, 0.25],  # entropy 1: width 3
        (0, 0): [0.0, 0.0, 1.0, 0.0],  # entropy 0: width 1
        (0, 1): [0.0, 0.5, 0.0, 0.5],  # entropy 1/2: width 2
        (0, 2): [0.5, 0.25, 0.25, 0.0],  # entropy 3/4: width 2
    }
    asked, seen = Asked(4, rows.__getitem__), []

    def width_of(entropy: float) -> int:
        seen.append(entropy)
        return 1 + int(2 * entropy)

    drafted = build_adaptive(asked.batched, [0], depth=2, width_of=width_of)
    assert nodes_of(drafted) == [
        (0, -1), (0, 0), (1, 0), (2, 0), (2, 1), (1, 2), (3, 2), (0, 3), (1, 3),
    ]  # fmt: skip
    assert asked.calls == [[(0,)], [(0, 0), (0, 1), (0, 2)]]
    assert drafted.usage == Usage(queries=4, calls=2)
    assert seen == [1.0, 0.0, 0.5, 0.75]
    np.testing.assert_array_equal(drafted.entropies, [1, 0, 0.5, 0.75] + 5 * [np.nan])
    assert not drafted.entropies.flags.writeable


def test_entropies_of_a_fixed_tree_stand_at_the_parents_that_were_asked_about() -> None:
    drafted = build_top_k(Asked(3, toy_row).batched, [2], widths=[2, 1], capacity=(7, 2, 2))
    expected = [normalised_entropy(toy_row(c)) for c in ((2,), (2, 1), (2, 0))]
    np.testing.assert_array_equal(drafted.entropies, expected + 4 * [np.nan])


def test_a_constant_width_gives_the_fixed_tree_under_any_budget() -> None:
    for seed, width, max_nodes in itertools.product(range(4), (1, 2, 3, 4), (1, 2, 5, 9, 14, 500)):
        draft, context = Asked(4, quarters).batched, (seed, 1)
        fixed = build_top_k(draft, context, widths=[width] * 3, max_nodes=max_nodes)
        adaptive = build_adaptive(
            draft, context, depth=3, width_of=lambda e, width=width: width, max_nodes=max_nodes
        )
        assert nodes_of(adaptive) == nodes_of(fixed)


def test_parents_are_asked_about_in_one_call_as_far_as_a_child_each_would_fit() -> None:
    asked = Asked(4, lambda context: [0.25] * 4)
    drafted = build_adaptive(asked.batched, [0], depth=3, width_of=lambda e: 4, max_nodes=8)
    # 4 nodes at depth 1 leave room for 3: nodes 1 to 3 are asked about, node 4 could have no child.
    # Node 1 takes all of it, and depth 2 is not asked about.
    assert asked.calls == [[(0,)], [(0, 0), (0, 1), (0, 2)]]
    assert nodes_of(drafted)[5:] == [(0, 1), (1, 1), (2, 1)]


def test_parents_of_width_0_are_leaves_and_leave_their_room_to_later_ones() -> None:
    sure = [0.0, 1.0, 0.0, 0.0]
    asked = Asked(4, lambda c: [0.25] * 4 if c[-1] in (0, 3) else sure)
    # depth 1: 0, 1, 2, 3; nodes 2 and 3 (tokens 1 and 2) are sure of the next token
    drafted = build_adaptive(
        asked.batched, [0], depth=2, width_of=lambda e: 1 if e > 0.5 else 0, max_nodes=6
    )
    assert nodes_of(drafted) == [(0, -1), (0, 0), (0, 1)]  # width 1 throughout
    drafted = build_adaptive(
        asked.batched, [0], depth=2, width_of=lambda e: 4 if e > 0.5 else 0, max_nodes=7
    )
    # room for 2 at depth 1: nodes 1 and 2 are asked about, node 1 takes both
    assert asked.calls[-1] == [(0, 0), (0, 1)]
    asked.row = lambda c: [0.25] * 4 if c in ((0,), (0, 3)) else sure
    drafted = build_adaptive(
        asked.batched, [0], depth=2, width_of=lambda e: 4 if e > 0.5 else 0, max_nodes=7
    )
    # nodes 1 and 2 are leaves, which leaves room for 2 below nodes 3 and 4: another call
    assert asked.calls[-2:] == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert nodes_of(drafted)[5:] == [(0, 4), (1, 4)]


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (1.5, "is 1.5: it must be an integer, at least 0"),
        (-1, "is -1: it must be an integer, at least 0"),
        (None, "is None: it must be an integer"),
        ("2", "is '2': it must be an integer"),
        (True, "is True: it must be an integer"),
        (np.float64(2), r"is np.float64\(2.0\): it must be an integer"),
        (3, "is 3: more than the capacity's 2 child slots"),
    ],
)
def test_a_width_that_is_none_or_does_not_fit_is_refused_with_its_node(
    width: Any, message: str
) -> None:
    def width_of(entropy: float) -> Any:
        return width if entropy == 0 else 2

    # after 2: entropy .51, width 2; after 2 1 entropy .63, after 2 0 entropy 0
    with pytest.raises(ValueError, match=f"the width below node 2, of entropy 0.0, {message}"):
        build_adaptive(
            Asked(3, toy_row).batched, [2], depth=2, width_of=width_of, capacity=(9, 2, 2)
        )


def test_a_width_may_be_a_numpy_integer_or_exceed_the_vocabulary() -> None:
    draft = Asked(3, toy_row).batched
    for width in (np.int64(2), 10**9):
        drafted = build_adaptive(draft, [2], depth=1, width_of=lambda e, w=width: w)
        assert nodes_of(drafted) == [(2, -1), (1, 0), (0, 0)]


def test_at_depth_0_nothing_is_asked_and_a_negative_depth_is_refused() -> None:
    drafted = build_adaptive(never(), [1], depth=0, width_of=lambda e: pytest.fail("was asked"))
    assert nodes_of(drafted) == [(1, -1)]
    with pytest.raises(ValueError, match="depth is -1"):
        build_adaptive(never(), [1], depth=-1, width_of=lambda e: 1)


# --- the context-independent fixture


def test_depth_logits_build_the_tree_of_a_draft_that_sees_only_the_depth() -> None:
    logits = np.array([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
    rows = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    draft = Asked(3, lambda context: rows[len(context) - 1].astype(np.float32)).batched
    for max_nodes in (1, 2, 4, 5, 100):
        fixture = build_from_depth_logits(logits, [2, 2], root=0, max_nodes=max_nodes)
        asked = build_top_k(draft, [0], widths=[2, 2], max_nodes=max_nodes)
        assert nodes_of(fixture) == nodes_of(asked)
        assert fixture.usage == Usage()
        assert np.isnan(fixture.entropies).all()
    assert nodes_of(fixture) == [(0, -1), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_a_logit_of_minus_infinity_is_no_candidate_and_a_very_low_one_is() -> None:
    fixture = build_from_depth_logits([[0.0, -np.inf, -1e30, -800.0]], [4])
    assert nodes_of(fixture) == [(-1, -1), (0, 0), (3, 0), (2, 0)]


def test_depth_logits_of_any_float_dtype_are_taken() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, np.float64):
        fixture = build_from_depth_logits(np.array([[1.0, 3.0, 3.0]]).astype(dtype), [2])
        assert nodes_of(fixture) == [(-1, -1), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("logits", "arguments", "error", "message"),
    [
        ([[0.0, 1.0]], {"widths": [1, 1]}, ValueError, r"shape \(1, 2\), wanted \[D, V\] .* 2"),
        ([0.0, 1.0], {"widths": [1]}, ValueError, r"shape \(2,\), wanted \[D, V\]"),
        ([[0.0, 1.0], [0.0, np.nan]], {"widths": [1]}, RowError, "row 1: logit 1 is nan"),
        ([[np.inf, 1.0]], {"widths": [1]}, RowError, "row 0: logit 0 is inf"),
        ([[-np.inf, -np.inf]], {"widths": [1]}, RowError, "row 0: every logit is -inf"),
        ([[0.0, 1.0]], {"widths": [1], "root": 2}, ValueError, "root is 2, outside"),
        ([[0.0, 1.0]], {"widths": [-1]}, ValueError, "the width at depth 0 is -1"),
        ([[0.0, 1.0]], {"widths": [2], "capacity": (9, 1, 1)}, ValueError, "more than the cap"),
    ],
)
def test_depth_logits_that_are_none_are_refused(
    logits: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_from_depth_logits(logits, **arguments)


# --- a real model


def test_on_a_model_of_text_the_tree_holds_the_likeliest_letters_after_each_prefix() -> None:
    model = fit_ngram("in the beginning god created the heaven and the earth " * 3, 4)
    draft = Provider("4-gram", model.vocabulary, model.row)
    context = tuple(model.alphabet.index(letter) for letter in "god created th")
    drafted = build_top_k(draft, context, widths=[1, 2, 2], max_nodes=6)
    texts = ["".join(model.alphabet[t] for t in path) for path in paths_of(drafted, context)]
    end = "god created the"
    assert texts[:4] == [end[:-1], end, f"{end} ", f"{end}a"]
    for path, (token, parent) in zip(texts[1:], nodes_of(drafted)[1:], strict=True):
        row = np.asarray(model.row([model.alphabet.index(letter) for letter in path[:-1]]))
        siblings = [t for t, p in nodes_of(drafted)[1:] if p == parent]
        assert row[token] >= np.delete(row, siblings).max()
