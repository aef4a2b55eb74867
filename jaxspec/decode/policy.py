"""How wide and how deep to draft next, from what is past.

Widths depend on the draft's row at each parent, depths on rounds that are over: a round's candidates
are then fixed before any of its draws is looked at, so the policy changes how many tokens a round
yields and never their law.
"""

import dataclasses
import math

from jaxspec.checks import assert_whole


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

    A round that proposed nothing leaves the depth as it is.

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
        """Refuse a policy that contradicts itself."""
        wholes = ("min_width", "max_width", "min_depth", "first_depth", "max_depth")
        for name in wholes:
            assert_whole(name, getattr(self, name), 1)
        assert_whole("max_nodes", self.max_nodes, 2)
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

    def width(self, entropy: float) -> int:
        """Return how many candidates to draft below a parent.

        Args:
          entropy: normalised entropy of the parent's draft row, in [0, 1].
        """
        step = math.floor(entropy * (self.max_width - self.min_width + 1))
        return min(self.max_width, self.min_width + step)

    def next_depth(self, depth: int, accepted: int, proposed: int) -> int:
        """Return the depth to propose in the next round.

        Args:
          depth: depth that was wanted for the last round.
          accepted: tokens of its accepted path.
          proposed: depth that it proposed, which budgets may have capped.
        """
        if proposed == 0:
            return depth
        if accepted / proposed >= self.deepen_at:
            return min(depth + 1, self.max_depth)
        if accepted / proposed <= self.shorten_at:
            return max(depth - 1, self.min_depth)
        return depth
