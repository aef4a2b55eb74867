"""Networks of the Llama family from Hugging Face directories.

A directory holds `config.json`, the weights as `model.safetensors` or in shards that
`model.safetensors.index.json` lists, and mostly `tokenizer.json`. A field that asks for what this
package's network does not do is an error, never ignored; `jaxspec.models.load.metadata` lists them.
"""

import functools
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.checks import described
from jaxspec.extras import require
from jaxspec.models.llama import LlamaConfig, llama
from jaxspec.models.load.fields import (
    NO_EFFECT,
    CheckpointError,
    Values,
    assert_file,
    read,
    read_json,
    report,
    shown,
    wrapped,
)
from jaxspec.models.load.metadata import CONFIG, GENERATION, INDEX, ROPE
from jaxspec.models.load.special_tokens import read_tokenizer
from jaxspec.models.load.tensors import (
    TENSORS,
    head_width,
    network_config,
    params_from_tensors,
    scaled_frequencies,
)
from jaxspec.models.network import LanguageModel

LAYOUT: Mapping[str, str] = {field: name for field, (name, _) in TENSORS.items()}
"""The name of each field's tensor, see `params_from_tensors`."""

_QWEN2 = "Qwen2ForCausalLM"
_ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4096, "num_key_value_heads": 8}),
    "qwen2": (_QWEN2, {"sliding_window": 4096, "num_key_value_heads": 32}),
}
"""By `model_type`: its architecture, and its values of fields that a `config.json` leaves out."""

_BUFFERS = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.original_inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".self_attn.bias",
    ".self_attn.masked_bias",
    ".position_ids",
)
"""Tensors of old checkpoints that follow from the config: tables of RoPE, masks and positions."""


def load_huggingface(
    directory: str | os.PathLike[str], *, dtype: Any = jnp.float32, name: str | None = None
) -> LanguageModel:
    """Load a network of the Llama family from a directory.

    Args:
      directory: of a `LlamaForCausalLM`, a `MistralForCausalLM` without a sliding window, or a
        `Qwen2ForCausalLM`.
      dtype: float32 or bfloat16, whatever the weights are stored as. On a CPU float32 is by far the
        faster one, for bfloat16 checkpoints too.
      name: the network's id; default the directory's name.

    Returns:
      The network. Its tokenizer, a `TextTokenizer`, is None where there is no `tokenizer.json`. Its
      `stop_tokens` are those of all files that name any. How to sample (temperature, top_k, top_p)
      is not taken from the files: it is an argument of a decoder.

    Raises:
      CheckpointError: what is missing, damaged or not supported, and in which file.
      ImportError: `safetensors`, or `tokenizers` for a directory with a tokenizer, is not installed.

    Warns:
      CheckpointWarning: once for each file that has keys this package does not know, or recommends
        sampling that this package does not have, such as a repetition penalty.
    """
    place = _folder(directory)
    identity = _identity(place)
    values = _read_config(place)
    config = _config(values)
    tensors = dict(_tensors(place))
    params = params_from_tensors(config, tensors, LAYOUT, dtype, os.fspath(place))
    stops = [values]
    if os.path.lexists(generation := place / "generation_config.json"):
        stops.append(read(generation, read_json(generation), GENERATION))
    tokenizer = read_tokenizer(place, stops, config.vocab)
    if _identity(place) != identity:
        raise CheckpointError(place, "it was saved anew while it was loaded; load it again")
    name = place.resolve().name if name is None else name
    return llama(config, params, name=name, tokenizer=tokenizer)


def load_config(directory: str | os.PathLike[str]) -> LlamaConfig:
    """Read the sizes of a network from a directory's `config.json`, as `load_huggingface` does."""
    return _config(_read_config(_folder(directory)))


def _folder(directory: str | os.PathLike[str]) -> pathlib.Path:
    if not isinstance(directory, str | os.PathLike):
        raise CheckpointError("directory", f"{described(directory)}, must be the path of a folder")
    place = pathlib.Path(directory)
    if os.path.isfile(place):  # unlike its method, False for a name that no file can have
        wanted = "must be a folder with config.json and weights (load_gguf reads GGUF files)"
        raise CheckpointError(place, f"a file, {wanted}")
    if not os.path.exists(place):
        raise CheckpointError(place, "there is no such folder; nothing is downloaded")
    return place


def _identity(place: pathlib.Path) -> tuple[int, int] | None:
    """Return what changes when a directory is saved anew: then its config is moved out and in."""
    try:
        found = os.stat(place / "config.json")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_config(place: pathlib.Path) -> Values:
    path = place / "config.json"
    if not path.exists() and any(place.glob(".config.json.*.old")):
        raise CheckpointError(path, "saving to this folder was interrupted; save again")
    stored = read_json(path)
    kind, defaults = _architecture(path, stored)
    # Qwen2 has biases in attention, whatever a config says of them.
    biases = {"attention_bias": NO_EFFECT} if kind == _QWEN2 else {}
    values = read(path, {**defaults, **stored}, {**CONFIG, **biases})
    values["has_biases"] = kind == _QWEN2
    return values


