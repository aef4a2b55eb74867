"""A decoder of the Llama family in plain JAX.

Layers are unrolled and their weights are separate arrays: one stacked array, indexed by layer, would
be copied layer by layer in every call. Weights stand as checkpoints store them, [out, in], or cut
into panels; RoPE is the half-rotation form, in which a head's first and second half are the two parts
of each pair.

In the shape descriptions L denotes the tokens of a block, S the slots of the cache, H the heads, K
the heads of keys and values, E the width of a head, M the width of the model, F that of the
feed-forward layer, V the vocabulary.

References:
  Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
  Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
  Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", EMNLP 2023.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import assert_whole, struct
from jaxspec.models.network import Block, Cache, LanguageModel, Tokenizer
from jaxspec.models.panels import Panels, cut, dense


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a network; hashable, static under `jit`.

    Attributes:
      vocab: V.
      width: M.
      layers: number of layers.
      heads: H.
      kv_heads: K, a divisor of H.
      head_width: E, even.
      hidden: F.
      rope_frequencies: E / 2 angles a position turns each pair by, in radians.
      norm_epsilon: added to the mean square in RMSNorm.
      max_context: positions it was trained for.
      has_biases: whether queries, keys and values have biases (Qwen2).
      is_tied: whether the embedding is the output layer too.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    rope_frequencies: tuple[float, ...]
    norm_epsilon: float = 1e-5
    max_context: int | None = None
    has_biases: bool = False
    is_tied: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that are none, or that do not fit each other."""
        for field in ("vocab", "width", "layers", "heads", "kv_heads", "head_width", "hidden"):
            assert_whole(field, getattr(self, field), 1)
        if self.max_context is not None:
            assert_whole("max_context", self.max_context, 1)
        for field in ("has_biases", "is_tied"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} is {getattr(self, field)!r}, must be True or False")
        if not _is_float32(self.norm_epsilon) or self.norm_epsilon <= 0:
            raise ValueError(f"norm_epsilon is {self.norm_epsilon!r}, must be finite and above 0")
        for pair, frequency in enumerate(self.rope_frequencies):
            if not _is_float32(frequency):
                raise ValueError(f"rope_frequencies[{pair}] is {frequency!r}, must be finite")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads do not share {self.kv_heads} heads of keys evenly"
            )
        if self.head_width != 2 * len(self.rope_frequencies):
            raise ValueError(
                f"heads of width {self.head_width} need half as many rope_frequencies, not "
                f"{len(self.rope_frequencies)}"
            )


def _is_float32(value: Any) -> bool:
    """Whether it is a number that float32, in which the network counts angles, holds as finite."""
    is_real = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    return is_real and bool(abs(value) <= float(np.finfo(np.float32).max))


@struct
class LlamaLayer:
    """The weights of one layer; each matrix an array or `Panels`.

    Attributes:
      attention_norm: [M].
      query: [H E, M].
      key: [K E, M].
      value: [K E, M].
      output: [M, H E].
      hidden_norm: [M].
      gate: [F, M].
      up: [F, M].
      down: [M, F].
      query_bias: [H E] or None.
      key_bias: [K E] or None.
      value_bias: [K E] or None.
    """

    attention_norm: jax.Array
    query: jax.Array | Panels
    key: jax.Array | Panels
    value: jax.Array | Panels
    output: jax.Array | Panels
    hidden_norm: jax.Array
    gate: jax.Array | Panels
    up: jax.Array | Panels
    down: jax.Array | Panels
    query_bias: jax.Array | None = None
    key_bias: jax.Array | None = None
    value_bias: jax.Array | None = None


@struct
class LlamaParams:
    """The weights of a network.

    Attributes:
      embedding: [V, M].
      layers: one for each layer.
      norm: [M].
      head: [V, M]; None where the embedding is the output layer too.
    """

    embedding: jax.Array
    layers: tuple[LlamaLayer, ...]
    norm: jax.Array
    head: jax.Array | None = None


