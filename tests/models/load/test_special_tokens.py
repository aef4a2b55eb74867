"""Tokens that begin and end texts, and special tokens, as the files of a directory say."""

import json
import sys

import pytest
from helpers.checkpoints import QWEN2, change, copied

from jaxspec.models import CheckpointError, CheckpointWarning, load_huggingface

pytest.importorskip("safetensors")
library = pytest.importorskip("tokenizers")


@pytest.fixture
def folder(tmp_path):
    """A network of 24 tokens with a tokenizer of A to T, AB, <s>, </s>, <x> and two beyond them."""
    place = copied(QWEN2, tmp_path / "model")
    entries = {chr(65 + i): i for i in range(20)} | {"AB": 20, "<x>": 23}
    entries |= {"<s>": 21, "</s>": 22, "<fill>": 24, "<eot>": 25}
    tokenizer = library.Tokenizer(library.models.BPE(entries, [("A", "B")]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<fill>", "<eot>"])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def start_with(place, token):
    """Have `tokenizer.json` itself put a token before a text."""
    tokenizer = library.Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    tokenizer.save(str(place / "tokenizer.json"))


def tokenizer_of(place):
    return load_huggingface(place).tokenizer


def test_texts_are_encoded_whole_with_special_tokens_found_in_them(folder):
    start_with(folder, "<s>")
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("CABBAC</s>D") == [21, 2, 20, 1, 0, 2, 22, 3]
    assert tokenizer.decode(tokenizer.encode("CABBAC</s>D")) == "<s>CABBAC</s>D"
    assert tokenizer.pieces[19:] == ("T", "AB", "<s>", "</s>", "<x>")
    with pytest.raises(ValueError, match=r"the tokenizer has no token for: \['Z'\]; replace them"):
        tokenizer.encode("ABZA")


def test_a_token_that_any_file_names_ends_a_text(folder):
    config, generation = folder / "config.json", folder / "generation_config.json"
    described, mapped = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    assert tokenizer_of(folder).stop_tokens == {3}
    for path, key, value, stop in (
        (generation, "eos_token_id", [22, 5], {3, 5, 22}),
        (described, "eos_token", {"content": "AB", "lstrip": False}, {3, 5, 20, 22}),
        (config, "eos_token_id", -1, {5, 20, 22}),
        (mapped, "eos_token", "A", {0, 5, 20, 22}),
        (described, "eos_token", None, {0, 5, 22}),
        (mapped, "eos_token", "</s>", {5, 22}),
        (generation, "eos_token_id", [7, -1], {7, 22}),
        (generation, "eos_token_id", 0, {0, 22}),
        (generation, "eos_token_id", [], {22}),
        (generation, "eos_token_id", None, {22}),
        (mapped, "eos_token", ..., set()),
    ):
        change(path, **{key: value})
        assert tokenizer_of(folder).stop_tokens == stop, (path.name, value)


def test_an_end_token_that_the_network_does_not_have_is_rejected_with_its_file(folder):
    for value, shown in (
        ("3", "'3'"),
        (True, "True"),
        (3.0, "3.0"),
        (-2, "-2"),
        ([3, 24], "24"),
        ([3, None], "None"),
        ([[3]], r"\[3\]"),
    ):
        for file in ("config.json", "generation_config.json"):
            change(folder / file, eos_token_id=value)
            wanted = f"/{file}: eos_token_id is {shown}, must be an integer from 0 to 23"
            with pytest.raises(CheckpointError, match=wanted):
                load_huggingface(folder)
            change(folder / file, eos_token_id=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"add_eos_token": True}, "add_eos_token is True; this package has no support"),
        ({"add_bos_token": 1}, "add_bos_token is 1, must be true or false"),
        ({"add_bos_token": True}, "add_bos_token is True, yet there is no start token"),
        ({"bos_token": "<fill>", "add_bos_token": True}, "'<fill>', token 24, but the network has"),
        ({"add_prefix_space": True}, "add_prefix_space is True, yet False in tokenizer.json"),
        ({"eos_token": "<end>"}, "eos_token is '<end>', not a token of tokenizer.json"),
        ({"eos_token": 3}, "eos_token is 3, must be the text of a token"),
        ({"eos_token": {"text": "A"}}, "eos_token is {'text': 'A'}, must be"),
        ({"eos_token": "\ud800"}, "eos_token is .*, must be the text of a token"),
        ({"eos_token": "<eot>"}, "'<eot>', token 25, but the network has a vocabulary of 24"),
        (
            {"additional_special_tokens": "<x>"},
            "additional_special_tokens is '<x>', must be a list",
        ),
        (
            {"added_tokens_decoder": {"23": {"content": "AB"}}},
            r"added_tokens_decoder\['23'\] is 'AB', which is token 20 in tokenizer.json",
        ),
        (
            {"added_tokens_decoder": {"23": {"content": "<x>", "lstrip": 1}}},
            r"added_tokens_decoder\['23'\] is .*, must be the description of a token",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_would_change_the_text_is_rejected_with_key_and_value(folder, fields, message):
    change(folder / "tokenizer_config.json", **fields)
    with pytest.raises(CheckpointError, match=rf"/tokenizer_config\.json: .*{message}"):
        load_huggingface(folder)


def test_a_start_token_is_put_or_left_out_as_the_tokenizer_config_says(folder):
    described = folder / "tokenizer_config.json"
    assert tokenizer_of(folder).encode("AC") == [0, 2]
    change(described, bos_token={"content": "<s>"}, add_bos_token=True)
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("AC") == tokenizer.encode("<s>AC") == [21, 0, 2]
    assert tokenizer.start_tokens == (21,)
    start_with(folder, "<s>")
    for is_started, tokens in ((True, [21, 0, 2]), (None, [21, 0, 2]), (False, [0, 2])):
        change(described, add_bos_token=is_started)
        assert tokenizer_of(folder).encode("AC") == tokens


def test_tokens_that_the_tokenizer_config_describes_are_found_whole(folder):
    with pytest.raises(ValueError, match="no token for: "):
        tokenizer_of(folder).encode("A<x>B")
    for fields in (
        {"additional_special_tokens": ["<x>", "<unseen>"], "pad_token": "[PAD]"},
        {"extra_special_tokens": {"image_token": "<x>"}},
        {"added_tokens_decoder": {"23": {"content": "<x>", "special": False}}},
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
        assert tokenizer_of(folder).encode("A<x>B") == [0, 23, 1]


def test_a_directory_gives_its_chat_template(folder):
    change(folder / "tokenizer_config.json", chat_template="{{ bos_token }}", bos_token="<s>")
    template = tokenizer_of(folder).chat_template
    assert (template.source, template.variables) == ("{{ bos_token }}", {"bos_token": "<s>"})


def test_tokens_beyond_the_networks_vocabulary_load_and_are_an_error_in_a_prompt(folder):
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode("AB</s>") == [20, 22]
    with pytest.raises(ValueError, match="'<fill>', token 24, but the network has a vocabulary of"):
        tokenizer.encode("A<fill>B")


def test_ids_that_are_far_too_large_or_shared_are_rejected(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for token, message in (
        (1 << 31, f"token 'AB' has id {1 << 31}, far beyond its 26 tokens"),
        (5_000_000, "token 'AB' has id 5000000, far beyond its 26 tokens"),
        (0, "tokens 'A' and 'AB' share id 0"),
    ):
        content["model"]["vocab"]["AB"] = token
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=f"json: {message}"):
            load_huggingface(folder)


def test_merges_and_vocabularies_that_make_no_tokenizer_are_rejected_with_the_file(folder):
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    for changes in (
        {"merges": None},
        {"merges": [["A", "B", "C"]]},
        {"vocab": ...},
        {"vocab": {"A": -1}},
        # The library panics over this one: the second of the pair is shorter than the prefix.
        {"merges": [["A", "B"]], "continuing_subword_prefix": "##"},
    ):
        model = {name: x for name, x in (whole["model"] | changes).items() if x is not ...}
        path.write_text(json.dumps(whole | {"model": model}))
        with pytest.raises(CheckpointError, match=r"/tokenizer\.json: not a tokenizer: ."):
            load_huggingface(folder)


def test_an_interrupt_is_not_taken_for_a_fault_of_the_file(folder, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    fake = type("Tokenizer", (), {"from_file": staticmethod(interrupted)})
    monkeypatch.setattr(library, "Tokenizer", fake)
    with pytest.raises(KeyboardInterrupt):
        load_huggingface(folder)


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


def test_the_keys_of_published_tokenizers_are_known_and_others_reported(folder):
    path = folder / "tokenizer_config.json"
    for keys in TOKENIZERS.values():
        texts = {key: "</s>" for key in keys.split() if key.endswith("_token") and key[:3] != "add"}
        lists = {"added_tokens_decoder": {}, "additional_special_tokens": [], "chat_template": "a"}
        fields = dict.fromkeys(keys.split(), False) | texts | lists
        path.write_text(json.dumps(fields))
        tokenizer_of(folder)
    change(path, shrink=True)
    with pytest.warns(
        CheckpointWarning, match=r"tokenizer_config\.json: unknown .*'shrink' .True."
    ):
        load_huggingface(folder)


def test_without_tokenizers_its_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"tokenizers: pip install -e '\.\[models\]'"):
        load_huggingface(folder)
