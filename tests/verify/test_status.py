"""What production must survive: bad values are flagged, nothing else changes, no token is invented."""

import numpy as np
import pytest
from random_rounds import (
    BATCH,
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
from jaxspec import Status

each_rule = pytest.mark.parametrize("rule", js.RULES.values(), ids=js.RULES)
each_sampled_rule = pytest.mark.parametrize(
    "rule", [r for r in js.RULES.values() if r.proposal is not js.PointMass], ids=lambda r: r.name
)
each_bottom_up_rule = pytest.mark.parametrize(
    "rule", [r for r in js.RULES.values() if r.tests_deepest_first], ids=lambda r: r.name
)
each_tree_rule = pytest.mark.parametrize(
    "rule", [r for r in js.RULES.values() if not r.is_path], ids=lambda r: r.name
)
kinds_of_rows = pytest.mark.parametrize("logits", [False, True], ids=["probabilities", "logits"])
bad_draws = pytest.mark.parametrize("bad", [np.nan, 1.0, -0.1, np.inf, -np.inf])
bad_entries = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])

BAD_ENTRIES = (np.nan, np.inf, -np.inf)
BAD_DRAWS = (np.nan, np.inf, -np.inf, 1.0, -0.1)

# A path or tree of two nodes: token 0 has target mass 1/4 and was drawn with probability 1/2, so a
# draw of 0.3 accepts and one of 0.9 rejects it; what is left then has mass at tokens 1 and 2.
TARGET = [[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
DRAFT = [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]


def two_nodes(rule: js.Rule, u: float, *, logits: bool = False, last: int = 2) -> Rounds:
    """Make rounds of two candidates in a row, of tokens 0 and `last`; the second is kept."""
    rounds = made_by_hand(
        rule, [-1, 0, last], [-1, 0, 1], target=TARGET, draft=DRAFT, accept=[u, 0.1]
    )
    if logits:
        with np.errstate(divide="ignore"):
            for rows in (rounds.target, rounds.draft):
                rows[...] = np.log(rows)
    return rounds


def assert_same(
    first: js.Verdict, second: js.Verdict, where: np.ndarray | slice = slice(None)
) -> None:
    for name, value in vars(first).items():
        assert (value[where] == getattr(second, name)[where]).all(), name


def status_of(verdict: js.Verdict, index: int) -> Status:
    return Status(int(verdict.status[index]))


@each_rule
@kinds_of_rows
def test_clean_rounds_have_a_clean_status(rule: js.Rule, logits: bool) -> None:
    verdict = play(rule, two_nodes(rule, 0.1, logits=logits), logits=logits)
    assert emitted(verdict, 0) == [0, 2]
    assert not verdict.status.any()


@each_rule
@kinds_of_rows
def test_bad_rows_that_are_not_visited_change_nothing_and_are_not_flagged(
    rule: js.Rule, logits: bool
) -> None:
    rounds = two_nodes(rule, 0.1, logits=logits)
    spoilt = rounds.copy()
    spoilt.target[:, 2:] = np.nan  # a leaf without bonus, and padding
    spoilt.draft[:, 2:] = np.nan
    if not rule.tests_deepest_first:
        rounds.accept[:, 1] = spoilt.accept[:, 1] = 0.9  # rejected: node 1 is not visited either
        spoilt.target[:, 1] = spoilt.draft[:, 1] = np.inf
    assert_same(play(rule, rounds, logits=logits), play(rule, spoilt, logits=logits))


@each_rule
@bad_entries
def test_a_bad_entry_at_a_tested_candidate_is_flagged_and_nothing_replaces_it(
    rule: js.Rule, bad: float
) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.target[0, 1, 2] = bad
    if rule.proposal is not js.PointMass:
        rounds.draft[1, 1, 2] = bad
    verdict = play(rule, rounds)
    for index in (0, 1) if rule.proposal is not js.PointMass else (0,):
        assert emitted(verdict, index) == [0]
        assert verdict.num_accepted[index] == 1
        assert status_of(verdict, index) == Status.NON_FINITE_ROW
    assert not verdict.status[2:].any()


@each_bottom_up_rule
@bad_entries
def test_a_bad_entry_that_cuts_a_path_leaves_no_replacement_for_what_is_rejected_above_it(
    rule: js.Rule, bad: float
) -> None:
    rounds = two_nodes(rule, 0.9)
    rounds.target[0, 1, 2] = rounds.draft[1, 1, 2] = bad
    verdict = play(rule, rounds)
    for index in (0, 1):
        assert emitted(verdict, index) == []
        assert status_of(verdict, index) == Status.NON_FINITE_ROW


@each_rule
@bad_entries
def test_a_bad_entry_elsewhere_in_the_row_of_the_replacement_is_flagged_and_not_laundered(
    rule: js.Rule, bad: float
) -> None:
    rounds = two_nodes(rule, 0.9)
    rounds.tokens[:, 2] = rounds.parents[:, 2] = -1
    rounds.children[:, 1] = -1
    rounds.level_sizes[:, 2] = 0
    rounds.target[0, 0, 2] = bad
    if rule.proposal is not js.PointMass:
        rounds.draft[1, 0, 2] = bad
    verdict = play(rule, rounds)
    for index in (0, 1) if rule.proposal is not js.PointMass else (0,):
        assert emitted(verdict, index) == []
        assert status_of(verdict, index) == Status.NON_FINITE_ROW
    assert verdict.num_tokens[2] == 1


@each_rule
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_logit_anywhere_in_a_visited_row_is_flagged(rule: js.Rule, bad: float) -> None:
    rounds = two_nodes(rule, 0.1, logits=True)
    rounds.target[0, 0, 7] = bad
    rounds.target[1, 1, 7] = bad
    rounds.temperature[2:4] = 0
    rounds.target[2, 0, 7] = bad
    verdict = play(rule, rounds, logits=True)
    assert [emitted(verdict, index) for index in range(3)] == [[], [0], []]
    assert [status_of(verdict, index) for index in range(3)] == [Status.NON_FINITE_ROW] * 3
    assert not verdict.status[3:].any()


@each_rule
@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5, -np.inf])
def test_a_bad_temperature_is_flagged_and_emits_nothing(rule: js.Rule, bad: float) -> None:
    rounds = two_nodes(rule, 0.1, logits=True)
    rounds.temperature[0] = bad
    verdict = play(rule, rounds, logits=True)
    assert emitted(verdict, 0) == []
    assert status_of(verdict, 0) == Status.NON_FINITE_ROW
    assert not verdict.status[1:].any()


