"""Chat templates of checkpoints: how a message is written for a network that answers."""

import dataclasses
import datetime
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.extras import require
from jaxspec.models.load.fields import CheckpointError, shown, wrapped


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A jinja2 template as `transformers` renders it.

    Attributes:
      source: the template.
      variables: what it may use in addition to the messages, such as `bos_token`.
    """

    source: str
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text of a conversation, up to where the answer begins.

        Special tokens, the start token among them, are part of the text where the template has them.

        Args:
          messages: each with its "role" ("user", "system", "assistant") and "content".

        Raises:
          ImportError: jinja2 is not installed.
          CheckpointError: the template is invalid, or rejects the messages.
        """
        jinja2 = require("a chat template", "jinja2", "models")
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def reject(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = reject
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        # `{% generation %}` marks answers for training: for a text it is a block of any kind.
        source = re.sub(r"(\{%[-+]?\s*(?:end)?)generation(\s*[-+]?%\})", r"\1with\2", self.source)
        with wrapped("the chat template failed"):  # a program: it may raise anything
            return environment.from_string(source).render(
                {**self.variables, "messages": list(messages), "add_generation_prompt": True}
            )


def read_chat_template(
    place: pathlib.Path, config: Mapping[str, Any], older: Mapping[str, Any]
) -> ChatTemplate | None:
    """Read a directory's chat template, if it has one.

    It is the file `chat_template.jinja`, or the field `chat_template` of `tokenizer_config.json`
    (`config`), of several the one named "default". `older` is the content of
    `special_tokens_map.json`, whose special tokens those of `config` replace.
    """
    path = place / "chat_template.jinja"
    source = config.get("chat_template")
    if path.is_file():
        with wrapped(path):
            source = path.read_text(encoding="utf-8")
    if isinstance(source, list):
        named = {each.get("name"): each for each in source if isinstance(each, dict)}
        source = named.get("default", {}).get("template", source)
    if source is None:
        return None
    if not isinstance(source, str):
        wanted = "must be a template or a list of them with one named default"
        raise CheckpointError(
            place / "tokenizer_config.json", f"chat_template is {shown(source)}, {wanted}"
        )
    return ChatTemplate(source, _special_tokens(older) | _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of fields such as `bos_token`: a string, or an object with its content."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    # jinja2's own filter escapes <, > and ' as HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
