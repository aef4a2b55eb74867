"""The compiled loop: draft, score, verify and commit in one program, over a batch.

It is one `while_loop` over the batch, with parts for each sequence inside: a `vmap`ped loop would copy
its caches in every round. Finished sequences are frozen. Caches are written in place: a block goes to
the slots after the text, and only accepted slots of it are moved.

In the shape descriptions B denotes the batch, N, D the capacity of a tree (nodes, depth), S the slots
of a text, V the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import assert_bool, assert_kind, assert_length, assert_whole
from jaxspec.decode.commit import (
    UNLIMITED,
    Ending,
    commit,
    depth_to_draft,
    levels_within,
    proposed_depth,
)
from jaxspec.decode.request import Options, arrays_of, requests_of, sampling_of, validated
from jaxspec.decode.state import BatchState, DecodedText, Source
from jaxspec.draft import Drafter, NoDraft, Proposed, View
from jaxspec.draft.drivers import depth_after, propose_compiled
from jaxspec.draws import DrawRound, Draws, RoundDraws, assert_draw_round, round_draws
from jaxspec.models.batched import BatchedNetwork, per_sequence
from jaxspec.models.network import (
    Cache,
    CacheError,
    LanguageModel,
    assert_language_model,
    assert_same_tokens,
    shapes_of,
)
from jaxspec.proposals import Proposal
from jaxspec.sampling import Sampling
from jaxspec.transfers import moves_data
from jaxspec.trees import Tree, ancestor_mask, node_depths
from jaxspec.verify import Verdict

_LANES = 8  # slots are rounded up to a multiple of this
_MOST = np.iinfo(np.int32).max
_COUNTS = ("status", "rounds", "drafted", "accepted")


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledDecoder:
    """Decodes a batch of texts that have exactly the target's law, in one compiled loop.

    One program is compiled for a batch size; prompts, lengths, budgets, temperatures, filters, stop
    tokens and keys are arrays. Make a decoder once and use it again.

    Attributes:
      target: the network whose law the texts have.
      drafter: default none, plain decoding.
      max_context: most tokens of a text, prompt included. A draft network of shorter context drafts as
        long as it can, and the text goes on plainly.
      bonus: whether a fully accepted path is followed by one more token of the target.
      max_stop_tokens: room for stop tokens.
      prefill_width: tokens of a prompt run at a time.
      token_settings: whether requests may have logit_bias, allowed_tokens and penalties, for which a
        state then holds two arrays [B, V].
      draws: makes a round's draws from (key, number of nodes, root position), as in the host loop.
        Another one is for audits: see `jaxspec.draws.DrawRound` for what it must not do.
    """

    target: LanguageModel
    drafter: Drafter = NoDraft()  # noqa: RUF009 (a frozen dataclass)
    _: dataclasses.KW_ONLY
    max_context: int = 512
    bonus: bool = True
    max_stop_tokens: int = 4
    prefill_width: int = 64
    token_settings: bool = False
    draws: DrawRound = round_draws

    def __post_init__(self) -> None:
        """Raise ValueError for arguments of another kind, and networks that do not fit."""
        assert_language_model("target", self.target)
        assert_kind("drafter", self.drafter, Drafter, "a drafter, such as NoDraft()")
        self.drafter.validate(self.target.vocab)
        for name in ("max_context", "max_stop_tokens", "prefill_width"):
            assert_length(name, getattr(self, name))
        assert_bool("bonus", self.bonus)
        assert_bool("token_settings", self.token_settings)
        assert_draw_round(self.draws)
        if self.drafter.model is not None:
            assert_language_model("the drafter's model", self.drafter.model)
        for model in (self.target, self._draft):
            if model is not None:
                assert_same_tokens(self.target, model)
                model.assert_rolls_back()
                if not self.drafter.capacity.is_path:
                    model.assert_takes_trees()
        most = self.target.max_context
        if most is not None and self.max_context > most:
            raise CacheError(
                f"max_context is {self.max_context}, but {self.target.name} was made for {most} "
                "positions"
            )

    @property
    def slots(self) -> int:
        """S: slots of a text and of its caches, a round's block and a chunk of prompt included."""
        block = max(self.drafter.capacity.max_nodes, self.drafter.spare_slots, self.prefill_width)
        return -(-(self.max_context + block) // _LANES) * _LANES

    @moves_data
    def start(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        keys: jax.Array,
        **options: Unpack[Options],
    ) -> BatchState:
        """Begin a batch; nothing is run yet.

        Args:
          prompts: B prompts of at least one token.
          keys: typed keys [B], one for each request (`jax.random.split`), or one key for one prompt.
          **options: new_tokens, stop_tokens, temperature and the other settings of `Options`.

        Raises:
          ValueError: naming the sequence, the argument and its value.
        """
        vocab, most = self.target.vocab, self.max_context
        requests = requests_of(prompts, keys, options, vocab=vocab, max_context=most)
        given = arrays_of(
            requests,
            vocab=vocab,
            max_context=most,
            slots=self.slots,
            max_stop_tokens=self.max_stop_tokens,
            has_token_settings=self.token_settings,
        )
        batch, draft = len(requests), self._draft_network(len(requests))
        is_full = given["length"] >= given["limit"]
        # Each array is separate: the loop is donated all buffers.
        zeros: dict[str, Any] = {name: jnp.zeros(batch, jnp.int32) for name in _COUNTS}
        placed: dict[str, Any] = jax.tree.map(jnp.array, given)
        return BatchState(
            **placed,
            sources=jnp.zeros((batch, self.slots), jnp.int8),
            rounds_at=jnp.zeros((batch, self.slots), jnp.int32),
            prompt_length=jnp.array(given["length"]),
            depth=jnp.full(batch, self.drafter.first_depth, jnp.int32),
            ending=jnp.where(is_full, jnp.int32(Ending.CAPACITY), jnp.int32(Ending.NONE)),
            **zeros,
            calls=jnp.array(0, jnp.int32),
            prefilled=jnp.array(0, jnp.int32),
            target_cache=self._target_network(batch).empty_cache(),
            draft_cache=() if draft is None else draft.empty_cache(),
        )

    @moves_data
    def advance(self, state: BatchState, max_rounds: int | None = None) -> BatchState:
        """Run until all sequences are finished, or up to `max_rounds` rounds.

        Args:
          state: where to begin. Its buffers are donated: use the state that is returned instead.
          max_rounds: most target calls; None for no limit.

        Returns:
          The state after them. Advancing round by round gives the same text as at once.

        Raises:
          ValueError: the state was donated before, or is of another decoder; or `max_rounds` is not
            an integer of at least 0. The state stays usable.
        """
        if max_rounds is not None:
            assert_whole("max_rounds", max_rounds, 0)
        rounds = np.int32(_MOST if max_rounds is None else min(max_rounds, _MOST))
        self._assert_own(state)
        return self._advance(self.target.params, self.drafter.params, state, rounds)

    def run(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        keys: jax.Array,
        **options: Unpack[Options],
    ) -> tuple[DecodedText, ...]:
        """Decode a batch to the end; arguments as for `start`."""
        return self.advance(self.start(prompts, keys, **options)).texts()

    @moves_data
    def lower(self, batch: int) -> jax.stages.Lowered:
        """Lower the loop for batch size `batch`, for inspection."""
        assert_whole("batch", batch, 1)
        keys = jax.random.split(jax.random.key(0), batch)
        state = self.start([[0]] * batch, keys, new_tokens=1)
        return self._advance.lower(self.target.params, self.drafter.params, state, np.int32(1))

    @moves_data
    def decide(self, state: BatchState) -> tuple[RoundDraws, Proposal, Verdict]:
        """Return what the next round draws, proposes and decides; the state stays usable.

        For audits: it is what `advance(state, 1)` commits, of every sequence that is not finished.

        Args:
          state: where the round begins, its prompts read: one that `advance` returned.

        Returns:
          (the draws, the proposals, the verdicts), every field with a leading B.

        Raises:
          ValueError: as `advance`.
        """
        self._assert_own(state)
        draws, draft, verdict, *_ = self._decided(self.target.params, self.drafter.params, state)
        return draws, draft.proposal, verdict

    def loop(
        self, target_params: Any, draft_params: Any, state: BatchState, max_rounds: jax.Array
    ) -> BatchState:
        """Run as `advance` does, traced: what it compiles, for a program of one's own.

        Args:
          target_params: `target.params`.
          draft_params: `drafter.params`.
          state: where to begin.
          max_rounds: int32 [], most target calls.
        """
        last = jnp.max(state.prompt_length) - 1
        state = lax.while_loop(
            lambda state: state.prefilled * self.prefill_width < last,
            functools.partial(self._prefill, target_params, draft_params),
            state,
        )
        end = state.calls + jnp.minimum(max_rounds, _MOST - state.calls)
        return lax.while_loop(
            lambda state: jnp.any(state.ending == Ending.NONE) & (state.calls < end),
            functools.partial(self._round, target_params, draft_params),
            state,
        )

    @functools.cached_property
    def _advance(self) -> jax.stages.Wrapped:
        return jax.jit(self.loop, donate_argnums=2)

    @functools.cached_property
    def _decided(self) -> jax.stages.Wrapped:
        return jax.jit(self._decide)

    def _assert_own(self, state: BatchState) -> None:
        """Raise ValueError for a state that was donated, or that another decoder began."""
        wanted = "a BatchState, such as CompiledDecoder.start and advance give"
        assert_kind("state", state, BatchState, wanted)
        state.assert_alive()
        for name, ours in self._shapes_of(state.length.shape[0]).items():
            given = shapes_of(getattr(state, name))
            if given != ours:
                raise ValueError(
                    f"the state was begun by another decoder: its {name} are {given}, this one's "
                    f"{ours}"
                )

    @functools.cached_property
    def _shapes_of(self) -> Callable[[int], dict[str, Any]]:
        """Describe the arrays of this decoder's states by batch, once: `advance` asks each time."""

        @functools.cache
        def of_batch(batch: int) -> dict[str, Any]:
            draft = self._draft_network(batch)
            wanted = {
                "tokens": jax.ShapeDtypeStruct((batch, self.slots), jnp.int32),
                "stop_tokens": jax.ShapeDtypeStruct((batch, self.max_stop_tokens), jnp.int32),
                "sampling": self._sampling_shapes(batch),
                "target_cache": jax.eval_shape(self._target_network(batch).empty_cache),
                "draft_cache": () if draft is None else jax.eval_shape(draft.empty_cache),
            }
            return {name: shapes_of(ours) for name, ours in wanted.items()}

        return of_batch

    def _sampling_shapes(self, batch: int) -> Sampling:
        nobody = validated("", [0], (), "", vocab=self.target.vocab)
        has = self.token_settings
        return sampling_of([nobody] * batch, self.target.vocab, has_token_settings=has)

    @property
    def _draft(self) -> LanguageModel | None:
        model = self.drafter.model
        return model if isinstance(model, LanguageModel) else None

    def _target_network(self, batch: int) -> BatchedNetwork:
        return BatchedNetwork(self.target, self.slots, batch)

    def _draft_network(self, batch: int) -> BatchedNetwork | None:
        model, vocab = self._draft, self.target.vocab
        return None if model is None else BatchedNetwork(model, self.slots, batch, vocab)

    # --- traced

    def _prefill(self, target_params: Any, draft_params: Any, state: BatchState) -> BatchState:
        """Read one chunk of every prompt."""
        where = (state.prefilled, self.prefill_width)
        batch = state.length.shape[0]
        target, draft = self._target_network(batch), self._draft_network(batch)
        target_cache = target.prefill(target_params, state.target_cache, state.tokens, *where)
        draft_cache = state.draft_cache
        if draft is not None:
            draft_cache = draft.prefill(draft_params, draft_cache, state.tokens, *where)
        return dataclasses.replace(
            state,
            target_cache=target_cache,
            draft_cache=draft_cache,
            prefilled=state.prefilled + 1,
        )

    def _round(self, target_params: Any, draft_params: Any, state: BatchState) -> BatchState:
        """Run one round of every sequence that is not finished."""
        batch = state.length.shape[0]
        is_open, root = state.ending == Ending.NONE, state.length - 1
        _, draft, verdict, target_cache, draft_cache = self._decide(
            target_params, draft_params, state
        )
        path = jnp.where(is_open[:, None], verdict.path, -1).at[:, 0].set(0)
        if not self.drafter.capacity.is_path:
            target_cache = self._target_network(batch).keep(target_cache, root, path)
        network = self._draft_network(batch)
        if draft.slots is not None and network is not None:
            at = jnp.take_along_axis(draft.slots, jnp.maximum(path, 0), axis=1)
            draft_cache = network.keep(draft_cache, root, jnp.where(path >= 0, at, -1))
        state = dataclasses.replace(state, target_cache=target_cache, draft_cache=draft_cache)
        return self._commit(state, draft.proposal.tree, verdict, is_open)

    def _decide(
        self, target_params: Any, draft_params: Any, state: BatchState
    ) -> tuple[RoundDraws, Proposed, Verdict, Cache, Cache]:
        """Draft, score and verify a round; return what came of it, and the caches."""
        batch = state.length.shape[0]
        target, network = self._target_network(batch), self._draft_network(batch)
        is_open, root = state.ending == Ending.NONE, state.length - 1
        nodes = self.drafter.capacity.max_nodes
        draws = per_sequence(lambda key, root: self.draws(key, nodes, root))(state.keys, root)
        view = self._view(state, is_open, draws.draft)
        draft, draft_cache = propose_compiled(
            self.drafter, draft_params, network, state.draft_cache, view
        )
        tree = draft.proposal.tree
        logits, target_cache = self._score(target, target_params, state.target_cache, tree, view)
        verdict = per_sequence(self._verify)(draws.verify, draft.proposal, logits, view.sampling)
        return draws, draft, verdict, target_cache, draft_cache

    def _view(self, state: BatchState, is_open: jax.Array, pairs: jax.Array) -> View:
        """Return what the drafter may depend on."""
        room = state.limit - state.length
        wanted = depth_to_draft(state.depth, room, self._draft_room(state), bonus=self.bonus)
        same = ("tokens", "length", "sampling", "stop_tokens")
        given = {name: getattr(state, name) for name in same}
        return View(**given, depth=jnp.where(is_open, wanted, 0), pairs=pairs)

    def _draft_room(self, state: BatchState) -> jax.Array:
        """Return how many levels the draft can be asked about after each text, int32 [B]."""
        model = self._draft
        if model is None:
            return jnp.full_like(state.length, UNLIMITED)
        room = levels_within(model.max_context, state.length)
        if model.vocab < self.target.vocab:  # a text may hold tokens that the draft lacks
            is_text = jnp.arange(self.slots, dtype=jnp.int32)[None] < state.length[:, None]
            is_unknown = jnp.any(is_text & (state.tokens >= model.vocab), axis=1)
            room = jnp.where(is_unknown, 0, room)
        return room

    def _score(
        self, network: BatchedNetwork, params: Any, cache: Cache, tree: Tree, view: View
    ) -> tuple[jax.Array, Cache]:
        """Run the target over every tree; rows after stop tokens are zeros."""
        is_end = view.is_stop(tree.tokens).at[:, 0].set(False)
        tokens = tree.tokens
        if self.drafter.capacity.is_path:
            depths = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            seen = None
        else:
            seen = per_sequence(ancestor_mask)(tree)
            depths = per_sequence(node_depths)(tree)
        needed = jnp.max(tree.num_nodes.astype(jnp.int32))
        sizes = self.drafter.block_sizes
        return network.fitting(
            params, cache, sizes, tokens, depths, seen, view.root, needed, is_end
        )

    def _verify(
        self, draws: Draws, proposal: Proposal, logits: jax.Array, sampling: Sampling
    ) -> Verdict:
        above = None if sampling.penalties is None else proposal.tree.tokens_above
        rows = sampling.logits(logits, above)
        return self.drafter.rule.verify(draws, proposal, rows, self.bonus)

    def _commit(
        self, state: BatchState, tree: Tree, verdict: Verdict, is_open: jax.Array
    ) -> BatchState:
        """Take each verdict's tokens into its text, up to a stop token."""
        room, emitted = state.limit - state.length, verdict.tokens
        kept = per_sequence(commit)(verdict, room, state.is_budget, state.stop_tokens)
        places = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
        accepted = kept.accepted
        length = state.length + jnp.where(is_open, kept.count, 0)
        rounds = state.rounds + jnp.where(is_open, 1, 0)
        source = jnp.where(places < accepted[:, None], int(Source.DRAFT), int(Source.TARGET))

        def put(texts: jax.Array, new: jax.Array) -> jax.Array:
            """Write at the end of each text; what is beyond the count is written over later."""
            write = per_sequence(lax.dynamic_update_slice)
            return write(texts, new.astype(texts.dtype), (state.length,))

        proposed = per_sequence(proposed_depth)(tree.level_sizes)
        depth = depth_after(self.drafter, state.depth, accepted, proposed)
        candidates = tree.num_nodes.astype(jnp.int32) - 1
        is_new = is_open[:, None] & (places < kept.count[:, None])
        return dataclasses.replace(
            state,
            tokens=put(state.tokens, emitted),
            sources=put(state.sources, source),
            rounds_at=put(state.rounds_at, jnp.broadcast_to(rounds[:, None], emitted.shape)),
            length=length,
            sampling=_counted(state.sampling, emitted, is_new),
            depth=jnp.where(is_open, depth, state.depth),
            ending=jnp.where(is_open, kept.ending, state.ending).astype(jnp.int32),
            status=state.status | jnp.where(is_open, verdict.status, 0),
            rounds=rounds,
            drafted=state.drafted + jnp.where(is_open, candidates, 0),
            accepted=state.accepted + jnp.where(is_open, accepted, 0),
            calls=state.calls + 1,
        )


def _counted(sampling: Sampling, tokens: jax.Array, is_new: jax.Array) -> Sampling:
    """Count emitted tokens, int32 [B, n], where they are new, for the penalties."""
    if (penalties := sampling.penalties) is None:
        return sampling

    def one(counts: jax.Array, tokens: jax.Array, is_new: jax.Array) -> jax.Array:
        return counts.at[jnp.where(is_new, tokens, counts.shape[0])].add(1, mode="drop")

    counts = per_sequence(one)(penalties.counts, tokens, is_new)
    return dataclasses.replace(sampling, penalties=dataclasses.replace(penalties, counts=counts))
