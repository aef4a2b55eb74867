"""Exact integer counts of outcomes on Cartesian grids of draws."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import Progress, assert_whole
from jaxspec.draws import grid_chunks
from jaxspec.transfers import moves_data


@moves_data
def count_outcomes(
    outcome: Callable[[jax.Array], jax.Array],
    sizes: Sequence[int],
    num_outcomes: int,
    *,
    chunk: int = 2**18,
    progress: Progress | None = None,
) -> np.ndarray:
    """Count the outcomes of a function over every cell of a grid of draws.

    The cells' mid-points go through `jit(vmap(outcome))` a chunk at a time, so memory is bounded for
    any grid.

    Args:
      outcome: maps float32 [K] to int32 [], the outcome's number from 0.
      sizes: cells along each of the K axes, at least one axis and one cell along each.
      num_outcomes: at least 1.
      chunk: cells evaluated at a time, at least 1.
      progress: called as progress("grid cells", cells done, all cells) after each chunk.

    Returns:
      int64 [num_outcomes], exact; they sum to the number of cells.

    Raises:
      ValueError: an outcome's number is out of range, or the grid is empty.

    >>> count_outcomes(lambda u: jnp.where(u[0] < 0.25, 0, 1), (100, 100), 2).tolist()
    [2500, 7500]
    """
    if not len(sizes):
        raise ValueError("sizes is empty: a grid must have at least one axis")
    for axis, size in enumerate(sizes):
        assert_whole(f"sizes[{axis}]", size, 1)
    assert_whole("num_outcomes", num_outcomes, 1)
    assert_whole("chunk", chunk, 1)
    total = math.prod(int(size) for size in sizes)
    chunk = min(chunk, total)
    tally = _make_tally(outcome, num_outcomes, chunk)
    counts, done = np.zeros(num_outcomes, np.int64), 0
    for cells in grid_chunks(sizes, chunk):
        count = len(cells)
        padded = jnp.asarray(np.pad(cells, ((0, chunk - count), (0, 0))))
        found = np.asarray(tally(padded, jnp.int32(count)), np.int64)
        if found[num_outcomes]:
            raise ValueError(
                f"among grid cells {done} to {done + count - 1}, {found[num_outcomes]} have an "
                f"outcome outside 0 ... {num_outcomes - 1}"
            )
        counts += found[:num_outcomes]
        done += count
        if progress:
            progress("grid cells", done, total)
    return counts


@functools.lru_cache(maxsize=16)
def _make_tally(
    outcome: Callable[[jax.Array], jax.Array], num_outcomes: int, chunk: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Make the jitted count of a chunk's outcomes; cached, so that grids share its program."""

    @jax.jit
    def tally(cells: jax.Array, count: jax.Array) -> jax.Array:
        codes = jax.vmap(outcome)(cells).astype(jnp.int32)
        is_cell = jnp.arange(chunk, dtype=jnp.int32) < count
        is_known = (codes >= 0) & (codes < num_outcomes)
        slots = jnp.where(is_cell, jnp.where(is_known, codes, num_outcomes), num_outcomes + 1)
        return jnp.zeros(num_outcomes + 2, jnp.int32).at[slots].add(1)

    return tally
