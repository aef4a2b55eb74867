"""Who drafts inside the compiled loop, and what a drafter must be.

A drafter proposes for the whole batch at once, since a network's cache must not go through a `vmap`ped
loop; what it proposes for a row depends on that row alone.

In the shape descriptions B denotes the batch, N, C, D the capacity of a tree (nodes, children of a
node, depth), S the slots of a text, V the vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxspec.checks import (
    MOST_TOKENS,
    assert_between,
    assert_kind,
    assert_members,
    assert_whole,
    struct,
)
from jaxspec.draft.growth import MAX_NODES, Capacity, capacity_of
from jaxspec.models.batched import BatchedNetwork, per_sequence
from jaxspec.models.network import Cache, LanguageModel, assert_language_model
from jaxspec.proposals import PointMass, Proposal
from jaxspec.trees import chain
from jaxspec.verify import RULES, Rule
from jaxspec.verify.rules import assert_rule


@struct
class View:
    """What a drafter may look at: what is past, and the draws that are its own.

    Attributes:
      tokens: int32 [B, S], the texts; anything after them.
      length: int32 [B], tokens of each text; the last of them is the root of the round.
      depth: int32 [B], levels to draft at most; 0 for none.
      pairs: float32 [B, N, 2], for each node the pair of uniforms to draw its candidate with.
      temperature: float32 [B], of the target's rows.
      top_k: int32 [B], of the target's rows.
      top_p: float32 [B], of the target's rows.
      stop_tokens: int32 [B, K], then -1; None for none. The loop cuts off what is drafted below one:
        a drafter reads them so as not to spend its nodes there.
    """

    tokens: jax.Array  # [B, S]
    length: jax.Array  # [B]
    depth: jax.Array  # [B]
    pairs: jax.Array  # [B, N, 2]
    temperature: jax.Array  # [B]
    top_k: jax.Array  # [B]
    top_p: jax.Array  # [B]
    stop_tokens: jax.Array | None = None  # [B, K]

    def is_stop(self, tokens: jax.Array) -> jax.Array:
        """Return which tokens, int32 [B, ...], are stop tokens of their texts."""
        if self.stop_tokens is None:
            return jnp.zeros(tokens.shape, bool)
        flat = tokens.reshape(tokens.shape[0], -1)
        found = jnp.any(flat[:, :, None] == self.stop_tokens[:, None], axis=2) & (flat >= 0)
        return found.reshape(tokens.shape)

    @property
    def root(self) -> jax.Array:
        """Slot and position of each round's root, int32 [B]."""
        return self.length - 1

    @property
    def root_token(self) -> jax.Array:
        """The last committed token of each text, int32 [B]."""
        return jnp.take_along_axis(self.tokens, self.root[:, None], axis=1)[:, 0]


@struct
class NetworkDraft:
    """What was proposed in a round.

    Attributes:
      proposal: the candidates of each row, every field with a leading B.
      slots: int32 [B, N], where each node stands in the drafter's own cache, counted from the root's
        slot; -1 where it does not. None if there is nothing to move: no cache, or a path.
    """

    proposal: Proposal
    slots: jax.Array | None = None  # [B, N]


