"""GGUF files written here from a stored network, as converters write them."""

import collections
import functools
import struct
import sys
import tracemalloc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.checkpoints import LLAMA, logits_of

from jaxspec.models import (
    CheckpointError,
    CheckpointWarning,
    load_gguf,
    load_huggingface,
    rope_frequencies,
)
from jaxspec.models.load.gguf import LAYOUT
from jaxspec.models.load.huggingface import LAYOUT as HUGGINGFACE

gguf = pytest.importorskip("gguf")
safetensors = pytest.importorskip("safetensors.numpy")

FREQUENCIES = rope_frequencies(8, 500.0)
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
ENTRIES = [*"ABCĠ12", "AB", "<|im_end|>"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ENTRIES,
    "tokenizer.ggml.token_type": [1] * 7 + [3],
    "tokenizer.ggml.merges": ["A B"],
    "tokenizer.ggml.eos_token_id": 7,
}


def neighbours(rows, heads):
    """Order each head's rows so that the two parts of a pair are neighbours."""
    width = rows.shape[0] // heads
    order = [part * width // 2 + pair for pair in range(width // 2) for part in range(2)]
    return rows.reshape(heads, width, -1)[:, order].reshape(rows.shape)


def config_of(model):
    return model.forward.args[0]


@functools.cache
def converted():
    stored = {}
    for shard in LLAMA.glob("*.safetensors"):
        stored |= safetensors.load_file(shard)
    tensors = {}
    for field, name in LAYOUT.items():
        for layer in range(2) if "{layer}" in name else [None]:
            tensor = stored[HUGGINGFACE[field].format(layer=layer)].astype(np.float32)
            if field in ("query", "key"):
                tensor = neighbours(tensor, 4 if field == "query" else 2)
            tensors[name.format(layer=layer)] = tensor
    scaled = config_of(load_huggingface(LLAMA)).rope_frequencies
    tensors["rope_freqs.weight"] = np.divide(FREQUENCIES, scaled).astype(np.float32)
    return tensors


def write(path, metadata, tensors=None, kind="llama", quantised=None):
    """Write a file; what is None is left out, `quantised` is stored in 8-bit blocks."""
    writer = gguf.GGUFWriter(path, kind)
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in (METADATA | metadata).items():
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in (converted() | (tensors or {})).items():
        if name == quantised:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, q8), raw_dtype=q8)
        elif tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_rejected(path, message):
    with pytest.raises(CheckpointError, match=rf"{path.name}: .*{message}"):
        load_gguf(path)


def test_a_file_gives_the_network_that_it_was_converted_from(tmp_path):
    found, expected = load_gguf(write(tmp_path / "small.gguf", TOKENIZER)), load_huggingface(LLAMA)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    np.testing.assert_allclose(
        logits_of(found, [3, 1, 4, 1, 5]), logits_of(expected, [3, 1, 4, 1, 5]), atol=1e-4
    )
    assert found.max_context == expected.max_context
    assert found.name == "small"


def test_rows_are_in_the_file_as_neighbouring_pairs():
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of width 4: parts 0 1 and 2 3
    assert neighbours(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_without_an_output_tensor_the_embedding_is_the_output_layer(tmp_path):
    path = write(tmp_path / "tied.gguf", {}, {"output.weight": None})
    model = load_gguf(path, dtype=jnp.bfloat16)
    assert model.params.head is None
    assert model.params.embedding.dtype == jnp.bfloat16
    assert model.tokenizer is None


def test_linear_scaling_slows_every_frequency_whichever_key_says_so(tmp_path):
    for scaling, factor in (
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4),
        ({"scaling.factor": 4.0}, 4),  # linear is the default
        ({"scale_linear": 4.0}, 4),  # the key of old files
        ({"scaling.type": "linear", "scale_linear": 4.0, "scaling.factor": 4.0}, 4),
        ({"scaling.factor": 0.0}, 1),  # stands for none
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1),
        ({"scaling.original_context_length": 32, "scaling.finetuned": True}, 1),
    ):
        metadata = {f"llama.rope.{key}": value for key, value in scaling.items()}
        model = load_gguf(write(tmp_path / "a.gguf", metadata, {"rope_freqs.weight": None}))
        found = np.multiply(config_of(model).rope_frequencies, factor)
        np.testing.assert_allclose(found, FREQUENCIES, err_msg=str(scaling))


