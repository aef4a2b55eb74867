"""A decoder of the Llama family in plain JAX.

Layers are unrolled and their weights are separate arrays: one stacked array, indexed by layer, would
be copied layer by layer in every call. Weights are [out, in], as in checkpoints, or cut into panels;
RoPE is the half-rotation form, in which a head's first and second half are the parts of each pair.

In the shape descriptions L denotes the tokens of a block, S the slots of the cache, H the heads, K
the kv heads, E the width of a head, M the width of the model, F that of the feed-forward layer, V the
vocabulary.

References:
  Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
  Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
  Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", EMNLP 2023.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import assert_bool, assert_whole, struct
from jaxspec.models.network import Block, LanguageModel, Tokenizer, keep_slots
from jaxspec.models.panels import Panels, cut, dense

Matrix: TypeAlias = jax.Array | Panels


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
      rope_frequencies: E / 2 angles by which each pair rotates per position, in radians.
      norm_epsilon: added to the mean square in RMSNorm.
      max_context: positions it was trained for; None for no limit.
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
        """Raise ValueError for invalid sizes and sizes that do not fit each other."""
        for field in ("vocab", "width", "layers", "heads", "kv_heads", "head_width", "hidden"):
            assert_whole(field, getattr(self, field), 1)
        if self.max_context is not None:
            assert_whole("max_context", self.max_context, 1)
        for field in ("has_biases", "is_tied"):
            assert_bool(field, getattr(self, field))
        if not _is_float32(self.norm_epsilon) or self.norm_epsilon <= 0:
            raise ValueError(f"norm_epsilon is {self.norm_epsilon!r}, must be finite and above 0")
        for pair, frequency in enumerate(self.rope_frequencies):
            if not _is_float32(frequency):
                raise ValueError(f"rope_frequencies[{pair}] is {frequency!r}, must be finite")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are not a multiple of {self.kv_heads} kv heads")
        if self.head_width != 2 * len(self.rope_frequencies):
            raise ValueError(
                f"heads of width {self.head_width} need half as many rope_frequencies, not "
                f"{len(self.rope_frequencies)}"
            )


def _is_float32(value: Any) -> bool:
    """Whether a number is finite in float32, in which the network computes angles."""
    is_real = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    return is_real and bool(abs(value) <= float(np.finfo(np.float32).max))


@struct
class LlamaLayer:
    """The weights of one layer; `wanted_shapes` has the shapes."""

    attention_norm: jax.Array  # [M]
    query: Matrix  # [H E, M]
    key: Matrix  # [K E, M]
    value: Matrix  # [K E, M]
    output: Matrix  # [M, H E]
    hidden_norm: jax.Array  # [M]
    gate: Matrix  # [F, M]
    up: Matrix  # [F, M]
    down: Matrix  # [M, F]
    query_bias: jax.Array | None = None  # [H E]
    key_bias: jax.Array | None = None  # [K E]
    value_bias: jax.Array | None = None  # [K E]


@struct
class LlamaParams:
    """The weights of a network; `head` is None if the embedding is the output layer too."""

    embedding: jax.Array  # [V, M]
    layers: tuple[LlamaLayer, ...]
    norm: jax.Array  # [M]
    head: jax.Array | None = None  # [V, M]


@struct
class LlamaCache:
    """Keys, rotated by their positions, and values, of each layer."""

    keys: tuple[jax.Array, ...]  # each [K, S, E]
    values: tuple[jax.Array, ...]  # each [K, S, E]


def rope_frequencies(head_width: int, base: float = 10000.0) -> tuple[float, ...]:
    """Return the angle per position of each pair, base^(-2 i / E) radians.

    >>> rope_frequencies(4, base=100.0)
    (1.0, 0.1)
    """
    return tuple(base ** (-2 * pair / head_width) for pair in range(head_width // 2))


Shapes: TypeAlias = dict[str, tuple[int, ...]]


def wanted_shapes(config: LlamaConfig) -> tuple[Shapes, Shapes]:
    """Return the shapes of the weights in `LlamaParams` and in each `LlamaLayer`."""
    width, hidden = config.width, config.hidden
    query, key = config.heads * config.head_width, config.kv_heads * config.head_width
    whole: Shapes = {"embedding": (config.vocab, width), "norm": (width,)}
    if not config.is_tied:
        whole["head"] = (config.vocab, width)
    of_layer: Shapes = {
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
    """Raise ValueError naming the first weight whose shape differs from what the sizes ask for."""
    whole, of_layer = wanted_shapes(config)
    if len(params.layers) != config.layers:
        raise ValueError(f"params have {len(params.layers)} layers, config has {config.layers}")
    parts: list[tuple[str, Any, Shapes]] = [("params", params, whole)]
    parts += [(f"params.layers[{i}]", layer, of_layer) for i, layer in enumerate(params.layers)]
    for name, part, wanted in parts:
        for field in (each.name for each in dataclasses.fields(part) if each.name != "layers"):
            weight = getattr(part, field)
            found = None if weight is None else tuple(weight.shape)
            if found != wanted.get(field):
                raise ValueError(
                    f"{name}.{field} has shape {found}, its config asks for {wanted.get(field)}"
                )


def init_llama(key: jax.Array, config: LlamaConfig, dtype: Any = jnp.float32) -> LlamaParams:
    """Draw random weights, as a start for training or for a network to test with.

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
    whole, of_layer = wanted_shapes(config)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.full(shape, 1 if "norm" in name else 0, dtype)
        scale = 1 / math.sqrt(2 * config.layers) if name in ("output", "down") else 1.0
        drawn = jax.random.normal(next(keys), shape, jnp.float32)
        return (drawn * (scale / math.sqrt(shape[1]))).astype(dtype)

    embedding = draw("embedding", whole["embedding"])
    layers = tuple(
        LlamaLayer(**{name: draw(name, shape) for name, shape in of_layer.items()})
        for _ in range(config.layers)
    )
    rest = {name: draw(name, shape) for name, shape in whole.items() if name != "embedding"}
    return LlamaParams(embedding=embedding, layers=layers, **rest)


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
      ValueError: naming a weight whose shape does not fit the sizes.
    """
    check_shapes(config, params)
    return LanguageModel(
        name=name,
        vocab=config.vocab,
        params=params,
        forward=functools.partial(_forward, config),
        init_cache=functools.partial(_init_cache, config, params.embedding.dtype),
        keep=keep_slots,
        takes_trees=True,
        max_context=config.max_context,
        tokenizer=tokenizer,
    )


def in_panels(model: LanguageModel) -> LanguageModel:
    """Store the matrices of a small network made by `llama` as `Panels`, for one sequence on a CPU.

    Its logits stay the same up to rounding. If its weights fit the CPU's shared cache, a block of a
    few draft tokens is scored about twice as fast; a network that is read from memory gains nothing,
    and large batches lose. On other devices the network is returned as it is.

    Raises:
      ValueError: a network of another kind.
    """
    if not isinstance(model.params, LlamaParams):
        raise ValueError(f"{model.name} was not made by `llama`: it has no matrices to cut")
    if jax.default_backend() != "cpu":
        return model
    matrices = ("query", "key", "value", "output", "gate", "up", "down")

    def cut_layer(layer: LlamaLayer) -> LlamaLayer:
        panels: dict[str, Any] = {name: cut(getattr(layer, name)) for name in matrices}
        return dataclasses.replace(layer, **panels)

    layers = tuple(map(cut_layer, model.params.layers))
    return dataclasses.replace(model, params=dataclasses.replace(model.params, layers=layers))


def _init_cache(config: LlamaConfig, dtype: Any, slots: int) -> LlamaCache:
    shape = (config.kv_heads, slots, config.head_width)
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.layers)) for _ in range(2))
    return LlamaCache(keys=keys, values=values)


def _forward(
    config: LlamaConfig, params: LlamaParams, cache: LlamaCache, block: Block
) -> tuple[jax.Array, LlamaCache]:
    """Run the network over a block; see `jaxspec.models.network.Forward`."""
    rotate = _rope(config, block.positions)
    x = params.embedding[block.tokens]
    keys, values = [], []
    for layer, old_keys, old_values in zip(params.layers, cache.keys, cache.values, strict=True):
        y = _norm(x, layer.attention_norm, config.norm_epsilon)
        query = rotate(_heads(dense(layer.query, y, layer.query_bias), config.heads))
        key = rotate(_heads(dense(layer.key, y, layer.key_bias), config.kv_heads))
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


def _norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Divide tokens [L, M] by the root of their mean square, in float32."""
    exact = x.astype(jnp.float32)
    root = lax.rsqrt(jnp.mean(exact * exact, axis=1, keepdims=True) + epsilon)
    return (exact * root).astype(x.dtype) * scale[None]


