"""Faults that an audit of the text's law in shallow instances does not see.

Fields beside the tokens, rules that waste, faults below the second token or behind the second sibling,
rare tokens, intervals of draws: each is rejected in some instance of its rule, with words for it.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from helpers.plain_rules import Block, Walk, certain, normalise, not_drawn_yet, relu

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.instances import SINGLE_PATH

Verify = Callable[..., js.Verdict]
TOKEN, BLOCK, TREE = js.RULES["token"], js.RULES["block"], js.RULES["with_replacement"]
WITHOUT, POINT_MASS = js.RULES["without_replacement"], js.RULES["point_mass"]


def found(rule: js.Rule, verify: Verify, *names: str, points: int = 2**12) -> tuple[str, ...]:
    """Return the first failures of a verifier in the named instances of a rule."""
    by_name = {each.name: each for each in audit.instances_for(rule)}
    instances = [by_name[name] for name in names]
    for instance in instances:
        law = audit.exact_law(rule, instance, verify, padded_to=instances, points=points)
        if law.failures:
            return law.failures
    return ()


def changed(rule: js.Rule, change: Callable[[js.Verdict], dict]) -> Verify:
    def verify(*arguments) -> js.Verdict:
        verdict = rule.verify(*arguments)
        return replace(verdict, **change(verdict))

    return verify


def slots(verdict: js.Verdict) -> jax.Array:
    return jnp.arange(verdict.path.shape[0], dtype=jnp.int32)


def other_twin(draws, proposal, target_rows, bonus) -> js.Verdict:
    """Report the slot of the last sibling of the accepted token, not of the one accepted."""
    verdict = js.verify_tree(draws, proposal, target_rows, bonus)
    children = proposal.tree.children[0]
    is_same = (children >= 0) & (proposal.tree.tokens[children] == verdict.tokens[0])
    last = jnp.max(jnp.where(is_same, children, -1))
    is_deep = (verdict.num_accepted == 1) & (last >= 0)
    return replace(
        verdict,
        path=jnp.where(is_deep, verdict.path.at[1].set(last), verdict.path),
        stop_node=jnp.where(is_deep, last, verdict.stop_node),
    )


def with_bonus(always: bool) -> Verify:
    def verify(draws, proposal, target_rows, bonus) -> js.Verdict:
        return TOKEN.verify(draws, proposal, target_rows, jnp.bool_(always))

    return verify


def leftovers(draws, proposal, target_rows, bonus) -> js.Verdict:
    verdict = TOKEN.verify(draws, proposal, target_rows, bonus)
    drafted = jnp.append(proposal.tree.tokens[1:], -1)
    is_after = slots(verdict) >= verdict.num_tokens
    return replace(verdict, tokens=jnp.where(is_after, drafted, verdict.tokens))


FIELDS = {
    "path all -1": (changed(TOKEN, lambda v: {"path": jnp.full_like(v.path, -1)}), "path does not"),
    "path 0 .. n": (changed(TOKEN, lambda v: {"path": slots(v)}), "path has nodes after"),
    "stop_node 0": (changed(TOKEN, lambda v: {"stop_node": jnp.int32(0)}), "stop_node is not"),
    "rejected drafts left after num_tokens": (leftovers, "tokens are left after num_tokens"),
    "bonus always": (with_bonus(True), "a bonus token is emitted without being asked for"),
    "bonus never": (with_bonus(False), "a token is missing after the accepted ones"),
    "num_accepted counts the replacement": (
        changed(TOKEN, lambda v: {"num_accepted": v.num_tokens}),
        "tokens a round, the rule",
    ),
    "the replacement in the place of the last accepted": (
        changed(TOKEN, lambda v: {"num_tokens": jnp.maximum(v.num_tokens - 1, 1)}),
        "a token is missing",
    ),
}


@pytest.mark.parametrize("fault", FIELDS)
def test_a_wrong_field_beside_the_tokens_is_rejected(fault: str) -> None:
    verify, words = FIELDS[fault]
    failures = found(TOKEN, verify, "contract single path", "toy of two")
    assert any(words in failure for failure in failures), failures


def test_the_slot_of_the_other_twin_is_rejected() -> None:
    failures = found(TREE, other_twin, "kill row, two siblings")
    assert any("rule's law of verdicts" in failure for failure in failures), failures


def test_a_lossless_rule_that_accepts_less_is_rejected_in_the_place_of_a_better_one() -> None:
    traversal = js.RULES["traversal"]
    instance = next(each for each in audit.instances_for(traversal) if each.name == "toy of two")
    law = audit.exact_law(traversal, instance, js.verify_tree, tests_deepest_first=False)
    assert law.tv <= 1e-6
    assert "accepts 1.111111 tokens a round, the rule 1.222222" in law.failures


def third_by_the_seconds_row(draws, proposal, target_rows, bonus) -> js.Verdict:
    rows = target_rows.at[2].set(target_rows[1]) if target_rows.shape[0] > 2 else target_rows
    return TOKEN.verify(draws, proposal, rows, bonus)


def floored(row: jax.Array) -> jax.Array:
    return jnp.maximum(row, 1e-4)


def is_rank(now, rank: int) -> jax.Array:
    return jnp.sum(now.gone) == rank


def remove_x(now) -> jax.Array:
    return normalise(jnp.where(now.is_x, 0.0, now.r))


def top_p_in_the_residual_only(draws, proposal, target_rows, bonus) -> js.Verdict:
    num = proposal.tree.max_nodes
    whole = replace(target_rows, top_p=jnp.float32(1))
    p, kept = js.dense_rows(whole, num), js.dense_rows(target_rows, num)
    plain = replace(proposal, draft_rows=js.dense_rows(proposal.draft_rows, num))
    # Accepted by the row that top-p did not cut; what is drawn afterwards is.
    walk = Walk(
        reject=lambda now: normalise(relu(kept[_row_of(p, now.p)] - now.s)),
        bonus_row=lambda row, _: kept[_row_of(p, row)],
    )
    return walk(draws, plain, p, bonus)


def _row_of(rows: jax.Array, row: jax.Array) -> jax.Array:
    return jnp.argmax(jnp.all(rows == row[None], axis=1))


DEEP = {
    "third token by the second's row": (TOKEN, third_by_the_seconds_row, "three tokens deep", 0.02),
    "block weight not capped from the third token": (
        BLOCK,
        Block(capped_to=2),
        "four tokens deep",
        1e-3,
    ),
    "residual not renormalised after the second of three siblings": (
        WITHOUT,
        Walk(
            share=not_drawn_yet,
            reject=lambda now: jnp.where(
                is_rank(now, 1), relu(now.r - now.s), normalise(relu(now.r - now.s))
            ),
        ),
        "three siblings",
        1e-2,
    ),
    "third rejected point mass put back": (
        POINT_MASS,
        Walk(
            share=certain,
            reject=lambda now: jnp.where(is_rank(now, 2), now.r, remove_x(now)),
        ),
        "four candidates",
        1e-2,
    ),
    "draft row floored at 1e-4": (
        TOKEN,
        Walk(
            accepts=lambda now: now.u * floored(now.s)[now.x] < now.r[now.x],
            reject=lambda now: normalise(relu(now.r - floored(now.s))),
        ),
        "draft zeros, rare target token",
        3e-5,
    ),
    "top-p of the target in the residual only": (
        TOKEN,
        top_p_in_the_residual_only,
        "temperature, top_k and top_p",
        1e-3,
    ),
}


@pytest.mark.parametrize("fault", DEEP)
def test_a_fault_that_shows_only_deep_or_on_rare_tokens_is_rejected(fault: str) -> None:
    rule, verify, name, least = DEEP[fault]
    instance = next(each for each in audit.instances_for(rule) if each.name == name)
    law = audit.exact_law(rule, instance, verify, batch=128)
    assert law.tv > least, law.tv
    assert law.cells.misses == 0
    assert any("emitted token" in failure for failure in law.failures), law.failures


@pytest.mark.parametrize(("start", "width"), [(0.30017, 1e-3), (0.7001, 1e-4), (0.12041, 1e-4)])
def test_an_interval_of_draws_in_which_everything_is_accepted_is_seen(
    start: float, width: float
) -> None:
    def accepts(now) -> jax.Array:
        is_inside = (now.u >= start) & (now.u < start + width)
        return (now.u * now.s[now.x] < now.r[now.x]) | is_inside

    # Token 0 is accepted below 1/9.
    path = replace(SINGLE_PATH, target={(): (0.1, 0.9)}, draft={(): (0.9, 0.1)})
    law = audit.exact_law(TOKEN, path, Walk(accepts=accepts), points=2**18, batch=1024)
    assert law.tv <= 1e-6  # the search does not see it
    assert any("an interval of draws" in each for each in law.failures), law.failures
    assert law.cells.uncertified == pytest.approx(13.8 / 2**18, rel=1e-2)
