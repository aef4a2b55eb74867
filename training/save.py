"""Write a network as the directory that Hugging Face libraries read."""

import json
import math
import operator
import os
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxspec.extras import needs
from jaxspec.models.llama import (
    LlamaConfig,
    LlamaParams,
    check_shapes,
    rope_frequencies,
    wanted_shapes,
)
from jaxspec.models.load.huggingface import LAYOUT
from jaxspec.models.panels import whole_of
from training.swap import swap_files

_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
_OF_THE_TEXT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files that loaders read with the weights: old ones must not stay with new weights."""


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

    `transformers` reads them as `LlamaForCausalLM`. Everything is checked before a file is changed. A
    failure leaves the old files as they were. If the process is killed, the old checkpoint is left,
    the new one, or a folder without `config.json`, which does not load.

    Args:
      directory: created if needed; files of these names in it are replaced. Another file of a
        tokenizer, or a `generation_config.json`, in it is an error, since loaders would read it with
        the new weights.
      config: the sizes; no biases.
      params: the weights.
      alphabet: the character of each token, V sorted distinct ones; None writes no tokenizer.
      dtype: float16 or float32, the storage dtype.
      rope_base: base of the frequencies, as in `jaxspec.models.rope_frequencies`.

    Raises:
      ValueError: a network that the layout cannot describe, weights or an alphabet that do not fit
        the sizes, weights that overflow `dtype`, another dtype, or a directory as above.
      OSError: the directory cannot be written.
      ImportError: `safetensors` is not installed.
    """
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise ImportError(needs("writing weights", "safetensors", "models")) from error
    dtype = np.dtype(dtype)
    if dtype not in (np.float16, np.float32):
        raise ValueError(f"dtype is {dtype.name}, must be float16 or float32")
    if config.has_biases:
        raise ValueError("the Llama layout has no biases on queries, keys and values")
    if not 0 < rope_base < math.inf:
        raise ValueError(f"rope_base is {rope_base!r}, must be finite and above 0")
    if config.rope_frequencies != rope_frequencies(config.head_width, rope_base):
        raise ValueError(f"rope_frequencies are not those of base {rope_base}; say which base")
    check_shapes(config, params)
    if alphabet is not None:
        _check_alphabet(alphabet, config.vocab)
    with np.errstate(over="ignore"):  # an error below
        weights = {
            name: np.ascontiguousarray(np.asarray(array, np.float32).astype(dtype))
            for name, array in _named(config, params).items()
        }
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} has an entry that is not finite as {dtype.name}")
    place = pathlib.Path(directory)
    texts = {_CONFIG: _describe(config, dtype.name, rope_base)}
    if alphabet is not None:
        texts["tokenizer.json"] = _character_tokenizer(alphabet)
        texts["tokenizer_config.json"] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_context,
        }
    for name in _OF_THE_TEXT:
        if name not in texts and (place / name).exists():
            raise ValueError(
                f"{place / name} exists but would not be rewritten: remove it, or save elsewhere"
            )
    contents = {name: _to_json(content) for name, content in texts.items()}
    contents[_WEIGHTS] = save(weights, metadata={"format": "pt"})
    place.mkdir(parents=True, exist_ok=True)
    swap_files(place, contents, _CONFIG)


def _check_alphabet(alphabet: str, vocab: int) -> None:
    if list(alphabet) != sorted(set(alphabet)) or len(alphabet) != vocab:
        raise ValueError(
            f"alphabet is {alphabet!r} of {len(alphabet)} characters, must be {vocab} distinct ones, "
            "sorted"
        )


def _named(config: LlamaConfig, params: LlamaParams) -> dict[str, Any]:
    """Return the weights under their names in a checkpoint."""
    whole, of_layer = wanted_shapes(config)
    named = {LAYOUT[field]: getattr(params, field) for field in whole}
    for number, layer in enumerate(params.layers):
        named |= {
            LAYOUT[field].format(layer=number): whole_of(getattr(layer, field))
            for field in of_layer
        }
    return named


def _describe(config: LlamaConfig, dtype: str, rope_base: float) -> dict[str, Any]:
    """Return the contents of `config.json`."""
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
        "rms_norm_eps": float(config.norm_epsilon),
        "rope_theta": float(rope_base),
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.is_tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _character_tokenizer(alphabet: str) -> dict[str, Any]:
    """Return a `tokenizer.json` of one token per character; an unknown character is an error."""
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


def _to_json(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, indent=1, ensure_ascii=True, default=operator.index) + "\n"
    return text.encode("ascii")
