"""Who drafts: nobody, a sampled path, a fixed tree, an adaptive tree.

A drafter says which rule verifies what it proposes, and has one capacity, so that all of a decode
runs through one compiled verifier whatever is drafted.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxspec.build import build_adaptive, build_top_k
from jaxspec.decode.policy import AdaptiveTreePolicy
from jaxspec.proposals import PointMass, Proposal, WithReplacement, sampled_path
from jaxspec.providers import Context, Provider, Usage
from jaxspec.rows import draw_token
from jaxspec.trees import Tree, make_tree
from jaxspec.verify import RULES, Rule


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """What was proposed in a round.

    Attributes:
      proposal: the candidates, padded to the drafter's capacity.
      depth: depth of the tree; 0 if nothing was proposed.
      usage: what it took of the draft model.
      batches: hypothetical batches of it: one for each level.
    """

    proposal: Proposal
    depth: int
    usage: Usage = Usage()
    batches: int = 0


class Drafter(Protocol):
    """Proposes candidates.

    What it proposes may depend on the context, the depth and the round's draft draws, and its next
    depth on rounds that are over. The draws that verify a proposal are not shown to it.

    Attributes:
      rule: how its proposals are verified.
      max_nodes: N of its proposals.
      first_depth: depth to ask for in the first round.
      draft: the model it drafts with, if any.
    """

    @property
    def rule(self) -> Rule:
        """How its proposals are verified."""

    @property
    def max_nodes(self) -> int:
        """Nodes of its proposals, the root and padding counted."""

    @property
    def first_depth(self) -> int:
        """Depth to ask for in the first round."""

    @property
    def draft(self) -> Provider | None:
        """The model it drafts with."""

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        """Draft at most `depth` levels after a context.

        Args:
          context: prompt and committed tokens; the last is the root.
          depth: at least 0.
          pairs: float32 [N, 2], for each node the pair of uniforms to draw its candidate with.
        """

    def next_depth(self, depth: int, accepted: int, proposed: int) -> int:
        """Return the depth to ask for after a round."""

    def describe(self) -> dict[str, Any]:
        """Say in plain values what it is; two drafters of one description draft alike."""


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Plain autoregressive decoding: each round emits one token of the target's row."""

    rule: Rule = RULES["point_mass"]
    max_nodes: int = 1
    first_depth: int = 0
    draft: None = None

    def __post_init__(self) -> None:
        """Refuse a rule that is not for point masses."""
        _check_is_for_point_masses(self.rule)

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        """Propose nothing."""
        del depth, pairs
        return Draft(proposal=PointMass(tree=make_tree([context[-1]], [-1])), depth=0)

    def next_depth(self, depth: int, accepted: int, proposed: int) -> int:
        """Return 0."""
        del depth, accepted, proposed
        return 0

    def describe(self) -> dict[str, Any]:
        """Name it."""
        return {"drafter": "none"}


@dataclasses.dataclass(frozen=True)
class SampledPath:
    """A single path, each token sampled from the draft's row.

    Attributes:
      draft: the model.
      depth: tokens to draft in a round.
      rule: `RULES["token"]`, or `RULES["block"]` for block verification.
    """

    draft: Provider
    depth: int
    rule: Rule = RULES["token"]

    def __post_init__(self) -> None:
        """Refuse a rule that is not for sampled paths."""
        if self.depth < 1:
            raise ValueError(f"depth is {self.depth}: a path drafts at least one token")
        if self.rule.proposal is not WithReplacement:
            raise ValueError(f"rule {self.rule.name!r} is not for tokens sampled along a path")

    @property
    def max_nodes(self) -> int:
        """T + 1."""
        return self.depth + 1

    @property
    def first_depth(self) -> int:
        """T."""
        return self.depth

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        """Sample up to `depth` tokens one after the other."""
        depth = min(depth, self.depth)
        pairs_by_node = np.asarray(pairs)
        rows = np.zeros((self.depth, self.draft.vocab), np.float32)
        tokens = np.zeros(self.depth, np.int32)
        usage = Usage()
        for level in range(depth):
            (row,), asked = self.draft.rows([(*context, *tokens[:level].tolist())])
            usage += asked
            # A draw is from a row taken over its sum, which in half precision may be 1e-3 from 1.
            rows[level] = row / row.sum(dtype=np.float64)
            tokens[level] = _draw_token(pairs_by_node[level + 1], rows[level])
        proposal = _sampled_path(tokens, rows, depth)
        return Draft(proposal=proposal, depth=depth, usage=usage, batches=depth)

    def next_depth(self, depth: int, accepted: int, proposed: int) -> int:
        """Return T."""
        del depth, accepted, proposed
        return self.depth

    def describe(self) -> dict[str, Any]:
        """Name it, its model, its depth and its rule."""
        return {
            "drafter": "sampled path",
            "draft": self.draft.name,
            "depth": self.depth,
            "rule": self.rule.name,
        }


