"""Drafts and decoders that are changed: the law is wrong exactly where the change is a fault."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.small_texts import (
    BLOCK,
    DRAFT,
    DRAFTERS,
    PATH,
    PROMPT,
    TARGET,
    TREE,
    VOCAB,
    assert_lossless,
)

import jaxspec as js
from jaxspec.audit import DecodingLaw, decoding_law
from jaxspec.decode import CallableTarget, Decoder, DecodeState, Ending, Scores
from jaxspec.draft import Drafter, FixedTree, HostDraft, SampledPath
from jaxspec.models import Provider
from jaxspec.trees import make_tree

Propose = Callable[[DecodeState, jax.Array], HostDraft]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed(Decoder):
    """Proposes what `change` makes of what the drafter would propose."""

    change: Callable[[Propose, DecodeState, jax.Array], HostDraft]

    def propose(self, state: DecodeState, pairs: jax.Array) -> HostDraft:
        return self.change(functools.partial(Decoder.propose, self), state, pairs)


def is_rejected(law: DecodingLaw) -> bool:
    """Whether the law itself is wrong, seen in an audit without a miss."""
    return law.misses == 0 and (law.tv > 1e-3 or law.impossible > 0)


def law_of(
    drafter: Drafter, kind: type[Decoder] = Decoder, target: Any = TARGET, **options: Any
) -> DecodingLaw:
    given = {name: options.pop(name) for name in ("bonus", "change") if name in options}
    decoder = kind(target, drafter, **{"bonus": False, **given})
    return decoding_law(decoder, PROMPT, **{"new_tokens": 2, **options})


def changed(drafter: Drafter, change: Callable[..., HostDraft], **options: Any) -> DecodingLaw:
    return law_of(drafter, Changed, change=change, **options)


def with_rows(draft: HostDraft, rows: np.ndarray) -> HostDraft:
    proposal = js.WithReplacement(tree=draft.proposal.tree, draft_rows=jnp.asarray(rows))
    return dataclasses.replace(draft, proposal=proposal)


def recorded_colder(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
    draft = propose(state, pairs)
    rows = np.asarray(draft.proposal.draft_rows) ** 2
    return with_rows(draft, rows / np.maximum(rows.sum(axis=1, keepdims=True), 1e-30))


def recorded_uniform(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
    # The middle of each token's share there gives this very token.
    return with_rows(propose(state, pairs), np.full((2, VOCAB), 1 / VOCAB, np.float32))


def greedy(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
    draft = propose(state, pairs)
    tokens = [state.tokens[-1]]
    for _ in range(draft.depth):
        (row,), _ = DRAFT.rows([(*state.tokens[:-1], *tokens)])
        tokens.append(int(row.argmax()))
    tree = make_tree(tokens, range(-1, draft.depth), max_nodes=3, max_depth=2)
    rows, _ = DRAFT.rows([(*state.tokens[:-1], *tokens[: n + 1]) for n in range(2)])
    proposal = js.WithReplacement(tree=tree, draft_rows=jnp.asarray(rows))
    return dataclasses.replace(draft, proposal=proposal)


def up_to_improbable(
    least: float, kept: int, propose: Propose, state: DecodeState, pairs: jax.Array
) -> HostDraft:
    """End the draft at its first token of low probability: drop it (kept 0) or propose it (1)."""
    draft = propose(state, pairs)
    tokens = np.asarray(draft.proposal.tree.tokens)
    rows = np.asarray(draft.proposal.draft_rows)
    improbable = [n for n in range(draft.depth) if rows[n, tokens[n + 1]] < least]
    depth = improbable[0] + kept if improbable else draft.depth
    return propose(dataclasses.replace(state, depth=depth), pairs)


def trimmed(*, drops: bool, rule: str = "token") -> DecodingLaw:
    even = Provider("even", VOCAB, lambda _: [0.5, 0.5, 0.0])
    draft = Provider("nine to one", VOCAB, lambda _: [0.9, 0.1, 0.0])
    change = functools.partial(up_to_improbable, 0.3, 0 if drops else 1)
    return changed(SampledPath(draft, 2, js.RULES[rule]), change, target=even)


def without_cap(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
    """Draft the depth that the policy wants, without regard to the budget."""
    request = dataclasses.replace(state.request, new_tokens=99)
    return propose(dataclasses.replace(state, request=request), pairs)


@dataclasses.dataclass(frozen=True)
class KeepsOn(Decoder):
    """Keeps the drafted tokens after one that was rejected and replaced."""

    def commit(
        self, state: DecodeState, draft: HostDraft, scores: Scores, verdict: js.Verdict
    ) -> DecodeState:
        drafted = np.asarray(draft.proposal.tree.tokens)[1 : draft.depth + 1]
        tokens = np.array(verdict.tokens)
        count = int(verdict.num_tokens)
        tokens[count : draft.depth] = drafted[count:]
        count = max(count, draft.depth)
        kept = dataclasses.replace(verdict, tokens=tokens, num_tokens=np.int32(count))
        return super().commit(state, draft, scores, kept)


@dataclasses.dataclass(frozen=True)
class RunsOver(Decoder):
    """Drafts below a stop token and takes what comes after it into the text."""

    def propose(self, state: DecodeState, pairs: jax.Array) -> HostDraft:
        return Decoder.propose(self, unstopped(state), pairs)

    def commit(
        self, state: DecodeState, draft: HostDraft, scores: Scores, verdict: js.Verdict
    ) -> DecodeState:
        after = Decoder.commit(self, unstopped(state), draft, scores, verdict)
        is_stopped = set(state.request.stop_tokens) & set(after.new_tokens)
        ending = Ending.STOP if is_stopped and after.ending == Ending.NONE else after.ending
        return dataclasses.replace(after, request=state.request, ending=ending)


def unstopped(state: DecodeState) -> DecodeState:
    return dataclasses.replace(state, request=dataclasses.replace(state.request, stop_tokens=()))


class OneLate(CallableTarget):
    """Scores each node by the context that lacks the last token: one position late."""

    def rows(self, tree: js.Tree, context: Sequence[int], *, bonus: bool = False) -> Scores:
        scores = super().rows(tree, context, bonus=bonus)
        late = super().rows(tree, context, bonus=True).rows
        parents = np.asarray(tree.parents)
        rows = np.where(parents[:, None] >= 0, late[parents], late[:1])
        return dataclasses.replace(scores, rows=rows)


FAULTS: dict[str, Callable[[], DecodingLaw]] = {
    "recorded draft rows colder than those drawn from": lambda: changed(PATH, recorded_colder),
    "the same, verified as a block": lambda: changed(BLOCK, recorded_colder),
    "uniform recorded rows for nearly uniform draws": lambda: changed(
        SampledPath(Provider("nearly uniform", VOCAB, lambda _: [0.45, 0.3, 0.25]), 2),
        recorded_uniform,
    ),
    "the most probable tokens with the row of a sample": lambda: changed(PATH, greedy),
    "a depth that looks at this round's draws": lambda: changed(
        PATH, functools.partial(up_to_improbable, 0.4, 0)
    ),
    "a sampled token dropped for its low probability": lambda: trimmed(drops=True),
    "a sampled token dropped, verified as a block": lambda: trimmed(drops=True, rule="block"),
    "a last round without a cap": lambda: changed(PATH, without_cap, new_tokens=1),
    "a last round of an adaptive tree without a cap": lambda: changed(
        DRAFTERS["adaptive tree"], without_cap, bonus=True
    ),
    "drafted tokens kept after a rejected one": lambda: law_of(PATH, KeepsOn),
    "tokens after a stop token": lambda: law_of(PATH, RunsOver, stop_tokens=[1]),
    "rows of the wrong position": lambda: law_of(PATH, target=OneLate(TARGET)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_decoder_that_is_not_lossless_is_seen(name: str) -> None:
    assert is_rejected(FAULTS[name]())


def test_a_draft_that_drops_its_improbable_token_changes_the_law_of_the_first_token() -> None:
    law = trimmed(drops=True)
    first = [sum(p for text, p in law.texts.items() if text[0] == token) for token in (0, 1)]
    assert first == pytest.approx([0.55, 0.45], abs=1e-6)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_that_stops_after_its_improbable_token_is_lossless(rule: str) -> None:
    assert_lossless(trimmed(drops=False, rule=rule))


KILL_P, KILL_Q = np.array([1, 3, 7, 9]) / 20, np.array([12, 3, 4, 1]) / 20
"""The row pair of the known-bad variants of one round: there the biases are known exactly."""


def probable(tokens: list[int]) -> list[int]:
    return [token for token in tokens if KILL_Q[token] > 0.18]


def by_score(tokens: list[int]) -> list[int]:
    return sorted(tokens, key=lambda token: -KILL_Q[token])


def without_repeats(tokens: list[int]) -> list[int]:
    return list(dict.fromkeys(tokens))


def with_the_last_improbable_dropped(tokens: list[int]) -> list[int]:
    return tokens if KILL_Q[tokens[1]] > 0.18 else tokens[:1]


@pytest.mark.parametrize(
    ("rule", "choose", "tv"),
    [
        ("with_replacement", list, 0),
        ("with_replacement", probable, 18 / 125),
        ("with_replacement", by_score, 9 / 80),
        ("with_replacement", without_repeats, 29 / 500),
        ("without_replacement", list, 0),
        ("without_replacement", with_the_last_improbable_dropped, 3 / 40),
    ],
)
def test_sampled_siblings_may_not_be_dropped_sorted_or_merged_by_looking_at_them(
    rule: str, choose: Callable[[list[int]], list[int]], tv: float
) -> None:
    def siblings(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
        draft = propose(dataclasses.replace(state, depth=1), pairs)
        tokens = choose(np.asarray(draft.proposal.tree.tokens)[1:].tolist())
        tree = make_tree(
            [state.tokens[-1], *tokens],
            [-1, *[0] * len(tokens)],
            max_nodes=3,
            max_children=2,
            max_depth=1,
            distinct_siblings=False,
        )
        return dataclasses.replace(draft, proposal=dataclasses.replace(draft.proposal, tree=tree))

    drafter = FixedTree(Provider("uneven", 4, lambda _: KILL_Q), (2,), js.RULES[rule])
    target = Provider("kill row", 4, lambda _: KILL_P)
    law = decoding_law(Changed(target, drafter, bonus=False, change=siblings), PROMPT, new_tokens=1)
    assert law.misses == 0
    assert law.tv == pytest.approx(tv, abs=1e-6)


def test_a_draft_that_draws_by_another_cut_of_its_draws_is_lossless() -> None:
    def in_reverse(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
        return propose(state, 1 - 2.0**-24 - pairs)

    assert_lossless(changed(PATH, in_reverse))


def test_candidates_picked_at_random_and_verified_as_point_masses_are_lossless() -> None:
    def at_random(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
        draft = propose(state, pairs)
        tree = draft.proposal.tree
        tokens = np.asarray(tree.tokens)
        shifted = (tokens + int(3 * pairs[1, 1])) % VOCAB
        moved = np.where(np.asarray(tree.parents) >= 0, shifted, tokens)
        tree = dataclasses.replace(tree, tokens=jnp.asarray(moved))
        return dataclasses.replace(draft, proposal=js.PointMass(tree=tree))

    assert_lossless(changed(TREE, at_random))


def test_the_depth_of_the_adaptive_tree_changes_within_the_law_that_is_proved() -> None:
    depths: set[tuple[int, int]] = set()

    def watched(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
        draft = propose(state, pairs)
        depths.add((len(state.tokens), draft.depth))
        return draft

    assert_lossless(changed(DRAFTERS["adaptive tree"], watched, new_tokens=3))
    # Both depths occurred at one context length, so it is the past that decided.
    assert {(1, 1), (2, 2), (2, 1)} <= depths


def test_a_draft_with_hidden_state_is_an_error_or_a_miss() -> None:
    calls = iter(range(10**9))
    turns = Provider("turns", VOCAB, lambda _: np.eye(VOCAB)[next(calls) % VOCAB])
    with pytest.raises(ValueError, match="is the draft a pure function"):
        law_of(SampledPath(turns, 2))
    calls = iter(range(10**9))
    changes = Provider("changes", VOCAB, lambda _: np.eye(VOCAB)[int(next(calls) > 6)])
    assert law_of(SampledPath(changes, 2), new_tokens=1).misses > 0


def test_a_decoder_that_draws_its_own_random_numbers_fails() -> None:
    def peek(propose: Propose, state: DecodeState, pairs: jax.Array) -> HostDraft:
        accept = js.round_draws(state.request.key, 3, len(state.tokens) - 1).verify.accept
        return propose(dataclasses.replace(state, depth=1 if accept[1] < 0.5 else 0), pairs)

    with pytest.raises((TypeError, ValueError), match="key"):
        changed(PATH, peek)
