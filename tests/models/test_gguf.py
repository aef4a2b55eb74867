"""GGUF files written here from a stored network, as converters write them."""

import collections
import pathlib
import struct
import sys
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.llama import rope_frequencies
from jaxspec.models.load.gguf import LAYOUT, load_gguf
from jaxspec.models.load.huggingface import LAYOUT as HUGGINGFACE
from jaxspec.models.load.huggingface import load_config, load_huggingface
from jaxspec.models.load.metadata import CheckpointWarning
from jaxspec.models.load.tensors import CheckpointError

gguf = pytest.importorskip("gguf")
safetensors = pytest.importorskip("safetensors.numpy")

STORED = pathlib.Path(__file__).parent / "data" / "llama3_untied_sharded"
CONFIG = load_config(STORED)
METADATA = {
    "llama.embedding_length": 8,
    "llama.block_count": 2,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 8,
    "llama.attention.value_length": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.context_length": 64,
    "llama.rope.freq_base": 500.0,
    "llama.rope.dimension_count": 8,
}
PIECES = [*"ABCĠ12", "AB", "<|im_end|>"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": [1] * 7 + [3],
    "tokenizer.ggml.merges": ["A B"],
    "tokenizer.ggml.eos_token_id": 7,
}


def neighbours(rows, heads):
    """Order each head's rows so that the two parts of a pair are neighbours."""
    width = rows.shape[0] // heads
    order = [part * width // 2 + pair for pair in range(width // 2) for part in range(2)]
    return rows.reshape(heads, width, -1)[:, order].reshape(rows.shape)


def stored_tensors():
    stored = {}
    for shard in STORED.glob("*.safetensors"):
        stored |= safetensors.load_file(shard)
    tensors = {}
    for field, name in LAYOUT.items():
        for layer in range(CONFIG.layers) if "{layer}" in name else [None]:
            tensor = stored[HUGGINGFACE[field].format(layer=layer)].astype(np.float32)
            if field in ("query", "key"):
                tensor = neighbours(tensor, 4 if field == "query" else 2)
            tensors[name.format(layer=layer)] = tensor
    plain = rope_frequencies(8, 500.0)
    tensors["rope_freqs.weight"] = np.divide(plain, CONFIG.rope_frequencies).astype(np.float32)
    return tensors


def write(path, tensors, metadata, kind="llama", quantised=None):
    """Write a file; fields of value None are left out, `quantised` tensors as 8-bit blocks."""
    writer = gguf.GGUFWriter(path, kind)
    for key, value in metadata.items():
        match value:
            case str():
                writer.add_string(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)
    for name, tensor in tensors.items():
        if name == quantised:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_gives_the_network_that_it_was_converted_from(tmp_path):
    path = write(tmp_path / "small.gguf", stored_tensors(), METADATA | TOKENIZER)
    found, expected = load_gguf(path), load_huggingface(STORED)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    ours, theirs = found.forward.args[0], expected.forward.args[0]
    np.testing.assert_allclose(ours.rope_frequencies, theirs.rope_frequencies, rtol=1e-6)
    for field in (
        "heads",
        "kv_heads",
        "head_width",
        "is_tied",
        "has_biases",
        "max_context",
        "vocab",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.norm_epsilon == pytest.approx(1e-6)
    assert found.name == "small"


def test_rows_stand_in_the_file_as_neighbouring_pairs():
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of width 4: parts 0 1 and 2 3
    assert neighbours(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_without_an_output_tensor_the_embedding_is_the_output_layer(tmp_path):
    tensors = stored_tensors()
    del tensors["output.weight"]
    model = load_gguf(write(tmp_path / "tied.gguf", tensors, METADATA), dtype=jnp.bfloat16)
    assert model.params.head is None
    assert model.params.embedding.dtype == jnp.bfloat16
    assert model.tokenizer is None


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4),
        ({"scaling.factor": 4.0}, 4),  # linear is the default
        ({"scale_linear": 4.0}, 4),  # the key of old files
        ({"scaling.type": "linear", "scale_linear": 4.0, "scaling.factor": 4.0}, 4),
        ({"scaling.factor": 0.0}, 1),  # stands for none
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1),
        ({"scaling.original_context_length": 32, "scaling.finetuned": True}, 1),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_linear_scaling_slows_every_turn_whichever_key_says_so(tmp_path, scaling, factor):
    tensors = stored_tensors()
    del tensors["rope_freqs.weight"]
    scaling = {f"llama.rope.{key}": value for key, value in scaling.items()}
    config = load_gguf(write(tmp_path / "a.gguf", tensors, METADATA | scaling)).forward.args[0]
    found = np.multiply(config.rope_frequencies, factor)
    np.testing.assert_allclose(found, rope_frequencies(8, 500.0))


def test_neutral_values_load_without_a_word_and_unknown_keys_are_reported_once(tmp_path):
    neutral = {
        "general.file_type": 1,
        "general.author": "somebody",
        "general.sampling.temp": 0.5,
        "llama.vocab_size": 24,
        "llama.attention.sliding_window": 64,
        "llama.attention.scale": 8**-0.5,
        "llama.attention.head_count": [4, 4],
        "llama.logit_scale": 1.0,
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scaling.attn_factor": 1.0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": "{{ messages }}",
        "quantize.imatrix.file": "somewhere",
    }
    tensors = stored_tensors()
    tensors["blk.0.attn_rot_embd.weight"] = np.ones(4, np.float32)
    path = write(tmp_path / "a.gguf", tensors, METADATA | TOKENIZER | neutral)
    assert load_gguf(path).vocab == 24
    odd = {"llama.warp_factor": 9, "tokenizer.ggml.shrink": True}
    with pytest.warns(CheckpointWarning) as found:
        load_gguf(write(path, tensors, METADATA | TOKENIZER | odd))
    assert [str(each.message) for each in found] == [
        f"{path}: unknown keys, which may change the network or its text: {key}"
        for key in ("'llama.warp_factor' (9)", "'tokenizer.ggml.shrink' (True)")
    ]


def test_user_defined_and_special_tokens_are_found_whole_and_a_start_token_is_put(tmp_path):
    changes = {
        "tokenizer.ggml.tokens": [*PIECES, "<unk>", "<call>"],
        "tokenizer.ggml.token_type": [1] * 7 + [3, 2, 4],
        "tokenizer.ggml.bos_token_id": 7,
        "tokenizer.ggml.add_bos_token": True,
    }
    path = write(tmp_path / "a.gguf", stored_tensors(), METADATA | TOKENIZER | changes)
    tokenizer = load_gguf(path).tokenizer
    assert tokenizer.encode("A<call>B<unk>A", add_special_tokens=False) == [0, 9, 1, 8, 0]
    assert tokenizer.encode("AB") == tokenizer.encode("<|im_end|>AB") == [7, 6]
    assert tokenizer.decode([0, 9, 1]) == "A<call>B"


def test_tokens_beyond_the_networks_vocabulary_load_and_are_an_error_in_a_prompt(tmp_path):
    changes = {
        "tokenizer.ggml.tokens": [*PIECES, *(f"[{i}]" for i in range(8, 30))],
        "tokenizer.ggml.token_type": [1] * 7 + [3] + [4] * 22,
    }
    path = write(tmp_path / "a.gguf", stored_tensors(), METADATA | TOKENIZER | changes)
    tokenizer = load_gguf(path).tokenizer
    assert tokenizer.encode("A[23]") == [0, 23]
    with pytest.raises(
        ValueError, match=r"'\[24\]', token 24, but the network has a vocabulary of"
    ):
        tokenizer.encode("A[24]")


def test_quantised_weights_are_expanded(tmp_path):
    rng = np.random.default_rng(0)
    wide = METADATA | {"llama.feed_forward_length": 32}
    tensors = stored_tensors()
    for layer in range(2):
        tensors[f"blk.{layer}.ffn_gate.weight"] = np.ones((32, 8), np.float32)
        tensors[f"blk.{layer}.ffn_up.weight"] = np.ones((32, 8), np.float32)
        tensors[f"blk.{layer}.ffn_down.weight"] = rng.normal(size=(8, 32)).astype(np.float32)
    name = "blk.1.ffn_down.weight"
    model = load_gguf(write(tmp_path / "q8.gguf", tensors, wide, quantised=name))
    found = model.params.layers[1].down
    assert 0 < np.abs(found - tensors[name]).max() < 0.02


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8; this package has 0"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4; this package has 8"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length is 4"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv is \[2, 4\], not a whole"),
        ({"llama.attention.head_count_kv": 3}, "4 heads do not share 3"),
        ({"llama.block_count": None}, "llama.block_count is None, not a whole"),
        ({"llama.block_count": 1}, "takes tensor blk.1.attn_norm.weight"),
        ({"llama.block_count": 3}, "tensor blk.2.attn_norm.weight of shape"),
        ({"llama.attention.key_length": 4}, "this package has 4"),
        (
            {"llama.block_count": 4_278_190_081},
            "block_count is 4278190081, not a whole number from 1",
        ),
        ({"llama.block_count": 2.0}, "block_count is 2.0, not a whole number"),
        ({"llama.rope.freq_base": -1.0}, "freq_base is -1.0, not a finite number above 0"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is nan, not a finite number"),
        ({"llama.context_length": 64.5}, "context_length is 64.5, not a whole number"),
        (
            {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
            "factor is 4.0, yet llama.rope.scale_linear is 2.0",
        ),
        ({"llama.rope.scaling.type": "linear"}, "factor is None, but .*type is 'linear'"),
        ({"llama.attention.sliding_window": 32}, "sliding_window is 32; this package has 0"),
        ({"llama.attention.scale": 0.5}, "attention.scale is 0.5, and this package has 0.353553"),
        ({"llama.vocab_size": 25}, "vocab_size is 25; this package has 24"),
        ({"llama.context_length": 1 << 31}, "context_length is 2147483648, not a whole number"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamp_kqv is 8.0; this package has 0"),
        ({"llama.rope.scaling.attn_factor": 0.7}, r"attn_factor is 0.69\d*; this package has 1"),
        ({"llama.attention.causal": False}, "attention.causal is False; this package has True"),
        ({"split.count": 2}, "split.count is 2; this package has 0 or 1"),
        (
            {"llama.attention.layer_norm_rms_epsilon": None},
            "layer_norm_rms_epsilon is None, not a finite number",
        ),
        ({"llama.feed_forward_length": None}, "feed_forward_length is None, not a whole number"),
        ({"llama.context_length": None}, "context_length is None, not a whole number"),
    ],
)
def test_what_the_network_does_not_do_is_refused_by_the_field_that_asks(
    tmp_path, metadata, message
):
    path = write(tmp_path / "odd.gguf", stored_tensors(), METADATA | metadata)
    with pytest.raises(CheckpointError, match=rf"odd\.gguf.*{message}"):
        load_gguf(path)


def test_another_architecture_and_a_file_that_is_none_are_refused_by_name(tmp_path):
    path = write(tmp_path / "bloom.gguf", stored_tensors(), METADATA, kind="bloom")
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'bloom'"):
        load_gguf(path)
    path.write_bytes(b"not this")
    with pytest.raises(CheckpointError, match=r"bloom\.gguf: not a GGUF file"):
        load_gguf(path)
    with pytest.raises(CheckpointError, match=r"none\.gguf: not a GGUF file"):
        load_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("name", "shape"), [("blk.0.attn_q.weight", (24, 8)), ("blk.1.attn_k.weight", (15, 8))]
)
def test_queries_and_keys_of_a_wrong_shape_are_refused_by_name(tmp_path, name, shape):
    tensors = stored_tensors() | {name: np.zeros(shape, np.float32)}
    path = write(tmp_path / "odd.gguf", tensors, METADATA)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \({shape[0]}, 8\)"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("token_embd.weight", None, "token_embd.weight is missing"),
        ("output_norm.weight", None, r"output_norm.weight of shape \(8,\) is missing"),
        ("output_norm.weight", np.ones(8, np.int8), "output_norm.weight is .* quantised as I8"),
        ("output_norm.weight", np.full(8, np.nan, np.float32), "output_norm.weight .*not finite"),
        ("output_norm.bias", np.ones(8, np.float32), r"takes tensor output_norm.bias \(8,\)"),
        (
            "rope_freqs.weight",
            np.ones(3, np.float32),
            r"rope_freqs.weight has shape \(3,\), its metadata wants \(4,\)",
        ),
        ("rope_freqs.weight", np.zeros(4, np.float32), "rope_freqs.weight must be above 0"),
        ("rope_freqs.weight", np.full(4, np.inf, np.float32), "must be above 0 and finite"),
    ],
    ids=["embedding", "norm", "integers", "nan", "too many", "turns", "0 turns", "endless turns"],
)
def test_tensors_that_do_not_fit_the_metadata_are_refused_by_name(tmp_path, name, tensor, message):
    tensors = stored_tensors() | {name: tensor}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path = write(tmp_path / "odd.gguf", present, METADATA)
    with pytest.raises(CheckpointError, match=rf"odd\.gguf: .*{message}"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"merges": None}, "merges is None, not a list of strings"),
        ({"merges": "A B"}, "merges is 'A B', not a list of strings"),
        ({"merges": ["A B", "AB"]}, "not a pair encoding: merge 1 is 'AB', not two pieces"),
        ({"merges": ["A B 1"]}, "merge 0 is 'A B 1', not two pieces that make a third"),
        ({"merges": [""]}, "merge 0 is '', not two pieces"),
        ({"merges": ["B Z"]}, "merge 0 is 'B Z', not two pieces"),
        ({"tokens": None}, "tokens is None, not a list of strings"),
        ({"tokens": list(range(8))}, r"tokens is \[0, 1, .*\], not a list of strings"),
        ({"tokens": [*PIECES[:-1], "A"]}, "pieces repeat"),
        ({"token_type": 3}, "token_type is 3, not a list of 8 kinds"),
        ({"token_type": [1] * 7 + [9]}, "token_type is .*, not a list of 8 kinds from 0 to 6"),
        ({"add_bos_token": True}, "add_bos_token is True, yet there is no .*bos_token_id"),
        ({"add_eos_token": True}, "add_eos_token is True; this package has False"),
        ({"add_space_prefix": True}, "add_space_prefix is True; this package has False"),
        ({"suppress_tokens": [3]}, r"suppress_tokens is \[3\]; this package has \[\]"),
        ({"token_type": [1, 3]}, r"token_type is \[1, 3\], not a list of 8 kinds"),
        ({"eos_token_id": 24}, "eos_token_id is 24, not a whole number from 0 to 23"),
        ({"eos_token_id": [7]}, r"eos_token_id is \[7\], not a whole number"),
        ({"eos_token_id": "7"}, "eos_token_id is '7', not a whole number"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_tokenizer_that_does_not_hold_together_is_refused_by_the_field(
    tmp_path, metadata, message
):
    metadata = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    path = write(tmp_path / "odd.gguf", stored_tensors(), METADATA | TOKENIZER | metadata)
    with pytest.raises(CheckpointError, match=rf"odd\.gguf: .*{message}"):
        load_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "stop_tokens", "tokens"),
    [
        ({}, {7}, [6, 7]),
        ({"eos_token_id": 23}, {23}, [6, 7]),  # an id that stands for no text
        ({"eos_token_id": None}, set(), [6, 7]),
        ({"eos_token_id": 0xFFFFFFFF}, set(), [6, 7]),  # -1, written as an unsigned number
        ({"eot_token_id": 5, "eom_token_id": 4}, {4, 5, 7}, [6, 7]),
        ({"token_type": None}, {7}, None),  # nothing says that text spells it out
    ],
    ids=["as stored", "no text", "no end", "-1", "of turns and messages", "no kinds"],
)
def test_what_a_tokenizer_may_leave_out_is_not_made_up(tmp_path, metadata, stop_tokens, tokens):
    metadata = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    path = write(tmp_path / "t.gguf", stored_tensors(), METADATA | TOKENIZER | metadata)
    tokenizer = load_gguf(path).tokenizer
    assert tokenizer.stop_tokens == stop_tokens
    if tokens is not None:
        assert tokenizer.encode("AB<|im_end|>") == tokens
    else:
        with pytest.raises(ValueError, match=r"text\[2\] is '<'"):
            tokenizer.encode("AB<|im_end|>")


