"""The host loop: budgets, stop tokens, capacity, counts by hand, draws, and providers that fail."""

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
    Metrics,
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
    options = {"target": target().provider, "new_tokens": 6, **options}
    return Decoder(drafter=DRAFTERS[name](draft().provider), **options)


# --- budgets


@each_drafter
@with_and_without_bonus
@pytest.mark.parametrize("budget", range(1, 8))
def test_a_budget_is_met_exactly_and_nothing_beyond_it_is_asked(
    name: str, bonus: bool, budget: int
) -> None:
    p, q = target(), draft()
    decoder = Decoder(p.provider, DRAFTERS[name](q.provider), budget, bonus)
    state = decoder.run(PROMPT, jax.random.key(budget))
    assert len(state.new_tokens) == budget
    assert state.tokens[: state.prompt_length] == PROMPT
    assert state.finished == "budget"
    assert sum(each.num_emitted for each in state.rounds) == budget
    assert all(each.status == 0 for each in state.rounds)
    # The row after prompt and budget would say what comes beyond them.
    assert max(map(len, p.asked + q.asked)) < len(PROMPT) + budget


@each_drafter
@with_and_without_bonus
def test_a_budget_of_one_drafts_nothing_that_could_not_be_emitted(name: str, bonus: bool) -> None:
    p, q = target(), draft()
    state = Decoder(p.provider, DRAFTERS[name](q.provider), 1, bonus).run(PROMPT, KEY)
    assert p.asked == [PROMPT]
    # Without the bonus the one token may be a drafted one; with it, it is the bonus itself.
    assert q.asked == ([] if bonus or name == "none" else [PROMPT])
    assert state.rounds[0].proposed_depth == len(q.asked)


def test_the_default_drafter_is_none_and_each_round_is_a_plain_step() -> None:
    p = target()
    state = Decoder(p.provider, new_tokens=4).run(PROMPT, KEY)
    assert p.asked == [state.tokens[: n + 1] for n in range(4)]
    assert [each.num_emitted for each in state.rounds] == [1] * 4
    assert all(each.proposed_depth == each.num_drafted == 0 for each in state.rounds)


# --- counts, worked out by hand


class Counts(NamedTuple):
    """What a decode of seven tokens asks; layers are the batches of a layered scorer."""

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
@pytest.mark.parametrize("is_batched", [False, True], ids=["single", "batched provider"])
@pytest.mark.parametrize("group", GROUPS)
def test_the_counts_are_those_worked_out_by_hand(
    kind: str, bonus: bool, is_batched: bool, group: Any
) -> None:
    by_hand = ALL_RIGHT[kind, bonus]
    for name in ("path by token", "path by block") if kind == "path" else (kind,):
        p = Model("target", counting_up, is_batched=is_batched)
        right = counting_up if kind == "path" else likely_up
        q = Model("draft", right, is_batched=is_batched)
        decoder = Decoder(CallableTarget(p.provider, group), DRAFTERS[name](q.provider), 7, bonus)
        state = decoder.run(PROMPT, KEY)
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
    decoder = Decoder(p.provider, SampledPath(q.provider, 2), new_tokens=3, bonus=bonus)
    state = decoder.run(PROMPT, KEY)
    counted = metrics_of(state.rounds)
    assert state.new_tokens == (1, 2, 0)
    assert (counted.accepted, counted.rounds, counted.target_batches) == (0, 3, 3)
    # One replacement a round. With the bonus: depth 2, 1, 0, all nodes scored. Without: depth 2, 2,
    # 1, and all but the last one scored.
    drafted = (2, 1, 0) if bonus else (2, 2, 1)
    assert [each.num_drafted for each in state.rounds] == list(drafted)
    assert counted.drafted == counted.draft_queries == sum(drafted)
    assert counted.target_queries == (3 + 2 + 1 if bonus else 2 + 2 + 1)


def test_leaves_are_asked_about_only_for_the_bonus_and_candidates_by_their_parents_context() -> (
    None
):
    for bonus in (True, False):
        p, q = Model("target", counting_up), Model("draft", likely_up)
        decoder = Decoder(p.provider, DRAFTERS["fixed tree"](q.provider), 3, bonus)
        decoder.step(decoder.start((2, 0), KEY))
        assert q.asked == [(2, 0), (2, 0, 1), (2, 0, 2)]
        leaves = [(2, 0, 1, 2), (2, 0, 2, 0)] if bonus else []
        assert p.asked == [(2, 0), (2, 0, 1), (2, 0, 2), *leaves]