@each_rule
@kinds_of_rows
def test_a_massless_row_that_would_be_drawn_from_is_flagged(rule: js.Rule, logits: bool) -> None:
    rounds = two_nodes(rule, 0.1, logits=logits)
    rounds.bonus[:] = True
    rounds.target[0, 2] = -np.inf if logits else 0.0  # the bonus row
    verdict = play(rule, rounds, logits=logits)
    assert emitted(verdict, 0) == [0, 2]
    assert status_of(verdict, 0) == Status.MASSLESS_ROW
    assert (verdict.num_tokens[1:] == 3).all()


@each_rule
@kinds_of_rows
def test_a_massless_target_row_that_decides_on_a_candidate_is_flagged(
    rule: js.Rule, logits: bool
) -> None:
    rounds = two_nodes(rule, 0.1, logits=logits)
    rounds.target[0, 1] = -np.inf if logits else 0.0
    verdict = play(rule, rounds, logits=logits)
    assert status_of(verdict, 0) & Status.MASSLESS_ROW
    assert verdict.num_tokens[0] == verdict.num_accepted[0]


@each_rule
@pytest.mark.parametrize("token", [-1, -7, VOCAB, VOCAB + 7, 2**31 - 1, -(2**31)])
def test_a_candidate_outside_the_vocabulary_is_flagged_and_skipped(
    rule: js.Rule, token: int
) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.tokens[0, 2] = token
    verdict = play(rule, rounds)
    # A fresh draw from the whole row [1/2, 1/4, 1/4] at 1/2.
    assert emitted(verdict, 0) == [0, 1]
    assert status_of(verdict, 0) == Status.BAD_CANDIDATE
    assert not verdict.status[1:].any()


