"""Trees and paths of fixed widths drafted by a smaller network."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checks import assert_between
from jaxspec.draft.base import NetworkDraft, OfOneDepth, View
from jaxspec.draft.cut import cut
from jaxspec.draft.growth import MAX_NODES
from jaxspec.draft.likely import likeliest
from jaxspec.draft.shape import Shaped
from jaxspec.logits import Logits
from jaxspec.models.batched import BatchedNetwork, per_sequence
from jaxspec.models.network import Cache, LanguageModel, assert_language_model
from jaxspec.proposals import PointMass, propose
from jaxspec.rows import Probabilities, row_of
from jaxspec.trees import ancestor_mask
from jaxspec.verify import RULES, Rule
from jaxspec.verify.rules import assert_rule


@dataclasses.dataclass(frozen=True, eq=False)
class ModelTree(Shaped, OfOneDepth):
    """A tree of the same widths in each round, level by level from a network's rows.

    Sampled kinds draw from the network's row at the target's own temperature and filters, with the
    draws of each node; point masses are its most probable tokens, whatever the temperature.

    Attributes:
      model: the draft network.
      widths_by_depth: candidates below each node, by depth; all ones for a path.
      rule: how they are verified; its kind of proposal says how they are drawn.
    """

    model: LanguageModel
    widths_by_depth: tuple[int, ...]
    rule: Rule

    def __post_init__(self) -> None:
        """Refuse a tree without candidates, and a rule or network that cannot do it."""
        assert_language_model("model", self.model)
        assert_rule("rule", self.rule)
        shape = self.shape
        if shape.capacity.max_children > self.model.vocab:
            raise ValueError(
                f"widths are {shape.widths}: more than the {self.model.vocab} tokens there are"
            )
        if self.rule.is_path and not shape.is_path:
            raise ValueError(f"rule {self.rule.name!r} is for paths: all widths must be 1")
        if not shape.is_path:
            self.model.assert_takes_trees()

    @property
    def params(self) -> Any:
        """The network's."""
        return self.model.params

    @property
    def spare_slots(self) -> int:
        """All nodes."""
        return self.capacity.max_nodes + 1

    def propose(
        self, params: Any, blocks: BatchedNetwork | None, cache: Cache, view: View
    ) -> tuple[NetworkDraft, Cache]:
        """NetworkDraft level by level; the levels of all rows are asked about together."""
        assert blocks is not None
        shape = self.shape
        seen = ancestor_mask(shape.whole())
        batch = view.length.shape[0]
        after_root, cache = root_logits(blocks, params, cache, view)
        logits = after_root[:, None]
        tokens = [view.root_token[:, None]]
        is_in = [jnp.ones((batch, 1), bool)]
        draft_rows = []
        for depth, width in enumerate(shape.widths):
            below = slice(*shape.starts[depth + 1 : depth + 3])
            if self.rule.proposal is PointMass:
                drawn, is_likely = likeliest(jax.nn.softmax(logits, axis=-1), width)
            else:
                is_likely = jnp.ones((batch, shape.sizes[depth], width), bool)
                pairs = view.pairs[:, below].reshape(batch, shape.sizes[depth], width, 2)
                draft_rows.append(sampling_rows(logits, view))
                drawn = per_sequence(per_sequence(self.rule.proposal.draw))(pairs, draft_rows[-1])
            tokens.append(drawn.reshape(batch, -1))
            is_in.append(is_likely.reshape(batch, -1))
            if depth + 1 < shape.depth:
                depths = jnp.full_like(tokens[-1], depth + 1)
                level = jnp.broadcast_to(seen[below][None], (batch, *seen[below].shape))
                logits, cache = blocks.nodes(
                    params, cache, tokens[-1], depths, level, view.root, below.start
                )
        tree = per_sequence(shape.tree)(jnp.concatenate(tokens, axis=1), view.depth)
        rows = slots = None
        if draft_rows:
            # Of a tree there are rows of inner nodes only; a leaf's is never read.
            first = None if shape.is_path else jnp.zeros(batch, jnp.int32)
            rows = Probabilities(values=jnp.concatenate(draft_rows, axis=1), first=first)
        if not shape.is_path:
            slots = jnp.tile(jnp.arange(shape.capacity.max_nodes, dtype=jnp.int32), (batch, 1))
        if self.rule.proposal is PointMass:
            # A token that the draft takes for impossible is no candidate.
            tree, nodes = per_sequence(cut)(tree, jnp.concatenate(is_in, axis=1))
            slots = None if slots is None else nodes
        return NetworkDraft(proposal=propose(self.rule.proposal, tree, rows), slots=slots), cache


def model_path(model: LanguageModel, depth: int, rule: Rule = RULES["token"]) -> ModelTree:
    """Make the drafter of a single sampled path.

    Args:
      model: the draft network.
      depth: T, tokens to draft in a round.
      rule: `RULES["token"]`, or `RULES["block"]` for block verification.

    Raises:
      ValueError: an argument is invalid.
    """
    assert_between("depth", depth, 1, MAX_NODES - 1)
    return ModelTree(model, (1,) * depth, rule)


def root_logits(
    blocks: BatchedNetwork, params: Any, cache: Cache, view: View
) -> tuple[jax.Array, Cache]:
    """Feed the last two tokens of each text and return the logits after the last, [B, V].

    After a fully accepted path two tokens are new to the draft's cache, else one; feeding both each
    time needs no branch. A text of one token is fed from slot 0, with whatever stands after it.
    """
    at = jnp.maximum(view.length - 2, 0)
    last = per_sequence(lambda tokens, at: jax.lax.dynamic_slice(tokens, (at,), (2,)))(
        view.tokens, at
    )
    logits, cache = blocks.text(params, cache, last, at)
    place = (view.root - at)[:, None, None]
    return jnp.take_along_axis(logits, place, axis=1)[:, 0], cache


def sampling_rows(logits: jax.Array, view: View) -> jax.Array:
    """Turn logits [B, L, V] into the probabilities that candidates are drawn from.

    They are taken by the same steps as the target's rows, at the same temperature and filters.
    """

    def one(logits: jax.Array, temperature: Any, top_k: Any, top_p: Any) -> jax.Array:
        source = Logits(values=logits, temperature=temperature, top_k=top_k, top_p=top_p)
        return per_sequence(lambda row: row_of(source, row))(jnp.arange(logits.shape[0]))

    return per_sequence(one)(logits, view.temperature, view.top_k, view.top_p)
