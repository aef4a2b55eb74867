"""Drafting from counts: an n-gram model inside the compiled loop, at the cost of no forward."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_kind, struct
from jaxspec.draft.base import Modelless, NetworkDraft, View
from jaxspec.draft.shape import Shaped
from jaxspec.models import NGram
from jaxspec.models.batched import BatchedNetwork, per_sequence
from jaxspec.models.network import Cache
from jaxspec.proposals import PointMass
from jaxspec.verify import RULES, Rule

_CHUNK = 8192  # contexts ranked at a time


@struct
class Ranking:
    """The most probable tokens after every context of one length that was counted.

    Attributes:
      codes: int32 [C], as in `jaxspec.models.ContextTable`.
      tokens: int32 [C, K], by falling probability.
    """

    codes: jax.Array
    tokens: jax.Array


class NGramTree(Shaped, Modelless):
    """A path or tree of an n-gram model's most probable tokens, as point masses.

    Attributes:
      widths_by_depth: candidates below each node, by depth; all ones for a path.
      order: of the n-gram model.
      vocab: V of its tokens, which must be the target's.
    """

    def __init__(self, ngram: NGram, widths: tuple[int, ...]) -> None:
        """Rank the tokens after each context that was counted.

        Args:
          ngram: the model, over the target's tokens.
          widths: candidates below each node, by depth; all ones for a path.

        Raises:
          ValueError: no widths, one of 0, more than there are tokens; no n-gram model, one of order
            0, or one of more contexts than an int32 numbers.
        """
        assert_kind("ngram", ngram, NGram, "a jaxspec.models.NGram, such as fit_ngram gives")
        self.widths_by_depth = widths
        self.order = ngram.order
        if ngram.order < 1:
            raise ValueError("an n-gram model of order 0 has counted nothing to draft from")
        if self.capacity.max_children > ngram.vocabulary:
            raise ValueError(
                f"widths are {widths}: more than the {ngram.vocabulary} tokens there are"
            )
        if max(len(table.codes) for table in ngram.tables) * ngram.vocabulary >= 2**31:
            raise ValueError("too many contexts to number by int32: take a lower order")
        self.params = _rank(ngram, self.capacity.max_children)
        self.vocab = ngram.vocabulary

    @property
    def rule(self) -> Rule:
        """For point masses."""
        return RULES["point_mass"]

    def propose(
        self, params: Any, blocks: BatchedNetwork | None, cache: Cache, view: View
    ) -> tuple[NetworkDraft, Cache]:
        """Look up the tokens after each node, level by level."""
        del blocks
        reach = max(self.order - 1, 1)

        def one(tokens: jax.Array, length: jax.Array, depth: jax.Array) -> PointMass:
            ends = length - reach + jnp.arange(reach, dtype=jnp.int32)
            context = jnp.where(ends >= 0, tokens[jnp.maximum(ends, 0)], -1)
            levels = [tokens[length - 1][None]]
            contexts = context[None]
            for width in self.shape.widths:
                ranked = per_sequence(lambda context: self._ranked(params, context))(contexts)
                chosen = ranked[:, :width]
                levels.append(chosen.reshape(-1))
                older = jnp.repeat(contexts[:, 1:], width, axis=0)
                contexts = jnp.concatenate([older, levels[-1][:, None]], axis=1)
            return PointMass(tree=self.shape.tree(jnp.concatenate(levels), depth))

        proposal = per_sequence(one)(view.tokens, view.length, view.depth)
        return NetworkDraft(proposal=proposal), cache

    def _ranked(self, rankings: tuple[Ranking, ...], context: jax.Array) -> jax.Array:
        """Return the tokens [K] after the longest end of a context [order - 1] that was counted."""
        place = jnp.int32(0)
        is_found = jnp.ones((), bool)
        tokens = rankings[0].tokens[0]
        for back, ranking in enumerate(rankings[1:], 1):
            older = context[-back]
            code = place * self.vocab + older
            place = jnp.searchsorted(ranking.codes, code).astype(jnp.int32)
            place = jnp.minimum(place, ranking.codes.shape[0] - 1)
            is_found &= (older >= 0) & (ranking.codes[place] == code)
            tokens = jnp.where(is_found, ranking.tokens[place], tokens)
        return tokens


def _rank(ngram: NGram, width: int) -> tuple[Ranking, ...]:
    """Rank the tokens after every context of every length."""
    rankings = []
    contexts = np.zeros((1, 0), np.int64)
    for length, table in enumerate(ngram.tables):
        if length:
            above, older = np.divmod(table.codes, ngram.vocabulary)
            contexts = np.concatenate([older[:, None], contexts[above]], axis=1)
        chunks = [contexts[at : at + _CHUNK] for at in range(0, len(contexts), _CHUNK)]
        ranked = [np.argsort(-np.asarray(ngram.rows(c)), axis=1, kind="stable") for c in chunks]
        rankings.append(
            Ranking(
                codes=jnp.asarray(table.codes, jnp.int32),
                tokens=jnp.asarray(np.concatenate(ranked)[:, :width], jnp.int32),
            )
        )
    return tuple(rankings)