@struct
class LlamaCache:
    """Keys and values of the tokens seen.

    Attributes:
      keys: for each layer [K, S, E], turned by their position.
      values: for each layer [K, S, E].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def rope_frequencies(head_width: int, base: float = 10000.0) -> tuple[float, ...]:
    """Return the angle per position of each pair, base^(-2 i / E) radians.

    >>> rope_frequencies(4, base=100.0)
    (1.0, 0.1)
    """
    return tuple(base ** (-2 * pair / head_width) for pair in range(head_width // 2))


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
        of_layer |= {"query_bias": (query,), "key_bias": (key,), "value_bias": (key,)}
    return whole, of_layer


def check_shapes(config: LlamaConfig, params: LlamaParams) -> None:
    """Refuse parameters of another network.

    Args:
      config: the sizes.
      params: the weights, or anything with their shapes.

    Raises:
      ValueError: the first weight whose shape is not the one that the sizes ask for.
    """
    whole, of_layer = wanted_shapes(config)
    if len(params.layers) != config.layers:
        raise ValueError(
            f"params have {len(params.layers)} layers, their config wants {config.layers}"
        )
    parts: list[tuple[str, Any, dict[str, tuple[int, ...]]]] = [("params", params, whole)]
    parts += [(f"params.layers[{i}]", layer, of_layer) for i, layer in enumerate(params.layers)]
    for name, part, wanted in parts:
        for field in (each.name for each in dataclasses.fields(part) if each.name != "layers"):
            weight = getattr(part, field)
            found = None if weight is None else tuple(weight.shape)
            if found != wanted.get(field):
                raise ValueError(
                    f"{name}.{field} has shape {found}, its config wants {wanted.get(field)}"
                )


def init_llama(key: jax.Array, config: LlamaConfig, dtype: Any = jnp.float32) -> LlamaParams:
    """Draw random weights, as a start for training or a network to test with.

    Args:
      key: a PRNG key.
      config: the sizes.
      dtype: float32 or bfloat16.

    Returns:
      Weights of standard deviation 1 / sqrt(in), those into the residual stream less by
      1 / sqrt(2 layers); norms of 1, biases of 0.

    >>> config = LlamaConfig(
    ...     vocab=5, width=8, layers=1, heads=2, kv_heads=1, head_width=4, hidden=16,
    ...     rope_frequencies=rope_frequencies(4),
    ... )
    >>> init_llama(jax.random.key(0), config).layers[0].key.shape
    (4, 8)
    """
    keys = iter(jax.random.split(key, 2 + 7 * config.layers))

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        drawn = jax.random.normal(next(keys), (rows, columns), jnp.float32)
        return (drawn * (scale / math.sqrt(columns))).astype(dtype)

    query_width = config.heads * config.head_width
    key_width = config.kv_heads * config.head_width
    into_residual = 1 / math.sqrt(2 * config.layers)

    def layer() -> LlamaLayer:
        ones = jnp.ones(config.width, dtype)
        biases = {
            name: jnp.zeros(width, dtype)
            for name, width in (
                ("query_bias", query_width),
                ("key_bias", key_width),
                ("value_bias", key_width),
            )
            if config.has_biases
        }
        return LlamaLayer(
            attention_norm=ones,
            query=matrix(query_width, config.width),
            key=matrix(key_width, config.width),
            value=matrix(key_width, config.width),
            output=matrix(config.width, query_width, into_residual),
            hidden_norm=ones,
            gate=matrix(config.hidden, config.width),
            up=matrix(config.hidden, config.width),
            down=matrix(config.width, config.hidden, into_residual),
            **biases,
        )

    return LlamaParams(
        embedding=matrix(config.vocab, config.width),
        layers=tuple(layer() for _ in range(config.layers)),
        norm=jnp.ones(config.width, dtype),
        head=None if config.is_tied else matrix(config.vocab, config.width),
    )


def llama(
    config: LlamaConfig,
    params: LlamaParams,
    *,
    name: str = "llama",
    tokenizer: Tokenizer | None = None,
) -> LanguageModel:
    """Make a network of the Llama family ready for scoring and decoding.

    Args:
      config: the sizes.
      params: the weights, all of one dtype, which the network computes in; norms, attention
        weights and logits are float32.
      name: its id.
      tokenizer: its tokenizer.

    Raises:
      ValueError: a weight whose shape does not fit the sizes.
    """
    check_shapes(config, params)
    return LanguageModel(
        name=name,
        vocab=config.vocab,
        params=params,
        forward=functools.partial(llama_forward, config),
        init_cache=functools.partial(init_llama_cache, config, params.embedding.dtype),
        keep=keep_slots,
        takes_trees=True,
        max_context=config.max_context,
        tokenizer=tokenizer,
    )


def in_panels(model: LanguageModel) -> LanguageModel:
    """Lay a small Llama network out for decoding one sequence on a CPU: its matrices in `Panels`.

    Its logits stay the same but for rounding. If its weights lie in the CPU's shared cache, a block of
    a few drafted tokens is scored about twice as fast. A network that is read from memory gains
    nothing, and large batches lose.

    Args:
      model: a network made by `llama`.

    Returns:
      The network laid out; where JAX does not run on a CPU, the network as it is.

    Raises:
      ValueError: a network of another kind.
    """
    if not isinstance(model.params, LlamaParams):
        raise ValueError(f"{model.name} is no network made by `llama`: it has no matrices to cut")
    if jax.default_backend() != "cpu":
        return model
    matrices = ("query", "key", "value", "output", "gate", "up", "down")

    def cut_layer(layer: LlamaLayer) -> LlamaLayer:
        panels: dict[str, Any] = {name: cut(getattr(layer, name)) for name in matrices}
        return dataclasses.replace(layer, **panels)

    layers = tuple(cut_layer(layer) for layer in model.params.layers)
    return dataclasses.replace(model, params=dataclasses.replace(model.params, layers=layers))


def init_llama_cache(config: LlamaConfig, dtype: Any, slots: int) -> LlamaCache:
    """Make an empty cache of S slots."""
    shape = (config.kv_heads, slots, config.head_width)
    return LlamaCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(config.layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(config.layers)),
    )


def llama_forward(
    config: LlamaConfig,
    params: LlamaParams,
    cache: LlamaCache,
    block: Block,
) -> tuple[jax.Array, LlamaCache]:
    """Run the network over a block; see `jaxspec.models.network.Forward`."""
    turn = _turn(config, block.positions)
    x = params.embedding[block.tokens]
    keys, values = [], []
    for layer, old_keys, old_values in zip(params.layers, cache.keys, cache.values, strict=True):
        y = _norm(x, layer.attention_norm, config.norm_epsilon)
        query = turn(_heads(dense(layer.query, y, layer.query_bias), config.heads))
        key = turn(_heads(dense(layer.key, y, layer.key_bias), config.kv_heads))
        value = _heads(dense(layer.value, y, layer.value_bias), config.kv_heads)
        keys.append(lax.dynamic_update_slice(old_keys, key, (0, block.first, 0)))
        values.append(lax.dynamic_update_slice(old_values, value, (0, block.first, 0)))
        x += dense(layer.output, _attend(query, keys[-1], values[-1], block.mask))
        y = _norm(x, layer.hidden_norm, config.norm_epsilon)
        x += dense(layer.down, jax.nn.silu(dense(layer.gate, y)) * dense(layer.up, y))
    head = params.embedding if params.head is None else params.head
    x = _norm(x, params.norm, config.norm_epsilon)
    logits = lax.dot_general(x, head, (((1,), (1,)), ((), ())))
    return logits.astype(jnp.float32), LlamaCache(keys=tuple(keys), values=tuple(values))


def keep_slots(cache: Cache, first: jax.Array, path: jax.Array) -> Cache:
    """Move accepted slots of a block to its front; see `jaxspec.models.network.Keep`.

    Slots are axis 1 of every array. Nothing but the block's front is read or written.
    """
    places = jnp.arange(path.shape[0], dtype=jnp.int32)
    sources = first + jnp.where(path >= 0, path, places)

    def move(slots: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(slots, slots[:, sources], first, axis=1)

    return jax.tree.map(move, cache)


def _norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Divide tokens [L, M] by the root of their mean square, in float32."""
    exact = x.astype(jnp.float32)
    root = lax.rsqrt(jnp.mean(exact * exact, axis=1, keepdims=True) + epsilon)
    return (exact * root).astype(x.dtype) * scale[None]