# --- stop tokens and the end of the context


@with_and_without_bonus
@pytest.mark.parametrize("name", ["path by token", "path by block", "fixed tree"])
@pytest.mark.parametrize(("stop", "place"), [(1, 0), (2, 1), (0, 2)], ids=["first", "mid", "last"])
def test_nothing_after_a_stop_token_is_emitted_or_counted(
    name: str, bonus: bool, stop: int, place: int
) -> None:
    # The whole path is right, so that with the bonus one round decides on 1, 2, 0.
    right = counting_up if name.startswith("path") else likely_up
    decoder = Decoder(
        Model("target", counting_up).provider,
        DRAFTERS[name](Model("draft", right).provider),
        new_tokens=9,
        bonus=bonus,
        stop_tokens=frozenset([stop]),
    )
    state = decoder.run(PROMPT, KEY)
    assert state.new_tokens == (1, 2, 0)[: place + 1]
    assert state.finished == "stop"
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
    decoder = decoder_of(name, new_tokens=12, stop_tokens=frozenset([1]))
    ends = set()
    for seed in range(12):
        state = decoder.run(PROMPT, jax.random.key(seed))
        ends.add(state.finished)
        assert 1 not in state.new_tokens[:-1]
        assert (state.new_tokens[-1] == 1) == (state.finished == "stop")
        assert sum(each.num_emitted for each in state.rounds) == len(state.new_tokens)
        assert all(each.num_accepted <= each.num_emitted for each in state.rounds)
    assert "stop" in ends


def test_a_stop_token_that_is_the_last_of_the_budget_stops() -> None:
    decoder = Decoder(
        Model("target", counting_up).provider, new_tokens=2, stop_tokens=frozenset([2])
    )
    assert decoder.run(PROMPT, KEY).finished == "stop"


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    decoder = Decoder(
        Model("target", counting_up).provider, new_tokens=2, stop_tokens=frozenset([0])
    )
    assert decoder.run((0,), KEY).new_tokens == (1, 2)


@each_drafter
@with_and_without_bonus
@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_no_context_that_is_asked_about_is_longer_than_the_limit(
    name: str, bonus: bool, room: int
) -> None:
    p, q = target(), draft()
    prompt = (1, 2, 0)
    decoder = Decoder(
        p.provider, DRAFTERS[name](q.provider), 64, bonus, max_context=len(prompt) + room
    )
    state = decoder.run(prompt, KEY)
    assert state.finished == "capacity"
    assert len(state.new_tokens) == room
    assert max(map(len, p.asked + q.asked)) < len(prompt) + room


@each_drafter
def test_a_prompt_that_fills_the_context_is_finished_at_once(name: str) -> None:
    p, q = target(), draft()
    decoder = Decoder(p.provider, DRAFTERS[name](q.provider), max_context=3)
    state = decoder.run((1, 2, 0), KEY)
    assert (state.finished, state.new_tokens, state.rounds) == ("capacity", (), ())
    assert p.calls == q.calls == []
    with pytest.raises(ValueError, match="the decode is finished: capacity"):
        decoder.step(state)


def test_a_budget_that_ends_with_the_context_is_met() -> None:
    state = decoder_of("path by token", new_tokens=3, max_context=4).run(PROMPT, KEY)
    assert (state.finished, len(state.new_tokens)) == ("budget", 3)


# --- what is refused at the start


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "the context is empty"),
        ((0, 3), "entry 1 is 3, outside the vocabulary of 3"),
        ((-1,), "entry 0 is -1"),
        ((0.5,), "a sequence of token ids"),
        (((0, 1), (1, 2)), "a sequence of token ids"),
        ((0, 1, 2, 0, 1, 2), "the prompt has 6 tokens, max_context is 5"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, message: str) -> None:
    decoder = decoder_of("path by token", max_context=5)
    with pytest.raises(ValueError, match=message):
        decoder.start(prompt, KEY)


