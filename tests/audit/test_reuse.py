"""Draws that are read in several rounds are seen through the loop as it is."""

import pytest
from helpers.reused import (
    keyed_by_position,
    the_same_in_every_round,
    with_the_final_draw_of_the_draft,
)

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.reuse import reused_draws
from jaxspec.decode import Decoder
from jaxspec.draft import SampledPath
from jaxspec.models import Provider

ROWS = {"target": [0.25, 0.75], "draft": [0.75, 0.25]}


def coin(name: str) -> Provider:
    return Provider(name, vocab=2, ask=lambda context: ROWS[name])


def decoder(rule: str, draws=js.round_draws) -> Decoder:
    path = SampledPath(coin("draft"), 2, js.RULES[rule])
    return Decoder(coin("target"), path, bonus=False, draws=draws)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_decoder_with_the_draws_of_round_draws_is_proved(rule: str) -> None:
    law = audit.decoding_law(decoder(rule), (0,), new_tokens=3)
    assert law.is_proved, law.failures


@pytest.mark.parametrize(
    ("rule", "draws", "is_reused"),
    [
        ("block", keyed_by_position, True),
        # No test looks at a draw beyond the first rejection: the next round is the first to.
        ("token", keyed_by_position, False),
        ("token", the_same_in_every_round, True),
        ("block", the_same_in_every_round, True),
        ("token", with_the_final_draw_of_the_draft, True),
    ],
)
def test_draws_that_have_been_looked_at_may_not_be_read_again(
    rule: str, draws, is_reused: bool
) -> None:
    found = reused_draws(decoder(rule, draws), (0,), num_keys=12, new_tokens=8)
    assert bool(found) == is_reused, found


def test_a_law_with_reused_draws_is_not_proved_though_the_law_with_fresh_ones_is() -> None:
    law = audit.decoding_law(decoder("block", keyed_by_position), (0,), new_tokens=3)
    assert law.tv <= 1e-6
    assert not law.is_proved
    assert "noise is reused with" in law.failures[0]
