"""The host loop: budgets, stop tokens, capacity, counts by hand, draws, and models that fail."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from helpers.toys import (
    DRAFTERS,
    VOCAB,
    WITH_A_DRAFT,
    Model,
    counting_up,
    draft,
    likely_up,
    never_up,
    random_rows,
    round_draws,
    target,
)

import jaxspec as js
from jaxspec.decode import (
    CallableTarget,
    DecodeError,
    Decoder,
    DecodeState,
    Ending,
    Rate,
    metrics_of,
)
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, SampledPath
from jaxspec.models import bundled_ngrams
from jaxspec.models.provider import (
    Answer,
    AnswerError,
    Context,
    Provider,
    Query,
    Softmax,
)

PROMPT = (0,)
KEY = jax.random.key(0)
GROUPS = ("node", "all", "depth")
each_drafter = pytest.mark.parametrize("name", DRAFTERS)
with_and_without_bonus = pytest.mark.parametrize("bonus", [True, False], ids=["bonus", "no bonus"])


def decoder_of(name: str, **options: Any) -> Decoder:
    """A decoder of random rows."""
    options = {"target": target().provider, **options}
    return Decoder(drafter=DRAFTERS[name](draft().provider), **options)


# --- budgets


@each_drafter
@with_and_without_bonus
def test_a_budget_is_met_exactly_and_nothing_beyond_it_is_asked(name: str, bonus: bool) -> None:
    for budget in (1, 2, 5, 7):
        p, q = target(), draft()
        decoder = Decoder(p.provider, DRAFTERS[name](q.provider), bonus=bonus)
        state = decoder.run(PROMPT, jax.random.key(budget), new_tokens=budget)
        assert len(state.new_tokens) == budget
        assert state.tokens[: state.prompt_length] == PROMPT
        assert state.ending == Ending.BUDGET
        assert sum(each.num_emitted for each in state.rounds) == budget
        assert all(each.status == 0 for each in state.rounds)
        # The row after prompt and budget would give what follows them.
        assert max(map(len, p.asked + q.asked)) < len(PROMPT) + budget
        if budget == 1:
            # Without the bonus the one token may be drafted; with it, it is the bonus itself.
            assert p.asked == [PROMPT]
            assert q.asked == ([] if bonus or name == "none" else [PROMPT])
            assert state.rounds[0].proposed_depth == len(q.asked)


def test_the_default_drafter_is_none_and_each_round_is_a_plain_step() -> None:
    p = target()
    state = Decoder(p.provider).run(PROMPT, KEY, new_tokens=4)
    assert p.asked == [state.tokens[: n + 1] for n in range(4)]
    assert [each.num_emitted for each in state.rounds] == [1] * 4
    assert all(each.proposed_depth == each.num_drafted == 0 for each in state.rounds)


# --- counts, worked out by hand


class Counts(NamedTuple):
    """What a decode of seven tokens asks; layers are the batches of a target asked by depth."""

    rounds: int
    target_queries: int
    target_layers: int
    draft_queries: int
    draft_batches: int


# The target counts up, and the draft's most probable token (the path's only one) is right: all of
# each path is accepted. Prompt of one token, budget 7.
ALL_RIGHT = {
    # Seven plain steps, the root's row each.
    ("none", True): Counts(7, 7, 7, 0, 0),
    ("none", False): Counts(7, 7, 7, 0, 0),
    # 3 + 3 + 1 tokens. Two tokens drafted by a query each; the target scores root, first and, for
    # the bonus, second. The last round has room for one token: a plain step.
    ("path", True): Counts(3, 3 + 3 + 1, 3 + 3 + 1, 2 + 2, 2 + 2),
    # 2 + 2 + 2 + 1 tokens. The second drafted token is scored by the row of the first, the last
    # round drafts one token only and the root's row scores it.
    ("path", False): Counts(4, 2 + 2 + 2 + 1, 2 + 2 + 2 + 1, 2 + 2 + 2 + 1, 2 + 2 + 2 + 1),
    # 3 + 3 + 1 tokens. Root, 2 children, 1 below each: the draft is asked about the root, then
    # about both children, the target about all five on three levels.
    ("fixed tree", True): Counts(3, 5 + 5 + 1, 3 + 3 + 1, 3 + 3, 2 + 2),
    # 2 + 2 + 2 + 1 tokens. The target is asked about the root and its two children; in the last
    # round, of depth 1, the children are leaves.
    ("fixed tree", False): Counts(4, 3 * 3 + 1, 2 * 3 + 1, 3 * 3 + 1, 2 * 3 + 1),
    # Entropy 0.94: width 2. Depth 1: root and 2 leaves, emits 2; all accepted, so depth 2: asked
    # about are root and both children, of which the first takes the two nodes left of five: emits
    # 3; then room for 2, depth 1 again: emits 2.
    ("adaptive tree", True): Counts(3, 3 + 5 + 3, 2 + 3 + 2, 1 + 3 + 1, 1 + 2 + 1),
    # 1 + 2 + 2 + 2 tokens. At depth 2 the inner nodes are the root and its first child.
    ("adaptive tree", False): Counts(4, 1 + 2 * 3, 1 + 2 * 3, 1 + 3 * 3, 1 + 2 * 3),
}


@pytest.mark.parametrize(("kind", "bonus"), ALL_RIGHT)
def test_the_counts_are_those_worked_out_by_hand(kind: str, bonus: bool) -> None:
    by_hand = ALL_RIGHT[kind, bonus]
    names = ("path by token", "path by block") if kind == "path" else (kind,)
    for name, is_batched, group in itertools.product(names, (False, True), GROUPS):
        p = Model("target", counting_up, is_batched=is_batched)
        right = counting_up if kind == "path" else likely_up
        q = Model("draft", right, is_batched=is_batched)
        asked = CallableTarget(p.provider, group)  # type: ignore[arg-type]
        decoder = Decoder(asked, DRAFTERS[name](q.provider), bonus=bonus)
        state = decoder.run(PROMPT, KEY, new_tokens=7)
        assert state.new_tokens == (1, 2, 0, 1, 2, 0, 1)
        counted = metrics_of(state.rounds)

        batches = by_hand.target_layers if group == "depth" else by_hand.rounds
        calls = batches if is_batched and group != "node" else by_hand.target_queries
        assert counted.rounds == by_hand.rounds
        assert counted.target_queries == by_hand.target_queries == len(p.asked)
        assert counted.target_calls == calls == len(p.calls)
        assert counted.target_batches == batches

        calls = by_hand.draft_batches if is_batched else by_hand.draft_queries
        assert counted.draft_queries == by_hand.draft_queries == len(q.asked)
        assert counted.draft_calls == calls == len(q.calls)
        assert counted.draft_batches == by_hand.draft_batches
        assert counted.accepted == 7 - (by_hand.rounds if bonus or name == "none" else 0)


@with_and_without_bonus
def test_the_counts_of_a_path_that_is_never_right_are_those_worked_out_by_hand(bonus: bool) -> None:
    p, q = Model("target", counting_up), Model("draft", never_up)
    decoder = Decoder(p.provider, SampledPath(q.provider, 2), bonus=bonus)
    state = decoder.run(PROMPT, KEY, new_tokens=3)
    counted = metrics_of(state.rounds)
    assert state.new_tokens == (1, 2, 0)
    assert (counted.accepted, counted.rounds, counted.target_batches) == (0, 3, 3)
    # One replacement a round. With the bonus: depth 2, 1, 0, all nodes scored. Without: depth 2, 2,
    # 1, and all but the last one scored.
    drafted = (2, 1, 0) if bonus else (2, 2, 1)
    assert [each.num_drafted for each in state.rounds] == list(drafted)
    assert counted.drafted == counted.draft_queries == sum(drafted)
    assert counted.target_queries == (3 + 2 + 1 if bonus else 2 + 2 + 1)


def test_leaves_are_asked_about_for_the_bonus_only_and_candidates_by_their_parents_context() -> (
    None
):
    for bonus in (True, False):
        p, q = Model("target", counting_up), Model("draft", likely_up)
        decoder = Decoder(p.provider, DRAFTERS["fixed tree"](q.provider), bonus=bonus)
        decoder.step(decoder.start((2, 0), KEY, new_tokens=3))
        assert q.asked == [(2, 0), (2, 0, 1), (2, 0, 2)]
        leaves = [(2, 0, 1, 2), (2, 0, 2, 0)] if bonus else []
        assert p.asked == [(2, 0), (2, 0, 1), (2, 0, 2), *leaves]


# --- stop tokens and the end of the context


@with_and_without_bonus
@pytest.mark.parametrize("name", ["path by token", "path by block", "fixed tree"])
def test_nothing_after_a_stop_token_is_emitted_or_counted(name: str, bonus: bool) -> None:
    # The whole path is right, so that with the bonus one round decides on 1, 2, 0.
    right = counting_up if name.startswith("path") else likely_up
    drafter = DRAFTERS[name](Model("draft", right).provider)
    decoder = Decoder(Model("target", counting_up).provider, drafter, bonus=bonus)
    for place, stop in enumerate((1, 2, 0)):
        state = decoder.run(PROMPT, KEY, new_tokens=9, stop_tokens=[stop])
        assert state.new_tokens == (1, 2, 0)[: place + 1]
        assert state.ending == Ending.STOP
        counted = metrics_of(state.rounds)
        assert counted.new_tokens == place + 1
        if bonus:
            assert counted.rounds == 1
            assert counted.accepted == min(place + 1, 2)
            assert counted.by_depth == (Rate(1, 1),) * min(place + 1, 2)
        with pytest.raises(ValueError, match="the decode is finished: stop"):
            decoder.step(state)


@each_drafter
def test_a_text_ends_at_its_first_stop_token(name: str) -> None:
    decoder = decoder_of(name)
    ends = set()
    for seed in range(8):
        state = decoder.run(PROMPT, jax.random.key(seed), new_tokens=12, stop_tokens={1})
        ends.add(state.ending)
        assert 1 not in state.new_tokens[:-1]
        assert (state.new_tokens[-1] == 1) == (state.ending == Ending.STOP)
        assert sum(each.num_emitted for each in state.rounds) == len(state.new_tokens)
        assert all(each.num_accepted <= each.num_emitted for each in state.rounds)
    assert Ending.STOP in ends


def test_a_stop_token_wins_over_the_budget_and_in_the_prompt_stops_nothing() -> None:
    decoder = Decoder(Model("target", counting_up).provider)
    assert decoder.run((0,), KEY, new_tokens=2, stop_tokens=[2]).ending == Ending.STOP
    assert decoder.run((0,), KEY, new_tokens=2, stop_tokens=[0]).new_tokens == (1, 2)


@each_drafter
@with_and_without_bonus
def test_no_context_that_is_asked_about_is_longer_than_the_limit(name: str, bonus: bool) -> None:
    prompt = (1, 2, 0)
    for room in (0, 1, 2, 4):
        p, q = target(), draft()
        most = len(prompt) + room
        decoder = Decoder(p.provider, DRAFTERS[name](q.provider), bonus=bonus, max_context=most)
        state = decoder.run(prompt, KEY)
        assert state.ending == Ending.CAPACITY
        assert len(state.new_tokens) == room
        assert max(map(len, p.asked + q.asked), default=0) < most
        with pytest.raises(ValueError, match="the decode is finished: capacity"):
            decoder.step(state)


def test_a_budget_that_ends_with_the_context_is_met() -> None:
    state = decoder_of("path by token", max_context=4).run(PROMPT, KEY, new_tokens=3)
    assert (state.ending, len(state.new_tokens)) == (Ending.BUDGET, 3)


def test_a_draft_of_fewer_tokens_is_not_asked_about_those_that_it_lacks() -> None:
    asked = []

    def narrow(context: Context) -> list[float]:
        asked.append(context)
        return [0.5, 0.5]

    decoder = Decoder(target().provider, SampledPath(Provider("narrow", 2, narrow), 2))
    for seed in range(4):
        assert len(decoder.run(PROMPT, jax.random.key(seed), new_tokens=9).new_tokens) == 9
    assert asked
    assert all(max(context) < 2 for context in asked)


# --- temperature and filters


@pytest.mark.parametrize("name", WITH_A_DRAFT)
def test_temperature_and_filters_are_those_of_logits(name: str) -> None:
    """Rows that a softmax at the request's temperature gives, and none that a filter drops."""

    def logits(context: Context) -> np.ndarray:
        return np.log(random_rows(1)(context))

    plain = Provider("target", VOCAB, logits, transform=Softmax())
    warm = dataclasses.replace(plain, transform=Softmax(0.5))
    for options in ({"temperature": 0.5}, {"temperature": 0.5, "top_k": 2, "top_p": 0.9}):
        decoder = decoder_of(name, target=plain)
        states = decoder.rounds(decoder.start(PROMPT, KEY, new_tokens=9, **options))  # type: ignore[arg-type]
        for state, record in states:
            context = state.tokens[: record.position + 1]
            (row,), _ = warm.rows([context])
            if "top_k" in options:
                row = np.where(row >= np.sort(row)[1], row, 0)
                row = np.where(row == row.max(), row, 0) if row.max() >= 0.9 * row.sum() else row
                row /= row.sum()
            np.testing.assert_allclose(record.target_rows[0], row, atol=1e-6)
            assert int(record.verdict.status) == 0
            rows = record.proposal.draft_rows
            if rows is not None and int(record.proposal.tree.num_nodes) > 1:
                (drawn,), _ = draft().provider.rows([context])
                if "top_k" not in options:
                    wanted = drawn**2 / (drawn**2).sum()
                    np.testing.assert_allclose(np.asarray(rows)[0], wanted, atol=1e-6)
                assert (np.asarray(rows)[0] > 0).sum() <= options.get("top_k", VOCAB)