@pytest.mark.parametrize(
    "key", [0, None, jax.random.PRNGKey(0), jax.random.split(jax.random.key(0), 2)]
)
def test_a_key_that_is_not_one_typed_key_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match="key must be one typed key"):
        decoder_of("none").start(PROMPT, key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new_tokens": 0}, "new_tokens is 0"),
        ({"stop_tokens": frozenset([1, 3])}, "stop token 3 is outside the vocabulary of 3"),
        ({"stop_tokens": frozenset([-1])}, "stop token -1"),
    ],
)
def test_a_decoder_that_could_not_do_what_it_says_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_of("none", **options)


def test_a_draft_of_fewer_tokens_is_not_asked_about_those_that_it_lacks() -> None:
    p = target()
    asked = []

    def narrow(context: Context) -> list[float]:
        asked.append(context)
        return [0.5, 0.5]

    decoder = Decoder(p.provider, SampledPath(Provider("narrow", 2, narrow), 2), 9)
    for seed in range(4):
        assert len(decoder.run(PROMPT, jax.random.key(seed)).new_tokens) == 9
    assert asked
    assert all(max(context) < 2 for context in asked)


# --- draws


@each_drafter
def test_a_key_decides_the_text_whatever_else_is_decoded_in_between(name: str) -> None:
    decoder = decoder_of(name, new_tokens=12)
    keys = [jax.random.key(seed) for seed in (3, 4)]
    alone = [decoder.run(PROMPT, key) for key in keys]
    assert alone[0].new_tokens != alone[1].new_tokens
    states = [decoder.start(PROMPT, key) for key in keys]
    for turn in itertools.cycle([1, 0, 0]):
        if not states[turn].finished:
            states[turn], _ = decoder.step(states[turn])
        if all(state.finished for state in states):
            break
    assert states == alone


