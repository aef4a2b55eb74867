"""Width and depth of an adaptive tree, from what is past.

Widths depend on the draft's row at each parent, depths on earlier rounds. A round's candidates are
fixed before any of its draws is used, so the policy changes the tokens per round and never their law.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_between, described
from jaxspec.draft.shape import MAX_NODES

SLACK = 2.0**-12
"""How far below an edge a number may be and still count as at it.

Rows and rounds of simple proportions lie exactly at the edges (log 3 / log 9 is one half), and two
compiled programs may round these to either side.
"""


@dataclasses.dataclass(frozen=True)
class AdaptiveTreePolicy:
    """Width from the entropy of each parent's draft row, depth from the last round's acceptance.

    With h the normalized entropy H(row) / log V, in [0, 1]:

        width(h) = min(max_width, min_width + floor(h (max_width - min_width + 1)))

    With d the depth requested for a round, p > 0 the depth that it proposed, which budgets may have
    capped, and a the tokens of its accepted path:

        next depth = min(d + 1, max_depth) if a / p >= deepen_at
                     max(d - 1, min_depth) if a / p <= shorten_at
                     d                     otherwise

    A round without candidates leaves the depth unchanged. Both formulas are computed in float32; a
    value within 2^-12 of an edge counts as at it.

    Attributes:
      min_width: candidates below a parent whose row is certain.
      max_width: candidates below a parent whose row is uniform.
      min_depth: least depth, at least 1.
      max_depth: greatest depth.
      first_depth: depth of the first round.
      deepen_at: accepted over proposed from which the depth grows; above 1 it never does.
      shorten_at: accepted over proposed up to which it shrinks; below `deepen_at`.
      max_nodes: most nodes of a tree, the root counted.

    >>> policy = AdaptiveTreePolicy(min_width=1, max_width=4)
    >>> policy.width(jnp.array([0.0, 0.3, 0.6, 1.0])).tolist()
    [1, 2, 3, 4]
    >>> int(policy.next_depth(3, accepted=3, proposed=3))
    4
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
            is_number = isinstance(value, int | float | np.integer | np.floating)
            if isinstance(value, bool) or not is_number or not -np.inf < value < np.inf:
                raise ValueError(f"{name} is {described(value)}: must be a finite number")
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

    def width(self, entropy: jax.Array | float, vocab: int = 2**31 - 1) -> jax.Array:
        """Return how many candidates to draft below parents, int32 [...]; traced.

        Args:
          entropy: float32 [...], normalized entropies of the parents' draft rows.
          vocab: most candidates.
        """
        least, most = min(self.min_width, vocab), min(self.max_width, vocab)
        # The steps are those of the policy's widths, also where the vocabulary has fewer tokens.
        steps = min(self.max_width - self.min_width + 1, 2**31)
        share = jnp.asarray(entropy, jnp.float32) * jnp.float32(steps) + jnp.float32(SLACK)
        more = jnp.minimum(jnp.floor(share), jnp.float32(most - least)).astype(jnp.int32)
        return jnp.int32(least) + more

    def next_depth(
        self, depth: jax.Array | int, accepted: jax.Array | int, proposed: jax.Array | int
    ) -> jax.Array:
        """Return the depths of the next round, int32 [...]; traced.

        Args:
          depth: int32 [...], depth requested for the last round.
          accepted: int32 [...], tokens of its accepted path.
          proposed: int32 [...], depth that it proposed, which budgets may have capped.
        """
        depth, accepted, proposed = (
            jnp.asarray(each, jnp.int32) for each in (depth, accepted, proposed)
        )
        share = accepted.astype(jnp.float32) / jnp.maximum(proposed, 1).astype(jnp.float32)
        deepen_at, shorten_at = (
            jnp.float32(max(min(edge, 2.0), -1.0)) for edge in (self.deepen_at, self.shorten_at)
        )
        deeper = jnp.minimum(depth + 1, self.max_depth)
        shallower = jnp.maximum(depth - 1, self.min_depth)
        kept = jnp.where(share - SLACK <= shorten_at, shallower, depth)
        moved = jnp.where(share + SLACK >= deepen_at, deeper, kept)
        return jnp.where(proposed == 0, depth, moved)
