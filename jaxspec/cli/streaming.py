"""Text on a terminal as it is decoded, with drafted and accepted tokens marked."""

import os
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from jaxspec.decode import DecodedText, Ending, Source
from jaxspec.models import Detokenizer, StopText
from jaxspec.models.network import Tokenizer

MARKS = {"colour": ("\x1b[32m", "\x1b[0m"), "brackets": ("[", "]"), "none": ("", "")}


class Writer:
    """Writes the new part of a text, drafted spans between marks.

    Part of a character, or what may be the beginning of a stop string, is held back until it is
    certain. The token that ended a text, and a stop string, are not written.

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
        """Create a writer for the text after a prompt."""
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop = StopText(stops)
        self._marks = marks
        self._out = out
        self._is_drafted: deque[bool] = deque()  # for each character held back
        self.taken = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stop.is_stopped

    def __call__(self, text: DecodedText) -> bool:
        """Write what is new; return whether a stop string ended the text."""
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
        return self.is_stopped

    def _marked(self, text: str) -> list[tuple[str, bool]]:
        """Return the characters no longer held back, each with whether it was drafted."""
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


def marks_for(wanted: str, out: TextIO) -> str:
    """Return the kind of marks; "auto" is colour on a terminal, brackets elsewhere."""
    if wanted != "auto":
        return wanted
    return "colour" if out.isatty() and "NO_COLOR" not in os.environ else "brackets"
