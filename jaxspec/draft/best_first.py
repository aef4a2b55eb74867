"""The tree of the most probable nodes, by the draft's own probabilities of whole paths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import assert_between, struct
from jaxspec.draft.base import Asked, Model, ModelDrafter, Proposed, View
from jaxspec.draft.likely import likeliest
from jaxspec.draft.shape import MAX_NODES, Capacity
from jaxspec.models.batched import per_sequence
from jaxspec.proposals import PointMass
from jaxspec.tiles import LEAST
from jaxspec.trees import tree_of_parents
from jaxspec.verify import RULES, Rule


@struct
class Search:
    """The K nodes considered so far, those below one level side by side."""

    scores: jax.Array  # float32 [B, K], log-probability of each path, -inf where there is none
    tokens: jax.Array  # int32 [B, K]
    parents: jax.Array  # int32 [B, K], place of the parent among these, -1 for the root
    asked: jax.Array  # int32 [B, D * beam], the places of each level's beam
    seen: jax.Array  # bool [B, beam, M], which slots the nodes of the last beam see


@dataclasses.dataclass(frozen=True)
class BestFirstTree(ModelDrafter):
    """A tree of the nodes whose paths are most probable under the draft.

    At each depth the `beam` most probable nodes are asked about, and of each the `beam` most probable
    children are considered; the `max_nodes - 1` most probable of all considered are proposed. Where
    the beam is as wide as any level of that tree, no other tree of this size has a greater sum of
    path probabilities under the draft.

    Attributes:
      model: a callable, or a network that takes trees.
      max_nodes: N, the root counted.
      beam: nodes asked about at each depth, and children considered of each.
      depth: levels drafted.
      rule: for point masses.

    References:
      Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", EMNLP 2024.
    """

    model: Model = dataclasses.field(compare=False)
    max_nodes: int = 16
    beam: int = 4
    depth: int = 4
    rule: Rule = RULES["point_mass"]

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit each other, or a network without trees."""
        super().__post_init__()
        for name in ("max_nodes", "beam", "depth"):
            assert_between(name, getattr(self, name), 1, MAX_NODES)
        if self.beam > self.model.vocab:
            raise ValueError(f"beam is {self.beam}: must be at most {self.model.vocab} tokens")
        if not 2 <= self.max_nodes <= 1 + self._start(self.depth):
            raise ValueError(
                f"max_nodes is {self.max_nodes}: with this beam and depth it must be from 2 to "
                f"{1 + self._start(self.depth)}"
            )

    @property
    def capacity(self) -> Capacity:
        """N nodes, a beam of children, D levels."""
        return Capacity(self.max_nodes, self.beam, self.depth)

    @property
    def spare_slots(self) -> int:
        """The root, the token before it, and a beam for each depth asked about."""
        return 2 + self.beam * self.depth

    def _start(self, level: int) -> int:
        """Return the place of the first node considered below a level."""
        return 0 if level == 0 else self.beam + self.beam**2 * (level - 1)

    def start(self, view: View, vocab: int) -> Search:
        """Start with nothing considered."""
        del vocab
        batch, considered = view.length.shape[0], self._start(self.depth)
        seen = jnp.zeros((batch, self.beam, 1 + self.beam * (self.depth - 1)), bool)
        return Search(
            scores=jnp.full((batch, considered), -jnp.inf, jnp.float32),
            tokens=jnp.zeros((batch, considered), jnp.int32),
            parents=jnp.full((batch, considered), -1, jnp.int32),
            asked=jnp.zeros((batch, self.depth * self.beam), jnp.int32),
            seen=seen.at[:, :, 0].set(True),
        )

    def grow(self, level: int, state: Search, rows: jax.Array, view: View) -> Search:
        """Consider the best children of the beam, and choose the next beam among them."""
        batch, beam = rows.shape[0], self.beam
        chosen, best = likeliest(rows, beam)
        steps = jnp.where(best > 0, jnp.log(jnp.maximum(best, LEAST)), -jnp.inf)
        steps = jnp.where(self.is_read(level, state, view)[:, :, None], steps, -jnp.inf)
        parents = jnp.full((batch, 1), -1, jnp.int32)
        if level > 0:
            parents = self._beam(level, state)
            steps += jnp.take_along_axis(state.scores, parents, axis=1)[:, :, None]
        scores = steps.reshape(batch, -1)
        ranked = lax.top_k(scores, beam)[1].astype(jnp.int32)
        seen = jnp.take_along_axis(state.seen, (ranked // beam)[:, :, None], axis=1)
        if level + 1 < self.depth:  # the next beam is asked about: each node sees itself
            own = jnp.broadcast_to(jnp.eye(beam, dtype=bool)[None], (batch, beam, beam))
            seen = lax.dynamic_update_slice(seen, own, (0, 0, 1 + beam * level))
        put, at = functools.partial(lax.dynamic_update_slice_in_dim, axis=1), self._start(level)
        return Search(
            scores=put(state.scores, scores, at),
            tokens=put(state.tokens, chosen.reshape(batch, -1), at),
            parents=put(state.parents, jnp.repeat(parents, beam, axis=1), at),
            asked=put(state.asked, at + ranked, level * beam),
            seen=seen,
        )

    def _beam(self, level: int, state: Search) -> jax.Array:
        """Return the places of the nodes asked about at a level, int32 [B, beam]."""
        return state.asked[:, (level - 1) * self.beam : level * self.beam]

    def is_read(self, level: int, state: Search, view: View) -> jax.Array:
        """Return which nodes of the beam there are, but for stop tokens."""
        is_deep = (level < view.depth)[:, None]
        if level == 0:
            return is_deep
        places = self._beam(level, state)
        is_node = jnp.take_along_axis(state.scores, places, axis=1) > -jnp.inf
        is_stop = view.is_stop(jnp.take_along_axis(state.tokens, places, axis=1))
        return is_node & ~is_stop & is_deep

    def ask(self, level: int, state: Search, view: View) -> Asked:
        """Ask about the beam, whose slots follow those of earlier beams."""
        tokens = jnp.take_along_axis(state.tokens, self._beam(level, state), axis=1)
        return Asked(
            tokens=tokens,
            depths=jnp.full_like(tokens, level),
            seen=state.seen,
            offset=1 + self.beam * (level - 1),
        )

    def finish(self, state: Search, view: View) -> Proposed:
        """Take the most probable of all considered; a parent is never less probable."""

        def one(
            scores: jax.Array, tokens: jax.Array, parents: jax.Array, asked: jax.Array
        ) -> Proposed:
            # Equal scores go to the lower place, so that a parent goes before its child.
            values, chosen = lax.top_k(scores, self.max_nodes - 1)
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
            return Proposed(proposal=PointMass(tree=tree), slots=slots)

        asked = state.asked[:, : (self.depth - 1) * self.beam]
        return per_sequence(one)(state.scores, state.tokens, state.parents, asked)
