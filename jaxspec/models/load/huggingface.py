"""Networks of the Llama family from Hugging Face directories.

A directory holds `config.json`, the weights as `model.safetensors` or in shards that
`model.safetensors.index.json` lists, and mostly `tokenizer.json`. What this package's network does
not do is rejected with the field that asks for it, never ignored: `jaxspec.models.load.metadata` lists the
fields.

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

from jaxspec.checks import described
from jaxspec.extras import needs
from jaxspec.models.llama import LlamaConfig, llama, rope_frequencies
from jaxspec.models.load.chat import read_chat_template
from jaxspec.models.load.metadata import CONFIG, GENERATION, NO_EFFECT, check_keys, report
from jaxspec.models.load.special_tokens import end_tokens, read_description, token_ids
from jaxspec.models.load.swap import was_interrupted
from jaxspec.models.load.tensors import (
    MOST_CONTEXT,
    MOST_HEAD_WIDTH,
    CheckpointError,
    Fields,
    params_from_tensors,
    shown,
)
from jaxspec.models.load.tokenizers import TextTokenizer, open_tokenizer
from jaxspec.models.network import LanguageModel

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
    "MistralForCausalLM": {"sliding_window": 4096, "num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"sliding_window": 4096, "num_key_value_heads": 32},
}
"""What each says of fields that a `config.json` leaves out, as far as it matters here."""

_MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}

_ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "none": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    ),
}
"""What each rope type takes besides its base."""

_BUFFERS = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.original_inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".self_attn.bias",
    ".self_attn.masked_bias",
    ".position_ids",
)
"""What old checkpoints store besides the weights: RoPE's tables, masks and positions, all of which
follow from the config."""
_ROPE_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


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
      The network; its tokenizer, a `TextTokenizer`, is None where there is no `tokenizer.json`. Its
      `stop_tokens` are those of `config.json`, `generation_config.json` and `tokenizer_config.json`
      together. How to sample (temperature, top_k, top_p) is not taken from the files: a decoder's
      arguments say it.

    Raises:
      CheckpointError: what is missing, damaged or not supported, and in which file.
      ImportError: `safetensors`, or `tokenizers` for a directory with a tokenizer, is not installed.

    Warns:
      CheckpointWarning: once for each file that has keys this package does not know, or recommends
        sampling that this package does not have, such as a repetition penalty.
    """
    place = _folder(directory)
    config = load_config(place)
    identity = _identity(place)
    tensors = dict(_tensors(place))
    if config.is_tied and LAYOUT["head"] in tensors:
        # Some checkpoints store a tied embedding twice.
        head = tensors.pop(LAYOUT["head"])()
        if LAYOUT["embedding"] in tensors and not _equal(head, tensors[LAYOUT["embedding"]]()):
            raise CheckpointError(
                f"{place}: tie_word_embeddings is true, yet {LAYOUT['head']} is not the embedding"
            )
    params = params_from_tensors(config, tensors, LAYOUT, dtype, os.fspath(place))
    tokenizer = _tokenizer(place, config.vocab)
    if _identity(place) != identity:
        raise CheckpointError(f"{place}: it was saved anew while it was loaded; load it again")
    return llama(
        config,
        params,
        name=place.resolve().name if name is None else name,
        tokenizer=tokenizer,
    )


def load_config(directory: str | os.PathLike[str]) -> LlamaConfig:
    """Read the sizes of a network from a directory's `config.json`.

    Args:
      directory: the directory.

    Raises:
      CheckpointError: there is no such directory, or a field is missing, or asks for something this
        package's network lacks.

    Warns:
      CheckpointWarning: once, naming fields that this package does not know.
    """
    path = _folder(directory) / "config.json"
    if was_interrupted(path):
        raise CheckpointError(
            f"{path}: it is missing, for saving to this folder was interrupted; save again"
        )
    stored = _read_json(path)
    kind = _architecture(path, stored)
    # Qwen2 has biases in attention, whatever a config says of them.
    by_kind = {"attention_bias": NO_EFFECT} if kind == "Qwen2ForCausalLM" else {}
    check_keys(path, stored, {**CONFIG, **by_kind})
    fields = Fields(path, {**_ARCHITECTURES[kind], **stored})
    layers = fields.whole("num_hidden_layers")
    _refuse_unsupported(fields, layers, is_qwen2=kind == "Qwen2ForCausalLM")
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_width = fields.whole("head_dim", None, least=2, most=MOST_HEAD_WIDTH)
    if head_width is None:
        if width % heads or width // heads > MOST_HEAD_WIDTH:
            raise CheckpointError(
                f"{path}: hidden_size {width} does not split into num_attention_heads {heads}, and "
                "there is no head_dim"
            )
        head_width = width // heads
    if head_width % 2:
        raise CheckpointError(
            f"{path}: head_dim is {head_width}, not even: half of a head turns with the other"
        )
    kv_heads = fields.whole("num_key_value_heads", None)
    try:
        return LlamaConfig(
            vocab=fields.whole("vocab_size"),
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_width=head_width,
            hidden=fields.whole("intermediate_size"),
            rope_frequencies=_rope_frequencies(fields, head_width),
            norm_epsilon=float(fields.number("rms_norm_eps", 1e-6)),
            max_context=fields.whole("max_position_embeddings", None, most=MOST_CONTEXT),
            has_biases=kind == "Qwen2ForCausalLM",
            is_tied=fields.truth("tie_word_embeddings", False),
        )
    except CheckpointError:
        raise
    except (ArithmeticError, ValueError) as error:
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


