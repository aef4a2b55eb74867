"""Networks of the Llama family from Hugging Face directories.

A directory holds `config.json`, the weights as `model.safetensors` or in shards that
`model.safetensors.index.json` lists, and mostly `tokenizer.json`. What this package's network does
not do is refused by the name of the field that asks for it, never ignored.

References:
  Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
    2023 (rope type linear).
  Grattafiori et al., "The Llama 3 Herd of Models", 2024 (rope type llama3).
"""

import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.language_model import LanguageModel
from jaxspec.models.llama import LlamaConfig, llama, rope_frequencies
from jaxspec.models.tokenizers import TextTokenizer, read_tokenizer
from jaxspec.models.weights import CheckpointError, params_from_tensors

LAYOUT: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "query": "model.layers.{layer}.self_attn.q_proj.weight",
    "key": "model.layers.{layer}.self_attn.k_proj.weight",
    "value": "model.layers.{layer}.self_attn.v_proj.weight",
    "output": "model.layers.{layer}.self_attn.o_proj.weight",
    "hidden_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "up": "model.layers.{layer}.mlp.up_proj.weight",
    "down": "model.layers.{layer}.mlp.down_proj.weight",
    "query_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "key_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "value_bias": "model.layers.{layer}.self_attn.v_proj.bias",
}
"""The name of each field's tensor, see `params_from_tensors`."""

