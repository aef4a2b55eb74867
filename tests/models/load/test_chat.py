"""Chat templates: where they are read from, what they render, and what is wrong with them."""

import json
import sys

import pytest

from jaxspec.models import CheckpointError
from jaxspec.models.load.chat import ChatTemplate, read_chat_template

CHAT_ML = """\
{% if messages[0]['role'] != 'system' %}{{ bos_token }}{% endif %}
{% for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""
MESSAGES = [{"role": "user", "content": "1 < 2 & 'é'?"}]


def rendered(source, **variables):
    pytest.importorskip("jinja2")
    return ChatTemplate(source, variables).render(MESSAGES)


def test_a_template_is_rendered_as_transformers_does_up_to_the_answer():
    wanted = "<s><|user|>1 < 2 & 'é'?</s><|assistant|>"
    assert rendered(CHAT_ML, bos_token="<s>", eos_token="</s>") == wanted
    assert rendered("{{ messages | tojson }}") == json.dumps(MESSAGES, ensure_ascii=False)
    assert rendered("{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}") == "1"
    assert rendered("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true) }}") == (
        '{"a": 1, "b": "\\u00e9"}'
    )


def test_the_marks_around_an_answer_for_training_change_nothing():
    role = "{% for m in messages %}{{ m.role }}{% endfor %}"
    plain = f"{{% generation %}}{role}{{% endgeneration %}}"
    trimming = f"{{%- generation -%}} {role} {{%- endgeneration -%}}"
    assert rendered(f"a {plain} b {trimming} c") == "a user buserc"


def test_a_template_that_fails_is_an_error_with_its_words():
    for source, message in (
        ("{% for %}", "Expected"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3]['content'] }}", "undefined|no element"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),  # a way out of the sandbox
    ):
        with pytest.raises(CheckpointError, match=f"the chat template failed: .*({message})"):
            rendered(source)


def test_a_template_is_found_in_each_place_that_files_have_it_in(tmp_path):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    started = {"bos_token": {"content": "<s>"}, "pad_token": None}
    for config, older, source, variables in (
        ({}, {}, None, {}),
        (started, {}, None, {}),
        (started | {"chat_template": "one"}, {}, "one", {"bos_token": "<s>"}),
        ({"chat_template": several}, {}, "two", {}),
        # Of older checkpoints, in the map of special tokens.
        (
            {"chat_template": "one", "bos_token": None, "eos_token": "</s>"},
            {"bos_token": {"content": "<s>"}, "eos_token": "<other>"},
            "one",
            {"bos_token": "<s>", "eos_token": "</s>"},
        ),
    ):
        found = read_chat_template(tmp_path, config, older)
        assert found == (None if source is None else ChatTemplate(source, variables))
    (tmp_path / "chat_template.jinja").write_text("three")
    assert read_chat_template(tmp_path, {"chat_template": "one"}, {}) == ChatTemplate("three")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: .*utf-8"):
        read_chat_template(tmp_path, {}, {})


def test_a_field_that_holds_no_template_is_named_with_its_file(tmp_path):
    for template in (5, {"a": "b"}, [], ["a"], [{"name": "default"}]):
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template is "):
            read_chat_template(tmp_path, {"chat_template": template}, {})


def test_without_jinja2_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2: pip install -e '\.\[models\]'"):
        ChatTemplate("").render([])
