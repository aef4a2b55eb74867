"""Tokenizers of checkpoints, through the `tokenizers` library."""

import functools
import os
from collections.abc import Sequence
from typing import Any

from jaxspec.models.weights import CheckpointError


class TextTokenizer:
    """A tokenizer of the `tokenizers` library; implements `jaxspec.language_model.Tokenizer`.

    Attributes:
      stop_tokens: ids that end a text, as the checkpoint says; may be empty.
    """

    def __init__(self, tokenizer: Any, stop_tokens: Sequence[int] = ()) -> None:
        """Take a `tokenizers.Tokenizer` and the ids that end a text."""
        self._tokenizer = tokenizer
        self.stop_tokens = tuple(stop_tokens)

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """The token of each id, as the vocabulary spells it; empty where an id is not used."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        pieces = [""] * (max(ids.values(), default=-1) + 1)
        for piece, token in ids.items():
            pieces[token] = piece
        return tuple(pieces)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt.

        Special tokens that are spelt out in it, such as `<|im_end|>`, are one id each; a start token
        is put in front where the checkpoint's tokenizer does so.
        """
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, special tokens spelt out."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def read_tokenizer(path: str | os.PathLike[str], stop_tokens: Sequence[int] = ()) -> TextTokenizer:
    """Read a `tokenizer.json`.

    Args:
      path: the file.
      stop_tokens: ids that end a text.

    Raises:
      CheckpointError: the library cannot read it.
      ImportError: `tokenizers` is not installed.
    """
    library = _library()
    try:
        tokenizer = library.Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the library raises nothing more exact
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer, stop_tokens)


def byte_level_tokenizer(
    pieces: Sequence[str],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    *,
    single_digits: bool = False,
) -> TextTokenizer:
    """Build a byte-level pair encoding as GPT-2 has it.

    Args:
      pieces: the token of each id, bytes spelt as GPT-2 spells them.
      merges: pairs in the order they are joined.
      special: tokens among `pieces` that text spells out whole, never pieced together.
      stop_tokens: ids that end a text.
      single_digits: whether every digit is a token of its own.

    Raises:
      CheckpointError: pieces repeat, or a merge makes a token that is not among them.
      ImportError: `tokenizers` is not installed.
    """
    library = _library()
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise CheckpointError("a tokenizer's pieces repeat")
    try:
        tokenizer = library.Tokenizer(library.models.BPE(vocabulary, list(merges)))
    except Exception as error:  # the library raises nothing more exact
        raise CheckpointError(f"not a pair encoding: {error}") from error
    steps = [library.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if single_digits:
        steps.insert(0, library.pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([library.AddedToken(piece, special=True) for piece in special])
    return TextTokenizer(tokenizer, stop_tokens)


def _library() -> Any:
    """Return the library, or say how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        message = "text needs tokenizers: pip install 'jaxspec-decoding[models]'"
        raise ImportError(message) from error
    return tokenizers
