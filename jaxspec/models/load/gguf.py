"""Networks of the Llama family from GGUF files.

Weights may be quantised in any form that the `gguf` library expands; that is done once, at load. In
these files the rows of queries and keys are in the order of RoPE on neighbouring pairs; they are put
into the order of the half-rotation form, so that one RoPE serves every network.
`jaxspec.models.load.metadata` lists the keys that are read, and those that must have a neutral value.
"""

import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.extras import require
from jaxspec.models.llama import llama
from jaxspec.models.load.fields import CheckpointError, Values, assert_file, read, shown, wrapped
from jaxspec.models.load.gguf_file import StoredTensor, read_header
from jaxspec.models.load.metadata import GGUF, GGUF_TOKENIZER
from jaxspec.models.load.special_tokens import start_tokens, token_ids
from jaxspec.models.load.tensors import (
    TENSORS,
    head_width,
    network_config,
    params_from_tensors,
    scaled_frequencies,
)
from jaxspec.models.load.tokenizers import TextTokenizer, byte_level_tokenizer
from jaxspec.models.network import LanguageModel

LAYOUT: Mapping[str, str] = {field: name for field, (_, name) in TENSORS.items() if name}
"""The name of each field's tensor, see `params_from_tensors`."""

_DIVISORS = "rope_freqs.weight"
_LEFTOVERS = ".attn_rot_embd.weight"  # RoPE's table in old files, which follows from the metadata
_OF_LAYERS = (
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
)
"""Sizes that are stored once, or once for each layer where all are the same."""
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False}
"""Whether every digit is a separate token, by how text is cut before pairs are joined."""
_UNKNOWN, _CONTROL, _USER_DEFINED, _KINDS = 2, 3, 4, range(7)
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
    gguf = require("reading GGUF files", "gguf", "models")
    with wrapped(f"{path}: not a GGUF file"):
        path = pathlib.Path(path)
        assert_file(path)
        data = np.memmap(path, mode="r")
    sizes = {int(kind): size for kind, size in gguf.constants.GGML_QUANT_SIZES.items()}
    stored, listed = read_header(path, data, sizes)
    values = _values(path, stored, listed)
    tensors: dict[str, Callable[[], np.ndarray]] = {
        each: functools.partial(_expanded, path, tensor, data, gguf)
        for each, tensor in listed.items()
        if not each.endswith(_LEFTOVERS)
    }
    divisors = tensors.pop(_DIVISORS)() if _DIVISORS in tensors else None
    width = head_width(values)
    config = network_config(values, width, _rope_frequencies(values, width, divisors))
    for suffix, heads in ((".attn_q.weight", config.heads), (".attn_k.weight", config.kv_heads)):
        for each in tensors:
            if each.endswith(suffix):
                tensors[each] = functools.partial(_halved, tensors[each], heads)
    return llama(
        config,
        params_from_tensors(config, tensors, LAYOUT, dtype, os.fspath(path)),
        name=path.stem if name is None else name,
        tokenizer=_tokenizer(values, stored, config.vocab),
    )


def _values(path: object, stored: dict[str, Any], listed: Mapping[str, StoredTensor]) -> Values:
    """Read the metadata of a network, and check what this package's networks have in only one way."""
    if (kind := stored.get("general.architecture")) != "llama":
        raise CheckpointError(
            path, f"general.architecture is {shown(kind)}; this package has llama"
        )
    for key in _OF_LAYERS:
        found = stored.get(key)
        if isinstance(found, list) and len(found) == stored.get("llama.block_count"):
            stored[key] = found[0] if len(set(found)) == 1 else found
    values = read(path, stored, GGUF)
    if LAYOUT["embedding"] not in listed:
        raise CheckpointError(path, f"tensor {LAYOUT['embedding']} is missing")
    vocab, width = listed[LAYOUT["embedding"]].shape[0], head_width(values)
    for name, wanted in (("stated_vocab", vocab), ("value_width", width), ("rotated_width", width)):
        if values[name] not in (None, wanted):
            raise values.error(name, f"must be {wanted}")
    scale = values["attention_scale"] or width**-0.5  # 0: not set
    if not math.isclose(scale, width**-0.5, rel_tol=1e-5):
        raise values.error("attention_scale", f"must be {width**-0.5:g} for this head")
    values |= {"vocab": vocab, "is_tied": LAYOUT["head"] not in listed}
    return values


