"""Networks of the Llama family from GGUF files.

Weights may be quantised in any form that the `gguf` library expands; that is done once, at load.
`jaxspec.models.load.metadata` lists the keys that are read, and those that must have a neutral value.
In these files the rows of queries and keys stand in the order of RoPE on neighbouring pairs; they are
put into the order of the half-rotation form, so that one RoPE serves every network.
"""

import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.extras import needs
from jaxspec.models.llama import LlamaConfig, llama, rope_frequencies
from jaxspec.models.load.gguf_file import StoredTensor, read_header
from jaxspec.models.load.metadata import GGUF, GGUF_TOKENIZER, check_keys
from jaxspec.models.load.special_tokens import token_ids
from jaxspec.models.load.tensors import (
    MOST_CONTEXT,
    MOST_HEAD_WIDTH,
    CheckpointError,
    Fields,
    params_from_tensors,
    shown,
)
from jaxspec.models.load.tokenizers import TextTokenizer, byte_level_tokenizer
from jaxspec.models.network import LanguageModel

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
"""The name of each field's tensor, see `jaxspec.models.load.tensors.params_from_tensors`."""

_ROPE_FACTORS = "rope_freqs.weight"
_LEFTOVERS = ".attn_rot_embd.weight"  # RoPE's table in old files, which follows from the metadata
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False}
"""Whether digits stand alone, by the name of how text is cut before pairs are joined."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KINDS = range(7)
"""Kinds of tokens: those named here are found whole in a text."""


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

    Warns:
      CheckpointWarning: once, naming keys that this package does not know.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError(needs("reading GGUF files", "gguf", "models")) from error
    try:
        path = pathlib.Path(path)
        if not path.is_file():  # a pipe would be waited for
            raise FileNotFoundError("there is no such file")
        data = np.memmap(path, mode="r")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not a GGUF file: {error}") from error
    sizes = {int(kind): size for kind, size in gguf.constants.GGML_QUANT_SIZES.items()}
    metadata, stored = read_header(path, data, sizes)
    fields = Fields(path, metadata)

    def expand(name: str) -> np.ndarray:
        return _expanded(path, stored[name], data, gguf)

    factors = expand(_ROPE_FACTORS) if _ROPE_FACTORS in stored else None
    config = _config(fields, stored, factors)
    tensors: dict[str, Callable[[], np.ndarray]] = {
        name: functools.partial(expand, name)
        for name in stored
        if name != _ROPE_FACTORS and not name.endswith(_LEFTOVERS)
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


def _expanded(path: pathlib.Path, tensor: StoredTensor, data: np.ndarray, gguf: Any) -> np.ndarray:
    """Return a tensor as float32."""
    kind = gguf.GGMLQuantizationType(tensor.kind)
    block, width = gguf.constants.GGML_QUANT_SIZES[kind]
    *rows, columns = tensor.shape
    stored = data[tensor.offset :][: math.prod(rows) * columns // block * width]
    try:
        plain = {"F16": "<f2", "F32": "<f4"}.get(kind.name)
        if plain is not None:
            return stored.view(plain).reshape(tensor.shape).astype(np.float32)
        with np.errstate(all="ignore"):  # what is not finite is rejected later
            blocks = stored.reshape(*rows, columns // block * width)
            return np.asarray(gguf.quants.dequantize(blocks, kind), np.float32)
    except (NotImplementedError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} is damaged, or quantised as {kind.name}, which the gguf "
            f"library does not expand: {error}"
        ) from error


def _config(
    fields: Fields, stored: Mapping[str, StoredTensor], factors: np.ndarray | None
) -> LlamaConfig:
    """Return the sizes that the metadata states, or say which of it is not supported."""
    kind = fields.values.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(
            f"{fields.path}: general.architecture is {shown(kind)}; this package has llama"
        )
    check_keys(fields.path, fields.values, GGUF)
    layers = fields.whole("llama.block_count", most=len(stored))  # more could not be stored
    width = fields.whole("llama.embedding_length")
    heads = _of_layers(fields, "llama.attention.head_count", layers)
    head_width = fields.whole("llama.attention.key_length", width // heads, most=MOST_HEAD_WIDTH)
    context = fields.whole("llama.context_length", most=MOST_CONTEXT)
    embedding = stored.get(LAYOUT["embedding"])
    if embedding is None:
        raise CheckpointError(f"{fields.path}: tensor {LAYOUT['embedding']} is missing")
    vocab = embedding.shape[0]
    must_be = {
        "llama.attention.value_length": head_width,
        "llama.rope.dimension_count": head_width,
        "llama.vocab_size": vocab,
    }
    for key, value in must_be.items():
        if (found := fields.values.get(key, value)) != value:
            raise CheckpointError(
                f"{fields.path}: {key} is {shown(found)}; this package has {value}"
            )
    # A window that no text outgrows is none.
    window = fields.whole("llama.attention.sliding_window", 0, least=0)
    if 0 < window < context:
        raise CheckpointError(
            f"{fields.path}: llama.attention.sliding_window is {window}; this package has 0"
        )
    scale = fields.values.get("llama.attention.scale") or head_width**-0.5  # 0: not set
    if not isinstance(scale, float) or not math.isclose(scale, head_width**-0.5, rel_tol=1e-5):
        raise fields.refusal(
            "llama.attention.scale", f"and this package has {head_width**-0.5:g} for this head"
        )
    try:
        return LlamaConfig(
            vocab=vocab,
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=_of_layers(fields, "llama.attention.head_count_kv", layers, heads),
            head_width=head_width,
            hidden=_of_layers(fields, "llama.feed_forward_length", layers),
            rope_frequencies=_rope_frequencies(fields, head_width, factors),
            norm_epsilon=float(fields.number("llama.attention.layer_norm_rms_epsilon")),
            max_context=context,
            is_tied=LAYOUT["head"] not in stored,
        )
    except CheckpointError:
        raise
    except (ArithmeticError, ValueError) as error:
        raise CheckpointError(f"{fields.path}: {error}") from error


def _of_layers(fields: Fields, key: str, layers: int, default: int | None = None) -> int:
    """Return a size that is stored once, or once for each layer where all are the same."""
    found = fields.values.get(key)
    if isinstance(found, list) and len(found) == layers and len(set(found)) == 1:
        found = found[0]
    where = Fields(fields.path, {key: found})
    return where.whole(key) if default is None else where.whole(key, default)


def _rope_frequencies(
    fields: Fields, head_width: int, factors: np.ndarray | None
) -> tuple[float, ...]:
    """Return the frequencies that the metadata and the tensor of factors ask for, as llama.cpp does.

    The scaling is linear where its type is not named. Its factor had another key once, and 0 stands
    for none.
    """
    key, old_key = "llama.rope.scaling.factor", "llama.rope.scale_linear"
    scaling = fields.values.get("llama.rope.scaling.type", "linear")
    if scaling not in ("none", "linear"):
        raise CheckpointError(
            f"{fields.path}: llama.rope.scaling.type is {shown(scaling)}; this package has none, "
            "linear"
        )
    by_key = {
        name: 1 if fields.values[name] == 0 else fields.number(name)
        for name in (key, old_key)
        if name in fields.values
    }
    if len(set(by_key.values())) > 1:
        raise fields.refusal(key, f"yet {old_key} is {shown(fields.values[old_key])}")
    base = float(fields.number("llama.rope.freq_base", 10000.0))
    frequencies = np.array(rope_frequencies(head_width, base))
    if scaling == "linear":
        if "llama.rope.scaling.type" in fields.values and not by_key:
            raise fields.refusal(key, "but llama.rope.scaling.type is 'linear'")
        frequencies = frequencies / next(iter(by_key.values()), 1)
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
    return tuple(frequencies.tolist())


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
    keys = [key for key in fields.values if key.startswith("tokenizer.")]
    check_keys(fields.path, fields.values, GGUF_TOKENIZER, keys)
    pieces = fields.texts("tokenizer.ggml.tokens")
    merges = fields.texts("tokenizer.ggml.merges")
    kinds = fields.get(
        "tokenizer.ggml.token_type",
        [],
        lambda value: value == [] or _are_kinds(value, len(pieces)),
        f"a list of {len(pieces)} kinds from 0 to {max(_KINDS)}, one for each of "
        "tokenizer.ggml.tokens",
    )
    by_kind: dict[int, list[str]] = {kind: [] for kind in _KINDS}
    for piece, kind in zip(pieces, kinds, strict=False):
        by_kind[kind].append(piece)
    stop: set[int] = set()
    for name in ("eos", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        stop |= _one_token(fields, key, vocab)
    start = _one_token(fields, "tokenizer.ggml.bos_token_id", vocab)
    is_started = fields.truth("tokenizer.ggml.add_bos_token", False)
    if is_started and not start:
        raise CheckpointError(
            f"{fields.path}: tokenizer.ggml.add_bos_token is True, yet there is no "
            "tokenizer.ggml.bos_token_id"
        )
    try:
        return byte_level_tokenizer(
            pieces,
            [tuple(merge.split(" ")) for merge in merges],
            [*by_kind[_CONTROL], *by_kind[_UNKNOWN]],
            stop,
            user_defined=by_kind[_USER_DEFINED],
            start_tokens=tuple(start) if is_started else (),
            single_digits=_SINGLE_DIGITS[cut],
            vocab=vocab,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{fields.path}: {error}") from error


def _one_token(fields: Fields, key: str, vocab: int) -> set[int]:
    """Return the id that a key names, alone in a set; an empty set if it names none."""
    found = fields.values.get(key)
    if isinstance(found, list):
        raise fields.refusal(key, f"not a whole number from 0 to {vocab - 1}")
    return token_ids(fields.path, key, found, vocab)


def _are_kinds(value: Any, count: int) -> bool:
    # By type first: a truth value equals 0 or 1, and the kinds name places of a table.
    is_list = isinstance(value, list) and len(value) == count
    return is_list and all(type(kind) is int and kind in _KINDS for kind in value)
