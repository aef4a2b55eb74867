"""Drafters on the host: what each proposes, what it asks of the model, and what is an error."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.small import MORE_DRAFTERS, NGRAM
from helpers.small import VOCAB as WIDE
from helpers.toys import DRAFTERS, POLICY, VOCAB, WITH_A_DRAFT, Model, draft, draw_token, likely_up

import jaxspec as js
from jaxspec.checks import RowError
from jaxspec.draft import (
    AdaptiveTree,
    AdaptiveTreePolicy,
    BestFirstTree,
    Drafter,
    FixedTree,
    HostDraft,
    Lookup,
    NGramTree,
    NoDraft,
    SampledPath,
    Shape,
)
from jaxspec.draft.drivers import propose_on_host
from jaxspec.models import Provider, Usage, fit_ngram
from jaxspec.models.provider import Context

CONTEXT = (2, 0)
RULES = js.RULES


def pairs_of(*numbers: float) -> jax.Array:
    """Pairs for a path of two: nothing for the root, then a number for each node."""
    return jnp.array([(0.9, u) for u in (0.9, *numbers)], jnp.float32)


def nodes_of(made: HostDraft) -> list[tuple[int, int]]:
    """Token and parent of each node; padding is -1."""
    tree = made.proposal.tree
    count = int(tree.num_nodes)
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    assert np.all(tokens[count:] == -1)
    assert np.all(parents[count:] == -1)
    return list(zip(tokens[:count].tolist(), parents[:count].tolist(), strict=True))


def at_random(drafter: Drafter, seed: int = 0) -> jax.Array:
    return js.round_draws(jax.random.key(seed), drafter.capacity.max_nodes).draft


# --- sampled candidates


def test_a_path_is_drawn_token_by_token_with_the_pair_of_its_node() -> None:
    path = SampledPath(Model("draft", likely_up).provider, depth=2)
    # After 0 the row is (0.2, 0.5, 0.3): running totals 0.2, 0.7, 1. After 1: (0.3, 0.2, 0.5).
    for draws, tokens in (
        ((0.1, 0.1), [0, 0]),
        ((0.6, 0.1), [1, 0]),
        ((0.6, 0.4), [1, 1]),
        ((0.8, 0.6), [2, 1]),
    ):
        made = path.draft(CONTEXT, pairs=pairs_of(*draws))
        assert [token for token, _ in nodes_of(made)][1:] == tokens


def test_the_row_on_record_is_the_row_that_each_token_was_drawn_from() -> None:
    model = draft()
    made = SampledPath(model.provider, depth=2).draft(CONTEXT, pairs=pairs_of(0.3, 0.8))
    first = int(made.proposal.tree.tokens[1])
    assert model.asked == [CONTEXT, (*CONTEXT, first)]
    expected = np.float32([model.row(context) for context in model.asked])
    np.testing.assert_allclose(np.asarray(made.proposal.draft_rows), expected, rtol=3e-7)
    for node, pair in enumerate(pairs_of(0.3, 0.8)[1:], start=1):
        row = made.proposal.draft_rows[node - 1]
        assert int(draw_token(pair, row)) == int(made.proposal.tree.tokens[node])


@pytest.mark.parametrize("rule", ["with_replacement", "without_replacement", "traversal"])
def test_the_siblings_of_a_sampled_tree_are_those_drawn_from_the_row_on_record(rule: str) -> None:
    shape = Shape.of_choices([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])
    drafter = FixedTree(draft().provider, shape, RULES[rule])
    for seed in range(3):
        pairs = at_random(drafter, seed)
        proposal = drafter.draft(CONTEXT, pairs=pairs).proposal
        for children in np.asarray(proposal.tree.children)[:3]:
            below = children[children >= 0]
            if below.size:
                row = proposal.draft_rows[int(proposal.tree.parents[below[0]])]
                drawn = drafter.rule.proposal.draw(pairs[below], row)
                assert drawn.tolist() == proposal.tree.tokens[below].tolist()


def test_rows_that_are_exact_stay_exact_and_those_of_half_precision_are_divided_by_their_mass() -> (
    None
):
    rows = {"exact": np.float32([0.5, 0.125, 0.375]), "half": np.float16([0.5, 0.3, 0.1992])}
    for name, row in rows.items():
        path = SampledPath(Provider("draft", VOCAB, lambda _, row=row: row), depth=2)
        found = np.asarray(path.draft(CONTEXT, pairs=pairs_of(0.3, 0.8)).proposal.draft_rows)
        wanted = row / row.sum(dtype=np.float64)
        np.testing.assert_allclose(found[0], wanted, rtol=0 if name == "exact" else 1e-7)
        np.testing.assert_allclose(found.sum(axis=1, dtype=np.float64), 1, atol=1e-7)


# --- queries


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_a_path_of_any_depth_up_to_its_own_has_one_capacity(depth: int) -> None:
    model = draft()
    path = SampledPath(model.provider, depth=2)
    made = path.draft(CONTEXT, depth=depth, pairs=pairs_of(0.3, 0.8))
    tree = made.proposal.tree
    drafted = min(depth, 2)
    assert (tree.max_nodes, tree.max_children, tree.max_depth) == (3, 1, 2)
    assert made.depth == made.batches == int(tree.num_nodes) - 1 == drafted
    assert made.usage == Usage(queries=drafted, calls=drafted) == Usage(len(model.asked), drafted)


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_fixed_tree_takes_the_most_probable_after_each_prefix(is_batched: bool) -> None:
    model = Model("draft", likely_up, is_batched=is_batched)
    made = FixedTree(model.provider, (2, 1)).draft(CONTEXT)
    # After 0 the best two are 1 and 2; after 1 the best is 2, after 2 it is 0.
    assert nodes_of(made) == [(0, -1), (1, 0), (2, 0), (2, 1), (0, 2)]
    assert model.asked == [(2, 0), (2, 0, 1), (2, 0, 2)]
    assert made.usage == Usage(queries=3, calls=2 if is_batched else 3)
    assert (made.depth, made.batches) == (2, 2)


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


def test_impossible_tokens_are_no_candidates_and_the_model_is_not_asked_about_them() -> None:
    model = Model("draft", toy_row, is_batched=True)
    made = FixedTree(model.provider, (2, 2, 1)).draft([2])
    # depth 1: 1 (3/4) before 0 (1/4). Below 1: 0 and 2 tie, lowest first; below 0: only 1.
    # depth 3: after 2 1 0 it is 2, after 2 1 2 1 and 2 tie, after 2 0 1 it is 1.
    assert nodes_of(made) == [
        (2, -1), (1, 0), (0, 0), (0, 1), (2, 1), (1, 2), (2, 3), (1, 4), (1, 5),
    ]  # fmt: skip
    assert model.calls == [[(2,)], [(2, 1), (2, 0)], [(2, 1, 0), (2, 1, 2), (2, 0, 1)]]
    assert made.usage == Usage(queries=6, calls=3)


def test_each_distinct_context_is_asked_about_once() -> None:
    model = Model("draft", likely_up, is_batched=True)
    drafter = FixedTree(model.provider, (3, 1), RULES["with_replacement"])
    pairs = at_random(drafter).at[1:4].set(0.3)
    made = drafter.draft(CONTEXT, pairs=pairs)  # three siblings of one token
    assert len(nodes_of(made)) == 7
    assert [len(call) for call in model.calls] == [1, 1]
    assert made.usage == Usage(queries=2, calls=2)


def test_the_first_nodes_of_a_branching_are_drafted_and_only_their_parents_are_asked() -> None:
    whole = nodes_of(FixedTree(draft().provider, (3, 2, 2)).draft(CONTEXT))
    for most in (2, 4, 5, 7, 9, 12):
        model = draft()
        made = FixedTree(model.provider, (3, 2, 2), max_nodes=most).draft(CONTEXT)
        assert nodes_of(made) == whole[:most]
        assert made.usage.queries == len({parent for _, parent in whole[1:most]})


def test_an_irregular_tree_has_its_own_number_of_candidates_below_each_node() -> None:
    model = Model("draft", likely_up)
    shape = Shape.of_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    made = FixedTree(model.provider, shape).draft(CONTEXT)
    # Each row prefers the next number, then the one after it.
    assert nodes_of(made) == [
        (0, -1), (1, 0), (2, 0), (0, 0), (2, 1), (0, 1), (0, 2), (1, 5),
    ]  # fmt: skip
    assert model.asked == [CONTEXT, (2, 0, 1), (2, 0, 2), (2, 0, 1, 0)]


def test_an_adaptive_tree_is_wide_where_the_draft_is_unsure() -> None:
    rows = {(2, 0): [0.0, 1.0, 0.0], (2, 0, 1): [0.4, 0.3, 0.3]}
    model = Model("draft", rows.__getitem__)
    made = AdaptiveTree(model.provider, POLICY).draft(CONTEXT, depth=2)
    # A sure row, h = 0: one candidate, the least width. Then h = 0.99: two.
    assert nodes_of(made) == [(0, -1), (1, 0), (0, 1), (1, 1)]
    assert (made.usage, made.depth, made.batches) == (Usage(2, 2), 2, 2)


def test_an_adaptive_tree_asks_about_as_many_parents_as_have_room_for_a_child() -> None:
    policy = AdaptiveTreePolicy(min_width=1, max_width=4, first_depth=2, max_nodes=8)
    model = Model("draft", lambda context: np.full(4, 0.25), is_batched=True)
    model.provider = dataclasses.replace(model.provider, vocab=4)
    made = AdaptiveTree(model.provider, policy).draft([0], depth=3)
    # 4 children of the root; 3 places left: 3 parents are asked, the first takes all.
    assert model.calls == [[(0,)], [(0, 0), (0, 1), (0, 2)]]
    assert nodes_of(made)[5:] == [(0, 1), (1, 1), (2, 1)]


def test_a_best_first_tree_asks_about_its_beam_and_proposes_the_most_probable_paths() -> None:
    model = Model("draft", likely_up, is_batched=True)
    made = BestFirstTree(model.provider, max_nodes=6, beam=2, depth=3).draft(CONTEXT)
    # After 0: 1 (.5), 2 (.3); after these the next number .5, the one after it .3.
    assert model.calls == [
        [(2, 0)],
        [(2, 0, 1), (2, 0, 2)],
        [(2, 0, 1, 2), (2, 0, 1, 0)],
    ]
    assert nodes_of(made) == [(0, -1), (1, 0), (2, 0), (2, 1), (0, 1), (0, 2)]


@pytest.mark.parametrize("name", WITH_A_DRAFT)
def test_at_depth_0_nothing_is_asked_and_the_root_is_alone(name: str) -> None:
    model = draft()
    drafter = DRAFTERS[name](model.provider)
    made = drafter.draft(CONTEXT, depth=0, pairs=at_random(drafter))
    assert nodes_of(made) == [(0, -1)]
    assert (made.depth, made.batches, made.usage) == (0, 0, Usage())
    assert model.calls == []


def test_a_draft_with_a_bad_row_fails_with_its_context_and_can_be_asked_again() -> None:
    model = Model("draft", lambda c: [np.nan, 1, 0] if c == (2, 0) else toy_row(c))
    tree = FixedTree(model.provider, (2, 1))
    with pytest.raises(RowError, match=r"draft: row for context \(2, 0\): entry 0 is nan"):
        tree.draft([2])
    model.row = toy_row
    assert len(nodes_of(tree.draft([2]))) == 5


# --- limits


@pytest.mark.parametrize("name", MORE_DRAFTERS)
def test_nothing_is_drafted_below_a_stop_token_and_no_more_nodes_than_fit(name: str) -> None:
    asked: list[Context] = []

    def row(context: Context) -> np.ndarray:
        asked.append(context)
        return np.random.default_rng([7, *context]).dirichlet(np.ones(WIDE))

    drafter = MORE_DRAFTERS[name](Provider("draft", WIDE, row))
    for seed, most in itertools.product(range(3), (1, 4, 99)):
        options: dict[str, Any] = {"stop_tokens": [0, 1], "max_nodes": most}
        made = propose_on_host(drafter, (0, 2), 3, at_random(drafter, seed), vocab=WIDE, **options)
        nodes = nodes_of(made)
        assert len(nodes) <= most
        assert not any(nodes[parent][0] in (0, 1) for _, parent in nodes[1:] if parent > 0)
    assert not any({0, 1} & set(context[2:]) for context in asked)


@pytest.mark.parametrize("depth", [1, 2])
def test_all_proposals_of_a_drafter_have_one_shape(depth: int) -> None:
    makers = {**DRAFTERS, **{n: m for n, m in MORE_DRAFTERS.items() if n != "n-gram tree"}}
    for make in makers.values():
        model = Provider("draft", WIDE, lambda _: np.full(WIDE, 1 / WIDE))
        drafter = make(model)
        first, other = (
            drafter.draft(context, depth=d, pairs=at_random(drafter)).proposal
            for context, d in (((2, 0), depth), ((1,), drafter.first_depth))
        )
        assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, other)
        assert first.tree.max_nodes == drafter.capacity.max_nodes


def test_capacities_are_what_the_shape_asks_for_within_max_nodes() -> None:
    model = draft().provider
    assert FixedTree(model, (3, 2)).capacity == (10, 3, 2)
    assert FixedTree(model, (3, 2), max_nodes=99).capacity == (10, 3, 2)
    wide = AdaptiveTreePolicy(max_width=2, max_depth=3, first_depth=1, max_nodes=99)
    assert AdaptiveTree(model, wide).capacity.max_nodes == 1 + 2 + 4 + 8
    assert AdaptiveTree(model, POLICY).capacity.max_nodes == 5
    assert AdaptiveTree(model, wide).block_sizes == (1, 3, 7, 15)
    assert Lookup({3: 4, 2: 2}).block_sizes == (1, 3, 5)


def test_a_branching_beyond_the_vocabulary_drafts_each_token_once() -> None:
    made = FixedTree(draft().provider, (VOCAB + 4,)).draft(CONTEXT)
    assert sorted(token for token, _ in nodes_of(made)[1:]) == [0, 1, 2]


def test_a_draft_of_another_vocabulary_drafts_the_common_tokens() -> None:
    wide = Provider("wide", 5, lambda _: [0.1, 0.2, 0.1, 0.4, 0.2])
    path = SampledPath(wide, 1)
    made = propose_on_host(path, CONTEXT, 1, pairs_of(0.6)[:2], vocab=3)
    np.testing.assert_allclose(made.proposal.draft_rows, [[0.25, 0.5, 0.25]], rtol=1e-6)
    foreign = SampledPath(Provider("foreign", 5, lambda _: [0.0, 0.0, 0.0, 0.5, 0.5]), 2)
    made = propose_on_host(foreign, CONTEXT, 2, pairs_of(0.6, 0.5), vocab=3)
    assert (nodes_of(made), made.usage) == ([(0, -1)], Usage(1, 1))
    narrow = FixedTree(Provider("narrow", 2, lambda _: [0.25, 0.75]), (3,))
    assert nodes_of(propose_on_host(narrow, (1, 0), 1, jnp.zeros((4, 2)), vocab=3)) == [
        (0, -1), (1, 0), (0, 0),
    ]  # fmt: skip


def test_fixed_depths_stay_and_the_adaptive_depth_follows_the_policy() -> None:
    model = draft().provider
    assert SampledPath(model, 2).next_depth(2, 0, 2) == 2
    adaptive = AdaptiveTree(model, POLICY)
    assert [int(adaptive.next_depth(1, 1, 1)), int(adaptive.next_depth(2, 0, 2))] == [2, 1]
    assert (adaptive.first_depth, NoDraft().first_depth) == (POLICY.first_depth, 0)


# --- errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: SampledPath(p, depth=0), "depth is 0"),
        (lambda p: SampledPath(p, depth=(1, 1)), r"depth is \(1, 1\)"),
        (lambda p: SampledPath(p, 2, RULES["point_mass"]), "'point_mass' does not verify"),
        (lambda p: SampledPath(p, 2, "block"), r'rule is .*RULES\["block"\]'),
        (lambda p: SampledPath("llama", 2), "model is 'llama', of type str: must be"),
        (lambda p: FixedTree(p, ()), r"shape is \(\)"),
        (lambda p: FixedTree(p, [2, 1]), "shape is of type list: must be a Shape, or a tuple"),
        (lambda p: FixedTree(p, (2, 0)), "the entry at depth 1 is 0"),
        (lambda p: FixedTree(p, (2,), max_nodes=1), "max_nodes is 1"),
        (lambda p: FixedTree(p, Shape((-1, 0)), max_nodes=2), "max_nodes is for a shape"),
        (lambda p: FixedTree(p, (2,), RULES["token"]), "'token' is for paths"),
        (lambda p: FixedTree(p, (4,), RULES["traversal"]), "4 children: more than the 3 tokens"),
        (lambda p: AdaptiveTree(p, rule=RULES["block"]), "'block' does not verify"),
        (lambda p: AdaptiveTree(p, 4), "policy is 4, of type int: must be an Ad"),
        (lambda p: AdaptiveTree(p, target_blocks=(-3,)), "an entry of target_blocks is -3"),
        (BestFirstTree, "beam is 4: must be at most 3 tokens"),
        (lambda p: BestFirstTree(p, beam=2, max_nodes=80), "from 2 to 15"),
        (lambda p: BestFirstTree(p, beam=2, depth=1.5), "depth is 1.5"),
        (lambda p: Lookup({}), "lengths are empty"),
        (lambda p: Lookup({2: 0}), "a draft is 0"),
        (lambda p: Lookup([3, 2]), "lengths is of type list: must be a mapping"),
        (lambda p: Lookup(matches=0), "matches is 0"),
        (lambda p: Lookup(max_nodes=1), "max_nodes, the root counted, is 1"),
        (lambda p: NGramTree(p, (1,)), "ngram is of type Provider: must be a jaxspec.models.NGram"),
        (lambda p: NGramTree(fit_ngram("ab", 0), (1,)), "an n-gram model of order 0"),
        (lambda p: NGramTree(NGRAM, (6,)), "6 children: more than the 5 tokens"),
        (
            lambda p: NGramTree(NGRAM, (1,)).validate(7),
            "vocabulary of 7, the n-gram model one of 5",
        ),
        (lambda p: SampledPath(p, 1).draft([1]), "pairs are needed to sample"),
        (lambda p: FixedTree(p, (1,)).draft([1.5]), r"not \[1\.5\]"),
        (lambda p: NoDraft().draft([2**31]), "entry 0 is 2147483648, outside"),
        (lambda p: FixedTree(p, (1,)).draft([]), "the context is empty"),
        (lambda p: FixedTree(p, (1,)).draft([7]), "entry 0 is 7, outside the vocabulary of 3"),
    ],
)
def test_invalid_arguments_are_named_with_what_to_give_instead(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(draft().provider)


def test_drafters_that_draft_differently_describe_themselves_differently() -> None:
    one, other = draft().provider, Model("another", likely_up).provider
    drafters = [
        NoDraft(),
        SampledPath(one, 2),
        SampledPath(one, 3),
        SampledPath(other, 2),
        SampledPath(one, 2, RULES["block"]),
        FixedTree(one, (2, 1)),
        FixedTree(one, (2, 1), max_nodes=4),
        FixedTree(one, Shape((-1, 0, 0, 1))),
        FixedTree(one, (2, 2)),
        AdaptiveTree(one),
        AdaptiveTree(one, POLICY),
        AdaptiveTree(other),
        BestFirstTree(one, max_nodes=4, beam=2),
        Lookup(),
        Lookup({2: 3}),
        NGramTree(NGRAM, (2,)),
        NGramTree(fit_ngram("abcdeabcbb", 3), (2,)),
    ]
    described = [repr(drafter.describe()) for drafter in drafters]
    assert len(set(described)) == len(drafters)
    assert SampledPath(one, 2).describe() == SampledPath(draft().provider, 2).describe()
