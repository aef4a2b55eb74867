"""Exact integer counts of outcomes on Cartesian grids of draws."""

import functools
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audit.instances import SINGLE_PATH, TWO_LEVEL_TREE
from jaxspec.audit.rounds import make_round
from jaxspec.checks import assert_whole
from jaxspec.draws import grid_chunks
from jaxspec.transfers import moves_data
from jaxspec.verify import RULES

Progress = Callable[[int, int], None]


def show_progress(done: int, total: int) -> None:
    """Write a line of progress to a terminal's standard error."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done:,} of {total:,} grid cells", end=end, file=sys.stderr, flush=True)


@moves_data
def count_outcomes(
    outcome: Callable[[jax.Array], jax.Array],
    sizes: Sequence[int],
    num_outcomes: int,
    *,
    chunk: int = 2**18,
    progress: Progress | None = show_progress,
) -> np.ndarray:
    """Count the outcomes of a function over every cell of a grid of draws.

    The cells' mid-points go through `jit(vmap(outcome))` a chunk at a time, so memory is bounded
    whatever the grid.

    Args:
      outcome: maps float32 [K] to int32 [], the outcome's number from 0.
      sizes: cells along each of the K axes, at least one axis and one cell along each.
      num_outcomes: how many outcomes there are, at least 1.
      chunk: cells evaluated at a time, at least 1.
      progress: called as progress(cells done, all cells) after each chunk.

    Returns:
      int64 [num_outcomes], exact; they sum to the number of cells.

    Raises:
      ValueError: an outcome's number is out of range, or the grid is empty.

    >>> count_outcomes(lambda u: jnp.where(u[0] < 0.25, 0, 1), (100, 100), 2, progress=None).tolist()
    [2500, 7500]
    """
    if not len(sizes):
        raise ValueError("sizes is empty: a grid must have at least one axis")
    for axis, size in enumerate(sizes):
        assert_whole(f"sizes[{axis}]", size, 1)
    assert_whole("num_outcomes", num_outcomes, 1)
    assert_whole("chunk", chunk, 1)
    total = int(np.prod([int(size) for size in sizes], dtype=np.int64))
    chunk = min(chunk, total)

    tally = _make_tally(outcome, num_outcomes, chunk)
    counts = np.zeros(num_outcomes, np.int64)
    done = 0
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
            progress(done, total)
    return counts


@functools.lru_cache(maxsize=16)
def _make_tally(
    outcome: Callable[[jax.Array], jax.Array], num_outcomes: int, chunk: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Make the jitted count of a chunk's outcomes; once, so that grids can share its program."""

    @jax.jit
    def tally(cells: jax.Array, count: jax.Array) -> jax.Array:
        codes = jax.vmap(outcome)(cells).astype(jnp.int32)
        is_cell = jnp.arange(chunk, dtype=jnp.int32) < count
        is_known = (codes >= 0) & (codes < num_outcomes)
        slots = jnp.where(is_cell, jnp.where(is_known, codes, num_outcomes), num_outcomes + 1)
        return jnp.zeros(num_outcomes + 2, jnp.int32).at[slots].add(1)

    return tally


@moves_data
def single_path_counts(num: int = 100) -> list[int]:
    """Count the contract's single path over num x num (draft, accept) draws, by token.

    >>> single_path_counts()
    [2500, 7500]
    """
    played = make_round(RULES["token"], SINGLE_PATH)

    def outcome(u: jax.Array) -> jax.Array:
        middle = jnp.full(len(played.axes), 0.5, jnp.float32)
        return played.play(played.world, middle.at[:2].set(u)).verdict.tokens[0]

    return count_outcomes(outcome, (num, num), 2, progress=None).tolist()


@moves_data
def two_level_tree_counts(num: int = 100) -> list[int]:
    """Count the contract's tree over num x num accept draws, by the two tokens: 00, 01, 10, 11.

    The first axis is the draw of the first candidate, the second that of the first candidate below
    the one accepted.

    >>> two_level_tree_counts()
    [2000, 500, 3000, 4500]
    """
    played = make_round(RULES["point_mass"], TWO_LEVEL_TREE)
    first = played.axis("accept 1")
    below = [played.axis("accept 3"), played.axis("accept 5")]

    def outcome(u: jax.Array) -> jax.Array:
        middle = jnp.full(len(played.axes), 0.5, jnp.float32)
        draws = middle.at[first].set(u[0]).at[jnp.array(below)].set(u[1])
        tokens = played.play(played.world, draws).verdict.tokens
        return 2 * tokens[0] + tokens[1]

    return count_outcomes(outcome, (num, num), 4, progress=None).tolist()