def _heads(x: jax.Array, heads: int) -> jax.Array:
    """Split [L, H E] into [H, L, E]."""
    return x.reshape(x.shape[0], heads, -1).swapaxes(0, 1)


def _turn(config: LlamaConfig, positions: jax.Array) -> Any:
    """Return the rotation of [H, L, E] by the tokens' positions."""
    frequencies = jnp.asarray(np.array(config.rope_frequencies, np.float32))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    cosine, sine = jnp.cos(angles)[None], jnp.sin(angles)[None]

    def turn(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    return turn


def _attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mix the values [K, S, E] that queries [H, L, E] see, into [L, H E]."""
    heads, length, width = query.shape
    groups = keys.shape[0]
    grouped = query.reshape(groups, heads // groups * length, width)
    scores = jnp.einsum("kqe,kse->kqs", grouped, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(heads, length, -1) / math.sqrt(width)
    # A finite floor: the row of a padded token that sees nothing stays finite, and is never read.
    weights = jax.nn.softmax(jnp.where(mask[None], scores, -1e30), axis=-1).astype(values.dtype)
    mixed = jnp.einsum("kqs,kse->kqe", weights.reshape(*grouped.shape[:2], -1), values)
    return mixed.reshape(heads, length, width).swapaxes(0, 1).reshape(length, heads * width)
