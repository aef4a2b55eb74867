"""Strings that end a text, found in it piece by piece."""

from collections.abc import Sequence


class StopText:
    """Lets a text through up to the first of several strings, however it is cut into pieces.

    What could be the beginning of a stop string is held back until it is one or is not. The string
    that is complete first ends the text; of two complete at the same place, the longer one. Nothing
    of it is let through.

    Attributes:
      is_stopped: whether a stop string was found.

    >>> text = StopText(["END"])
    >>> text.push("the E"), text.push("N"), text.push("V, EN"), text.push("D of"), text.is_stopped
    ('the ', '', 'ENV, ', '', True)
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Begin a text.

        Args:
          stops: what ends it, each at least one character.

        Raises:
          ValueError: one is empty or no string.
        """
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
        """Return what is sure to be before any stop string; nothing more once one was found."""
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
        """End the text: return what was held back, which became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters a text ends with that a stop string begins with, but not all."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