def _heads(x: jax.Array, heads: int) -> jax.Array:
    """Split [L, H E] into [H, L, E]."""
    return x.reshape(x.shape[0], heads, -1).swapaxes(0, 1)


def _rope(config: LlamaConfig, positions: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return the rotation of [H, L, E] by the tokens' positions."""
    frequencies = jnp.asarray(np.array(config.rope_frequencies, np.float32))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    cosine, sine = jnp.cos(angles)[None], jnp.sin(angles)[None]

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        rotated = (first * cosine - second * sine, second * cosine + first * sine)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

    return rotate


def _attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Attend with queries [H, L, E] to keys and values [K, S, E]; return [L, H E]."""
    heads, length, width = query.shape
    groups = keys.shape[0]
    grouped = query.reshape(groups, heads // groups * length, width)
    scores = jnp.einsum("kqe,kse->kqs", grouped, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(heads, length, -1) / math.sqrt(width)
    # A finite minimum: the row of a padded token with an empty mask stays finite; it is never read.
    weights = jax.nn.softmax(jnp.where(mask[None], scores, -1e30), axis=-1).astype(values.dtype)
    mixed = jnp.einsum("kqs,kse->kqe", weights.reshape(*grouped.shape[:2], -1), values)
    return mixed.reshape(heads, length, width).swapaxes(0, 1).reshape(length, heads * width)
