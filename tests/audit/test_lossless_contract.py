"""Invalid output, dependence on what is elsewhere, and waste are told apart from a wrong law."""

import functools

import numpy as np
import pytest
from helpers import foreign
from helpers.foreign import TREES, batch_of, variant

from jaxspec import audit

CONTRACT = {
    "no bonus": "bonus missing",
    "extra bonus": "too long",
    "in place": "arguments",
}


@pytest.mark.parametrize("fault", CONTRACT)
def test_a_right_law_with_invalid_output_does_not_pass(fault):
    report = audit.check_lossless(
        variant(foreign.token, fault), kind="path", randomness="numpy", budget=2_000
    )
    assert report.is_lossless
    assert not report.passes
    kinds = {kind for result in report.results for kind in result.problems} | {*report.contract}
    assert kinds == {CONTRACT[fault]}
    assert "OUTPUT INVALID" in str(report)


def emission(change):
    """Change what a right verifier emits."""

    def verify(draft_tokens, draft_rows, target_rows, source):
        return change(foreign.token(draft_tokens, draft_rows, target_rows, source), draft_tokens)

    return verify


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda emitted, _: [], "empty"),
        (lambda emitted, _: [*emitted[:-1], 99_999], "range"),
        (lambda emitted, _: [*emitted, -1, 0], "padding"),
        (lambda emitted, drafted: [(drafted[0] + 1) % 2, *emitted[1:]], "prefix"),
    ],
    ids=["empty", "range", "padding", "prefix"],
)
def test_emissions_that_no_verifier_may_emit_are_named(change, kind):
    report = audit.check_lossless(emission(change), kind="path", randomness="numpy", budget=2_000)
    assert not report.passes
    assert kind in {each for result in report.results for each in result.problems}


def test_a_bonus_token_that_is_not_wanted_is_invalid():
    wanted = audit.check_lossless(
        functools.partial(foreign.token, bonus=False),
        kind="path",
        randomness="uniforms",
        bonus=False,
        rule="token",
        budget=60_000,
    )
    assert wanted.passes, str(wanted)
    report = audit.check_lossless(
        foreign.token, kind="path", randomness="uniforms", bonus=False, budget=60_000
    )
    assert {"bonus"} == {kind for result in report.results for kind in result.problems}
    assert not report.passes


@pytest.mark.parametrize("how", ["point", "with", "without"])
def test_wrong_slots_are_invalid(how):
    kind = next(kind for kind, name in TREES.items() if name == how)
    report = audit.check_lossless(
        variant(foreign.tree, "slots", how=how), kind=kind, randomness="numpy", budget=2_000
    )
    assert report.is_lossless
    assert {"slots"} == {kind for result in report.results for kind in result.problems}


def test_the_second_of_two_twins_is_the_wrong_slot():
    def second(tokens, parents, draft_rows, target_rows, source):
        emitted, slots = foreign.tree(tokens, parents, draft_rows, target_rows, source, how="with")
        twins = [n for n in range(len(tokens)) if slots and parents[n] == 0]
        if slots and len(slots) == 1:
            slots = [max(n for n in twins if tokens[n] == tokens[slots[0]])]
        return emitted, slots

    report = audit.check_lossless(second, kind="with_replacement", randomness="numpy", budget=4_000)
    assert report.is_lossless
    assert "twin" in {kind for result in report.results for kind in result.problems}


def test_randomness_from_elsewhere_and_dependence_on_the_batch_are_found():
    hidden = np.random.default_rng(0)

    def from_elsewhere(*args):
        return foreign.token(*args[:3], hidden)

    report = audit.check_lossless(from_elsewhere, kind="path", randomness="numpy", budget=2_000)
    assert report.is_lossless
    assert list(report.contract) == ["seed"]

    def shared(tokens, draft_rows, target_rows, sources):
        return batch_of(foreign.token)(tokens, draft_rows, target_rows, [sources[0]] * len(tokens))

    report = audit.check_lossless(
        shared, kind="path", randomness="seed", batched=True, budget=2_000
    )
    assert "batch" in report.contract
    assert "depend on its batch" in str(report)


def test_a_lossless_but_wasteful_verifier_is_told_apart():
    for randomness, budget in (("uniforms", 60_000), ("numpy", 20_000)):
        report = audit.check_lossless(
            foreign.token, kind="path", randomness=randomness, rule="block", budget=budget
        )
        assert report.is_lossless
        assert report.is_as_rule is False
        assert not report.passes
        assert report.matches == ("token",)
        assert "wasteful; as token in every instance" in " ".join(str(report).split())
    point_mass = variant(foreign.token, "certain")
    report = audit.check_lossless(point_mass, kind="path", randomness="uniforms", budget=60_000)
    assert report.passes
    assert report.matches == ()
