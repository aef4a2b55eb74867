"""The shape of a tree that is fixed in advance: nodes level by level, each with its parent.

In the shape descriptions N denotes the nodes of a tree, C the most children of a node.
"""

import dataclasses
import functools
import reprlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_between, assert_kind
from jaxspec.trees import Tree

MAX_NODES = 4096
"""Most nodes of a tree, the root counted: tree attention needs an array [N, N]."""


class Capacity(NamedTuple):
    """Sizes that trees are padded to; trees of one capacity share one compiled verifier.

    Attributes:
      max_nodes: N, the root counted.
      max_children: child slots of a node.
      max_depth: levels below the root.
    """

    max_nodes: int
    max_children: int
    max_depth: int

    @property
    def is_path(self) -> bool:
        """Whether there is room for single paths only."""
        return self.max_children == 1 and self.max_depth == self.max_nodes - 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """A tree whose shape does not depend on the text.

    The nodes are numbered level by level, and within a level in the order of their parents.

    Attributes:
      parents: the parent of each node; -1 for the root, node 0.

    >>> Shape.of_branching((2, 1)).parents
    (-1, 0, 0, 1, 2)
    >>> Shape.of_choices([(0,), (1,), (0, 0), (0, 1)]).parents
    (-1, 0, 0, 1, 1)
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless the parents describe a tree with at least one candidate."""
        assert_kind("parents", self.parents, tuple, "a tuple of node numbers")
        if not 2 <= len(self.parents) <= MAX_NODES:
            raise ValueError(f"a shape has 2 to {MAX_NODES} nodes, got {len(self.parents)}")
        if self.parents[0] != -1:
            raise ValueError(f"parents[0] is {self.parents[0]}: the root's parent must be -1")
        for node, parent in enumerate(self.parents[1:], 1):
            least = max(self.parents[node - 1], 0)
            assert_between(f"parents are {self.parents}: that of node {node}", parent, least)
            if parent >= node:
                raise ValueError(f"node {node}: parent {parent} must be a node before it")

    @classmethod
    def of_branching(cls, branching: tuple[int, ...], max_nodes: int | None = None) -> "Shape":
        """Make the tree in which all nodes of one depth have equally many children.

        Args:
          branching: children of a node at depth 0, 1, ..., each at least 1.
          max_nodes: keep the first nodes only, the root counted.

        Raises:
          ValueError: there is no candidate, or there are more than `MAX_NODES` nodes.
        """
        wanted = "a Shape, or a tuple of the branching at each depth, such as (2, 1)"
        assert_kind("shape", branching, tuple, wanted)
        if not 1 <= len(branching) < MAX_NODES:
            raise ValueError(f"shape is {reprlib.repr(branching)}: must be {wanted}")
        for depth, children in enumerate(branching):
            name = f"shape is {reprlib.repr(branching)}: the entry at depth {depth}"
            assert_between(name, children, 1)
        most = MAX_NODES + 1
        if max_nodes is not None:
            assert_between("max_nodes", max_nodes, 2, MAX_NODES)
            most = max_nodes
        parents, level = [-1], range(1)
        for children in branching:
            room = most - len(parents)
            parents += [node for node in level for _ in range(min(children, room))][:room]
            level = range(level.stop, len(parents))
        if len(parents) > MAX_NODES:
            raise ValueError(
                f"branching is {reprlib.repr(branching)}: more than {MAX_NODES} nodes, the most "
                "that a tree may have; give max_nodes"
            )
        return cls(tuple(parents))

    @classmethod
    def of_choices(cls, choices: Iterable[Sequence[int]]) -> "Shape":
        """Make an irregular tree from the ranks along each path, as Medusa and Sequoia give it.

        Args:
          choices: one path of ranks for each node below the root: (0, 1) is the second candidate
            below the first candidate of the root. Each path needs its parent and its elder siblings.

        Raises:
          ValueError: naming a choice that occurs twice or lacks its parent or an elder sibling.
        """
        ordered = sorted((tuple(choice) for choice in choices), key=lambda c: (len(c), c))
        number: dict[tuple[int, ...], int] = {(): 0}
        for choice in ordered:
            if choice in number:
                raise ValueError(f"choice {choice} is given twice, or is empty")
            elder = (*choice[:-1], choice[-1] - 1)
            for needed in (choice[:-1], elder if choice[-1] != 0 else ()):
                if needed not in number:
                    raise ValueError(f"choice {choice} needs the choice {needed}")
            number[choice] = len(number)
        return cls((-1, *(number[choice[:-1]] for choice in ordered)))

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """Depth of each node, int [N]."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return np.array(depths)

    @functools.cached_property
    def children(self) -> np.ndarray:
        """Children of each node in rank order, then -1, int [N, C]."""
        below: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            below[parent].append(node)
        most = max(map(len, below))
        return np.array([[*each, *[-1] * (most - len(each))] for each in below])

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """Which nodes each node follows: itself and its ancestors, bool [N, N]."""
        seen = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents[1:], 1):
            seen[node] |= seen[parent]
        return seen

    @functools.cached_property
    def capacity(self) -> Capacity:
        """Sizes of this tree."""
        return Capacity(len(self.parents), self.children.shape[1], int(self.depths[-1]))

    def level(self, depth: int) -> slice:
        """Return the nodes of one depth."""
        return slice(*np.searchsorted(self.depths, (depth, depth + 1)).tolist())

    def below(self, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how the candidates below one depth are laid out.

        Returns:
          (children int [L, W] of each node of the level, then -1; int [M] the places of the next
          level's nodes in these, flattened; int [M] the place of each one's parent in the level).
        """
        children = self.children[self.level(depth)]
        children = children[:, : int((children >= 0).sum(axis=1).max())]
        places = np.flatnonzero(children.reshape(-1) >= 0)
        return children, places, places // children.shape[1]

    def tree(self, tokens: jax.Array) -> Tree:
        """Return the tree of some tokens, int32 [N]."""
        return Tree(
            tokens=tokens,
            parents=jnp.asarray(self.parents, jnp.int32),
            children=jnp.asarray(self.children, jnp.int32),
            level_sizes=jnp.asarray(np.bincount(self.depths), jnp.int32),
        )


def shape_of(shape: Shape | tuple[int, ...], max_nodes: int | None = None) -> Shape:
    """Return a shape given as one, or as the branching at each depth.

    Raises:
      ValueError: it is neither, or `max_nodes` is given for a `Shape`.
    """
    if not isinstance(shape, Shape):
        return Shape.of_branching(shape, max_nodes)
    if max_nodes is not None:
        raise ValueError("max_nodes is for a shape given by its branching, such as (3, 2)")
    return shape
