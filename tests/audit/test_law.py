"""The law by search: what it finds, what it cannot miss unseen, and the laws of all rules."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.known_bad import row
from helpers.plain_rules import PLAIN_RULES
from helpers.two_rounds import two_rounds

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.reference import PLAIN_RULES as PLAIN
from jaxspec.audit.report import KNOWN_COUNTS
from jaxspec.audit.rounds import make_round

UNITS = 2**24


def piece(thresholds: jax.Array, u: jax.Array) -> jax.Array:
    """Which of the pieces between thresholds holds the draw."""
    return jnp.sum(thresholds <= u[0], dtype=jnp.int32)


def second_depends_on_first(world: None, u: jax.Array) -> jax.Array:
    """Four boxes; where the second draw is cut depends on the first."""
    left = jnp.where(u[1] < 0.25, 0, 1)
    right = jnp.where(u[1] < 0.75, 2, 3)
    return jnp.where(u[0] < 0.375, left, right)


def test_the_search_finds_both_edges_of_two_thresholds_to_the_unit():
    for thresholds in ((0.25, 0.75), (0.0, 0.5), (1 / 3, 0.99999)):
        world = jnp.array(thresholds, jnp.float32)
        edges = np.ceil(np.asarray(world, np.float64) * UNITS).astype(int).tolist()
        pieces = [(0, edges[0], 0), (*edges, 1), (edges[1], UNITS, 2)]
        for batch in (3, 64):
            cells = audit.search(piece, world, 1, (0,), batch=batch)
            sides = cells.low[:, 0].tolist(), cells.high[:, 0].tolist()
            found = sorted(zip(*sides, cells.outcomes.tolist(), strict=True))
            assert found == [each for each in pieces if each[0] < each[1]]
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


def test_a_wrong_causal_order_and_a_missing_axis_show_as_misses_though_the_mass_is_one():
    for order in ((1, 0), (0,)):
        cells = audit.search(second_depends_on_first, None, 2, order)
        assert cells.mass.sum() == 1
        assert cells.misses > 0


def test_a_piece_that_falls_between_the_probes_shows_as_misses():
    def island(world: None, u: jax.Array) -> jax.Array:
        return jnp.where((u[0] > 0.3) & (u[0] < 0.45), 1, 0)

    cells = audit.search(island, None, 1, (0,), replays=40)
    assert cells.misses > 0
    assert cells.replays == 42 * len(cells.low)


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


def law_of(verify, batch: int = 64) -> audit.Law:
    return audit.exact_law(js.RULES["token"], SMALL, verify, batch=batch)


def numpy_verifier(draws, proposal, target_rows, bonus):
    return np.asarray(proposal.tree.tokens)


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        ("token", r"verify is 'token', of type str: must be a function that JAX can trace"),
        (js.RULES["block"], r"verify is .*Rule.*: must be a function that JAX can trace, such as"),
        (numpy_verifier, r"JAX cannot trace verify .*audited by jaxspec\.audit\.check_lossless"),
    ],
)
def test_what_is_no_verifier_is_an_error_that_says_what_to_give(verify, message):
    with pytest.raises(ValueError, match=message):
        audit.exact_law(js.RULES["token"], SMALL, verify)


def test_a_custom_verifier_on_the_host_is_audited_as_it_is():
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
            path=jnp.stack([jnp.int32(0), jnp.where(numbers[3] > 0, 1, -1)]),
            stop_node=numbers[3],
            status=jnp.int32(0),
        )

    law = law_of(verify, batch=8)
    assert law.is_proved, law
    assert law.expected_accepted == pytest.approx(0.75, abs=1e-6)


def test_a_law_with_any_fault_is_not_proved():
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


def search_in_full(played) -> audit.Cells:
    return audit.search(played.play, played.world, len(played.axes), played.causal_order)


def test_the_law_of_a_tree_costs_the_candidates_that_are_read_not_all_that_are_drawn():
    rule = js.RULES["without_replacement"]
    kill = next(i for i in audit.instances_for(rule) if i.name == "kill row, two siblings")
    deep = dataclasses.replace(kill, name="deep", branching=(2, 1), expected_accepted={})
    instances = audit.instances_for(rule)
    lazy = audit.exact_law(rule, deep, padded_to=instances)
    full = search_in_full(make_round(rule, deep, padded_to=instances))
    assert lazy.is_proved
    assert full.misses == 0
    verdict = full.outcomes.verdict
    law = {}
    for mass, tokens in zip(full.mass, verdict.tokens.tolist(), strict=True):
        law[tokens[0]] = law.get(tokens[0], 0.0) + mass
    first = lazy.text.sum(axis=tuple(range(1, lazy.text.ndim)))
    np.testing.assert_allclose([law[token] for token in range(4)], first[:4], rtol=0, atol=1e-7)
    accepted = float(np.sum(full.mass * verdict.num_accepted))
    assert lazy.expected_accepted == pytest.approx(accepted, abs=1e-7)
    assert lazy.cells.evaluations < full.evaluations / 4


def test_a_verifier_that_reports_a_wrong_stop_node_is_searched_in_full():
    def verify(draws, proposal, target_rows, bonus):
        verdict = PLAIN_RULES["token"](draws, proposal, target_rows, bonus)
        return dataclasses.replace(verdict, stop_node=jnp.int32(0))

    # Two second tokens, both rejected in the middle of their accept draws for the same residual.
    deep = audit.Instance(
        name="two alike in the middle",
        target={(): row(1, 0, 0), (0,): row(1, 2, 7)},
        draft={(): row(1, 0, 0), (0,): row(1, 1, 0)},
        branching=(1, 1),
    )
    played = make_round(js.RULES["token"], deep, verify=verify)
    lazy = dataclasses.replace(played.world, lazy=jnp.bool_(True))
    cells = audit.search(played.play, lazy, len(played.axes), played.lazy_order)
    assert cells.misses > 0
    failures = audit.exact_law(js.RULES["token"], deep, verify).failures
    assert [each.split(":")[0] for each in failures] == ["stop_node is not the last node of path"]


@pytest.mark.parametrize("name", ["token", "without_replacement"])
def test_rows_from_logits_are_audited_and_wrong_ones_are_not_proved(name: str):
    rule = js.RULES[name]
    kill = next(i for i in audit.instances_for(rule) if i.name.startswith("kill row"))

    def logits(rows: jax.Array) -> js.Logits:
        return js.Logits(values=jnp.log(rows), temperature=jnp.float32(1))

    def sharper(rows: jax.Array) -> js.Logits:
        return js.Logits(values=jnp.log(rows), temperature=jnp.float32(0.5))

    assert audit.exact_law(rule, kill, rows=logits).is_proved
    assert audit.exact_law(rule, kill, rows=sharper).tv > 0.01


def test_a_draft_length_is_for_candidates_that_are_drawn():
    rule = js.RULES["point_mass"]
    (tree,) = (i for i in audit.instances_for(rule) if i.name == "contract two-level tree")
    with pytest.raises(ValueError, match="'point_mass' is for point masses: nothing is drawn"):
        audit.exact_law(rule, tree, num_drafted=lambda tokens, rows: jnp.int32(1))


def test_progress_of_a_search_goes_from_nothing_to_all_and_is_called_within_a_long_axis():
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


INVALID = {
    "a batch of none": (lambda: audit.search(piece, None, 1, (0,), batch=0), "batch is 0"),
    "an axis out of range": (lambda: audit.search(piece, None, 0, (0,)), "one of the 0 axes"),
    "an axis twice": (lambda: audit.search(piece, None, 2, (0, 0)), r"causal_order\[1\] is 0"),
    "no outcome": (
        lambda: audit.search(lambda world, u: (), None, 1, (0,)),
        "play returns no array",
    ),
    "an instance without rows": (lambda: audit.Instance("a", target={}), "target has no row"),
    "an empty row": (lambda: audit.Instance("a", target={(): []}), "target has .* an empty one"),
    "no draft rows": (
        lambda: audit.Instance("a", target={(): [1]}, draft={}, branching=(1,)),
        "draft has no row",
    ),
    "a grid without axes": (lambda: audit.count_outcomes(piece, (), 2), "sizes is empty"),
    "a grid without cells": (lambda: audit.count_outcomes(piece, (4, 0), 2), r"sizes\[1\] is 0"),
    "a grid of no outcomes": (lambda: audit.count_outcomes(piece, (4,), 0), "num_outcomes is 0"),
    "chunks of none": (lambda: audit.count_outcomes(piece, (4,), 2, chunk=0), "chunk is 0"),
}


def test_an_invalid_argument_is_named():
    for call, message in INVALID.values():
        with pytest.raises(ValueError, match=message):
            call()


def test_an_outcome_without_draws_is_one_box_and_a_report_without_laws_proves_nothing():
    cells = audit.search(lambda world, u: jnp.int32(7), None, 0, ())
    assert (cells.outcomes.tolist(), cells.mass.tolist()) == ([7], [1.0])
    report = audit.AuditReport(grids=KNOWN_COUNTS, laws=(), device="none", versions={})
    assert not report.is_proved


def test_records_of_many_numbers_are_shown_in_a_few_lines():
    rule = js.RULES["token"]
    deep = next(i for i in audit.instances_for(rule) if i.name == "contexts of three tokens")
    law = audit.exact_law(rule, deep)
    report = audit.AuditReport(grids={}, laws=(law,) * 29, device="none", versions={})
    for record in (law, law.cells, deep, report):
        assert f"{type(record).__name__}(" in repr(record)
        assert len(repr(record)) < 600
    assert "case='contexts of three tokens', tv=" in repr(law)
    assert len(report.to_json()["laws"]) == 29


def test_a_custom_verifier_is_searched_in_the_order_of_its_own_tests() -> None:
    rule = js.RULES["with_replacement"]
    deep = next(i for i in audit.instances_for(rule) if i.name == "contexts of three tokens")
    law = audit.exact_law(
        rule, deep, js.verify_traversal, tests_deepest_first=True, reference=PLAIN["block"]
    )
    assert law.is_proved
    assert not audit.exact_law(rule, deep, js.verify_traversal).is_proved


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ({(): (0.5, 0.4)}, None, "is [0.5, 0.4]: not a distribution"),
        ({(): (1.5, -0.5)}, None, "is [1.5, -0.5]: not a distribution"),
        ({(): (0.5, 0.5)}, {(): (1, 0, 0)}, "draft row for context () has 3 entries: must be 2"),
        ({(): (0.5, 0.5), (0,): (1,)}, None, "target row for context (0,) has 1 entries"),
    ],
)
def test_an_instance_without_laws_is_rejected_with_its_row(target, draft, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        audit.Instance("malformed", target, draft, branching=(1,))


def test_a_rule_or_an_instance_given_by_its_name_is_an_error_that_says_what_to_give() -> None:
    instance = audit.instances_for(js.RULES["token"])[0]
    with pytest.raises(ValueError, match=r'RULES\["token"\]'):
        audit.exact_law("token", instance)
    with pytest.raises(ValueError, match="instances_for"):
        audit.exact_law(js.RULES["token"], "kill row")
