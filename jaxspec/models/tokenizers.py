"""Tokenizers of checkpoints, through the `tokenizers` library."""

import functools
import operator
import os
import re
from collections.abc import Sequence
from typing import Any

from jaxspec.models.weights import CheckpointError, shown


class TextTokenizer:
    """A tokenizer of the `tokenizers` library; implements `jaxspec.language_model.Tokenizer`.

    Attributes:
      stop_tokens: ids that end a text, as the checkpoint says; may be empty.
    """

    def __init__(
        self, tokenizer: Any, stop_tokens: Sequence[int] = (), *, vocab: int | None = None
    ) -> None:
        """Take over a `tokenizers.Tokenizer` that has not encoded yet.

        Args:
          tokenizer: from here on it refuses what it has no token for.
          stop_tokens: ids that end a text.
          vocab: how many ids there are. A network may have more than its tokenizer has tokens; these
            stand for no text. Default as many as tokens.
        """
        _refuse_what_is_lost(tokenizer.model)
        self._tokenizer = tokenizer
        self._vocab = vocab
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

        Raises:
          ValueError: a character that the tokenizer has no token for, not even one that stands for
            all unknown ones.
        """
        try:
            return self._tokenizer.encode(text).ids
        except Exception as error:  # the library raises nothing more exact
            if not isinstance(text, str):
                raise
            at = self._strange(text)
            raise ValueError(
                f"text[{at}] is {text[at]!r}, which the tokenizer has no token for; replace it"
            ) from error

    def _strange(self, text: str) -> int:
        """Return the place of the character up to which a text is taken, but not with it."""
        added = (token.content for token in self._tokenizer.get_added_tokens_decoder().values())
        spelt = sorted(map(re.escape, added), key=len, reverse=True)
        start = 0
        # Tokens that are spelt out are taken whole, whatever their characters are.
        for part in re.split(f"({'|'.join(spelt)})", text) if spelt else ():
            if not self._takes(part):
                return start + self._first_refused(part)
            start += len(part)
        return self._first_refused(text)

    def _first_refused(self, text: str) -> int:
        """Return the place where a text, which is not taken, stops being so."""
        taken, refused = 0, len(text)
        while refused - taken > 1:
            middle = (taken + refused) // 2
            if self._takes(text[:middle]):
                taken = middle
            else:
                refused = middle
        return taken

    def _takes(self, text: str) -> bool:
        try:
            self._tokenizer.encode(text)
        except Exception:
            return False
        return True

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, special tokens spelt out.

        Raises:
          ValueError: an id that there is not.
        """
        ids = [operator.index(token) for token in tokens]
        count = len(self.pieces) if self._vocab is None else self._vocab
        for place, token in enumerate(ids):
            if not 0 <= token < count:
                raise ValueError(f"token {place} is {token}, must be from 0 to {count - 1}")
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def read_tokenizer(
    path: str | os.PathLike[str], stop_tokens: Sequence[int] = (), *, vocab: int | None = None
) -> TextTokenizer:
    """Read a `tokenizer.json`.

    Args:
      path: the file.
      stop_tokens: ids that end a text.
      vocab: how many ids the network has; default as many as tokens.

    Raises:
      CheckpointError: the library cannot read it, two tokens share an id, or one has an id that the
        network does not have.
      ImportError: `tokenizers` is not installed.
    """
    library = _library()
    try:
        tokenizer = library.Tokenizer.from_file(os.fspath(path))
    except BaseException as error:  # the library raises nothing more exact
        # It panics over some merges, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    piece_of: dict[int, str] = {}
    for piece, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if vocab is not None and token >= vocab:
            raise CheckpointError(
                f"{path}: token {shown(piece)} has id {token}, its network has ids below {vocab}"
            )
        if token in piece_of:
            both = " and ".join(sorted((shown(piece), shown(piece_of[token]))))
            raise CheckpointError(f"{path}: tokens {both} share id {token}")
        piece_of[token] = piece
    return TextTokenizer(tokenizer, stop_tokens, vocab=vocab)


def byte_level_tokenizer(
    pieces: Sequence[str],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    *,
    single_digits: bool = False,
    vocab: int | None = None,
) -> TextTokenizer:
    """Build a byte-level pair encoding as GPT-2 has it.

    Args:
      pieces: the token of each id, bytes spelt as GPT-2 spells them.
      merges: pairs in the order they are joined.
      special: tokens among `pieces` that text spells out whole, never pieced together.
      stop_tokens: ids that end a text.
      single_digits: whether every digit is a token of its own.
      vocab: how many ids the network has; default as many as pieces.

    Raises:
      CheckpointError: pieces repeat or are more than `vocab`, or a merge is not of two pieces that
        make a third.
      ImportError: `tokenizers` is not installed.
    """
    library = _library()
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise CheckpointError("a tokenizer's pieces repeat")
    if vocab is not None and len(pieces) > vocab:
        raise CheckpointError(f"a tokenizer of {len(pieces)} pieces for {vocab} ids")
    # Said here, for the library does not say which merge it is.
    for number, merge in enumerate(merges):
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise CheckpointError(
                f"not a pair encoding: merge {number} is {shown(' '.join(merge))}, not two pieces "
                "that make a third"
            )
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
    return TextTokenizer(tokenizer, stop_tokens, vocab=vocab)


def _refuse_what_is_lost(model: Any) -> None:
    """Have a pair encoding raise where it would leave characters out.

    It does so where it names no token for unknown ones. Given the name of one that there is not, it
    raises when it needs that token, and does all else as before.
    """
    if getattr(model, "unk_token", "") is None:
        name = "<no token>"
        while model.token_to_id(name) is not None:
            name += ">"
        model.unk_token = name


def _library() -> Any:
    """Return the library, or say how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        message = "text needs tokenizers: pip install 'jaxspec-decoding[models]'"
        raise ImportError(message) from error
    return tokenizers
