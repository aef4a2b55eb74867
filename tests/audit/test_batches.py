"""Batches over a real vocabulary: what laws of a few tokens cannot see, and what must be flagged."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

import jaxspec as js
from jaxspec.audit.batches import batch_faults
from jaxspec.audit.reference import PLAIN_RULES

Broken = Callable[..., js.Verdict]


def audited(rule: js.Rule, verify: Broken) -> str:
    broken = dataclasses.replace(rule, verify=verify)
    return " | ".join(batch_faults(broken, PLAIN_RULES[rule.name]))


def test_what_shows_only_over_many_tiles_or_on_bad_input_is_rejected() -> None:
    rule = js.RULES["token"]

    def one_number(draws, proposal, target, bonus):
        final = draws.final.at[0].set(0.25)
        return rule.verify(dataclasses.replace(draws, final=final), proposal, target, bonus)

    def no_status(*arguments):
        return dataclasses.replace(rule.verify(*arguments), status=jnp.int32(0))

    def laundered(draws, proposal, target, bonus):
        if isinstance(target, js.Probabilities):
            target = dataclasses.replace(target, values=jnp.nan_to_num(target.values))
        return rule.verify(draws, proposal, target, bonus)

    assert audited(rule, rule.verify) == ""
    assert "sound round" in audited(rule, one_number)
    found = audited(rule, no_status)
    assert "a candidate outside the vocabulary" in found
    assert "status is 0, must be 4" in found
    assert "a NaN at a candidate" in audited(rule, laundered)
