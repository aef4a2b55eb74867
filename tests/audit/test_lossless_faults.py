"""Wrong foreign verifiers fail, with the fault named."""

import re

import numpy as np
import pytest
from helpers import foreign
from helpers.foreign import TREES, variant

from jaxspec import audit
from jaxspec.audit import settings

SMALL = 14_000
"""Calls in which every strong fault is seen."""


DIAGNOSES = {
    "residual p": "residual: replacement drawn from p instead of the residual",
    "residual p without x": "residual: replacement drawn from p without the rejected token",
    "residual |p - q|": "residual: replacement drawn from |p - q| instead of relu(p - q)",
    "residual argmax": "residual: replacement is the most likely token of the residual",
    "row before": "row: target row of the position before, but for the bonus",
    "row after": "row: target row of the position after",
    "hotter q": "draft law mismatch: q at another temperature, q ** 0.5",
    "lenience": "lenience: accepts with min(1, p / (0.8 q))",
    "always": "accept test: every candidate is accepted",
    "never": "accept test: no candidate is accepted, yet the residual is drawn from",
    "greedy": "greedy mixing: accepts the target's most likely token only, and replaces by it",
    "one coin": "reused noise: one uniform tests every candidate",
    "reused": "reused noise: the uniform of the rejected candidate draws the replacement too",
    "bonus q": "bonus row: drawn from the last draft row",
    "bonus row before": "bonus row: the row before the last candidate instead of after it",
}
BLOCK_DIAGNOSES = {
    "uncapped": "block weights: not capped at 1",
    "own weight": "block weights: a prefix is kept with its own weight instead of Z / D",
    "first failure": "block order: stops at the first failure",
    "token residual": "block residual: relu(p - q), without the weight of the prefix",
}
TREE_DIAGNOSES = {
    ("with", "sorted"): "sibling order: sorted by q",
    ("with", "skip duplicates"): "siblings: duplicates are skipped",
    ("without", "reversed"): "sibling order: tested in the reverse order",
    ("without", "with"): "siblings: drawn without replacement, verified as if with it",
    ("without", "zeroed"): "residual: rejected token removed from what is left instead of "
    "subtracting the draft row",
    ("point", "unnormalised"): "residual: not renormalised between siblings",
    ("point", "kept"): "residual: replacement drawn from p instead of the residual",
}


@pytest.mark.parametrize("fault", DIAGNOSES)
@pytest.mark.parametrize("randomness", ["uniforms", "numpy"])
def test_a_fault_of_token_verification_is_named(fault, randomness):
    report = audit.check_lossless(
        variant(foreign.token, fault), kind="path", randomness=randomness, budget=300_000
    )
    assert not report.is_lossless
    assert report.suspects[0] == DIAGNOSES[fault]
    assert len(report.suspects) == 1
    assert f"Looks like {DIAGNOSES[fault][:40]}" in str(report)


@pytest.mark.parametrize("fault", BLOCK_DIAGNOSES)
def test_a_fault_of_block_verification_is_named(fault):
    report = audit.check_lossless(variant(foreign.block, fault), kind="path", randomness="uniforms")
    assert not report.is_lossless
    assert report.suspects == (BLOCK_DIAGNOSES[fault],)


@pytest.mark.parametrize(("how", "fault"), TREE_DIAGNOSES)
def test_a_fault_of_a_tree_is_named(how, fault):
    kind = next(kind for kind, name in TREES.items() if name == how)
    report = audit.check_lossless(
        variant(foreign.tree, fault, how=how), kind=kind, randomness="numpy", budget=300_000
    )
    assert not report.is_lossless
    assert TREE_DIAGNOSES[how, fault] in report.suspects


