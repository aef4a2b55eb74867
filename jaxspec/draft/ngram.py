"""Drafting from counts: an n-gram model, without any forward."""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_kind, struct
from jaxspec.draft.base import Drafter, Proposed, View
from jaxspec.draft.shape import Capacity, Shape, shape_of
from jaxspec.models import NGram
from jaxspec.models.batched import per_sequence
from jaxspec.models.network import TokensDifferError
from jaxspec.proposals import PointMass
from jaxspec.verify import RULES, Rule

_CHUNK = 8192  # contexts ranked at a time


@struct
class Ranking:
    """The most probable tokens after every context of one length that was counted."""

    codes: jax.Array  # int32 [C], as in `jaxspec.models.ngram.ContextTable`
    tokens: jax.Array  # int32 [C, K], by falling probability


@dataclasses.dataclass(frozen=True)
class NGramTree(Drafter):
    """A path or tree of an n-gram model's most probable tokens, as point masses.

    Attributes:
      ngram: the model, over the target's tokens.
      shape: the branching at each depth, such as (1, 1, 1) for a path, or a `Shape`.
      rule: for point masses.
      max_nodes: keep the first nodes of a branching only, the root counted; default all.
    """

    ngram: NGram
    shape: Shape | tuple[int, ...]
    rule: Rule = RULES["point_mass"]
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a model that cannot draft, or more children than it has tokens."""
        assert_kind("ngram", self.ngram, NGram, "a jaxspec.models.NGram, such as fit_ngram gives")
        super().__post_init__()
        if self.ngram.order < 1:
            raise ValueError("an n-gram model of order 0 has counted nothing to draft from")
        if self.capacity.max_children > self.ngram.vocab:
            raise ValueError(
                f"shape has nodes with {self.capacity.max_children} children: more than the "
                f"{self.ngram.vocab} tokens there are"
            )
        if max(len(table.codes) for table in self.ngram.tables) * self.ngram.vocab >= 2**31:
            raise ValueError("too many contexts to number by int32: take a lower order")

    @functools.cached_property
    def layout(self) -> Shape:
        """The shape."""
        return shape_of(self.shape, self.max_nodes)

    @property
    def capacity(self) -> Capacity:
        """All nodes of the shape."""
        return self.layout.capacity

    @functools.cached_property
    def params(self) -> tuple[Ranking, ...]:
        """The most probable tokens after each context that was counted."""
        return _rank(self.ngram, self.capacity.max_children)

    def validate(self, vocab: int) -> None:
        """Raise ValueError unless the target has the tokens of the n-gram model."""
        super().validate(vocab)
        if vocab != self.ngram.vocab:
            raise TokensDifferError(
                f"the target has a vocabulary of {vocab}, the n-gram model one of "
                f"{self.ngram.vocab}: they must be the same tokens"
            )

    def describe(self) -> dict[str, Any]:
        """Return a JSON-serializable description, the counts by their checksum."""
        digest = 0
        for table in self.ngram.tables:
            for part in (table.codes, table.starts, table.symbols, table.counts):
                digest = zlib.crc32(np.ascontiguousarray(part).tobytes(), digest)
        ngram = {"order": self.ngram.order, "checksum": digest}
        return {**super().describe(), "ngram": ngram, "shape": list(self.layout.parents)}

    def propose(self, view: View) -> Proposed:
        """Look up the tokens after each node, level by level."""
        reach = max(self.ngram.order - 1, 1)

        def one(tokens: jax.Array, length: jax.Array) -> PointMass:
            ends = length - reach + jnp.arange(reach, dtype=jnp.int32)
            contexts = jnp.where(ends >= 0, tokens[jnp.maximum(ends, 0)], -1)[None]
            levels = [tokens[length - 1][None]]
            for level in range(self.capacity.max_depth):
                children, places, above = self.layout.below(level)
                ranked = per_sequence(lambda context: self._ranked(view.params, context))(contexts)
                levels.append(ranked[:, : children.shape[1]].reshape(-1)[places])
                older = contexts[above, 1:]
                contexts = jnp.concatenate([older, levels[-1][:, None]], axis=1)
            return PointMass(tree=self.layout.tree(jnp.concatenate(levels)))

        return Proposed(proposal=per_sequence(one)(view.tokens, view.length))

    def _ranked(self, rankings: tuple[Ranking, ...], context: jax.Array) -> jax.Array:
        """Return the tokens [K] after the longest end of a context [order - 1] that was counted."""
        place = jnp.int32(0)
        is_found = jnp.ones((), bool)
        tokens = rankings[0].tokens[0]
        for back, ranking in enumerate(rankings[1:], 1):
            older = context[-back]
            code = place * self.ngram.vocab + older
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
            above, older = np.divmod(table.codes, ngram.vocab)
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
