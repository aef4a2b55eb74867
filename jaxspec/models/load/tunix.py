"""Networks of google-tunix (flax.nnx Llama 3, Qwen 2 and 3, Gemma 1 to 3) as language models.

They honour masks and positions as given. Their cache keeps one write index for the whole batch, so
each is shown one sequence, and the index is set before every call: that is how it rolls back. Where
a layer attends to a sliding window they take a slot for a position, which limits what can be asked.

In the shape descriptions L denotes the tokens of a block, S the slots of the cache, K the heads of
keys and values, E the width of a head, D a depth, V the vocabulary, W a sliding window.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.extras import needs
from jaxspec.models.network import Block, Cache, CacheError, LanguageModel, Tokenizer

_FULL = {"Llama3", "Qwen2", "Qwen3"}
_WINDOW_BY_POSITION = {"Gemma"}
_WINDOW_BY_ROW = {"Gemma3"}


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
      model: an `nnx.Module` of tunix: Llama3, Qwen2, Qwen3, Gemma (1 and 2) or Gemma3. Its
        parameters are taken as they are now.
      name: its id, default the name of its class.
      dtype: of the cache, default the one that it computes in.
      max_context: positions it was made for; tunix does not say.
      tokenizer: its tokenizer.

    Returns:
      A network that takes trees. Gemma: no block may be longer than a sliding window. Gemma3: no
      cache may be, since in a block tunix counts the window from the block's first row.

    Raises:
      CacheError: Gemma4, which writes every block to slot 0, a network of an unknown class, or one
        that is set to flash attention, which looks at no mask.
      ImportError: flax is not installed.
    """
    try:
        from flax import nnx
    except ImportError as error:
        raise ImportError(needs("a tunix network", "google-tunix", "tunix")) from error
    kind = next((each.__name__ for each in type(model).__mro__ if each.__name__ in _KNOWN), None)
    name = type(model).__name__ if name is None else name
    if kind is None:
        raise CacheError(
            f"{name} is a {type(model).__name__}: only the caches of {', '.join(sorted(_KNOWN))} are "
            "known to take a block at any slot"
        )
    config = model.config
    if getattr(config, "use_flash_attention", False):
        raise CacheError(
            f"{name} is set to flash attention, which looks neither at the mask nor at the cache: "
            "make it with use_flash_attention=False"
        )
    window = getattr(config, "sliding_window_size", None)
    graph, params = nnx.split(model)
    if dtype is None:
        dtype = getattr(config, "dtype", None) or model.embedder.input_embedding.dtype
    return LanguageModel(
        name=name,
        vocab=config.vocab_size if hasattr(config, "vocab_size") else config.num_embed,
        params=params,
        forward=functools.partial(
            _forward, graph, name, window if kind in _WINDOW_BY_POSITION else None
        ),
        init_cache=functools.partial(
            _init_cache, config, dtype, name, window if kind in _WINDOW_BY_ROW else None
        ),
        keep=_keep,
        takes_trees=True,
        max_context=max_context,
        tokenizer=tokenizer,
    )


_KNOWN = _FULL | _WINDOW_BY_POSITION | _WINDOW_BY_ROW


def _init_cache(config: Any, dtype: Any, name: str, window: int | None, slots: int) -> Cache:
    """Make an empty cache: for each layer keys and values [1, S, K, E]."""
    if window is not None and slots > window:
        raise CacheError(
            f"{name}: a cache of {slots} slots is longer than its sliding window of {window}; tunix "
            "counts the window from the first row of a block, so that longer texts cannot be verified"
        )
    shape = (1, slots, config.num_kv_heads, config.head_dim)
    return {
        f"layer_{layer}": {name: jnp.zeros(shape, dtype) for name in ("k", "v")}
        for layer in range(config.num_layers)
    }


def _forward(
    graph: Any,
    name: str,
    window: int | None,
    params: Any,
    cache: Cache,
    block: Block,
) -> tuple[jax.Array, Cache]:
    """Run the network over a block; see `jaxspec.models.network.Forward`."""
    from flax import nnx

    if window is not None and block.tokens.shape[0] > window:
        raise CacheError(
            f"{name}: a block of {block.tokens.shape[0]} tokens is longer than its sliding window of "
            f"{window}"
        )
    end = jnp.reshape(block.first, (1,)).astype(jnp.int32)
    indexed = {layer: {**held, "end_index": end} for layer, held in cache.items()}
    # Not written for strict promotion, which a caller may have set.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        logits, written = nnx.merge(graph, params)(
            block.tokens[None], block.positions[None], indexed, block.mask[None]
        )
    cache = {layer: {"k": held["k"], "v": held["v"]} for layer, held in written.items()}
    return logits[0].astype(jnp.float32), cache


def _keep(cache: Cache, first: jax.Array, path: jax.Array) -> Cache:
    """Move accepted slots of a block to its front; see `jaxspec.models.network.Keep`."""
    places = jnp.arange(path.shape[0], dtype=jnp.int32)
    sources = first + jnp.where(path >= 0, path, places)

    def move(slots: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(slots, slots[:, sources], (0, first, 0, 0))

    return jax.tree.map(move, cache)