@each_drafter
def test_every_round_has_the_draws_of_its_key_and_root_and_none_is_used_twice(name: str) -> None:
    decoder = decoder_of(name, new_tokens=12)
    records = [record for _, record in decoder.rounds(decoder.start((1, 0), KEY))]
    positions = [record.position for record in records]
    assert positions == sorted(set(positions))
    assert positions[0] == 1
    used = []
    for record in records:
        expected = round_draws(KEY, decoder.drafter.max_nodes, record.position)
        for mine, theirs in zip(
            jax.tree.leaves(record.draws), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        used += [np.asarray(leaf).ravel().tolist() for leaf in jax.tree.leaves(record.draws)]
    numbers = [number for part in used for number in part]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("name", ["none", "path by token", "path by block", "fixed tree"])
def test_a_text_goes_on_alike_from_equal_tokens_whatever_rounds_led_there(name: str) -> None:
    # A prompt that holds what was decoded: the root stands at the same position, after the same
    # tokens, and nothing else may matter.
    whole = decoder_of(name, new_tokens=10)
    reached, _ = whole.step(whole.start(PROMPT, KEY))
    rest = decoder_of(name, new_tokens=10 - len(reached.new_tokens))
    again = rest.run(reached.tokens, KEY)
    assert again.tokens == whole.resume(reached).tokens
    assert again.rounds == whole.resume(reached).rounds[1:]


@each_drafter
@with_and_without_bonus
def test_a_step_is_its_parts_proposal_scores_verdict_commit(name: str, bonus: bool) -> None:
    decoder = decoder_of(name, bonus=bonus)
    state = decoder.start(PROMPT, KEY)
    while not state.finished:
        after, record = decoder.step(state)
        draws = round_draws(KEY, decoder.drafter.max_nodes, len(state.tokens) - 1)
        made = decoder.propose(state, draws.draft)
        scores = decoder.score_draft(state, made)
        np.testing.assert_array_equal(record.target_rows, scores.rows)
        verdict = decoder.drafter.rule.verify(draws.verify, made.proposal, scores.rows, bonus)
        assert decoder.commit(state, made, scores, jax.device_get(verdict)) == after
        state = after


# --- greedy


@each_drafter
@with_and_without_bonus
def test_a_target_at_temperature_0_gives_exactly_the_greedy_text(name: str, bonus: bool) -> None:
    def logits(context: Context) -> np.ndarray:
        return np.random.default_rng([9, *context]).normal(size=VOCAB)

    greedy = [0]
    for _ in range(9):
        greedy.append(int(logits(tuple(greedy)).argmax()))
    cold = Provider("cold", VOCAB, logits, transform=Softmax(temperature=0))
    for seed in range(3):
        decoder = decoder_of(name, target=cold, new_tokens=9, bonus=bonus)
        assert decoder.run(PROMPT, jax.random.key(seed)).tokens == tuple(greedy)


# --- providers that fail


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
    state = decoder.start(PROMPT, KEY)
    while True:
        before = dataclasses.asdict(state)
        try:
            state, _ = decoder.step(state)
        except error:
            assert dataclasses.asdict(state) == before
            return state
        assert not state.finished, "the provider did not fail"


@pytest.mark.parametrize("failing", ["target", "draft"])
@pytest.mark.parametrize("is_batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", ["path by block", "adaptive tree"])
def test_a_round_that_fails_leaves_its_state_and_goes_on_once_the_provider_is_mended(
    name: str, failure: str, is_batched: bool, failing: str
) -> None:
    spoil, error = FAILURES[failure]
    models = {"target": target(is_batched=is_batched), "draft": draft(is_batched=is_batched)}
    decoder = Decoder(models["target"].provider, DRAFTERS[name](models["draft"].provider), 14)
    undisturbed = decoder.run(PROMPT, KEY)

    bad, given = models[failing], iter(range(10**6))
    sound = bad.row
    bad.row = lambda context: spoil(sound(context)) if next(given) == 6 else sound(context)
    state = run_until_it_fails(decoder, error)
    assert state.rounds == undisturbed.rounds[: len(state.rounds)]
    assert state.tokens == undisturbed.tokens[: len(state.tokens)]
    bad.row = sound
    assert decoder.resume(state) == undisturbed


@pytest.mark.parametrize("failing", ["target", "draft"])
def test_rows_out_of_order_are_refused_and_the_state_goes_on_once_they_are_in_order(
    failing: str,
) -> None:
    is_mended = False

    def backwards(queries: list[Query]) -> list[Answer]:
        rows = random_rows(1 if failing == "target" else 2)
        answers = [Answer(query.id, rows(query.context)) for query in queries]
        return answers if is_mended else answers[::-1]

    bad = Provider(failing, VOCAB, backwards, is_batched=True)
    drafter = DRAFTERS["fixed tree"](bad if failing == "draft" else draft().provider)
    decoder = Decoder(bad if failing == "target" else target().provider, drafter, 8)
    state = run_until_it_fails(decoder, AnswerError)
    is_mended = True
    assert decoder.resume(state) == decoder.run(PROMPT, KEY)


def test_an_error_says_which_model_which_context_and_which_value() -> None:
    bad = Model("target", lambda context: not_a_number([0.5, 0.25, 0.25]))
    decoder = Decoder(bad.provider, new_tokens=2)
    with pytest.raises(js.RowError, match=r"target: row for context \(0,\): entry 1 is nan"):
        decoder.run(PROMPT, KEY)


def test_a_round_that_decides_on_nothing_is_an_error_that_says_why() -> None:
    decoder = decoder_of("none")
    state = decoder.start(PROMPT, KEY)
    _, record = decoder.step(state)
    made = decoder.propose(state, record.draws.draft)
    scores = decoder.score_draft(state, made)
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


def test_two_hundred_tokens_of_real_text_with_the_adaptive_tree() -> None:
    def provider(name: str, model: Any) -> Provider:
        def ask(queries: list[Query]) -> list[Answer]:
            # Rows depend on the last symbols only, so contexts are cut to one length.
            latest = [query.context[1 - model.order :] for query in queries]
            rows = np.asarray(model.rows(latest))
            return [Answer(query.id, row) for query, row in zip(queries, rows, strict=True)]

        return Provider(name, model.vocabulary, ask, is_batched=True)

    p, q = bundled_ngrams()
    drafter = AdaptiveTree(provider("3-gram", q), AdaptiveTreePolicy())
    decoder = Decoder(provider("5-gram", p), drafter, new_tokens=200)
    prompt = [p.alphabet.index(symbol) for symbol in "In the beginning "]
    state = decoder.run(prompt, KEY)
    counted: Metrics = metrics_of(state.rounds)
    assert len(state.new_tokens) == 200
    assert counted.target_calls == counted.target_batches == counted.rounds < 150
    assert {each.proposed_depth for each in state.rounds} >= {1, 2, 3}
    assert 2 <= len(counted.by_rank) <= drafter.policy.max_width
    assert counted.accepted == 200 - counted.rounds
