"""A custom rule that indexes rows: one function for the audit, the host loop and the compiled loop."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from helpers.small import DRAFT, LENGTH, PROMPTS, TARGET, host_drafters, keys, provider

import jaxspec as js
from jaxspec import audit
from jaxspec.decode import CompiledDecoder, Decoder
from jaxspec.draft import model_path


@jax.jit
def plain_token_rule(
    draws: js.Draws, proposal: Any, target_rows: js.Rows, bonus: jax.Array | bool = False
) -> js.Verdict:
    """Algorithm 1 of Leviathan et al. 2023 as a textbook has it: all rows are read, all tests made."""
    tree = proposal.tree
    nodes = tree.max_nodes
    p = js.dense_rows(target_rows, nodes)
    q = js.dense_rows(proposal.draft_rows, nodes - 1)
    drafted, places = tree.tokens[1:], jnp.arange(nodes - 1, dtype=jnp.int32)
    ratio = p[places, drafted] > draws.accept[1:] * q[places, drafted]
    is_accepted = ratio & (tree.parents[1:] >= 0)
    accepted = jnp.sum(jnp.cumprod(is_accepted.astype(jnp.int32)), dtype=jnp.int32)
    is_leaf = accepted + 1 == tree.num_nodes
    rest = p[accepted] - jnp.where(is_leaf, 0.0, q[jnp.minimum(accepted, nodes - 2)])
    token = js.draw_token(draws.final, jnp.maximum(rest, 0.0))
    token = jnp.where(is_leaf & ~jnp.asarray(bonus) & (accepted > 0), -1, token)
    slots = jnp.arange(nodes, dtype=jnp.int32)
    kept = jnp.where(slots < accepted, jnp.roll(tree.tokens, -1), -1)
    return js.Verdict(
        tokens=kept.at[accepted].set(token),
        num_tokens=accepted + jnp.where(token >= 0, 1, 0).astype(jnp.int32),
        num_accepted=accepted,
        path=jnp.where(slots <= accepted, slots, -1),
        stop_node=accepted,
        status=jnp.int32(0),
    )


RULE = dataclasses.replace(js.RULES["token"], name="textbook", verify=plain_token_rule)


def test_the_audit_proves_it() -> None:
    rule = js.RULES["token"]
    for case in audit.instances_for(rule):
        law = audit.exact_law(rule, case, played=audit.make_round(rule, case, verify=RULE.verify))
        assert law.is_proved, case.name


def test_both_loops_decode_the_text_of_the_rule_that_it_states() -> None:
    options: dict[str, Any] = {"new_tokens": 12, "temperature": 1.0}
    texts = []
    for rule in (js.RULES["token"], RULE):
        loop = CompiledDecoder(TARGET, model_path(DRAFT, 3, rule), max_context=LENGTH)
        texts.append([text.tokens for text in loop.run(PROMPTS[:1], keys(1), **options)])
    assert texts[0] == texts[1]
    hosts = []
    for rule in (js.RULES["token"], RULE):
        drafter = dataclasses.replace(host_drafters(1.0)["path by token"], rule=rule)
        decoder = Decoder(provider(0.0, 1.0), drafter, 12)
        hosts.append(decoder.run(PROMPTS[0], jax.random.key(0)).tokens)
    assert hosts[0] == hosts[1]
