"""Tokenizers of checkpoints, through the `tokenizers` library."""

import copy
import functools
import operator
import os
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

from jaxspec.checks import described
from jaxspec.extras import needs
from jaxspec.models.load.chat import ChatTemplate, read_chat_template
from jaxspec.models.load.tensors import CheckpointError, shown

_MOST_UNUSED = 1_000_000  # ids without a token


class TextTokenizer:
    """A tokenizer of the `tokenizers` library; implements `jaxspec.models.network.Tokenizer`.

    Attributes:
      start_tokens: ids that begin a text; may be empty.
      stop_tokens: ids that end a text, as the checkpoint says; may be empty.
      chat_template: how the checkpoint writes a message; None where it does not say.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_tokens: Collection[int] = frozenset(),
        *,
        start_tokens: Sequence[int] = (),
        vocab: int | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Copy a `tokenizers.Tokenizer`.

        The copy encodes whole texts, each always in the same way: without truncation, padding and
        dropout, and raising for characters that it has no token for.

        Args:
          tokenizer: is left as it is.
          stop_tokens: ids that end a text.
          start_tokens: ids to put before a text, unless the tokenizer does so itself.
          vocab: V, how many ids the network has. It may have more than its tokenizer has tokens:
            these stand for no text. It may have fewer: those tokens cannot be in a text. Default as
            many as tokens.
          chat_template: how a message is written.

        Raises:
          ValueError: `tokenizer` is something else or cannot be copied, or a start or stop token is
            no id of the network.
        """
        try:
            self._tokenizer = _faithful(tokenizer)
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(
                f"tokenizer is {described(tokenizer)}: must be a tokenizers.Tokenizer without parts "
                f"written in Python: {error}"
            ) from error
        self._vocab = vocab
        for name, ids in (("start", start_tokens), ("stop", stop_tokens)):
            self._check_ids(ids, f"{name} token")
        self.start_tokens = tuple(map(operator.index, start_tokens))
        self.stop_tokens = frozenset(map(operator.index, stop_tokens))
        self.chat_template = chat_template

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """The token of each id, as the vocabulary spells it; empty where an id is not used.

        Tokens that the network has no id for are left out.
        """
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        count = max(ids.values(), default=-1) + 1
        pieces = [""] * (count if self._vocab is None else min(count, self._vocab))
        for piece, token in ids.items():
            if token < len(pieces):
                pieces[token] = piece
        return tuple(pieces)

    @property
    def _count(self) -> int:
        """How many ids there are."""
        return len(self.pieces) if self._vocab is None else self._vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt.

        Special tokens that are written in it, such as `<|im_end|>`, are one id each.

        Args:
          text: the prompt.
          add_special_tokens: whether to put `start_tokens` before it, and what else the checkpoint's
            tokenizer puts around a text. A text that already begins with them gets no second ones.

        Raises:
          ValueError: a character that the tokenizer has no token for, not even one that stands for
            all unknown ones; or a token that the network has no id for.
        """
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises nothing more exact
            if not isinstance(text, str):
                raise
            at = self._strange(text)
            raise ValueError(
                f"text[{at}] is {text[at]!r}, which the tokenizer has no token for; replace it"
            ) from error
        ids = self._started(encoding) if add_special_tokens else encoding.ids
        if self._vocab is not None and max(ids, default=0) >= self._vocab:
            token = next(token for token in ids if token >= self._vocab)
            raise ValueError(
                f"the text contains {shown(self._tokenizer.id_to_token(token))}, token {token}, but "
                f"the network has a vocabulary of {self._vocab}; replace it"
            )
        return ids

    def _started(self, encoding: Any) -> list[int]:
        """Return the ids of an encoding behind one set of start tokens."""
        # The mask tells what was put around the text from the same tokens written in it.
        added = next(
            (at for at, is_added in enumerate(encoding.special_tokens_mask) if not is_added),
            len(encoding.ids),
        )
        start, text = encoding.ids[:added], encoding.ids[added:]
        ours = list(self.start_tokens)
        if start[: len(ours)] != ours:
            start = ours + start
        return text if text[: len(start)] == start else start + text

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
        ids = self._check_ids(tokens, "token")
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _check_ids(self, tokens: Collection[int], name: str) -> list[int]:
        """Return ids as integers, or raise for the first that the network does not have."""
        ids = [operator.index(token) for token in tokens]
        if ids and not 0 <= min(ids) <= max(ids) < self._count:
            place, token = next(
                (place, token) for place, token in enumerate(ids) if not 0 <= token < self._count
            )
            raise ValueError(f"{name} {place} is {token}, must be from 0 to {self._count - 1}")
        return ids


def read_tokenizer(
    path: str | os.PathLike[str],
    stop_tokens: Collection[int] = frozenset(),
    *,
    start_tokens: Sequence[int] = (),
    vocab: int | None = None,
) -> TextTokenizer:
    """Read a `tokenizer.json`, and the chat template in the files beside it.

    Args:
      path: the file.
      stop_tokens: ids that end a text.
      start_tokens: ids to put before a text, unless the file itself says so.
      vocab: how many ids the network has; default as many as tokens. A token beyond them is an error
        in a text that contains it.

    Raises:
      CheckpointError: the library cannot read it, two tokens share an id, or the chat template is
        none.
      ImportError: `tokenizers` is not installed.
    """
    return TextTokenizer(
        open_tokenizer(path),
        stop_tokens,
        start_tokens=start_tokens,
        vocab=vocab,
        chat_template=read_chat_template(pathlib.Path(path).parent),
    )


def open_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Read a `tokenizer.json` as a `Tokenizer` of the library.

    Raises:
      CheckpointError: the library cannot read it, or two tokens share an id.
      ImportError: `tokenizers` is not installed.
    """
    library = _library()
    try:
        tokenizer = library.Tokenizer.from_file(os.fspath(path))
    except BaseException as error:  # the library raises nothing more exact
        # It panics over some merges, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path}: not a tokenizer: {str(error)[:300]}") from error
    piece_of: dict[int, str] = {}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for piece, token in vocabulary.items():
        if (
            token > len(vocabulary) + _MOST_UNUSED
        ):  # the library walks over all ids below the largest
            raise CheckpointError(
                f"{path}: token {shown(piece)} has id {token}, far beyond its {len(vocabulary)} tokens"
            )
        if token in piece_of:
            both = " and ".join(sorted((shown(piece), shown(piece_of[token]))))
            raise CheckpointError(f"{path}: tokens {both} share id {token}")
        piece_of[token] = piece
    return tokenizer