_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {"sliding_window": 4096},
    "Qwen2ForCausalLM": {"use_sliding_window": False},
}
"""What each says of fields that a `config.json` leaves out, as far as it matters here."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def load_huggingface(
    directory: str | os.PathLike[str], *, dtype: Any = jnp.float32, name: str | None = None
) -> LanguageModel:
    """Load a network of the Llama family from a directory.

    Args:
      directory: see the module; `LlamaForCausalLM`, `MistralForCausalLM` without a sliding window or
        `Qwen2ForCausalLM`.
      dtype: float32 or bfloat16, whatever the weights are stored as. On a CPU float32 is the faster
        one by far, for bfloat16 checkpoints too.
      name: the network's id; default the directory's name.

    Returns:
      The network; its tokenizer, a `TextTokenizer`, is None where there is no `tokenizer.json`.

    Raises:
      CheckpointError: what is missing, damaged or not supported, and in which file.
      ImportError: `safetensors`, or `tokenizers` for a directory with a tokenizer, is not installed.
    """
    place = pathlib.Path(directory)
    config = load_config(place)
    tensors = dict(_tensors(place))
    if config.is_tied and LAYOUT["head"] in tensors:
        # Some checkpoints store a tied embedding twice.
        head = tensors.pop(LAYOUT["head"])()
        if LAYOUT["embedding"] in tensors and not _equal(head, tensors[LAYOUT["embedding"]]()):
            raise CheckpointError(
                f"{place}: tie_word_embeddings is true, yet {LAYOUT['head']} is not the embedding"
            )
    params = params_from_tensors(config, tensors, LAYOUT, dtype, os.fspath(place))
    return llama(
        config,
        params,
        name=place.resolve().name if name is None else name,
        tokenizer=_tokenizer(place),
    )


def load_config(directory: str | os.PathLike[str]) -> LlamaConfig:
    """Read the sizes of a network from a directory's `config.json`.

    Args:
      directory: the directory.

    Raises:
      CheckpointError: a field is missing, or asks for something this package's network lacks.
    """
    path = pathlib.Path(directory) / "config.json"
    stored = _read_json(path)
    kind = _architecture(path, stored)
    stored = {**_ARCHITECTURES[kind], **stored}
    for field in _REQUIRED:
        if not isinstance(stored.get(field), int):
            raise CheckpointError(f"{path}: {field} is {stored.get(field)!r}, not a whole number")
    _refuse_unsupported(path, stored)
    width, heads = stored["hidden_size"], stored["num_attention_heads"]
    head_width = stored.get("head_dim")
    if head_width is None:
        if heads < 1 or width % heads:
            raise CheckpointError(
                f"{path}: hidden_size {width} does not split into num_attention_heads {heads}, and "
                "there is no head_dim"
            )
        head_width = width // heads
    try:
        return LlamaConfig(
            vocab=stored["vocab_size"],
            width=width,
            layers=stored["num_hidden_layers"],
            heads=heads,
            kv_heads=stored.get("num_key_value_heads") or heads,
            head_width=head_width,
            hidden=stored["intermediate_size"],
            rope_frequencies=_rope_frequencies(path, stored, head_width),
            norm_epsilon=float(stored.get("rms_norm_eps", 1e-6)),
            max_context=stored.get("max_position_embeddings"),
            has_biases=kind == "Qwen2ForCausalLM",
            is_tied=stored.get("tie_word_embeddings", False),
        )
    except CheckpointError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def llama3_frequencies(
    frequencies: tuple[float, ...], *, factor: float, low: float, high: float, context: float
) -> tuple[float, ...]:
    """Slow the turns that a longer context needs slower, as Llama 3.1 does.

    A frequency that turns at least `high` times within the old context stays, one that turns at most
    `low` times is divided by `factor`, and between them the share of each goes linearly.

    Args:
      frequencies: radians per position.
      factor: by how much the context grew.
      low: turns.
      high: turns, more than `low`.
      context: positions of the old context.

    >>> llama3_frequencies((1.0, 0.0628, 0.001), factor=8, low=1, high=4, context=300)
    (1.0, 0.0444..., 0.000125)
    """

    def slowed(frequency: float) -> float:
        share = (context * frequency / (2 * math.pi) - low) / (high - low)
        share = min(max(share, 0.0), 1.0)
        return share * frequency + (1 - share) * frequency / factor

    return tuple(map(slowed, frequencies))


def _architecture(path: pathlib.Path, stored: Mapping[str, Any]) -> str:
    """Return which of the known architectures a config describes."""
    named = stored.get("architectures")
    known = ", ".join(_ARCHITECTURES)
    if not isinstance(named, list) or len(named) != 1 or named[0] not in _ARCHITECTURES:
        raise CheckpointError(f"{path}: architectures is {named!r}; this package has {known}")
    return named[0]


def _refuse_unsupported(path: pathlib.Path, stored: Mapping[str, Any]) -> None:
    """Raise for the first field that asks for what the network does not do."""
    layers = stored.get("layer_types") or []
    window = stored.get("sliding_window")
    # Qwen2 names a window that it uses only if it also says so; a window no text outgrows is none.
    is_windowed = stored.get("use_sliding_window", window is not None)
    if is_windowed and window is not None:
        is_windowed = window < (stored.get("max_position_embeddings") or math.inf)
    unsupported = {
        "hidden_act": stored.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": bool(stored.get("attention_bias")),
        "mlp_bias": bool(stored.get("mlp_bias")),
        "sliding_window": bool(is_windowed),
        "layer_types": any(kind != "full_attention" for kind in layers),
        "partial_rotary_factor": stored.get("partial_rotary_factor", 1.0) != 1.0,
        "quantization_config": bool(stored.get("quantization_config")),
    }
    for field, is_unsupported in unsupported.items():
        if is_unsupported:
            raise CheckpointError(
                f"{path}: {field} is {stored.get(field)!r}, which this package's network does not do"
            )


def _rope_frequencies(
    path: pathlib.Path, stored: Mapping[str, Any], head_width: int
) -> tuple[float, ...]:
    """Return the frequencies that a config asks for.

    They stand at the top and in `rope_scaling`, or, as newer files have it, in `rope_parameters`.
    """
    rope = {**(stored.get("rope_scaling") or {}), **(stored.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = rope.get("rope_theta", stored.get("rope_theta", 10000.0))

    def number(field: str) -> float:
        if not isinstance(rope.get(field), int | float):
            raise CheckpointError(
                f"{path}: rope type {kind} needs {field}, found {rope.get(field)!r}"
            )
        return float(rope[field])

    frequencies = rope_frequencies(head_width, float(base))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{path}: partial_rotary_factor is {rope['partial_rotary_factor']!r}, which this "
            "package's network does not do"
        )
    match kind:
        case "default" | "none":
            return frequencies
        case "linear":
            return tuple(frequency / number("factor") for frequency in frequencies)
        case "llama3":
            return llama3_frequencies(
                frequencies,
                factor=number("factor"),
                low=number("low_freq_factor"),
                high=number("high_freq_factor"),
                context=number("original_max_position_embeddings"),
            )
    raise CheckpointError(
        f"{path}: rope type is {kind!r}; this package has default, linear, llama3"
    )


def _tensors(place: pathlib.Path) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield each tensor of a directory: its name and a function that reads it."""
    try:
        import safetensors
    except ImportError as error:
        message = "reading weights needs safetensors: pip install 'jaxspec-decoding[models]'"
        raise ImportError(message) from error
    index = place / "model.safetensors.index.json"
    whole = place / "model.safetensors"
    shards: dict[str, set[str]] = {whole.name: set()}
    if not whole.is_file():
        if not index.is_file():
            raise CheckpointError(
                f"{place}: there is neither {whole.name} nor {index.name}; weights in another format "
                "must be saved as safetensors first"
            )
        shards = {}
        for name, shard in _read_json(index).get("weight_map", {}).items():
            shards.setdefault(shard, set()).add(name)
    for shard, listed in shards.items():
        path = place / shard
        try:
            file = safetensors.safe_open(path, framework="np")
            found = set(file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        for name in sorted(listed - found):
            raise CheckpointError(f"{path}: tensor {name} is missing, {index.name} says it is here")
        for name in sorted(found):
            # Old checkpoints store the frequencies too; they follow from the config.
            if not name.endswith("rotary_emb.inv_freq"):
                yield name, functools.partial(file.get_tensor, name)


def _tokenizer(place: pathlib.Path) -> TextTokenizer | None:
    """Read a directory's tokenizer and the ids that end its texts, if it has one."""
    if not (place / "tokenizer.json").is_file():
        return None
    stop: Any = None
    for file in ("generation_config.json", "config.json"):
        if stop is None and (place / file).is_file():
            stop = _read_json(place / file).get("eos_token_id")
    stop_tokens = stop if isinstance(stop, list) else [] if stop is None else [stop]
    return read_tokenizer(place / "tokenizer.json", stop_tokens)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a file that holds one object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not an object")
    return content
