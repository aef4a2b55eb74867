"""The error doors: what may raise, where, and with which words.

Four doors and no fifth. Static facts (rank, shape, dtype) are asserted in the first lines of a
public function, by `assert_array` where the message must name the argument. Values on the host
raise a `ValueError` subclass of this file. Values under a trace are checked by
`jax.experimental.checkify`, functionalised by `jaxspec.checked`. What production must survive
without an exception is a bit of `Status` in the verdict.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called as progress(what was just done, steps done, all steps), first when nothing is done."""

MASS_TOLERANCE = {"float64": 1e-5, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
"""How far from 1 the mass of a row of probabilities may lie, by the dtype it is stored in."""


ABSTRACT = {jnp.floating: "a float dtype", jnp.integer: "an integer dtype"}
"""Families of dtypes in words."""


class TreeError(ValueError):
    """A tree of candidates is not one: topology, padding or sibling tokens."""


class DrawError(ValueError):
    """A uniform draw is missing, not finite, or outside [0, 1)."""


class RowError(ValueError):
    """A next-token row is not a distribution over the vocabulary it claims.

    Attributes:
      fault: the kind of fault, where a model's answer was checked; else None.
    """

    def __init__(self, *message: object, fault: str | None = None) -> None:
        """Store the kind of fault beside the message."""
        super().__init__(*message)
        self.fault = fault


def assert_whole(name: str, value: Any, least: int) -> None:
    """Refuse on the host what is no whole number, or one too small.

    Raises:
      ValueError: naming the argument and its value.
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < least:
        raise ValueError(f"{name} is {value!r}: must be a whole number, at least {least}")


def described(value: Any) -> str:
    """Say in an error what was given: its type, and the value where it is a plain one.

    >>> described("token"), described(None), described((1, 2)), described(int)
    ("'token', of type str", 'None', 'of type tuple', 'the class int')
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = f"of type {type(value).__name__}"
    # Others may hold a network: neither to be printed nor to be fetched from a device.
    is_plain = isinstance(value, str | int | float)
    return f"{reprlib.repr(value)}, {kind}" if is_plain else kind


def assert_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Refuse on the host what is not of a type.

    Args:
      name: the argument.
      value: what was given.
      kind: the type, as `isinstance` takes it.
      wanted: what to give instead.

    Raises:
      ValueError: naming the argument, what was given and what is wanted.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {described(value)}: must be {wanted}")


def assert_array(name: str, value: Any, axes: Mapping[str, int | None], dtype: Any) -> None:
    """Assert the shape and dtype of an array of one sequence.

    Args:
      name: the argument.
      value: an array, or a tracer.
      axes: for each axis its letter and its size; None for any size.
      dtype: the dtype, or an abstract one such as `jnp.floating`.

    Raises:
      ValueError: it is no array.
      AssertionError: naming the argument, its shape or dtype, and what is wanted.
    """
    wanted = "[" + ", ".join(axes) + "]"
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"{name} is {described(value)}: must be an array {wanted}")
    shape = list(jnp.shape(value))
    if len(shape) == len(axes) + 1:
        raise AssertionError(
            f"{name} has shape {shape}: one sequence takes {wanted}; for a batch, map the call with "
            "jax.vmap"
        )
    sizes = [
        given if size is None else size for given, size in zip(shape, axes.values(), strict=False)
    ]
    if len(shape) != len(axes) or shape != sizes:
        known = ", ".join(f"{axis} = {size}" for axis, size in axes.items() if size is not None)
        known = "" if known in ("", "2 = 2") else f" with {known}"
        raise AssertionError(f"{name} has shape {shape}: wanted {wanted}{known}")
    if not jnp.issubdtype(jnp.result_type(value), dtype):
        wanted = ABSTRACT[dtype] if dtype in ABSTRACT else jnp.dtype(dtype).name
        raise AssertionError(f"{name} has dtype {jnp.result_type(value)}: wanted {wanted}")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def struct(cls: type[T]) -> type[T]:
    """Make a class an immutable record of arrays (a pytree), built by keyword only."""
    return chex.dataclass(cls, frozen=True, mappable_dataclass=False, kw_only=True)


def check_all(is_ok: jax.Array, message: str, **values: jax.Array) -> None:
    """Check under a trace that every entry holds; report the first that does not.

    Args:
      is_ok: bool [...], True where the entry is fine.
      message: a format string. `{i0}`, `{i1}`, ... are the indices of the first bad entry, and each
        name of `values` is that array's value there.
      **values: arrays of the shape of `is_ok`.
    """
    flat = is_ok.reshape(-1)
    worst = jnp.argmin(flat)
    where = jnp.unravel_index(worst, is_ok.shape) if is_ok.shape else ()
    found: dict[str, Any] = {f"i{axis}": index for axis, index in enumerate(where)}
    found |= {name: value.reshape(-1)[worst] for name, value in values.items()}
    checkify.check(jnp.all(flat), message, **found)


def raise_if(error: checkify.Error) -> None:
    """Raise on the host what a checking twin found.

    Args:
      error: the first result of a function made by `jaxspec.checked`, of one call or of a batch.

    Raises:
      ValueError: with the place and value of the first bad entry; for a batch also its index.
    """
    found = error.get()
    if found is not None:
        raise ValueError(found)


def functionalise(check: Callable[..., None]) -> Callable[..., checkify.Error]:
    """Turn a function that calls `check_all` into one that returns the error as a value."""

    def run(*args: Any) -> checkify.Error:
        error, _ = checkify.checkify(check, errors=checkify.user_checks)(*args)
        return error

    return run


MOST_TOKENS = 2**31 - 1
"""Positions in a text are int32."""


def assert_between(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ValueError unless a value is an integer from `least` to `most`, None for no bound."""
    assert_whole(name, value, least)
    if most is not None and value > most:
        raise ValueError(f"{name} is {value}: must be at most {most}")


def assert_bool(name: str, value: Any) -> None:
    """Raise ValueError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: must be True or False")


def assert_function(name: str, value: Any, wanted: str) -> None:
    """Raise ValueError unless a value can be called."""
    if not callable(value):
        raise ValueError(f"{name} is {described(value)}: must be {wanted}")


def assert_members(name: str, value: Any, protocol: type, wanted: str) -> None:
    """Raise ValueError unless a value has all members of a protocol.

    Raises:
      ValueError: naming what was given, what it lacks and what to give instead.
    """
    if isinstance(value, type):
        raise ValueError(f"{name} is {described(value)}, not one made of it: {wanted}")
    members = [member for member in vars(protocol) if not member.startswith("_")]
    lacking = ", ".join(member for member in members if not hasattr(value, member))
    if lacking:
        raise ValueError(f"{name} is {described(value)}, which has no {lacking}: {wanted}")


def assert_length(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a number of tokens from 1 on."""
    assert_between(name, value, 1, MOST_TOKENS)
