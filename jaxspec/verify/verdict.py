"""What a verifier decides, and what it had to survive while deciding."""

import enum

import jax

from jaxspec.checks import struct


class Status(enum.IntFlag):
    """Bits of a verdict's status; 0 is a clean round.

    The status exists for what production must survive without an exception. `jaxspec.checked` says
    the place and the value. Bottom-up rules decide from the deepest candidate back: where "accepted
    prefix kept" cannot be told, they accept nothing.
    """

    NON_FINITE_ROW = 1
    """A row that was read is bad: an entry is NaN, infinite or negative, or its temperature, top_k or
    top_p lies outside its range. A target row: accepted prefix kept, no replacement. A draft row:
    its candidates are skipped, and the token is drawn from the target's row."""
    MASSLESS_ROW = 2
    """A row that was read has no mass: as for `NON_FINITE_ROW`."""
    BAD_CANDIDATE = 4
    """A candidate's token is outside the vocabulary: it was skipped."""
    OUTSIDE_SUPPORT = 8
    """A candidate cannot have come from its draft row: it was skipped."""
    EMPTY_RESIDUAL = 16
    """Rounding left nothing of a residual: drawn from the target row instead."""
    BAD_DRAW = 32
    """A draw that was used is not in [0, 1): no token was decided with it."""
    NOT_NORMALIZED = 64
    """The mass of a row of probabilities that was read is not 1 within the tolerance of its dtype:
    as for `NON_FINITE_ROW`. Logits given as probabilities show here."""
    OUTSIDE_SLAB = 128
    """A row that was to be read lies outside the slab: accepted prefix kept, no replacement."""
    BAD_TREE = 256
    """The tree contradicts itself where it was read, or its length is out of range: accepted prefix
    kept, no replacement."""


@struct
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
