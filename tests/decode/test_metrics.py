"""Metrics: conditional rates worked out by hand, and no rate where there was no chance."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toys import Model, counting_up, never_up, target

import jaxspec as js
from jaxspec.decode import (
    Decoder,
    DecodeState,
    Ending,
    Metrics,
    Rate,
    RoundRecord,
    Scores,
    metrics_of,
    overlap,
)
from jaxspec.decode.metrics import chances_of
from jaxspec.decode.state import RoundSummary
from jaxspec.draft import FixedTree, HostDraft, SampledPath
from jaxspec.models import Usage


def summary(
    tested: tuple[tuple[int, bool], ...], *, drafted: int, emitted: int, batches: int = 1
) -> RoundSummary:
    return RoundSummary(
        position=0,
        proposed_depth=2,
        num_drafted=drafted,
        num_accepted=sum(is_accepted for _, is_accepted in tested),
        num_emitted=emitted,
        tested=tested,
        target=Usage(queries=drafted + 1, calls=batches),
        draft=Usage(queries=3, calls=2),
        target_batches=batches,
        draft_batches=2,
        status=0,
    )


def test_rates_are_conditional_on_having_got_there() -> None:
    counted = metrics_of(
        [
            # The root's 2nd child accepted, then the 1st below it: depth 2.
            summary(((2, True), (1, True)), drafted=4, emitted=3),
            # The root's 1st accepted, then all three below it rejected.
            summary(((1, True), (3, False)), drafted=4, emitted=2),
            # Both of the root's rejected.
            summary(((2, False),), drafted=2, emitted=1, batches=3),
            # Nothing drafted.
            summary((), drafted=0, emitted=1),
        ]
    )
    # Depth 1: three rounds could, two did. Depth 2: two got to depth 1 and could, one did.
    assert counted.by_depth == (Rate(2, 3), Rate(1, 2))
    # First siblings were tested 5 times (2 + 2 + 1) and accepted twice; second ones 3 times, after
    # their elder had been rejected, and accepted once; the third once and rejected.
    assert counted.by_rank == (Rate(2, 5), Rate(1, 3), Rate(0, 1))
    assert counted.acceptance == Rate(3, 5)
    assert counted.acceptance.value == 0.6
    assert (counted.rounds, counted.new_tokens, counted.drafted, counted.accepted) == (4, 7, 10, 3)
    assert (counted.target_queries, counted.target_calls, counted.target_batches) == (14, 6, 6)
    assert (counted.draft_queries, counted.draft_calls, counted.draft_batches) == (12, 8, 8)
    assert counted.block_efficiency == 7 / 4
    assert counted.tokens_per_target_batch == 7 / 6


def test_a_rate_without_a_chance_is_absent_and_one_without_a_hit_is_0() -> None:
    assert Rate(0, 0).value is None
    assert Rate(0, 4).value == 0
    plain = metrics_of([summary((), drafted=0, emitted=1)])
    assert plain.by_depth == plain.by_rank == ()
    assert plain.acceptance.value is None
    assert plain.block_efficiency == plain.tokens_per_target_batch == 1
    nothing = metrics_of([])
    assert nothing.acceptance.value is None
    assert nothing.block_efficiency is None
    assert nothing.tokens_per_target_batch is None
    assert nothing.target_queries == nothing.new_tokens == 0


def test_the_rounds_may_come_from_an_iterator() -> None:
    rounds = [summary(((1, True),), drafted=1, emitted=2)]
    assert metrics_of(iter(rounds)) == metrics_of(rounds)


#   0 ── 1 (token 1) ── 4 (token 0)
#    │                └ 5 (token 2)
#    ├─ 2 (token 2) ── 6 (token 1)
#    └─ 3 (token 0)
TREE = js.make_tree([0, 1, 2, 0, 0, 2, 1], [-1, 0, 0, 0, 1, 1, 2])


def committed(path: list[int], tokens: list[int], stop_tokens: tuple[int, ...] = ()) -> DecodeState:
    """What a verdict over the tree commits: the accepted path, and the tokens emitted."""
    verdict = js.Verdict(
        tokens=np.array(tokens + [-1] * (3 - len(tokens))),
        num_tokens=np.int32(len(tokens)),
        num_accepted=np.int32(len(path) - 1),
        path=np.array(path + [-1] * (3 - len(path))),
        stop_node=np.int32(path[-1]),
        status=np.int32(0),
    )
    drafter = FixedTree(target().provider, (3, 2))
    decoder = Decoder(target().provider, drafter)
    state = decoder.start((0,), jax.random.key(0), new_tokens=9, stop_tokens=stop_tokens)
    made = HostDraft(js.PointMass(tree=TREE), depth=2, usage=Usage(4, 2), batches=2)
    scores = Scores(rows=np.zeros((7, 3), np.float32), usage=Usage(7, 1), batches=1)
    return decoder.commit(state, made, scores, verdict)


@pytest.mark.parametrize(
    ("path", "tokens", "tested"),
    [
        # All three of the root's children rejected, a replacement.
        ([0], [1], ((3, False),)),
        # The third child accepted: it is a leaf, below which nothing was tested.
        ([0, 3], [0, 1], ((3, True),)),
        # The first, then both below it rejected.
        ([0, 1], [1, 1], ((1, True), (2, False))),
        # The second, then the one below it.
        ([0, 2, 6], [2, 1, 0], ((2, True), (1, True))),
        # The first, then the second below it; without a bonus.
        ([0, 1, 5], [1, 2], ((1, True), (2, True))),
    ],
)
def test_what_was_tested_follows_from_the_accepted_path(
    path: list[int], tokens: list[int], tested: tuple[tuple[int, bool], ...]
) -> None:
    state = committed(path, tokens)
    (done,) = state.rounds
    assert done.tested == tested
    assert (done.num_accepted, done.num_emitted) == (len(path) - 1, len(tokens))
    assert (done.num_drafted, done.proposed_depth, done.target_batches) == (6, 2, 1)
    assert (done.target, done.draft) == (Usage(7, 1), Usage(4, 2))
    assert state.new_tokens == tuple(tokens)


@pytest.mark.parametrize(
    ("stop", "emitted", "accepted", "tested"),
    [
        # Emitted would be 1 (accepted), 2 (accepted), 0 (bonus).
        (1, (1,), 1, ((1, True),)),
        (2, (1, 2), 2, ((1, True), (2, True))),
        (0, (1, 2, 0), 2, ((1, True), (2, True))),
    ],
)
def test_what_comes_after_a_stop_token_is_not_counted(
    stop: int, emitted: tuple[int, ...], accepted: int, tested: tuple[tuple[int, bool], ...]
) -> None:
    state = committed([0, 1, 5], [1, 2, 0], (stop,))
    (done,) = state.rounds
    assert (state.new_tokens, state.ending) == (emitted, Ending.STOP)
    assert (done.num_accepted, done.num_emitted, done.tested) == (accepted, len(emitted), tested)


def test_a_stop_token_that_replaces_a_rejected_one_keeps_the_test_before_it() -> None:
    (done,) = committed([0, 1], [1, 0], (0,)).rounds
    assert (done.num_accepted, done.tested) == (1, ((1, True), (2, False)))


def test_the_chances_of_a_tree_are_the_targets_mass_on_the_candidates_below_each_visited_node() -> (
    None
):
    rows = np.float32([[0.5, 0.2, 0.3], [0.6, 0.3, 0.1], *[[0.0, 0.0, 1.0]] * 5])
    record = dataclasses.replace(a_round(), proposal=js.PointMass(tree=TREE), target_rows=rows)
    # The root's children are 1, 2 and 0; below node 1 they are 0 and 2; below 4 there are none.
    assert chances_of(with_path(record, [0, 1])) == pytest.approx((1.0, 0.7))
    assert chances_of(with_path(record, [0, 1, 4])) == pytest.approx((1.0, 0.7))
    assert chances_of(with_path(record, [0, 2])) == pytest.approx((1.0, 0.0))  # below 2 is 1
    assert chances_of(with_path(record, [0, 3])) == pytest.approx((1.0,))


def test_the_chances_of_a_path_are_the_overlaps_of_target_and_draft() -> None:
    p = np.float32([[0.5, 0.2, 0.3], [0.6, 0.3, 0.1], [1, 0, 0]])
    q = np.float32([[0.2, 0.2, 0.6], [0.1, 0.9, 0.0]])
    record = dataclasses.replace(
        a_round(), rule="token", proposal=js.sampled_path(np.array([0, 1]), q), target_rows=p
    )
    assert chances_of(with_path(record, [0])) == pytest.approx((0.7,))
    assert chances_of(with_path(record, [0, 1])) == pytest.approx((0.7, 0.4))
    assert chances_of(with_path(record, [0, 1, 2])) == pytest.approx((0.7, 0.4))
    with pytest.raises(ValueError, match="rule 'block'"):
        chances_of(dataclasses.replace(record, rule="block"))


def test_a_round_without_a_draft_has_no_chances() -> None:
    assert chances_of(a_round()) == ()


@functools.cache
def a_round() -> RoundRecord:
    """A round without a draft, to be changed."""
    decoder = Decoder(target().provider)
    return decoder.step(decoder.start((0,), jax.random.key(0)))[1]


def with_path(record: RoundRecord, path: list[int]) -> RoundRecord:
    """The record with another accepted path."""
    verdict = dataclasses.replace(
        record.verdict, path=np.array(path), num_accepted=np.int32(len(path) - 1)
    )
    return dataclasses.replace(record, verdict=verdict)


def run(draft_row: object, depth: int = 2) -> Metrics:
    path = SampledPath(Model("draft", draft_row).provider, depth)  # type: ignore[arg-type]
    decoder = Decoder(Model("target", counting_up).provider, path)
    return metrics_of(decoder.run((0,), jax.random.key(0), new_tokens=7).rounds)


def test_the_rates_of_a_draft_that_is_always_or_never_right() -> None:
    right, wrong = run(counting_up), run(never_up)
    # 3 + 3 + 1 tokens: two rounds of two drafted tokens each.
    assert right.by_depth == (Rate(2, 2), Rate(2, 2))
    assert right.by_rank == (Rate(4, 4),)
    assert right.block_efficiency == 7 / 3
    # Seven rounds of one token, the last without a draft; no second token was ever got to.
    assert wrong.by_depth == wrong.by_rank == (Rate(0, 6),)
    assert wrong.block_efficiency == 1


def test_the_overlap_is_one_minus_the_total_variation_of_each_pair_of_rows() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.dirichlet(np.ones(9), (2, 3, 4)).astype(np.float32)
    wanted = 1 - np.abs(first - second).sum(axis=-1) / 2
    np.testing.assert_allclose(overlap(first, second), wanted, atol=1e-6)
    np.testing.assert_allclose(overlap(first, first), 1, atol=1e-6)
    with pytest.raises(AssertionError):
        overlap(jnp.ones(3), jnp.ones(4))


def test_the_overlap_of_half_precision_rows_is_summed_in_float32() -> None:
    row = jnp.full(3000, 1 / 3000, jnp.bfloat16)
    assert overlap(row, row).dtype == jnp.float32
    np.testing.assert_allclose(overlap(row, row), 3000 * float(row[0]), rtol=1e-5)
