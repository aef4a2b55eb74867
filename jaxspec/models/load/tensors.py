"""What a network of this package needs of a file: its sizes, its RoPE, its tensors.

`config.json` and GGUF metadata arrive here under the same names, see `jaxspec.models.load.metadata`,
so that sizes, RoPE, windows and tied heads are decided once.

References:
  Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
    2023 (RoPE type linear: `factor` alone).
  Grattafiori et al., "The Llama 3 Herd of Models", 2024 (RoPE type llama3).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.llama import (
    LlamaConfig,
    LlamaLayer,
    LlamaParams,
    rope_frequencies,
    wanted_shapes,
)
from jaxspec.models.load.fields import CheckpointError, Values, wrapped
from jaxspec.models.load.metadata import MOST_HEAD_WIDTH

_LAYER, _BLOCK = "model.layers.{layer}.", "blk.{layer}."

TENSORS: Mapping[str, tuple[str, str]] = {
    "embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "head": ("lm_head.weight", "output.weight"),
    "attention_norm": (f"{_LAYER}input_layernorm.weight", f"{_BLOCK}attn_norm.weight"),
    "query": (f"{_LAYER}self_attn.q_proj.weight", f"{_BLOCK}attn_q.weight"),
    "key": (f"{_LAYER}self_attn.k_proj.weight", f"{_BLOCK}attn_k.weight"),
    "value": (f"{_LAYER}self_attn.v_proj.weight", f"{_BLOCK}attn_v.weight"),
    "output": (f"{_LAYER}self_attn.o_proj.weight", f"{_BLOCK}attn_output.weight"),
    "hidden_norm": (f"{_LAYER}post_attention_layernorm.weight", f"{_BLOCK}ffn_norm.weight"),
    "gate": (f"{_LAYER}mlp.gate_proj.weight", f"{_BLOCK}ffn_gate.weight"),
    "up": (f"{_LAYER}mlp.up_proj.weight", f"{_BLOCK}ffn_up.weight"),
    "down": (f"{_LAYER}mlp.down_proj.weight", f"{_BLOCK}ffn_down.weight"),
    "query_bias": (f"{_LAYER}self_attn.q_proj.bias", ""),
    "key_bias": (f"{_LAYER}self_attn.k_proj.bias", ""),
    "value_bias": (f"{_LAYER}self_attn.v_proj.bias", ""),
}
"""By field of the parameters, names in Hugging Face checkpoints and in GGUF files ("": none)."""


def head_width(values: Values) -> int:
    """Return the width of a head: as stated, or the network's width split among the heads."""
    if values["head_width"] is None:
        width, rest = divmod(values["width"], heads := values["heads"])
        if rest or width % 2 or not 0 < width <= MOST_HEAD_WIDTH:
            raise values.error(
                "width", f"not {values.keys_of['heads']} {heads} times an even width"
            )
        return width
    if values["head_width"] % 2:
        raise values.error("head_width", "must be even")
    return values["head_width"]


def scaled_frequencies(
    head_width: int,
    base: float,
    factor: float = 1.0,
    *,
    low: float | None = None,
    high: float = math.inf,
    context: float = 0.0,
) -> tuple[float, ...]:
    """Return RoPE's frequencies, divided by `factor`.

    With `low`, those of more turns than this within `context` positions are divided by less, from
    `high` turns on not at all, with linear interpolation between.

    >>> scaled_frequencies(8, 1e4, 8, low=1, high=4, context=1000)
    (1.0, 0.1, 0.0029..., 0.000125)
    """

    def scaled(frequency: float) -> float:
        if low is None:
            return frequency / factor
        turns = context * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return share * frequency + (1 - share) * frequency / factor

    return tuple(map(scaled, rope_frequencies(head_width, float(base))))


def network_config(values: Values, width: int, frequencies: tuple[float, ...]) -> LlamaConfig:
    """Return the sizes that a file states under the names of `LlamaConfig`, with heads of `width`."""
    window = values["window"]
    if window and window < (values["max_context"] or math.inf):
        raise values.error("window", "shorter than the context: this package has no windows")
    names = {field.name for field in dataclasses.fields(LlamaConfig)}
    sizes = {name: value for name, value in values.items() if name in names}
    sizes |= {"head_width": width, "kv_heads": values["kv_heads"] or values["heads"]}
    with wrapped(values.path):
        return LlamaConfig(rope_frequencies=frequencies, **sizes)


def params_from_tensors(
    config: LlamaConfig,
    tensors: Mapping[str, Callable[[], np.ndarray]],
    layout: Mapping[str, str],
    dtype: Any,
    source: str,
) -> LlamaParams:
    """Read the parameters of a network, one at a time, and convert them to float32 or bfloat16.

    Args:
      config: the sizes.
      tensors: for each name a function that reads the tensor.
      layout: for each field of `LlamaParams` and `LlamaLayer` the name of its tensor, with `{layer}`
        for the number of a layer.
      dtype: float32 or bfloat16.
      source: the file, for messages.
    """
    with wrapped(f"{source}: dtype is {dtype!r}"):
        dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise CheckpointError(source, f"dtype is {dtype.name}, must be float32 or bfloat16")
    if config.layers > len(tensors):  # before the names of each layer are made
        raise CheckpointError(source, f"{config.layers} layers in only {len(tensors)} tensors")
    whole, of_layer = wanted_shapes(config)
    wanted = {layout[field]: shape for field, shape in whole.items()}
    for layer in range(config.layers):
        wanted |= {layout[field].format(layer=layer): shape for field, shape in of_layer.items()}
    for name, shape in wanted.items():
        if name not in tensors:
            raise CheckpointError(source, f"tensor {name} of shape {shape} is missing")
    for name in sorted(tensors.keys() - wanted.keys()):
        array = tensors[name]()
        if not config.is_tied or name != layout["head"]:
            raise CheckpointError(source, f"this network has no tensor {name} {array.shape}")
        # Some checkpoints store a tied embedding twice.
        if not np.array_equal(array, tensors[layout["embedding"]]()):
            raise CheckpointError(source, f"embeddings are tied, yet {name} is not the embedding")

    def read(name: str) -> jax.Array:
        array, tensor = tensors[name](), f"{source}: tensor {name}"
        if array.shape != wanted[name]:
            raise CheckpointError(tensor, f"shape {array.shape}, its config wants {wanted[name]}")
        kind = array.dtype
        if not jnp.issubdtype(kind, jnp.floating) or kind.itemsize < 2:
            raise CheckpointError(
                tensor, f"stored as {kind.name}, must be floats of 16 bits or more"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # rejected below
            array = array.astype(dtype)
        if not np.isfinite(array).all():
            raise CheckpointError(tensor, f"an entry is not finite as {dtype.name}")
        return jnp.asarray(array)

    return LlamaParams(
        layers=tuple(
            LlamaLayer(**{field: read(layout[field].format(layer=layer)) for field in of_layer})
            for layer in range(config.layers)
        ),
        **{field: read(layout[field]) for field in whole},
    )
