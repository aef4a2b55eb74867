"""Inputs that broke other implementations, with the right answers (`cases/cases.json`).

Laws are exact: found by search over the draws through the public jitted verifiers. Where a case lists
the law of the faulty implementation too, the audit is shown to see that fault.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js
from jaxspec import audit

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases/cases.json").read_text())}
TOLERANCE = 1e-6
BATCH = 64

Verify = Callable[..., js.Verdict]
each_path_rule = pytest.mark.parametrize(
    "verify", (js.verify_path, js.verify_block), ids=("token", "block")
)


def case(name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return CASES[name]["inputs"], CASES[name]["expected"]


def numbers(values: Any) -> Any:
    """Read a number, or a list of them, that may be written as a fraction."""
    return [numbers(x) for x in values] if isinstance(values, list) else float(Fraction(values))


def close(values: Any) -> Any:
    return pytest.approx(numbers(values), abs=TOLERANCE)


def row(values: Sequence[Any], vocab: int) -> jax.Array:
    """Lay out one row, tokens beyond its own vocabulary with probability 0."""
    padding = (0, vocab - len(values))
    return jnp.asarray(np.pad(np.array(numbers(list(values)), np.float32), padding))


def law_by(
    cells: audit.Cells, keys: np.ndarray, num: int, given: np.ndarray | None = None
) -> list[float]:
    """Return the law of a number 0 ... num - 1 that each cell has, among the given cells."""
    assert cells.misses == 0
    mass = np.where(True if given is None else given, cells.mass, 0.0)
    return (np.bincount(keys, weights=mass, minlength=num) / mass.sum()).tolist()


def prepend(first: jax.Array | float, rest: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.full(1, first, jnp.float32), rest])


# A given candidate and a given accept draw: the law of what comes out.


@functools.cache
def play_given_coin(verify: Verify) -> Callable[[Any, jax.Array], js.Verdict]:
    def play(world: Any, u: jax.Array) -> js.Verdict:
        proposal, target_rows, coin, bonus = world
        draws = js.Draws(accept=prepend(0, coin), final=prepend(0, u))
        return verify(draws, proposal, target_rows, bonus)

    return play


def search_given_coin(
    verify: Verify, path: js.Proposal, rows: list[jax.Array], coin: float, *, bonus: bool = False
) -> audit.Cells:
    world = (path, jnp.stack(rows), jnp.full(1, coin, jnp.float32), jnp.asarray(bonus))
    return audit.search(play_given_coin(verify), world, 1, (0,), batch=BATCH)


def emitted_law(cells: audit.Cells, vocab: int) -> list[float]:
    """Return the law of the token of rounds that emit one, none of them drafted."""
    verdict = cells.outcomes
    assert set(verdict.num_tokens.tolist()) == {1}
    assert set(verdict.num_accepted.tolist()) == {0}
    return law_by(cells, verdict.tokens[:, 0], vocab)


@each_path_rule
@pytest.mark.parametrize("index", range(3))
def test_a_coin_of_zero_or_on_the_boundary_never_accepts(index: int, verify: Verify) -> None:
    inputs, expected = (part["cases"][index] for part in case("case01_zero_coin_zero_target"))
    assert not expected["accept"]
    p, q = row(inputs["p"], 4), row(inputs["q"], 4)
    path = js.sampled_path(jnp.array([inputs["draft"]]), q[None])
    cells = search_given_coin(verify, path, [p, p], inputs["coin"])
    law = emitted_law(cells, 4)
    assert law == close(expected["residual"])
    assert law[expected["emitted"]] == 1
    assert set(cells.outcomes.status.tolist()) == {0}


@each_path_rule
def test_a_candidate_outside_the_draft_support_is_flagged_and_replaced_by_a_draw_from_the_row(
    verify: Verify,
) -> None:
    inputs, expected = (part["cases"][0] for part in case("case02_empty_residual_outside_support"))
    assert not expected["accept"]
    p, q = row(inputs["p"], 3), row(inputs["q"], 3)
    path = js.sampled_path(jnp.array([inputs["draft"]]), q[None])
    cells = search_given_coin(verify, path, [p, p], inputs["coin"])
    assert emitted_law(cells, 3) == close(expected["emitted_law"])
    assert set(cells.outcomes.status.tolist()) == {int(js.Status.OUTSIDE_SUPPORT)}


@each_path_rule
def test_an_accept_draw_of_exactly_one_is_flagged_and_decides_nothing(verify: Verify) -> None:
    inputs, _ = (part["cases"][0] for part in case("case02_empty_residual_outside_support"))
    p, q = row(inputs["p"], 3), row(inputs["q"], 3)
    path = js.sampled_path(jnp.array([0]), q[None])
    verdict = search_given_coin(verify, path, [p, p], 1.0).outcomes
    assert set(verdict.num_tokens.tolist()) == {0}
    assert set(verdict.status.tolist()) == {int(js.Status.BAD_DRAW)}


@each_path_rule
@pytest.mark.parametrize("index", range(4))
def test_placeholders_illegal_ids_and_length_zero_give_a_fresh_draw_from_the_row(
    index: int, verify: Verify
) -> None:
    inputs, expected = case("case03_placeholder_and_out_of_range_ids")
    token, length = inputs["rows"][index]["draft"], inputs["rows"][index]["length"]
    p, after = row(inputs["p"], 3), row(inputs["bonus_p"], 3)
    is_legal = 0 <= token < inputs["vocab"]
    q = jax.nn.one_hot(token, 3) if is_legal else p
    path = js.sampled_path(jnp.array([token]), q[None], length)
    assert (expected["accepted"][index], expected["num_emitted"][index]) == (0, 1)
    for bonus in (False, True):
        cells = search_given_coin(verify, path, [p, after], inputs["coin"], bonus=bonus)
        assert emitted_law(cells, 3) == close(expected["emitted_law"][index])
        flag = js.Status.BAD_CANDIDATE if length and not is_legal else 0
        assert set(cells.outcomes.status.tolist()) == {int(flag)}


# A drawn candidate whose recorded row is the law it was drawn from, or is not.


@functools.cache
def law_of_draft(
    p: tuple[Any, ...], sampled: tuple[Any, ...], recorded: tuple[Any, ...]
) -> audit.Law:
    """Compute the exact law of token verification of one token that is drawn from `sampled`."""

    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        del draft_row
        return js.draw_token(pairs[0], row(sampled, 4))[None]

    target, draft = ({(): [*values, *[0] * (4 - len(values))]} for values in (p, recorded))
    instance = audit.Instance("one drafted token", target, draft, branching=(1,))
    return audit.exact_law(js.RULES["token"], instance, draw=draw, batch=BATCH)


def first_token_law(law: audit.Law, vocab: int) -> list[float]:
    return law_by(law.cells, law.cells.outcomes.verdict.tokens[:, 0], vocab)


def assert_lossless(law: audit.Law, expected: Mapping[str, Any]) -> None:
    """Assert the output law, the acceptance rate and the residual of a case."""
    verdict = law.cells.outcomes.verdict
    assert law.is_proved
    assert first_token_law(law, 4) == close(expected["output_law"])
    assert law.expected_accepted == close(expected["accept_rate"])
    replaced = law_by(law.cells, verdict.tokens[:, 0], 4, given=verdict.num_accepted == 0)
    assert replaced == close(expected["residual"])


def assert_seen(law: audit.Law, faulty_law: Any, faulty_tv: Any) -> None:
    """Assert that a fault has the law that is listed, and that the audit rejects it."""
    assert first_token_law(law, len(faulty_law))[: len(faulty_law)] == close(faulty_law)
    assert law.tv == close(faulty_tv)
    assert not law.is_proved


def test_a_filtered_draft_is_lossless_if_the_filtered_row_is_recorded() -> None:
    inputs, expected = case("case05_filtered_draft_raw_q")
    q = tuple(expected["q"])
    law = law_of_draft(tuple(inputs["p"]), sampled=q, recorded=q)
    assert_lossless(law, expected)
    outcome = law.cells.outcomes
    for token, wanted in enumerate(expected["accept_prob_by_token"]):
        is_drafted = outcome.drafted[:, 1] == token
        assert is_drafted.any() == (wanted is not None)
        if wanted is not None:
            found = law_by(law.cells, outcome.verdict.num_accepted, 2, given=is_drafted)
            assert found[1] == close(wanted)


def test_the_audit_sees_a_filtered_draft_recorded_with_its_raw_row() -> None:
    inputs, expected = case("case05_filtered_draft_raw_q")
    kept = sorted(inputs["q_raw"])[-inputs["draft_top_k"] :]
    filtered = tuple(q if q in kept else 0 for q in inputs["q_raw"])
    law = law_of_draft(tuple(inputs["p"]), sampled=filtered, recorded=tuple(inputs["q_raw"]))
    assert_seen(law, expected["faulty_output_law_with_q_raw"], expected["faulty_total_variation"])


def test_the_audit_sees_an_argmax_draft_recorded_with_its_softmax() -> None:
    inputs, expected = case("case06_argmax_draft_soft_q")
    law = law_of_draft(
        tuple(inputs["p"]), sampled=tuple(expected["q"]), recorded=tuple(inputs["q_soft"])
    )
    assert_seen(law, expected["faulty_output_law"], expected["faulty_total_variation"])


def test_a_draft_of_a_narrower_vocabulary_is_lossless_if_padded_with_probability_0() -> None:
    inputs, expected = case("case10_vocab_padding")
    q = tuple(expected["q"])
    assert list(q) == [*inputs["q_narrow"], 0]
    assert_lossless(law_of_draft(tuple(inputs["p"]), sampled=q, recorded=q), expected)


def test_the_audit_sees_a_narrow_draft_padded_with_logit_0() -> None:
    inputs, expected = case("case10_vocab_padding")
    faulty = expected["faulty_zero_logit_padding"]
    law = law_of_draft(
        tuple(inputs["p"]), sampled=tuple(expected["q"]), recorded=tuple(faulty["q_claimed"])
    )
    assert_seen(law, faulty["output_law"], faulty["total_variation"])


def test_a_draft_of_a_narrower_vocabulary_is_rejected_if_it_is_not_padded() -> None:
    inputs, _ = case("case10_vocab_padding")
    path = js.sampled_path(jnp.array([0]), row(inputs["q_narrow"], 3)[None])
    draws = js.Draws(accept=jnp.zeros(2), final=jnp.zeros(2))
    with pytest.raises(AssertionError):
        js.verify_path(draws, path, jnp.stack([row(inputs["p"], 4)] * 2))


def play_root(target: js.Logits, u: jax.Array) -> js.Verdict:
    no_candidates = js.PointMass(tree=js.make_tree([-1], [-1]))
    draws = js.Draws(accept=jnp.zeros(1), final=prepend(0, u))
    return js.verify_tree(draws, no_candidates, target)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_padding_columns_of_target_logits_are_never_emitted_if_minus_infinite(
    temperature: float,
) -> None:
    inputs, expected = case("case10_vocab_padding")
    padded = inputs["padded_target"]
    is_real = jnp.arange(4) < padded["real_vocab"]
    logits = jnp.where(is_real, jnp.array(padded["logits"], jnp.float32), -jnp.inf)
    target = js.Logits(values=logits[None], temperature=jnp.float32(temperature))
    cells = audit.search(play_root, target, 1, (0,), batch=BATCH)
    greedy = [1, 0, 0, 0]  # the lowest of the tied tokens
    law = emitted_law(cells, 4)
    assert law == close(expected["padded_target_p"] if temperature else greedy)
    assert law[3] == 0
    assert set(cells.outcomes.status.tolist()) == {0}


# Deterministic siblings.

SLOTS = 3


def play_siblings(tree_and_rows: Any, u: jax.Array) -> js.Verdict:
    tree, target_rows = tree_and_rows
    draws = js.Draws(accept=prepend(0, u[:SLOTS]), final=prepend(0, u[SLOTS:]))
    return js.verify_tree(draws, js.PointMass(tree=tree), target_rows)


def search_siblings(p: Sequence[Any], tokens: Sequence[int]) -> tuple[audit.Cells, np.ndarray]:
    """Return the cells of one level of siblings and the rank accepted in each, `SLOTS` for none."""
    sizes = {"max_nodes": SLOTS + 1, "max_children": SLOTS}
    parents = [-1] + [0] * len(tokens)
    tree = js.make_tree([-1, *tokens], parents, distinct_siblings=False, **sizes)
    world = (tree, jnp.tile(row(p, 4), (SLOTS + 1, 1)))
    order = tuple(range(SLOTS + 1))
    cells = audit.search(play_siblings, world, SLOTS + 1, order, batch=BATCH)
    node = cells.outcomes.path[:, 1]
    return cells, np.where(node > 0, node - 1, SLOTS)


def test_an_argmax_draft_is_accepted_with_the_target_probability_and_then_removed() -> None:
    inputs, expected = case("case06_argmax_draft_soft_q")
    candidate = int(np.argmax(inputs["q_soft"]))
    assert expected["q"] == np.eye(3)[candidate].tolist()
    cells, accepted = search_siblings(inputs["p"], [candidate])
    tokens = cells.outcomes.tokens[:, 0]
    assert law_by(cells, accepted, SLOTS + 1)[0] == close(expected["accept_prob"])
    assert law_by(cells, tokens, 3, given=accepted == SLOTS) == close(expected["residual"])
    assert law_by(cells, tokens, 3) == close(expected["output_law"])


@pytest.mark.parametrize("index", range(3))
def test_siblings_are_tested_in_order_against_what_is_left(index: int) -> None:
    inputs, expected = case("case07_tree_deterministic_siblings")
    cells, accepted = search_siblings(inputs["p"], inputs["sibling_lists"][index])
    tokens = cells.outcomes.tokens[:, 0]
    for rank, wanted in enumerate(expected["conditional_accept"][index]):
        tested = law_by(cells, accepted, SLOTS + 1, given=accepted >= rank)
        assert tested[rank] == close(wanted)
    none = law_by(cells, accepted, SLOTS + 1)[SLOTS]
    assert 1 - none == close(expected["total_accept"][index])
    leftover = law_by(cells, tokens, 4, given=accepted == SLOTS)
    assert leftover == close(expected["leftover"][index])
    assert law_by(cells, tokens, 4) == close(expected["output_law"][index])


@pytest.mark.parametrize("index", range(2))
def test_a_duplicate_is_never_accepted_even_by_a_coin_of_zero_and_changes_nothing(
    index: int,
) -> None:
    inputs, expected = case("case07_tree_deterministic_siblings")
    run, wanted = inputs["coin_runs"][index], expected["coin_runs"][index]
    cells, accepted = search_siblings(inputs["p"], run["siblings"])
    assert run["siblings"][1] == run["siblings"][0]
    assert (accepted != 1).all()
    coins = np.array(run["coins"]) * 2**24
    low, high = cells.low[:, :SLOTS], cells.high[:, :SLOTS]
    is_hit = np.all((low <= coins) & (coins < high), axis=1)
    rank = wanted["accepted_sibling_index"]
    assert set(accepted[is_hit].tolist()) == {SLOTS if rank is None else rank}
    law = np.eye(4)[wanted["token"]].tolist() if "token" in wanted else wanted["token_law"]
    assert law_by(cells, cells.outcomes.tokens[:, 0], 4, given=is_hit) == close(law)


def test_duplicate_siblings_are_rejected_when_the_tree_is_made() -> None:
    inputs, _ = case("case07_tree_deterministic_siblings")
    with pytest.raises(js.TreeError, match="nodes 1 and 2: siblings with one token, 0"):
        js.make_tree([-1, *inputs["sibling_lists"][1]], [-1, 0, 0, 0])


# Block verification.

BLOCK, TOKEN = js.RULES["block"], js.RULES["token"]
# The sizes and batch of the vectors of these rules, so that their compiled programs serve here.
VECTOR_BATCH = 256


def iid(p: Sequence[Any], q: Sequence[Any], length: int) -> audit.Instance:
    rows = [{(): [Fraction(x) for x in values]} for values in (p, q)]
    return audit.Instance("same rows everywhere", *rows, branching=(1,) * length)


THREE_DRAFTED = (iid([1, 0, 0], [1, 0, 0], 3),)


@functools.cache
def law_of_block(rule: js.Rule, verify: Verify | None = None) -> audit.Law:
    inputs, _ = case("case09_block_verification")
    instance = iid(inputs["p_each_position"], inputs["q_each_position"], inputs["K"])
    return audit.exact_law(rule, instance, verify, padded_to=THREE_DRAFTED, batch=VECTOR_BATCH)


def accepted_law(law: audit.Law, length: int, given: np.ndarray | None = None) -> list[float]:
    return law_by(law.cells, law.cells.outcomes.verdict.num_accepted, length + 1, given)


def test_block_verification_is_lossless_and_accepts_more_than_token_verification() -> None:
    _, expected = case("case09_block_verification")
    block, token = law_of_block(BLOCK), law_of_block(TOKEN)
    assert block.is_proved
    assert token.is_proved
    assert accepted_law(block, 2) == close(expected["prob_accepted_0_1_2"])
    assert block.expected_accepted == close(expected["mean_accepted"])
    assert token.expected_accepted == close(expected["token_rule_mean_accepted"])


@pytest.mark.parametrize("index", range(4))
def test_the_longest_prefix_that_passes_its_block_threshold_is_kept(index: int) -> None:
    _, expected = case("case09_block_verification")
    law = law_of_block(BLOCK)
    drafted = law.cells.outcomes.drafted[:, 1:3]
    draft = np.array(expected["drafts"][index])
    h1, h2 = (Fraction(expected[h][index]) for h in ("h1", "h2"))
    found = accepted_law(law, 2, given=np.all(drafted == draft, axis=1))
    assert found == close([(1 - h2) * (1 - h1), (1 - h2) * h1, h2])
    # The capped ratio of a prefix is the probability that it is kept, whatever is drafted after it.
    for length, ratio in enumerate(expected["prefix_prob_P1_P2"][index], start=1):
        has_prefix = np.all(drafted[:, :length] == draft[:length], axis=1)
        assert sum(accepted_law(law, 2, given=has_prefix)[length:]) == close(ratio)


@pytest.mark.parametrize("rule", [BLOCK, TOKEN], ids=lambda rule: rule.name)
def test_block_and_token_verification_of_one_hot_drafts_have_one_law(rule: js.Rule) -> None:
    inputs, expected = case("case09_block_verification")
    assert expected["one_hot_equals_token_rule"]
    one_hot = inputs["one_hot"]
    instance = iid(one_hot["p"], one_hot["q"], one_hot["K"])
    law = audit.exact_law(rule, instance, padded_to=THREE_DRAFTED, batch=VECTOR_BATCH)
    assert law.is_proved
    drafted = law.cells.outcomes.drafted[:, 1:]
    is_looked_at = drafted >= 0  # token verification goes no further than the first rejection
    assert np.all((drafted == one_hot["draft"]) | ~is_looked_at)
    assert is_looked_at.any(axis=0).all()
    assert accepted_law(law, one_hot["K"]) == close(expected["one_hot_accepted_law_0_to_3"])


def token_residual_after_prefix_ratios(
    draws: js.Draws, proposal: js.Proposal, target_rows: jax.Array, bonus: jax.Array
) -> js.Verdict:
    """Keep the longest prefix that passes its ratio, replace as token verification does: biased."""
    del bonus  # always wanted here
    tokens = proposal.tree.tokens
    parents = jnp.maximum(proposal.tree.parents, 0)
    ratios = target_rows[parents, tokens] / proposal.draft_rows[parents, tokens]
    ratios = jnp.where(tokens >= 0, ratios, 0.0)
    weight, depth = jnp.float32(1), jnp.int32(0)
    for node in range(1, tokens.shape[0]):
        weight = jnp.minimum(1.0, weight * ratios[node])
        depth = jnp.where(draws.accept[node] < weight, node, depth)
    left = jnp.maximum(target_rows[depth] - proposal.draft_rows[depth], 0.0)
    is_whole = depth == proposal.tree.num_nodes - 1
    last = js.draw_token(draws.final, jnp.where(is_whole, target_rows[depth], left))
    slots = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return js.Verdict(
        tokens=jnp.where(slots < depth, jnp.roll(tokens, -1), -1).at[depth].set(last),
        num_tokens=depth + 1,
        num_accepted=depth,
        path=jnp.where(slots <= depth, slots, -1),
        stop_node=depth,
        status=jnp.int32(0),
    )


def test_the_audit_sees_prefix_ratios_joined_with_the_token_residual() -> None:
    _, expected = case("case09_block_verification")
    law = law_of_block(BLOCK, token_residual_after_prefix_ratios)
    wanted = expected["faulty_cumprod_with_token_residual_first_token_law"]
    assert first_token_law(law, 2) == close(wanted)
    assert not law.is_proved
