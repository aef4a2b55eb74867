"""Thousands of random rounds with random faults: a verdict is sound whatever goes in."""

import numpy as np
import pytest
from helpers.random_rounds import WIDE, WIDE_BATCH, Rounds, play, random_rounds

import jaxspec as js
from jaxspec import Status

each_rule = pytest.mark.parametrize("rule", js.RULES.values(), ids=js.RULES)
kinds_of_rows = pytest.mark.parametrize("logits", [False, True], ids=["probabilities", "logits"])

BAD_ENTRIES = (np.nan, np.inf, -np.inf, -0.3, 1.7)
BAD_DRAWS = (np.nan, np.inf, -np.inf, 1.0, -0.1)


def corrupted(rounds: Rounds, seed: int, *, logits: bool) -> tuple[Rounds, np.ndarray]:
    """Spoil two thirds of the rounds, a few entries or many; return them and which were."""
    generator = np.random.default_rng(seed)
    corrupt = rounds.copy()
    batch, nodes, vocab = rounds.target.shape
    severity = generator.choice([0.0, 0.05, 0.3], batch)

    def hit(shape: tuple[int, ...], rate: float) -> np.ndarray:
        return generator.random(shape) < rate * severity.reshape(-1, *[1] * (len(shape) - 1))

    for rows in (corrupt.target, corrupt.draft):
        if logits:
            with np.errstate(divide="ignore"):
                rows[...] = np.log(rows)
        rows[hit((batch, nodes), 0.2)] = -np.inf if logits else 0.0
        is_bad = hit(rows.shape, 2 / vocab)
        rows[is_bad] = generator.choice([*BAD_ENTRIES, 3e38, 1e-40], int(is_bad.sum()))
    for draws in (corrupt.accept, corrupt.final):
        is_bad = hit(draws.shape, 1)
        draws[is_bad] = generator.choice(BAD_DRAWS, int(is_bad.sum()))
    is_bad = hit((batch, nodes), 1) & (rounds.parents >= 0)
    invalid = [*range(8), -1, -7, vocab, vocab + 7, 2**31 - 1, -(2**31)]
    corrupt.tokens[is_bad] = generator.choice(invalid, int(is_bad.sum()))
    is_bad = hit((batch,), 0.3)
    for temperature in (corrupt.temperature, corrupt.draft_temperature):
        temperature[is_bad] = generator.choice([np.nan, -1.0, np.inf, 0.0], int(is_bad.sum()))
    return corrupt, severity > 0


def assert_same(
    first: js.Verdict, second: js.Verdict, where: np.ndarray | slice = slice(None)
) -> None:
    for name, value in vars(first).items():
        assert (value[where] == getattr(second, name)[where]).all(), name


def assert_sound(rounds: Rounds, verdict: js.Verdict, *, logits: bool) -> None:
    """Assert what holds for a verdict whatever went in."""
    vocab = rounds.target.shape[-1]
    depths = np.arange(verdict.tokens.shape[1])
    emits = depths < verdict.num_tokens[:, None]
    assert (verdict.tokens[~emits] == -1).all()
    assert ((verdict.tokens >= 0) & (verdict.tokens < vocab))[emits].all()
    extra = verdict.num_tokens - verdict.num_accepted
    assert np.isin(extra, (0, 1)).all()
    everyone = np.arange(len(extra))
    assert (verdict.path[:, 0] == 0).all()
    assert ((verdict.path >= 0) == (depths <= verdict.num_accepted[:, None])).all()
    assert (verdict.stop_node == verdict.path[everyone, verdict.num_accepted]).all()
    above, below = verdict.path[:, :-1], verdict.path[:, 1:]
    is_step = below >= 0
    parents = np.take_along_axis(rounds.parents, np.maximum(below, 0), axis=1)
    assert (parents == above)[is_step].all()
    drafted = np.take_along_axis(rounds.tokens, np.maximum(below, 0), axis=1)
    assert (drafted == verdict.tokens[:, :-1])[is_step].all()
    is_leaf = rounds.children[everyone, verdict.stop_node, 0] < 0
    is_owed = ~is_leaf | rounds.bonus | (verdict.stop_node == 0)
    assert (extra <= is_owed).all()
    assert (extra == is_owed)[verdict.status == 0].all()
    last = rounds.target[everyone, verdict.stop_node]
    stop_rows = last < np.inf if logits else np.isfinite(last)
    assert (stop_rows.all(axis=1) | (extra == 0)).all()
    rows = np.take_along_axis(rounds.target, np.maximum(verdict.path, 0)[..., None], axis=1)
    entries = np.take_along_axis(rows, np.maximum(verdict.tokens, 0)[..., None], axis=2)[..., 0]
    assert (entries > (-np.inf if logits else 0))[emits].all()


