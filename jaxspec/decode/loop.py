"""The host loop: draft, score, verify, commit, until the budget is spent.

A step is a pure function of a state. If a provider fails half-way, the state before the round is
what it was, and the round can be run again.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode.drafters import Draft, Drafter, NoDraft
from jaxspec.decode.replay import RoundRecord
from jaxspec.decode.state import DecodeState, RoundSummary, start_state
from jaxspec.draws import round_draws
from jaxspec.providers import Provider
from jaxspec.score import Scores, score_batched
from jaxspec.trees import Tree
from jaxspec.verify import Status, Verdict

Scorer = Callable[..., Scores]
"""One of the functions of `jaxspec.score`, or another with their arguments."""


class DecodeError(RuntimeError):
    """A round decided on no token; the state before it is intact."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes a text that has exactly the target's law.

    Attributes:
      target: the model whose law the text has.
      drafter: who proposes; default nobody, plain autoregressive decoding.
      new_tokens: how many tokens to emit, unless a stop token or the capacity ends the text before.
      bonus: whether a fully accepted path is followed by one more token of the target.
      stop_tokens: tokens that end the text; one is emitted, nothing after it.
      max_context: most tokens of prompt and text together; None for no limit.
      score: who asks the target, when.
    """

    target: Provider
    drafter: Drafter = NoDraft()
    new_tokens: int = 64
    bonus: bool = True
    stop_tokens: frozenset[int] = frozenset()
    max_context: int | None = None
    score: Scorer = score_batched

    def __post_init__(self) -> None:
        """Refuse a draft or stop tokens of another vocabulary and a budget below one."""
        draft = self.drafter.draft
        if draft is not None and draft.vocab != self.target.vocab:
            raise ValueError(
                f"draft {draft.name!r} has a vocabulary of {draft.vocab}, target "
                f"{self.target.name!r} one of {self.target.vocab}: they must be the same tokens"
            )
        if self.new_tokens < 1:
            raise ValueError(f"new_tokens is {self.new_tokens}: must be at least 1")
        for token in sorted(self.stop_tokens):
            if not 0 <= token < self.target.vocab:
                raise ValueError(
                    f"stop token {token} is outside the vocabulary of {self.target.vocab}: it would "
                    "stop nothing"
                )

    def describe(self) -> dict[str, Any]:
        """Say in plain values what decides the text, for snapshots and records."""
        return {
            "target": self.target.name,
            "new_tokens": self.new_tokens,
            "bonus": self.bonus,
            "stop_tokens": sorted(self.stop_tokens),
            "max_context": self.max_context,
            **self.drafter.describe(),
        }

    def start(self, prompt: Sequence[int], key: jax.Array) -> DecodeState:
        """Begin at a prompt of at least one token.

        Args:
          prompt: token ids.
          key: the request's typed key; the decode's draws depend on it, on the position of each
            round's root, on the node and the role, and on nothing else.

        Raises:
          ValueError: the prompt is empty, too long for `max_context`, or holds something that is
            not a token of the vocabulary; or the key is not one typed key.
        """
        prompt = self.target.check_context(prompt)
        if self.max_context is not None and len(prompt) > self.max_context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, max_context is {self.max_context}"
            )
        return self._finish(start_state(prompt, key, self.drafter.first_depth))

    def step(self, state: DecodeState) -> tuple[DecodeState, RoundRecord]:
        """Run one round.

        Returns:
          (the state after it, the record that replays it).

        Raises:
          RowError: a provider's answer is bad; `state` can be stepped again.
          DecodeError: no token could be decided.
          ValueError: the state is finished.
        """
        if state.finished:
            raise ValueError(f"the decode is finished: {state.finished}")
        draws = _round_draws(state.key, self.drafter.max_nodes, len(state.tokens) - 1)
        draft = self.propose(state, draws.draft)
        scores = self.score(self.target, draft.proposal.tree, state.tokens, bonus=self.bonus)
        verdict = self.drafter.rule.verify(
            draws.verify, draft.proposal, jnp.asarray(scores.rows), self.bonus
        )
        record = RoundRecord(
            position=len(state.tokens) - 1,
            rule=self.drafter.rule.name,
            target=self.target.name,
            draft=None if self.drafter.draft is None else self.drafter.draft.name,
            draws=draws,
            proposal=draft.proposal,
            target_rows=scores.rows,
            bonus=self.bonus,
            verdict=jax.device_get(verdict),
        )
        return self.commit(state, draft, scores, record.verdict), record

    def propose(self, state: DecodeState, pairs: jax.Array) -> Draft:
        """Draft for a round, no deeper than the budget and the capacity leave room for.

        With `bonus` a path of d tokens may emit d + 1, so one level less is drafted.
        """
        room = self._room(state)
        depth = min(state.depth, room - 1 if self.bonus else room)
        return self.drafter.propose(state.tokens, depth, pairs)

    def commit(
        self, state: DecodeState, draft: Draft, scores: Scores, verdict: Verdict
    ) -> DecodeState:
        """Take a verdict's tokens into the text, up to a stop token."""
        emitted = [int(token) for token in verdict.tokens[: int(verdict.num_tokens)]]
        if not emitted:
            raise DecodeError(
                f"the round at position {len(state.tokens) - 1} decided on no token: "
                f"{Status(int(verdict.status))!r}"
            )
        stops = [place for place, token in enumerate(emitted) if token in self.stop_tokens]
        if stops:
            emitted = emitted[: stops[0] + 1]
        accepted = min(int(verdict.num_accepted), len(emitted))
        tree = draft.proposal.tree
        summary = RoundSummary(
            position=len(state.tokens) - 1,
            proposed_depth=draft.depth,
            num_drafted=int(tree.num_nodes) - 1,
            num_accepted=accepted,
            num_emitted=len(emitted),
            tested=_tested(tree, verdict, len(emitted)),
            target=scores.usage,
            draft=draft.usage,
            target_batches=scores.batches,
            draft_batches=draft.batches,
            status=int(verdict.status),
        )
        after = dataclasses.replace(
            state,
            tokens=(*state.tokens, *emitted),
            depth=self.drafter.next_depth(state.depth, accepted, draft.depth),
            rounds=(*state.rounds, summary),
            finished="stop" if stops else None,
        )
        return self._finish(after)

    def rounds(self, state: DecodeState) -> Iterator[tuple[DecodeState, RoundRecord]]:
        """Run to the end, round by round."""
        while not state.finished:
            state, record = self.step(state)
            yield state, record

    def run(self, prompt: Sequence[int], key: jax.Array) -> DecodeState:
        """Decode from a prompt to the end; see `start`."""
        return self.resume(self.start(prompt, key))

    def resume(self, state: DecodeState) -> DecodeState:
        """Decode from a state to the end."""
        while not state.finished:
            state, _ = self.step(state)
        return state

    def _room(self, state: DecodeState) -> int:
        """Return how many tokens may still be emitted."""
        room = self.new_tokens - len(state.new_tokens)
        if self.max_context is not None:
            room = min(room, self.max_context - len(state.tokens))
        return room

    def _finish(self, state: DecodeState) -> DecodeState:
        """Mark a state finished if there is no room left."""
        if state.finished or self._room(state) > 0:
            return state
        is_budget = len(state.new_tokens) >= self.new_tokens
        return dataclasses.replace(state, finished="budget" if is_budget else "capacity")


_round_draws = jax.jit(round_draws, static_argnums=1)


def _tested(tree: Tree, verdict: Verdict, num_emitted: int) -> tuple[tuple[int, bool], ...]:
    """List, from the root on, how many siblings were tested and whether the last was accepted.

    A stop token inside the accepted path hides what was decided after it.
    """
    children = np.asarray(tree.children)
    tested = []
    for depth, node in enumerate(verdict.path[: int(verdict.num_accepted) + 1]):
        below = children[node][children[node] >= 0].tolist()
        if depth >= num_emitted or not below:
            break
        is_accepted = depth < int(verdict.num_accepted)
        rank = below.index(int(verdict.path[depth + 1])) + 1 if is_accepted else len(below)
        tested.append((rank, is_accepted))
    return tuple(tested)
