"""What a draft's row says: its most probable tokens, and how unsure it is.

Both loops choose candidates and widths with the functions of this file, the compiled loop inside its
program and the host loop jitted, so that one row gives one tree.

In the shape descriptions V denotes the vocabulary.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

TINY = 1.1754944e-38
"""The least normal float32. Smaller probabilities count as 0: XLA flushes them on some platforms."""


def likeliest(law: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k most probable tokens of each row, the lowest first among equals.

    Args:
      law: float32 [..., V], probabilities.
      k: candidates; it may exceed V.

    Returns:
      (int32 [..., k] tokens by falling probability, bool [..., k] which of them count: those of
      positive probability).

    >>> likeliest(jnp.array([0.25, 0.0, 0.5, 0.25]), 4)[0][:3].tolist()
    [2, 0, 3]
    """
    best, tokens = best_of(law, k)
    return tokens, best >= jnp.float32(TINY)


def best_of(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k greatest scores and their int32 places, -inf at place 0 beyond those there are."""
    most = min(k, scores.shape[-1])
    best, places = lax.top_k(scores, most)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, k - most)]
    return (
        jnp.pad(best, padding, constant_values=-jnp.inf),
        jnp.pad(places.astype(jnp.int32), padding),
    )


def entropies(law: jax.Array, log_vocab: jax.Array | None = None) -> jax.Array:
    """Return the normalised entropy of each row, float32 [...]; see `normalised_entropy`.

    Args:
      law: float32 [..., V], probabilities; taken over their sum.
      log_vocab: float32 [], log V where the rows are padded with zeros; default that of their width.
    """
    total = jnp.sum(law, axis=-1, keepdims=True)
    shares = law / jnp.where(total > 0, total, 1.0)
    is_possible = shares >= jnp.float32(TINY)
    terms = jnp.where(is_possible, -shares * jnp.log(jnp.where(is_possible, shares, 1.0)), 0.0)
    most = jnp.float32(math.log(max(law.shape[-1], 2))) if log_vocab is None else log_vocab
    return jnp.clip(jnp.sum(terms, axis=-1) / most, 0.0, 1.0)


def normalised_entropy(row: npt.ArrayLike) -> float:
    """Return H(row) / log V: 0 for a point mass or a single token, 1 for a uniform row.

    Args:
      row: float [V], probabilities; taken over their sum, which rounding leaves near 1.

    Returns:
      A number in [0, 1], as float32 arithmetic gives it.

    Raises:
      ValueError: the argument is not one row of numbers.

    >>> normalised_entropy([0.5, 0.5, 0.0, 0.0])
    0.5
    """
    values = numbers("row", row)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"row has shape {values.shape}: must be one row [V] of probabilities")
    # Padded, so that rows of many widths share a few programs.
    padded = np.zeros(1 << (values.size - 1).bit_length(), np.float32)
    padded[: values.size] = values
    return float(_entropy(padded, np.float32(math.log(max(values.size, 2)))))


_entropy = jax.jit(entropies)


def numbers(name: str, value: Any) -> np.ndarray:
    """Return an array float64.

    Raises:
      ValueError: the argument is no array of numbers.
    """
    try:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError("it is masked")
        array = np.asarray(value)
        if array.dtype.kind in "bcmMOSU":
            raise TypeError(f"its type is {array.dtype}")
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error