def test_neutral_values_load_without_a_warning_and_unknown_keys_are_reported_once(tmp_path):
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
    old = {"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}
    path = write(tmp_path / "a.gguf", TOKENIZER | neutral, old)
    assert load_gguf(path).vocab == 24
    odd = {"llama.warp_factor": 9, "tokenizer.ggml.shrink": True}
    with pytest.warns(CheckpointWarning) as found:
        load_gguf(write(path, TOKENIZER | odd))
    assert [str(each.message) for each in found] == [
        f"{path}: unknown keys, which may change the network or its text: {key}"
        for key in ("'llama.warp_factor' (9)", "'tokenizer.ggml.shrink' (True)")
    ]


def test_strings_that_nothing_reads_may_be_in_any_encoding(tmp_path):
    path = write(tmp_path / "a.gguf", {"general.author": "somebody"})
    path.write_bytes(path.read_bytes().replace(b"somebody", b"s\xffmebody"))
    assert load_gguf(path).vocab == 24


def test_quantised_weights_are_expanded(tmp_path):
    rng, name = np.random.default_rng(0), "blk.1.ffn_down.weight"
    down = rng.normal(size=(8, 32)).astype(np.float32)
    wide = {
        f"blk.{i}.ffn_{part}.weight": np.ones((32, 8), np.float32)
        for i in range(2)
        for part in ("gate", "up")
    }
    wide |= {"blk.0.ffn_down.weight": down, name: down}
    path = tmp_path / "q8.gguf"
    model = load_gguf(write(path, {"llama.feed_forward_length": 32}, wide, quantised=name))
    assert 0 < np.abs(model.params.layers[1].down - down).max() < 0.02
    np.testing.assert_array_equal(model.params.layers[0].down, down)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8; this package has no support"),
        ({"llama.rope.scaling.attn_factor": 0.7}, r"attn_factor is 0.69\d*; this package has 1"),
        ({"llama.attention.causal": False}, "attention.causal is False; this package has True"),
        ({"split.count": 2}, "split.count is 2; this package has 0 or 1"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4, must be 8"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length is 4, must be 8"),
        ({"llama.vocab_size": 25}, "vocab_size is 25, must be 24"),
        ({"llama.attention.scale": 0.5}, "attention.scale is 0.5, must be 0.353553"),
        ({"llama.attention.sliding_window": 32}, "sliding_window is 32, shorter than the context"),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv is \[2, 4\], must be an int"),
        ({"llama.attention.head_count_kv": 3}, "4 heads"),
        ({"llama.block_count": None}, "llama.block_count is missing, must be an integer"),
        ({"llama.block_count": 3}, "tensor blk.2.attn_norm.weight of shape .* is missing"),
        ({"llama.block_count": 4_278_190_081}, "4278190081 layers in only"),
        ({"llama.context_length": 1 << 31}, "context_length is 2147483648, must be an integer"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon is missing, must be a finite"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is nan, must be a finite number"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "factor is None, but .*type is 'linear'"),
        (
            {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
            "factor is 4.0, yet llama.rope.scale_linear is 2.0",
        ),
        ({"general.alignment": 24}, "general.alignment is 24, must be a power of two"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_the_network_does_not_do_is_rejected_by_the_key_that_asks(tmp_path, metadata, message):
    assert_rejected(write(tmp_path / "odd.gguf", metadata), message)


def test_another_architecture_and_a_file_that_is_none_are_rejected_by_name(tmp_path):
    path = write(tmp_path / "bloom.gguf", {}, kind="bloom")
    assert_rejected(path, r"general\.architecture is 'bloom'")
    path.write_bytes(b"not this")
    assert_rejected(path, "not a GGUF file")
    assert_rejected(tmp_path / "none.gguf", "there is no such file")
    with pytest.raises(CheckpointError, match="None: not a GGUF file"):
        load_gguf(None)


def test_tensors_that_do_not_fit_the_metadata_are_rejected_by_name(tmp_path):
    norm, factors, ones = "output_norm.weight", "rope_freqs.weight", np.ones(8, np.float32)
    for name, tensor, message in (
        ("token_embd.weight", None, "token_embd.weight is missing"),
        (norm, None, rf"{norm} of shape \(8,\) is missing"),
        (norm, np.ones(8, np.int8), f"{norm} is .* of type I8"),
        (norm, np.nan * ones, f"{norm}: .*not finite"),
        ("output_norm.bias", ones, r"no tensor output_norm.bias \(8,\)"),
        ("blk.0.attn_q.weight", np.ones((24, 8), np.float32), r"attn_q.weight: shape \(24, 8\)"),
        ("blk.1.attn_k.weight", np.ones((15, 8), np.float32), r"attn_k.weight: shape \(15, 8\)"),
        (factors, ones[:3], rf"{factors}: shape \(3,\), its metadata wants \(4,\)"),
        (factors, 0 * ones[:4], f"{factors}: an entry is not > 0 and finite"),
        (factors, np.inf * ones[:4], "an entry is not > 0 and finite"),
    ):
        assert_rejected(write(tmp_path / "odd.gguf", {}, {name: tensor}), message)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"merges": None}, "merges is missing, must be a list of strings"),
        ({"merges": ["A B", "AB"]}, "merge 1 is 'AB', must be two vocabulary entries that make a"),
        ({"merges": ["A B 1"]}, "merge 0 is 'A B 1', must be two"),
        ({"merges": ["B A"]}, "merge 0 is 'B A', must be two"),
        ({"tokens": list(range(8))}, r"tokens is \[0, 1, .*\], must be a list of strings"),
        ({"tokens": [*ENTRIES[:-1], "A"]}, "vocabulary entries repeat"),
        ({"token_type": [1, 3]}, r"token_type is \[1, 3\], must be 8 kinds"),
        ({"token_type": [1] * 7 + [9]}, "token_type is .*, must be 8 kinds from 0 to 6"),
        ({"token_type": [True] * 8}, "token_type is .*, must be 8 kinds"),
        ({"add_bos_token": True}, "add_bos_token is True, yet there is no start token"),
        ({"add_eos_token": True}, "add_eos_token is True; this package has no support"),
        ({"suppress_tokens": [3]}, r"suppress_tokens is \[3\]; this package has no support"),
        ({"eos_token_id": 24}, "eos_token_id is 24, must be an integer from 0 to 23"),
        ({"eos_token_id": [7]}, r"eos_token_id is \[7\], must be an integer"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_tokenizer_that_contradicts_itself_is_rejected_by_the_key(tmp_path, metadata, message):
    metadata = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    assert_rejected(write(tmp_path / "odd.gguf", TOKENIZER | metadata), message)


def tokenizer_of(path, **changes):
    changes = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return load_gguf(write(path, TOKENIZER | changes)).tokenizer


def test_text_is_cut_as_the_file_says_with_special_tokens_whole(tmp_path):
    path = tmp_path / "t.gguf"
    ours = tokenizer_of(path)
    assert ours.encode("ABBA 12<|im_end|>") == [6, 1, 0, 3, 4, 5, 7]
    assert ours.decode([6, 1, 0, 3, 4, 5, 7]) == "ABBA 12<|im_end|>"
    assert list(ours.pieces) == ENTRIES
    for other in ({"pre": "qwen2"}, {"pre": ["smollm"]}, {"pre": None}, {"model": "llama"}):
        assert tokenizer_of(path, **other) is None
    digits = {"tokens": ["1", "2", "12"], "merges": ["1 2"], "token_type": [1, 1, 1]}
    for cut, expected in (("smollm", [0, 1]), ("gpt-2", [2])):
        assert tokenizer_of(path, pre=cut, **digits).encode("12") == expected


def test_end_tokens_are_those_that_the_file_names(tmp_path):
    for metadata, stop_tokens in (
        ({}, {7}),
        ({"eos_token_id": 23}, {23}),  # an id without text
        ({"eos_token_id": None}, set()),
        ({"eos_token_id": 0xFFFFFFFF}, set()),  # -1, written as an unsigned number
        ({"eot_token_id": 5, "eom_token_id": 4}, {4, 5, 7}),
    ):
        tokenizer = tokenizer_of(tmp_path / "t.gguf", **metadata)
        assert tokenizer.stop_tokens == stop_tokens
        assert tokenizer.encode("AB<|im_end|>") == [6, 7]
    tokenizer = tokenizer_of(tmp_path / "t.gguf", token_type=None)  # no token is special
    with pytest.raises(ValueError, match=r"no token for: \['<', "):
        tokenizer.encode("AB<|im_end|>")


def test_user_defined_and_special_tokens_are_found_whole_and_a_start_token_is_put(tmp_path):
    tokenizer = tokenizer_of(
        tmp_path / "a.gguf",
        tokens=[*ENTRIES, "<unk>", "<call>", *(f"[{i}]" for i in range(10, 30))],
        token_type=[1] * 7 + [3, 2] + [4] * 21,
        bos_token_id=7,
        add_bos_token=True,
    )
    assert tokenizer.encode("A<call>B<unk>A", add_special_tokens=False) == [0, 9, 1, 8, 0]
    assert tokenizer.encode("AB") == tokenizer.encode("<|im_end|>AB") == [7, 6]
    assert tokenizer.decode([0, 9, 1]) == "A<call>B"
    assert tokenizer.encode("A[23]") == [7, 0, 23]
    with pytest.raises(ValueError, match=r"'\[24\]', token 24, but the network has a vocabulary"):
        tokenizer.encode("A[24]")


def key(name):
    return struct.pack("<Q", len(name)) + name


def value_of(name, kind):
    return key(name) + struct.pack("<I", kind)


MODEL = b"tokenizer.ggml.model"
NORM = key(b"output_norm.weight") + struct.pack("<IQ", 1, 8)
PAST = struct.pack("<Q", 1 << 60)
REPLACED = (
    # A list where a string is: its length reads as the type of the items, and `gpt2` as a count.
    (value_of(MODEL, 8), value_of(MODEL, 9), "tokenizer.ggml.model.* is "),
    (value_of(MODEL, 8), value_of(MODEL, 13), "model is of type 13, must be"),
    (b"gpt2", b"gp\xff2", "tokenizer.ggml.model is not UTF-8"),
    (MODEL, b"tokenizer.ggml.m\xffdel", "name of key .* is .*, must be UTF-8"),
    (NORM, NORM[:-8] + bytes(8), r"norm.weight has shape \(0,\): it is e"),
    (NORM, NORM[:-8] + PAST, "norm.weight: shape .* reaches beyond the file's end"),
    (NORM, NORM[:-12] + b"\x05\0\0\0" + NORM[-8:], "has 5 dimensions, must be 1 to 4"),
    (b"blk.1.attn_norm", b"blk.0.attn_norm", "tensor blk.0.attn_norm.weight: it is there twice"),
    (key(b"llama.rope.freq_base"), key(b"llama.context_length"), "context_length is there twice"),
)
CUT = (
    (lambda b: b[:8] + PAST + b[16:], "tensor_count is 1152921504606846976, more than the rest"),
    (lambda b: b[:16] + PAST + b[24:], "kv_count is 1152921504606846976, more than the rest"),
    (lambda b: b[:24] + PAST + b[32:], "length of key 0 is 1152921504606846976, more than"),
    (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "version is 50331648 .its bytes are in big"),
    (lambda b: b[:-40], "reaches beyond the file's end"),
    (lambda b: b[:700], "bytes, and .* are left of the file|more than the rest"),
    (lambda b: b"", "not a GGUF file: "),
)


def test_a_damaged_file_is_rejected_by_key_before_anything_of_its_size_is_made(tmp_path):
    path = write(tmp_path / "torn.gguf", TOKENIZER)
    whole = path.read_bytes()
    assert all(whole.count(old) == 1 for old, _, _ in REPLACED)
    damaged = [(whole.replace(old, new), message) for old, new, message in REPLACED]
    for content, message in damaged + [(cut(whole), message) for cut, message in CUT]:
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises((CheckpointError, CheckpointWarning), match=rf"torn\.gguf: .*{message}"):
            load_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()


def test_a_flipped_byte_gives_a_network_or_the_documented_error(tmp_path):
    path = write(tmp_path / "torn.gguf", TOKENIZER)
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
