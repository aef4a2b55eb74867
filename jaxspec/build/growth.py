"""How a tree is grown: its sizes, its budget, and what comes of it.

Level by level, the parents of a level in node order, the siblings below a parent in the order they
are given, until the node budget is spent. So a tree under a budget is the first nodes of the tree
without it.

In the shape descriptions N denotes the nodes that a tree has room for.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxspec.providers import Context, Usage
from jaxspec.trees import ROOT, Tree, make_tree

_NO_BUDGET = 2**31 - 1  # more nodes than an int32 can number


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


Sizes: TypeAlias = Capacity | tuple[int, int, int]
"""A capacity, or the same three numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Drafted:
    """A tree of candidates and what it took to draft it.

    Attributes:
      tree: the candidates, siblings distinct and by falling draft probability.
      usage: what was asked of the draft.
      entropies: float64 [N], read-only: `normalised_entropy` of the draft row after each node that
        was asked about, NaN for the others and for padding.
    """

    tree: Tree
    usage: Usage
    entropies: np.ndarray  # [N]


class Plan(NamedTuple):
    """How far a tree is to grow.

    Attributes:
      expected: for each depth, at least 1: how many children a parent is taken to get when it is
        decided for how many parents the budget has room.
      max_nodes: the budget.
      capacity: sizes to pad to, if stated.
    """

    expected: tuple[int, ...]
    max_nodes: int
    capacity: Capacity | None


class Answers(NamedTuple):
    """What some parents of one level were answered.

    Attributes:
      candidates: for each parent, tokens in sibling order.
      usage: what was asked of the draft.
      entropies: for each parent.
    """

    candidates: Sequence[tuple[int, ...]]
    usage: Usage
    entropies: Sequence[float]


def make_plan(expected: Sequence[int], max_nodes: int | None, capacity: Sizes | None) -> Plan:
    """Check a budget and a depth against the capacity."""
    sizes = None if capacity is None else Capacity(*capacity)
    if sizes is not None and (min(sizes[:2]) < 1 or sizes.max_depth < 0):
        raise ValueError(f"{sizes} has no room for the root: at least (1, 1, 0)")
    if sizes is not None and len(expected) > sizes.max_depth:
        raise ValueError(f"{len(expected)} levels do not fit a capacity of depth {sizes.max_depth}")
    room = _NO_BUDGET if sizes is None else sizes.max_nodes
    if max_nodes is not None and not 1 <= max_nodes <= room:
        raise ValueError(
            f"max_nodes is {max_nodes}: it counts the root and fits the capacity, so it is from 1 "
            f"to {room}"
        )
    return Plan(tuple(expected), room if max_nodes is None else max_nodes, sizes)


def checked_width(width: int, vocab: int, capacity: Sizes | None, place: str) -> int:
    """Check one width; more than the vocabulary is the vocabulary."""
    try:
        whole = -1 if isinstance(width, bool) else operator.index(width)
    except TypeError:
        whole = -1
    if whole < 0:
        raise ValueError(f"{place} is {width!r}: it must be an integer, at least 0")
    whole = min(whole, vocab)
    if capacity is not None and whole > Capacity(*capacity).max_children:
        raise ValueError(
            f"{place} is {width}: more than the capacity's {Capacity(*capacity).max_children} "
            "child slots"
        )
    return whole


def grow(
    context: Context, plan: Plan, ask: Callable[[int, Sequence[int], list[Context]], Answers]
) -> Drafted:
    """Grow a tree.

    Args:
      context: what it is for; the last token is the root.
      plan: how far.
      ask: maps (depth, nodes, contexts after them) to their `Answers`.
    """
    tokens, parents, contexts = [context[-1]], [-1], [context]
    entropies: dict[int, float] = {}
    usage = Usage()
    level = range(ROOT, ROOT + 1)
    for depth, expected in enumerate(plan.expected):
        waiting = level
        while waiting and len(tokens) < plan.max_nodes:
            with_room = -(-(plan.max_nodes - len(tokens)) // expected)
            nodes, waiting = waiting[:with_room], waiting[with_room:]
            answers = ask(depth, nodes, [contexts[node] for node in nodes])
            usage += answers.usage
            entropies |= zip(nodes, answers.entropies, strict=True)
            for node, below in zip(nodes, answers.candidates, strict=True):
                for token in below[: plan.max_nodes - len(tokens)]:
                    tokens.append(token)
                    parents.append(node)
                    contexts.append((*contexts[node], token))
        level = range(level.stop, len(tokens))
    sizes = {} if plan.capacity is None else plan.capacity._asdict()
    tree = make_tree(tokens, parents, **sizes)
    by_node = np.full(tree.max_nodes, np.nan)
    by_node[list(entropies)] = list(entropies.values())
    by_node.flags.writeable = False
    return Drafted(tree=tree, usage=usage, entropies=by_node)
