"""Target rows for the nodes of a tree, from any model that is a callable.

Row n is the target's next-token law after node n, and it scores the children of n. So the query
that scores a candidate x holds the prompt and x's ancestors and excludes x, and siblings share one
query and one row. Asked are the root, the nodes that have children and, with `bonus`, the leaves;
nodes of one context (siblings of one token, drawn with replacement) are asked about once.

In the shape descriptions N denotes the nodes that a tree has room for, V the vocabulary.
"""

import abc
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.checks import TreeError, assert_kind
from jaxspec.models.provider import Context, Provider, Usage
from jaxspec.trees import NONE, ROOT, Tree, assert_tree


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The target's rows for one tree.

    Attributes:
      rows: float32 [N, V], row n is the target's law after node n. Rows that were not asked for,
        of padding and without `bonus` of leaves, are zeros; no verifier reads them.
      usage: what was asked of the target: contexts scored, and invocations of the callback.
      batches: hypothetical batches: how often a target that takes any number of contexts at once
        would have to be waited for. `score_sequential` and `score_batched`: 1, since all contexts
        are known beforehand. `score_layered`: the depths that have something to ask.
    """

    rows: np.ndarray  # [N, V]
    usage: Usage
    batches: int


def score_sequential(
    target: Provider, tree: Tree, context: Sequence[int], *, bonus: bool = False
) -> Scores:
    """Score a tree with one call for each context: the reference.

    Args:
      target: the model.
      tree: the candidates; `tokens[0]` is the last token of the context, or -1.
      context: prompt and committed tokens, at least one.
      bonus: score leaves too, for the token after a fully accepted path.

    Returns:
      `Scores`. For a pure provider the rows are the same, bit for bit, as those of `score_batched`
      and `score_layered`; only the calls differ.

    Raises:
      ValueError: the context or the tree does not fit the model or the other; nothing was asked.
      RowError: the target's answer is bad.

    >>> from jaxspec.trees import make_tree
    >>> target = Provider("toy", vocab=2, ask=lambda c: [0.25, 0.75] if c[-1] else [1.0, 0.0])
    >>> scores = score_sequential(target, make_tree([1, 0, 1, 1], [-1, 0, 0, 1]), [0, 1])
    >>> scores.rows.tolist()
    [[0.25, 0.75], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    >>> scores.usage, scores.batches
    (Usage(queries=2, calls=2), 1)
    """
    nodes = _asked(target, tree, context, bonus=bonus)
    return _score(target, tree, nodes, [[each] for each in _distinct(nodes)], batches=1)


def score_batched(
    target: Provider, tree: Tree, context: Sequence[int], *, bonus: bool = False
) -> Scores:
    """Score a tree with one batched call for all contexts.

    A provider that is not batched is called once for each of them.

    Args:
      target: the model.
      tree: the candidates; `tokens[0]` is the last token of the context, or -1.
      context: prompt and committed tokens, at least one.
      bonus: score leaves too, for the token after a fully accepted path.

    Returns:
      `Scores`.

    Raises:
      ValueError: the context or the tree does not fit the model or the other; nothing was asked.
      RowError: the target's answer is bad.
    """
    nodes = _asked(target, tree, context, bonus=bonus)
    return _score(target, tree, nodes, [_distinct(nodes)], batches=1)


def score_layered(
    target: Provider, tree: Tree, context: Sequence[int], *, bonus: bool = False
) -> Scores:
    """Score a tree with one batched call for each depth that has something to ask, the root's first.

    A provider that is not batched is called once for each context.

    Args:
      target: the model.
      tree: the candidates; `tokens[0]` is the last token of the context, or -1.
      context: prompt and committed tokens, at least one.
      bonus: score leaves too, for the token after a fully accepted path.

    Returns:
      `Scores`.

    Raises:
      ValueError: the context or the tree does not fit the model or the other; nothing was asked.
      RowError: the target's answer is bad.
    """
    nodes = _asked(target, tree, context, bonus=bonus)
    layers: dict[int, list[Context]] = {}
    for each in _distinct(nodes):
        layers.setdefault(len(each), []).append(each)
    ordered = [layers[length] for length in sorted(layers)]
    return _score(target, tree, nodes, ordered, batches=len(ordered))


def node_contexts(tree: Tree, context: Sequence[int]) -> list[Context]:
    """Return the context after each node: the given one and the path down to the node.

    Entry n is the query of row n, which scores the children of node n.

    Args:
      tree: the candidates; `tokens[0]` is the last token of the context, or -1.
      context: prompt and committed tokens, at least one.

    Returns:
      One for each node, the root's first; none for padding.

    Raises:
      ValueError: the context is empty, or the tree is rooted at another token.
      TreeError: a parent does not stand before its child.

    >>> from jaxspec.trees import make_tree
    >>> node_contexts(make_tree([7, 5, 6, 4], [-1, 0, 0, 1], max_nodes=9), (3, 7))
    [(3, 7), (3, 7, 5), (3, 7, 6), (3, 7, 5, 4)]
    """
    assert_tree(tree)
    plain = jax.device_get(tree)
    count = int(plain.level_sizes.sum())
    tokens, parents = plain.tokens.tolist(), plain.parents.tolist()
    if not 1 <= count <= len(tokens):
        raise TreeError(f"the tree counts {count} nodes: it must be from 1 to {len(tokens)}")
    if len(context) == 0:
        raise ValueError("the context is empty: it holds at least the root's token")
    if tokens[ROOT] not in (NONE, context[-1]):
        raise ValueError(
            f"the tree's root is token {tokens[ROOT]}, the context ends with {context[-1]}"
        )
    contexts: list[Context] = [tuple(int(token) for token in context)]
    for node in range(1, count):
        if not 0 <= parents[node] < node:
            raise TreeError(f"node {node}: parent {parents[node]} must be a node before it")
        contexts.append((*contexts[parents[node]], tokens[node]))
    return contexts


def _asked(
    target: Provider, tree: Tree, context: Sequence[int], *, bonus: bool
) -> dict[int, Context]:
    """Return the contexts to ask about, by node."""
    contexts = node_contexts(tree, target.check_context(context))
    for node, each in enumerate(contexts):
        if not 0 <= each[-1] < target.vocab:
            raise ValueError(
                f"node {node}: token {each[-1]} is outside {target.name}'s vocabulary of "
                f"{target.vocab}"
            )
    inner = {ROOT, *np.asarray(tree.parents)[: len(contexts)].tolist()}
    return {node: each for node, each in enumerate(contexts) if bonus or node in inner}


def _distinct(nodes: dict[int, Context]) -> list[Context]:
    """Return each context once, in node order."""
    return list(dict.fromkeys(nodes.values()))


def _score(
    target: Provider,
    tree: Tree,
    nodes: dict[int, Context],
    groups: list[list[Context]],
    *,
    batches: int,
) -> Scores:
    """Ask for the contexts group by group and lay the rows out by node."""
    found: dict[Context, np.ndarray] = {}
    usage = Usage()
    for group in groups:
        answers, asked = target.rows(group)
        found |= dict(zip(group, answers, strict=True))
        usage += asked
    rows = np.zeros((tree.max_nodes, target.vocab), np.float32)
    for node, context in nodes.items():
        rows[node] = found[context]
    return Scores(rows=rows, usage=usage, batches=batches)


class Target(abc.ABC):
    """Stub."""

    name: str
    vocab: int
    max_context: int | None

    @abc.abstractmethod
    def rows(self, tree: Tree, context: Sequence[int], *, bonus: bool = False) -> Scores:
        """Stub."""

    def room_after(self, length: int) -> int:
        """Stub."""
        del length
        return 2**31 - 1


class CallableTarget(Target):
    """Stub."""

    def __init__(self, provider: Provider, group: str = "all") -> None:
        """Stub."""
        self.provider, self.name, self.vocab = provider, provider.name, provider.vocab
        self.max_context = provider.max_context
        ways = {"all": score_batched, "depth": score_layered, "node": score_sequential}
        self._score = ways[group]

    def rows(self, tree: Tree, context: Sequence[int], *, bonus: bool = False) -> Scores:
        """Stub."""
        return self._score(self.provider, tree, context, bonus=bonus)


def as_target(target: Target | Provider) -> Target:
    """Stub."""
    if isinstance(target, Target):
        return target
    assert_kind("target", target, Provider, "a Target or a Provider(name, vocab, ask)")
    return CallableTarget(target)
