"""Bad values in production: flagged, without effect on other sequences, and no token is invented."""

import numpy as np
import pytest
from helpers.random_rounds import (
    BATCH,
    VOCAB,
    Rounds,
    emitted,
    made_by_hand,
    play,
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
BAD_DRAWS = (np.nan, 1.0, -0.1, np.inf, -np.inf)
BAD_ENTRIES = (np.nan, np.inf, -np.inf, -0.1)
BAD_TOKENS = (-1, -7, VOCAB, VOCAB + 7, 2**31 - 1, -(2**31))

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


def assert_flagged(
    verdict: js.Verdict, count: int, status: Status, tokens: list[int], accepted: int | None = None
) -> None:
    """Assert that the first sequences have one outcome and all others a clean status."""
    assert (verdict.status[:count] == status).all()
    assert not verdict.status[count:].any()
    for index in range(count):
        assert emitted(verdict, index) == tokens, f"sequence {index}"
        if accepted is not None:
            assert verdict.num_accepted[index] == accepted


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
    corrupt = rounds.copy()
    corrupt.target[:, 2:] = np.nan  # a leaf without bonus, and padding
    corrupt.draft[:, 2:] = np.nan
    if not rule.tests_deepest_first:
        rounds.accept[:, 1] = corrupt.accept[:, 1] = 0.9  # rejected: node 1 is not visited either
        corrupt.target[:, 1] = corrupt.draft[:, 1] = np.inf
    found, wanted = (play(rule, r, logits=logits) for r in (corrupt, rounds))
    assert all((value == getattr(found, name)).all() for name, value in vars(wanted).items())


@each_rule
def test_a_bad_target_entry_at_a_tested_candidate_is_flagged_and_nothing_replaces_it(
    rule: js.Rule,
) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.target[: len(BAD_ENTRIES), 1, 2] = BAD_ENTRIES
    verdict = play(rule, rounds)
    assert_flagged(verdict, len(BAD_ENTRIES), Status.NON_FINITE_ROW, [0], accepted=1)


@each_bottom_up_rule
def test_a_bad_target_entry_that_cuts_a_path_leaves_no_replacement_for_what_is_rejected_above_it(
    rule: js.Rule,
) -> None:
    rounds = two_nodes(rule, 0.9)
    rounds.target[: len(BAD_ENTRIES), 1, 2] = BAD_ENTRIES
    verdict = play(rule, rounds)
    for index in range(len(BAD_ENTRIES)):
        assert emitted(verdict, index) == []
        assert verdict.status[index] == Status.NON_FINITE_ROW


@each_rule
def test_a_bad_target_entry_elsewhere_in_the_row_of_the_replacement_is_flagged_and_nothing_is_drawn(
    rule: js.Rule,
) -> None:
    rounds = two_nodes(rule, 0.9)
    _cut_below_the_first(rounds)
    rounds.target[: len(BAD_ENTRIES), 0, 2] = BAD_ENTRIES
    verdict = play(rule, rounds)
    assert_flagged(verdict, len(BAD_ENTRIES), Status.NON_FINITE_ROW, [])
    assert (verdict.num_tokens[len(BAD_ENTRIES) :] == 1).all()


def _cut_below_the_first(rounds: Rounds) -> None:
    rounds.tokens[:, 2] = rounds.parents[:, 2] = -1
    rounds.children[:, 1] = -1
    rounds.level_sizes[:, 2] = 0


@each_sampled_rule
@kinds_of_rows
def test_a_bad_draft_row_costs_its_candidates_and_the_token_is_drawn_from_the_targets_row(
    rule: js.Rule, logits: bool
) -> None:
    nothing = -np.inf if logits else 0.0
    cases = [
        (lambda draft: draft.__setitem__((1, 2), np.nan), Status.NON_FINITE_ROW),  # the candidate's
        (lambda draft: draft.__setitem__((1, 0), np.inf), Status.NON_FINITE_ROW),  # another entry
        # A row of probabilities is read only where an entry does not settle the matter.
        (
            lambda draft: draft.__setitem__(1, nothing),
            Status.MASSLESS_ROW if logits else Status.OUTSIDE_SUPPORT,
        ),
    ]
    if not logits:
        cases += [
            (lambda draft: draft.__setitem__((1, 0), -0.1), Status.NON_FINITE_ROW),
            (lambda draft: draft.__setitem__(1, 2 * draft[1]), Status.NOT_NORMALIZED),
        ]
    rounds = two_nodes(rule, 0.1, logits=logits)
    rounds.accept[:, 2] = 0.9  # rejected by a sound row: its entries are [1/2, 1/4, 1/4], q = 1/2
    grid = np.arange(BATCH) / BATCH
    rounds.final[:, 1] = grid
    for change, status in cases:
        corrupt = rounds.copy()
        for b in range(BATCH):
            change(corrupt.draft[b])
        verdict = play(rule, corrupt, logits=logits)
        # Bottom-up, node 1 is kept or not by its own weight; where it is, the token after it is the
        # target's: 1/2, 1/4, 1/4 in order.
        assert (verdict.status & int(status) == int(status)).all()
        assert (verdict.tokens[:, 0] == 0).all()
        assert (verdict.num_accepted == 1).all()
        assert np.bincount(verdict.tokens[:, 1], minlength=3)[:3].tolist() == [256, 128, 128]


@each_rule
def test_rows_whose_mass_is_not_1_are_flagged_where_they_are_read(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.9)
    _cut_below_the_first(rounds)
    factors = np.array([2.0, 0.5, 1.001], np.float32)
    rounds.target[:3] *= factors[:, None, None]
    rounds.bonus[:] = True
    assert_flagged(play(rule, rounds), 3, Status.NOT_NORMALIZED, [])


@each_rule
def test_logits_given_as_probabilities_are_flagged(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.5)
    rounds.target[0, :, :4] = [3.0, 1.0, 2.0, 0.5]
    verdict = play(rule, rounds)
    assert verdict.status[0] != 0
    assert emitted(verdict, 0) == []


@each_rule
def test_a_bad_logit_anywhere_in_a_visited_row_is_flagged(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.1, logits=True)
    rounds.target[[0, 1], 0, 7] = np.nan, np.inf
    rounds.target[[2, 3], 0, 7] = np.nan, np.inf
    rounds.temperature[2:4] = 0
    assert_flagged(play(rule, rounds, logits=True), 4, Status.NON_FINITE_ROW, [])
    rounds.target[:4, 0, 7] = -np.inf
    rounds.temperature[2:4] = 1
    rounds.target[[0, 1], 1, 7] = np.nan, np.inf
    assert_flagged(play(rule, rounds, logits=True), 2, Status.NON_FINITE_ROW, [0])


@each_rule
def test_a_bad_temperature_is_flagged_and_emits_nothing(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.1, logits=True)
    rounds.temperature[:4] = np.nan, np.inf, -0.5, -np.inf
    assert_flagged(play(rule, rounds, logits=True), 4, Status.NON_FINITE_ROW, [])


@each_rule
@kinds_of_rows
def test_a_massless_row_that_would_be_drawn_from_is_flagged(rule: js.Rule, logits: bool) -> None:
    rounds = two_nodes(rule, 0.1, logits=logits)
    rounds.bonus[:] = True
    rounds.target[0, 2] = -np.inf if logits else 0.0  # the bonus row
    verdict = play(rule, rounds, logits=logits)
    assert_flagged(verdict, 1, Status.MASSLESS_ROW, [0, 2])
    assert (verdict.num_tokens[1:] == 3).all()


TORN = (
    # The root's slot holds node 2, whose parent is node 1.
    ("children", [2, -1, -1]),
    ("children", [2**31 - 1, -1, -1]),
    ("children", [-2, -1, -1]),
    # A number of nodes that no tree has.
    ("level_sizes", 0),
    ("level_sizes", 6),
    # A slot that does not rise; a path has one slot.
    ("children", [1, 1, -1]),
)


@each_rule
def test_a_tree_that_contradicts_itself_is_flagged_and_draws_nothing(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.9)
    rounds.accept[:, 2] = 0.95  # everything is rejected
    faults = TORN[:-1] if rule.is_path else TORN
    for index, (field, value) in enumerate(faults):
        array = getattr(rounds, field)
        array[index, 0] = value[: array.shape[2]] if isinstance(value, list) else value
    assert_flagged(play(rule, rounds), len(faults), Status.BAD_TREE, [])


@each_rule
@kinds_of_rows
def test_a_massless_target_row_that_decides_on_a_candidate_is_flagged(
    rule: js.Rule, logits: bool
) -> None:
    rounds = two_nodes(rule, 0.1, logits=logits)
    rounds.target[0, 1] = -np.inf if logits else 0.0
    verdict = play(rule, rounds, logits=logits)
    assert verdict.status[0] & Status.MASSLESS_ROW
    assert verdict.num_tokens[0] == verdict.num_accepted[0]


@each_rule
def test_a_candidate_outside_the_vocabulary_is_flagged_and_skipped(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.tokens[: len(BAD_TOKENS), 2] = BAD_TOKENS
    # A fresh draw from the whole row [1/2, 1/4, 1/4] at 1/2.
    assert_flagged(play(rule, rounds), len(BAD_TOKENS), Status.BAD_CANDIDATE, [0, 1])


@each_sampled_rule
@kinds_of_rows
def test_a_candidate_that_its_draft_row_cannot_draw_is_flagged_and_skipped(
    rule: js.Rule, logits: bool
) -> None:
    rounds = two_nodes(rule, 0.1, logits=logits)
    rounds.draft[0, 1, 2] = -np.inf if logits else 0.0
    assert_flagged(play(rule, rounds, logits=logits), 1, Status.OUTSIDE_SUPPORT, [0, 1])


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
def test_a_bad_accept_draw_that_is_used_is_flagged_and_decides_nothing(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.accept[: len(BAD_DRAWS), 2] = BAD_DRAWS
    kept = [] if rule.tests_deepest_first else [0]
    assert_flagged(play(rule, rounds), len(BAD_DRAWS), Status.BAD_DRAW, kept)


@each_rule
def test_a_bad_final_draw_that_is_used_is_flagged_and_draws_nothing(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.1)
    rounds.bonus[: len(BAD_DRAWS)] = True
    rounds.final[: len(BAD_DRAWS), 1] = BAD_DRAWS
    assert_flagged(play(rule, rounds), len(BAD_DRAWS), Status.BAD_DRAW, [0, 2])


@each_rule
def test_bad_draws_that_are_not_used_are_not_flagged(rule: js.Rule) -> None:
    rounds = two_nodes(rule, 0.1)
    bad = np.resize(BAD_DRAWS, BATCH)
    rounds.accept[:, 0] = bad  # the root's
    rounds.accept[:, 3:] = bad[:, None]  # padding
    rounds.final[:] = bad[:, None]  # nothing is drawn
    if rule.tests_deepest_first:
        rounds.accept[:, 1] = bad  # decided by the node below it
    verdict = play(rule, rounds)
    assert (verdict.tokens[:, :2] == [0, 2]).all()
    assert not verdict.status.any()
    rounds.final[:, 1] = 0.5
    rounds.bonus[:] = True  # up to one tile of tokens the pair's first number is not read
    assert not play(rule, rounds).status.any()
