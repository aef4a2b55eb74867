"""The tree of the most probable nodes, by the draft network's own probabilities of whole paths."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import assert_between
from jaxspec.draft.base import NetworkDraft, OfOneDepth, View
from jaxspec.draft.growth import MAX_NODES, Capacity
from jaxspec.draft.likely import best_of
from jaxspec.draft.tree import root_logits
from jaxspec.models.batched import BatchedNetwork, per_sequence
from jaxspec.models.network import Cache, LanguageModel, assert_language_model
from jaxspec.proposals import PointMass
from jaxspec.trees import tree_of_parents
from jaxspec.verify import RULES, Rule


@dataclasses.dataclass(frozen=True, eq=False)
class BestFirstTree(OfOneDepth):
    """A tree of the nodes whose paths the draft takes for most probable.

    At each depth the `beam` most probable nodes are asked about, in one forward, and of each the
    `beam` most probable children are considered; of all considered the `max_nodes - 1` most probable
    are proposed. Where the beam is as wide as any level of that tree, no other tree of so many nodes
    has a greater sum of path probabilities under the draft.

    Attributes:
      model: the draft network.
      max_nodes: N, the root counted.
      beam: nodes asked about at each depth, and children considered of each.
      depth: levels drafted.

    References:
      Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic NetworkDraft Trees", EMNLP 2024.
    """

    model: LanguageModel
    max_nodes: int = 16
    beam: int = 4
    depth: int = 4

    def __post_init__(self) -> None:
        """Refuse a tree that is none, and a network that takes no trees."""
        assert_language_model("model", self.model)
        self.model.assert_takes_trees()
        for name in ("max_nodes", "beam", "depth"):
            assert_between(name, getattr(self, name), 1, MAX_NODES)
        if self.beam > self.model.vocab:
            raise ValueError(
                f"beam is {self.beam}: must be a beam of 1 to {self.model.vocab} tokens"
            )
        considered = self.beam + (self.depth - 1) * self.beam**2
        if not 2 <= self.max_nodes <= 1 + considered:
            raise ValueError(
                f"max_nodes is {self.max_nodes}: with this beam and depth from 2 to {1 + considered}"
            )

    @property
    def rule(self) -> Rule:
        """For point masses."""
        return RULES["point_mass"]

    @property
    def capacity(self) -> Capacity:
        """N nodes, a beam of children, D levels."""
        return Capacity(self.max_nodes, self.beam, self.depth)

    @property
    def widths(self) -> tuple[int, ...]:
        """The whole tree, or the root alone."""
        return (1, self.max_nodes)

    @property
    def first_depth(self) -> int:
        """D."""
        return self.depth

    @property
    def params(self) -> Any:
        """The network's."""
        return self.model.params

    @property
    def spare_slots(self) -> int:
        """The root and a beam for each depth asked about."""
        return 2 + self.beam * self.depth

    def propose(
        self, params: Any, blocks: BatchedNetwork | None, cache: Cache, view: View
    ) -> tuple[NetworkDraft, Cache]:
        """Search level by level, then choose among all that was considered."""
        assert blocks is not None
        batch, beam = view.length.shape[0], self.beam
        after_root, cache = root_logits(blocks, params, cache, view)
        scores, tokens = best_of(jax.nn.log_softmax(after_root), beam)
        # What is considered, level by level: log-probability of the path, token, parent among these.
        all_scores, all_tokens = [scores], [tokens]
        all_parents = [jnp.full((batch, beam), -1, jnp.int32)]
        # The beam: place among what is considered, and which asked nodes each sees.
        places = jnp.tile(jnp.arange(beam, dtype=jnp.int32), (batch, 1))
        asked = [places]
        sees = jnp.broadcast_to(jnp.eye(beam, dtype=bool)[None], (batch, beam, beam))
        width = 1 + beam * (self.depth - 1)
        seen = jnp.zeros((batch, beam, width), bool).at[:, :, 0].set(True)
        for level in range(1, self.depth):
            front = 1 + beam * (level - 1)
            seen = lax.dynamic_update_slice(seen, sees, (0, 0, front))
            beam_tokens = jnp.take_along_axis(jnp.concatenate(all_tokens, 1), places, axis=1)
            beam_scores = jnp.take_along_axis(jnp.concatenate(all_scores, 1), places, axis=1)
            depths = jnp.full_like(beam_tokens, level)
            logits, cache = blocks.nodes(params, cache, beam_tokens, depths, seen, view.root, front)
            steps, chosen = best_of(jax.nn.log_softmax(logits), beam)
            steps = jnp.where(view.is_stop(beam_tokens)[:, :, None], -jnp.inf, steps)
            scores = (beam_scores[:, :, None] + steps).reshape(batch, -1)
            first = beam + beam**2 * (level - 1)
            all_scores.append(scores)
            all_tokens.append(chosen.reshape(batch, -1))
            all_parents.append(jnp.repeat(places, beam, axis=1))
            best = best_of(scores, beam)[1]
            places = first + best
            asked.append(places)
            seen = jnp.take_along_axis(seen, (best // beam)[:, :, None], axis=1)
        return self._choose(all_scores, all_tokens, all_parents, asked, view), cache

    def _choose(
        self,
        scores: list[jax.Array],
        tokens: list[jax.Array],
        parents: list[jax.Array],
        asked: list[jax.Array],
        view: View,
    ) -> NetworkDraft:
        """Take the most probable of all that was considered; a parent is never less probable."""
        depths = [jnp.full(each.shape[1], level, jnp.int32) for level, each in enumerate(scores, 1)]

        def one(
            scores: jax.Array, tokens: jax.Array, parents: jax.Array, asked: jax.Array, depth: Any
        ) -> tuple[PointMass, jax.Array]:
            allowed = jnp.where(jnp.concatenate(depths) <= depth, scores, -jnp.inf)
            # Equal scores go to the lower place, so that a parent goes before its child.
            values, chosen = lax.top_k(allowed, self.max_nodes - 1)
            is_in = jnp.zeros(scores.shape[0], bool).at[chosen].set(values > -jnp.inf)
            number = jnp.cumsum(is_in, dtype=jnp.int32)  # node of each place that is in
            node = jnp.where(is_in, number, self.max_nodes)
            above = jnp.where(parents >= 0, number[jnp.maximum(parents, 0)], 0)
            empty = jnp.full(self.max_nodes, -1, jnp.int32)
            tree = tree_of_parents(
                empty.at[node].set(tokens, mode="drop"),
                empty.at[node].set(above, mode="drop"),
                1 + jnp.sum(is_in, dtype=jnp.int32),
                max_children=self.beam,
                max_depth=self.depth,
            )
            slot_of = jnp.arange(1, asked.shape[0] + 1, dtype=jnp.int32)
            at = jnp.where(is_in[asked], number[asked], self.max_nodes)
            slots = empty.at[at].set(slot_of, mode="drop").at[0].set(0)
            return PointMass(tree=tree), slots

        proposal, slots = per_sequence(one)(
            jnp.concatenate(scores, axis=1),
            jnp.concatenate(tokens, axis=1),
            jnp.concatenate(parents, axis=1),
            jnp.concatenate(asked[: self.depth - 1], axis=1) if self.depth > 1 else asked[0][:, :0],
            view.depth,
        )
        return NetworkDraft(proposal=proposal, slots=slots)
