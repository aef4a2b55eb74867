"""What a verifier decides, and what it had to survive while deciding."""

import enum

import jax

from jaxspec.checks import record


class Status(enum.IntFlag):
    """Bits of a verdict's status; 0 is a clean round.

    The status exists for what production must survive without an exception. `jaxspec.checked` says
    the place and the value.
    """

    NON_FINITE_ROW = 1
    """An entry that was read is NaN or infinite: accepted prefix kept, no replacement."""
    MASSLESS_ROW = 2
    """A row that was to be drawn from has no mass: accepted prefix kept, no replacement."""
    BAD_CANDIDATE = 4
    """A candidate's token is outside the vocabulary: it was skipped."""
    OUTSIDE_SUPPORT = 8
    """A candidate cannot have come from its draft row: it was skipped."""
    EMPTY_RESIDUAL = 16
    """Rounding left nothing of a residual: drawn from the target row instead."""
    BAD_DRAW = 32
    """A draw that was used is not in [0, 1): no token was decided with it."""


@record
class Verdict:
    """The outcome of one round.

    Attributes:
      tokens: int32 [D + 1], the tokens to emit: those accepted, then the replacement or bonus if
        there is one; -1 after them.
      num_tokens: int32 [], how many tokens to emit.
      num_accepted: int32 [], how many of them were drafted.
      path: int32 [D + 1], node numbers from the root (0) along the accepted path, then -1: the slots
        of a cache block to keep.
      stop_node: int32 [], the last accepted node; the final token, if any, follows it.
      status: int32 [], bits of `Status`.
    """

    tokens: jax.Array  # [D + 1]
    num_tokens: jax.Array  # []
    num_accepted: jax.Array  # []
    path: jax.Array  # [D + 1]
    stop_node: jax.Array  # []
    status: jax.Array  # []
