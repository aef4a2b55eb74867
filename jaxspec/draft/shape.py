"""A tree of fixed widths: where its nodes stand, and the tree of their tokens."""

import dataclasses
import math
import reprlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_kind, assert_whole
from jaxspec.draft.growth import MAX_NODES, Capacity, count_nodes
from jaxspec.trees import Tree, make_tree


@dataclasses.dataclass(frozen=True)
class Shape:
    """A tree in which all nodes of a depth have as many children; nodes stand level by level.

    Attributes:
      widths: children of each node, by depth.

    >>> shape = Shape(widths=(2, 1))
    >>> shape.sizes, shape.starts, shape.capacity
    ((1, 2, 2), (0, 1, 3, 5), Capacity(max_nodes=5, max_children=2, max_depth=2))
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a tree without candidates."""
        wanted = "a sequence of widths, one for each depth, such as (2, 1)"
        assert_kind("widths", self.widths, Sequence, wanted)
        if not self.widths:
            raise ValueError(f"widths are {self.widths}: one width of at least 1 for each depth")
        for depth, width in enumerate(self.widths):
            assert_whole(f"widths are {self.widths}: the one at depth {depth}", width, 1)
        if len(self.widths) >= MAX_NODES or count_nodes(self.widths) > MAX_NODES:
            raise ValueError(
                f"widths are {reprlib.repr(self.widths)}: more than {MAX_NODES} nodes, the most that "
                "a tree may have"
            )

    @property
    def depth(self) -> int:
        """D."""
        return len(self.widths)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes at each depth, the root's first."""
        return tuple(math.prod(self.widths[:depth]) for depth in range(self.depth + 1))

    @property
    def starts(self) -> tuple[int, ...]:
        """Number of the first node of each depth, then N."""
        return tuple(sum(self.sizes[:depth]) for depth in range(self.depth + 2))

    @property
    def capacity(self) -> Capacity:
        """All that the widths ask for."""
        return Capacity(sum(self.sizes), max(self.widths), self.depth)

    @property
    def is_path(self) -> bool:
        """Whether it is a single path."""
        return max(self.widths) == 1

    def whole(self) -> Tree:
        """Return the tree at its full depth, all tokens 0."""
        parents = [-1]
        for start, size, width in zip(self.starts, self.sizes, self.widths, strict=False):
            parents += [start + node for node in range(size) for _ in range(width)]
        return make_tree([0] * len(parents), parents, distinct_siblings=False)

    def tree(self, tokens: jax.Array, depth: jax.Array) -> Tree:
        """Return the tree of some tokens, cut to a depth.

        Args:
          tokens: int32 [N].
          depth: int32 [], from 0 to D.
        """
        whole = self.whole()
        nodes = jnp.asarray(np.cumsum(self.sizes), jnp.int32)[depth]
        numbers = jnp.arange(whole.max_nodes, dtype=jnp.int32)
        levels = jnp.arange(self.depth + 1, dtype=jnp.int32)
        return Tree(
            tokens=jnp.where(numbers < nodes, tokens, -1),
            parents=jnp.where(numbers < nodes, whole.parents, -1),
            children=jnp.where(whole.children < nodes, whole.children, -1),
            level_sizes=jnp.where(levels <= depth, whole.level_sizes, 0),
        )


class Shaped:
    """What drafters of a tree of fixed widths have in common.

    Attributes:
      widths_by_depth: candidates below each node, by depth; all ones for a path.
    """

    widths_by_depth: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """Where nodes stand."""
        return Shape(self.widths_by_depth)

    @property
    def capacity(self) -> Capacity:
        """All that the widths ask for."""
        return self.shape.capacity

    @property
    def widths(self) -> tuple[int, ...]:
        """The whole tree, or the root alone."""
        return (1, self.capacity.max_nodes)

    @property
    def first_depth(self) -> int:
        """The number of widths."""
        return self.shape.depth