@each_sampled_rule
@kinds_of_rows
def test_a_candidate_that_its_draft_row_cannot_draw_is_flagged_and_skipped(
    rule: js.Rule, logits: bool
) -> None:
    rounds = two_nodes(rule, 0.1, logits=logits)
    rounds.draft[0, 1, 2] = -np.inf if logits else 0.0
    verdict = play(rule, rounds, logits=logits)
    assert emitted(verdict, 0) == [0, 1]
    assert status_of(verdict, 0) == Status.OUTSIDE_SUPPORT
    assert not verdict.status[1:].any()


@each_tree_rule
def test_siblings_after_a_skipped_one_are_tested_as_if_it_were_not_there(rule: js.Rule) -> None:
    for fault in (VOCAB, -1, 5):
        if fault == 5 and rule.proposal is js.PointMass:
            continue
        rounds = made_by_hand(
            rule,
            [-1, 0, 0, 1],
            [-1, 0, 0, 0],
            target=[[0.25, 0.25, 0.5]],
            draft=[[0.5, 0.25, 0.25]],
            accept=[0.9, 0.5, 0.0],
        )
        without = made_by_hand(
            rule,
            [-1, 0, 1],
            [-1, 0, 0],
            target=[[0.25, 0.25, 0.5]],
            draft=[[0.5, 0.25, 0.25]],
            accept=[0.9, 0.0],
        )
        rounds.tokens[:, 2] = fault
        grid = np.arange(BATCH) / BATCH
        rounds.accept[:, 3] = without.accept[:, 2] = grid
        rounds.final[:, 1] = without.final[:, 1] = np.roll(grid, 200)
        found, wanted = play(rule, rounds), play(rule, without)
        assert (found.tokens == wanted.tokens).all()
        wanted_status = Status.OUTSIDE_SUPPORT if fault == 5 else Status.BAD_CANDIDATE
        assert (found.status == wanted_status).all()


def test_a_repeated_point_mass_is_never_accepted_and_changes_nothing() -> None:
    rule = js.RULES["point_mass"]
    rounds = made_by_hand(
        rule, [-1, 0, 0, 1], [-1, 0, 0, 0], target=[[0.25, 0.25, 0.5]], accept=[0.9, 0.0, 0.5]
    )
    rounds.accept[:, 3] = np.arange(BATCH) / BATCH
    verdict = play(rule, rounds)
    # After the first rejection the second token has 1/3 of what is left.
    is_accepted = rounds.accept[:, 3] * 0.75 < 0.25
    assert (verdict.tokens[:, 0] == np.where(is_accepted, 1, 2)).all()
    assert (verdict.num_accepted == is_accepted).all()
    assert not verdict.status.any()


@each_rule
@bad_draws
def test_a_bad_accept_draw_that_is_used_is_flagged_and_decides_nothing(
    rule: js.Rule, bad: float
) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.accept[0, 2] = bad
    verdict = play(rule, rounds)
    assert emitted(verdict, 0) == ([] if rule.tests_deepest_first else [0])
    assert status_of(verdict, 0) == Status.BAD_DRAW
    assert not verdict.status[1:].any()


@each_rule
@bad_draws
def test_a_bad_final_draw_that_is_used_is_flagged_and_draws_nothing(
    rule: js.Rule, bad: float
) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.bonus[0] = True
    rounds.final[0, 1] = bad
    verdict = play(rule, rounds)
    assert emitted(verdict, 0) == [0, 2]
    assert status_of(verdict, 0) == Status.BAD_DRAW


@each_rule
@bad_draws
def test_bad_draws_that_are_not_used_are_not_flagged(rule: js.Rule, bad: float) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.accept[:, 0] = bad  # the root's
    rounds.accept[:, 3:] = bad  # padding
    rounds.final[:] = bad  # nothing is drawn
    if rule.tests_deepest_first:
        rounds.accept[:, 1] = bad  # decided by the node below it
    verdict = play(rule, rounds)
    assert (verdict.tokens[:, :2] == [0, 2]).all()
    assert not verdict.status.any()
    rounds.final[:, 1] = 0.5
    rounds.bonus[:] = True  # up to one block of tokens the pair's first number is not read
    assert not play(rule, rounds).status.any()


