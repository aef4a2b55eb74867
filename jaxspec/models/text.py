"""Text as token ids, one a character, and the part of a text that is held out.

In the shape descriptions V denotes the size of the alphabet, L the length of a sequence of ids.
"""

import numpy as np
import numpy.typing as npt

_BLOCK = 8192  # characters per block of the held-out split
_SHARE = 20  # one block in so many is held out


class TextError(ValueError):
    """A text, an alphabet or an order that no model can be counted from."""


class ContextError(ValueError):
    """A context, or another array of token ids, that does not fit a model's alphabet."""


def encode(text: str, alphabet: str) -> npt.NDArray[np.int32]:
    """Return the token id of every character.

    `decode(encode(text, alphabet), alphabet)` is the text.

    Args:
      text: any length.
      alphabet: sorted distinct symbols.

    Returns:
      int32 [len(text)] in [0, V).

    Raises:
      TextError: a symbol outside the alphabet, or an alphabet that is not sorted distinct symbols.

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
    strange = np.flatnonzero(known.take(tokens, mode="clip") != points)
    if strange.size:
        at = int(strange[0])
        raise TextError(f"text[{at}] is {text[at]!r}, not in the alphabet {alphabet!r}; replace it")
    return tokens.astype(np.int32)


def decode(tokens: npt.ArrayLike, alphabet: str) -> str:
    """Return the text of token ids.

    Args:
      tokens: integers [L] in [0, V); take padding off first.
      alphabet: the symbols.

    Returns:
      L characters.

    Raises:
      ContextError: an id outside [0, V), not integers, or not one axis.

    >>> decode([2, 0, 1], "abc")
    'cab'
    """
    ids = token_ids(tokens, "tokens", 0, len(alphabet))
    if ids.ndim != 1:
        raise ContextError(f"tokens has shape {ids.shape}, not [L]; decode one sequence at a time")
    return "".join(alphabet[i] for i in ids)


def split_text(text: str, held_out: bool = False) -> str:
    """Return the training part of a text, or the part held out for measurements.

    The last of every 20 blocks of 8192 characters is held out; a text of fewer than 20 blocks is
    all training. BatchedNetwork are joined as they come, so a few n-grams at the seams were never written.

    Args:
      text: any length.
      held_out: whether to return the held-out blocks; else all the others.

    Returns:
      The blocks chosen, in order.

    >>> text = "a" * 19 * 8192 + "b" * 8192 + "c"
    >>> set(split_text(text, held_out=True)), len(split_text(text))
    ({'b'}, 155649)
    """
    blocks = (text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))
    return "".join(b for n, b in enumerate(blocks) if (n % _SHARE == _SHARE - 1) == held_out)


def token_ids(value: npt.ArrayLike, name: str, low: int, high: int) -> npt.NDArray[np.int64]:
    """Return token ids as int64 [..., L], all in [low, high), or say what is wrong."""
    ids = np.asarray(value)
    if ids.ndim == 0:
        raise ContextError(f"{name} is a scalar; give an array [..., L] of token ids, L may be 0")
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ContextError(f"{name} has dtype {ids.dtype}; token ids are integers")
    refuse(ids, (ids < low) | (ids >= high), name, f"outside [{low}, {high}); use encode")
    return ids.astype(np.int64)


def refuse(ids: npt.NDArray[np.integer], bad: npt.NDArray[np.bool_], name: str, why: str) -> None:
    """Raise for the first bad entry, if there is one."""
    if bad.any():
        at = np.argwhere(bad)[0].tolist()
        raise ContextError(f"{name}{at} is {ids[tuple(at)]}, {why}")