def _architecture(path: pathlib.Path, stored: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return which of the known architectures a config describes, and its defaults."""
    named, kind = stored.get("architectures"), stored.get("model_type")
    both = f"architectures is {shown(named)}, model_type {shown(kind)}"
    # Compared one by one: the file's values may be of types that no dict can look up.
    of_type = next((each for each in _ARCHITECTURES if each == kind), None)
    of_name = next((each for each, (name, _) in _ARCHITECTURES.items() if named == [name]), None)
    found = of_type if named in (None, []) else of_name
    if found is None or of_type not in (None, found):
        known = ", ".join(f"{name} ({each})" for each, (name, _) in _ARCHITECTURES.items())
        raise CheckpointError(path, f"{both}; this package has {known}")
    if of_type is None and kind is not None:
        report(path, f"{both}, which this package does not know; architectures is followed")
    return _ARCHITECTURES[found]


def _config(values: Values) -> LlamaConfig:
    kinds, layers, is_qwen2 = values["layer_types"], values["layers"], values["has_biases"]
    if kinds is not None and (len(kinds) != layers or set(kinds) != {"full_attention"}):
        raise values.error("layer_types", f"must be full_attention for each of {layers} layers")
    # Qwen2 uses a window only if it also says so, and only in layers from a number on, or in those
    # that layer_types names.
    is_windowed = not is_qwen2 if values["uses_window"] is None else values["uses_window"]
    if is_qwen2 and (kinds is not None or values["full_layers"] >= layers):
        is_windowed = False
    values["window"] = values["window"] if is_windowed else None
    width = head_width(values)
    return network_config(values, width, _rope_frequencies(values, width))


def _rope_frequencies(values: Values, width: int) -> tuple[float, ...]:
    """Return the frequencies of the RoPE that a config asks for.

    Its fields are at the top and in `rope_scaling`, or, in newer files, in `rope_parameters`.
    """
    old, new = (
        {name: value for name, value in values[place].items() if value is not None}
        for place in ("rope_scaling", "rope_parameters")
    )
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            both = f"{shown(old[name])} in rope_scaling, {shown(new[name])} in rope_parameters"
            raise CheckpointError(values.path, f"{name} is {both}")
    rope = old | new
    kinds = [rope[name] for name in ("rope_type", "type") if name in rope] or ["default"]
    kind = kinds[0]
    if kind not in tuple(ROPE) or kinds[-1] != kind:
        both = " and ".join(map(shown, kinds))
        raise CheckpointError(
            values.path, f"RoPE type is {both}; this package has default, linear, llama3"
        )
    for field in sorted(rope.keys() - ROPE[kind].keys()):
        what = f"{field} is {shown(rope[field])}, which RoPE type {kind} does not take"
        raise CheckpointError(values.path, f"{what}; rope_type must say what it is for")
    found = read(f"{values.path}: RoPE type {kind}", rope, ROPE[kind])
    if kind == "llama3" and found["high"] <= found["low"]:
        raise found.error("high", f"must be > low_freq_factor {found['low']}")
    found["base"] = found["base"] or values["rope_base"]
    with wrapped(values.path):
        return scaled_frequencies(width, **found)


def _tensors(place: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """Yield each tensor of a directory: its name and a function that reads it."""
    library = require("reading weights", "safetensors", "models")
    index, whole = place / "model.safetensors.index.json", place / "model.safetensors"
    listed: dict[str, str] | None = None  # the shard of each tensor
    if not whole.is_file():
        if not index.is_file():
            missing = f"there is neither {whole.name} nor {index.name}"
            raise CheckpointError(
                place, f"{missing}; save weights in another format as safetensors"
            )
        shards = read(index, read_json(index), INDEX)["shards"]
        listed = {name: shard for name, shard in shards.items() if not name.endswith(_BUFFERS)}
    for shard in [whole.name] if listed is None else sorted(set(listed.values())):
        path = place / shard
        assert_file(path)
        with wrapped(path):
            file = library.safe_open(path, framework="np")
            found = {name for name in file.keys() if not name.endswith(_BUFFERS)}  # noqa: SIM118
        wanted = found if listed is None else {name for name in listed if listed[name] == shard}
        # A second copy may be of another time: which one is meant, only the index says.
        for name in sorted(wanted ^ found):
            says = (listed or {}).get(name, "nowhere")
            has = "missing" if name in wanted else "here"
            raise CheckpointError(
                path, f"tensor {name} is {has}, {index.name} says it is in {says}"
            )
        for name in sorted(found):
            yield name, functools.partial(_read_tensor, path, file, name)


def _read_tensor(path: pathlib.Path, file: Any, name: str) -> np.ndarray:
    with wrapped(f"{path}: tensor {name} is stored as {file.get_slice(name).get_dtype()}"):
        return file.get_tensor(name)  # fails for types that numpy lacks
