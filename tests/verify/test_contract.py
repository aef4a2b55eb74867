"""What every rule in the registry must do, on random rounds of one capacity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.plain_walk import DECISIVE, softmax, walk_plainly
from helpers.random_rounds import (
    EDGES,
    VOCAB,
    WIDE,
    WIDE_BATCH,
    Rounds,
    emitted,
    made_by_hand,
    play,
    random_rounds,
)

import jaxspec as js

each_rule = pytest.mark.parametrize("rule", js.RULES.values(), ids=js.RULES)
each_sampled_rule = pytest.mark.parametrize(
    "rule", [r for r in js.RULES.values() if r.proposal is not js.PointMass], ids=lambda r: r.name
)
kinds_of_rows = pytest.mark.parametrize("logits", [False, True], ids=["probabilities", "logits"])


def assert_agrees(rule: js.Rule, rounds: Rounds, *, logits: bool = False) -> None:
    assert_verdict_agrees(rule, rounds, play(rule, rounds, logits=logits), logits=logits)


def assert_verdict_agrees(
    rule: js.Rule, rounds: Rounds, verdict: js.Verdict, *, logits: bool = False
) -> None:
    wanted = [walk_plainly(rule, rounds, b, logits=logits) for b in range(len(rounds.bonus))]
    is_decisive = [outcome.margin > DECISIVE for outcome in wanted]
    assert np.mean(is_decisive) > 0.8
    for b in np.flatnonzero(is_decisive):
        depth = int(verdict.num_accepted[b])
        found = (verdict.path[b, : depth + 1].tolist(), emitted(verdict, b), int(verdict.status[b]))
        assert found == (wanted[b].path, wanted[b].tokens, wanted[b].status), f"round {b}"


def with_logits(rounds: Rounds, seed: int) -> Rounds:
    """Read the rows as logits at random temperatures, shifted row by row, as no law may notice."""
    generator = np.random.default_rng(seed)
    for rows in (rounds.target, rounds.draft):
        with np.errstate(divide="ignore"):
            rows[...] = np.log(rows) + generator.normal(0, 20, (*rows.shape[:2], 1))
    for temperature in (rounds.temperature, rounds.draft_temperature):
        temperature[...] = generator.uniform(0.5, 2.0, len(temperature))
    return rounds


@each_rule
def test_a_rule_agrees_with_a_plain_walk_in_float64(rule: js.Rule) -> None:
    for seed in (1, 2):
        assert_agrees(rule, random_rounds(rule, seed))


@each_rule
def test_a_rule_agrees_with_a_plain_walk_on_logits_at_any_temperature(rule: js.Rule) -> None:
    assert_agrees(rule, with_logits(random_rounds(rule, 3), 3), logits=True)


@each_rule
def test_candidates_that_cannot_have_been_drawn_are_skipped_and_the_state_is_kept(
    rule: js.Rule,
) -> None:
    rounds = random_rounds(rule, 4)
    generator = np.random.default_rng(4)
    invalid = [*range(VOCAB), -1, -7, VOCAB, VOCAB + 7, 2**31 - 1, -(2**31)]
    is_corrupted = (rounds.parents >= 0) & (generator.random(rounds.parents.shape) < 0.4)
    rounds.tokens[is_corrupted] = generator.choice(invalid, size=int(is_corrupted.sum()))
    assert_agrees(rule, rounds)


def test_rows_of_half_precision_are_computed_with_in_float32() -> None:
    rule = js.RULES["token"]
    rounds = with_logits(random_rounds(rule, 12), 12)
    rounds.draft[...] = softmax(rounds.draft, 1.0)
    draws, proposal, target, bonus = rounds.arguments(rule.proposal)
    target, draft = target.astype(jnp.bfloat16), proposal.draft_rows.astype(jnp.float16)
    rows = js.Logits(values=target, temperature=jnp.asarray(rounds.temperature))
    verdict = jax.vmap(rule.verify)(
        draws, dataclasses.replace(proposal, draft_rows=draft), rows, bonus
    )
    temperature = rounds.temperature[:, None, None]
    rounds.target = softmax(np.asarray(target, np.float64), temperature)
    rounds.draft = np.asarray(draft, np.float64)
    assert_verdict_agrees(rule, rounds, jax.tree.map(np.asarray, verdict))


@pytest.mark.parametrize("name", ["point_mass", "traversal"])
def test_a_rule_agrees_with_a_plain_walk_over_many_tiles_of_a_large_vocabulary(name: str) -> None:
    rule = js.RULES[name]
    for seed in range(5, 10):
        assert_agrees(rule, random_rounds(rule, seed, batch=WIDE_BATCH, vocab=WIDE))


@pytest.mark.parametrize("name", ["point_mass", "traversal"])
def test_a_rejected_sibling_is_never_emitted_again_from_its_tile_of_a_large_vocabulary(
    name: str,
) -> None:
    rule = js.RULES[name]
    # Half of the mass lies on two siblings of one tile, a quarter on others of that tile, a quarter
    # far away. Both siblings are rejected.
    for tile in (0, 31, 32, WIDE // 512):
        first = tile * 512
        siblings = [first + 70, first + 3]
        rounds = made_by_hand(
            rule, [-1, *siblings], [-1, 0, 0], target=[[0.0]], batch=WIDE_BATCH, vocab=WIDE
        )
        rounds.target[:, 0, first : first + 80] = 0.25 / 78
        rounds.target[:, 0, (first + 5000) % WIDE] = 0.25
        rounds.target[:, 0, siblings] = 0.25
        rounds.draft[:, 0, siblings] = 0.5
        rounds.accept[:, 1:] = 1 - 2**-24
        # Just below and above 1/2, where the two tiles meet once the siblings' mass is gone.
        rounds.final[:, 0] = np.arange(WIDE_BATCH) % 2 * 0.2 + 0.4
        rounds.final[:, 1] = (np.arange(WIDE_BATCH) + 0.4) / WIDE_BATCH
        assert_agrees(rule, rounds)
        tokens = play(rule, rounds).tokens[:, 0]
        is_near = (tokens >= first) & (tokens < first + 80)
        assert is_near.sum() == WIDE_BATCH / 2
        assert not np.isin(tokens, siblings).any()


@each_sampled_rule
def test_a_draft_equal_to_the_target_is_accepted_whole_whatever_the_draws(rule: js.Rule) -> None:
    rounds = random_rounds(rule, 7, same_rows=True, edge_draws=True)
    verdict = play(rule, rounds)
    for b, children in enumerate(rounds.children):
        path = [0]
        while children[path[-1], 0] >= 0:
            path.append(int(children[path[-1], 0]))
        assert verdict.path[b, : len(path)].tolist() == path
        assert verdict.num_accepted[b] == len(path) - 1
        assert verdict.num_tokens[b] == len(path) - 1 + (rounds.bonus[b] or len(path) == 1)
    assert not verdict.status.any()


@each_rule
@kinds_of_rows
def test_no_token_of_target_mass_zero_is_emitted_at_any_edge_of_the_draws(
    rule: js.Rule, logits: bool
) -> None:
    for seed in (8, 9):
        rounds = random_rounds(rule, seed, edge_draws=True)
        mass = rounds.target.copy()
        verdict = play(rule, with_logits(rounds, seed) if logits else rounds, logits=logits)
        for b, path in enumerate(verdict.path):
            for row, token in zip(path, emitted(verdict, b), strict=False):
                assert token >= 0
                assert mass[b, row, token] > 0, f"round {b}"
        assert not (verdict.status & ~int(js.Status.EMPTY_RESIDUAL)).any()


def test_traversal_accepts_no_impossible_sibling_after_a_rejection_that_only_rounding_made() -> (
    None
):
    # Root: the target and the draft are sure of token 0, so the sibling drawn after it comes from an
    # exhausted draft and has no target mass. Node 1 is entered with weight 1 and must be kept; the
    # float sums Z and D of its row may differ, so that a draw just below 1 rejects it.
    rule = js.RULES["traversal"]
    rounds = made_by_hand(rule, [-1, 0, 1, 0], [-1, 0, 0, 1], target=[[1.0, 0.0]])
    generator = np.random.default_rng(10)
    for rows in (rounds.target, rounds.draft):
        rows[:, 1] = generator.dirichlet(np.ones(VOCAB), len(rows))
    rounds.tokens[:, 3] = np.argmax(rounds.draft[:, 1] - rounds.target[:, 1], axis=1)
    rounds.accept[:, 1:] = 1 - 2**-24
    verdict = play(rule, rounds)
    assert (verdict.tokens[:, 0] == 0).all()


@each_rule
def test_temperature_zero_is_greedy_decoding_whatever_the_draws(rule: js.Rule) -> None:
    generator = np.random.default_rng(11)
    rounds = random_rounds(rule, 11)
    for draws in (rounds.accept, rounds.final):
        draws[...] = generator.choice(EDGES, draws.shape)
    # Small integers tie often; the lowest token counts. Some tokens cannot occur at all.
    rounds.target[...] = generator.integers(-2, 3, rounds.target.shape)
    rounds.target[generator.random(rounds.target.shape) < 0.1] = -np.inf
    rounds.target[..., 3] = np.maximum(rounds.target[..., 3], 0)
    with np.errstate(divide="ignore"):
        rounds.draft[...] = np.log(rounds.draft)
    rounds.temperature[...] = np.where(rounds.bonus, 0.0, -0.0)
    verdict = play(rule, rounds, logits=True)
    best = rounds.target.argmax(axis=-1)
    full_length = 0
    for b in range(len(best)):
        path, text = [0], []
        while True:
            text.append(int(best[b, path[-1]]))
            below = [c for c in rounds.children[b, path[-1]] if rounds.tokens[b, c] == text[-1]]
            below = [c for c in below if c >= 0]
            if not below:
                break
            path.append(int(below[0]))
        is_leaf = rounds.children[b, path[-1], 0] < 0
        if is_leaf and not rounds.bonus[b] and len(path) > 1:
            text.pop()
        found = emitted(verdict, b)
        assert found == text[: len(found)], f"round {b}"
        full_length += found == text
    # A rule that tests from the end may stop short where rounding parts Z from D at draws just
    # below 1; what it emits is greedy all the same.
    assert full_length > 0.95 * len(best)
