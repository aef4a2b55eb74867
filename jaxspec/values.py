"""Values that callers give on the host: numbers and token ids, whatever holds them.

Each error names the argument and its value, and is a `ValueError`.
"""

import numbers
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np


def value_error(name: str, value: Any, wanted: str) -> ValueError:
    """Return the error that names an argument, its value and what it must be."""
    return ValueError(f"{name} is {reprlib.repr(value)}: must be {wanted}")


def number(name: str, value: Any, kind: type, bounds: tuple[float, float], wanted: str) -> Any:
    """Return a number of a kind, int or float, within bounds; also from an array without axes."""
    given = _scalar(value)
    kinds = numbers.Integral if kind is int else numbers.Real
    is_number = isinstance(given, kinds) and not isinstance(given, bool)
    if not is_number or not bounds[0] <= given <= bounds[1]:
        raise value_error(name, value, wanted)
    return kind(given)


def token_ids(name: str, value: Any, vocab: int) -> tuple[int, ...]:
    """Return token ids as plain integers, from a collection or an array of them."""
    entries = entries_of(value)
    if entries is None:
        raise value_error(name, value, "a sequence of token ids")
    if all(type(each) is int and 0 <= each < vocab for each in entries):
        return tuple(entries)
    wanted = f"an integer in the vocabulary of {vocab}"
    return tuple(
        number(f"{name}: entry {at}", each, int, (0, vocab - 1), wanted)
        for at, each in enumerate(entries)
    )


def _scalar(value: Any) -> Any:
    """Return the number of an array without axes as Python's; anything else as it is."""
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    is_number = is_array and value.ndim == 0 and not is_key(value)
    return np.asarray(value).item() if is_number else value


def entries_of(value: Any) -> list[Any] | None:
    """Return the entries of a collection or an array; None for anything else."""
    if isinstance(value, np.ndarray | jax.Array):
        return None if value.ndim == 0 or is_key(value) else value.tolist()
    is_many = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    return list(value) if is_many else None


def is_key(value: np.generic | np.ndarray | jax.Array) -> bool:
    """Return whether an array holds typed keys of JAX."""
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