def test_neutral_temperature_and_filters_leave_rows_as_they_are_bit_for_bit() -> None:
    p = target()
    decoder = Decoder(p.provider)
    state = decoder.start(PROMPT, KEY, temperature=1, top_k=VOCAB, top_p=1)
    (row,), _ = p.provider.rows([PROMPT])
    assert decoder.step(state)[1].target_rows.tobytes() == row.tobytes()


@each_drafter
def test_at_temperature_0_and_with_top_k_of_1_the_text_is_the_greedy_one(name: str) -> None:
    greedy = [0]
    for _ in range(9):
        greedy.append(int(random_rows(1)(tuple(greedy)).argmax()))
    for bonus in (True, False):
        decoder = decoder_of(name, bonus=bonus)
        for seed, options in enumerate(({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-300})):
            state = decoder.run(PROMPT, jax.random.key(seed), new_tokens=9, **options)  # type: ignore[arg-type]
            assert state.tokens == tuple(greedy)


# --- draws


@each_drafter
def test_a_key_decides_the_text_whatever_else_is_decoded_in_between(name: str) -> None:
    decoder = decoder_of(name)
    keys = [jax.random.key(seed) for seed in (3, 4)]
    alone = [decoder.run(PROMPT, key, new_tokens=12) for key in keys]
    assert alone[0].new_tokens != alone[1].new_tokens
    states = [decoder.start(PROMPT, key, new_tokens=12) for key in keys]
    for turn in itertools.cycle([1, 0, 0]):
        if not states[turn].ending:
            states[turn], _ = decoder.step(states[turn])
        if all(state.ending for state in states):
            break
    assert states == alone