def _rope_frequencies(values: Values, width: int, divisors: np.ndarray | None) -> tuple[float, ...]:
    """Return the frequencies that the metadata and a tensor of divisors ask for, as in llama.cpp.

    Scaling is linear where its type is not named. Its factor had another key once, and 0 means none.
    """
    kind, factor, old = (values[name] for name in ("rope_type", "rope_factor", "old_rope_factor"))
    if kind not in (None, "none", "linear"):
        raise values.error("rope_type", "must be none or linear")
    if None not in (factor, old) and (factor or 1) != (old or 1):
        raise values.error("rope_factor", f"yet {values.keys_of['old_rope_factor']} is {old}")
    factor = old if factor is None else factor
    if kind == "linear" and factor is None:
        raise values.error("rope_factor", f"but {values.keys_of['rope_type']} is 'linear'")
    with wrapped(values.path):
        factor = 1.0 if kind == "none" else factor or 1.0
        frequencies = scaled_frequencies(width, values["rope_base"], factor)
    if divisors is None:
        return frequencies
    tensor = f"{values.path}: tensor {_DIVISORS}"
    if divisors.shape != (width // 2,):
        raise CheckpointError(tensor, f"shape {divisors.shape}, its metadata wants ({width // 2},)")
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise CheckpointError(tensor, "an entry is not > 0 and finite")
    return tuple((np.array(frequencies) / divisors).tolist())


def _expanded(path: object, tensor: StoredTensor, data: np.ndarray, gguf: Any) -> np.ndarray:
    """Return a tensor as float32."""
    kind = gguf.GGMLQuantizationType(tensor.kind)
    stored = data[tensor.begin :][: tensor.size]
    if plain := {"F16": "<f2", "F32": "<f4"}.get(kind.name):
        return stored.view(plain).reshape(tensor.shape).astype(np.float32)
    why = f"damaged, or of type {kind.name}, which the gguf library does not expand"
    # What is not finite is rejected later.
    with wrapped(f"{path}: tensor {tensor.name} is {why}"), np.errstate(all="ignore"):
        rows = stored.reshape(*tensor.shape[:-1], -1)
        return np.asarray(gguf.quants.dequantize(rows, kind), np.float32)


def _halved(read_rows: Callable[[], np.ndarray], heads: int) -> np.ndarray:
    """Put each head's rows from (pair, part) into the order (part, pair)."""
    rows = read_rows()
    if rows.ndim != 2 or rows.shape[0] % (2 * heads):
        return rows  # its shape is rejected later
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(values: Values, stored: Mapping[str, Any], vocab: int) -> TextTokenizer | None:
    """Build the tokenizer that the metadata holds, if it is of a known kind."""
    cut = values["pre_tokenizer"]
    # In a tuple: the value may be of a type that no dict can look up.
    if values["tokenizer"] != "gpt2" or cut not in tuple(_SINGLE_DIGITS):
        return None
    values = read(values.path, stored, GGUF_TOKENIZER, prefix="tokenizer.")
    entries, kinds = values["entries"], [] if values["kinds"] is None else values["kinds"]
    # By type first: a truth value equals 0 or 1.
    is_fine = isinstance(kinds, list) and all(type(x) is int and x in _KINDS for x in kinds)
    if not is_fine or len(kinds) not in (0, len(entries)):
        raise values.error("kinds", f"must be {len(entries)} kinds from 0 to {max(_KINDS)}")

    def of_kind(wanted: int) -> list[str]:
        return [entry for entry, kind in zip(entries, kinds, strict=False) if kind == wanted]

    tokenizer = byte_level_tokenizer(
        values.path,
        entries,
        values["merges"],
        special=of_kind(_CONTROL) + of_kind(_UNKNOWN),
        user_defined=of_kind(_USER_DEFINED),
        single_digits=_SINGLE_DIGITS[cut],
    )
    stop = [token_ids(values, name, vocab) for name in ("stop", "turn_stop", "message_stop")]
    start = start_tokens(values, token_ids(values, "start", vocab))
    return TextTokenizer(tokenizer, set().union(*stop), start_tokens=start, vocab=vocab)
