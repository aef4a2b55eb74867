"""Text as token ids, one per character, and the part of a text that is held out.

In the shape descriptions V denotes the size of the alphabet, L the length of a sequence of ids.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_BLOCK = 8192  # characters per block of the held-out split
_HELD_OUT_EVERY = 20  # blocks


class TextError(ValueError):
    """A text, alphabet, order or array of token ids that does not fit a model of characters."""


class CharacterTokenizer:
    """A tokenizer with one token per character; see `jaxspec.models.network.Tokenizer`.

    >>> tokenizer = CharacterTokenizer("abc")
    >>> tokenizer.encode("cab"), tokenizer.decode([2, 0, 1])
    ([2, 0, 1], 'cab')
    """

    def __init__(self, alphabet: str) -> None:
        """Take the sorted distinct characters, in the order of their ids."""
        self.alphabet = alphabet

    @property
    def pieces(self) -> Sequence[str]:
        """The character of each id."""
        return tuple(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Return the id of each character; TextError for a character outside the alphabet."""
        return encode(text, self.alphabet).tolist()

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Return the text of ids [L]; TextError for an id outside the alphabet."""
        return decode(tokens, self.alphabet)


def encode(text: str, alphabet: str) -> npt.NDArray[np.int32]:
    """Return the token id of each character, int32 [len(text)] in [0, V).

    Raises:
      TextError: a character outside the alphabet, or an alphabet that is not sorted distinct
        characters.

    >>> encode("cab", "abc").tolist()
    [2, 0, 1]
    """
    known, points = (
        np.frombuffer(symbols.encode("utf-32-le", "surrogatepass"), np.uint32)
        for symbols in (alphabet, text)
    )
    if not alphabet or (known[1:] <= known[:-1]).any():
        raise TextError(f"alphabet {alphabet!r} is empty, unsorted or repeats a symbol; sort a set")
    tokens = np.searchsorted(known, points)
    unknown = np.flatnonzero(known.take(tokens, mode="clip") != points)
    if unknown.size:
        at = int(unknown[0])
        raise TextError(f"text[{at}] is {text[at]!r}, not in the alphabet {alphabet!r}; replace it")
    return tokens.astype(np.int32)


def decode(tokens: npt.ArrayLike, alphabet: str) -> str:
    """Return the text of token ids [L].

    Raises:
      TextError: an id outside [0, V), not integers, or not one axis.

    >>> decode([2, 0, 1], "abc")
    'cab'
    """
    ids = token_ids(tokens, "tokens", 0, len(alphabet))
    if ids.ndim != 1:
        raise TextError(f"tokens has shape {ids.shape}, not [L]; decode one sequence at a time")
    return "".join(alphabet[i] for i in ids)


def split_text(text: str, held_out: bool = False) -> str:
    """Return the training part of a text, or the part held out for measurements.

    The last of every 20 blocks of 8192 characters is held out; a text of fewer than 20 blocks is
    all training. Blocks are joined without a mark, so a few n-grams at the seams do not occur in the
    text.

    Args:
      text: any length.
      held_out: whether to return the held-out blocks; else all the others.

    >>> text = "a" * 19 * 8192 + "b" * 8192 + "c"
    >>> set(split_text(text, held_out=True)), len(split_text(text))
    ({'b'}, 155649)
    """
    blocks = (text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))
    last = _HELD_OUT_EVERY - 1
    return "".join(b for n, b in enumerate(blocks) if (n % _HELD_OUT_EVERY == last) == held_out)


def token_ids(value: npt.ArrayLike, name: str, low: int, high: int) -> npt.NDArray[np.int64]:
    """Return token ids as int64 [..., L]; TextError unless all are integers in [low, high)."""
    ids = np.asarray(value)
    if ids.ndim == 0:
        raise TextError(f"{name} is a scalar; give an array [..., L] of token ids, L may be 0")
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise TextError(f"{name} has dtype {ids.dtype}; token ids are integers")
    assert_none(ids, (ids < low) | (ids >= high), name, f"outside [{low}, {high}); use encode")
    return ids.astype(np.int64)


def assert_none(
    ids: npt.NDArray[np.integer], bad: npt.NDArray[np.bool_], name: str, why: str
) -> None:
    """Raise TextError for the first bad entry, if there is one."""
    if bad.any():
        at = np.argwhere(bad)[0].tolist()
        raise TextError(f"{name}{at} is {ids[tuple(at)]}, {why}")
