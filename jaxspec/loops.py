"""Loops that also run inside `shard_map` with its default check of varying axes.

Under `shard_map` the type of an array holds the mesh axes it varies over, and a loop must keep the
types of its carry, which does not vary yet where it starts from constants. The loops here let every
part of a carry vary over the axes that any part of it varies over. Outside `shard_map` they are
those of `jax.lax`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

T = TypeVar("T")


def varying_alike(tree: T) -> T:
    """Let every array of a pytree vary over all mesh axes that any of them varies over."""
    return _cast(tree, _axes_of_all(tree))


def while_loop(condition: Callable[[T], jax.Array], body: Callable[[T], T], start: T) -> T:
    """Loop as `lax.while_loop`; `start` must vary over every axis that the results of `body` do."""
    axes = _axes_of_all(start)
    return lax.while_loop(condition, lambda state: _cast(body(state), axes), _cast(start, axes))


def fori_loop(trips: int, body: Callable[[jax.Array, T], T], start: T) -> T:
    """Run `body(trip, state)` for trip = 0 .. trips - 1, int32, also in 64-bit mode."""
    axes = _axes_of_all(start)
    return lax.fori_loop(
        np.int32(0),
        np.int32(trips),
        lambda trip, state: _cast(body(trip, state), axes),
        _cast(start, axes),
    )


def scan(
    step: Callable[[T, Any], tuple[T, jax.Array]], start: T, inputs: jax.Array
) -> tuple[T, jax.Array]:
    """Scan over the leading axis of `inputs`, with a carry that varies as they do."""
    axes = _axes_of_all((start, inputs))

    def body(state: T, item: Any) -> tuple[T, jax.Array]:
        state, result = step(state, item)
        return _cast(state, axes), result

    return lax.scan(body, _cast(start, axes), inputs)


def zeros_like_result(make: Callable[[], T]) -> T:
    """Return zeros of the shapes, dtypes and varying axes of the result of `make`."""
    return jax.tree.map(
        lambda like: _cast(jnp.zeros(like.shape, like.dtype), _axes(like)), jax.eval_shape(make)
    )


def when(condition: jax.Array, make: Callable[[], T], otherwise: T | None = None) -> T:
    """Return `make()` if the condition holds, else `otherwise` (default zeros), lazily.

    A loop of one trip or none: under `vmap`, where `cond` becomes a select, it runs only if a
    sequence of the batch needs it.
    """
    make = jax.jit(make)  # to be traced once, though its shapes are asked for before its results
    start = (condition, zeros_like_result(make) if otherwise is None else otherwise)
    return while_loop(lambda state: state[0], lambda _: (jnp.zeros((), bool), make()), start)[1]


def choose(condition: jax.Array, yes: T, no: T) -> T:
    """Select one of two pytrees of arrays of the same shapes."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _axes(array: Any) -> frozenset:
    """Return the mesh axes that an array, or its shape, varies over; none outside `shard_map`."""
    kind = array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
    # `vma` until JAX 0.9, a part of `manual_axis_type` since.
    manual = getattr(kind, "manual_axis_type", None)
    varying = getattr(kind, "vma", None) if manual is None else manual.varying
    return frozenset(varying or ())


def _axes_of_all(tree: Any) -> frozenset:
    return frozenset().union(*map(_axes, jax.tree.leaves(tree)))


def _cast(tree: T, axes: frozenset) -> T:
    if not axes:
        return tree

    def cast(array: Any) -> Any:
        missing = tuple(sorted(axes - _axes(array)))
        if not missing:
            return array
        if hasattr(lax, "pcast"):
            return lax.pcast(array, missing, to="varying")
        return lax.pvary(array, missing)  # type: ignore[attr-defined]

    return jax.tree.map(cast, tree)
