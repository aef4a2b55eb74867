"""Hugging Face directories: logits that torch computed from them, and what is refused."""

import json
import math
import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.llama import rope_frequencies
from jaxspec.models.load.huggingface import (
    LAYOUT,
    llama3_frequencies,
    load_config,
    load_huggingface,
)
from jaxspec.models.load.tensors import CheckpointError, params_from_tensors

safetensors = pytest.importorskip("safetensors.numpy")

DATA = pathlib.Path(__file__).parent / "data"
LLAMA = DATA / "llama3_untied_sharded"  # bfloat16, two shards, scaled RoPE, heads of explicit width
QWEN2 = DATA / "qwen2_tied"  # float32, biases


@pytest.fixture
def llama_copy(tmp_path):
    return pathlib.Path(shutil.copytree(LLAMA, tmp_path / "llama"))


@pytest.fixture
def qwen2_copy(tmp_path):
    return pathlib.Path(shutil.copytree(QWEN2, tmp_path / "qwen2"))


def edit_config(directory, **fields):
    """Change fields; those of value `...` are taken out."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(directory, edit, file="model.safetensors"):
    tensors = safetensors.load_file(directory / file)
    edit(tensors)
    safetensors.save_file(tensors, directory / file)


@pytest.mark.parametrize("directory", [LLAMA, QWEN2], ids=lambda path: path.name)
def test_logits_are_those_that_transformers_computed(directory):
    model = load_huggingface(directory)
    stored = np.load(directory / "reference.npz")
    places = jnp.arange(len(stored["tokens"]), dtype=jnp.int32)
    found, _ = jax.jit(model.forward)(
        model.params,
        jnp.asarray(stored["tokens"], jnp.int32),
        places,
        places[None] <= places[:, None],
        model.init_cache(len(places)),
        jnp.int32(0),
    )
    np.testing.assert_allclose(found, stored["logits"], atol=1e-3, rtol=0)
    assert model.name == directory.name
    assert model.max_context == 64
    assert model.tokenizer is None


def test_bfloat16_weights_are_taken_bit_for_bit_and_widened_exactly():
    whole, half = (
        load_huggingface(LLAMA, dtype=dtype).params for dtype in (jnp.float32, jnp.bfloat16)
    )
    stored = safetensors.load_file(LLAMA / "model-00002-of-00002.safetensors")
    np.testing.assert_array_equal(half.norm, stored["model.norm.weight"])
    for wide, narrow in zip(jax.tree.leaves(whole), jax.tree.leaves(half), strict=True):
        assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_array_equal(wide, narrow.astype(jnp.float32))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (jnp.float16, "dtype is float16, must be float32 or bfloat16"),
        (jnp.int8, "dtype is int8, must be float32 or bfloat16"),
        ("half", "dtype is float16, must be"),
        ("bf16", "dtype is 'bf16': "),
    ],
    ids=str,
)
def test_networks_compute_in_float32_or_bfloat16_alone(dtype, message):
    with pytest.raises(CheckpointError, match=message):
        load_huggingface(QWEN2, dtype=dtype)


NORM = "model.norm.weight"
KEY_BIAS = "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(KEY_BIAS), rf"tensor {KEY_BIAS} of shape \(4,\) is missing"),
        (
            lambda t: t.update({"model.layers.1.self_attn.o_proj.bias": t[NORM]}),
            r"takes tensor model.layers.1.self_attn.o_proj.bias \(8,\)",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[NORM]}),
            "takes tensor model.layers.2.mlp.up_proj.weight",
        ),
        (
            lambda t: t.update({NORM: t[NORM][:7].copy()}),
            rf"tensor {NORM} has shape \(7,\), its config wants \(8,\)",
        ),
        (
            lambda t: t.update({NORM: t[NORM].astype(np.int8)}),
            rf"tensor {NORM} is stored as int8",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            "tie_word_embeddings is true, yet lm_head.weight is not the embedding",
        ),
    ],
    ids=["missing", "bias of the output", "layer too many", "shape", "integers", "not tied"],
)
def test_tensors_that_do_not_fit_the_config_are_refused_by_name(qwen2_copy, edit, message):
    edit_tensors(qwen2_copy, edit)
    with pytest.raises(CheckpointError, match=message):
        load_huggingface(qwen2_copy)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_weights_of_8_bits_are_refused_by_name(qwen2_copy, kind):
    kind = jnp.dtype(kind)
    edit_tensors(qwen2_copy, lambda tensors: tensors.update({NORM: tensors[NORM].astype(kind)}))
    with pytest.raises(CheckpointError, match=rf"tensor {NORM} is stored as (F8_E|float8_e)"):
        load_huggingface(qwen2_copy)

    # Also where the library can read them.
    config = load_config(QWEN2)
    tensors = safetensors.load_file(QWEN2 / "model.safetensors")
    tensors[NORM] = tensors[NORM].astype(kind)
    read = {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=f"here: tensor {NORM} is stored as {kind.name}, not"):
        params_from_tensors(config, read, LAYOUT, jnp.float32, "here")


def test_what_old_and_careful_checkpoints_store_besides_is_no_fault(qwen2_copy):
    def edit(tensors):
        for buffer in ("inv_freq", "cos_cached", "sin_cached"):
            tensors[f"model.layers.0.self_attn.rotary_emb.{buffer}"] = np.ones(1, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.ones(1, np.float32)
        tensors["model.layers.1.self_attn.bias"] = np.ones((1, 1, 4, 4), np.bool_)
        tensors["model.layers.1.self_attn.masked_bias"] = np.ones((), np.float32)
        tensors["model.embeddings.position_ids"] = np.arange(64)[None]
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    edit_tensors(qwen2_copy, edit)
    found, expected = load_huggingface(qwen2_copy).params, load_huggingface(QWEN2).params
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_shard_that_is_not_there_or_lacks_what_the_index_says_is_refused(llama_copy):
    shard = llama_copy / "model-00002-of-00002.safetensors"
    edit_tensors(llama_copy, lambda tensors: tensors.pop(NORM), shard.name)
    with pytest.raises(CheckpointError, match=f"{shard.name}: tensor {NORM} is missing"):
        load_huggingface(llama_copy)
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_huggingface(llama_copy)


def edit_index(directory, edit):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


def test_a_tensor_is_read_from_its_own_shard_alone(llama_copy):
    index = json.loads((llama_copy / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(shard for shard in sorted(set(index.values())) if shard != index[NORM])
    edit_tensors(llama_copy, lambda tensors: tensors.update({NORM: np.ones(8, np.float32)}), other)
    with pytest.raises(CheckpointError, match=rf"{other}.*{NORM}"):
        load_huggingface(llama_copy)


@pytest.mark.parametrize("weight_map", [..., None, [NORM], "model.safetensors"])
def test_an_index_without_an_object_of_file_names_is_refused(llama_copy, weight_map):
    def edit(index):
        del index["weight_map"]
        if weight_map is not ...:
            index["weight_map"] = weight_map

    edit_index(llama_copy, edit)
    with pytest.raises(
        CheckpointError, match=r"index\.json: weight_map is (missing|.*not an object)"
    ):
        load_huggingface(llama_copy)


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/model.safetensors", 5, None])
def test_an_index_that_leads_out_of_its_directory_or_nowhere_is_refused(llama_copy, shard):
    edit_index(llama_copy, lambda index: index["weight_map"].update({NORM: shard}))
    with pytest.raises(CheckpointError, match=r"index\.json: .*weight_map"):
        load_huggingface(llama_copy)


def test_more_layers_than_there_are_tensors_are_refused_at_once(qwen2_copy):
    edit_config(qwen2_copy, num_hidden_layers=3_000_000_000, layer_types=...)
    with pytest.raises(CheckpointError, match="3000000000 layers, more than the"):
        load_huggingface(qwen2_copy)


def test_weights_that_are_not_finite_are_refused_by_name(qwen2_copy):
    def poison(tensors):
        tensors[NORM] = np.full_like(tensors[NORM], np.nan)

    edit_tensors(qwen2_copy, poison)
    with pytest.raises(CheckpointError, match=rf"{NORM}.*finite"):
        load_huggingface(qwen2_copy)


def test_a_file_that_is_cut_short_is_refused_by_name(qwen2_copy):
    path = qwen2_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_huggingface(qwen2_copy)


def test_weights_in_another_format_are_said_to_be(qwen2_copy):
    (qwen2_copy / "model.safetensors").rename(qwen2_copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*index\.json"):
        load_huggingface(qwen2_copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is .'GPT2LMHeadModel'."),
        ({"architectures": ..., "model_type": "gpt2"}, "architectures is None, model_type 'gpt2'"),
        ({"architectures": ..., "model_type": ...}, "architectures is None, model_type None"),
        ({"architectures": ["MistralForCausalLM"]}, "model_type 'llama' is that of LlamaForC"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 32}, "sliding_window is 32"),
        (
            {
                "architectures": None,
                "model_type": "qwen2",
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "sliding_window is 32",
        ),
        (
            {"architectures": [], "model_type": "mistral", "max_position_embeddings": 32768},
            "window is 4096",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types is \['full_attention', 'sliding_attention'\], which this",
        ),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types is .*network does not do"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types is .* of 1 layers, not num_hidden_la.* 2",
        ),
        (
            {"layer_types": "full_attention"},
            "layer_types is 'full_attention', not a list of strings",
        ),
        ({"layer_types": [0, 0]}, r"layer_types is \[0, 0\], not a list of strings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .'bits': 4."),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "rope type is 'yarn'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}}, "rope type is 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope type linear: factor is None, not a finite",
        ),
        ({"hidden_size": ...}, "hidden_size is None, not a whole number"),
        ({"vocab_size": "24"}, "vocab_size is '24', not a whole number"),
        (
            {"num_attention_heads": 3, "head_dim": ...},
            "8 does not split into num_attention_heads 3",
        ),
        ({"num_key_value_heads": 3}, "4 heads do not share 3"),
        ({"head_dim": 5}, "head_dim is 5, not even"),
        ({"head_dim": "4"}, "head_dim is '4', not a whole number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, not a finite number above 0"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings is '64', not a whole number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ({"rope_parameters": ..., "rope_scaling": {"factor": 4.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor is -2.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "type": "llama3", "factor": 2.0}},
            "rope type is 'linear' and 'llama3'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        ({"rope_parameters": 500.0}, "rope_parameters is 500.0, not an object"),
        ({"use_sliding_window": 1}, "use_sliding_window is 1, not true or false"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a whole number of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not a whole number"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is"),
        ({"architectures": ["LlamaForCausalLM"] * 2}, "architectures is"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_the_network_does_not_do_is_refused_by_the_field_that_asks_for_it(
    llama_copy, fields, message
):
    edit_config(llama_copy, **fields)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        load_config(llama_copy)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None},
        # The first 28 layers have none where nothing else is said.
        {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True},
        {
            "model_type": "qwen2",
            "sliding_window": 8,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["full_attention"] * 2,
        },
    ],
)
def test_a_window_that_is_never_reached_or_not_used_is_no_window(llama_copy, fields):
    edit_config(llama_copy, architectures=None, **fields)
    assert load_config(llama_copy).max_context == 64


@pytest.mark.parametrize("kinds", [None, ["full_attention"] * 2])
def test_layers_of_full_attention_may_be_named_one_by_one_or_not(llama_copy, kinds):
    edit_config(llama_copy, layer_types=kinds)
    assert load_config(llama_copy) == load_config(LLAMA)


def test_old_and_new_files_spell_the_scaling_of_rope_in_different_places(llama_copy):
    new = load_config(llama_copy)
    rope = json.loads((llama_copy / "config.json").read_text())["rope_parameters"]
    edit_config(
        llama_copy, rope_parameters=..., rope_theta=rope.pop("rope_theta"), rope_scaling=rope
    )
    assert load_config(llama_copy) == new

    edit_config(llama_copy, rope_theta=100.0, rope_scaling={"type": "linear", "factor": 4})
    linear = load_config(llama_copy).rope_frequencies
    np.testing.assert_allclose(np.multiply(linear, 4), rope_frequencies(8, 100.0))


def test_llama3_leaves_fast_turns_and_slows_slow_ones_by_the_factor():
    turns = np.array([5.0, 4.0, 2.5, 1.0, 0.2])  # within the old context of 1000 positions
    old = turns * 2 * math.pi / 1000
    new = llama3_frequencies(tuple(old), factor=8, low=1, high=4, context=1000)
    half_way = 0.5 + 0.5 / 8
    np.testing.assert_allclose(new / old, [1, 1, half_way, 1 / 8, 1 / 8])


def test_a_missing_or_broken_config_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: not an object"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"vocab_size": 24',
        b'{"vocab_size": "\xff"}',
        b'{"vocab_size": ' + b"9" * 5000 + b"}",
        b'{"vocab_size": ' * 100_000 + b"24" + b"}" * 100_000,
        b"[" * 100_000,
    ],
    ids=["empty", "cut short", "not UTF-8", "digits without end", "deep objects", "deep lists"],
)
def test_what_is_no_json_or_too_deep_or_long_to_read_is_refused_by_name(llama_copy, content):
    for file, load in (
        ("config.json", load_config),
        ("model.safetensors.index.json", load_huggingface),
    ):
        before = (llama_copy / file).read_bytes()
        (llama_copy / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(llama_copy / file))}: ."):
            load(llama_copy)
        (llama_copy / file).write_bytes(before)


@pytest.mark.parametrize("load", [load_config, load_huggingface])
def test_what_is_no_folder_is_refused_with_its_path(load, qwen2_copy):
    file = qwen2_copy / "model.safetensors"
    wanted = re.escape(f"{file}: it is a file, and a folder with config.json and the weights is")
    with pytest.raises(CheckpointError, match=wanted):
        load(file)
    gone = qwen2_copy / "gone"
    with pytest.raises(CheckpointError, match=re.escape(f"{gone}: there is no such folder")):
        load(str(gone))
    with pytest.raises(CheckpointError, match="directory is None: must be the path"):
        load(None)


@pytest.fixture
def with_tokenizer(qwen2_copy):
    """Tokens are the bytes A to T, then a pair, then three that text spells out."""
    library = pytest.importorskip("tokenizers")
    pieces = {chr(65 + i): i for i in range(20)} | {"AB": 20}
    tokenizer = library.Tokenizer(library.models.BPE(pieces, [("A", "B")]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<start>", "<end>"])
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", 21)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.save(str(qwen2_copy / "tokenizer.json"))
    return qwen2_copy


def test_a_tokenizer_puts_its_start_token_keeps_special_tokens_whole_and_cuts_nothing(
    with_tokenizer,
):
    tokenizer = load_huggingface(with_tokenizer).tokenizer
    assert tokenizer.encode("CABBAC<end>D") == [21, 2, 20, 1, 0, 2, 22, 3]
    assert tokenizer.decode(tokenizer.encode("CABBAC<end>D")) == "<start>CABBAC<end>D"
    assert tokenizer.pieces[19:] == ("T", "AB", "<start>", "<end>")


def test_a_token_that_any_of_three_files_names_ends_a_text(with_tokenizer):
    def stop_tokens():
        return load_huggingface(with_tokenizer).tokenizer.stop_tokens

    generation = with_tokenizer / "generation_config.json"
    described = with_tokenizer / "tokenizer_config.json"
    assert stop_tokens() == {3}
    generation.write_text(json.dumps({"eos_token_id": [22, 5]}))
    assert stop_tokens() == {3, 5, 22}
    described.write_text(json.dumps({"eos_token": {"content": "AB", "lstrip": False}}))
    assert stop_tokens() == {3, 5, 20, 22}
    generation.unlink()
    edit_config(with_tokenizer, eos_token_id=-1)
    assert stop_tokens() == {20}
    described.write_text(json.dumps({"eos_token": "<end>"}))
    assert stop_tokens() == {22}
    (with_tokenizer / "special_tokens_map.json").write_text(json.dumps({"eos_token": "A"}))
    assert stop_tokens() == {0, 22}
    (with_tokenizer / "special_tokens_map.json").unlink()
    described.write_text(json.dumps({"eos_token": None}))
    assert stop_tokens() == frozenset()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("stored", "stop_tokens"),
    [(22, {22}), (0, {0}), ([22, 5, -1], {5, 22}), ([], set()), (None, set()), (-1, set())],
    ids=str,
)
def test_the_tokens_that_end_a_text_are_one_or_a_list_or_none(
    with_tokenizer, file, stored, stop_tokens
):
    edit_config(with_tokenizer, eos_token_id=...)
    (with_tokenizer / "generation_config.json").unlink(missing_ok=True)
    path = with_tokenizer / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | {"eos_token_id": stored}))
    assert load_huggingface(with_tokenizer).tokenizer.stop_tokens == stop_tokens


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("3", "'3'"),
        (True, "True"),
        (3.0, "3.0"),
        (-2, "-2"),
        (24, "24"),
        ([3, 24], "24"),
        ([3, None], "None"),
        ([[3]], r"\[3\]"),
        ({"id": 3}, r"\{'id': 3\}"),
    ],
    ids=str,
)
def test_an_end_of_text_that_is_no_token_of_the_network_is_refused_with_its_file(
    with_tokenizer, file, stored, shown
):
    edit_config(with_tokenizer, eos_token_id=...)
    (with_tokenizer / "generation_config.json").write_text("{}")
    content = json.loads((with_tokenizer / file).read_text())
    (with_tokenizer / file).write_text(json.dumps(content | {"eos_token_id": stored}))
    wanted = rf"/{file}: eos_token_id is {shown}, not a whole number from 0 to 23"
    with pytest.raises(CheckpointError, match=wanted):
        load_huggingface(with_tokenizer)


def test_a_character_that_a_checkpoint_has_no_token_for_is_refused_and_not_left_out(with_tokenizer):
    with pytest.raises(ValueError, match=r"text\[2\] is 'Z', which the tokenizer has no token for"):
        load_huggingface(with_tokenizer).tokenizer.encode("ABZA")


def test_a_broken_tokenizer_is_refused_by_name(with_tokenizer):
    (with_tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_huggingface(with_tokenizer)


@pytest.mark.parametrize("library", ["safetensors", "tokenizers"])
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    with_tokenizer, library, monkeypatch
):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library}: pip install -e '\.\[models\]'"):
        load_huggingface(with_tokenizer)
