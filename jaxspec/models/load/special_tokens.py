"""Tokens that begin and end texts, and those found whole in them, as the files of a checkpoint say."""

import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxspec.models.load.chat import read_chat_template
from jaxspec.models.load.fields import CheckpointError, Values, read, read_json, shown
from jaxspec.models.load.metadata import SPECIAL_TOKENS, TOKENIZER
from jaxspec.models.load.tokenizers import TextTokenizer, library, open_tokenizer

_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_NONE = (-1, 0xFFFFFFFF)
"""How files say that there is no such token: -1, also written as unsigned."""


def token_ids(values: Values, name: str, vocab: int) -> set[int]:
    """Return the ids that a key names, one or a list; -1 and null name none."""
    stored = values[name]
    ids = stored if isinstance(stored, list) else [] if stored is None else [stored]
    for token in ids:
        if type(token) is not int or (token not in _NONE and not 0 <= token < vocab):
            wanted = f"must be an integer from 0 to {vocab - 1}"
            raise CheckpointError(
                values.path, f"{values.keys_of[name]} is {shown(token)}, {wanted}"
            )
    return set(ids).difference(_NONE)


def start_tokens(values: Values, start: Collection[int]) -> tuple[int, ...]:
    """Return the ids to put before a text: the start token, if the file says that texts have one."""
    if values["is_started"] and not start:
        raise values.error("is_started", "yet there is no start token")
    return tuple(start) if values["is_started"] else ()


def read_tokenizer(
    place: pathlib.Path, stops: Sequence[Values], vocab: int
) -> TextTokenizer | None:
    """Read a directory's tokenizer, if it has one, as `transformers` does.

    An id ends a text if any file says so; `stops` are the other files that name such ids. Tokens that
    `tokenizer_config.json` describes or names special are found whole in a text. If it says whether
    texts have a start token, what `tokenizer.json` puts around a text is dropped.
    """
    path = place / "tokenizer.json"
    if not os.path.lexists(path):
        return None
    tokenizer = open_tokenizer(path)
    # The second is of older checkpoints.
    paths = place / "tokenizer_config.json", place / "special_tokens_map.json"
    config, older = (read_json(each) if os.path.lexists(each) else {} for each in paths)
    values = read(paths[0], config, TOKENIZER)
    _check_prefix_space(values, tokenizer)
    _register(values, tokenizer)
    stop = set().union(*(token_ids(each, "stop", vocab) for each in stops))
    for each, content in zip(paths, (config, older), strict=True):
        stop.update(_ids(each, content, "eos_token", tokenizer, vocab))
    if values["is_started"] is not None:
        tokenizer.post_processor = library().processors.TemplateProcessing(single="$A")
    start = _ids(paths[0], config, "bos_token", tokenizer, vocab) if values["is_started"] else ()
    return TextTokenizer(
        tokenizer,
        stop,
        start_tokens=start_tokens(values, start),
        vocab=vocab,
        chat_template=read_chat_template(place, config, older),
    )


def _check_prefix_space(values: Values, tokenizer: Any) -> None:
    """Reject a contradiction about a space before a text.

    `transformers` compares the two only where a byte-level step is the whole pre-tokenizer.
    """
    wanted = values["add_prefix_space"]
    if wanted is None or tokenizer.pre_tokenizer is None:
        return
    found = json.loads(tokenizer.pre_tokenizer.__getstate__()).get("add_prefix_space", wanted)
    if found != wanted:
        raise values.error("add_prefix_space", f"yet {found} in tokenizer.json; make them the same")


def _register(values: Values, tokenizer: Any) -> None:
    """Register the tokens of `added_tokens_decoder`, and those named special that there are."""
    described, added = {}, []
    # In the order of their ids: new ones are counted on from the last.
    for number in sorted(values["added"], key=lambda number: (len(number), number)):
        content, key = values["added"][number], f"added_tokens_decoder[{shown(number)}]"
        given = content if isinstance(content, dict) else {}
        options = {name: given[name] for name in _OPTIONS if name in given}
        described[number] = text = _text(values.path, key, content)
        if not text or not all(isinstance(value, bool) for value in options.values()):
            wanted = "must be the description of a token"
            raise CheckpointError(values.path, f"{key} is {shown(content)}, {wanted}")
        added.append(library().AddedToken(text, **options))
    tokenizer.add_tokens(added)
    for number, text in described.items():
        if str(found := tokenizer.token_to_id(text)) != number:
            also = f"{shown(text)}, which is token {found} in tokenizer.json"
            raise CheckpointError(values.path, f"added_tokens_decoder[{shown(number)}] is {also}")
    texts = set()
    for key in SPECIAL_TOKENS.split():
        items = values[key]
        if not key.endswith("_tokens"):
            items = [items]
        elif isinstance(items, dict):
            items = items.values()
        elif not isinstance(items, list | None):
            raise values.error(key, "must be a list of tokens")
        texts |= {_text(values.path, key, each) for each in items or ()}
    known = {text for text in texts if text and tokenizer.token_to_id(text) is not None}
    registered = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens(sorted(known - registered))


def _ids(
    path: object, stored: Mapping[str, Any], key: str, tokenizer: Any, vocab: int
) -> tuple[int, ...]:
    """Return the id of the token that a key names, if it names one."""
    text = _text(path, key, stored.get(key))
    if text is None:
        return ()
    found = tokenizer.token_to_id(text)
    if found is None:
        raise CheckpointError(path, f"{key} is {shown(text)}, not a token of tokenizer.json")
    if found >= vocab:
        has = f"but the network has a vocabulary of {vocab}"
        raise CheckpointError(path, f"{key} is {shown(text)}, token {found}, {has}")
    return (found,)


def _text(path: object, key: str, stored: Any) -> str | None:
    """Return the text of a token: a string, or an object with its `content`."""
    text = stored.get("content") if isinstance(stored, dict) else stored
    is_text = isinstance(text, str) and not any("\ud800" <= letter <= "\udfff" for letter in text)
    if is_text or stored is None:
        return text
    raise CheckpointError(path, f"{key} is {shown(stored)}, must be the text of a token")
