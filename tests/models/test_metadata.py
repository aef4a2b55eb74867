"""Metadata of Hugging Face directories: read, rejected with its file and key, or reported once."""

import json
import os
import pathlib
import shutil
import warnings

import pytest

from jaxspec.models import CheckpointError, CheckpointWarning, load_config, load_huggingface
from jaxspec.models.load.metadata import CONFIG, GENERATION, TOKENIZER, check_keys

pytest.importorskip("safetensors")
library = pytest.importorskip("tokenizers")

STORED = pathlib.Path(__file__).parent / "data" / "qwen2_tied"


def change(path, **fields):
    """Change fields of a JSON file; those of value `...` are taken out."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= fields
    path.write_text(
        json.dumps({name: value for name, value in content.items() if value is not ...})
    )


@pytest.fixture
def folder(tmp_path):
    """A network of 24 tokens with a tokenizer of A to T, AB, <s>, </s>, <x> and two beyond them."""
    place = pathlib.Path(shutil.copytree(STORED, tmp_path / "model"))
    pieces = {chr(65 + i): i for i in range(20)} | {"AB": 20, "<x>": 23}
    pieces |= {"<s>": 21, "</s>": 22, "<fill>": 24, "<eot>": 25}
    tokenizer = library.Tokenizer(library.models.BPE(pieces, [("A", "B")]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<fill>", "<eot>"])
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def start_with(place, token):
    """Have `tokenizer.json` itself put a token before a text."""
    tokenizer = library.Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    tokenizer.save(str(place / "tokenizer.json"))


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"mlp_bias": True}, "mlp_bias is True; this package has False"),
        ("config.json", {"logit_scale": 0.5}, "logit_scale is 0.5; this package has 1"),
        ("config.json", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]"),
        ("config.json", {"num_local_experts": 8}, "num_local_experts is 8; this package has 0"),
        ("config.json", {"attn_logit_softcapping": 50.0}, "softcapping is 50.0; this package does"),
        ("config.json", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("config.json", {"is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ("config.json", {"text_config": {"vocab_size": 24}}, "text_config is {'vocab_size': 24}"),
        ("config.json", {"bad_words_ids": [[3]]}, r"bad_words_ids is \[\[3\]\]"),
        ("config.json", {"max_position_embeddings": 1 << 31}, "max_position_embeddings is 21474"),
        (
            "config.json",
            {"rope_scaling": {"rope_theta": 5.0}},
            "rope_theta is 5.0 in rope_scaling, 10000.0 in rope_parameters",
        ),
        ("generation_config.json", {"suppress_tokens": [3]}, r"suppress_tokens is \[3\]; this"),
        ("generation_config.json", {"forced_eos_token_id": 3}, "forced_eos_token_id is 3; this"),
        ("generation_config.json", {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size is 2; this"),
        ("generation_config.json", {"stop_strings": ["A"]}, r"stop_strings is \['A'\]; this"),
        ("tokenizer_config.json", {"add_eos_token": True}, "add_eos_token is True; this"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens is True"),
        ("tokenizer_config.json", {"add_bos_token": 1}, "add_bos_token is 1, not true or false"),
        ("tokenizer_config.json", {"add_bos_token": True}, "add_bos_token is True, yet bos_token"),
        ("tokenizer_config.json", {"add_prefix_space": True}, "is True, yet False in tokenizer"),
        (
            "tokenizer_config.json",
            {"eos_token": "<end>"},
            "eos_token is '<end>', which is not a tok",
        ),
        ("tokenizer_config.json", {"eos_token": 3}, "eos_token is 3, not the text of a token"),
        ("tokenizer_config.json", {"eos_token": {"text": "A"}}, "eos_token is {'text': 'A'}, not"),
        ("tokenizer_config.json", {"eos_token": "<eot>"}, "'<eot>', token 25, but the network has"),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": "<x>"},
            "additional_special_tokens is '<x>', not a list",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"23": {"content": "AB"}}},
            r"added_tokens_decoder\['23'\] is 'AB', which is token 20",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"23": {"content": "<x>", "lstrip": 1}}},
            r"added_tokens_decoder\['23'\] is .*, not the description",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_would_change_network_or_text_is_rejected_with_file_key_and_value(
    folder, file, fields, message
):
    change(folder / file, **fields)
    with pytest.raises(CheckpointError, match=f"/{file}: .*{message}"):
        load_huggingface(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ...},
        {"architectures": None},
        {"rms_norm_eps": 1, "rope_parameters": {"rope_theta": 10000}},
        {"tie_word_embeddings": True, "mlp_bias": None, "hidden_act": None, "rope_scaling": None},
        {"num_key_value_heads": 2, "head_dim": None, "layer_types": None, "model_type": None},
        {"attention_bias": True},  # Qwen2 has them in any case
        {"use_mrope": False, "auto_map": None},  # the first is in Qwen 2.5's own files
        {"torch_dtype": "bfloat16", "pretraining_tp": 2, "temperature": 0.6, "max_length": 20},
    ],
    ids=",".join,
)
def test_what_changes_nothing_or_is_null_is_loaded_without_a_word(folder, fields):
    change(folder / "config.json", **fields)
    assert load_config(folder).vocab == 24


def test_unknown_keys_and_advice_that_is_not_followed_are_reported_once_for_each_file(folder):
    change(folder / "config.json", warp_factor=9, layer_norm_eps=1e-5)
    change(folder / "generation_config.json", repetition_penalty=1.05, temperature=0.7, top_k=20)
    change(folder / "tokenizer_config.json", shrink=True)
    with pytest.warns(CheckpointWarning) as found:
        load_huggingface(folder)
    assert [str(each.message).split("/")[-1] for each in found] == [
        "config.json: unknown keys, which may change the network or its text: 'warp_factor' (9), "
        "'layer_norm_eps' (1e-05)",
        "generation_config.json: sampling recommendations that are not applied: "
        "repetition_penalty (1.05)",
        "tokenizer_config.json: unknown keys, which may change the network or its text: "
        "'shrink' (True)",
    ]
    assert {pathlib.Path(each.filename).name for each in found} == {pathlib.Path(__file__).name}


def test_what_a_generation_config_forbids_is_not_passed_over_for_want_of_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert load_huggingface(folder).tokenizer is None
    change(folder / "generation_config.json", suppress_tokens=[3])
    with pytest.raises(CheckpointError, match=r"generation_config\.json: suppress_tokens is \[3\]"):
        load_huggingface(folder)


def test_an_unknown_model_type_is_reported(folder):
    change(folder / "config.json", model_type="qwen2.5")
    with pytest.warns(CheckpointWarning, match="model_type is 'qwen2.5', which this package does"):
        load_config(folder)


def test_a_start_token_is_put_or_left_out_as_the_tokenizer_config_says(folder):
    def tokens(text):
        return load_huggingface(folder).tokenizer.encode(text)

    described = folder / "tokenizer_config.json"
    assert tokens("AC") == [0, 2]
    change(described, bos_token={"content": "<s>"}, add_bos_token=True)
    assert tokens("AC") == tokens("<s>AC") == [21, 0, 2]
    assert load_huggingface(folder).tokenizer.start_tokens == (21,)
    start_with(folder, "<s>")
    assert tokens("AC") == [21, 0, 2]
    change(described, add_bos_token=None)
    assert tokens("AC") == [21, 0, 2]
    change(described, add_bos_token=False)
    assert tokens("AC") == [0, 2]
    change(described, bos_token="<fill>", add_bos_token=True)
    with pytest.raises(CheckpointError, match="bos_token is '<fill>', token 24, but the network"):
        tokens("AC")


def test_tokens_that_the_tokenizer_config_describes_are_found_whole(folder):
    def tokens(text):
        return load_huggingface(folder).tokenizer.encode(text)

    with pytest.raises(ValueError, match=r"text\[1\] is '<', which"):
        tokens("A<x>B")
    described = folder / "tokenizer_config.json"
    change(described, additional_special_tokens=["<x>", "<unseen>"], pad_token="[PAD]")
    assert tokens("A<x>B") == [0, 23, 1]
    described.write_text('{"added_tokens_decoder": {"23": {"content": "<x>", "special": false}}}')
    assert tokens("A<x>B") == [0, 23, 1]


def test_tokens_beyond_the_networks_vocabulary_load_and_are_an_error_in_a_prompt(folder):
    tokenizer = load_huggingface(folder).tokenizer
    assert tokenizer.encode("AB</s>") == [20, 22]
    with pytest.raises(ValueError, match="'<fill>', token 24, but the network has a vocabulary of"):
        tokenizer.encode("A<fill>B")


@pytest.mark.parametrize(
    "content",
    [b"", b'{"a": "\xff"}', b'{"a": "\0"}', b'{"a": ' * 100_000, b"[" * 5_000, b"[]", b'"a"', b"{"],
    ids=["empty", "not UTF-8", "NUL", "deep", "deep lists", "list", "string", "cut short"],
)
@pytest.mark.parametrize(
    "file",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"],
)
def test_a_file_that_is_not_the_json_it_must_be_is_refused_by_its_name(folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"/model/{file}: .{{5,400}}$"):
        load_huggingface(folder)


@pytest.mark.parametrize("token", [1 << 31, 5_000_000])
def test_an_id_far_beyond_all_tokens_is_refused_before_the_library_counts_up_to_it(folder, token):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["AB"] = token
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"token 'AB' has id {token}, far beyond its 26 tok"):
        load_huggingface(folder)


@pytest.mark.parametrize(
    "file",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"],
)
def test_a_pipe_is_not_waited_for_and_a_link_to_nowhere_not_passed_over(folder, file):
    path = folder / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=rf"/{file}: not a file"):
        load_huggingface(folder)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"/{file}: there is no such file"):
        load_huggingface(folder)


@pytest.mark.parametrize("name", ["a\0b", "a" * 300])
def test_a_name_that_no_folder_can_have_is_no_folder(name):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        load_huggingface(name)


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
TOKENIZERS = {
    "Llama 3.1": """added_tokens_decoder bos_token chat_template clean_up_tokenization_spaces
        eos_token model_input_names model_max_length tokenizer_class""",
    "Qwen2.5": """add_bos_token add_prefix_space added_tokens_decoder additional_special_tokens
        bos_token chat_template clean_up_tokenization_spaces eos_token errors model_max_length
        pad_token split_special_tokens tokenizer_class unk_token""",
    "Mistral": """add_bos_token add_eos_token added_tokens_decoder additional_special_tokens
        bos_token chat_template clean_up_tokenization_spaces eos_token legacy model_max_length
        pad_token sp_model_kwargs spaces_between_special_tokens tokenizer_class unk_token
        use_default_system_prompt""",
    "SmolLM2": """add_prefix_space added_tokens_decoder additional_special_tokens bos_token
        chat_template clean_up_tokenization_spaces eos_token model_max_length pad_token
        tokenizer_class unk_token vocab_size""",
}


@pytest.mark.parametrize(
    ("table", "keys"),
    [(CONFIG, keys) for keys in PUBLISHED.values()]
    + [(TOKENIZER, keys) for keys in TOKENIZERS.values()]
    + [(GENERATION, "bos_token_id pad_token_id do_sample eos_token_id temperature top_p top_k")],
)
def test_the_keys_of_published_checkpoints_are_known(table, keys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_keys("file", dict.fromkeys(keys.split()), table)
    # A null of any key says nothing: that they are in the table must be seen by itself.
    assert [key for key in keys.split() if key not in table] == []