@dataclasses.dataclass(frozen=True)
class FixedTree:
    """A tree of the draft's most probable tokens, of the same widths in each round.

    Attributes:
      draft: the model.
      widths: candidates below each node, by depth.
      node_budget: most nodes, the root counted; default all that the widths ask for.
      rule: for point masses.
    """

    draft: Provider
    widths: tuple[int, ...]
    node_budget: int | None = None
    rule: Rule = RULES["point_mass"]

    def __post_init__(self) -> None:
        """Refuse a tree without candidates."""
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths are {self.widths}: one width of at least 1 for each depth")
        if self.node_budget is not None and self.node_budget < 2:
            raise ValueError(f"node_budget is {self.node_budget}: the root and a candidate make 2")
        _check_is_for_point_masses(self.rule)

    @property
    def max_nodes(self) -> int:
        """Nodes that the widths ask for, within the budget."""
        asked_for = _nodes_of(self.widths)
        return asked_for if self.node_budget is None else min(asked_for, self.node_budget)

    @property
    def first_depth(self) -> int:
        """The number of widths."""
        return len(self.widths)

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        """Take the most probable tokens after each prefix, level by level."""
        del pairs
        built = build_top_k(
            self.draft,
            context,
            widths=self.widths[:depth],
            capacity=(self.max_nodes, max(self.widths), len(self.widths)),
        )
        return _draft_of(built.tree, built.usage)

    def next_depth(self, depth: int, accepted: int, proposed: int) -> int:
        """Return the number of widths."""
        del depth, accepted, proposed
        return len(self.widths)

    def describe(self) -> dict[str, Any]:
        """Name it, its model, its shape and its rule."""
        return {
            "drafter": "fixed tree",
            "draft": self.draft.name,
            "widths": list(self.widths),
            "max_nodes": self.max_nodes,
            "rule": self.rule.name,
        }


@dataclasses.dataclass(frozen=True)
class AdaptiveTree:
    """A tree as wide as the draft is unsure and as deep as the last rounds were accepted.

    Attributes:
      draft: the model.
      policy: the formulas.
      rule: for point masses.
    """

    draft: Provider
    policy: AdaptiveTreePolicy = AdaptiveTreePolicy()
    rule: Rule = RULES["point_mass"]

    def __post_init__(self) -> None:
        """Refuse a rule that is not for point masses."""
        _check_is_for_point_masses(self.rule)

    @property
    def max_nodes(self) -> int:
        """The policy's budget, or all that its greatest widths and depth ask for if that is less."""
        widest = _nodes_of((self.policy.max_width,) * self.policy.max_depth)
        return min(self.policy.max_nodes, widest)

    @property
    def first_depth(self) -> int:
        """The policy's first depth."""
        return self.policy.first_depth

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        """Take the most probable tokens after each prefix, as many as its entropy says."""
        del pairs
        built = build_adaptive(
            self.draft,
            context,
            depth=depth,
            width_of=self.policy.width,
            capacity=(self.max_nodes, self.policy.max_width, self.policy.max_depth),
        )
        return _draft_of(built.tree, built.usage)

    def next_depth(self, depth: int, accepted: int, proposed: int) -> int:
        """Follow the policy."""
        return self.policy.next_depth(depth, accepted, proposed)

    def describe(self) -> dict[str, Any]:
        """Name it, its model, its policy and its rule."""
        return {
            "drafter": "adaptive tree",
            "draft": self.draft.name,
            "policy": dataclasses.asdict(self.policy),
            "rule": self.rule.name,
        }


_draw_token = jax.jit(draw_token)
_sampled_path = jax.jit(sampled_path)


def _check_is_for_point_masses(rule: Rule) -> None:
    if rule.proposal is not PointMass:
        raise ValueError(f"rule {rule.name!r} is not for candidates that nobody drew")


def _draft_of(tree: Tree, usage: Usage) -> Draft:
    depth = int(np.flatnonzero(np.asarray(tree.level_sizes))[-1])
    return Draft(proposal=PointMass(tree=tree), depth=depth, usage=usage, batches=depth)


def _nodes_of(widths: Sequence[int]) -> int:
    return 1 + sum(math.prod(widths[: depth + 1]) for depth in range(len(widths)))