def _folder(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Return the path of a directory that is there."""
    try:
        place = pathlib.Path(directory)
    except TypeError as error:
        raise CheckpointError(
            f"directory is {described(directory)}: must be the path of a folder"
        ) from error
    if os.path.isfile(place):  # unlike its method, False for a name that no file can have
        raise CheckpointError(
            f"{place}: it is a file, and a folder with config.json and the weights is wanted (a GGUF "
            "file is read by load_gguf)"
        )
    if not os.path.exists(place):
        raise CheckpointError(f"{place}: there is no such folder; nothing is downloaded")
    return place


def _identity(place: pathlib.Path) -> tuple[int, int] | None:
    """Return what changes when a directory is saved anew: then its config is moved out and in."""
    try:
        found = os.stat(place / "config.json")
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _architecture(path: pathlib.Path, stored: Mapping[str, Any]) -> str:
    """Return which of the known architectures a config describes."""
    named: Any = stored.get("architectures")
    kind: Any = stored.get("model_type")
    # One by one: what is in the list may be anything, also what no dict can look up.
    by_type = _MODEL_TYPES[kind] if kind in tuple(_MODEL_TYPES) else None
    if named in (None, []) and by_type is not None:
        return by_type
    is_known = isinstance(named, list) and len(named) == 1 and named[0] in tuple(_ARCHITECTURES)
    if not is_known:
        raise CheckpointError(
            f"{path}: architectures is {shown(named)}, model_type {shown(kind)}; this package has "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if by_type is not None and by_type != named[0]:
        raise CheckpointError(
            f"{path}: architectures is {shown(named)}, yet model_type {shown(kind)} is that of "
            f"{by_type}"
        )
    if by_type is None and kind is not None:
        report(
            f"{path}: model_type is {shown(kind)}, which this package does not know; the file is "
            f"read as architectures says, as {named[0]}"
        )
    return named[0]


def _refuse_unsupported(fields: Fields, layers: int, *, is_qwen2: bool) -> None:
    """Raise for the first field that asks for what the network does not do."""
    kinds = fields.texts("layer_types", None)
    if kinds is not None and len(kinds) != layers:
        raise fields.refusal(
            "layer_types", f"of {len(kinds)} layers, not num_hidden_layers {layers}"
        )
    window = fields.whole("sliding_window", None)
    # Qwen2 names a window that it uses only if it also says so, and only in layers from a number on,
    # or in those that layer_types names; a window no text outgrows is none.
    is_windowed = fields.truth("use_sliding_window", not is_qwen2) and window is not None
    if is_windowed and is_qwen2:
        is_windowed = kinds is None and fields.whole("max_window_layers", 28, least=0) < layers
    if is_windowed:
        is_windowed = window < (fields.whole("max_position_embeddings", None) or math.inf)
    unsupported = {
        "hidden_act": (fields.values.get("hidden_act") or "silu") not in ("silu", "swish"),
        "sliding_window": bool(is_windowed),
        "layer_types": any(kind != "full_attention" for kind in kinds or []),
    }
    for field, is_unsupported in unsupported.items():
        if is_unsupported:
            raise fields.refusal(field, "which this package's network does not do")


def _rope_frequencies(fields: Fields, head_width: int) -> tuple[float, ...]:
    """Return the frequencies that a config asks for.

    They stand at the top and in `rope_scaling`, or, as newer files have it, in `rope_parameters`.
    """
    places = [fields.inner(name) for name in ("rope_scaling", "rope_parameters")]
    old, new = (
        {name: value for name, value in place.items() if value is not None} for place in places
    )
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise CheckpointError(
                f"{fields.path}: {name} is {shown(old[name])} in rope_scaling, {shown(new[name])} in "
                "rope_parameters"
            )
    rope = old | new
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS or rope.get("type", kind) != kind:
        also = f" and {shown(rope['type'])}" if "type" in rope and "rope_type" in rope else ""
        raise CheckpointError(
            f"{fields.path}: rope type is {shown(kind)}{also}; this package has default, linear, "
            "llama3"
        )
    for field in sorted(rope.keys() - _ROPE_ALWAYS - _ROPE_FIELDS[kind]):
        raise CheckpointError(
            f"{fields.path}: {field} is {shown(rope[field])}, which rope type {kind} does not take; "
            "rope_type must say what it is for"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{fields.path}: partial_rotary_factor is {shown(rope['partial_rotary_factor'])}, which "
            "this package's network does not do"
        )
    scaling = Fields(f"{fields.path}: rope type {kind}", rope)
    base = (scaling if "rope_theta" in rope else fields).number("rope_theta", 10000.0)
    frequencies = rope_frequencies(head_width, float(base))
    if kind == "linear":
        factor = scaling.number("factor")
        return tuple(frequency / factor for frequency in frequencies)
    if kind == "llama3":
        low = scaling.number("low_freq_factor")
        return llama3_frequencies(
            frequencies,
            factor=scaling.number("factor"),
            low=low,
            high=scaling.number("high_freq_factor", above=low),
            context=scaling.number("original_max_position_embeddings"),
        )
    return frequencies


def _tensors(place: pathlib.Path) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield each tensor of a directory: its name and a function that reads it."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(needs("reading weights", "safetensors", "models")) from error
    index = place / "model.safetensors.index.json"
    whole = place / "model.safetensors"
    listed: dict[str, str] | None = None  # the shard of each tensor
    if not whole.is_file():
        if not index.is_file():
            raise CheckpointError(
                f"{place}: there is neither {whole.name} nor {index.name}; weights in another format "
                "must be saved as safetensors first"
            )
        listed = _listed(index)
    for shard in [whole.name] if listed is None else sorted(set(listed.values())):
        path = place / shard
        _assert_file(path)
        try:
            file = safetensors.safe_open(path, framework="np")
            found = {name for name in file.keys() if not name.endswith(_BUFFERS)}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        if listed is not None:
            wanted = {name for name, where in listed.items() if where == shard}
            for name in sorted(wanted - found):
                raise CheckpointError(
                    f"{path}: tensor {name} is missing, {index.name} says it is here"
                )
            # A second one may be of another time: which is meant, only the index says.
            for name in sorted(found - wanted):
                says = f"says it is in {listed[name]}" if name in listed else "does not list it"
                raise CheckpointError(f"{path}: tensor {name} is here, yet {index.name} {says}")
        for name in sorted(found):
            yield name, functools.partial(_read_tensor, path, file, name)


def _listed(index: pathlib.Path) -> dict[str, str]:
    """Return the file of each tensor that an index lists, all of them in its own directory."""
    listed = Fields(index, _read_json(index)).get(
        "weight_map", None, lambda value: isinstance(value, dict), "an object of file names"
    )
    if listed is None:
        raise CheckpointError(f"{index}: weight_map is missing")
    for name, shard in listed.items():
        is_plain = isinstance(shard, str) and not set(shard) & set("/\\\0")
        if not is_plain or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map puts tensor {name} into {shown(shard)}, which is not the name "
                "of a safetensors file in this directory"
            )
    return {name: shard for name, shard in listed.items() if not name.endswith(_BUFFERS)}


def _read_tensor(path: pathlib.Path, file: Any, name: str) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except Exception as error:  # for a type that numpy lacks the library trips over that
        kind = file.get_slice(name).get_dtype()
        raise CheckpointError(
            f"{path}: tensor {name} is stored as {kind}, which cannot be read: {error}"
        ) from error


def _tokenizer(place: pathlib.Path, vocab: int) -> TextTokenizer | None:
    """Read a directory's tokenizer and the ids that begin and end its texts, if it has one.

    An id ends a text if any of the files that name such ids says so.
    """
    named = {"config.json": _read_json(place / "config.json")}
    if os.path.lexists(generation := place / "generation_config.json"):
        named[generation.name] = _read_json(generation)
        check_keys(generation, named[generation.name], GENERATION)
    path = place / "tokenizer.json"
    if not os.path.lexists(path):
        return None
    _assert_file(path)
    stop: set[int] = set()
    for name, stored in named.items():
        stop |= token_ids(place / name, "eos_token_id", stored.get("eos_token_id"), vocab)
    tokenizer = open_tokenizer(path)
    start: tuple[int, ...] = ()
    described = place / "tokenizer_config.json"
    if os.path.lexists(described):
        also, start = read_description(described, _read_json(described), tokenizer, vocab)
        stop |= also
    mapped = place / "special_tokens_map.json"  # of older checkpoints
    if os.path.lexists(mapped):
        stop |= end_tokens(mapped, _read_json(mapped), tokenizer, vocab)
    return TextTokenizer(
        tokenizer,
        stop,
        start_tokens=start,
        vocab=vocab,
        chat_template=read_chat_template(place),
    )


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Read a file that holds one object."""
    _assert_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not an object")
    return content


def _assert_file(path: pathlib.Path) -> None:
    """Raise unless a path leads to a file; a pipe would be waited for, a device read without end."""
    if not path.is_file():
        what = "not a file" if path.exists() else "there is no such file"
        raise CheckpointError(f"{path}: {what}")
