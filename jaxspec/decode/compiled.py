"""Decoding of a batch in one compiled loop: its arguments, its states, its programs.

In the shape descriptions B denotes the batch, S the slots of a text, V the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_bool, assert_kind, assert_length, assert_whole
from jaxspec.decode.commit import Ending
from jaxspec.decode.loop import MOST_ROUNDS, Loop
from jaxspec.decode.request import Options, arrays_of, requests_of, sampling_of, validated
from jaxspec.decode.state import BatchState, DecodedText
from jaxspec.draft import Drafter
from jaxspec.draws import RoundDraws, assert_draw_round
from jaxspec.models.network import (
    CacheError,
    assert_language_model,
    assert_same_tokens,
    shapes_of,
)
from jaxspec.proposals import Proposal
from jaxspec.sampling import Sampling
from jaxspec.transfers import moves_data
from jaxspec.verify import Verdict

_COUNTS = ("status", "rounds", "drafted", "accepted")


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledDecoder(Loop):
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
        rounds = np.int32(MOST_ROUNDS if max_rounds is None else min(max_rounds, MOST_ROUNDS))
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
