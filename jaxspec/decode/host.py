"""The host loop: draft, score, verify, commit, until the budget is spent.

A step is a pure function of a state. If a model fails half-way, the state before the round is intact,
and the round can be run again.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_bool, assert_kind, assert_length
from jaxspec.decode.cached import CachedNetwork
from jaxspec.decode.commit import (
    UNLIMITED,
    Ending,
    commit,
    depth_to_draft,
    levels_within,
)
from jaxspec.decode.request import Options, requests_of
from jaxspec.decode.rounds import RoundRecord
from jaxspec.decode.state import DecodeState, RoundSummary
from jaxspec.decode.target import Scores, Target, as_target, node_contexts
from jaxspec.draft import Drafter, HostDraft, NoDraft
from jaxspec.draft.cut import cut
from jaxspec.draft.drivers import depth_after, propose_on_host
from jaxspec.draws import DrawRound, assert_draw_round, round_draws
from jaxspec.models.network import LanguageModel
from jaxspec.models.provider import Provider
from jaxspec.storage import plain, shown
from jaxspec.transfers import moves_data
from jaxspec.trees import Tree
from jaxspec.verify import Status, Verdict

_jitted_draws = functools.lru_cache(maxsize=8)(functools.partial(jax.jit, static_argnums=1))
_commit = jax.jit(commit)
_cut = jax.jit(cut)
_levels_within = jax.jit(levels_within, static_argnums=0)
_depth_to_draft = jax.jit(depth_to_draft, static_argnames="bonus")


class DecodeError(RuntimeError):
    """A round decided on no token; the state before it is intact."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes a text that has exactly the target's law.

    Attributes:
      target: the model whose law the text has: a `Target`, or a `Provider`.
      drafter: default none, plain autoregressive decoding.
      bonus: whether a fully accepted path is followed by one more token of the target.
      max_context: most tokens of prompt and text together; None for no limit but the target's own.
        A draft of shorter context is asked as long as it can be.
      draws: makes a round's draws from (key, number of nodes, root position), as in the compiled loop.
        Another one is for audits: see `jaxspec.draws.DrawRound` for what it must not do.
    """

    target: Target | Provider
    drafter: Drafter = NoDraft()  # noqa: RUF009 (a frozen dataclass)
    _: dataclasses.KW_ONLY
    bonus: bool = True
    max_context: int | None = None
    draws: DrawRound = round_draws

    def __post_init__(self) -> None:
        """Raise ValueError for arguments of another kind, and for tokens of another vocabulary."""
        assert_kind("drafter", self.drafter, Drafter, "a drafter, such as NoDraft()")
        self.drafter.validate(self._target.vocab)
        assert_bool("bonus", self.bonus)
        if self.max_context is not None:
            assert_length("max_context", self.max_context)
        assert_draw_round(self.draws)

    def describe(self) -> dict[str, Any]:
        """Return JSON-serialisable values that decide the text, for states and records."""
        return {
            "target": self._target.name,
            "bonus": self.bonus,
            "max_context": None if self.max_context is None else int(self.max_context),
            **self.drafter.describe(),
        }

    @moves_data
    def start(
        self, prompt: Sequence[int] | np.ndarray, key: jax.Array, **options: Unpack[Options]
    ) -> DecodeState:
        """Begin at a prompt.

        Args:
          prompt: token ids, at least one.
          key: the request's typed key; the draws depend on it, on the position of each round's root,
            on the node and the role, and on nothing else.
          **options: new_tokens, stop_tokens, temperature and the other settings of `Options`.

        Raises:
          ValueError: naming the argument and its value.
        """
        vocab, most = self._target.vocab, self._capacity
        (request,) = requests_of(
            [prompt], key, options, vocab=vocab, max_context=most, is_batch=False
        )
        is_full = len(request.prompt) >= most
        return DecodeState(
            request=request,
            decoder=self._description,
            tokens=request.prompt,
            depth=int(self.drafter.first_depth),
            ending=Ending.CAPACITY if is_full else Ending.NONE,
        )

    @moves_data
    def step(self, state: DecodeState) -> tuple[DecodeState, RoundRecord]:
        """Run one round.

        Returns:
          (the state after it, the record that replays it).

        Raises:
          RowError: a model's answer is bad; `state` can be stepped again.
          DecodeError: no token could be decided.
          ValueError: the state is finished, or was begun by another decoder.
        """
        self._assert_own(state)
        if state.ending != Ending.NONE:
            raise ValueError(f"the decode is finished: {state.ending.name.lower()}")
        position, rule = len(state.tokens) - 1, self.drafter.rule
        draws = _jitted_draws(self.draws)(
            state.request.key, self.drafter.capacity.max_nodes, position
        )
        draft = self.propose(state, draws.draft)
        if draft.pairs is not None:
            draws = dataclasses.replace(draws, draft=draft.pairs)
        scores = self.score(state, draft)
        rows = jnp.asarray(scores.rows)
        verdict = jax.device_get(rule.verify(draws.verify, draft.proposal, rows, self.bonus))
        record = RoundRecord(
            position=position,
            rule=rule.name,
            target=self._target.name,
            draft=None if self._draft_model is None else self._draft_model.name,
            draws=draws,
            proposal=draft.proposal,
            target_rows=scores.rows,
            bonus=self.bonus,
            verdict=verdict,
        )
        return self.commit(state, draft, scores, verdict), record

    def propose(self, state: DecodeState, pairs: jax.Array) -> HostDraft:
        """Draft for a round, within the budget, the capacity, and the contexts of both models.

        Args:
          state: where the round begins.
          pairs: float32 [N, 2], for each node the pair of uniforms to draw its candidate with.
        """
        room = self._limit(state) - len(state.tokens)
        wanted = (min(each, UNLIMITED) for each in (state.depth, room, self._draft_room(state)))
        return propose_on_host(
            self.drafter,
            state.tokens,
            int(_depth_to_draft(*map(np.int32, wanted), bonus=self.bonus)),
            pairs,
            vocab=self._target.vocab,
            stop_tokens=state.request.stop_tokens,
            max_nodes=self._node_room(state),
            provider=self._draft_model,
            apply=state.request.apply,
        )

    def score(self, state: DecodeState, draft: HostDraft) -> Scores:
        """Ask for the target's rows of a draft, at the request's settings.

        The target is not asked about contexts that end with a drafted stop token: nothing follows it.
        The row there is a point mass on the stop token, from which the verifier may draw a bonus
        token that is never emitted.
        """
        tree = draft.proposal.tree
        tokens = np.asarray(tree.tokens)
        is_stop = np.isin(tokens, state.request.stop_tokens)
        is_stop[0] = False
        # Without a bonus no leaf is asked about, and with it every node that is in the tree.
        is_cut = self.bonus and bool(is_stop.any())
        nodes = np.arange(tree.max_nodes)
        if is_cut:
            tree, kept = jax.device_get(_cut(tree, jnp.asarray(~is_stop)))
            nodes = kept[kept >= 0]
        tree = _narrowed(tree, self._node_room(state))
        scores = self._target.rows(tree, state.tokens, bonus=self.bonus)
        rows = scores.rows
        if not state.request.is_neutral:
            rows = state.request.apply(rows, node_contexts(tree, state.tokens))
        if len(rows) < len(tokens) or is_cut:
            given, count = rows, min(len(nodes), len(rows))
            rows = np.zeros((len(tokens), self._target.vocab), np.float32)
            rows[nodes[:count]] = given[:count]
            if is_cut:
                rows[is_stop, tokens[is_stop]] = 1
        return dataclasses.replace(scores, rows=rows)

    def commit(
        self, state: DecodeState, draft: HostDraft, scores: Scores, verdict: Verdict
    ) -> DecodeState:
        """Take a verdict's tokens into the text, up to a stop token; see `jaxspec.decode.commit`."""
        room = np.int32(self._limit(state) - len(state.tokens))
        is_budget = np.bool_(state.request.is_budget(self._capacity))
        kept = jax.device_get(_commit(verdict, room, is_budget, _stops(state)))
        count, accepted, ending = int(kept.count), int(kept.accepted), Ending(int(kept.ending))
        position = len(state.tokens) - 1
        if ending == Ending.UNDECIDED:
            status = Status(int(verdict.status))
            raise DecodeError(f"the round at position {position} decided on no token: {status!r}")
        tree = draft.proposal.tree
        summary = RoundSummary(
            position=position,
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
        depth = int(depth_after(self.drafter, *counts))
        return dataclasses.replace(
            state,
            tokens=(*state.tokens, *np.asarray(verdict.tokens)[:count].tolist()),
            depth=depth,
            rounds=(*state.rounds, summary),
            ending=ending,
        )

    def rounds(self, state: DecodeState) -> Iterator[tuple[DecodeState, RoundRecord]]:
        """Run to the end, round by round; see `step`."""
        self._assert_own(state)
        while state.ending == Ending.NONE:
            state, record = self.step(state)
            yield state, record

    def run(
        self, prompt: Sequence[int] | np.ndarray, key: jax.Array, **options: Unpack[Options]
    ) -> DecodeState:
        """Decode from a prompt to the end; arguments as for `start`."""
        return self.resume(self.start(prompt, key, **options))

    def resume(self, state: DecodeState) -> DecodeState:
        """Decode from a state to the end."""
        for after, _ in self.rounds(state):
            state = after
        return state

    @functools.cached_property
    def _target(self) -> Target:
        return as_target(self.target)

    @functools.cached_property
    def _draft_model(self) -> Provider | None:
        """The draft model as a callable; of a network one with a cache."""
        model = self.drafter.model
        if not isinstance(model, LanguageModel):
            return model
        slots = self._capacity if self._capacity < UNLIMITED else 4096
        return CachedNetwork(model, slots=slots).provider()

    @functools.cached_property
    def _capacity(self) -> int:
        """Most tokens of a text: the least of what the decoder and the target allow."""
        limits = (self.max_context, self._target.max_context, UNLIMITED)
        return min(int(limit) for limit in limits if limit is not None)

    @functools.cached_property
    def _description(self) -> dict[str, Any]:
        return plain(self.describe(), "the decoder's description")

    def _limit(self, state: DecodeState) -> int:
        return state.request.limit(self._capacity)

    def _node_room(self, state: DecodeState) -> int:
        """Return how many nodes the target has room for, the root counted."""
        return max(self._target.room_after(len(state.tokens)), 1)

    def _draft_room(self, state: DecodeState) -> int:
        """Return how many levels the draft can be asked about after a text."""
        draft = self._draft_model
        if draft is None:
            return UNLIMITED
        if max(state.tokens) >= draft.vocab:
            return 0
        return int(_levels_within(draft.max_context, np.int32(len(state.tokens))))

    def _assert_own(self, state: DecodeState) -> None:
        assert_kind("state", state, DecodeState, "a DecodeState, such as start and step give")
        ours = self._description
        for name in sorted({*state.decoder, *ours}):
            if state.decoder.get(name) != ours.get(name):
                raise ValueError(
                    f"the state was begun by another decoder: {name} was "
                    f"{shown(state.decoder.get(name))}, is now {shown(ours.get(name))}"
                )


def _stops(state: DecodeState) -> np.ndarray:
    return np.array([*state.request.stop_tokens, -1], np.int32)


def _narrowed(tree: Tree, room: int) -> Tree:
    """Take off padding for which a target has no room."""
    if room >= tree.max_nodes:
        return tree
    arrays = {name: getattr(tree, name)[:room] for name in ("tokens", "parents", "children")}
    return dataclasses.replace(tree, **arrays)


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