def byte_level_tokenizer(
    pieces: Sequence[str],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str] = (),
    stop_tokens: Collection[int] = frozenset(),
    *,
    user_defined: Sequence[str] = (),
    start_tokens: Sequence[int] = (),
    single_digits: bool = False,
    vocab: int | None = None,
) -> TextTokenizer:
    """Build a byte-level pair encoding as GPT-2 has it.

    Args:
      pieces: the token of each id, bytes spelt as GPT-2 spells them.
      merges: pairs in the order they are joined.
      special: tokens among `pieces` that text spells out whole, never pieced together.
      stop_tokens: ids that end a text.
      user_defined: tokens among `pieces` that are also found whole, but are ordinary text.
      start_tokens: ids to put before a text.
      single_digits: whether every digit is a token of its own.
      vocab: how many ids the network has; default as many as pieces. A piece beyond them is an error
        in a text that contains it.

    Raises:
      CheckpointError: pieces repeat, or a merge is not of two pieces that make a third.
      ImportError: `tokenizers` is not installed.
    """
    library = _library()
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise CheckpointError("a tokenizer's pieces repeat")
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
    tokenizer.add_tokens([library.AddedToken(piece, normalized=False) for piece in user_defined])
    return TextTokenizer(tokenizer, stop_tokens, start_tokens=start_tokens, vocab=vocab)


def _faithful(tokenizer: Any) -> Any:
    """Return a copy that encodes the whole of a text, and always in the same way."""
    faithful = copy.deepcopy(tokenizer)
    faithful.no_truncation()
    faithful.no_padding()
    model = faithful.model
    if getattr(model, "dropout", None) is not None:
        model.dropout = None
    if getattr(model, "alpha", None) is not None:  # of unigrams drawn at random
        model.alpha = None
    # A pair encoding leaves characters out where it names no token for unknown ones. Given the name
    # of one that there is not, it raises when it needs that token, and does all else as before.
    if getattr(model, "unk_token", "") is None:
        name = "<no token>"
        while model.token_to_id(name) is not None:
            name += ">"
        model.unk_token = name
    return faithful


def _library() -> Any:
    """Return the library, or say how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(needs("text", "tokenizers", "models")) from error
    return tokenizers