@each_drafter
def test_every_round_has_the_draws_of_its_key_and_root_and_none_is_used_twice(name: str) -> None:
    decoder = decoder_of(name)
    start = decoder.start((1, 0), KEY, new_tokens=12)
    records = [record for _, record in decoder.rounds(start)]
    positions = [record.position for record in records]
    assert positions == sorted(set(positions))
    assert positions[0] == 1
    used = []
    for record in records:
        nodes = record.proposal.tree.max_nodes
        expected = jax.tree.leaves(round_draws(KEY, nodes, record.position))
        for mine, theirs in zip(jax.tree.leaves(record.draws), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            used += np.asarray(mine).ravel().tolist()
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("name", ["none", "path by token", "path by block", "fixed tree"])
def test_a_text_goes_on_alike_from_equal_tokens_whatever_rounds_led_there(name: str) -> None:
    # A prompt that holds what was decoded: the root is at the same position, after the same tokens,
    # and nothing else may matter.
    decoder = decoder_of(name)
    reached, _ = decoder.step(decoder.start(PROMPT, KEY, new_tokens=10))
    again = decoder.run(reached.tokens, KEY, new_tokens=10 - len(reached.new_tokens))
    assert again.tokens == decoder.resume(reached).tokens
    assert again.rounds == decoder.resume(reached).rounds[1:]


@each_drafter
@with_and_without_bonus
def test_a_step_is_its_parts_proposal_scores_verdict_commit(name: str, bonus: bool) -> None:
    decoder = decoder_of(name, bonus=bonus)
    state = decoder.start(PROMPT, KEY, new_tokens=6)
    while not state.ending:
        after, record = decoder.step(state)
        draws = round_draws(KEY, record.proposal.tree.max_nodes, len(state.tokens) - 1)
        made = decoder.propose(state, draws.draft)
        scores = decoder.score(state, made)
        np.testing.assert_array_equal(record.target_rows, scores.rows)
        verdict = decoder.drafter.rule.verify(draws.verify, made.proposal, scores.rows, bonus)
        assert decoder.commit(state, made, scores, jax.device_get(verdict)) == after
        state = after


# --- models that fail


def wrong_shape(row: Any) -> Any:
    return row[:-1]


def not_a_number(row: Any) -> Any:
    return [row[0], float("nan"), row[2]]


class LostError(Exception):
    """The connection is lost."""


def lost(row: Any) -> Any:
    raise LostError


FAILURES: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "wrong shape": (wrong_shape, js.RowError),
    "NaN": (not_a_number, js.RowError),
    "exception": (lost, LostError),
}


