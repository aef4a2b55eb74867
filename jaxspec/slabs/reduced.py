"""Rows over a reduced vocabulary, read as rows over the whole one."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_array, struct
from jaxspec.slabs.base import AnySlab, Slab, assert_slab, end_to_end, entries_at, read, take
from jaxspec.transfers import moves_data
from jaxspec.values import token_ids


@struct
class ReducedVocabulary(Slab):
    """Rows of a draft that knows some of the target's tokens, as EAGLE-3 and FR-Spec train them.

    A draft token t stands for the target's token `token_ids[t]`. Read as a row over the target's
    vocabulary, the tokens that the draft lacks have the entry `missing`, and so probability 0. The
    candidates of a proposal are always the target's tokens.

    Attributes:
      values: [R, W], rows over the draft's vocabulary, or another slab.
      places: int32 [V], for each of the target's tokens its entry in a row, -1 for none.
      missing: the entry of a token that the draft lacks (static): -inf for logits, 0 for
        probabilities.

    >>> from jaxspec import Logits, dense_rows
    >>> slab = ReducedVocabulary.of(jnp.zeros((1, 2)), [4, 1], vocab=5)
    >>> dense_rows(Logits(values=slab, temperature=jnp.float32(1)), 1).tolist()
    [[0.0, 0.5, 0.0, 0.0, 0.5]]
    """

    values: AnySlab  # [R, W]
    places: jax.Array  # [V]
    missing: float = dataclasses.field(default=-float("inf"), metadata={"static": True})

    @classmethod
    @moves_data
    def of(
        cls,
        values: AnySlab,
        tokens: Sequence[int] | np.ndarray,
        *,
        vocab: int,
        missing: float = -float("inf"),
    ) -> Self:
        """Make one of a list of ids; `places` is worked out on the host.

        Args:
          values: as the attribute.
          tokens: [W], the target's token for each entry of a row, all different.
          vocab: V.
          missing: as the attribute.

        Raises:
          ValueError: a token is none of the target's, or is listed twice, or there are not W; naming
            the place.
        """
        ids = np.array(token_ids("tokens", tokens, vocab), np.int32)
        if len(ids) != values.shape[1]:
            raise ValueError(f"tokens are {len(ids)}: rows have {values.shape[1]} entries")
        places = np.full(vocab, -1, np.int32)
        places[ids] = np.arange(len(ids), dtype=np.int32)
        twice = np.flatnonzero(places[ids] != np.arange(len(ids)))
        if twice.size:
            raise ValueError(f"tokens: entry {twice[0]} is {ids[twice[0]]}, which is listed again")
        return cls(values=values, places=jnp.asarray(places), missing=missing)

    @property
    def shape(self) -> tuple[int, int]:
        """(R, V)."""
        return self.values.shape[0], self.places.shape[0]

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self.values.dtype

    def read(self, row: jax.Array, start: Any, size: int) -> jax.Array:
        """Gather the entries of consecutive tokens."""
        places = jax.lax.dynamic_slice(self.places, (jnp.asarray(start, jnp.int32),), (size,))
        # One row is cut out first, so that the gather stays in the cache.
        entries = read(self.values, row, 0, self.values.shape[1])
        return self._or_missing(entries[jnp.maximum(places, 0)], places)

    def at(self, rows: jax.Array, tokens: jax.Array) -> jax.Array:
        """Gather single entries."""
        places = self.places[tokens]
        return self._or_missing(entries_at(self.values, rows, jnp.maximum(places, 0)), places)

    def take(self, rows: jax.Array) -> Self:
        """Take rows of the values."""
        return dataclasses.replace(self, values=take(self.values, rows))

    def end_to_end(self, batch: int, is_mapped: Any) -> AnySlab:
        """Lay the values end to end; written out if sequences have vocabularies of their own."""
        if not is_mapped.places:
            values, _ = end_to_end(self.values, batch, is_mapped.values)
            return dataclasses.replace(self, values=values)

        def dense(slab: Self) -> jax.Array:
            rows = jnp.arange(slab.shape[0], dtype=jnp.int32)
            return jax.vmap(lambda row: slab.read(row, 0, slab.shape[1]))(rows)

        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, is_mapped)
        rows = jax.vmap(dense, in_axes=(axes,))(self)
        return rows.reshape(-1, rows.shape[-1])

    def validate(self, name: str, vocab: int | None) -> None:
        """Assert static shapes and dtypes."""
        assert_slab(name, self.values, None)
        assert_array(f"{name} rows: places", self.places, {"V": None}, jnp.integer)

    def _or_missing(self, entries: jax.Array, places: jax.Array) -> jax.Array:
        return jnp.where(places >= 0, entries, jnp.asarray(self.missing, entries.dtype))
