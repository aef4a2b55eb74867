"""Paths and trees whose shape is fixed in advance, drafted by a model level by level."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import assert_between, struct
from jaxspec.draft.base import Asked, Model, ModelDrafter, Proposed, View, every_node
from jaxspec.draft.likely import likeliest
from jaxspec.draft.shape import MAX_NODES, Capacity, Shape, shape_of
from jaxspec.models.batched import per_sequence
from jaxspec.proposals import PointMass, Proposal, WithoutReplacement, WithReplacement
from jaxspec.rows import Probabilities
from jaxspec.verify import RULES, Rule


@struct
class Grown:
    """A tree of fixed shape while it is drafted."""

    tokens: jax.Array  # int32 [B, N]
    is_in: jax.Array  # bool [B, N], nodes that are candidates so far
    rows: jax.Array | None = None  # float32 [B, I, V], rows drawn from, above the last level


def _put(array: jax.Array, new: jax.Array, nodes: slice) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, new, nodes.start, axis=1)


def _take(array: jax.Array, places: np.ndarray) -> jax.Array:
    is_whole = places.tolist() == list(range(array.shape[1]))
    return array if is_whole else array[:, places]


class _Layered(ModelDrafter):
    """Drafts a tree of fixed shape; a node's candidates are point masses or drawn from its row."""

    kinds: ClassVar[tuple[type[Proposal], ...]] = (PointMass, WithReplacement, WithoutReplacement)

    @property
    @abc.abstractmethod
    def layout(self) -> Shape:
        """The shape."""

    @property
    def capacity(self) -> Capacity:
        """All nodes of the shape."""
        return self.layout.capacity

    @property
    def spare_slots(self) -> int:
        """All nodes, and the token before the root."""
        return self.capacity.max_nodes + 1

    def start(self, view: View, vocab: int) -> Grown:
        """Start with the root."""
        batch, nodes = view.length.shape[0], self.capacity.max_nodes
        rows = None
        if self.rule.proposal is not PointMass:
            inner = self.layout.level(self.capacity.max_depth).start
            rows = jnp.zeros((batch, inner, vocab), jnp.float32)
        return Grown(
            tokens=jnp.tile(view.root_token[:, None], (1, nodes)),
            is_in=jnp.tile(jnp.arange(nodes) == 0, (batch, 1)),
            rows=rows,
        )

    def grow(self, level: int, state: Grown, rows: jax.Array, view: View) -> Grown:
        """Take the most probable tokens of each row, or draw from it, as many as the shape says."""
        batch = rows.shape[0]
        here, below = self.layout.level(level), self.layout.level(level + 1)
        children, places, above = self.layout.below(level)
        # A later sibling does not change the draws of earlier ones: nodes with fewer children than
        # others of their level draw as many, and the surplus is dropped by its rank alone.
        if self.rule.proposal is PointMass:
            tokens, best = likeliest(rows, children.shape[1])
            is_candidate = best > 0
        else:
            pairs = view.pairs[:, children.clip(0)]
            tokens = per_sequence(per_sequence(self.rule.proposal.draw))(pairs, rows)
            # A draft may have no mass on the target's tokens. NaN stays, for the verifier to flag.
            has_mass = jnp.any(rows != 0, axis=2, keepdims=True)
            is_candidate = jnp.broadcast_to(has_mass, tokens.shape)
        is_in = _take(self.is_read(level, state, view), above)
        is_in &= _take(is_candidate.reshape(batch, -1), places)
        drawn_from = state.rows
        if drawn_from is not None:
            drawn_from = _put(drawn_from, rows, here)
        return Grown(
            tokens=_put(state.tokens, _take(tokens.reshape(batch, -1), places), below),
            is_in=_put(state.is_in, is_in, below),
            rows=drawn_from,
        )

    def is_read(self, level: int, state: Grown, view: View) -> jax.Array:
        """Return which nodes of a level are parents of candidates."""
        here = self.layout.level(level)
        is_read = state.is_in[:, here] & (self.layout.children[here, 0] >= 0)[None]
        if level > 0:  # the root may be a stop token of the prompt, which stops nothing
            is_read &= ~view.is_stop(state.tokens[:, here])
        return is_read & (level < view.depth)[:, None]

    def ask(self, level: int, state: Grown, view: View) -> Asked:
        """Ask about the whole level: a node's number is its slot."""
        here = self.layout.level(level)
        tokens = state.tokens[:, here]
        seen = jnp.asarray(self.layout.ancestors[here])
        return Asked(
            tokens=tokens,
            depths=jnp.full_like(tokens, level),
            seen=jnp.broadcast_to(seen[None], (tokens.shape[0], *seen.shape)),
            offset=here.start,
        )

    def finish(self, state: Grown, view: View) -> Proposed:
        """Return the tree with the rows that were drawn from."""
        is_path, rows = self.capacity.is_path, None
        if state.rows is not None:
            # Of a tree there are rows of inner nodes only; a leaf's is never read.
            first = None if is_path else jnp.zeros(state.rows.shape[0], jnp.int32)
            rows = Probabilities(values=state.rows, first=first)
        tree = per_sequence(self.layout.tree)(state.tokens)
        return Proposed(
            proposal=self.rule.proposal(tree=tree, draft_rows=rows),
            is_in=state.is_in,
            slots=None if is_path else every_node(view, self.capacity),
        )


@dataclasses.dataclass(frozen=True)
class FixedTree(_Layered):
    """A tree of the same shape in each round.

    Point masses are the most probable tokens after each prefix, whatever the temperature. Sampled
    kinds draw from the model's row, at the request's temperature and filters. Two drafters that
    differ in the model alone are equal: they share programs.

    Attributes:
      model: a callable, or a network that takes trees.
      shape: the branching at each depth, such as (2, 1), or a `Shape`.
      rule: how candidates are verified; its kind of proposal says how they are drawn.
      max_nodes: keep the first nodes of a branching only, the root counted; default all.
    """

    model: Model = dataclasses.field(compare=False)
    shape: Shape | tuple[int, ...]
    rule: Rule = RULES["point_mass"]
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a shape, rule or model that do not fit each other."""
        super().__post_init__()
        most = self.capacity.max_children
        if self.rule.proposal is WithoutReplacement and most > self.model.vocab:
            raise ValueError(
                f"shape has nodes with {most} children: more than the {self.model.vocab} tokens to "
                "draw without replacement"
            )

    @functools.cached_property
    def layout(self) -> Shape:
        """The shape."""
        return shape_of(self.shape, self.max_nodes)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-serializable description, the tree by its parents where it is irregular."""
        shape = self.shape
        plain = list(shape.parents if isinstance(shape, Shape) else shape)
        return {**super().describe(), "shape": plain, "max_nodes": self.capacity.max_nodes}


@dataclasses.dataclass(frozen=True)
class SampledPath(_Layered):
    """A single path, each token sampled from the model's row; see `FixedTree`.

    Attributes:
      model: a callable, or a network.
      depth: T, tokens to draft in a round.
      rule: `RULES["token"]`, or `RULES["block"]` for block verification.
    """

    kinds = (WithReplacement, WithoutReplacement)
    model: Model = dataclasses.field(compare=False)
    depth: int
    rule: Rule = RULES["token"]

    def __post_init__(self) -> None:
        """Raise ValueError for a rule that is not for sampled candidates, or no depth."""
        assert_between("depth", self.depth, 1, MAX_NODES - 1)
        super().__post_init__()

    @functools.cached_property
    def layout(self) -> Shape:
        """A chain."""
        return Shape.of_branching((1,) * self.depth)
