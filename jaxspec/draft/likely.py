"""What a draft's row tells: its most probable tokens, and how uncertain it is.

Both loops choose candidates and widths with these functions, so one row gives one tree. A probability
below the least normal float32 counts as 0, since XLA flushes it on some platforms, and a token of
probability 0 is never a candidate.

In the shape descriptions V denotes the vocabulary.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxspec.checks import RowError, assert_between
from jaxspec.draft.shape import Shape
from jaxspec.tiles import LEAST
from jaxspec.trees import Tree, make_tree


def likeliest(rows: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k most probable tokens of each row, the lowest id first among equals.

    Args:
      rows: float32 [..., V], probabilities.
      k: candidates; it may exceed V.

    Returns:
      (int32 [..., k] tokens by falling probability, float32 [..., k] their probabilities: 0 where
      there is no candidate).

    >>> likeliest(jnp.array([0.25, 0.0, 0.5, 0.25]), 3)[0].tolist()
    [2, 0, 3]
    """
    most = min(k, rows.shape[-1])
    best, tokens = lax.top_k(rows, most)
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, k - most)]
    best = jnp.pad(jnp.where(best >= LEAST, best, 0.0), padding)
    return jnp.pad(tokens.astype(jnp.int32), padding), best


def entropies(rows: jax.Array, log_vocab: jax.Array | None = None) -> jax.Array:
    """Return the normalized entropy of each row, float32 [...]; see `normalized_entropy`.

    Args:
      rows: float32 [..., V], probabilities; divided by their sum.
      log_vocab: float32 [], log V where the rows are padded with zeros; default that of their width.
    """
    total = jnp.sum(rows, axis=-1, keepdims=True)
    shares = rows / jnp.where(total > 0, total, 1.0)
    is_possible = shares >= LEAST
    terms = jnp.where(is_possible, -shares * jnp.log(jnp.where(is_possible, shares, 1.0)), 0.0)
    most = jnp.float32(math.log(max(rows.shape[-1], 2))) if log_vocab is None else log_vocab
    return jnp.clip(jnp.sum(terms, axis=-1) / most, 0.0, 1.0)


def normalized_entropy(row: npt.ArrayLike) -> float:
    """Return H(row) / log V: 0 for a point mass or a single token, 1 for a uniform row.

    Args:
      row: float [V], probabilities; divided by their sum, which rounding leaves near 1.

    Returns:
      A number in [0, 1], as float32 arithmetic gives it.

    Raises:
      ValueError: the argument is not one row of numbers.

    >>> normalized_entropy([0.5, 0.5, 0.0, 0.0])
    0.5
    """
    (values,) = _rows_of("row", [row])
    # Padded, so that rows of many sizes share a few programs.
    padded = np.zeros(1 << (values.size - 1).bit_length(), np.float32)
    padded[: values.size] = values
    return float(_entropy(padded, np.float32(math.log(max(values.size, 2)))))


_entropy = jax.jit(entropies)


def top_k(row: npt.ArrayLike, k: int) -> tuple[int, ...]:
    """Return the k most probable tokens, the lowest id first among equals.

    Args:
      row: float [V], probabilities.
      k: how many, at least 0; there are fewer where fewer tokens have positive probability.

    Raises:
      ValueError: k is negative, or the row is not one row of numbers.
      RowError: an entry is not finite.

    >>> top_k([0.25, 0.0, 0.5, 0.25], 9)
    (2, 0, 3)
    """
    (exact,) = _rows_of("row", [row])
    assert_between("k", k, 0)
    bad = np.flatnonzero(~np.isfinite(exact))
    if bad.size:
        raise RowError(f"entry {bad[0]} of the row is {exact[bad[0]]}")
    return _ranked(exact, exact >= LEAST)[:k]


def build_from_depth_logits(
    depth_logits: npt.ArrayLike,
    branching: tuple[int, ...],
    *,
    root: int = -1,
    max_nodes: int | None = None,
) -> Tree:
    """Build the tree of a draft that depends on nothing but the depth: a fixture without a model.

    Args:
      depth_logits: float [D, V], row d for the candidates below each node of depth d: finite or
        -inf, which is never a candidate.
      branching: candidates below each node of depth 0, 1, ..., at most D; fewer where fewer logits
        are finite.
      root: the last committed token; -1 if it is not known.
      max_nodes: keep the first nodes only, the root counted.

    Raises:
      ValueError: the shapes do not match, or there is no candidate.
      RowError: a logit is NaN or +inf, or all of a row are -inf.

    >>> build_from_depth_logits([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]], (2, 1)).tokens.tolist()
    [-1, 1, 2, 0, 0]
    """
    logits = _rows_of("depth_logits", depth_logits)
    depth = Shape.of_branching(branching, max_nodes).capacity.max_depth
    if len(logits) < depth:
        raise ValueError(
            f"depth_logits has {len(logits)} rows, a tree of depth {depth} needs as many"
        )
    assert_between("root", root, -1, logits.shape[1] - 1)
    for place, row in enumerate(logits):
        bad = np.flatnonzero(np.isnan(row) | (row == np.inf))
        if bad.size:
            raise RowError(f"depth_logits row {place}: logit {bad[0]} is {row[bad[0]]}")
        if np.all(row == -np.inf):
            raise RowError(f"depth_logits row {place}: every logit is -inf, so it has no mass")
    ranked = [_ranked(row, row > -np.inf) for row in logits]
    counts = tuple(min(k, len(found)) for k, found in zip(branching, ranked, strict=False))
    shape = Shape.of_branching(counts, max_nodes)
    tokens = [root]
    for node, parent in enumerate(shape.parents[1:], 1):
        rank = int(np.argmax(shape.children[parent] == node))
        tokens.append(ranked[shape.depths[parent]][rank])
    return make_tree(tokens, shape.parents)


def _rows_of(name: str, value: Any) -> np.ndarray:
    """Return rows, float64 [n, V]."""
    try:
        rows = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"{name} has shape {np.shape(value)}: must be one row [V], or rows [D, V]")
    return rows


def _ranked(scores: np.ndarray, is_candidate: np.ndarray) -> tuple[int, ...]:
    """Return the candidates by falling score, the lowest id first among equals."""
    order = np.argsort(-scores, kind="stable")
    return tuple(order[is_candidate[order]].tolist())
