"""Hugging Face directories: logits that torch computed from them, and what is rejected."""

import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.checkpoints import LLAMA, QWEN2, change, copied, logits_of

from jaxspec.models import CheckpointError, CheckpointWarning, load_huggingface, rope_frequencies
from jaxspec.models.load.huggingface import LAYOUT, load_config
from jaxspec.models.load.tensors import params_from_tensors

safetensors = pytest.importorskip("safetensors.numpy")
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def llama(tmp_path):
    return copied(LLAMA, tmp_path / "llama")


@pytest.fixture
def qwen2(tmp_path):
    return copied(QWEN2, tmp_path / "qwen2")


def edit_tensors(directory, edit, file="model.safetensors"):
    tensors = safetensors.load_file(directory / file)
    edit(tensors)
    safetensors.save_file(tensors, directory / file)


def assert_rejected(directory, message):
    with pytest.raises(CheckpointError, match=message):
        load_huggingface(directory)


@pytest.mark.parametrize("directory", [LLAMA, QWEN2], ids=lambda path: path.name)
def test_logits_are_those_that_transformers_computed(directory):
    model = load_huggingface(directory)
    stored = np.load(directory / "reference.npz")
    found = logits_of(model, stored["tokens"])
    np.testing.assert_allclose(found, stored["logits"], atol=1e-3, rtol=0)
    assert model.name == directory.name
    assert model.max_context == 64
    assert model.tokenizer is None


def test_bfloat16_weights_are_loaded_bit_for_bit_and_widened_exactly():
    whole, half = (
        load_huggingface(LLAMA, dtype=dtype).params for dtype in (jnp.float32, jnp.bfloat16)
    )
    stored = safetensors.load_file(LLAMA / "model-00002-of-00002.safetensors")
    np.testing.assert_array_equal(half.norm, stored[NORM])
    for wide, narrow in zip(jax.tree.leaves(whole), jax.tree.leaves(half), strict=True):
        assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_array_equal(wide, narrow.astype(jnp.float32))


