"""Draft, score, verify, commit: the whole loop one compiled program, over a batch.

It is one `while_loop` over the batch, with parts for each row inside: a `vmap`ped loop would copy its
caches in every round. Rows that are finished stand still. Caches are written in place: a block goes
to the slots after the text, and only accepted slots of it are moved.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import assert_bool, assert_function, assert_kind, assert_length, assert_whole
from jaxspec.decode import request as requests
from jaxspec.decode.commit import (
    UNLIMITED,
    Ending,
    commit,
    depth_to_draft,
    levels_within,
    proposed_depth,
)
from jaxspec.decode.compiled_state import (
    BatchState,
    DecodedText,
    Source,
    assert_alive,
    texts_of,
)
from jaxspec.draft import Drafter, NoDraft, View, propose_compiled
from jaxspec.draws import RoundDraws, round_draws
from jaxspec.logits import Logits
from jaxspec.models.batched import BatchedNetwork, per_sequence
from jaxspec.models.network import (
    CacheError,
    LanguageModel,
    assert_language_model,
    assert_same_tokens,
    shapes_of,
)
from jaxspec.transfers import moves_data
from jaxspec.trees import Tree, ancestor_mask
from jaxspec.verify import Verdict

_LANES = 8  # slots are rounded up to a multiple of this
_MOST = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledDecoder:
    """Decodes a batch of texts that have exactly the target's law, in one compiled loop.

    One program is compiled for a batch size; prompts, lengths, budgets, temperatures, filters, stop
    tokens and keys are arrays. Make a decoder once and use it again.

    Attributes:
      target: the network whose law the texts have.
      drafter: who proposes; default nobody, plain decoding.
      max_length: most tokens of a text, prompt and all. A draft network of shorter context drafts as
        long as it can, and the text goes on plainly.
      bonus: whether a fully accepted path is followed by one more token of the target.
      max_stop_tokens: room for stop tokens.
      prefill_width: tokens of a prompt run at a time.
      draws: makes a round's draws from (key, number of nodes, root position). Another one is for
        experiments and proofs: a law that depends on it is not lossless.
    """

    target: LanguageModel
    drafter: Drafter = NoDraft()  # noqa: RUF009 (a frozen dataclass)
    max_length: int = 512
    bonus: bool = True
    max_stop_tokens: int = 4
    prefill_width: int = 64
    draws: Callable[[jax.Array, int, jax.Array], RoundDraws] = round_draws

    def __post_init__(self) -> None:
        """Refuse what is no network or drafter, and networks that do not do it or do not fit."""
        assert_language_model("target", self.target)
        assert_kind("drafter", self.drafter, Drafter, "a drafter, such as NoDraft()")
        self.drafter.validate(self.target.vocab)
        for name in ("max_length", "max_stop_tokens", "prefill_width"):
            assert_length(name, getattr(self, name))
        assert_bool("bonus", self.bonus)
        wanted = "a function of (key, number of nodes, root position), such as jaxspec.round_draws"
        assert_function("draws", self.draws, wanted)
        draft = self.drafter.model
        if draft is not None:
            assert_language_model("the drafter's model", draft)
        for model in (self.target, draft):
            if not isinstance(model, LanguageModel):
                continue
            model.assert_rolls_back()
            if not self.drafter.capacity.is_path:
                model.assert_takes_trees()
        most = self.target.max_context
        if most is not None and self.max_length > most:
            raise CacheError(
                f"max_length is {self.max_length}, but {self.target.name} was made for {most} "
                "positions"
            )
        if isinstance(draft, LanguageModel):
            assert_same_tokens(self.target, draft)

    @property
    def slots(self) -> int:
        """S: slots of a text and of its caches, a round's block and a chunk of prompt included."""
        block = max(self.drafter.capacity.max_nodes, self.drafter.spare_slots, self.prefill_width)
        return -(-(self.max_length + block) // _LANES) * _LANES

    @moves_data
    def start(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        keys: jax.Array,
        *,
        new_tokens: int | Sequence[int],
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] | None = None,
        top_p: float | Sequence[float] = 1.0,
        stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    ) -> BatchState:
        """Begin a batch; nothing is run yet.

        Args:
          prompts: B prompts of at least one token.
          keys: typed keys [B], one for each request (`jax.random.split`), or one key for one prompt.
          new_tokens: most tokens to emit, one number or one for each row.
          temperature: 0 for greedy; one number or one for each row.
          top_k: keep the k most probable tokens; None or V keeps all.
          top_p: keep the most probable tokens up to this mass; 1 keeps all.
          stop_tokens: tokens that end a text, of all rows or of each.

        Raises:
          ValueError: naming the row, the argument and its value.
        """
        vocab = self.target.vocab
        batch = requests.batch_of(prompts)
        keys = requests.keys_of(keys, batch)
        texts = [
            requests.prompt_of(row, prompt, vocab, self.max_length)
            for row, prompt in enumerate(prompts)
        ]
        budgets = requests.budgets_of(new_tokens, batch)
        kelvins = requests.temperatures_of(temperature, batch)
        ranks = requests.ranks_of(top_k, batch, vocab)
        masses = requests.masses_of(top_p, batch)
        stops = requests.stops_of(stop_tokens, batch, vocab, self.max_stop_tokens)
        tokens, lengths = requests.side_by_side(texts, self.slots)
        wanted = lengths + np.minimum(budgets, self.max_length)
        limits = np.minimum(wanted, self.max_length).astype(np.int32)
        ending = np.where(lengths >= limits, int(Ending.CAPACITY), int(Ending.NONE))
        zeros = np.zeros(batch, np.int32)
        draft = self._draft_blocks(batch)
        # Each array is one of its own: the loop takes over the buffers it is given.
        return BatchState(
            tokens=jnp.array(tokens),
            sources=jnp.zeros((batch, self.slots), jnp.int8),
            rounds_at=jnp.zeros((batch, self.slots), jnp.int32),
            length=jnp.array(lengths),
            prompt_length=jnp.array(lengths),
            limit=jnp.array(limits),
            is_budget=jnp.array(budgets <= self.max_length - lengths),
            stop_tokens=jnp.array(stops),
            temperature=jnp.array(kelvins),
            top_k=jnp.array(ranks),
            top_p=jnp.array(masses),
            keys=jnp.copy(keys),
            depth=jnp.full(batch, self.drafter.first_depth, jnp.int32),
            ending=jnp.array(ending.astype(np.int32)),
            status=jnp.array(zeros),
            rounds=jnp.array(zeros),
            drafted=jnp.array(zeros),
            accepted=jnp.array(zeros),
            calls=jnp.array(0, jnp.int32),
            prefilled=jnp.array(0, jnp.int32),
            target_cache=self._target_blocks(batch).empty_cache(),
            draft_cache=() if draft is None else draft.empty_cache(),
        )

    @moves_data
    def advance(self, state: BatchState, max_rounds: int | None = None) -> BatchState:
        """Run until all rows are finished, or so many rounds.

        Args:
          state: where to begin. Its buffers are taken over: use what is returned from now on.
          max_rounds: at most so many target calls; None for no limit.

        Returns:
          The state after them. To advance round by round comes to the same text as at once.

        Raises:
          ValueError: the state was given away before, or is of another decoder; or `max_rounds` is
            no number of rounds. The state can be used on.
        """
        if max_rounds is not None:
            assert_whole("max_rounds", max_rounds, 0)
        rounds = np.int32(_MOST if max_rounds is None else min(max_rounds, _MOST))
        self._assert_own(state)
        return self._advance(self.target.params, self.drafter.params, state, rounds)

    def run(
        self, prompts: Sequence[Sequence[int] | np.ndarray], keys: jax.Array, **options: Any
    ) -> tuple[DecodedText, ...]:
        """Decode a batch to the end; arguments as for `start`."""
        return texts_of(self.advance(self.start(prompts, keys, **options)))

    @moves_data
    def lower(self, batch: int) -> Any:
        """Lower the compiled loop for a batch of so many rows, to look at."""
        assert_whole("batch", batch, 1)
        keys = jax.random.split(jax.random.key(0), batch)
        state = self.start([[0]] * batch, keys, new_tokens=1)
        return self._advance.lower(self.target.params, self.drafter.params, state, np.int32(1))

    @functools.cached_property
    def _advance(self) -> Any:
        return jax.jit(self._loop, donate_argnums=2)

    def _assert_own(self, state: BatchState) -> None:
        """Refuse a state that was given away, or that another decoder began."""
        assert_alive(state)
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
            draft = self._draft_blocks(batch)
            wanted = {
                "tokens": jax.ShapeDtypeStruct((batch, self.slots), jnp.int32),
                "stop_tokens": jax.ShapeDtypeStruct((batch, self.max_stop_tokens), jnp.int32),
                "target_cache": jax.eval_shape(self._target_blocks(batch).empty_cache),
                "draft_cache": () if draft is None else jax.eval_shape(draft.empty_cache),
            }
            return {name: shapes_of(ours) for name, ours in wanted.items()}

        return of_batch

    def _target_blocks(self, batch: int) -> BatchedNetwork:
        return BatchedNetwork(self.target, self.slots, batch)

    def _draft_blocks(self, batch: int) -> BatchedNetwork | None:
        model = self.drafter.model
        if not isinstance(model, LanguageModel):
            return None
        return BatchedNetwork(model, self.slots, batch, self.target.vocab)

    def _loop(
        self, target_params: Any, draft_params: Any, state: BatchState, max_rounds: jax.Array
    ) -> BatchState:
        """Read what is left of the prompts, then run rounds."""
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

    def _prefill(self, target_params: Any, draft_params: Any, state: BatchState) -> BatchState:
        """Read one chunk of every prompt."""
        where = (state.prefilled, self.prefill_width)
        batch = state.length.shape[0]
        blocks, draft = self._target_blocks(batch), self._draft_blocks(batch)
        target_cache = blocks.prefill(target_params, state.target_cache, state.tokens, *where)
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
        """Run one round of every row that is not finished."""
        batch = state.length.shape[0]
        blocks, draft_blocks = self._target_blocks(batch), self._draft_blocks(batch)
        nodes = self.drafter.capacity.max_nodes
        is_open = state.ending == Ending.NONE
        room = state.limit - state.length
        wanted = depth_to_draft(state.depth, room, self._draft_room(state), bonus=self.bonus)
        root = state.length - 1
        draws = per_sequence(lambda key, position: self.draws(key, nodes, position))(
            state.keys, root
        )
        view = View(
            tokens=state.tokens,
            length=state.length,
            depth=jnp.where(is_open, wanted, 0),
            pairs=draws.draft,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
            stop_tokens=state.stop_tokens,
        )
        draft, draft_cache = propose_compiled(
            self.drafter, draft_params, draft_blocks, state.draft_cache, view
        )
        tree = draft.proposal.tree
        is_end = view.is_stop(tree.tokens).at[:, 0].set(False)
        logits, target_cache = self._score(
            blocks, target_params, tree, view, state.target_cache, is_end
        )

        def verify(draws: Any, proposal: Any, logits: Any, view: Any) -> Verdict:
            rows = Logits(
                values=logits, temperature=view.temperature, top_k=view.top_k, top_p=view.top_p
            )
            return self.drafter.rule.verify(draws, proposal, rows, self.bonus)

        verdict = per_sequence(verify)(draws.verify, draft.proposal, logits, view)
        path = jnp.where(is_open[:, None], verdict.path, -1).at[:, 0].set(0)
        if not self.drafter.capacity.is_path:
            target_cache = blocks.keep(target_cache, root, path)
        if draft.slots is not None and draft_blocks is not None:
            at = jnp.take_along_axis(draft.slots, jnp.maximum(path, 0), axis=1)
            draft_cache = draft_blocks.keep(draft_cache, root, jnp.where(path >= 0, at, -1))
        state = dataclasses.replace(state, target_cache=target_cache, draft_cache=draft_cache)
        return self._commit(state, tree, verdict, is_open)

    def _draft_room(self, state: BatchState) -> jax.Array:
        """Return how many levels the draft can be asked about after each text, int32 [B]."""
        model = self.drafter.model
        if model is None:
            return jnp.full_like(state.length, UNLIMITED)
        room = levels_within(model.max_context, state.length)
        if model.vocab < self.target.vocab:
            # What the draft has no token for, it cannot read.
            is_text = jnp.arange(self.slots, dtype=jnp.int32)[None] < state.length[:, None]
            is_strange = jnp.any(is_text & (state.tokens >= model.vocab), axis=1)
            room = jnp.where(is_strange, 0, room)
        return room

    def _score(
        self,
        blocks: BatchedNetwork,
        params: Any,
        tree: Tree,
        view: View,
        cache: Any,
        is_end: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Run the target over every tree."""
        tokens = tree.tokens.at[:, 0].set(view.root_token)
        if self.drafter.capacity.is_path:
            depths = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            seen = None
        else:
            seen = per_sequence(ancestor_mask)(tree)
            depths = jnp.sum(seen, axis=2, dtype=jnp.int32) - 1
        return blocks.fitting(
            params,
            cache,
            self.drafter.block_sizes,
            tokens,
            depths,
            seen,
            view.root,
            jnp.max(tree.num_nodes.astype(jnp.int32)),
            is_end,
        )

    def _commit(
        self, state: BatchState, tree: Tree, verdict: Verdict, is_open: jax.Array
    ) -> BatchState:
        """Take each verdict's tokens into its text, up to a stop token."""
        emitted = verdict.tokens

        def kept_of(verdict: Verdict, room: Any, is_budget: Any, stop_tokens: Any) -> Any:
            return commit(
                verdict.tokens,
                verdict.num_tokens,
                verdict.num_accepted,
                room=room,
                is_budget=is_budget,
                stop_tokens=stop_tokens,
            )

        room = state.limit - state.length
        kept = per_sequence(kept_of)(verdict, room, state.is_budget, state.stop_tokens)
        places = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
        accepted = kept.accepted
        length = state.length + jnp.where(is_open, kept.count, 0)
        rounds = state.rounds + jnp.where(is_open, 1, 0)
        source = jnp.where(places < accepted[:, None], int(Source.DRAFT), int(Source.TARGET))

        def put(texts: jax.Array, new: jax.Array) -> jax.Array:
            """Write at the end of each text; what is beyond the count is written over later."""
            return per_sequence(lambda text, new, at: lax.dynamic_update_slice(text, new, (at,)))(
                texts, new.astype(texts.dtype), state.length
            )

        proposed = per_sequence(proposed_depth)(tree.level_sizes)
        depth = self.drafter.next_depth(state.depth, accepted, proposed)
        candidates = tree.num_nodes.astype(jnp.int32) - 1
        return dataclasses.replace(
            state,
            tokens=put(state.tokens, emitted),
            sources=put(state.sources, source),
            rounds_at=put(state.rounds_at, jnp.broadcast_to(rounds[:, None], emitted.shape)),
            length=length,
            depth=jnp.where(is_open, depth, state.depth),
            ending=jnp.where(is_open, kept.ending, state.ending).astype(jnp.int32),
            status=state.status | jnp.where(is_open, verdict.status, 0),
            rounds=rounds,
            drafted=state.drafted + jnp.where(is_open, candidates, 0),
            accepted=state.accepted + jnp.where(is_open, accepted, 0),
            calls=state.calls + 1,
        )
