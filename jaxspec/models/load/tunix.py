"""Networks of google-tunix (flax.nnx Llama 3, Qwen 2 and 3, Gemma 1 to 3) as language models.

They honour masks and positions. Their cache keeps one write index for the whole batch, so each gets
one sequence, and the index is set before every call: that is how it rolls back. Layers with a sliding
window take a slot for a position, which limits blocks or caches.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.extras import require
from jaxspec.models.network import Block, Cache, CacheError, LanguageModel, Tokenizer, keep_slots

_LIMITED = {
    "Llama3": None,
    "Qwen2": None,
    "Qwen3": None,
    "Gemma": "block",  # windows are counted by position
    "Gemma3": "cache",  # windows are counted from the first token of a block
}
"""The classes whose caches take a block at any slot, and what their sliding window limits."""


def from_tunix(
    model: Any,
    *,
    name: str | None = None,
    dtype: Any = None,
    max_context: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> LanguageModel:
    """Make a google-tunix network ready for scoring and decoding.

    Args:
      model: an `nnx.Module` of tunix: Llama3, Qwen2, Qwen3, Gemma (1 and 2) or Gemma3. Its current
        parameters are used.
      name: its id, default the name of its class.
      dtype: of the cache, default the one that it computes in.
      max_context: positions it was made for; tunix does not say.
      tokenizer: its tokenizer.

    Returns:
      A network that takes trees. Gemma: no block may be longer than a sliding window. Gemma3: no
      cache may be, since in a block tunix counts the window from the block's first token.

    Raises:
      CacheError: a network of another class, such as Gemma4, which writes every block to slot 0, or
        one that is set to flash attention, which ignores the mask.
      ImportError: flax is not installed.
    """
    nnx = require("a tunix network", "flax.nnx", "tunix", "google-tunix")
    kind = next((each.__name__ for each in type(model).__mro__ if each.__name__ in _LIMITED), None)
    name = type(model).__name__ if name is None else name
    if kind is None:
        raise CacheError(
            f"{name} is a {type(model).__name__}: only the caches of {', '.join(sorted(_LIMITED))} "
            "are known to take a block at any slot"
        )
    config = model.config
    if getattr(config, "use_flash_attention", False):
        raise CacheError(
            f"{name} is set to flash attention, which ignores the mask and the cache: make it with "
            "use_flash_attention=False"
        )
    window = getattr(config, "sliding_window_size", None)
    windows = {_LIMITED[kind]: window}
    if dtype is None:
        dtype = getattr(config, "dtype", None) or model.embedder.input_embedding.dtype
    graph, params = nnx.split(model)
    return LanguageModel(
        name=name,
        vocab=config.vocab_size if hasattr(config, "vocab_size") else config.num_embed,
        params=params,
        forward=functools.partial(_forward, graph, name, windows.get("block")),
        init_cache=functools.partial(_init_cache, config, dtype, name, windows.get("cache")),
        keep=keep_slots,
        takes_trees=True,
        max_context=max_context,
        tokenizer=tokenizer,
    )


def _init_cache(config: Any, dtype: Any, name: str, window: int | None, slots: int) -> Cache:
    """Make an empty cache: for each layer keys and values [1, slots, kv heads, head width]."""
    _assert_within(name, f"cache of {slots} slots", slots, window)
    shape = (1, slots, config.num_kv_heads, config.head_dim)
    return {
        f"layer_{layer}": {name: jnp.zeros(shape, dtype) for name in ("k", "v")}
        for layer in range(config.num_layers)
    }


def _forward(
    graph: Any, name: str, window: int | None, params: Any, cache: Cache, block: Block
) -> tuple[jax.Array, Cache]:
    """Run the network over a block; see `jaxspec.models.network.Forward`."""
    from flax import nnx

    length = block.tokens.shape[0]
    _assert_within(name, f"block of {length} tokens", length, window)
    end = jnp.reshape(block.first, (1,)).astype(jnp.int32)
    indexed = {layer: {**held, "end_index": end} for layer, held in cache.items()}
    # Not written for strict promotion, which a caller may have set.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        logits, written = nnx.merge(graph, params)(
            block.tokens[None], block.positions[None], indexed, block.mask[None]
        )
    cache = {layer: {"k": held["k"], "v": held["v"]} for layer, held in written.items()}
    return logits[0].astype(jnp.float32), cache


def _assert_within(name: str, what: str, length: int, window: int | None) -> None:
    if window is not None and length > window:
        raise CacheError(f"{name}: a {what} is longer than its sliding window of {window}")
