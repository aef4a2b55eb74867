"""The outcome of a round, and the flags of what it had to survive."""

import enum

import jax
import jax.numpy as jnp

from jaxspec.checks import struct
from jaxspec.trees import NONE, Tree


class Status(enum.IntFlag):
    """Bits of a verdict's status; 0 is a clean round.

    The status is for what production must survive without an exception; `jaxspec.checked` names the
    place and the value. "Prefix kept" means that the accepted prefix is kept and no replacement is
    emitted. Bottom-up rules decide from the deepest candidate back: where they cannot know the
    accepted prefix, they accept nothing.
    """

    NON_FINITE_ROW = 1
    """A row that was read has a NaN, infinite or negative entry, or its temperature or a filter is
    out of range. A target row: prefix kept. A draft row: its candidates are skipped, and the token is
    drawn from the target's row."""
    MASSLESS_ROW = 2
    """A row that was read has no mass: as for `NON_FINITE_ROW`."""
    BAD_CANDIDATE = 4
    """A candidate's token is outside the vocabulary: it was skipped."""
    OUTSIDE_SUPPORT = 8
    """A candidate cannot have been drawn from its draft row: it was skipped."""
    EMPTY_RESIDUAL = 16
    """Rounding left nothing of a residual: drawn from the target row instead."""
    BAD_DRAW = 32
    """A draw that was used is not in [0, 1): no token was decided with it."""
    NOT_NORMALIZED = 64
    """The mass of a row of probabilities that was read is not 1 within the tolerance of its dtype:
    as for `NON_FINITE_ROW`. Logits passed as probabilities show here."""
    OUTSIDE_SLAB = 128
    """A row to be read lies outside the slab: prefix kept."""
    BAD_TREE = 256
    """The tree contradicts itself where it was read, or its length is out of range: prefix kept."""


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


def flag(is_set: jax.Array, status: Status) -> jax.Array:
    """Return the bit of a status where the condition holds."""
    return jnp.where(is_set, int(status), 0).astype(jnp.int32)


def conclude(
    tree: Tree,
    path: jax.Array,
    node: jax.Array,
    depth: jax.Array,
    token: jax.Array,
    status: jax.Array,
) -> Verdict:
    """Write the verdict: `path` as far as `node` at `depth` is accepted, then `token` if >= 0."""
    slots = jnp.arange(path.shape[0], dtype=jnp.int32)
    accepted = jnp.where((slots > 0) & (slots <= depth), tree.tokens[path], NONE)
    return Verdict(
        # Slot i of `path` is the node at depth i; its token is the i-th emitted, from 0.
        tokens=jnp.roll(accepted, -1).at[depth].set(token),
        num_tokens=depth + jnp.where(token >= 0, 1, 0).astype(jnp.int32),
        num_accepted=depth,
        path=jnp.where(slots <= depth, path, NONE),
        stop_node=node,
        status=status,
    )


def no_verdict(tree: Tree) -> Verdict:
    """Return a verdict of nothing, of the shapes that `conclude` gives."""
    nothing, none = jnp.full(tree.max_depth + 1, NONE, jnp.int32), jnp.int32(0)
    return Verdict(
        tokens=nothing,
        num_tokens=none,
        num_accepted=none,
        path=nothing,
        stop_node=none,
        status=none,
    )
