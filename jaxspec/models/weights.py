"""Named tensors of a checkpoint to the parameters of a network, each shape checked."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.llama import LlamaConfig, LlamaLayer, LlamaParams

BIASES = ("query_bias", "key_bias", "value_bias")


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or of a network this package does not have."""


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
      CheckpointError: a tensor is missing, nobody asks for it, or it is of a wrong shape or type.
    """
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise CheckpointError(f"dtype is {jnp.dtype(dtype).name}, must be float32 or bfloat16")
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
        return jnp.asarray(array.astype(jnp.dtype(dtype)))

    return LlamaParams(
        layers=tuple(
            LlamaLayer(**{field: read(layout[field].format(layer=layer)) for field in of_layer})
            for layer in range(config.layers)
        ),
        **{field: read(layout[field]) for field in whole},
    )


def wanted_shapes(
    config: LlamaConfig,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the fields of `LlamaParams` and of `LlamaLayer` that a network has."""
    width, hidden = config.width, config.hidden
    query, key = config.heads * config.head_width, config.kv_heads * config.head_width
    whole: dict[str, tuple[int, ...]] = {"embedding": (config.vocab, width), "norm": (width,)}
    if not config.is_tied:
        whole["head"] = (config.vocab, width)
    of_layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "query": (query, width),
        "key": (key, width),
        "value": (key, width),
        "output": (width, query),
        "hidden_norm": (width,),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
    }
    if config.has_biases:
        of_layer |= dict(zip(BIASES, ((query,), (key,), (key,)), strict=True))
    return whole, of_layer
