"""Trees whose shape follows from the draft network's rows, within a static capacity."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import assert_kind, assert_whole
from jaxspec.draft.base import NetworkDraft, View
from jaxspec.draft.growth import Capacity, count_nodes
from jaxspec.draft.likely import entropies, likeliest
from jaxspec.draft.policy import AdaptiveTreePolicy
from jaxspec.draft.tree import root_logits
from jaxspec.models.batched import BatchedNetwork, per_sequence
from jaxspec.models.network import Cache, LanguageModel, assert_language_model
from jaxspec.proposals import PointMass
from jaxspec.trees import ancestor_mask, tree_of_parents
from jaxspec.verify import RULES, Rule


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveModelTree:
    """A tree as wide as the draft is unsure and as deep as the last rounds were accepted.

    The candidates are those of `jaxspec.decode.AdaptiveTree` with the same policy. A row's width and
    depth depend on that row alone; levels are drafted until the deepest row of the batch has its own.

    Attributes:
      model: the draft network.
      policy: the formulas; its `max_nodes`, `max_width` and `max_depth` are the capacity.
      widths: block widths that the target's forward is compiled for.
    """

    model: LanguageModel
    policy: AdaptiveTreePolicy = dataclasses.field(default_factory=AdaptiveTreePolicy)
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Choose widths, and refuse a network that takes no trees."""
        assert_language_model("model", self.model)
        assert_kind("policy", self.policy, AdaptiveTreePolicy, "an AdaptiveTreePolicy(...)")
        wanted = "a sequence of block widths, such as (1, 8)"
        assert_kind("widths", self.widths, Sequence, wanted)
        self.model.assert_takes_trees()
        most = self.capacity.max_nodes
        for width in self.widths:
            assert_whole(f"widths are {self.widths}: one of them", width, 1)
        given = self.widths or (1, most // 4, most // 2)
        fitting = tuple(sorted({width for width in given if 1 <= width < most} | {1, most}))
        object.__setattr__(self, "widths", fitting)

    @property
    def rule(self) -> Rule:
        """For point masses."""
        return RULES["point_mass"]

    @property
    def capacity(self) -> Capacity:
        """The policy's budget, or all that its greatest widths and depth ask for if that is less."""
        policy = self.policy
        width = min(policy.max_width, self.model.vocab)
        whole = count_nodes([width] * policy.max_depth)
        return Capacity(min(policy.max_nodes, whole), width, policy.max_depth)

    @property
    def first_depth(self) -> int:
        """The policy's."""
        return self.policy.first_depth

    @property
    def params(self) -> Any:
        """The network's."""
        return self.model.params

    @property
    def spare_slots(self) -> int:
        """A whole level may be written after the last node."""
        return 2 * self.capacity.max_nodes

    def propose(
        self, params: Any, blocks: BatchedNetwork | None, cache: Cache, view: View
    ) -> tuple[NetworkDraft, Cache]:
        """NetworkDraft level by level, each in one forward, as deep as any row wants."""
        assert blocks is not None
        capacity = self.capacity
        nodes = capacity.max_nodes
        batch = view.length.shape[0]
        after_root, cache = root_logits(blocks, params, cache, view)
        empty = jnp.full((batch, nodes), -1, jnp.int32)
        start = (
            jnp.int32(0),  # level whose rows are at hand
            empty.at[:, 0].set(view.root_token),
            empty,
            jnp.zeros(batch, jnp.int32),  # first node of that level
            jnp.ones(batch, jnp.int32),  # nodes so far
            jnp.broadcast_to(after_root[:, None], (batch, nodes, after_root.shape[1])),
            cache,
        )

        def is_open(state: Any) -> jax.Array:
            level, _, _, first, count, _, _ = state
            return jnp.any((level < view.depth) & (first < count) & (count < nodes))

        def grow(state: Any) -> Any:
            level, tokens, parents, first, count, logits, cache = state
            # The root may be a stop token of the prompt, which stops nothing.
            is_end = view.is_stop(tokens).at[:, 0].set(False)
            tokens, parents, after = per_sequence(functools.partial(self._grow, level))(
                tokens, parents, first, count, logits, view.depth, is_end
            )

            def ask(state: Any) -> Any:
                _, _, cache = state
                at = jnp.arange(nodes, dtype=jnp.int32)
                level_nodes = jnp.minimum(count[:, None] + at[None], nodes - 1)
                seen = per_sequence(self._seen)(tokens, parents, after)
                rows, cache = blocks.nodes(
                    params,
                    cache,
                    jnp.take_along_axis(tokens, level_nodes, axis=1),
                    jnp.full_like(level_nodes, 1) * (level + 1),
                    jnp.take_along_axis(seen, level_nodes[:, :, None], axis=1),
                    view.root,
                    count,
                )
                return jnp.zeros((), bool), rows, cache

            # The last level's rows are not needed: no forward for it.
            is_wanted = jnp.any((level + 1 < view.depth) & (count < after) & (after < nodes))
            _, logits, cache = lax.while_loop(
                lambda state: state[0], ask, (is_wanted, logits, cache)
            )
            return level + 1, tokens, parents, count, after, logits, cache

        _, tokens, parents, _, count, _, cache = lax.while_loop(is_open, grow, start)
        tree = per_sequence(
            lambda tokens, parents, count: tree_of_parents(
                tokens,
                parents,
                count,
                max_children=capacity.max_children,
                max_depth=capacity.max_depth,
            )
        )(tokens, parents, count)
        slots = jnp.tile(jnp.arange(nodes, dtype=jnp.int32), (batch, 1))
        return NetworkDraft(proposal=PointMass(tree=tree), slots=slots), cache

    def next_depth(self, depth: jax.Array, accepted: jax.Array, proposed: jax.Array) -> jax.Array:
        """Follow the policy; see `AdaptiveTreePolicy.next_depth`."""
        return self.policy.next_depths(depth, accepted, proposed)

    def _grow(
        self,
        level: jax.Array,
        tokens: jax.Array,
        parents: jax.Array,
        first: jax.Array,
        count: jax.Array,
        logits: jax.Array,
        depth: jax.Array,
        is_end: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Add the children of nodes first .. count - 1, whose rows are logits 0, 1, ...

        A node after which nothing comes gets none.

        Returns:
          (tokens, parents, how many nodes there are now).
        """
        nodes, width = tokens.shape[0], self.capacity.max_children
        law = jax.nn.softmax(logits, axis=-1)
        chosen, is_likely = likeliest(law, width)
        wanted = self.policy.widths(entropies(law), logits.shape[1])
        at = jnp.arange(nodes, dtype=jnp.int32)
        is_parent = (at < count - first) & (level < depth)
        is_parent &= ~is_end[jnp.minimum(first + at, nodes - 1)]
        ranks = jnp.arange(width, dtype=jnp.int32)
        is_child = is_parent[:, None] & (ranks[None] < wanted[:, None]) & is_likely
        places = count + jnp.cumsum(is_child.reshape(-1), dtype=jnp.int32) - 1
        places = jnp.where(is_child.reshape(-1), places, nodes)
        above = jnp.repeat(first + at, width)
        return (
            tokens.at[places].set(chosen.reshape(-1), mode="drop"),
            parents.at[places].set(above, mode="drop"),
            jnp.minimum(count + jnp.sum(is_child, dtype=jnp.int32), nodes),
        )

    def _seen(self, tokens: jax.Array, parents: jax.Array, count: jax.Array) -> jax.Array:
        """Tell which nodes each node follows from, bool [N, N]."""
        tree = tree_of_parents(
            tokens,
            parents,
            count,
            max_children=self.capacity.max_children,
            max_depth=self.capacity.max_depth,
        )
        return ancestor_mask(tree)
