"""The law by search: what it finds, what it cannot miss unseen, and the laws of all rules."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.known_bad import row
from helpers.plain_rules import PLAIN_RULES
from helpers.two_rounds import two_rounds

import jaxspec as js
from jaxspec import audit

UNITS = 2**24


def piece(thresholds: jax.Array, u: jax.Array) -> jax.Array:
    """Which of the pieces between thresholds holds the draw."""
    return jnp.sum(thresholds <= u[0], dtype=jnp.int32)


def second_depends_on_first(world: None, u: jax.Array) -> jax.Array:
    """Four boxes; where the second draw is cut depends on the first."""
    left = jnp.where(u[1] < 0.25, 0, 1)
    right = jnp.where(u[1] < 0.75, 2, 3)
    return jnp.where(u[0] < 0.375, left, right)


@pytest.mark.parametrize("thresholds", [(0.25, 0.75), (0.0, 0.5), (1 / 3, 0.99999)])
@pytest.mark.parametrize("batch", [3, 64])
def test_the_search_finds_both_edges_of_two_thresholds_to_the_unit(thresholds, batch):
    world = jnp.array(thresholds, jnp.float32)
    cells = audit.search(piece, world, 1, (0,), batch=batch)
    edges = np.ceil(np.asarray(world, np.float64) * UNITS).astype(int).tolist()
    pieces = [
        (low, high, code)
        for low, high, code in ((0, edges[0], 0), (*edges, 1), (edges[1], UNITS, 2))
        if low < high
    ]
    found = zip(cells.low[:, 0].tolist(), cells.high[:, 0].tolist(), cells.outcomes, strict=True)
    assert sorted(found) == pieces
    assert cells.misses == 0
    assert cells.mass.sum() == 1


def test_an_outcome_of_the_single_draw_0_is_a_box_of_one_unit():
    cells = audit.search(lambda world, u: jnp.where(u[0] <= 0, 7, 3), None, 1, (0,))
    assert cells.outcomes.tolist() == [7, 3]
    assert cells.mass.tolist() == [1 / UNITS, 1 - 1 / UNITS]


def test_the_search_goes_axis_by_axis_in_causal_order():
    cells = audit.search(second_depends_on_first, None, 2, (0, 1))
    assert cells.misses == 0
    masses = dict(zip(cells.outcomes.tolist(), cells.mass.tolist(), strict=True))
    assert masses == {0: 3 / 32, 1: 9 / 32, 2: 15 / 32, 3: 5 / 32}


def test_a_wrong_causal_order_shows_as_misses_though_the_mass_is_one():
    cells = audit.search(second_depends_on_first, None, 2, (1, 0))
    assert cells.mass.sum() == 1
    assert cells.misses > 0


def test_an_axis_that_matters_but_is_left_out_shows_as_misses():
    cells = audit.search(second_depends_on_first, None, 2, (0,))
    assert cells.mass.sum() == 1
    assert cells.misses > 0


def test_a_piece_that_falls_between_the_probes_shows_as_misses():
    def island(world: None, u: jax.Array) -> jax.Array:
        return jnp.where((u[0] > 0.3) & (u[0] < 0.45), 1, 0)

    cells = audit.search(island, None, 1, (0,), replays=40)
    assert cells.misses > 0
    assert cells.replays == 42 * len(cells.low)


def test_rows_by_context_give_the_contract_tree_its_joint_law():
    rule = js.RULES["point_mass"]
    (tree,) = (i for i in audit.instances_for(rule) if i.name == "contract two-level tree")
    table = np.asarray(audit.make_round(rule, tree).world.target)
    np.testing.assert_allclose(
        audit.joint_law(table, 2), [[0.2, 0.05], [0.3, 0.45]], rtol=0, atol=1e-7
    )


MEAN_ACCEPTED = {
    "token": {"contract single path": Fraction(3, 4), "toy of two": Fraction(10, 9)},
    "block": {"contract single path": Fraction(3, 4), "toy of two": Fraction(11, 9)},
    "point_mass": {
        "contract two-level tree": Fraction(2),
        "kill row, top two": Fraction(4, 5),
    },
    "with_replacement": {"kill row, two siblings": Fraction(47, 80)},
    "without_replacement": {"kill row, two siblings": Fraction(107, 160)},
}
"""Mean accepted tokens that are known exactly, by rule and instance."""


@pytest.mark.parametrize("name", js.RULES)
def test_a_rule_is_lossless_in_every_instance(name: str):
    rule = js.RULES[name]
    instances = audit.instances_for(rule)
    capacity = audit.Capacity.of(instances)
    for instance in instances:
        law = audit.exact_law(rule, instance, capacity=capacity)
        assert law.is_proved, law
        assert law.tv <= 1e-6
        assert law.total_mass == pytest.approx(1, abs=1e-12)
        assert (law.impossible, law.cells.misses) == (0, 0)
        if instance.name in MEAN_ACCEPTED.get(name, {}):
            expected = float(MEAN_ACCEPTED[name][instance.name])
            assert law.expected_accepted == pytest.approx(expected, abs=1e-6)
            assert law.known_accepted == expected


TARGET = {
    (): row(1, 3),
    (0,): row(2, 3),
    (1,): row(5, 1),
    (0, 0): row(1, 1),
    (0, 1): row(3, 7),
    (1, 0): row(1, 8),
    (1, 1): row(9, 4),
}
DRAFT = {(): row(2, 1), (0,): row(3, 4), (1,): row(1, 5), (0, 1): row(5, 2)}


@pytest.mark.parametrize("name", js.RULES)
def test_two_rounds_of_a_rule_leave_the_text_its_joint_law(name: str):
    rule = js.RULES[name]
    if rule.proposal is js.PointMass:
        instance = audit.Instance(
            name="two rounds", target=TARGET, candidates={(): (1,), (1,): (0, 1)}
        )
    else:
        branching = (1, 1) if rule.is_path else (2, 1)
        instance = audit.Instance(
            name="two rounds", target=TARGET, draft=DRAFT, branching=branching
        )
    for bonus in (False, True):
        played = two_rounds(rule, dataclasses.replace(instance, bonus=bonus))
        cells = played.search()
        assert cells.misses == 0
        assert cells.mass.sum() == pytest.approx(1, abs=1e-12)
        assert played.total_variation(cells) <= 1e-6


SMALL = audit.Instance(
    name="small", target={(): row(1, 3)}, draft={(): row(1, 1)}, branching=(1,), bonus=False
)


def law_of(verify, instance: audit.Instance = SMALL, batch: int = 64) -> audit.Law:
    rule = js.RULES["token"]
    played = audit.make_round(rule, instance, verify=verify)
    return audit.exact_law(rule, instance, played=played, batch=batch)


def test_a_foreign_verifier_on_the_host_is_audited_as_it_is():
    def on_host(accept, final, tokens, p_rows, q_rows, bonus):
        x = int(tokens[1])
        if accept[1] * q_rows[0, x] < p_rows[0, x]:
            y = np.searchsorted(np.cumsum(p_rows[1]), final[1], side="right")
            text, accepted = ([x, y] if bonus else [x]), 1
        else:
            left = np.maximum(p_rows[0] - q_rows[0], 0)
            y = np.searchsorted(np.cumsum(left / left.sum()), final[1], side="right")
            text, accepted = [y], 0
        numbers = [*text, *[-1] * (2 - len(text)), len(text), accepted]
        return np.array(numbers, np.int32)

    def verify(draws, proposal, target_rows, bonus):
        inputs = (draws.accept, draws.final, proposal.tree.tokens, target_rows)
        numbers = jax.pure_callback(
            on_host,
            jax.ShapeDtypeStruct((4,), jnp.int32),
            *inputs,
            proposal.draft_rows,
            bonus,
            vmap_method="sequential",
        )
        return js.Verdict(
            tokens=numbers[:2],
            num_tokens=numbers[2],
            num_accepted=numbers[3],
            path=jnp.array([0, -1]),
            stop_node=jnp.int32(0),
            status=jnp.int32(0),
        )

    law = law_of(verify, batch=8)
    assert law.is_proved, law
    assert law.expected_accepted == pytest.approx(0.75, abs=1e-6)


def test_a_law_tells_what_is_not_proved_about_it():
    law = law_of(PLAIN_RULES["token"])
    assert law.is_proved
    cells = dataclasses.replace(law.cells, misses=1)
    for fault in (
        {"tv": 2e-6},
        {"impossible": 2.0**-24},
        {"total_mass": 1 - 1e-6},
        {"flagged": 1e-3},
        {"known_accepted": 0.7501},
        {"cells": cells},
    ):
        assert not dataclasses.replace(law, **fault).is_proved, fault


def test_tokens_outside_the_vocabulary_are_impossible_text():
    def verify(draws, proposal, target_rows, bonus):
        verdict = PLAIN_RULES["token"](draws, proposal, target_rows, bonus)
        is_lost = draws.accept[1] < 0.125
        tokens = jnp.where(is_lost, verdict.tokens.at[0].set(2), verdict.tokens)
        return dataclasses.replace(verdict, tokens=tokens)

    law = law_of(verify)
    assert law.impossible == pytest.approx(0.125, abs=1e-9)
    assert not law.is_proved


def test_the_law_of_a_tree_costs_the_candidates_that_are_looked_at_not_all_that_are_drawn():
    rule = js.RULES["without_replacement"]
    kill = next(i for i in audit.instances_for(rule) if i.name == "kill row, two siblings")
    deep = dataclasses.replace(kill, name="deep", branching=(2, 1), expected_accepted={})
    played = audit.make_round(rule, deep, capacity=audit.Capacity.of(audit.instances_for(rule)))
    lazy = audit.exact_law(rule, deep, played=played)
    full = audit.exact_law(rule, deep, played=dataclasses.replace(played, lazy_order=None))
    assert lazy.is_proved
    assert full.is_proved
    np.testing.assert_allclose(lazy.text, full.text, rtol=0, atol=1e-7)
    assert lazy.expected_accepted == pytest.approx(full.expected_accepted, abs=1e-7)
    assert lazy.cells.evaluations < full.cells.evaluations / 4


def test_a_verifier_that_says_wrongly_where_it_stopped_is_searched_in_full():
    def verify(draws, proposal, target_rows, bonus):
        verdict = PLAIN_RULES["token"](draws, proposal, target_rows, bonus)
        return dataclasses.replace(verdict, stop_node=jnp.int32(0))

    rule = js.RULES["token"]
    # Two second tokens, both rejected in the middle of their accept draws for the same residual.
    deep = audit.Instance(
        name="two alike in the middle",
        target={(): row(1, 0, 0), (0,): row(1, 2, 7)},
        draft={(): row(1, 0, 0), (0,): row(1, 1, 0)},
        branching=(1, 1),
    )
    played = audit.make_round(rule, deep, verify=verify)
    lazy = played.lazily()
    cells = audit.search(lazy.play, lazy.world, len(lazy.axes), lazy.causal_order)
    assert cells.misses > 0
    assert audit.exact_law(rule, deep, played=played).is_proved


def test_a_draft_length_is_for_candidates_that_are_drawn():
    rule = js.RULES["point_mass"]
    (tree,) = (i for i in audit.instances_for(rule) if i.name == "contract two-level tree")
    with pytest.raises(ValueError, match="'point_mass' is for point masses: nothing is drawn"):
        audit.make_round(rule, tree, num_drafted=lambda tokens, rows: jnp.int32(1))


def test_progress_of_a_search_goes_from_nothing_to_all_and_is_told_within_a_long_axis():
    calls: list[tuple[str, int, int]] = []
    pieces = jnp.arange(1, 64) / 64
    cells = audit.search(
        lambda world, u: jnp.stack([piece(world, u), piece(world, u[1:])]),
        pieces,
        2,
        (0, 1),
        batch=4096,
        progress=lambda *call: calls.append(call),
    )
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert {done for _, done, _ in calls} == {0, 1, 2, 3}
    assert {steps for *_, steps in calls} == {3}
    assert sum(done == 1 for _, done, _ in calls) > 1
    assert calls[-1][0] == f"4,096 boxes, {cells.evaluations + cells.replays:,} evaluations"


EMPTY = {
    "draws of no shape": (lambda: audit.replay(piece, None, np.zeros(0)), r"draws has shape \[0\]"),
    "a batch of none": (lambda: audit.search(piece, None, 1, (0,), batch=0), "batch is 0"),
    "an axis that is not there": (lambda: audit.search(piece, None, 0, (0,)), "one of the 0 axes"),
    "an axis twice": (lambda: audit.search(piece, None, 2, (0, 0)), r"causal_order\[1\] is 0"),
    "no outcome": (
        lambda: audit.search(lambda world, u: (), None, 1, (0,)),
        "play returns no array",
    ),
    "no rows": (lambda: audit.joint_law(np.zeros((0, 3)), 1), "table has shape"),
    "rows for fewer tokens": (lambda: audit.joint_law(np.ones((1, 3)) / 3, 2), "have 4 contexts"),
    "tokens below none": (lambda: audit.joint_law(np.ones((1, 3)) / 3, -1), "length is -1"),
    "no instances": (lambda: audit.Capacity.of([]), "instances is empty"),
    "an instance without rows": (lambda: audit.Instance("a", target={}), "target has no row"),
    "an empty row": (lambda: audit.Instance("a", target={(): []}), "target has an empty row"),
    "no draft rows": (
        lambda: audit.Instance("a", target={(): [1]}, draft={}, branching=(1,)),
        "draft has no row",
    ),
    "a grid without axes": (lambda: audit.count_outcomes(piece, (), 2), "sizes is empty"),
    "a grid without cells": (lambda: audit.count_outcomes(piece, (4, 0), 2), r"sizes\[1\] is 0"),
    "a grid of no outcomes": (lambda: audit.count_outcomes(piece, (4,), 0), "num_outcomes is 0"),
    "chunks of none": (lambda: audit.count_outcomes(piece, (4,), 2, chunk=0), "chunk is 0"),
    "no counts": (lambda: audit.g_test([], []), "first is empty"),
    "no second counts": (lambda: audit.g_test([1], []), "second is empty"),
    "no counts for a law": (lambda: audit.fit_test([], []), "counts is empty"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_what_is_empty_is_named(name: str):
    call, message = EMPTY[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_no_draws_at_all_have_no_outcomes():
    played = audit.make_round(js.RULES["token"], SMALL)
    found = audit.replay(played.play, played.world, np.zeros((0, len(played.axes))))
    assert found.verdict.tokens.shape == (0, 2)
    assert found.verdict.status.shape == (0,)
    cells = audit.search(lambda world, u: jnp.int32(7), None, 0, ())
    assert (cells.outcomes.tolist(), cells.mass.tolist()) == ([7], [1.0])
    report = audit.AuditReport(grids=audit.report.KNOWN_COUNTS, laws=(), device="none", versions={})
    assert not report.is_proved  # nothing was proved


def test_records_of_many_numbers_are_shown_in_a_few_lines():
    rule = js.RULES["token"]
    deep = next(i for i in audit.instances_for(rule) if i.name == "contexts of three tokens")
    played = audit.make_round(rule, deep)
    law = audit.exact_law(rule, deep, played=played)
    report = audit.AuditReport(grids={}, laws=(law,) * 29, device="none", versions={})
    for record in (law, law.cells, law.cells.outcomes, deep, played, played.world, report):
        assert f"{type(record).__name__}(" in repr(record)
        assert len(repr(record)) < 1200
    assert "case='contexts of three tokens', tv=" in repr(law)
    assert "text=float64[3, 3, 3]" in repr(law)
    assert "laws=tuple of 29" in repr(report)


def test_another_verifier_is_searched_in_the_order_of_its_own_tests() -> None:
    rule = js.RULES["with_replacement"]
    deep = next(i for i in audit.instances_for(rule) if i.name == "contexts of three tokens")

    def law(**order: bool) -> audit.Law:
        played = audit.make_round(rule, deep, verify=js.verify_traversal, **order)
        return audit.exact_law(rule, deep, played=played)

    assert law(tests_deepest_first=True).is_proved
    assert not law().is_proved