def test_a_weak_fault_is_seen_and_an_unknown_one_is_placed():
    weak = audit.check_lossless(variant(foreign.token, "floor"), kind="path", randomness="uniforms")
    assert weak.suspects == ("epsilon: q floored at 0.1 in the accept test",)
    third = audit.check_lossless(
        variant(foreign.token, "target cut again"), kind="path", randomness="uniforms"
    )
    assert not third.is_lossless
    assert third.suspects == ()
    shift = third.results[0].shift
    assert (shift.position, shift.token) == (0, 3)
    assert shift.expected == pytest.approx(0.45, abs=1e-6)
    assert shift.observed == pytest.approx(0.45 / 0.95, abs=1e-6)
    assert "No known fault fits" in str(third)
    deep = audit.check_lossless(
        variant(foreign.token, "third by second"), kind="path", randomness="uniforms"
    )
    (wrong,) = [result for result in deep.results if not result.is_right]
    assert (wrong.name, wrong.shift.position) == ("a path of three", 2)


def test_accepting_at_a_draw_of_exactly_0_is_seen_in_the_exact_law():
    report = audit.check_lossless(variant(foreign.token, "<="), kind="path", randomness="uniforms")
    assert not report.is_lossless
    assert max(result.bias for result in report.results) < 1e-6
    assert report.suspects[0].startswith("accept test: <= instead of <")
    assert re.search(r"has target probability 0: .* with probability \d", " ".join(report.failures))


def test_an_interval_of_draws_with_another_outcome_is_seen():
    def island(draft_tokens, draft_rows, target_rows, uniforms):
        if 0.611 < uniforms[0] < 0.612:
            uniforms = np.append(0.0, uniforms[1:])
        return foreign.token(draft_tokens, draft_rows, target_rows, uniforms)

    cases = settings.instances_of_kind("path")[:1]
    report = audit.check_lossless(
        island, kind="path", randomness="uniforms", instances=cases, budget=50_000
    )
    (result,) = report.results
    assert result.is_exact
    assert not report.is_lossless
    assert 1e-4 < result.bias <= 0.6 * 1.001e-3  # where token 0 is drawn; less if a piece is missed


def test_draws_that_have_no_boxes_are_sampled_and_the_report_says_so():
    def races(draft_tokens, draft_rows, target_rows, uniforms):
        # An exponential race: lossless, and its edges lie across the axes.
        clocks = -np.log(1 - uniforms[: target_rows.shape[1]].astype(np.float64))
        row = target_rows[0]
        return [int(np.argmin(np.where(row > 0, clocks / np.where(row > 0, row, 1), np.inf)))]

    cases = [settings.instances_of_kind("path")[0]]
    report = audit.check_lossless(
        races, kind="path", randomness="uniforms", num_uniforms=4, instances=cases, budget=20_000
    )
    assert report.is_lossless
    assert not report.results[0].is_exact
    assert "no exact law" in report.notes[0]


def rare():
    return [settings.instances_of_kind("path")[3]]


def test_a_mixture_of_one_percent_is_seen_within_the_share_of_one_instance():
    def mixed(draft_tokens, draft_rows, target_rows, generator):
        fault = "always" if generator.random() < 0.01 else ""
        return foreign.token(draft_tokens, draft_rows, target_rows, generator, fault=fault)

    report = audit.check_lossless(
        mixed, kind="path", randomness="numpy", instances=rare(), budget=42_000
    )
    assert not report.is_lossless
    assert re.match(
        r"accept test: every candidate is accepted, in about (0\.[789]|1\.[0123])% of the calls",
        report.suspects[0],
    )


def test_one_token_of_a_hundred_from_the_draft_is_seen():
    def mixed(draft_tokens, draft_rows, target_rows, generator):
        if generator.random() < 0.01:
            return [foreign.pick(generator.random(), draft_rows[0])]
        return foreign.token(draft_tokens, draft_rows, target_rows, generator)

    report = audit.check_lossless(
        mixed, kind="path", randomness="numpy", instances=rare(), budget=42_000
    )
    assert not report.is_lossless
    (result,) = report.results
    low, high = result.interval
    assert low < 0.01 * 0.88 < high
    assert (result.shift.position, result.shift.token) == (0, 0)
