"""What `tokenizer_config.json` says of a tokenizer, and the ids that begin and end its texts."""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jaxspec.models.load.metadata import TOKENIZER, check_keys
from jaxspec.models.load.tensors import CheckpointError, Fields, shown

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_NONE = (-1, 0xFFFFFFFF)
"""How files say that there is no such token: -1, also where it was written as unsigned."""


def token_ids(path: str | os.PathLike[str], key: str, stored: Any, vocab: int) -> set[int]:
    """Return the ids that a key names, one or a list; -1 and null name none.

    Raises:
      CheckpointError: something that is not an id of the network.
    """
    found = set()
    for token in stored if isinstance(stored, list) else [] if stored is None else [stored]:
        is_none = isinstance(token, int) and not isinstance(token, bool) and token in _NONE
        if not is_none:
            found.add(Fields(path, {key: token}).whole(key, least=0, most=vocab - 1))
    return found


def read_description(
    path: str | os.PathLike[str], stored: Mapping[str, Any], tokenizer: Any, vocab: int
) -> tuple[set[int], tuple[int, ...]]:
    """Apply a `tokenizer_config.json` to a tokenizer, as `transformers` does.

    Tokens that it describes or names special are found whole in a text. If it says whether a text has
    a start token, the tokenizer itself puts nothing around a text any more.

    Args:
      path: the file, for messages.
      stored: its content.
      tokenizer: a `tokenizers.Tokenizer`; it is changed.
      vocab: how many ids the network has.

    Returns:
      (ids that end a text, ids that begin a text besides those that the tokenizer puts).

    Raises:
      CheckpointError: a key that asks for something unsupported, or a token that the tokenizer or
        the network does not have.
    """
    from tokenizers import processors

    check_keys(path, stored, TOKENIZER)
    _check_prefix_space(path, stored, tokenizer)
    _register(path, stored, tokenizer)
    stop = end_tokens(path, stored, tokenizer, vocab)
    is_started = Fields(path, stored).truth("add_bos_token", None)
    if is_started is None:
        return stop, ()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    if not is_started:
        return stop, ()
    start = _id(path, "bos_token", stored, tokenizer, vocab)
    if start is None:
        raise CheckpointError(f"{path}: add_bos_token is True, yet bos_token is None")
    return stop, (start,)


def end_tokens(
    path: str | os.PathLike[str], stored: Mapping[str, Any], tokenizer: Any, vocab: int
) -> set[int]:
    """Return the id of the end token that a file names, if it names one.

    Raises:
      CheckpointError: the tokenizer has no such token, or the network no such id.
    """
    found = _id(path, "eos_token", stored, tokenizer, vocab)
    return set() if found is None else {found}


def _check_prefix_space(
    path: str | os.PathLike[str], stored: Mapping[str, Any], tokenizer: Any
) -> None:
    """Reject a contradiction about a space before a text.

    `transformers` compares the two only where a byte-level step is the whole pre-tokenizer.
    """
    wanted = Fields(path, stored).truth("add_prefix_space", None)
    if wanted is None or tokenizer.pre_tokenizer is None:
        return
    found = json.loads(tokenizer.pre_tokenizer.__getstate__()).get("add_prefix_space", wanted)
    if found != wanted:
        raise CheckpointError(
            f"{path}: add_prefix_space is {wanted}, yet {found} in tokenizer.json; make them the same"
        )


def _register(path: str | os.PathLike[str], stored: Mapping[str, Any], tokenizer: Any) -> None:
    """Register the tokens of `added_tokens_decoder`, and those named special that there are."""
    added = Fields(path, stored).inner("added_tokens_decoder")
    described = {
        number: _described(path, f"added_tokens_decoder[{shown(number)}]", content)
        # In the order of their ids: new ones are counted on from the last.
        for number, content in sorted(added.items(), key=lambda item: (len(item[0]), item[0]))
    }
    tokenizer.add_tokens(list(described.values()))
    for number, token in described.items():
        if str(found := tokenizer.token_to_id(token.content)) != number:
            raise CheckpointError(
                f"{path}: added_tokens_decoder[{shown(number)}] is {shown(token.content)}, which is "
                f"token {found} in tokenizer.json"
            )
    named = [_text(path, key, stored.get(key)) for key in _NAMED]
    named += [
        _text(path, key, each) for key in _LISTS for each in _items(path, key, stored.get(key))
    ]
    registered = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known = {text for text in named if text and tokenizer.token_to_id(text) is not None}
    tokenizer.add_special_tokens(sorted(known - registered))


def _described(path: str | os.PathLike[str], key: str, content: Any) -> Any:
    """Return the library's token that an entry of `added_tokens_decoder` describes."""
    from tokenizers import AddedToken

    text = _text(path, key, content)
    given = content if isinstance(content, dict) else {}
    options = {name: given[name] for name in _OPTIONS if name in given}
    if not text or not all(isinstance(value, bool) for value in options.values()):
        raise CheckpointError(f"{path}: {key} is {shown(content)}, not the description of a token")
    return AddedToken(text, **options)


def _id(
    path: str | os.PathLike[str], key: str, stored: Mapping[str, Any], tokenizer: Any, vocab: int
) -> int | None:
    """Return the id of the token that a key names, one of the network."""
    text = _text(path, key, stored.get(key))
    if text is None:
        return None
    found = tokenizer.token_to_id(text)
    if found is None:
        raise CheckpointError(
            f"{path}: {key} is {shown(text)}, which is not a token of tokenizer.json"
        )
    if found >= vocab:
        raise CheckpointError(
            f"{path}: {key} is {shown(text)}, token {found}, but the network has a vocabulary of "
            f"{vocab}"
        )
    return found


def _items(path: str | os.PathLike[str], key: str, stored: Any) -> Iterator[Any]:
    """Yield the tokens of a list, or of an object of them by name."""
    if isinstance(stored, list | dict):
        yield from stored if isinstance(stored, list) else stored.values()
    elif stored is not None:
        raise CheckpointError(f"{path}: {key} is {shown(stored)}, not a list of tokens")


def _text(path: str | os.PathLike[str], key: str, stored: Any) -> str | None:
    """Return how a token is spelt: a string, or an object with its `content`."""
    text = stored.get("content") if isinstance(stored, dict) else stored
    is_text = isinstance(text, str) and not any(
        "\ud800" <= character <= "\udfff" for character in text
    )
    if is_text or (text is None and stored is None):
        return text
    raise CheckpointError(f"{path}: {key} is {shown(stored)}, not the text of a token")
