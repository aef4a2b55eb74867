"""Chat templates of checkpoints: how a message is written for a network that answers."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.extras import needs
from jaxspec.models.load.tensors import CheckpointError, shown


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A jinja2 template as `transformers` renders it.

    Attributes:
      source: the template.
      variables: what it may use besides the messages, such as `bos_token`.
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
          ValueError: the template is none, or rejects the messages.
        """
        try:
            import jinja2
            from jinja2 import nodes
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ImportError(needs("a chat template", "jinja2", "models")) from error

        class AnswerMarks(Extension):
            """`{% generation %}` marks for training what the network answered; its text stays."""

            tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body, lineno=line)

        def reject(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, AnswerMarks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = reject
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.source).render(
                {**self.variables, "messages": list(messages), "add_generation_prompt": True}
            )
        # A template is a program: what its author divides by zero or adds to text, is any error.
        except Exception as error:
            raise ValueError(
                f"the chat template failed: {error or type(error).__name__}"
            ) from error


def read_chat_template(directory: pathlib.Path) -> ChatTemplate | None:
    """Read the chat template beside a `tokenizer.json`, or None if there is none.

    It is the file `chat_template.jinja`, or the field `chat_template` of `tokenizer_config.json`, of
    several the one named "default". What it calls `bos_token` and the like is what
    `tokenizer_config.json` says, else `special_tokens_map.json` of older checkpoints.

    Raises:
      CheckpointError: a file cannot be read, or the field is no template.
    """
    path, mapped = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    try:
        config, older = (
            json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            for file in (path, mapped)
        )
        alone = directory / "chat_template.jinja"
        source = alone.read_text(encoding="utf-8") if alone.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{directory}: chat template: {error}") from error
    for file, content in ((path, config), (mapped, older)):
        if not isinstance(content, dict):
            raise CheckpointError(f"{file}: not an object")
    if source is None:
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each for each in source if isinstance(each, dict)}
        source = named.get("default", {}).get("template", source)
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(
            f"{path}: chat_template is {shown(source)}, neither a template nor a list of them with "
            "one named default"
        )
    return ChatTemplate(source, _special_tokens(older) | _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of fields such as `bos_token`: a string, or an object with its content."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    # jinja2's own filter writes <, > and ' in the way of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
