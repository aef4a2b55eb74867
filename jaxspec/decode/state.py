"""States of both loops: of one decode on the host, and of a batch in the compiled loop.

A `DecodeState` is its own snapshot. Two decodes that continue from one state are independent, and one
that was saved and loaded continues to the identical outcome.

In the shape descriptions B denotes the batch, S the slots of a text, K the room for stop tokens.
"""

import dataclasses
import enum
from typing import Any

import jax
import numpy as np

from jaxspec.checks import struct
from jaxspec.decode.commit import Ending
from jaxspec.decode.request import Request
from jaxspec.models.network import Cache
from jaxspec.models.provider import Context, Usage
from jaxspec.sampling import Sampling
from jaxspec.transfers import moves_data


@dataclasses.dataclass(frozen=True)
class RoundSummary:
    """What one round did.

    Attributes:
      position: position in the text of its root.
      proposed_depth: levels drafted; 0 for a plain step.
      num_drafted: candidates.
      num_accepted: tokens of the accepted path that were emitted.
      num_emitted: tokens emitted.
      tested: for each node of the accepted path that had candidates, from the root on: how many
        siblings were tested there, and whether the last of them was accepted.
      target: usage of the target.
      draft: usage of the draft.
      target_batches: hypothetical batches of the target.
      draft_batches: hypothetical batches of the draft.
      status: bits of `jaxspec.Status`.
    """

    position: int
    proposed_depth: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    tested: tuple[tuple[int, bool], ...]
    target: Usage
    draft: Usage
    target_batches: int
    draft_batches: int
    status: int


@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The state of a decode after some rounds.

    Attributes:
      request: what was asked for; each round derives its draws from its key and the root's position.
      decoder: `Decoder.describe` of the decoder that began it; others do not continue it.
      tokens: prompt and emitted tokens.
      depth: depth to ask the drafter for in the next round.
      rounds: what has been done.
      ending: why it ended; `Ending.NONE` while it goes on.
    """

    request: Request
    decoder: dict[str, Any] = dataclasses.field(hash=False)
    tokens: Context
    depth: int
    rounds: tuple[RoundSummary, ...] = ()
    ending: Ending = Ending.NONE

    @property
    def prompt_length(self) -> int:
        """How many of the tokens are the prompt."""
        return len(self.request.prompt)

    @property
    def new_tokens(self) -> Context:
        """The tokens emitted so far."""
        return self.tokens[self.prompt_length :]


# --- the compiled loop


class Source(enum.IntEnum):
    """Where a token of a text is from."""

    PROMPT = 0
    DRAFT = 1
    """Drafted and accepted."""
    TARGET = 2
    """Drawn from the target: a replacement, a bonus token, or a plain step."""


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedText:
    """One text of a batch.

    Attributes:
      tokens: prompt and emitted tokens.
      prompt_length: how many of them are the prompt.
      sources: a `Source` for each.
      rounds_at: for each token the round that emitted it, from 1; 0 for the prompt.
      ending: why it ended; `Ending.NONE` while it goes on.
      status: bits of `jaxspec.Status` of all its rounds.
      rounds: target calls.
      drafted: candidates.
      accepted: tokens accepted of them.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    sources: tuple[Source, ...]
    rounds_at: tuple[int, ...]
    ending: Ending
    status: int
    rounds: int
    drafted: int
    accepted: int

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """The tokens emitted."""
        return self.tokens[self.prompt_length :]

    @property
    def tokens_per_call(self) -> float:
        """New tokens per target call; 0 before the first."""
        return len(self.new_tokens) / self.rounds if self.rounds else 0.0


@struct
class BatchState:
    """The state of a batch; the compiled loop takes one and returns one.

    Attributes:
      tokens: int32 [B, S], each text, then anything.
      sources: int8 [B, S], a `Source` for each token.
      rounds_at: int32 [B, S], for each emitted token the number of its round, from 1.
      length: int32 [B], tokens of each text.
      prompt_length: int32 [B].
      limit: int32 [B], length at which a text ends.
      is_budget: bool [B], whether the limit is the budget, not the capacity.
      stop_tokens: int32 [B, K], then -1.
      sampling: settings of each text; counts of penalties are of the output so far.
      keys: typed keys [B]; a round's draws depend on its key and the root's position alone.
      depth: int32 [B], depth to draft in the next round.
      ending: int32 [B], an `Ending`.
      status: int32 [B], bits of `jaxspec.Status` of all rounds.
      rounds: int32 [B], rounds done; each is one call of the target.
      drafted: int32 [B], candidates of all rounds.
      accepted: int32 [B], tokens accepted of them.
      calls: int32 [], forwards of the target, shared by the batch; prefill is not counted.
      prefilled: int32 [], chunks of the prompts that the caches hold.
      target_cache: with a leading B if that is more than 1.
      draft_cache: as `target_cache`; () without a draft network.
    """

    tokens: jax.Array  # [B, S]
    sources: jax.Array  # [B, S]
    rounds_at: jax.Array  # [B, S]
    length: jax.Array  # [B]
    prompt_length: jax.Array  # [B]
    limit: jax.Array  # [B]
    is_budget: jax.Array  # [B]
    stop_tokens: jax.Array  # [B, K]
    sampling: Sampling
    keys: jax.Array  # [B]
    depth: jax.Array  # [B]
    ending: jax.Array  # [B]
    status: jax.Array  # [B]
    rounds: jax.Array  # [B]
    drafted: jax.Array  # [B]
    accepted: jax.Array  # [B]
    calls: jax.Array  # []
    prefilled: jax.Array  # []
    target_cache: Cache
    draft_cache: Cache

    @moves_data
    def texts(self) -> tuple[DecodedText, ...]:
        """Read the texts on the host, one for each sequence.

        Raises:
          ValueError: the buffers were donated to `CompiledDecoder.advance`.
        """
        self.assert_alive()
        arrays = {
            field.name: np.asarray(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in ("keys", "sampling", "target_cache", "draft_cache")
        }
        counts = ("prompt_length", "status", "rounds", "drafted", "accepted")
        return tuple(
            DecodedText(
                tokens=tuple(arrays["tokens"][n, :length].tolist()),
                sources=tuple(map(Source, arrays["sources"][n, :length].tolist())),
                rounds_at=tuple(arrays["rounds_at"][n, :length].tolist()),
                ending=Ending(int(arrays["ending"][n])),
                **{name: int(arrays[name][n]) for name in counts},
            )
            for n, length in enumerate(arrays["length"].tolist())
        )

    def assert_alive(self) -> None:
        """Raise ValueError if the buffers were donated to `CompiledDecoder.advance`."""
        if self.length.is_deleted():
            raise ValueError(
                "this state's buffers were donated to advance: use the state that it returned"
            )
