"""Trees whose shape follows from the draft's rows, within a fixed capacity."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxspec.checks import assert_between, assert_kind, struct
from jaxspec.draft.base import Asked, Model, ModelDrafter, Proposed, View, every_node, with_ends
from jaxspec.draft.likely import entropies, likeliest
from jaxspec.draft.policy import AdaptiveTreePolicy
from jaxspec.draft.shape import Capacity
from jaxspec.models.batched import per_sequence
from jaxspec.proposals import PointMass
from jaxspec.trees import Tree, ancestor_mask, tree_of_parents
from jaxspec.verify import RULES, Rule


@struct
class Adapted:
    """A tree of variable shape while it is drafted."""

    tokens: jax.Array  # int32 [B, N]
    parents: jax.Array  # int32 [B, N]
    first: jax.Array  # int32 [B], first node of the last level
    count: jax.Array  # int32 [B], nodes so far


@dataclasses.dataclass(frozen=True)
class AdaptiveTree(ModelDrafter):
    """A tree as wide as the draft is uncertain, and as deep as the last rounds were accepted.

    The candidates are the most probable tokens after each prefix, as many as the policy says; nodes
    are added level by level until there are `policy.max_nodes`. In a batch, levels are drafted until
    the deepest tree is complete.

    Attributes:
      model: a callable, or a network that takes trees.
      policy: the formulas; its `max_nodes`, `max_width` and `max_depth` are the capacity.
      rule: for point masses.
      target_blocks: block sizes to compile the target's forward for; default a quarter and a half of
        the nodes. The root alone and all nodes are always among them.
    """

    model: Model = dataclasses.field(compare=False)
    policy: AdaptiveTreePolicy = AdaptiveTreePolicy()
    rule: Rule = RULES["point_mass"]
    target_blocks: tuple[int, ...] = ()

    is_unrolled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise ValueError for a policy, rule or model of another kind."""
        assert_kind("policy", self.policy, AdaptiveTreePolicy, "an AdaptiveTreePolicy(...)")
        wanted = "a tuple of block sizes, such as (1, 8)"
        assert_kind("target_blocks", self.target_blocks, tuple, wanted)
        for size in self.target_blocks:
            assert_between("an entry of target_blocks", size, 1)
        super().__post_init__()

    @property
    def capacity(self) -> Capacity:
        """The policy's `max_nodes`, or all that its greatest width and depth need if that is less."""
        policy, nodes = self.policy, 1
        width = min(policy.max_width, self.model.vocab)
        for _ in range(policy.max_depth):
            nodes = min(1 + width * nodes, policy.max_nodes)
        return Capacity(nodes, width, policy.max_depth)

    @property
    def first_depth(self) -> int:
        """The policy's."""
        return self.policy.first_depth

    def next_depth(self, depth: jax.Array, accepted: jax.Array, proposed: jax.Array) -> jax.Array:
        """Follow the policy."""
        return self.policy.next_depth(depth, accepted, proposed)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """See `target_blocks`."""
        most = self.capacity.max_nodes
        return with_ends(self.target_blocks or (most // 4, most // 2), most)

    @property
    def spare_slots(self) -> int:
        """A whole level may be written after the last node."""
        return 2 * self.capacity.max_nodes

    def start(self, view: View, vocab: int) -> Adapted:
        """Start with the root."""
        del vocab
        batch = view.length.shape[0]
        empty = jnp.full((batch, self.capacity.max_nodes), -1, jnp.int32)
        return Adapted(
            tokens=empty.at[:, 0].set(view.root_token),
            parents=empty,
            first=jnp.zeros(batch, jnp.int32),
            count=jnp.ones(batch, jnp.int32),
        )

    def grow(self, level: jax.Array, state: Adapted, rows: jax.Array, view: View) -> Adapted:
        """Add the children of the last level's nodes, in the order of their parents."""
        nodes, width, vocab = self.capacity.max_nodes, self.capacity.max_children, rows.shape[-1]
        is_read = self.is_read(level, state, view)[:, : rows.shape[1]]

        def one(state: Adapted, rows: jax.Array, is_read: jax.Array) -> Adapted:
            chosen, best = likeliest(rows, width)
            wanted = self.policy.width(entropies(rows), min(vocab, width))
            ranks = jnp.arange(width, dtype=jnp.int32)
            is_child = is_read[:, None] & (ranks[None] < wanted[:, None]) & (best > 0)
            is_child = is_child.reshape(-1)
            places = state.count + jnp.cumsum(is_child, dtype=jnp.int32) - 1
            places = jnp.where(is_child, places, nodes)
            level_nodes = state.first + jnp.arange(rows.shape[0], dtype=jnp.int32)
            added = jnp.sum(is_child, dtype=jnp.int32)
            return Adapted(
                tokens=state.tokens.at[places].set(chosen.reshape(-1), mode="drop"),
                parents=state.parents.at[places].set(jnp.repeat(level_nodes, width), mode="drop"),
                first=state.count,
                count=jnp.minimum(state.count + added, nodes),
            )

        return per_sequence(one)(state, rows, is_read)

    def is_read(self, level: jax.Array, state: Adapted, view: View) -> jax.Array:
        """Return which nodes will have children: there is room for one child of each at least."""
        nodes = self.capacity.max_nodes
        # The root may be a stop token of the prompt, which stops nothing.
        is_end = view.is_stop(state.tokens).at[:, 0].set(False)
        at = jnp.arange(nodes, dtype=jnp.int32)[None]
        is_end = jnp.take_along_axis(is_end, self._level_nodes(state), axis=1)
        is_parent = (at < (state.count - state.first)[:, None]) & ~is_end
        is_parent &= (level < view.depth)[:, None]
        rank = jnp.cumsum(is_parent, axis=1, dtype=jnp.int32)
        return is_parent & (rank <= (nodes - state.count)[:, None])

    def ask(self, level: jax.Array, state: Adapted, view: View) -> Asked:
        """Ask about the last level and what follows it; a node's number is its slot."""
        nodes = self._level_nodes(state)
        seen = per_sequence(lambda *parts: ancestor_mask(self._tree(*parts)))(
            state.tokens, state.parents, state.count
        )
        return Asked(
            tokens=jnp.take_along_axis(state.tokens, nodes, axis=1),
            depths=jnp.full_like(nodes, 1) * level,
            seen=jnp.take_along_axis(seen, nodes[:, :, None], axis=1),
            offset=state.first,
        )

    def finish(self, state: Adapted, view: View) -> Proposed:
        """Return the tree."""
        tree = per_sequence(self._tree)(state.tokens, state.parents, state.count)
        return Proposed(proposal=PointMass(tree=tree), slots=every_node(view, self.capacity))

    def _level_nodes(self, state: Adapted) -> jax.Array:
        """Return the nodes of the last level and those after it, int32 [B, N]."""
        at = jnp.arange(self.capacity.max_nodes, dtype=jnp.int32)[None]
        return jnp.minimum(state.first[:, None] + at, self.capacity.max_nodes - 1)

    def _tree(self, tokens: jax.Array, parents: jax.Array, count: jax.Array) -> Tree:
        sizes = {"max_children": self.capacity.max_children, "max_depth": self.capacity.max_depth}
        return tree_of_parents(tokens, parents, count, **sizes)
