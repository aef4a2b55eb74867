"""Write a network as the directory that Hugging Face libraries read."""

import json
import os
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxspec.models.checkpoint import LAYOUT
from jaxspec.models.llama import LlamaConfig, LlamaParams, rope_frequencies
from jaxspec.models.weights import wanted_shapes


def save_huggingface(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    params: LlamaParams,
    alphabet: str | None = None,
    *,
    dtype: npt.DTypeLike = np.float16,
    rope_base: float = 10000.0,
) -> None:
    """Write `config.json`, `model.safetensors` and, for a network of characters, `tokenizer.json`.

    `transformers` reads them as `LlamaForCausalLM`.

    Args:
      directory: made where it is not there; files of these names in it are replaced.
      config: the sizes; no biases.
      params: the weights.
      alphabet: the character of each token; None writes no tokenizer.
      dtype: float16 or float32, what weights are stored as.
      rope_base: of the frequencies, as `jaxspec.models.llama.rope_frequencies` takes it.

    Raises:
      ValueError: a network that the layout cannot describe, or weights that leave the range of
        `dtype`.
      ImportError: `safetensors` is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        message = "writing weights needs safetensors: pip install 'jaxspec-decoding[models]'"
        raise ImportError(message) from error
    if config.has_biases:
        raise ValueError("the Llama layout has no biases on queries, keys and values")
    if config.rope_frequencies != rope_frequencies(config.head_width, rope_base):
        raise ValueError(f"rope_frequencies are not those of base {rope_base}; say which base")
    with np.errstate(over="ignore"):  # it is refused below
        weights = {
            name: np.ascontiguousarray(np.asarray(array, np.float32).astype(dtype))
            for name, array in _named(config, params).items()
        }
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has an entry that is not finite as {np.dtype(dtype).name}")
    place = pathlib.Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    _write(place / "config.json", _describe(config, np.dtype(dtype).name, rope_base))
    if alphabet is not None:
        _write(place / "tokenizer.json", _character_tokenizer(alphabet))
        _write(
            place / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "model_max_length": config.max_context,
            },
        )


def _named(config: LlamaConfig, params: LlamaParams) -> dict[str, Any]:
    """Return the weights under their names in a checkpoint."""
    whole, of_layer = wanted_shapes(config)
    named = {LAYOUT[field]: getattr(params, field) for field in whole}
    for number, layer in enumerate(params.layers):
        named |= {LAYOUT[field].format(layer=number): getattr(layer, field) for field in of_layer}
    return named


def _describe(config: LlamaConfig, dtype: str, rope_base: float) -> dict[str, Any]:
    """Return what stands in `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": rope_base,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _character_tokenizer(alphabet: str) -> dict[str, Any]:
    """Return a `tokenizer.json` of one token a character; a strange character is an error."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {character: token for token, character in enumerate(alphabet)},
            "unk_token": "[UNK]",
        },
    }


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
