"""Named tensors of a checkpoint to the parameters of a network, fields and shapes checked."""

import dataclasses
import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.llama import LlamaConfig, LlamaLayer, LlamaParams, wanted_shapes


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or of a network this package does not have."""


MOST_HEAD_WIDTH = 1 << 16
"""No network's heads are as wide; a broken file must not make a list of angles without end."""

MOST_CONTEXT = (1 << 31) - 1
"""Positions are counted in 32 bits."""

_LARGEST = float(np.finfo(np.float32).max)
_REQUIRED: Any = object()


@dataclasses.dataclass(frozen=True)
class Fields:
    """What a file says of a network, each value read with the type and range that it must have.

    A field that is absent or null has its default; where there is none, it is rejected as None.

    Attributes:
      path: the file, for messages.
      values: its fields.
    """

    path: str | os.PathLike[str]
    values: Mapping[str, Any]

    def whole(
        self, name: str, default: Any = _REQUIRED, *, least: int = 1, most: int | None = None
    ) -> Any:
        """Return a whole number from `least` to `most`, or the default."""

        def is_fine(value: Any) -> bool:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            return is_whole and value >= least and (most is None or value <= most)

        upto = f"of at least {least}" if most is None else f"from {least} to {most}"
        return self.get(name, default, is_fine, f"a whole number {upto}")

    def number(self, name: str, default: Any = _REQUIRED, *, above: float = 0.0) -> Any:
        """Return a number above `above` that float32 holds, or the default."""

        def is_fine(value: Any) -> bool:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and above < value <= _LARGEST

        return self.get(name, default, is_fine, f"a finite number above {above:g}")

    def truth(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return true or false, or the default."""
        return self.get(name, default, lambda value: isinstance(value, bool), "true or false")

    def texts(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a list of strings, or the default."""

        def is_fine(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)

        return self.get(name, default, is_fine, "a list of strings")

    def inner(self, name: str) -> dict[str, Any]:
        """Return the object that stands in a field, empty if there is none."""
        found = self.get(name, None, lambda value: isinstance(value, dict), "an object")
        return found or {}

    def get(self, name: str, default: Any, is_fine: Callable[[Any], bool], what: str) -> Any:
        """Return a field's value, or refuse one that is not `what`."""
        value = self.values.get(name)
        if value is None and default is not _REQUIRED:
            value = default
        if (value is None and default is None) or is_fine(value):
            return value
        raise self.refusal(name, f"not {what}")

    def refusal(self, name: str, why: str) -> CheckpointError:
        """Return the error that names the file, a field and its value."""
        return CheckpointError(f"{self.path}: {name} is {shown(self.values.get(name))}, {why}")


def shown(value: Any) -> str:
    """Return a value as a message shows it, long ones cut."""
    return reprlib.repr(value)


def params_from_tensors(
    config: LlamaConfig,
    tensors: Mapping[str, Callable[[], np.ndarray]],
    layout: Mapping[str, str],
    dtype: Any,
    source: str,
) -> LlamaParams:
    """Read the parameters of a network out of named tensors, one at a time.

    Args:
      config: the sizes.
      tensors: for each name a function that reads the tensor.
      layout: for each field of `LlamaParams` and of `LlamaLayer` the name of its tensor, with
        `{layer}` where a layer's number stands.
      dtype: float32 or bfloat16, what they are converted to.
      source: what the tensors come from, for messages.

    Raises:
      CheckpointError: a tensor is missing, nobody asks for it, or it is of a wrong shape or type, or
        has an entry that is not finite.
    """
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"{source}: dtype is {dtype!r}: {error}") from error
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise CheckpointError(f"{source}: dtype is {dtype.name}, must be float32 or bfloat16")
    if config.layers > len(tensors):  # said before each layer's names are made
        raise CheckpointError(
            f"{source}: its config has {config.layers} layers, more than the {len(tensors)} tensors "
            "that there are"
        )
    whole, of_layer = wanted_shapes(config)
    wanted = {layout[field]: shape for field, shape in whole.items()}
    for layer in range(config.layers):
        wanted |= {layout[field].format(layer=layer): shape for field, shape in of_layer.items()}
    for name, shape in wanted.items():
        if name not in tensors:
            raise CheckpointError(f"{source}: tensor {name} of shape {shape} is missing")
    for name in tensors:
        if name not in wanted:
            shape = tensors[name]().shape
            raise CheckpointError(f"{source}: nothing of this network takes tensor {name} {shape}")

    def read(name: str) -> jax.Array:
        array = tensors[name]()
        if array.shape != wanted[name]:
            raise CheckpointError(
                f"{source}: tensor {name} has shape {array.shape}, its config wants {wanted[name]}"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
            raise CheckpointError(
                f"{source}: tensor {name} is stored as {array.dtype.name}, not as floats of 16 bits "
                "or more"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # it is refused below
            array = array.astype(dtype)
        if not np.isfinite(array).all():
            raise CheckpointError(
                f"{source}: tensor {name} has an entry that is not finite as {array.dtype.name}"
            )
        return jnp.asarray(array)

    return LlamaParams(
        layers=tuple(
            LlamaLayer(**{field: read(layout[field].format(layer=layer)) for field in of_layer})
            for layer in range(config.layers)
        ),
        **{field: read(layout[field]) for field in whole},
    )
