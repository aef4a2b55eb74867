"""How wide and how deep to draft next, from what is past.

Widths depend on the draft's row at each parent, depths on rounds that are over: a round's candidates
are then fixed before any of its draws is looked at, so the policy changes how many tokens a round
yields and never their law.

Each formula is one traced function, which both loops call.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_between, described
from jaxspec.draft.growth import MAX_NODES

SLACK = 2.0**-12
"""How far below an edge a number may be and still count as at it.

The edges are where rows and rounds of simple proportions lie (log 3 / log 9 is one half), and two
compiled programs may round these to either side.
"""


@dataclasses.dataclass(frozen=True)
class AdaptiveTreePolicy:
    """Width from the entropy of each parent's draft row, depth from the last round's acceptance.

    With h the normalised entropy H(row) / log V, in [0, 1]:

        width(h) = min(max_width, min_width + floor(h (max_width - min_width + 1)))

    With d the depth that was wanted for a round, p > 0 the depth that it proposed, which budgets may
    have capped, and a the tokens of its accepted path:

        next depth = min(d + 1, max_depth) if a / p >= deepen_at
                     max(d - 1, min_depth) if a / p <= shorten_at
                     d                     otherwise

    A round that proposed nothing leaves the depth as it is. Both formulas are computed in float32,
    and what is within 2^-12 of an edge counts as at it.

    Attributes:
      min_width: candidates below a parent whose row is certain.
      max_width: candidates below a parent whose row is uniform.
      min_depth: least depth, at least 1.
      max_depth: greatest depth.
      first_depth: depth of the first round.
      deepen_at: accepted over proposed from which the depth grows.
      shorten_at: accepted over proposed up to which it shrinks; below `deepen_at`.
      max_nodes: most nodes of a tree, the root counted.

    >>> policy = AdaptiveTreePolicy(min_width=1, max_width=4)
    >>> [policy.width(h) for h in (0.0, 0.3, 0.6, 1.0)]
    [1, 2, 3, 4]
    >>> policy.next_depth(3, accepted=3, proposed=3), policy.next_depth(3, accepted=0, proposed=3)
    (4, 2)
    """

    min_width: int = 1
    max_width: int = 4
    min_depth: int = 1
    max_depth: int = 6
    first_depth: int = 3
    deepen_at: float = 0.75
    shorten_at: float = 0.25
    max_nodes: int = 32

    def __post_init__(self) -> None:
        """Raise ValueError if the policy contradicts itself."""
        for name in ("min_width", "max_width"):
            assert_between(name, getattr(self, name), 1)
        for name in ("min_depth", "first_depth", "max_depth"):
            assert_between(name, getattr(self, name), 1, MAX_NODES)
        assert_between("max_nodes", self.max_nodes, 2, MAX_NODES)
        for name in ("deepen_at", "shorten_at"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ValueError(f"{name} is {described(value)}: must be a number")
        orders = (
            (self.min_width <= self.max_width, "min_width <= max_width"),
            (
                self.min_depth <= self.first_depth <= self.max_depth,
                "min_depth <= first_depth <= max_depth",
            ),
            (0 <= self.shorten_at < self.deepen_at, "0 <= shorten_at < deepen_at"),
        )
        for holds, order in orders:
            if not holds:
                raise ValueError(f"{self}: must satisfy {order}")

    def widths(self, entropies: jax.Array, most: int) -> jax.Array:
        """Return how many candidates to draft below parents; traced.

        Args:
          entropies: float32 [...], normalised entropies of the parents' draft rows.
          most: the vocabulary: a width is no more.

        Returns:
          int32 [...].
        """
        least, greatest = min(self.min_width, most), min(self.max_width, most)
        # The edges are those of the widths as stated, also where the vocabulary has fewer tokens.
        steps = min(self.max_width - self.min_width + 1, 2**31)
        share = entropies.astype(jnp.float32) * jnp.float32(steps) + jnp.float32(SLACK)
        more = jnp.minimum(jnp.floor(share), jnp.float32(greatest - least)).astype(jnp.int32)
        return jnp.int32(least) + more

    def next_depths(self, depth: jax.Array, accepted: jax.Array, proposed: jax.Array) -> jax.Array:
        """Return the depths to propose in the next round, int32 [...]; traced.

        Args:
          depth: int32 [...], as for `next_depth`.
          accepted: int32 [...].
          proposed: int32 [...].
        """
        share = accepted.astype(jnp.float32) / jnp.maximum(proposed, 1).astype(jnp.float32)
        deepen_at, shorten_at = (
            jnp.float32(max(min(edge, 2.0), -1.0)) for edge in (self.deepen_at, self.shorten_at)
        )
        deeper = jnp.minimum(depth + 1, self.max_depth)
        shallower = jnp.maximum(depth - 1, self.min_depth)
        kept = jnp.where(share - SLACK <= shorten_at, shallower, depth)
        moved = jnp.where(share + SLACK >= deepen_at, deeper, kept)
        return jnp.where(proposed == 0, depth, moved)

    def width(self, entropy: float) -> int:
        """Return how many candidates to draft below a parent.

        Args:
          entropy: normalised entropy of the parent's draft row, in [0, 1].

        Raises:
          ValueError: the entropy is not in [0, 1].
        """
        try:
            value = math.nan if isinstance(entropy, bool) else float(entropy)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not 0 <= value <= 1:
            raise ValueError(f"entropy is {entropy!r}: must be a number in [0, 1]")
        return int(_widths(self, np.float32(value)))

    def next_depth(self, depth: int, accepted: int, proposed: int) -> int:
        """Return the depth to propose in the next round.

        Args:
          depth: depth that was wanted for the last round.
          accepted: tokens of its accepted path.
          proposed: depth that it proposed, which budgets may have capped.

        Raises:
          ValueError: one of them is not an integer of at least 0.
        """
        counts = {"depth": depth, "accepted": accepted, "proposed": proposed}
        for name, value in counts.items():
            assert_between(name, value, 0, 2**31 - 1)
        return int(_next_depths(self, *(np.int32(operator.index(n)) for n in counts.values())))


@functools.partial(jax.jit, static_argnums=0)
def _widths(policy: AdaptiveTreePolicy, entropies: jax.Array) -> jax.Array:
    return policy.widths(entropies, 2**31 - 1)


_next_depths = jax.jit(AdaptiveTreePolicy.next_depths, static_argnums=0)
