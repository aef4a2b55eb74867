"""Drafters of the host loop: none, a sampled path, a fixed tree, an adaptive tree.

A drafter says which rule verifies what it proposes, and has one capacity, so that all of a decode
runs through one compiled verifier whatever is drafted.
"""

import dataclasses
import inspect
import reprlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxspec.checks import assert_between, assert_kind, assert_members
from jaxspec.draft.bounds import Bounds, aligned
from jaxspec.draft.growth import MAX_NODES, count_nodes
from jaxspec.draft.likely import TINY
from jaxspec.draft.policy import AdaptiveTreePolicy
from jaxspec.draft.top_k import build_adaptive, build_top_k
from jaxspec.models.provider import Context, Provider, Usage
from jaxspec.proposals import PointMass, Proposal, WithReplacement, sampled_path
from jaxspec.rows import draw_token
from jaxspec.trees import Tree, make_tree
from jaxspec.verify import RULES, Rule
from jaxspec.verify.rules import assert_rule


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

    What a draft may depend on, for both loops, in one place. The text stays lossless if and only if a
    draw is never judged by the token that it gave:

    - Which candidates are drafted, and how long or of which shape a draft is, may depend on the
      context and on rounds that are over.
    - For sampled candidates (`WithReplacement`, `WithoutReplacement`) it may also depend on tokens
      drafted before in this round: ancestors and elder siblings. So may the decision to stop after a
      drafted token, made by looking at it: to draft nothing below a stop token, or below one that the
      draft was unsure of, is exact, since the token itself stays in the draft.
    - Never may a drawn token be dropped, replaced, sorted or merged by looking at its own value. To
      drop a last token because its probability is low, or to draft again until a token pleases, is
      another law: with p = (.5, .5) and q = (.9, .1), dropping what has q < .3 makes the first token
      .55 likely.
    - Point masses took no draw: their candidates may be chosen, dropped and sorted by anything but
      the draws that verify them. Those are not shown to a drafter.

    `audit.decoding_law` shows a breach.

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

    def propose(
        self, context: Context, depth: int, pairs: jax.Array, bounds: Bounds | None = None
    ) -> Draft:
        """Draft at most `depth` levels after a context.

        Args:
          context: prompt and committed tokens; the last is the root.
          depth: at least 0.
          pairs: float32 [N, 2], for each node the pair of uniforms to draw its candidate with.
          bounds: the target's vocabulary and the stop tokens; None for the draft's vocabulary and no
            stop tokens. A custom drafter may leave this parameter out: its draft must have the
            target's vocabulary then, and what it drafts below a stop token is cut off.
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
        """Raise ValueError for a rule that is not for point masses, or sizes of a drafter."""
        _check_is_for_point_masses(self.rule)
        sizes = (self.max_nodes, self.first_depth, self.draft)
        if repr(sizes) != "(1, 0, None)":
            raise ValueError("max_nodes, first_depth and draft of NoDraft are always 1, 0 and None")

    def propose(
        self, context: Context, depth: int, pairs: jax.Array, bounds: Bounds | None = None
    ) -> Draft:
        """Propose nothing."""
        del depth, pairs, bounds
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
        """Raise ValueError for a rule that is not for sampled paths, or no depth."""
        _check_draft(self.draft)
        assert_between("depth", self.depth, 1, MAX_NODES - 1)
        assert_rule("rule", self.rule)
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

    def propose(
        self, context: Context, depth: int, pairs: jax.Array, bounds: Bounds | None = None
    ) -> Draft:
        """Sample up to `depth` tokens one after the other; none after a stop token."""
        assert_between("depth", depth, 0)
        draft = aligned(self.draft, bounds)
        stops = frozenset() if bounds is None else bounds.stop_tokens
        pairs_by_node = np.asarray(pairs)
        rows = np.zeros((self.depth, draft.vocab), np.float32)
        tokens = np.zeros(self.depth, np.int32)
        usage, drafted, asked = Usage(), 0, 0
        while drafted < min(depth, self.depth) and not (drafted and tokens[drafted - 1] in stops):
            (row,), used = draft.rows([(*context, *tokens[:drafted].tolist())])
            usage, asked = usage + used, asked + 1
            if row.max() < TINY:  # the draft has nothing to say in the target's tokens
                break
            if bounds is not None and bounds.apply is not None:
                (row,) = bounds.apply(row[None])
            # A draw is from a row taken over its sum, which in half precision may be 1e-3 from 1.
            rows[drafted] = row / row.sum(dtype=np.float64)
            tokens[drafted] = _draw_token(pairs_by_node[drafted + 1], rows[drafted])
            drafted += 1
        proposal = _sampled_path(tokens, rows, drafted)
        return Draft(proposal=proposal, depth=drafted, usage=usage, batches=asked)

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
        """Raise ValueError for a tree without candidates, or one that is too large."""
        _check_draft(self.draft)
        wanted = "a sequence of widths, one for each depth, such as (2, 1)"
        assert_kind("widths", self.widths, Sequence, wanted)
        if not 1 <= len(self.widths) < MAX_NODES:
            raise ValueError(
                f"widths are {reprlib.repr(self.widths)}: must be from 1 to {MAX_NODES - 1} widths, "
                "one for each depth"
            )
        for depth, width in enumerate(self.widths):
            assert_between(f"widths are {self.widths}: the one at depth {depth}", width, 1)
        if self.node_budget is not None:
            assert_between("node_budget", self.node_budget, 2)
        _check_is_for_point_masses(self.rule)
        if self.max_nodes > MAX_NODES:
            raise ValueError(
                f"widths are {self.widths}: more than {MAX_NODES} nodes, the most that a tree may "
                "have: give a node_budget"
            )

    @property
    def _widths(self) -> tuple[int, ...]:
        """The widths, none above the vocabulary."""
        return tuple(min(int(width), self.draft.vocab) for width in self.widths)

    @property
    def max_nodes(self) -> int:
        """Nodes that the widths ask for, within the budget."""
        asked_for = count_nodes(self._widths)
        return asked_for if self.node_budget is None else min(asked_for, int(self.node_budget))

    @property
    def first_depth(self) -> int:
        """The number of widths."""
        return len(self.widths)

    def propose(
        self, context: Context, depth: int, pairs: jax.Array, bounds: Bounds | None = None
    ) -> Draft:
        """Take the most probable tokens after each prefix, level by level."""
        del pairs
        assert_between("depth", depth, 0)
        built = build_top_k(
            aligned(self.draft, bounds),
            context,
            widths=self._widths[:depth],
            capacity=(self.max_nodes, max(self._widths), len(self._widths)),
            stop_tokens=() if bounds is None else bounds.stop_tokens,
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
            "widths": [int(width) for width in self.widths],
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
        """Raise ValueError for a rule that is not for point masses, or no policy."""
        _check_draft(self.draft)
        assert_kind("policy", self.policy, AdaptiveTreePolicy, "an AdaptiveTreePolicy(...)")
        _check_is_for_point_masses(self.rule)

    @property
    def _max_width(self) -> int:
        return min(int(self.policy.max_width), self.draft.vocab)

    @property
    def max_nodes(self) -> int:
        """The policy's budget, or all that its greatest widths and depth ask for if that is less."""
        return min(self.policy.max_nodes, count_nodes([self._max_width] * self.policy.max_depth))

    @property
    def first_depth(self) -> int:
        """The policy's first depth."""
        return self.policy.first_depth

    def propose(
        self, context: Context, depth: int, pairs: jax.Array, bounds: Bounds | None = None
    ) -> Draft:
        """Take the most probable tokens after each prefix, as many as its entropy says."""
        del pairs
        assert_between("depth", depth, 0)
        # What lies deeper than the nodes reach has no room: the capacity is that of both loops.
        built = build_adaptive(
            aligned(self.draft, bounds),
            context,
            depth=min(depth, self.policy.max_depth),
            width_of=lambda entropy: min(self.policy.width(entropy), self._max_width),
            capacity=(self.max_nodes, self._max_width, self.policy.max_depth),
            stop_tokens=() if bounds is None else bounds.stop_tokens,
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


def assert_drafter(drafter: Any) -> None:
    """Raise ValueError unless a value is a drafter of the host loop.

    Raises:
      ValueError: naming what was given, what it lacks and what to give instead.
    """
    wanted = "must be a drafter of the host loop, such as SampledPath(draft, depth=4)"
    assert_members("drafter", drafter, Drafter, wanted)
    assert_rule("the drafter's rule", drafter.rule)
    assert_between("the drafter's max_nodes", drafter.max_nodes, 1, MAX_NODES)
    assert_between("the drafter's first_depth", drafter.first_depth, 0, MAX_NODES)
    if drafter.draft is not None:
        _check_draft(drafter.draft)


def takes_bounds(drafter: Drafter) -> bool:
    """Return whether a drafter's `propose` has the parameter `bounds`."""
    return "bounds" in inspect.signature(drafter.propose).parameters


def _check_draft(draft: Any) -> None:
    assert_kind("draft", draft, Provider, "a jaxspec.models.provider.Provider(name, vocab, ask)")


def _check_is_for_point_masses(rule: Rule) -> None:
    assert_rule("rule", rule)
    if rule.proposal is not PointMass:
        raise ValueError(f"rule {rule.name!r} is not for candidates that nobody drew")


def _draft_of(tree: Tree, usage: Usage) -> Draft:
    depth = int(np.flatnonzero(np.asarray(tree.level_sizes))[-1])
    return Draft(proposal=PointMass(tree=tree), depth=depth, usage=usage, batches=depth)
