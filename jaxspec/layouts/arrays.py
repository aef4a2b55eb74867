"""Arrays of NumPy or JAX: a layout has the library of what it is made of."""

from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Array: TypeAlias = Any
"""An array of NumPy or of JAX."""

Path: TypeAlias = tuple[Array, Array | None, Array]
"""(tokens int [T], draft rows [T, V] or None for point masses, target rows [T + 1, V])."""


def library_of(array: Array) -> ModuleType:
    """Return jax.numpy for an array of JAX, else NumPy."""
    return jnp if isinstance(array, jax.Array) else np