def run_until_it_fails(decoder: Decoder, error: type[Exception]) -> DecodeState:
    """Step until a provider fails; the state is that before the round, and no other."""
    state = decoder.start(PROMPT, KEY, new_tokens=14)
    while True:
        before = dataclasses.asdict(state)
        try:
            state, _ = decoder.step(state)
        except error:
            assert dataclasses.asdict(state) == before
            return state
        assert not state.ending, "the provider did not fail"


@pytest.mark.parametrize("failing", ["target", "draft"])
@pytest.mark.parametrize("is_batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", ["path by block", "adaptive tree"])
def test_a_round_that_fails_leaves_its_state_and_goes_on_once_the_provider_is_mended(
    name: str, failure: str, is_batched: bool, failing: str
) -> None:
    spoil, error = FAILURES[failure]
    models = {"target": target(is_batched=is_batched), "draft": draft(is_batched=is_batched)}
    decoder = Decoder(models["target"].provider, DRAFTERS[name](models["draft"].provider))
    undisturbed = decoder.run(PROMPT, KEY, new_tokens=14)

    bad, given = models[failing], iter(range(10**6))
    sound = bad.row
    bad.row = lambda context: spoil(sound(context)) if next(given) == 6 else sound(context)
    state = run_until_it_fails(decoder, error)
    assert state.rounds == undisturbed.rounds[: len(state.rounds)]
    assert state.tokens == undisturbed.tokens[: len(state.tokens)]
    bad.row = sound
    assert decoder.resume(state) == undisturbed


