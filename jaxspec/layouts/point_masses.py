"""Draft rows that some sequences of a batch have and others lack."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.checks import struct
from jaxspec.loops import when
from jaxspec.rows import Normalizer, RowSource, StoredRow


class _Visited(NamedTuple):
    norm: Normalizer  # of the stored row; zeros where there is none
    token: jax.Array  # [] the token that the row is a point mass on


@struct
class _OrPointMasses(RowSource):
    """Rows of a source, or where a sequence has none the point masses on its drafted tokens."""

    stored: RowSource  # without its slab
    is_stored: jax.Array  # [] whether the sequence has rows
    tokens: jax.Array  # int32 [T], token t is what row t is a point mass on

    def visit(self, row: StoredRow) -> _Visited:
        """Read a stored row; of another nothing."""
        at = row.index if self.first is None else row.index - self.first
        norm = when(self.is_stored, lambda: self.stored.visit(row))
        return _Visited(norm, self.tokens[jnp.clip(at, 0, self.tokens.shape[0] - 1)])

    def mass(self, norm: Normalizer) -> jax.Array:
        """Return the mass of a stored row, 1 of another."""
        return jnp.where(self.is_stored, self.stored.mass(norm.norm), 1.0)

    def mass_tolerance(self, dtype: Any) -> float:
        """Return the tolerance of the stored rows."""
        return self.stored.mass_tolerance(dtype)

    def probability(self, entries: jax.Array, tokens: jax.Array, norm: Normalizer) -> jax.Array:
        """Return the stored probability, or whether a token is the drafted one."""
        return self._or_one_hot(self.stored.probability, entries, tokens, norm)

    def summand(self, entries: jax.Array, tokens: jax.Array, norm: Normalizer) -> jax.Array:
        """Do as `probability` does, for final draws."""
        return self._or_one_hot(self.stored.summand, entries, tokens, norm)

    def _or_one_hot(
        self, stored: Any, entries: jax.Array, tokens: jax.Array, norm: Normalizer
    ) -> jax.Array:
        one_hot = jnp.where(tokens == norm.token, 1.0, 0.0)
        return jnp.where(self.is_stored, stored(entries, tokens, norm.norm), one_hot)


def or_point_masses(rows: RowSource, is_stored: jax.Array, tokens: jax.Array) -> RowSource:
    """Return draft rows that are point masses on the drafted tokens where a sequence has no rows.

    Args:
      rows: the rows, of a slab with at least T.
      is_stored: bool [], whether this sequence has rows in it.
      tokens: int32 [T], its drafted tokens.
    """
    slab, stored = rows.split()
    if slab.shape[0] < tokens.shape[0]:
        raise ValueError(
            f"draft rows: {slab.shape[0]} given, must be at least {tokens.shape[0]}, the most tokens "
            "that a sequence drafts"
        )
    first = None if rows.first is None else jnp.where(is_stored, rows.first, 0)
    stored = replace(stored, first=None, vocab=None)
    return _OrPointMasses(
        values=slab,
        first=first,
        vocab=rows.vocab,
        stored=stored,
        is_stored=is_stored,
        tokens=tokens,
    )
