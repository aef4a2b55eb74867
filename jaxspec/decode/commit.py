"""What both loops decide about a round: how deep to draft, what to keep of a verdict, how it ends.

The compiled loop runs these functions over its batch inside its program, the host loop jitted: the
same request gives the same text. In the shape descriptions D denotes the greatest depth, K the room
for stop tokens.
"""

import enum

import jax
import jax.numpy as jnp

from jaxspec.checks import struct
from jaxspec.verify import Verdict

UNLIMITED = 2**31 - 1
"""Room where there is no limit."""


class Ending(enum.IntEnum):
    """Why a text ended."""

    NONE = 0
    """It goes on."""
    BUDGET = 1
    """All new tokens that were requested are emitted."""
    STOP = 2
    """A stop token was emitted."""
    CAPACITY = 3
    """There was no room for more tokens."""
    UNDECIDED = 4
    """A round decided on no token: a row or a draw was bad, see `status`. An error on the host."""


@struct
class Commit:
    """What is kept of a verdict.

    Attributes:
      count: int32 [], tokens emitted, up to a stop token.
      accepted: int32 [], how many of them were drafted.
      ending: int32 [], an `Ending`.
    """

    count: jax.Array  # []
    accepted: jax.Array  # []
    ending: jax.Array  # []


def depth_to_draft(
    wanted: jax.Array, room: jax.Array, draft_room: jax.Array, *, bonus: bool
) -> jax.Array:
    """Return how many levels to draft at most, int32 [...].

    With a bonus token a path of d tokens may emit d + 1, so one level less is drafted.

    Args:
      wanted: int32 [...], the drafter's depth.
      room: int32 [...], tokens that may still be emitted.
      draft_room: int32 [...], levels that the draft's context has room for.
      bonus: whether a fully accepted path is followed by one more token.
    """
    most = room - 1 if bonus else room
    return jnp.maximum(jnp.minimum(jnp.minimum(wanted, most), draft_room), 0)


def levels_within(max_context: int | None, length: jax.Array) -> jax.Array:
    """Return how many levels a draft with room for `max_context` tokens can draft, int32 [...].

    The first level is drafted after the text, int32 [...] tokens long, each further one a token later.
    """
    if max_context is None:
        return jnp.full_like(length, UNLIMITED)
    return jnp.maximum(min(max_context, UNLIMITED - 1) + 1 - length, 0)


def proposed_depth(level_sizes: jax.Array) -> jax.Array:
    """Return the depth of a tree, int32 [], from its nodes at each depth, int32 [D + 1]."""
    levels = jnp.arange(level_sizes.shape[0], dtype=jnp.int32)
    return jnp.max(jnp.where(level_sizes > 0, levels, 0))


def commit(
    verdict: Verdict, room: jax.Array, is_budget: jax.Array, stop_tokens: jax.Array
) -> Commit:
    """Decide what is kept of a sequence's verdict: its tokens up to a stop token.

    Args:
      verdict: of one sequence.
      room: int32 [], tokens that may still be emitted, at least 1.
      is_budget: bool [], whether the budget limits the room, not the capacity.
      stop_tokens: int32 [K], -1 for none.
    """
    tokens, num_tokens = verdict.tokens, verdict.num_tokens
    places = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    is_stop = jnp.any(tokens[:, None] == stop_tokens[None], axis=1) & (places < num_tokens)
    has_stop = jnp.any(is_stop)
    until = jnp.argmax(is_stop).astype(jnp.int32) + 1
    count = jnp.where(has_stop, until, num_tokens.astype(jnp.int32))
    full = jnp.where(is_budget, jnp.int32(Ending.BUDGET), jnp.int32(Ending.CAPACITY))
    ending = jnp.where(count >= room, full, jnp.int32(Ending.NONE))
    ending = jnp.where(has_stop, jnp.int32(Ending.STOP), ending)
    return Commit(
        count=count,
        accepted=jnp.minimum(verdict.num_accepted.astype(jnp.int32), count),
        ending=jnp.where(count == 0, jnp.int32(Ending.UNDECIDED), ending),
    )