@pytest.mark.parametrize("failing", ["target", "draft"])
def test_rows_out_of_order_are_an_error_and_the_state_goes_on_once_they_are_in_order(
    failing: str,
) -> None:
    is_mended = False

    def backwards(queries: list[Query]) -> list[Answer]:
        rows = random_rows(1 if failing == "target" else 2)
        answers = [Answer(query.id, rows(query.context)) for query in queries]
        return answers if is_mended else answers[::-1]

    bad = Provider(failing, VOCAB, backwards, is_batched=True)
    drafter = DRAFTERS["fixed tree"](bad if failing == "draft" else draft().provider)
    decoder = Decoder(bad if failing == "target" else target().provider, drafter)
    state = run_until_it_fails(decoder, AnswerError)
    is_mended = True
    assert decoder.resume(state) == decoder.run(PROMPT, KEY, new_tokens=14)


def test_an_error_says_which_model_which_context_and_which_value() -> None:
    bad = Model("target", lambda context: not_a_number([0.5, 0.25, 0.25]))
    decoder = Decoder(bad.provider)
    with pytest.raises(js.RowError, match=r"target: row for context \(0,\): entry 1 is nan"):
        decoder.run(PROMPT, KEY)


def test_a_round_that_decides_on_nothing_is_an_error_that_says_why() -> None:
    decoder = decoder_of("none")
    state = decoder.start(PROMPT, KEY)
    _, record = decoder.step(state)
    made = decoder.propose(state, record.draws.draft)
    scores = decoder.score(state, made)
    nothing = js.Verdict(
        tokens=np.array([-1]),
        num_tokens=np.int32(0),
        num_accepted=np.int32(0),
        path=np.array([0]),
        stop_node=np.int32(0),
        status=np.int32(js.Status.MASSLESS_ROW),
    )
    with pytest.raises(DecodeError, match=r"position 0 decided on no token: .*MASSLESS_ROW"):
        decoder.commit(state, made, scores, nothing)


# --- real text


def test_a_hundred_tokens_of_real_text_with_the_adaptive_tree() -> None:
    def provider(name: str, model: Any) -> Provider:
        def ask(queries: list[Query]) -> list[Answer]:
            # Rows depend on the last symbols only, so contexts are cut to one length.
            latest = [query.context[1 - model.order :] for query in queries]
            rows = np.asarray(model.rows(latest))
            return [Answer(query.id, row) for query, row in zip(queries, rows, strict=True)]

        return Provider(name, model.vocab, ask, is_batched=True)

    p, q = bundled_ngrams()
    drafter = AdaptiveTree(provider("3-gram", q), AdaptiveTreePolicy())
    decoder = Decoder(provider("5-gram", p), drafter)
    prompt = [p.alphabet.index(symbol) for symbol in "In the beginning "]
    state = decoder.run(prompt, KEY, new_tokens=100)
    counted = metrics_of(state.rounds)
    assert len(state.new_tokens) == 100
    assert counted.target_calls == counted.target_batches == counted.rounds < 75
    assert {each.proposed_depth for each in state.rounds} >= {1, 2, 3}
    assert 2 <= len(counted.by_rank) <= drafter.policy.max_width
    assert counted.accepted == 100 - counted.rounds
