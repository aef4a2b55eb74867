"""The host loop: draft, score, verify, commit, until the budget is spent.

A step is a pure function of a state. If a provider fails half-way, the state before the round is
what it was, and the round can be run again.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_bool, assert_function, assert_kind, assert_length
from jaxspec.decode import request as requests
from jaxspec.decode.cached import CachedNetwork
from jaxspec.decode.commit import (
    UNLIMITED,
    Ending,
    commit,
    depth_to_draft,
    levels_within,
)
from jaxspec.decode.rounds import RoundRecord
from jaxspec.decode.state import DecodeState, RoundSummary, start_state
from jaxspec.decode.target import Scores, score_batched
from jaxspec.draft import Drafter, HostDraft, NoDraft, cut, propose_on_host
from jaxspec.draws import round_draws
from jaxspec.models.network import LanguageModel
from jaxspec.models.provider import Provider
from jaxspec.transfers import moves_data
from jaxspec.trees import Tree
from jaxspec.verify import Status, Verdict

_FINISHED: dict[Ending, Literal["budget", "stop", "capacity"] | None] = {
    Ending.NONE: None,
    Ending.BUDGET: "budget",
    Ending.STOP: "stop",
    Ending.CAPACITY: "capacity",
}

Scorer = Callable[..., Scores]
"""One of the functions of `jaxspec.decode`, or another with their arguments."""


@runtime_checkable
class LimitedScorer(Protocol):
    """A scorer that has room for small trees only, such as `jaxspec.decode.CachedNetwork`."""

    def room_after(self, length: int) -> int:
        """Return how many nodes a tree may have room for after a context of so many tokens."""


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
      stop_tokens: tokens that end the text; one is emitted, nothing after it, and no model is asked
        what comes after it.
      max_context: most tokens of prompt and text together; None for no limit but the target's own
        (`Provider.max_context`). A draft of shorter context is asked as long as it can be.
      score: how the target is asked for the rows of a tree.
    """

    target: Provider
    drafter: Drafter = NoDraft()  # noqa: RUF009 (a frozen dataclass)
    new_tokens: int = 64
    bonus: bool = True
    stop_tokens: frozenset[int] = frozenset()
    max_context: int | None = None
    score: Scorer = score_batched

    def __post_init__(self) -> None:
        """Raise ValueError for arguments of another kind, and for tokens of another vocabulary."""
        wanted = "a jaxspec.models.provider.Provider(name, vocab, ask)"
        assert_kind("target", self.target, Provider, wanted)
        assert_kind("drafter", self.drafter, Drafter, "a drafter, such as NoDraft()")
        self.drafter.validate(self.target.vocab)
        requests.assert_budget(self.new_tokens)
        assert_bool("bonus", self.bonus)
        requests.stop_ids(self.stop_tokens, self.target.vocab)
        if self.max_context is not None:
            assert_length("max_context", self.max_context)
        wanted = "a function of jaxspec.decode, such as score_batched"
        assert_function("score", self.score, wanted)

    def describe(self) -> dict[str, Any]:
        """Say in plain values what decides the text, for snapshots and records."""
        return {
            "target": self.target.name,
            "new_tokens": int(self.new_tokens),
            "bonus": self.bonus,
            "stop_tokens": sorted(self._stops),
            "max_context": None if self.max_context is None else int(self.max_context),
            **self.drafter.describe(),
        }

    @moves_data
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
        tokens = self.target.check_context(requests.tokens_of("the prompt", prompt))
        if len(tokens) > self._capacity:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, max_context is {self._capacity}"
            )
        return self._finish(start_state(tokens, key, int(self.drafter.first_depth)))

    @moves_data
    def step(self, state: DecodeState) -> tuple[DecodeState, RoundRecord]:
        """Run one round.

        Returns:
          (the state after it, the record that replays it).

        Raises:
          RowError: a provider's answer is bad; `state` can be stepped again.
          DecodeError: no token could be decided.
          ValueError: the state is finished, or none of this decoder's.
        """
        _assert_state(state)
        if state.finished:
            raise ValueError(f"the decode is finished: {state.finished}")
        draws = _round_draws(state.key, self.drafter.capacity.max_nodes, len(state.tokens) - 1)
        draft = self.propose(state, draws.draft)
        scores = self.score_draft(state, draft)
        verdict = self.drafter.rule.verify(
            draws.verify, draft.proposal, jnp.asarray(scores.rows), self.bonus
        )
        record = RoundRecord(
            position=len(state.tokens) - 1,
            rule=self.drafter.rule.name,
            target=self.target.name,
            draft=None if self.drafter.model is None else self.drafter.model.name,
            draws=draws,
            proposal=draft.proposal,
            target_rows=scores.rows,
            bonus=self.bonus,
            verdict=jax.device_get(verdict),
        )
        return self.commit(state, draft, scores, record.verdict), record

    def propose(self, state: DecodeState, pairs: jax.Array) -> HostDraft:
        """Draft for a round, within the budget, the capacity, and the contexts of draft and scorer."""
        length = len(state.tokens)
        depth = int(_depth(state.depth, self._room(state), self._draft_room(state), self.bonus))
        nodes = UNLIMITED
        if isinstance(self.score, LimitedScorer):
            nodes = max(self.score.room_after(length), 1)
        return propose_on_host(
            self.drafter,
            state.tokens,
            depth,
            pairs,
            vocab=self.target.vocab,
            stop_tokens=self._stops,
            max_nodes=nodes,
            provider=self._draft_model,
        )

    def score_draft(self, state: DecodeState, draft: HostDraft) -> Scores:
        """Ask for the target's rows of a draft.

        The target is not asked about contexts that end with a drafted stop token: nothing follows it.
        The row there is a point mass on the stop token, from which the verifier may draw a bonus
        token that is never emitted.
        """
        tree = draft.proposal.tree
        tokens = np.asarray(tree.tokens)
        is_stop = np.isin(tokens, list(self._stops))
        is_stop[0] = False
        # Without a bonus no leaf is asked about, and with it every node that is in the tree.
        is_cut = self.bonus and bool(is_stop.any())
        nodes = np.arange(tree.max_nodes)
        if is_cut:
            tree, kept = jax.device_get(_cut(tree, jnp.asarray(~is_stop)))
            nodes = kept[kept >= 0]
        if isinstance(self.score, LimitedScorer):
            tree = _narrowed(tree, max(self.score.room_after(len(state.tokens)), 1))
        scores = self.score(self.target, tree, state.tokens, bonus=self.bonus)
        assert_kind("what score returned", scores, Scores, "a jaxspec.decode.Scores(...)")
        if len(scores.rows) == len(tokens) and not is_cut:
            return scores
        rows = np.zeros((len(tokens), self.target.vocab), np.float32)
        count = min(len(nodes), len(scores.rows))
        rows[nodes[:count]] = scores.rows[:count]
        if is_cut:
            rows[is_stop, tokens[is_stop]] = 1
        return dataclasses.replace(scores, rows=rows)

    def commit(
        self, state: DecodeState, draft: HostDraft, scores: Scores, verdict: Verdict
    ) -> DecodeState:
        """Take a verdict's tokens into the text, up to a stop token; see `jaxspec.decode.commit`."""
        room, is_budget = self._room(state), self._is_budget(state)
        kept = jax.device_get(
            _commit(
                np.asarray(verdict.tokens, np.int32),
                np.int32(verdict.num_tokens),
                np.int32(verdict.num_accepted),
                room=np.int32(room),
                is_budget=np.bool_(is_budget),
                stop_tokens=np.array([*sorted(self._stops), -1], np.int32),
            )
        )
        count, accepted, ending = int(kept.count), int(kept.accepted), Ending(int(kept.ending))
        if ending == Ending.UNDECIDED:
            raise DecodeError(
                f"the round at position {len(state.tokens) - 1} decided on no token: "
                f"{Status(int(verdict.status))!r}"
            )
        tree = draft.proposal.tree
        summary = RoundSummary(
            position=len(state.tokens) - 1,
            proposed_depth=draft.depth,
            num_drafted=int(tree.num_nodes) - 1,
            num_accepted=accepted,
            num_emitted=count,
            tested=_tested(tree, verdict, count),
            target=scores.usage,
            draft=draft.usage,
            target_batches=scores.batches,
            draft_batches=draft.batches,
            status=int(verdict.status),
        )
        counts: list[Any] = [np.int32(each) for each in (state.depth, accepted, draft.depth)]
        depth = int(self.drafter.next_depth(*counts))
        requests.assert_between("the drafter's next depth", depth, 0, UNLIMITED)
        return dataclasses.replace(
            state,
            tokens=(*state.tokens, *np.asarray(verdict.tokens)[:count].tolist()),
            depth=depth,
            rounds=(*state.rounds, summary),
            finished=_FINISHED[ending],
        )

    def rounds(self, state: DecodeState) -> Iterator[tuple[DecodeState, RoundRecord]]:
        """Run to the end, round by round."""
        _assert_state(state)
        while not state.finished:
            state, record = self.step(state)
            yield state, record

    def run(self, prompt: Sequence[int], key: jax.Array) -> DecodeState:
        """Decode from a prompt to the end; see `start`."""
        return self.resume(self.start(prompt, key))

    def resume(self, state: DecodeState) -> DecodeState:
        """Decode from a state to the end."""
        _assert_state(state)
        while not state.finished:
            state, _ = self.step(state)
        return state

    @functools.cached_property
    def _stops(self) -> frozenset[int]:
        return frozenset(requests.stop_ids(self.stop_tokens, self.target.vocab))

    @functools.cached_property
    def _draft_model(self) -> Provider | None:
        """The draft model as a callable; a network with a cache."""
        model = self.drafter.model
        if not isinstance(model, LanguageModel):
            return model
        slots = self._capacity if self._capacity < UNLIMITED else 4096
        return CachedNetwork(model, slots=slots).provider()

    @property
    def _capacity(self) -> int:
        """Most tokens of a text: the least of what the decoder and the target allow."""
        limits = (self.max_context, self.target.max_context, UNLIMITED)
        return min(int(limit) for limit in limits if limit is not None)

    def _room(self, state: DecodeState) -> int:
        """Return how many tokens may still be emitted."""
        budget = int(self.new_tokens) - len(state.new_tokens)
        return min(budget, self._capacity - len(state.tokens))

    def _is_budget(self, state: DecodeState) -> bool:
        """Return whether the budget is what limits the room."""
        return int(self.new_tokens) - len(state.new_tokens) <= self._capacity - len(state.tokens)

    def _draft_room(self, state: DecodeState) -> int:
        """Return how many levels the draft can be asked about after a text."""
        draft = self._draft_model
        if draft is None:
            return UNLIMITED
        if max(state.tokens) >= draft.vocab:
            return 0
        return int(_levels(draft.max_context, np.int32(len(state.tokens))))

    def _finish(self, state: DecodeState) -> DecodeState:
        """Mark a state finished if there is no room at its beginning."""
        if self._room(state) > 0:
            return state
        ending = Ending.BUDGET if self._is_budget(state) else Ending.CAPACITY
        return dataclasses.replace(state, finished=_FINISHED[ending])


_round_draws = jax.jit(round_draws, static_argnums=1)
_commit = jax.jit(commit)
_cut = jax.jit(cut)
_levels = jax.jit(levels_within, static_argnums=0)


def _depth(wanted: int, room: int, draft_room: int, bonus: bool) -> jax.Array:
    whole = (np.int32(min(each, UNLIMITED)) for each in (wanted, room, draft_room))
    return _depth_to_draft(*whole, bonus=bonus)


_depth_to_draft = jax.jit(depth_to_draft, static_argnames="bonus")


def _narrowed(tree: Tree, room: int) -> Tree:
    """Take off padding for which a scorer has no room."""
    if room >= tree.max_nodes:
        return tree
    return Tree(
        tokens=tree.tokens[:room],
        parents=tree.parents[:room],
        children=tree.children[:room],
        level_sizes=tree.level_sizes,
    )


def _assert_state(state: Any) -> None:
    assert_kind("state", state, DecodeState, "a DecodeState, such as start and step give")


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
