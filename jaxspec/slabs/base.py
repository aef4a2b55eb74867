"""What a slab of rows is: entries by row and token, stored or computed as they are read."""

import abc
from typing import Any, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import assert_array

T = TypeVar("T")


class Slab(abc.ABC):
    """Rows that are computed as they are read; to a source they are what an array [R, W] is.

    A subclass is a pytree (decorate it with `jaxspec.struct`). An entry depends on its row and its
    token alone. Rows outside the slab are those at its ends.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """(R, W)."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """Of the entries."""

    @abc.abstractmethod
    def read(self, row: jax.Array, start: Any, size: int) -> jax.Array:
        """Return the entries [size] of consecutive tokens of a row."""

    @abc.abstractmethod
    def at(self, rows: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the entries [...] at rows and tokens, int32 [...]."""

    @abc.abstractmethod
    def take(self, rows: jax.Array) -> Self:
        """Return a slab of these rows, int32 [n]."""

    @abc.abstractmethod
    def end_to_end(self, batch: int, is_mapped: Any) -> "Slab | jax.Array":
        """Return the slab of all rows of a batch, [B * R, W], those of its first sequence first.

        Args:
          batch: B.
          is_mapped: for each array whether it has a leading B; the others are shared.
        """

    @abc.abstractmethod
    def validate(self, name: str, vocab: int | None) -> None:
        """Assert static shapes and dtypes; V, or None for W, is how many entries are read."""


AnySlab: TypeAlias = jax.Array | Slab


def read(slab: AnySlab, row: jax.Array, start: Any, size: int) -> jax.Array:
    """Return the entries [size] of consecutive tokens of a row."""
    if isinstance(slab, Slab):
        return slab.read(row, start, size)
    where = (jnp.asarray(row, jnp.int32), jnp.asarray(start, jnp.int32))
    return lax.dynamic_slice(slab, where, (1, size))[0]


def entries_at(slab: AnySlab, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the entries [...] at rows and tokens, int32 [...], both clipped into range."""
    rows = jnp.clip(rows, 0, slab.shape[0] - 1)
    tokens = jnp.clip(tokens, 0, slab.shape[1] - 1)
    return slab.at(rows, tokens) if isinstance(slab, Slab) else slab[rows, tokens]


def take(slab: AnySlab, rows: jax.Array) -> AnySlab:
    """Return a slab of these rows, int32 [n], clipped into range."""
    if isinstance(slab, Slab):
        return slab.take(rows)
    return jnp.take(slab, rows, axis=0, mode="clip")


def end_to_end(slab: AnySlab, batch: int, is_mapped: Any) -> tuple[AnySlab, jax.Array]:
    """Return the slab of all rows of a batch, and where those of each sequence start, int32 [B].

    A slab that is not mapped, which all sequences share, stays as it is, and all start at 0.
    """
    if not any(jax.tree.leaves(is_mapped)):
        return slab, jnp.zeros(batch, jnp.int32)
    if isinstance(slab, Slab):
        flat: AnySlab = slab.end_to_end(batch, is_mapped)
    else:
        flat = spread(slab, batch, is_mapped)
    return flat, jnp.arange(batch, dtype=jnp.int32) * (flat.shape[0] // max(batch, 1))


def spread(rows: jax.Array, batch: int, is_mapped: bool) -> jax.Array:
    """Return [B, n, ...], or [n, ...] repeated for each sequence, as [B * n, ...]."""
    if not is_mapped:
        rows = jnp.broadcast_to(rows, (batch, *rows.shape))
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def assert_slab(name: str, slab: Any, vocab: int | None) -> None:
    """Assert the static shapes and dtypes of a slab."""
    if isinstance(slab, Slab):
        slab.validate(name, vocab)
    else:
        assert_array(f"{name} rows", slab, {"N": None, "V": None}, jnp.number)
