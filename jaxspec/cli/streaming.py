"""Text on a terminal as it is decoded, with the tokens that were drafted and accepted marked."""

import dataclasses
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

import jax

from jaxspec.decode import BatchState, CompiledDecoder, DecodedText, Ending, Source
from jaxspec.models import Detokenizer, StopText
from jaxspec.models.network import Tokenizer

ROUNDS_AT_A_TIME = 4
"""Rounds between two looks at the text: streaming costs one call of the compiled loop for each."""

MARKS = {"colour": ("\x1b[32m", "\x1b[0m"), "brackets": ("[", "]"), "none": ("", "")}


@dataclasses.dataclass(frozen=True)
class Timed:
    """A text and how long its rounds took; reading the prompt and compiling are not counted.

    Attributes:
      text: the text.
      seconds: of all its rounds.
    """

    text: DecodedText
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second."""
        return len(self.text.new_tokens) / self.seconds if self.seconds else 0.0


class Writer:
    """Writes what is new of a text, drafted stretches between marks.

    Text that is not settled is held back: a part of a character, or what may be the beginning of a
    stop string. The token that ended a text, and a stop string, are not written.

    Attributes:
      taken: new tokens up to the one that ended the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        marks: tuple[str, str],
        out: TextIO,
    ) -> None:
        """Begin after a prompt."""
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop = StopText(stops)
        self._marks = marks
        self._out = out
        self._is_drafted: deque[bool] = deque()  # for each character that is held back
        self.taken = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stop.is_stopped

    def __call__(self, text: DecodedText) -> None:
        """Write what is new."""
        new, sources = text.new_tokens, text.sources[text.prompt_length :]
        shown = len(new) - (text.ending == Ending.STOP)
        pieces: list[tuple[str, bool]] = []
        while self.taken < shown and not self.is_stopped:
            is_drafted = sources[self.taken] == Source.DRAFT
            piece = self._detokenizer.push([new[self.taken]])
            self.taken += 1
            self._is_drafted.extend([is_drafted] * len(piece))
            pieces += self._marked(self._stop.push(piece))
        if text.ending != Ending.NONE and not self.is_stopped:
            self.taken = len(new)
            rest = self._detokenizer.flush()
            is_drafted = bool(sources) and sources[-1] == Source.DRAFT
            self._is_drafted.extend([is_drafted] * len(rest))
            pieces += self._marked(self._stop.push(rest))
            pieces += self._marked(self._stop.flush())
        self._write(pieces)

    def _marked(self, text: str) -> list[tuple[str, bool]]:
        """Return the characters that a stop string no longer holds back, and which were drafted."""
        return [(character, self._is_drafted.popleft()) for character in text]

    def _write(self, characters: Sequence[tuple[str, bool]]) -> None:
        is_marked = False
        for character, is_drafted in characters:
            if is_drafted != is_marked:
                self._out.write(self._marks[0] if is_drafted else self._marks[1])
                is_marked = is_drafted
            self._out.write(character)
        if is_marked:
            self._out.write(self._marks[1])
        self._out.flush()


def decode(decoder: CompiledDecoder, state: BatchState, writer: Writer) -> Timed:
    """Decode a prompt that was read to its end or a stop string, a few rounds at a time."""
    seconds = 0.0
    while True:
        (text,) = state.texts()
        writer(text)
        if text.ending != Ending.NONE or writer.is_stopped:
            return Timed(text=text, seconds=seconds)
        start = time.perf_counter()
        state = jax.block_until_ready(decoder.advance(state, max_rounds=ROUNDS_AT_A_TIME))
        seconds += time.perf_counter() - start


def marks_for(wanted: str, out: TextIO) -> str:
    """Return the kind of marks: those asked for, else what the place bears."""
    if wanted != "auto":
        return wanted
    return "colour" if out.isatty() and "NO_COLOR" not in os.environ else "brackets"
