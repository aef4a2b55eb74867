"""The law by search: what it finds, what it cannot miss unseen, and the laws of all rules."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known_bad import row
from plain_rules import PLAIN_RULES
from two_rounds import two_rounds

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


def test_another_verifier_is_searched_in_the_order_of_its_own_tests() -> None:
    rule = js.RULES["with_replacement"]
    deep = next(i for i in audit.instances_for(rule) if i.name == "contexts of three tokens")

    def law(**order: bool) -> audit.Law:
        played = audit.make_round(rule, deep, verify=js.verify_bottom_up, **order)
        return audit.exact_law(rule, deep, played=played)

    assert law(tests_deepest_first=True).is_proved
    assert not law().is_proved
