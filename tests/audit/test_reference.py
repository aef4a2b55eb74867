"""The plain rules: their exact laws are the target's, and agree with what is known in fractions."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.choices import Uniforms, exact_outcomes
from jaxspec.audit.instances import Instance, RowsByContext
from jaxspec.audit.reference import PLAIN_RULES, Choices, PlainOutcome, plain_program
from jaxspec.audit.rounds import layout


def plain_round(name: str, instance: Instance) -> Callable[[Choices], PlainOutcome]:
    tree = layout(instance)
    contexts = [
        context
        for length in range(tree.max_depth + 1)
        for context in itertools.product(range(instance.vocab), repeat=length)
    ]

    def table(rows: RowsByContext) -> np.ndarray:
        other = instance.processed(rows[()])
        return np.array([instance.processed(rows[c]) if c in rows else other for c in contexts])

    target, draft = table(instance.target), table(instance.draft or instance.target)
    kind = js.RULES[name].proposal
    return plain_program(PLAIN_RULES[name], kind, tree, target, draft, bonus=instance.bonus)


@pytest.mark.parametrize("name", js.RULES)
def test_a_plain_rule_accepts_what_is_known_and_emits_the_targets_first_token(name: str):
    rule = js.RULES[name]
    for instance in audit.instances_for(rule):
        law = exact_outcomes(plain_round(name, instance))
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        first = np.zeros(instance.vocab)
        for outcome, mass in law.items():
            first[outcome.tokens[0]] += mass
        np.testing.assert_allclose(first, instance.processed(instance.target[()]), atol=1e-12)
        if name in instance.expected_accepted:
            accepted = sum(mass * outcome.num_accepted for outcome, mass in law.items())
            known = float(instance.expected_accepted[name])
            assert accepted == pytest.approx(known, abs=1e-12)


def test_a_slot_that_is_asked_twice_is_one_draw():
    law = exact_outcomes(lambda choices: (choices.flip("u", 0.25), choices.flip("u", 0.5)))
    assert law == {(True, True): 0.25, (False, True): 0.25, (False, False): 0.5}


def test_uniforms_pick_a_tile_first_and_then_a_token_inside_it():
    draws = {"final tile": 0.75, "final": 0.5}
    row = np.zeros(600)
    row[[3, 520, 590]] = 0.5, 0.25, 0.25
    assert Uniforms(draws.__getitem__).pick("final", row) == 590
    assert Uniforms({"final tile": 0.25, "final": 0.5}.__getitem__).pick("final", row) == 3
