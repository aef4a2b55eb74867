"""Streaming text: tokens to pieces of text, and strings that end it.

The text of a token depends on the tokens around it. Decoders drop the space of the first word, strip
the mark of a continued word, join several tokens to one character, or clean up spaces. So a token is
decoded after a few tokens before it, and what a later token may still change is held back.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.checks import described
from jaxspec.models.network import Tokenizer

_LONGEST = 64
"""Most tokens of context, unless all of them are one run of bytes: bounds the cost of a token."""

_UNFINISHED = re.compile("\ufffd{1,3}\\Z")
"""A UTF-8 character has at most 4 bytes: decoders show its first 1 to 3 as up to 3 characters."""

_CLEANED = re.compile(r"(?: {1,2}(?:n? {0,2}'?|'[vr])| {0,2}')\Z")
"""The beginnings of " .", " ' ", " n't", " 've" and similar, whose spaces a clean-up removes.

In this order: "do n ' t" loses those around the quote first, and then the one before the n; "a ' ,"
first loses the one before the comma, and then keeps the one before the quote.
"""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The vocabulary entry of a token that is one byte of a character without a token."""


class Detokenizer:
    r"""Turns the tokens of one text into pieces of text.

    All pieces and the rest that `flush` returns, joined, are
    `decode(prompt + tokens)[len(decode(prompt)):]`. What is not settled is held back:

    - a character of which not all bytes are there;
    - tokens that are single bytes (`<0xE4>`), up to the next other token with a text, if one invalid
      byte among them turns the whole run into replacement characters, as in the `tokenizers` library;
    - the beginning of what a decoder that cleans up spaces may contract (" n" of " n't").

    Returned text is never taken back. Where a later token changes it (a prompt that ends inside a
    character, a decoder with other rules), the next piece begins at the first character that differs:
    no new text is lost, and the changed part occurs twice. A token costs the decoding of at most 64
    tokens; effects of tokens further back (dozens of alternating quotes and spaces) may be missed.

    >>> from jaxspec.models import CharacterTokenizer
    >>> detokenizer = Detokenizer(CharacterTokenizer("abc"), prompt=[0])
    >>> detokenizer.push([2, 0]), detokenizer.push([1]), detokenizer.flush()
    ('ca', 'b', '')
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """Begin a text.

        Args:
          tokenizer: the tokens' tokenizer.
          prompt: ids before the text; not returned, but the first tokens' text may depend on them.

        Raises:
          ValueError: the prompt is not a sequence of ids, or `decode` rejects one.
        """
        self._decode = tokenizer.decode
        byte_of = _bytes_of(tokenizer)
        self._run_bytes = frozenset(byte_of) if _voids_runs(tokenizer, byte_of) else frozenset()
        self._held = _CLEANED if _cleans_up(tokenizer) else None
        self._skipped: dict[int, bool] = {}
        self._is_flushed = False
        # The tokens that are decoded together; `_shown` is the text of them that was returned, or
        # that is the prompt's. From `_last` on they are newer than what was returned before.
        self._window = self._tail(_ids("prompt", prompt))
        self._shown = self._decode(self._window) if self._window else ""
        self._last = len(self._window)

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that the next ids settle; it may be empty.

        Raises:
          ValueError: the text was flushed, or an id is not an integer or rejected by the tokenizer's
            `decode`. Then none of these tokens is taken.
        """
        if self._is_flushed:
            raise ValueError("this text was flushed: make another Detokenizer for another text")
        ids = _ids("tokens", tokens)
        before, pieces = (list(self._window), self._shown, self._last), []
        try:
            for token in ids:
                pieces.append(self._push(token))
        except Exception:
            self._window, self._shown, self._last = before
            raise
        return "".join(pieces)

    def flush(self) -> str:
        """End the text: return what was held back, as decoding everything at once gives it."""
        self._is_flushed = True
        return self._settle(self._decode(self._window) if self._window else "")

    def _push(self, token: int) -> str:
        goes_on = self._goes_on(token)
        self._window.append(token)
        if goes_on:
            return ""
        text = self._decode(self._window)
        settled = text[: self._settled(text)]
        piece = self._settle(settled)
        if piece and settled == text:
            # The newest tokens are the next ones' context, unless a decoder may strip them all.
            context = self._decode(self._window[self._last :])
            if context.strip():
                self._window, text, self._shown = self._window[self._last :], context, context
            self._last = len(self._window)
        if len(self._window) > _LONGEST:
            held = max(len(text) - len(self._shown), 0)
            self._window = self._tail(self._window, _LONGEST // 2)
            text = self._decode(self._window)
            self._shown = text[: max(len(text) - held, 0)]
            self._last = len(self._window)
        return piece

    def _goes_on(self, token: int) -> bool:
        """Whether a token leaves a run of bytes open: a byte, or one that decoding skips."""
        if not self._run_bytes:
            return False
        for newest in (token, *reversed(self._window)):
            if newest in self._run_bytes:
                return True
            if not self._is_skipped(newest):
                return False
        return False

    def _is_skipped(self, token: int) -> bool:
        """Whether decoding leaves a token out, as it does with special tokens."""
        if token not in self._skipped:
            byte = min(self._run_bytes)
            together = self._decode([byte, byte])
            self._skipped[token] = self._decode([byte, token, byte]) == together
        return self._skipped[token]

    def _settle(self, text: str) -> str:
        """Return what a settled text adds to the text that was returned."""
        shown, kept = self._shown, 0
        while kept < min(len(shown), len(text)) and shown[kept] == text[kept]:
            kept += 1
        if kept == len(text):
            return ""
        self._shown = text
        return text[kept:]

    def _settled(self, text: str) -> int:
        """Return the number of characters of a text that no later token changes."""
        for pattern in (_UNFINISHED, self._held):
            if pattern is not None and (tail := pattern.search(text)):
                return tail.start()
        return len(text)

    def _tail(self, tokens: list[int], most: int = _LONGEST) -> list[int]:
        """Return the last tokens, without cutting a run of bytes."""
        start = at = max(len(tokens) - most, 0)
        between = 0  # tokens that are skipped since the last byte
        while self._run_bytes and at and between <= _LONGEST:
            if tokens[at] in self._run_bytes:
                start, between = at - 1, 0
            elif self._is_skipped(tokens[at]):
                between += 1
            else:
                break
            at -= 1
        return tokens[start:]


def _ids(name: str, tokens: Any) -> list[int]:
    """Return token ids as integers; ValueError naming one that is not."""
    try:
        given = list(tokens)
    except TypeError as error:
        raise ValueError(f"{name} is {tokens!r}: must be a sequence of token ids") from error
    ids = []
    for place, token in enumerate(given):
        try:
            ids.append(operator.index(token))
        except TypeError as error:
            raise ValueError(
                f"{name}[{place}] is {described(token)}: must be a token id, an integer"
            ) from error
    return ids


def _bytes_of(tokenizer: Tokenizer) -> Mapping[int, int]:
    """Return the byte of each token whose vocabulary entry is one."""
    matches = ((token, _BYTE.fullmatch(piece)) for token, piece in enumerate(tokenizer.pieces))
    return {token: int(match[1], 16) for token, match in matches if match}


def _voids_runs(tokenizer: Tokenizer, byte_of: Mapping[int, int]) -> bool:
    """Whether an invalid byte also replaces the characters before it in its run."""
    letters = {token for token, byte in byte_of.items() if chr(byte).isascii() and byte >= 0x41}
    invalid = {token for token, byte in byte_of.items() if byte >= 0x80}
    if not invalid:
        return False
    if not letters:
        return True  # it cannot be tried
    letter = min(letters)
    text = tokenizer.decode([letter, min(invalid)])
    return "\ufffd" in text and chr(byte_of[letter]) not in text


def _cleans_up(tokenizer: Tokenizer) -> bool:
    """Whether decoding removes the space before a mark such as a comma."""
    try:
        text = tokenizer.decode(tokenizer.encode("a ,"))
        if "," in text:
            return " ," not in text
    except Exception:  # whatever it raises for a text without tokens
        pass

    # Composed from the vocabulary where text cannot be encoded.
    def first(fits: Callable[[str], bool]) -> list[int]:
        return [token for token, piece in enumerate(tokenizer.pieces) if fits(piece)][:1]

    word, space = first(str.isalpha), first(lambda piece: piece.endswith(" "))
    mark = first(lambda piece: piece in tuple(",.?!"))
    if not (word and space and mark):
        return False
    spaced = tokenizer.decode(word + space)
    return spaced.endswith(" ") and not tokenizer.decode(word + space + mark).startswith(spaced)


class StopText:
    """Passes a text on up to the first of several stop strings, however it is cut into pieces.

    What could be the beginning of a stop string is held back until that is decided. The string that
    is complete first ends the text; of two complete at the same place, the longer one. None of it is
    passed on.

    Attributes:
      is_stopped: whether a stop string was found.

    >>> text = StopText(["END"])
    >>> text.push("the E"), text.push("N"), text.push("V, EN"), text.push("D of"), text.is_stopped
    ('the ', '', 'ENV, ', '', True)
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Begin a text; ValueError for a stop string that is empty or not a string."""
        if isinstance(stops, str):
            raise ValueError(
                f"stops is {stops!r}: must be a sequence of strings, such as [{stops!r}]"
            )
        self._stops = tuple(stops)
        for place, stop in enumerate(self._stops):
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"stop string {place} is {stop!r}: must be at least one character")
        self._held = ""
        self.is_stopped = False

    def push(self, piece: str) -> str:
        """Return what is certain to be before any stop string; nothing once one was found."""
        if self.is_stopped:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """End the text: return what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