def test_text_is_cut_as_the_file_says_with_special_tokens_whole(tmp_path):
    def tokenizer(**changes):
        return load_gguf(
            write(tmp_path / "t.gguf", stored_tensors(), METADATA | TOKENIZER | changes)
        ).tokenizer

    ours = tokenizer()
    assert ours.encode("ABBA 12<|im_end|>") == [6, 1, 0, 3, 4, 5, 7]
    assert ours.decode([6, 1, 0, 3, 4, 5, 7]) == "ABBA 12<|im_end|>"
    assert list(ours.pieces) == PIECES
    assert ours.stop_tokens == {7}
    assert tokenizer(**{"tokenizer.ggml.pre": "qwen2"}) is None
    assert tokenizer(**{"tokenizer.ggml.pre": ["smollm"]}) is None
    assert tokenizer(**{"tokenizer.ggml.pre": None}) is None
    assert tokenizer(**{"tokenizer.ggml.model": "llama"}) is None


def test_digits_stand_alone_only_where_the_file_says_so(tmp_path):
    pieces = ["1", "2", "12"]
    metadata = TOKENIZER | {"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.merges": ["1 2"]}
    metadata |= {"tokenizer.ggml.token_type": [1, 1, 1]}
    for cut, expected in (("smollm", [0, 1]), ("gpt-2", [2])):
        path = tmp_path / f"{cut}.gguf"
        write(path, stored_tensors(), METADATA | metadata | {"tokenizer.ggml.pre": cut})
        assert load_gguf(path).tokenizer.encode("12") == expected