@each_rule
@kinds_of_rows
def test_verdicts_are_sound_and_neighbours_untouched_whatever_goes_in(
    rule: js.Rule, logits: bool
) -> None:
    seen = 0
    for seed in range(4):
        rounds = random_rounds(rule, 20 + seed)
        clean = rounds.copy()
        corrupt, is_corrupted = corrupted(rounds, seed, logits=logits)
        if logits:
            with np.errstate(divide="ignore"):
                clean.target[...], clean.draft[...] = np.log(clean.target), np.log(clean.draft)
        verdict = play(rule, corrupt, logits=logits)
        assert_same(play(rule, clean, logits=logits), verdict, ~is_corrupted)
        assert_sound(corrupt, verdict, logits=logits)
        seen |= int(np.bitwise_or.reduce(verdict.status))
    rare = Status.EMPTY_RESIDUAL  # only rounding brings it about
    rare |= Status.OUTSIDE_SLAB | Status.BAD_TREE  # not corrupted here
    if logits:
        rare |= Status.NOT_NORMALIZED
    if rule.proposal is js.PointMass:
        rare |= Status.OUTSIDE_SUPPORT  # any token may be proposed
    assert seen | int(rare) == sum(Status)


@each_rule
@kinds_of_rows
def test_no_token_replaces_what_a_bad_row_or_draw_left_undecided(
    rule: js.Rule, logits: bool
) -> None:
    fatal = Status.NON_FINITE_ROW | Status.MASSLESS_ROW | Status.NOT_NORMALIZED | Status.BAD_DRAW
    fatal = int(fatal)
    for seed in range(4):
        rounds = random_rounds(rule, 20 + seed)
        corrupt, _ = corrupted(rounds, seed, logits=logits)
        # A bad draft row costs its candidates and no token: the target's row can still be drawn from.
        with np.errstate(divide="ignore"):
            corrupt.draft[...] = np.log(rounds.draft) if logits else rounds.draft
        corrupt.draft_temperature[...] = 1
        verdict = play(rule, corrupt, logits=logits)
        is_fatal = (verdict.status & fatal) != 0
        assert (verdict.num_tokens == verdict.num_accepted)[is_fatal].all()


@pytest.mark.parametrize("name", ["point_mass", "traversal"])
def test_verdicts_are_sound_over_a_large_vocabulary_too(name: str) -> None:
    rule = js.RULES[name]
    for seed in range(6):
        clean = random_rounds(rule, 30 + seed, batch=WIDE_BATCH, vocab=WIDE)
        corrupt, is_corrupted = corrupted(clean, seed, logits=False)
        verdict = play(rule, corrupt)
        assert_same(play(rule, clean), verdict, ~is_corrupted)
        assert_sound(corrupt, verdict, logits=False)


@each_rule
def test_a_walk_ends_and_emits_tokens_whatever_the_arrays_of_a_tree_hold(rule: js.Rule) -> None:
    generator = np.random.default_rng(40)
    rounds = random_rounds(rule, 40)
    for name in ("children", "parents", "level_sizes"):
        values = getattr(rounds, name)
        is_bad = generator.random(values.shape) < 0.3
        values[is_bad] = generator.integers(-3, 12, int(is_bad.sum()))
        is_bad = generator.random(values.shape) < 0.02
        values[is_bad] = generator.choice([2**31 - 1, -(2**31)], int(is_bad.sum()))
    verdict = play(rule, rounds)
    assert (verdict.tokens < rounds.target.shape[-1]).all()
    emits = np.arange(verdict.tokens.shape[1]) < verdict.num_tokens[:, None]
    assert ((verdict.tokens >= 0) == emits).all()
    assert (verdict.num_tokens <= verdict.tokens.shape[1]).all()
    assert (verdict.num_accepted < verdict.tokens.shape[1]).all()
