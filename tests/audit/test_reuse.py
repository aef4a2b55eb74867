"""Draws that are read in several rounds are seen through the loop as it is."""

import jax
import jax.numpy as jnp
import pytest

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.reuse import reused_draws
from jaxspec.decode import Decoder
from jaxspec.draft import SampledPath
from jaxspec.models import Provider

ROWS = {"target": [0.25, 0.75], "draft": [0.75, 0.25]}


def coin(name: str) -> Provider:
    return Provider(name, vocab=2, ask=lambda context: ROWS[name])


def keyed_by_position(key: jax.Array, num_nodes: int, position: jax.Array) -> js.RoundDraws:
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    each = jax.vmap(lambda n: js.round_draws(key, 1, position + n))(nodes)
    # The final draw belongs to the round.
    final = js.round_draws(jax.random.fold_in(key, 1), 1, position).verify.final
    verify = js.Draws(accept=each.verify.accept[:, 0], final=final)
    return js.RoundDraws(draft=each.draft[:, 0], verify=verify)


def the_same_in_every_round(key: jax.Array, num_nodes: int, position: jax.Array) -> js.RoundDraws:
    return js.round_draws(key, num_nodes, 0 * position)


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
    ],
)
def test_draws_that_an_earlier_round_has_looked_at_may_not_be_read_again(
    rule: str, draws, is_reused: bool
) -> None:
    found = reused_draws(decoder(rule, draws), (0,), num_keys=12, new_tokens=8)
    assert bool(found) == is_reused, found


def test_a_law_with_reused_draws_is_not_proved_though_the_law_with_fresh_ones_is() -> None:
    law = audit.decoding_law(decoder("block", keyed_by_position), (0,), new_tokens=3)
    assert law.tv <= 1e-6
    assert not law.is_proved
    assert "is reused between rounds" in law.failures[0]
