"""Error handling, and the decorator of pytrees.

Four mechanisms. Static facts (rank, shape, dtype) are asserted in the first lines of a public
function, by `assert_array` where the message must name the argument. Invalid values on the host
raise a `ValueError` subclass of this file. Values under a trace are checked by
`jax.experimental.checkify`, which `jaxspec.checked` turns into a returned error. What production
must survive without an exception is a bit of `Status` in the verdict.
"""

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called as progress(what was just done, steps done, all steps), first when nothing is done."""

MASS_TOLERANCE = {"float64": 1e-5, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
"""By how much the mass of a row of probabilities may differ from 1, by the dtype it is stored in."""

MOST_TOKENS = 2**31 - 1
"""Positions in a text are int32."""

_FAMILIES = {
    jnp.floating: "a float dtype",
    jnp.integer: "an integer dtype",
    jnp.number: "a dtype of numbers",
}


class TreeError(ValueError):
    """An invalid tree of candidates: topology, padding or sibling tokens."""


class DrawError(ValueError):
    """A uniform draw is missing, not finite, or outside [0, 1)."""


class RowError(ValueError):
    """A next-token row is not a distribution over its vocabulary.

    Attributes:
      fault: the kind of fault, where a model's answer was checked; else None.
    """

    def __init__(self, *message: object, fault: str | None = None) -> None:
        """Store the message and the kind of fault."""
        super().__init__(*message)
        self.fault = fault


@dataclass_transform(frozen_default=True, kw_only_default=True)
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree of its fields, in the order of declaration.

    Use this for a custom `RowSource` or `Proposal`, not `jax.tree_util.register_dataclass`: the
    structures of two classes registered by that compare equal if their fields do (JAX 0.10.2). Their
    hashes differ, so that `jax.jit` tells them apart except by chance, in some processes of a hundred,
    where one class is given the program that was compiled for the other.

    Args:
      cls: a class with annotated fields, to be given by keyword. One declared with
        `dataclasses.field(metadata={"static": True})` is not traced: it is a part of the tree's
        structure, compared and hashed.

    Returns:
      The class.

    >>> @struct
    ... class Pair:
    ...     first: jax.Array
    ...     second: jax.Array
    >>> jax.tree.leaves(Pair(first=1, second=2))
    [1, 2]
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(made)  # type: ignore[arg-type]
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    traced = tuple(field.name for field in fields if field.name not in static)
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in traced)

    def flatten(record: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values = vars(record)
        return tuple(values[name] for name in traced), tuple(values[name] for name in static)

    def flatten_with_keys(record: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, structure = flatten(record)
        return tuple(zip(keys, children, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], children: Iterable[Any]) -> T:
        record = object.__new__(made)
        vars(record).update(
            zip(traced, children, strict=True), **dict(zip(static, structure, strict=True))
        )
        return record

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made


def static_field() -> Any:
    """Declare a field of a `struct` that is compared and hashed, not traced."""
    return dataclasses.field(metadata={"static": True})


def assert_told_apart(name: str, record: Any) -> None:
    """Assert that `jax.jit` tells a pytree's class from another of the same fields; see `struct`.

    Raises:
      ValueError: naming the class and what to decorate it with.
    """
    fields = dataclasses.fields(record)
    static = [field.name for field in fields if field.metadata.get("static")]
    traced = [field.name for field in fields if field.name not in static]
    twin = dataclasses.make_dataclass("Twin", [field.name for field in fields])
    jax.tree_util.register_dataclass(twin, data_fields=traced, meta_fields=static)
    structure: Any = jax.tree.structure(record)
    if structure == jax.tree.structure(twin(**vars(record))):
        kind = type(record).__name__
        raise ValueError(
            f"{name} is a {kind}, registered by jax.tree_util.register_dataclass: jax.jit may take it "
            f"for another class of the same fields. Decorate {kind} with jaxspec.struct instead"
        )


def described(value: Any) -> str:
    """Describe an argument in an error: its type, and its value if that is short.

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


def assert_whole(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless a value is an integer >= `least`."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise ValueError(f"{name} is {value!r}: must be an integer >= {least}")


def assert_between(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ValueError unless a value is an integer from `least` to `most` (None: no upper bound)."""
    assert_whole(name, value, least)
    if most is not None and value > most:
        raise ValueError(f"{name} is {value}: must be at most {most}")


def assert_length(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a number of tokens >= 1."""
    assert_between(name, value, 1, MOST_TOKENS)


def assert_bool(name: str, value: Any) -> None:
    """Raise ValueError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: must be True or False")


def assert_kind(name: str, value: Any, kind: Any, wanted: str) -> None:
    """Raise ValueError unless a value is an instance of `kind`; `wanted` describes what to give."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {described(value)}: must be {wanted}")


def assert_function(name: str, value: Any, wanted: str) -> None:
    """Raise ValueError unless a value can be called."""
    if not callable(value):
        raise ValueError(f"{name} is {described(value)}: must be {wanted}")


def assert_array(name: str, value: Any, axes: Mapping[str, int | None], dtype: Any) -> None:
    """Assert that an argument is an array (else ValueError) of one sequence, of a shape and dtype.

    `axes` gives the size of each axis by its letter, None for any; `dtype` may be an abstract one.
    """
    wanted = "[" + ", ".join(axes) + "]"
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"{name} is {described(value)}: must be an array {wanted}")
    shape = list(jnp.shape(value))
    if len(shape) == len(axes) + 1:
        how = "for a batch, map the call with jax.vmap"
        raise AssertionError(f"{name} has shape {shape}: one sequence takes {wanted}; {how}")
    sizes = [n if size is None else size for n, size in zip(shape, axes.values(), strict=False)]
    if len(shape) != len(axes) or shape != sizes:
        known = [f"{axis} = {n}" for axis, n in axes.items() if str(n) not in ("None", axis)]
        where = f" with {', '.join(known)}" if known else ""
        raise AssertionError(f"{name} has shape {shape}: must be {wanted}{where}")
    if not jnp.issubdtype(jnp.result_type(value), dtype):
        wanted = _FAMILIES[dtype] if dtype in _FAMILIES else jnp.dtype(dtype).name
        raise AssertionError(f"{name} has dtype {jnp.result_type(value)}: must be {wanted}")


def check_all(is_ok: jax.Array, message: str, **values: jax.Array) -> None:
    """Check under a trace that every entry of `is_ok` is True; report the first that is not.

    In `message`, `{i0}`, `{i1}`, ... are the indices of that entry, and each name of `values` (arrays
    of the shape of `is_ok`) is the value there.
    """
    flat = is_ok.reshape(-1)
    worst = jnp.argmin(flat)
    where = jnp.unravel_index(worst, is_ok.shape) if is_ok.shape else ()
    found: dict[str, Any] = {f"i{axis}": index for axis, index in enumerate(where)}
    found |= {name: value.reshape(-1)[worst] for name, value in values.items()}
    checkify.check(jnp.all(flat), message, **found)


def raise_if(error: checkify.Error) -> None:
    """Raise on the host the error that a function made by `jaxspec.checked` returned.

    Args:
      error: its first result, for one call or for a batch.

    Raises:
      ValueError: with the place and value of the first invalid entry; for a batch also its index.
    """
    found = error.get()
    if found is not None:
        raise ValueError(found)


def functionalize(check: Callable[..., None]) -> Callable[..., checkify.Error]:
    """Turn a function that calls `check_all` into one that returns the error as a value."""

    def run(*args: Any) -> checkify.Error:
        return checkify.checkify(check, errors=checkify.user_checks)(*args)[0]

    return run
