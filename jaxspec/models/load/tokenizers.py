"""Tokenizers of checkpoints, through the `tokenizers` library."""

import copy
import functools
import operator
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

from jaxspec.checks import described
from jaxspec.extras import require
from jaxspec.models.load.chat import ChatTemplate
from jaxspec.models.load.fields import CheckpointError, assert_file, shown, wrapped

_MOST_UNUSED = 1_000_000  # ids without a token
library = functools.partial(require, "text", "tokenizers", "models")


class TextTokenizer:
    """A tokenizer of the `tokenizers` library; implements `jaxspec.models.network.Tokenizer`."""

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
          tokenizer: is not changed.
          stop_tokens: ids that end a text, as the checkpoint says; an attribute.
          start_tokens: ids to put before a text, unless the tokenizer does so itself; an attribute.
          vocab: V, how many ids the network has; default as many as tokens. Ids without a token have
            no text; tokens beyond V cannot be in a text.
          chat_template: how the checkpoint writes a message, if it says so; an attribute.

        Raises:
          ValueError: `tokenizer` cannot be copied, or a start or stop token is not an id below V.
        """
        wanted = "a tokenizers.Tokenizer without parts written in Python"
        with wrapped(f"tokenizer is {described(tokenizer)}, must be {wanted}"):
            self._tokenizer = _faithful(tokenizer)
        self._vocab = vocab
        self.start_tokens = tuple(self._ids(start_tokens, "start token"))
        self.stop_tokens = frozenset(self._ids(stop_tokens, "stop token"))
        self.chat_template = chat_template

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """The vocabulary entry of each id below V; empty where an id is not used."""
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        count = max(ids.values(), default=-1) + 1
        entries = [""] * (count if self._vocab is None else min(count, self._vocab))
        for entry, token in ids.items():
            if token < len(entries):
                entries[token] = entry
        return tuple(entries)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt.

        Special tokens that are written in it, such as `<|im_end|>`, are one id each.

        Args:
          text: the prompt.
          add_special_tokens: whether to put `start_tokens` before it, and what else the checkpoint's
            tokenizer puts around a text. A text that already begins with them gets no second ones.

        Raises:
          ValueError: a character that the tokenizer has no token for, not even one for unknown
            characters; or a token that the network has no id for.
        """
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises nothing more exact
            if not isinstance(text, str):
                raise
            lost = [letter for letter in dict.fromkeys(text) if not self._takes(letter)]
            what = f"characters that the tokenizer has no token for: {shown(lost)}"
            raise ValueError(f"text has {what}; replace them") from error
        ids = self._started(encoding) if add_special_tokens else encoding.ids
        for token in ids:
            if self._vocab is not None and token >= self._vocab:
                entry = shown(self._tokenizer.id_to_token(token))
                has = f"but the network has a vocabulary of {self._vocab}"
                raise ValueError(f"text contains {entry}, token {token}, {has}; replace it")
        return ids

    def _takes(self, text: str) -> bool:
        try:
            self._tokenizer.encode(text)
        except Exception:
            return False
        return True

    def _started(self, encoding: Any) -> list[int]:
        """Return the ids of an encoding after one set of start tokens."""
        # The mask tells what was put around the text from the same tokens written in it.
        added = [*encoding.special_tokens_mask, 0].index(0)
        start, text = encoding.ids[:added], encoding.ids[added:]
        ours = list(self.start_tokens)
        if start[: len(ours)] != ours:
            start = ours + start
        return text if text[: len(start)] == start else start + text

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, special tokens written literally.

        Raises:
          ValueError: an id that the network does not have.
        """
        return self._tokenizer.decode(self._ids(tokens, "token"), skip_special_tokens=False)

    def _ids(self, tokens: Collection[int], name: str) -> list[int]:
        """Return ids as integers, or raise for the first that the network does not have."""
        count = len(self.pieces) if self._vocab is None else self._vocab
        ids = [operator.index(token) for token in tokens]
        for place, token in enumerate(ids):
            if not 0 <= token < count:
                raise ValueError(f"{name} {place} is {token}, must be from 0 to {count - 1}")
        return ids


def open_tokenizer(path: pathlib.Path) -> Any:
    """Read a `tokenizer.json` as a `Tokenizer` of the library, in which no two tokens share an id."""
    assert_file(path)
    from_file = library().Tokenizer.from_file
    with wrapped(f"{path}: not a tokenizer"):
        tokenizer = from_file(str(path))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    entry_of: dict[int, str] = {}
    for entry, token in vocabulary.items():
        if token > len(vocabulary) + _MOST_UNUSED:  # the library walks over all ids below it
            far = f"far beyond its {len(vocabulary)} tokens"
            raise CheckpointError(path, f"token {shown(entry)} has id {token}, {far}")
        if token in entry_of:
            both = " and ".join(sorted((shown(entry), shown(entry_of[token]))))
            raise CheckpointError(path, f"tokens {both} share id {token}")
        entry_of[token] = entry
    return tokenizer


def byte_level_tokenizer(
    path: object,
    entries: Sequence[str],
    merges: Sequence[str],
    *,
    special: Sequence[str] = (),
    user_defined: Sequence[str] = (),
    single_digits: bool = False,
) -> Any:
    """Build a byte-level pair encoding, such as GPT-2's, as a `Tokenizer` of the library.

    Args:
      path: the file, for messages.
      entries: the vocabulary in the order of ids, bytes written as GPT-2 does.
      merges: pairs in the order they are joined, a space between the two.
      special: entries that are found whole in a text.
      user_defined: entries that are also found whole, but are ordinary text.
      single_digits: whether every digit is a separate token.
    """
    tokenizers = library()
    vocabulary = {entry: token for token, entry in enumerate(entries)}
    if len(vocabulary) != len(entries):
        raise CheckpointError(path, "the tokenizer's vocabulary entries repeat")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for number, pair in enumerate(pairs):  # the library does not say which one it is
        if len(pair) != 2 or any(part not in vocabulary for part in (*pair, "".join(pair))):
            wanted = "must be two vocabulary entries that make a third"
            raise CheckpointError(path, f"merge {number} is {shown(merges[number])}, {wanted}")
    with wrapped(f"{path}: not a pair encoding"):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    steps = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if single_digits:
        steps.insert(0, tokenizers.pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(each, special=True) for each in special])
    tokenizer.add_tokens([tokenizers.AddedToken(each, normalized=False) for each in user_defined])
    return tokenizer


def _faithful(tokenizer: Any) -> Any:
    """Return a copy that encodes the whole of a text, and always in the same way."""
    faithful = copy.deepcopy(tokenizer)
    faithful.no_truncation()
    faithful.no_padding()
    model = faithful.model
    for name in ("dropout", "alpha"):  # of pair encodings; of unigrams
        if getattr(model, name, None) is not None:
            setattr(model, name, None)
    # Without a token for unknown characters, a pair encoding drops them. With one that is not in the
    # vocabulary it raises instead.
    if getattr(model, "unk_token", "") is None:
        model.unk_token = "?" + max(faithful.get_vocab(), key=len, default="")
    return faithful
