"""Targets: models that give the next-token rows of a tree.

Row n is the target's law after node n, and it scores the children of n. So the query that scores a
candidate x holds the prompt and x's ancestors and excludes x, and siblings share one query and one
row. A target scores the root, the nodes that have children and, with `bonus`, the leaves; nodes of
equal context (siblings of one token, drawn with replacement) are scored once.

In the shape descriptions N denotes the nodes that a tree has room for, V the vocabulary.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from jaxspec.checks import TreeError, assert_kind
from jaxspec.models.provider import Context, Provider, Usage, check_context
from jaxspec.trees import NONE, ROOT, Tree, assert_tree


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The target's rows for one tree.

    Attributes:
      rows: float32 [N, V], row n is the target's law after node n. Rows that were not scored, of
        padding and without `bonus` of leaves, are zeros; no verifier reads them.
      usage: what was asked of the target: contexts scored, and calls of a callback or forwards.
      batches: how often a target that takes any number of contexts at once would be waited for.
    """

    rows: np.ndarray  # [N, V]
    usage: Usage
    batches: int


class Target(abc.ABC):
    """A model that scores trees; a custom one sets the attributes and defines `rows`.

    Attributes:
      name: the model's id in records.
      vocab: V.
      max_context: most tokens of a context; None for no limit.
    """

    name: str
    vocab: int
    max_context: int | None

    @abc.abstractmethod
    def rows(self, tree: Tree, context: Sequence[int], *, bonus: bool = False) -> Scores:
        """Score a tree after a context.

        Args:
          tree: the candidates; `tokens[0]` is the last token of the context, or -1.
          context: prompt and committed tokens, at least one.
          bonus: score leaves too, for the token after a fully accepted path.

        Raises:
          ValueError: the context or the tree does not fit the model or each other. Nothing was asked
            of the model.
          RowError: the model's answer is bad.
        """

    def room_after(self, length: int) -> int:
        """Return the most nodes, padding and the root counted, of a tree after `length` tokens."""
        del length
        return 2**31 - 1

    def nodes_to_score(
        self, tree: Tree, context: Sequence[int], *, bonus: bool
    ) -> tuple[list[Context], dict[Context, list[int]]]:
        """Check a tree and a context; return what is to be scored.

        Returns:
          (the context of each node; the nodes of each distinct context to score, in node order).

        Raises:
          ValueError: as `rows`.
        """
        contexts = node_contexts(tree, check_context(self.name, self.vocab, context))
        for node, each in enumerate(contexts):
            if not 0 <= each[-1] < self.vocab:
                raise ValueError(
                    f"node {node}: token {each[-1]} is outside {self.name}'s vocabulary of "
                    f"{self.vocab}"
                )
        inner = {ROOT, *np.asarray(tree.parents)[: len(contexts)].tolist()}
        nodes: dict[Context, list[int]] = {}
        for node, each in enumerate(contexts):
            if bonus or node in inner:
                nodes.setdefault(each, []).append(node)
        return contexts, nodes


class CallableTarget(Target):
    """A `Provider` as a target.

    For a pure provider the rows are equal bit for bit whatever the grouping; only the calls differ.
    A provider that is not batched is called once for each context.

    Attributes:
      provider: the model.
      group: the contexts of one call: "all" of the tree, all of one "depth" (the root first), or
        those of one "node", which is the reference. All contexts are known beforehand, so
        `Scores.batches` is 1, except for "depth": the number of depths with a context to score.

    >>> from jaxspec.trees import make_tree
    >>> toy = Provider("toy", vocab=2, ask=lambda c: [0.25, 0.75] if c[-1] else [1.0, 0.0])
    >>> scores = CallableTarget(toy).rows(make_tree([1, 0, 1, 1], [-1, 0, 0, 1]), [0, 1])
    >>> scores.rows.tolist()
    [[0.25, 0.75], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    >>> scores.usage, scores.batches
    (Usage(queries=2, calls=2), 1)
    """

    def __init__(self, provider: Provider, group: Literal["all", "depth", "node"] = "all") -> None:
        """Raise ValueError for an argument of another kind."""
        assert_kind("provider", provider, Provider, "a Provider(name, vocab, ask)")
        if group not in ("all", "depth", "node"):
            raise ValueError(f'group is {group!r}: must be "all", "depth" or "node"')
        self.provider, self.group = provider, group
        self.name, self.vocab = provider.name, provider.vocab
        self.max_context = provider.max_context

    def rows(self, tree: Tree, context: Sequence[int], *, bonus: bool = False) -> Scores:
        """Score a tree in one call for each group; see `Target.rows`."""
        _, nodes = self.nodes_to_score(tree, context, bonus=bonus)
        groups: dict[object, list[Context]] = {}
        for each in nodes:
            key = {"all": None, "depth": len(each), "node": each}[self.group]
            groups.setdefault(key, []).append(each)
        if self.group == "depth":
            groups = {length: groups[length] for length in sorted(map(len, nodes))}
        usage, rows = Usage(), np.zeros((tree.max_nodes, self.vocab), np.float32)
        for group in groups.values():
            answers, asked = self.provider.rows(group)
            usage += asked
            for each, row in zip(group, answers, strict=True):
                rows[nodes[each]] = row
        return Scores(rows=rows, usage=usage, batches=len(groups) if self.group == "depth" else 1)


def as_target(model: Target | Provider) -> Target:
    """Return a target as it is, a provider as `CallableTarget(provider)`; else raise ValueError."""
    if isinstance(model, Target):
        return model
    assert_kind("target", model, Provider, "a Target or a Provider(name, vocab, ask)")
    return CallableTarget(model)


def node_contexts(tree: Tree, context: Sequence[int]) -> list[Context]:
    """Return the context after each node that is not padding: the given one and the node's path.

    Entry n is the query of row n, which scores the children of node n.

    Raises:
      ValueError: the context is empty, or the tree is rooted at another token.
      TreeError: a parent does not come before its child.

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