def replaced(content, old, new):
    assert content.count(old) == 1
    return content.replace(old, new)


def key(name):
    return struct.pack("<Q", len(name)) + name


def value_of(name, kind):
    return key(name) + struct.pack("<I", kind)


MODEL = b"tokenizer.ggml.model"
NORM = key(b"output_norm.weight") + struct.pack("<IQ", 1, 8)
PAST = struct.pack("<Q", 1 << 60)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        # A list where a string is: its length reads as the type of the items, and `gpt2` as a count.
        (
            lambda b: replaced(b, value_of(MODEL, 8), value_of(MODEL, 9)),
            "tokenizer.ggml.model.* is ",
        ),
        (
            lambda b: replaced(b, value_of(MODEL, 8), value_of(MODEL, 13)),
            "model is of type 13, not",
        ),
        (lambda b: replaced(b, b"gpt2", b"gp\xff2"), "tokenizer.ggml.model is not UTF-8"),
        (lambda b: replaced(b, MODEL, b"tokenizer.ggml.m\xffdel"), "name of key .* is not UTF-8"),
        (
            lambda b: replaced(b, NORM, NORM[:-8] + bytes(8)),
            r"norm.weight has shape \(0,\): it is e",
        ),
        (
            lambda b: replaced(b, NORM, NORM[:-8] + PAST),
            "norm.weight of shape .* reaches beyond the",
        ),
        (lambda b: replaced(b, NORM, NORM[:-12] + b"\x05\0\0\0" + NORM[-8:]), "has 5 dimensions"),
        (
            lambda b: replaced(b, b"blk.1.attn_norm", b"blk.0.attn_norm"),
            "tensor blk.0.attn_norm.weight is there twice",
        ),
        (
            lambda b: replaced(b, key(b"llama.rope.freq_base"), key(b"llama.context_length")),
            "key llama.context_length is there twice",
        ),
        (
            lambda b: b[:8] + PAST + b[16:],
            "tensor_count is 1152921504606846976, more than the rest",
        ),
        (lambda b: b[:16] + PAST + b[24:], "kv_count is 1152921504606846976, more than the rest"),
        (lambda b: b[:24] + PAST + b[32:], "length of key 0 is 1152921504606846976, more than"),
        (
            lambda b: b[:4] + struct.pack(">I", 3) + b[8:],
            "version is 50331648 .its bytes are in big",
        ),
        (lambda b: b[:-40], "reaches beyond the file's end"),
        (lambda b: b[:700], "bytes, and .* are left of the file|more than the rest"),
        (lambda b: b"", "not a GGUF file: "),
    ],
)
def test_a_damaged_file_is_refused_with_the_field_before_anything_of_its_size_is_made(
    tmp_path, damage, message
):
    tensors = stored_tensors()
    path = write(tmp_path / "torn.gguf", tensors, METADATA | TOKENIZER)
    path.write_bytes(damage(path.read_bytes()))
    tracemalloc.start()
    with pytest.raises((CheckpointError, CheckpointWarning), match=rf"torn\.gguf: .*{message}"):
        load_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_flipped_byte_gives_a_network_or_the_documented_error(tmp_path):
    tensors = stored_tensors()
    path = write(tmp_path / "torn.gguf", tensors, METADATA | TOKENIZER)
    whole = path.read_bytes()
    end = whole.index(NORM) + 400  # the header and a part of the tensors' list
    rng = np.random.default_rng(0)
    outcomes = collections.Counter()
    for place in rng.choice(end, 300, replace=False):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.integers(8)
        path.write_bytes(flipped)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            try:
                load_gguf(path)
                outcomes["network"] += 1
            except CheckpointError as error:
                assert str(path) in str(error)
                assert len(str(error)) < 1000
                outcomes["error"] += 1
    assert outcomes["error"] > 100 and outcomes["network"] > 10


def test_a_library_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"gguf: pip install -e '.\[models\]'"):
        load_gguf(tmp_path / "any.gguf")
