"""The state of a decode: a plain immutable record, and what each round did.

A state is its own snapshot. Two decodes that continue from one state are independent, and one that
was saved and loaded continues to the identical outcome.
"""

import dataclasses
from typing import Any

from jaxspec.decode.commit import Ending
from jaxspec.decode.request import Request
from jaxspec.models.provider import Context, Usage


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
