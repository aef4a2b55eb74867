"""How a tree is grown: its sizes, its budget, and what comes of it.

Level by level, the parents of a level in node order, the siblings below a parent in the order they
are given, until the node budget is spent. So a tree under a budget is the first nodes of the tree
without it.

In the shape descriptions N denotes the nodes that a tree has room for.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxspec.checks import (
    assert_between,
    assert_kind,
    described,
)
from jaxspec.models.provider import Context, Usage
from jaxspec.trees import ROOT, Tree, make_tree

MAX_NODES = 4096
"""Most nodes of a tree, the root counted: what sees what is an array [N, N]."""


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
      stop_tokens: tokens below which there are no candidates.
    """

    expected: tuple[int, ...]
    max_nodes: int
    capacity: Capacity | None
    stop_tokens: frozenset[int] = frozenset()


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


def count_nodes(widths: Iterable[int]) -> int:
    """Count the nodes of a tree of these widths, the root too, up to the first beyond `MAX_NODES`."""
    total = level = 1
    for width in widths:
        level *= width
        total += level
        if total > MAX_NODES:
            break
    return total


def capacity_of(capacity: Any) -> Capacity:
    """Return a capacity, given as one or as its three numbers.

    Raises:
      ValueError: it is not three integers with room for the root.
    """
    wanted = "a Capacity(max_nodes, max_children, max_depth), or the three numbers"
    assert_kind("capacity", capacity, Sequence, wanted)
    if len(capacity) != 3 or isinstance(capacity, str):
        raise ValueError(f"capacity is {capacity!r}: must be {wanted}")
    sizes = Capacity(*capacity)
    bounds = ((1, MAX_NODES), (1, None), (0, MAX_NODES))
    for name, size, (least, most) in zip(Capacity._fields, sizes, bounds, strict=True):
        try:
            assert_between(f"{name} of the capacity", size, least, most)
        except ValueError as error:
            raise ValueError(f"{sizes} has no room for the root, or is no size: {error}") from error
    return sizes


def make_plan(expected: Sequence[int], max_nodes: int | None, capacity: Sizes | None) -> Plan:
    """Check a budget and a depth against the capacity."""
    sizes = None if capacity is None else capacity_of(capacity)
    if sizes is not None and len(expected) > sizes.max_depth:
        raise ValueError(f"{len(expected)} levels do not fit a capacity of depth {sizes.max_depth}")
    room = MAX_NODES if sizes is None else sizes.max_nodes
    if max_nodes is None:
        if sizes is None and count_nodes(expected) > MAX_NODES:
            raise ValueError(
                f"the widths ask for more than {MAX_NODES} nodes, the most that a tree may have: "
                "give max_nodes"
            )
        return Plan(tuple(expected), room, sizes)
    is_whole = isinstance(max_nodes, int | np.integer) and not isinstance(max_nodes, bool)
    if not is_whole or not 1 <= max_nodes <= room:
        raise ValueError(
            f"max_nodes is {max_nodes!r}: it counts the root and fits the capacity, so it is an "
            f"integer from 1 to {room}"
        )
    return Plan(tuple(expected), int(max_nodes), sizes)


def checked_widths(widths: Any) -> tuple[Any, ...]:
    """Return widths as a tuple, for `checked_width` to check each.

    Raises:
      ValueError: they are no sequence, or more than a tree has levels.
    """
    wanted = "a sequence of widths, one for each depth, such as (2, 1)"
    is_array = isinstance(widths, np.ndarray) and widths.ndim == 1
    if isinstance(widths, str | bytes) or not (is_array or isinstance(widths, Sequence)):
        raise ValueError(f"widths is {described(widths)}: must be {wanted}")
    if len(widths) >= MAX_NODES:
        raise ValueError(f"{len(widths)} widths: a tree has at most {MAX_NODES} nodes")
    return tuple(widths)


def checked_width(width: Any, vocab: int, capacity: Sizes | None, place: str) -> int:
    """Check one width; more than the vocabulary is the vocabulary."""
    try:
        whole = -1 if isinstance(width, bool) else operator.index(width)
    except TypeError:
        whole = -1
    if whole < 0:
        raise ValueError(f"{place} is {width!r}: it must be an integer, at least 0")
    whole = min(whole, vocab)
    if capacity is not None and whole > capacity_of(capacity).max_children:
        raise ValueError(
            f"{place} is {width}: more than the capacity's {capacity_of(capacity).max_children} "
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
        waiting = [node for node in level if node == ROOT or tokens[node] not in plan.stop_tokens]
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