class FusedDrafter(Protocol):
    """Proposes candidates inside the compiled loop.

    What a draft may depend on is said once, in `jaxspec.decode.Drafter`. What is drafted below a stop
    token is cut off by the loop.

    Attributes:
      rule: how its proposals are verified.
      capacity: sizes of its trees.
      widths: block widths that the target's forward is compiled for, rising; the last is N. A round
        runs the narrowest that holds its largest tree.
      first_depth: depth of the first round.
      model: the network it drafts with, if any. The loop prefills its cache and moves its slots.
      params: a pytree of arrays handed to `propose`: the network's parameters, or tables.
      spare_slots: slots it writes at or after a round's root, at most.

    One with tokens of its own but no network may also have `vocab`, which must be the target's.
    """

    @property
    def rule(self) -> Rule:
        """How its proposals are verified."""

    @property
    def capacity(self) -> Capacity:
        """Sizes of its trees."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Block widths to compile."""

    @property
    def first_depth(self) -> int:
        """Depth to ask for in the first round."""

    @property
    def model(self) -> LanguageModel | None:
        """The network it drafts with."""

    @property
    def params(self) -> Any:
        """What `propose` is handed."""

    @property
    def spare_slots(self) -> int:
        """Slots it needs from the root on."""

    def propose(
        self, params: Any, blocks: BatchedNetwork | None, cache: Cache, view: View
    ) -> tuple[NetworkDraft, Cache]:
        """NetworkDraft for each row, at most `view.depth` levels.

        Args:
          params: this drafter's.
          blocks: its network over the batch, with logits over the target's vocabulary; None if it has
            none.
          cache: of its network, holding each text but its last two tokens at least; () without one.
          view: what is past.
        """

    def next_depth(self, depth: jax.Array, accepted: jax.Array, proposed: jax.Array) -> jax.Array:
        """Return the depth to ask for after a round; all int32 [B]."""


def assert_drafter(drafter: Any) -> None:
    """Refuse what is no drafter of the compiled loop, such as one of the host loop.

    Raises:
      ValueError: naming what was given, what it lacks and what to give instead.
    """
    wanted = "must be a fused drafter, such as fused.Plain() or fused.model_path(model, depth)"
    assert_members("drafter", drafter, FusedDrafter, wanted)
    assert_rule("the drafter's rule", drafter.rule)
    assert_kind(
        "the drafter's capacity",
        drafter.capacity,
        Capacity,
        "a Capacity(max_nodes, max_children, max_depth)",
    )
    capacity_of(drafter.capacity)
    assert_between("the drafter's first_depth", drafter.first_depth, 0, MAX_NODES)
    assert_between("the drafter's spare_slots", drafter.spare_slots, 0, MOST_TOKENS)
    _assert_widths(drafter.widths, drafter.capacity.max_nodes)
    if drafter.model is not None:
        assert_language_model("the drafter's model", drafter.model)


def _assert_widths(widths: Any, nodes: int) -> None:
    """Refuse block widths that a tree could be wider than: rows of its last nodes would be zeros."""
    assert_kind("the drafter's widths", widths, Sequence, "a sequence of block widths, rising")
    for width in widths:
        assert_whole(f"the drafter's widths are {tuple(widths)}: one of them", width, 1)
    if list(widths) != sorted(set(widths)) or list(widths)[-1:] != [nodes]:
        raise ValueError(
            f"the drafter's widths are {tuple(widths)}: must rise, and end with its capacity's "
            f"max_nodes, {nodes}"
        )


def is_path(capacity: Capacity) -> bool:
    """Tell whether there is room for single paths only."""
    return capacity.max_children == 1 and capacity.max_depth == capacity.max_nodes - 1


class OfOneDepth:
    """What drafters that ask for the same depth in each round have in common."""

    def next_depth(self, depth: jax.Array, accepted: jax.Array, proposed: jax.Array) -> jax.Array:
        """Return the depth as it was."""
        del accepted, proposed
        return depth


class Modelless(OfOneDepth):
    """What drafters without a network have in common."""

    model = None
    spare_slots = 0
    params: Any = ()


class Plain(Modelless):
    """Nobody drafts: each round emits one token of the target's row."""

    rule = RULES["point_mass"]
    capacity = Capacity(max_nodes=1, max_children=1, max_depth=0)
    widths = (1,)
    first_depth = 0

    def propose(
        self, params: Any, blocks: BatchedNetwork | None, cache: Cache, view: View
    ) -> tuple[NetworkDraft, Cache]:
        """Propose nothing."""
        del params, blocks
        tree = per_sequence(lambda length: chain(jnp.zeros(0, jnp.int32)))(view.length)
        return NetworkDraft(proposal=PointMass(tree=tree)), cache