def corrupted(rounds: Rounds, seed: int, *, logits: bool) -> tuple[Rounds, np.ndarray]:
    """Spoil two thirds of the rounds, a few entries or many; return them and which were."""
    generator = np.random.default_rng(seed)
    spoilt = rounds.copy()
    batch, nodes, vocab = rounds.target.shape
    severity = generator.choice([0.0, 0.05, 0.3], batch)

    def hit(shape: tuple[int, ...], rate: float) -> np.ndarray:
        return generator.random(shape) < rate * severity.reshape(-1, *[1] * (len(shape) - 1))

    for rows in (spoilt.target, spoilt.draft):
        if logits:
            with np.errstate(divide="ignore"):
                rows[...] = np.log(rows)
        rows[hit((batch, nodes), 0.2)] = -np.inf if logits else 0.0
        is_bad = hit(rows.shape, 2 / vocab)
        rows[is_bad] = generator.choice([*BAD_ENTRIES, 3e38, 1e-40], int(is_bad.sum()))
    for draws in (spoilt.accept, spoilt.final):
        is_bad = hit(draws.shape, 1)
        draws[is_bad] = generator.choice(BAD_DRAWS, int(is_bad.sum()))
    is_bad = hit((batch, nodes), 1) & (rounds.parents >= 0)
    strange = [*range(8), -1, -7, vocab, vocab + 7, 2**31 - 1, -(2**31)]
    spoilt.tokens[is_bad] = generator.choice(strange, int(is_bad.sum()))
    is_bad = hit((batch,), 0.3)
    for temperature in (spoilt.temperature, spoilt.draft_temperature):
        temperature[is_bad] = generator.choice([np.nan, -1.0, np.inf, 0.0], int(is_bad.sum()))
    return spoilt, severity > 0


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
        spoilt, is_spoilt = corrupted(rounds, seed, logits=logits)
        if logits:
            with np.errstate(divide="ignore"):
                clean.target[...], clean.draft[...] = np.log(clean.target), np.log(clean.draft)
        verdict = play(rule, spoilt, logits=logits)
        assert_same(play(rule, clean, logits=logits), verdict, ~is_spoilt)
        assert_sound(spoilt, verdict, logits=logits)
        seen |= int(np.bitwise_or.reduce(verdict.status))
    rare = Status.EMPTY_RESIDUAL  # only rounding brings it about
    if rule.proposal is js.PointMass:
        rare |= Status.OUTSIDE_SUPPORT  # any token may be proposed
    assert seen | int(rare) == sum(Status)


@each_rule
@kinds_of_rows
def test_no_token_replaces_what_a_bad_row_or_draw_left_undecided(
    rule: js.Rule, logits: bool
) -> None:
    fatal = int(Status.NON_FINITE_ROW | Status.MASSLESS_ROW | Status.BAD_DRAW)
    for seed in range(4):
        spoilt, _ = corrupted(random_rounds(rule, 20 + seed), seed, logits=logits)
        verdict = play(rule, spoilt, logits=logits)
        is_fatal = (verdict.status & fatal) != 0
        assert (verdict.num_tokens == verdict.num_accepted)[is_fatal].all()


@pytest.mark.parametrize("name", ["point_mass", "traversal"])
def test_verdicts_are_sound_over_a_large_vocabulary_too(name: str) -> None:
    rule = js.RULES[name]
    for seed in range(6):
        clean = random_rounds(rule, 30 + seed, batch=WIDE_BATCH, vocab=WIDE)
        spoilt, is_spoilt = corrupted(clean, seed, logits=False)
        verdict = play(rule, spoilt)
        assert_same(play(rule, clean), verdict, ~is_spoilt)
        assert_sound(spoilt, verdict, logits=False)