def test_networks_compute_in_float32_or_bfloat16_alone():
    for dtype, message in (
        (jnp.float16, "dtype is float16, must be float32 or bfloat16"),
        (jnp.int8, "dtype is int8, must be float32 or bfloat16"),
        ("bf16", "dtype is 'bf16': "),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_huggingface(QWEN2, dtype=dtype)


KEY_BIAS = "model.layers.1.self_attn.k_proj.bias"
OUTPUT_BIAS = "model.layers.1.self_attn.o_proj.bias"
THIRD_LAYER = "model.layers.2.mlp.up_proj.weight"


def test_tensors_that_do_not_fit_the_config_are_rejected_by_name(qwen2):
    whole = safetensors.load_file(qwen2 / "model.safetensors")
    norm, head = whole[NORM], whole["model.embed_tokens.weight"] + 1
    for changes, message in (
        ({KEY_BIAS: ...}, rf"tensor {KEY_BIAS} of shape \(4,\) is missing"),
        ({OUTPUT_BIAS: norm}, rf"this network has no tensor {OUTPUT_BIAS} \(8,\)"),
        ({THIRD_LAYER: norm}, f"this network has no tensor {THIRD_LAYER}"),
        ({NORM: norm[:7].copy()}, rf"tensor {NORM}: shape \(7,\), its config wants \(8,\)"),
        ({NORM: norm.astype(np.int8)}, f"tensor {NORM}: stored as int8"),
        ({NORM: np.full_like(norm, np.nan)}, f"tensor {NORM}: an entry is not finite"),
        ({NORM: norm.astype(jnp.float8_e5m2)}, rf"tensor {NORM}( is|:) stored as (F8_E|float8_e)"),
        ({"lm_head.weight": head}, "embeddings are tied, yet lm_head.weight is not the embedding"),
    ):
        tensors = {name: x for name, x in (whole | changes).items() if x is not ...}
        safetensors.save_file(tensors, qwen2 / "model.safetensors")
        assert_rejected(qwen2, message)

    # Floats of 8 bits also where the library can read them.
    read = {name: lambda x=x: x for name, x in whole.items()}
    read[NORM] = lambda: norm.astype(jnp.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=f"here: tensor {NORM}: stored as float8_e4m3fn"):
        params_from_tensors(load_config(QWEN2), read, LAYOUT, jnp.float32, "here")


def test_what_old_and_careful_checkpoints_also_store_is_no_fault(qwen2):
    def edit(tensors):
        for buffer in ("inv_freq", "cos_cached", "sin_cached"):
            tensors[f"model.layers.0.self_attn.rotary_emb.{buffer}"] = np.ones(1, np.float32)
        tensors["model.rotary_emb.inv_freq"] = np.ones(1, np.float32)
        tensors["model.layers.1.self_attn.bias"] = np.ones((1, 1, 4, 4), np.bool_)
        tensors["model.layers.1.self_attn.masked_bias"] = np.ones((), np.float32)
        tensors["model.embeddings.position_ids"] = np.arange(64)[None]
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    edit_tensors(qwen2, edit)
    found, expected = load_huggingface(qwen2).params, load_huggingface(QWEN2).params
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_shards_and_their_index_must_agree(llama):
    index = json.loads((llama / INDEX).read_text())["weight_map"]
    shard = index[NORM]
    other = next(each for each in sorted(set(index.values())) if each != shard)
    for weight_map in (
        ...,
        None,
        [NORM],
        shard,
        index | {NORM: "../other/model.safetensors"},
        index | {NORM: "/model.safetensors"},
        index | {NORM: 5},
        index | {NORM: None},
    ):
        change(llama / INDEX, weight_map=weight_map)
        assert_rejected(llama, r"index\.json: weight_map is .*must be an object")
    change(llama / INDEX, weight_map=index)
    edit_tensors(llama, lambda tensors: tensors.update({NORM: np.ones(8, np.float32)}), other)
    assert_rejected(llama, rf"{other}: tensor {NORM} is here, {INDEX} says it is in {shard}")
    edit_tensors(llama, lambda tensors: tensors.pop(NORM), other)
    edit_tensors(llama, lambda tensors: tensors.pop(NORM), shard)
    assert_rejected(llama, f"{shard}: tensor {NORM} is missing")
    (llama / shard).unlink()
    assert_rejected(llama, f"{shard}: there is no such file")


def test_weights_that_are_torn_or_in_another_format_are_rejected(qwen2):
    path = qwen2 / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert_rejected(qwen2, r"model\.safetensors: .")
    path.rename(qwen2 / "pytorch_model.bin")
    assert_rejected(qwen2, r"neither model\.safetensors nor .*index\.json")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is .'GPT2LMHeadModel'."),
        ({"architectures": ..., "model_type": "gpt2"}, "architectures is None, model_type 'gpt2'"),
        ({"architectures": ["MistralForCausalLM"]}, "'MistralFor.*, model_type 'llama'"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; this package has silu or swish"),
        ({"attention_bias": True}, "attention_bias is True; this package has no support"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5; this package has 1"),
        ({"num_local_experts": 8}, "num_local_experts is 8; this package has no support"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .'bits': 4."),
        ({"sliding_window": 32}, "sliding_window is 32, shorter than the context"),
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
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*sliding_att"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* for each of 2 layers"),
        ({"hidden_size": ...}, "hidden_size is missing, must be an integer >= 1"),
        ({"vocab_size": "24"}, "vocab_size is '24', must be an integer >= 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, must be an integer >= 1"),
        ({"max_position_embeddings": 1 << 31}, "an integer from 1 to 2147483647"),
        ({"num_attention_heads": 3, "head_dim": ...}, "hidden_size is 8, not .*_heads 3 times"),
        ({"hidden_size": 1 << 60, "head_dim": ...}, "hidden_size is 1152921504606846976, not num"),
        ({"num_key_value_heads": 3}, "4 heads"),
        ({"head_dim": 5}, "head_dim is 5, must be even"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, must be a finite number > 0"),
        ({"tie_word_embeddings": "false"}, "is 'false', must be true or false"),
        ({"rope_parameters": 500.0}, "rope_parameters is 500.0, must be an object"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}}, "RoPE type is 'dynamic'"),
        ({"rope_parameters": ..., "rope_scaling": {"factor": 4.0}}, "factor is 4.0, which RoPE"),
        ({"rope_parameters": {"rope_type": "linear"}}, "RoPE type linear: factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor is -2.0"),
        (
            {"rope_parameters": {"rope_type": "linear", "type": "llama3", "factor": 2.0}},
            "RoPE type is 'linear' and 'llama3'",
        ),
        (
            {"rope_scaling": {"rope_theta": 5.0}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_theta is 5.0 in rope_scaling, 10000.0 in rope_parameters",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_the_network_does_not_do_is_rejected_by_the_field_that_asks_for_it(
    llama, fields, message
):
    change(llama / "config.json", **fields)
    assert_rejected(llama, rf"config\.json: .*{message}")


def test_high_and_low_frequencies_of_llama3_must_be_in_order(llama):
    rope = json.loads((llama / "config.json").read_text())["rope_parameters"]
    change(llama / "config.json", rope_parameters=rope | {"high_freq_factor": 1.0})
    assert_rejected(llama, "high_freq_factor is 1.0, must be > low_freq_factor 1.0")


def test_more_layers_than_there_are_tensors_are_rejected_at_once(qwen2):
    change(qwen2 / "config.json", num_hidden_layers=3_000_000_000, layer_types=...)
    assert_rejected(qwen2, "3000000000 layers in only")


def test_a_window_that_is_never_reached_or_not_used_is_no_window(llama):
    qwen2 = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}
    for fields in (
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 64},
        qwen2 | {"use_sliding_window": False},
        qwen2 | {"use_sliding_window": None},
        qwen2 | {"sliding_window": None},
        qwen2,  # the first 28 layers have none where nothing else is said
        qwen2 | {"max_window_layers": 0, "layer_types": ["full_attention"] * 2},
    ):
        copied(LLAMA, llama)
        change(llama / "config.json", architectures=None, **fields)
        assert load_config(llama).max_context == 64


def test_what_changes_nothing_or_is_null_is_loaded_without_a_warning(qwen2):
    for fields in (
        {"architectures": ...},
        {"rms_norm_eps": 1, "rope_parameters": {"rope_theta": 10000}},
        {"tie_word_embeddings": True, "mlp_bias": None, "hidden_act": None, "rope_scaling": None},
        {"num_key_value_heads": 2, "head_dim": None, "layer_types": None, "model_type": None},
        {"attention_bias": True},  # Qwen2 has them in any case
        {"use_mrope": False, "auto_map": None},  # the first is in Qwen 2.5's own files
        {"torch_dtype": "bfloat16", "pretraining_tp": 2, "temperature": 0.6, "max_length": 20},
    ):
        copied(QWEN2, qwen2)
        change(qwen2 / "config.json", **fields)
        assert load_config(qwen2).vocab == 24


def test_old_and_new_files_have_the_scaling_of_rope_in_different_places(llama):
    path, new = llama / "config.json", load_config(llama)
    rope = json.loads(path.read_text())["rope_parameters"]
    base = rope.pop("rope_theta")
    change(path, rope_parameters=..., rope_theta=base, rope_scaling=rope)
    assert load_config(llama) == new
    change(path, rope_theta=100.0, rope_scaling={"type": "linear", "factor": 4})
    linear = load_config(llama).rope_frequencies
    np.testing.assert_allclose(np.multiply(linear, 4), rope_frequencies(8, 100.0))


def test_unknown_keys_and_advice_that_is_not_followed_are_reported_once_for_each_file(qwen2):
    change(qwen2 / "config.json", warp_factor=9, layer_norm_eps=1e-5, model_type="qwen2.5")
    change(qwen2 / "generation_config.json", repetition_penalty=1.05, temperature=0.7, top_k=20)
    with pytest.warns(CheckpointWarning) as found:
        load_huggingface(qwen2)
    assert [str(each.message).split("/")[-1] for each in found] == [
        "config.json: architectures is ['Qwen2ForCausalLM'], model_type 'qwen2.5', which this "
        "package does not know; architectures is followed",
        "config.json: unknown keys, which may change the network or its text: 'warp_factor' (9), "
        "'layer_norm_eps' (1e-05)",
        "generation_config.json: sampling recommendations that are not applied: "
        "repetition_penalty (1.05)",
    ]
    assert {os.path.basename(each.filename) for each in found} == {os.path.basename(__file__)}


def test_what_a_generation_config_forbids_is_rejected_without_a_tokenizer_too(qwen2):
    for fields in (
        {"suppress_tokens": [3]},
        {"forced_eos_token_id": 3},
        {"no_repeat_ngram_size": 2},
        {"stop_strings": ["A"]},
    ):
        (name, value), path = next(iter(fields.items())), qwen2 / "generation_config.json"
        path.write_text(json.dumps(fields))
        assert_rejected(qwen2, re.escape(f"{path}: {name} is {value}; this package has"))


PUBLISHED = {
    "SmolLM2": """_name_or_path architectures attention_bias attention_dropout bos_token_id
        eos_token_id hidden_act hidden_size initializer_range intermediate_size is_llama_config
        max_position_embeddings mlp_bias model_type num_attention_heads num_hidden_layers
        num_key_value_heads pad_token_id pretraining_tp rms_norm_eps rope_interleaved rope_scaling
        rope_theta tie_word_embeddings torch_dtype transformers_version transformers.js_config
        use_cache vocab_size""",
    "Qwen2.5": """architectures attention_dropout bos_token_id eos_token_id hidden_act hidden_size
        initializer_range intermediate_size max_position_embeddings max_window_layers model_type
        num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_theta
        sliding_window tie_word_embeddings torch_dtype transformers_version use_cache
        use_sliding_window vocab_size""",
}


def test_the_keys_of_published_checkpoints_are_known(qwen2):
    config = json.loads((qwen2 / "config.json").read_text())
    for keys in PUBLISHED.values():
        # Switches are off; what is in no table would be reported.
        numbers = {"rope_theta": 1e4, "max_window_layers": 2, "sliding_window": 64}
        fields = dict.fromkeys(keys.split(), False) | {"rope_scaling": {}} | numbers | config
        (qwen2 / "config.json").write_text(json.dumps(fields))
        load_huggingface(qwen2)
    keys = "bos_token_id pad_token_id do_sample eos_token_id temperature top_p top_k"
    (qwen2 / "generation_config.json").write_text(json.dumps(dict.fromkeys(keys.split(), 1)))
    load_huggingface(qwen2)


@pytest.mark.parametrize(
    "file",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", INDEX],
)
def test_a_file_that_is_not_the_json_it_must_be_is_rejected_by_its_name(llama, file):
    pytest.importorskip("tokenizers")
    if file == "tokenizer_config.json":
        vocab = {"a": 0}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
        (llama / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
    for content in (
        b"",
        b"{",
        b"[]",
        b'"a"',
        b'{"a": "\xff"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' * 100_000 + b"24" + b"}" * 100_000,
        b"[" * 100_000,
    ):
        (llama / file).write_bytes(content)
        assert_rejected(llama, rf"/llama/{re.escape(file)}: .{{5,400}}$")
    (llama / file).unlink()
    if file != INDEX:  # looked for as a file, to tell whether there is one
        os.mkfifo(llama / file)
        assert_rejected(llama, rf"/{file}: not a file")
        (llama / file).unlink()
        (llama / file).symlink_to("nowhere")
        assert_rejected(llama, rf"/{file}: there is no such file")


def test_what_is_no_folder_is_rejected_with_its_path(qwen2):
    file = qwen2 / "model.safetensors"
    assert_rejected(file, re.escape(f"{file}: a file, must be a folder with config.json"))
    for gone in (str(qwen2 / "gone"), "a\0b", "a" * 300):
        assert_rejected(gone, re.escape(f"{gone}: there is no such folder"))
    assert_rejected(None, "directory: None, must be the path")


def test_without_safetensors_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"safetensors: pip install -e '\.\[models\]'"):
        load_huggingface(QWEN2)
