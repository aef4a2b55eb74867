"""Chat templates: where they are read from, what they render, and what is wrong with them."""

import json
import sys

import pytest

from jaxspec.models.load.chat import ChatTemplate, read_chat_template
from jaxspec.models.load.tensors import CheckpointError

CHAT_ML = """\
{% if messages[0]['role'] != 'system' %}{{ bos_token }}{% endif %}
{% for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""
MESSAGES = [{"role": "user", "content": "1 < 2 & 'é'?"}]


def rendered(source, messages=MESSAGES, **variables):
    pytest.importorskip("jinja2")
    return ChatTemplate(source, variables).render(messages)


def write(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_template_is_rendered_as_transformers_does_up_to_the_answer():
    wanted = "<s><|user|>1 < 2 & 'é'?</s><|assistant|>"
    assert rendered(CHAT_ML, bos_token="<s>", eos_token="</s>") == wanted
    assert rendered("{{ messages | tojson }}") == json.dumps(MESSAGES, ensure_ascii=False)
    assert rendered("{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}") == "1"
    assert rendered("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true) }}") == (
        '{"a": 1, "b": "\\u00e9"}'
    )


def test_the_marks_around_an_answer_for_training_change_nothing():
    answer = "{% generation %}{% for m in messages %}{{ m.role }}{% endfor %}{% endgeneration %}"
    assert rendered(f"a {answer} b {answer}") == "a user b user"


def test_special_tokens_that_only_the_map_of_older_checkpoints_names_are_known(tmp_path):
    write(tmp_path, chat_template="one", bos_token=None, eos_token="</s>")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "<other>"})
    )
    assert read_chat_template(tmp_path).variables == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: not an object"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "Expected"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3]['content'] }}", "undefined|no element"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
    ids=["syntax", "raised", "missing", "arithmetic", "a way out of the sandbox"],
)
def test_a_template_that_fails_is_a_value_error_with_its_words(source, message):
    with pytest.raises(ValueError, match=f"the chat template failed: .*({message})"):
        rendered(source)


def test_a_template_is_found_in_each_place_that_files_have_it_in(tmp_path):
    assert read_chat_template(tmp_path) is None
    assert read_chat_template(write(tmp_path, bos_token="<s>")) is None
    found = read_chat_template(
        write(tmp_path, chat_template="one", bos_token={"content": "<s>"}, pad_token=None)
    )
    assert found == ChatTemplate("one", {"bos_token": "<s>"})
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    assert read_chat_template(write(tmp_path, chat_template=several)) == ChatTemplate("two")
    (tmp_path / "chat_template.jinja").write_text("three")
    assert read_chat_template(tmp_path) == ChatTemplate("three")


@pytest.mark.parametrize("template", [5, {"a": "b"}, [], ["a"], [{"name": "default"}]], ids=repr)
def test_a_field_that_holds_no_template_is_named_with_its_file(template, tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is "):
        read_chat_template(write(tmp_path, chat_template=template))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for content in ("{", "[]", "[" * 10_000):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            read_chat_template(tmp_path)


def test_without_jinja2_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2: pip install -e '\.\[models\]'"):
        ChatTemplate("").render([])
