"""Networks of the Llama family from GGUF files.

Weights may be quantised in any form that the `gguf` library reads; they are expanded once, at load.
In these files the rows of queries and keys stand in the order of RoPE on neighbouring pairs; they are
put into the order of the half-rotation form, so that one RoPE serves every network.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.extras import needs
from jaxspec.language_model import LanguageModel
from jaxspec.models.llama import LlamaConfig, llama, rope_frequencies
from jaxspec.models.tokenizers import TextTokenizer, byte_level_tokenizer
from jaxspec.models.weights import (
    MOST_HEAD_WIDTH,
    CheckpointError,
    Fields,
    params_from_tensors,
)

LAYOUT: Mapping[str, str] = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "blk.{layer}.attn_norm.weight",
    "query": "blk.{layer}.attn_q.weight",
    "key": "blk.{layer}.attn_k.weight",
    "value": "blk.{layer}.attn_v.weight",
    "output": "blk.{layer}.attn_output.weight",
    "hidden_norm": "blk.{layer}.ffn_norm.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
}
"""The name of each field's tensor, see `jaxspec.models.weights.params_from_tensors`."""

_ROPE_FACTORS = "rope_freqs.weight"
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False}
"""Whether digits stand alone, by the name of how text is cut before pairs are joined."""
_CONTROL = 3  # the kind of token that text spells out whole


def load_gguf(
    path: str | os.PathLike[str], *, dtype: Any = jnp.float32, name: str | None = None
) -> LanguageModel:
    """Load a network of the Llama architecture from a GGUF file.

    Args:
      path: the file.
      dtype: float32 or bfloat16.
      name: the network's id; default the file's name without its ending.

    Returns:
      The network. Its tokenizer, a `TextTokenizer`, is None unless the file holds a byte-level pair
      encoding that cuts text as GPT-2 or SmolLM do.

    Raises:
      CheckpointError: the file is damaged, or of a network that this package does not have.
      ImportError: `gguf` or `tokenizers` is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError(needs("reading GGUF files", "gguf", "models")) from error
    path = pathlib.Path(path)
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path}: not a GGUF file: {error}") from error
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def expand(name: str) -> np.ndarray:
        tensor = stored[name]
        try:
            return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        except (NotImplementedError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"{path}: tensor {name} is damaged, or quantised as {tensor.tensor_type.name}, which "
                f"the gguf library does not expand: {error}"
            ) from error

    factors = expand(_ROPE_FACTORS) if _ROPE_FACTORS in stored else None
    fields = Fields(path, _Metadata(reader))
    config = _config(fields, stored, factors)
    tensors: dict[str, Callable[[], np.ndarray]] = {
        name: functools.partial(expand, name) for name in stored if name != _ROPE_FACTORS
    }
    for field, heads in (("query", config.heads), ("key", config.kv_heads)):
        for layer in range(config.layers):
            name_here = LAYOUT[field].format(layer=layer)
            if name_here in tensors:
                tensors[name_here] = functools.partial(_halved, tensors[name_here], heads)
    return llama(
        config,
        params_from_tensors(config, tensors, LAYOUT, dtype, os.fspath(path)),
        name=path.stem if name is None else name,
        tokenizer=_tokenizer(fields, config.vocab),
    )


class _Metadata(Mapping[str, Any]):
    """The metadata of a file, each value decoded when it is asked for."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def _config(fields: Fields, stored: Mapping[str, Any], factors: np.ndarray | None) -> LlamaConfig:
    """Return the sizes that the metadata states, or say which of it is not supported."""
    kind = fields.values.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(
            f"{fields.path}: general.architecture is {kind!r}; this package has llama"
        )
    width = fields.whole("llama.embedding_length")
    heads = fields.whole("llama.attention.head_count")
    head_width = fields.whole("llama.attention.key_length", width // heads, most=MOST_HEAD_WIDTH)
    scaling = fields.values.get("llama.rope.scaling.type", "none")
    must_be = {
        "llama.attention.value_length": head_width,
        "llama.rope.dimension_count": head_width,
        "llama.expert_count": 0,
        "llama.attention.sliding_window": 0,
    }
    for key, value in must_be.items():
        if (found := fields.values.get(key, value)) != value:
            raise CheckpointError(f"{fields.path}: {key} is {found!r}; this package has {value}")
    if scaling not in ("none", "linear"):
        raise CheckpointError(
            f"{fields.path}: llama.rope.scaling.type is {scaling!r}; this package has none, linear"
        )
    frequencies = np.array(
        rope_frequencies(head_width, fields.number("llama.rope.freq_base", 10000.0))
    )
    factor = "llama.rope.scaling.factor"
    if scaling == "linear":
        frequencies = frequencies / fields.number(factor)
    elif fields.values.get(factor, 1.0) != 1.0:
        raise fields.refusal(factor, "but llama.rope.scaling.type does not say how it scales")
    if factors is not None:
        if factors.shape != frequencies.shape:
            raise CheckpointError(
                f"{fields.path}: tensor {_ROPE_FACTORS} has shape {factors.shape}, its metadata wants "
                f"{frequencies.shape}"
            )
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise CheckpointError(
                f"{fields.path}: tensor {_ROPE_FACTORS} must be above 0 and finite"
            )
        frequencies = frequencies / factors
    layers = fields.whole("llama.block_count", most=len(stored))  # more could not be stored
    embedding = stored.get(LAYOUT["embedding"])
    if embedding is None:
        raise CheckpointError(f"{fields.path}: tensor {LAYOUT['embedding']} is missing")
    try:
        return LlamaConfig(
            vocab=int(embedding.shape[-1]),  # shapes stand innermost axis first
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=fields.whole("llama.attention.head_count_kv", heads),
            head_width=head_width,
            hidden=fields.whole("llama.feed_forward_length"),
            rope_frequencies=tuple(frequencies.tolist()),
            norm_epsilon=float(fields.number("llama.attention.layer_norm_rms_epsilon")),
            max_context=fields.whole("llama.context_length"),
            is_tied=LAYOUT["head"] not in stored,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{fields.path}: {error}") from error


def _halved(read: Callable[[], np.ndarray], heads: int) -> np.ndarray:
    """Put each head's rows from (pair, part) into the order (part, pair)."""
    rows = read()
    if rows.ndim != 2 or rows.shape[0] % (2 * heads):
        return rows  # its shape is refused later
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(fields: Fields, vocab: int) -> TextTokenizer | None:
    """Build the tokenizer that the metadata holds, if it is of a known kind."""
    cut = fields.values.get("tokenizer.ggml.pre")
    # In a tuple: what the file says may be anything, also what no dict can look up.
    if fields.values.get("tokenizer.ggml.model") != "gpt2" or cut not in tuple(_SINGLE_DIGITS):
        return None
    pieces = fields.texts("tokenizer.ggml.tokens")
    merges = fields.texts("tokenizer.ggml.merges")
    kinds = fields.get(
        "tokenizer.ggml.token_type",
        None,
        lambda value: isinstance(value, list) and len(value) == len(pieces),
        f"a list of {len(pieces)} kinds, one for each of tokenizer.ggml.tokens",
    )
    stop = fields.whole("tokenizer.ggml.eos_token_id", None, least=0, most=vocab - 1)
    try:
        return byte_level_tokenizer(
            pieces,
            [tuple(merge.split(" ")) for merge in merges],
            [piece for piece, kind in zip(pieces, kinds or [], strict=False) if kind == _CONTROL],
            [] if stop is None else [stop],
            single_digits=_SINGLE_DIGITS[cut],
            vocab=vocab,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{fields.path}: {error}") from error
