"""What a decode is asked for: checked on the host, by the same functions for both loops.

All errors are a `ValueError` that names the argument, its value and, in a batch, the row. In the
shape descriptions B denotes the batch, S the slots of a text, K the stop tokens there is room for.
"""

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.checks import assert_between, described
from jaxspec.rows import LEAST


def batch_of(prompts: Any) -> int:
    """Return B, how many prompts there are."""
    try:
        batch = len(prompts)
    except TypeError as error:
        raise ValueError(
            f"prompts is {described(prompts)}: must be a sequence of prompts, each of token ids"
        ) from error
    if batch < 1:
        raise ValueError("there are no prompts: give at least one")
    return batch


def keys_of(keys: Any, batch: int) -> jax.Array:
    """Return the typed keys [B]; one key is enough for one prompt."""
    is_key = isinstance(keys, jax.Array) and jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if is_key and keys.ndim == 0 and batch == 1:
        return keys[None]
    if not is_key or keys.shape != (batch,):
        raise ValueError(
            f"keys must be {batch} typed keys, as jax.random.split(jax.random.key(seed), {batch}), "
            f"not {keys}"
        )
    return keys


def tokens_of(name: str, prompt: Any) -> np.ndarray:
    """Return token ids as an array of integers [n]; empty where there are none."""
    tokens = _array(prompt)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: wanted a sequence of token ids, not {reprlib.repr(prompt)}, "
            f"{described(type(prompt))}"
        )
    return tokens


def prompt_of(row: int, prompt: Any, vocab: int, max_length: int) -> np.ndarray:
    """Return the token ids of one prompt, at least one."""
    tokens = tokens_of(f"prompt {row}", prompt)
    if tokens.size == 0:
        raise ValueError(f"prompt {row} is empty: a decode starts after at least one token")
    bad = np.flatnonzero((tokens < 0) | (tokens >= vocab))
    if bad.size:
        raise ValueError(
            f"prompt {row}: token {bad[0]} is {tokens[bad[0]]}, outside the vocabulary of {vocab}"
        )
    if len(tokens) > max_length:
        raise ValueError(f"prompt {row} has {len(tokens)} tokens, max_length is {max_length}")
    return tokens


def side_by_side(texts: Sequence[np.ndarray], slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Lay texts out, int32 [B, S] and their lengths int32 [B]."""
    tokens = np.zeros((len(texts), slots), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return tokens, np.array([len(text) for text in texts], np.int32)


def budgets_of(new_tokens: Any, batch: int) -> np.ndarray:
    """Return how many tokens each row may emit, int64 [B], at least 1."""
    budgets = _column("new_tokens", new_tokens, batch, np.int64)
    _check("new_tokens", budgets, budgets >= 1, "at least 1")
    return budgets


def assert_budget(new_tokens: Any) -> None:
    """Raise ValueError unless a value is how many tokens one text may emit; see `budgets_of`."""
    assert_between("new_tokens", new_tokens, 1, 2**64 - 1)


def temperatures_of(temperature: Any, batch: int) -> np.ndarray:
    """Return the temperatures, float32 [B], finite and at least 0."""
    given = _column("temperature", temperature, batch, np.float64)
    with np.errstate(over="ignore"):
        single = given.astype(np.float32)
    _check("temperature", given, (given >= 0) & (single < np.inf), "finite and at least 0")
    return np.where(single < LEAST, np.float32(0), single)


def ranks_of(top_k: Any, batch: int, vocab: int) -> np.ndarray:
    """Return how many tokens each row keeps, int32 [B], from 1 to V; 0 and -1 stand for V."""
    ranks = _column("top_k", vocab if top_k is None else top_k, batch, np.int64, keeps_all=vocab)
    _check("top_k", ranks, ranks >= -1, "at least 1, or 0 or -1 to keep all tokens")
    return np.where(ranks < 1, vocab, np.minimum(ranks, vocab)).astype(np.int32)


def masses_of(top_p: Any, batch: int) -> np.ndarray:
    """Return up to which mass each row keeps tokens, float32 [B], above 0 and at most 1."""
    given = _column("top_p", top_p, batch, np.float64, keeps_all=1.0)
    _check("top_p", given, (given > 0) & (given <= 1), "above 0 and at most 1")
    return np.maximum(given.astype(np.float32), np.float32(LEAST))


def stops_of(stop_tokens: Any, batch: int, vocab: int, room: int) -> np.ndarray:
    """Lay the stop tokens of all rows or of each out, int32 [B, K], then -1."""
    if isinstance(stop_tokens, jax.Array):
        stop_tokens = np.asarray(stop_tokens)
    _assert_collection(stop_tokens)
    is_nested = any(isinstance(each, Collection | np.ndarray) for each in stop_tokens)
    is_nested &= not any(isinstance(each, str) for each in stop_tokens)
    if is_nested and not isinstance(stop_tokens, Sequence | np.ndarray):
        raise ValueError(f"stop_tokens is {stop_tokens!r}: wanted a sequence of token ids")
    by_row = list(stop_tokens) if is_nested else [stop_tokens] * batch
    if len(by_row) != batch:
        raise ValueError(f"stop_tokens are given for {len(by_row)} rows, the batch has {batch}")
    table = np.full((batch, room), -1, np.int32)
    for row, stops in enumerate(by_row):
        ids = stop_ids(stops, vocab, f"row {row}: ")
        if len(ids) > room:
            raise ValueError(
                f"row {row} has {len(ids)} stop tokens, there is room for {room}: raise "
                "max_stop_tokens"
            )
        table[row, : len(ids)] = ids
    return table


def stop_ids(stop_tokens: Any, vocab: int, place: str = "") -> list[int]:
    """Return the stop tokens of one text.

    Args:
      stop_tokens: a sequence or set of token ids.
      vocab: V.
      place: what the error begins with.
    """
    _assert_collection(stop_tokens, place)
    ids = _array(list(stop_tokens) if isinstance(stop_tokens, Collection) else stop_tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{place}stop_tokens are {stop_tokens!r}: wanted token ids")
    for token in ids.tolist():
        if not 0 <= token < vocab:
            raise ValueError(
                f"{place}stop token {token} is outside the vocabulary of {vocab}: it would stop "
                "nothing"
            )
    return ids.tolist()


def _assert_collection(stop_tokens: Any, place: str = "") -> None:
    is_array = isinstance(stop_tokens, np.ndarray | jax.Array) and stop_tokens.ndim > 0
    is_array &= not isinstance(stop_tokens, np.ma.MaskedArray)
    is_many = isinstance(stop_tokens, Collection) and not isinstance(
        stop_tokens, str | bytes | Mapping | np.ndarray | jax.Array
    )
    if not is_array and not is_many:
        raise ValueError(f"{place}stop_tokens is {stop_tokens!r}: wanted a sequence of token ids")


def _array(value: Any) -> np.ndarray:
    """Return an array; of an object where it is no array of numbers, or True and False are among them.

    NumPy would take these for 1 and 0.
    """
    if isinstance(value, list | tuple) and any(isinstance(x, bool | np.bool_) for x in value):
        return np.asarray(None)
    if isinstance(value, np.ma.MaskedArray):  # what is masked is no number
        return np.asarray(None)
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return np.asarray(None)


def _column(
    name: str, value: Any, batch: int, dtype: Any, *, keeps_all: float | None = None
) -> np.ndarray:
    """Spread one number over the batch, or take one for each row."""
    given = _array(value)
    if given.dtype.kind not in "iuf" and isinstance(value, list | tuple) and len(value) == batch:
        for row, each in enumerate(value):
            alone = _array(each)
            if alone.shape != () or alone.dtype.kind not in "iuf":
                hint = "" if keeps_all is None else f"; {keeps_all} keeps all tokens"
                raise ValueError(f"row {row}: {name} is {each!r}: wanted a number{hint}")
    if given.shape not in ((), (batch,)) or given.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {value!r}: wanted a number, or {batch} of them")
    if np.issubdtype(dtype, np.integer) and given.dtype.kind == "f":
        raise ValueError(f"{name} is {value!r}: wanted whole numbers")
    if given.dtype.kind == "u":
        given = np.minimum(given, np.iinfo(np.int64).max)
    return np.broadcast_to(given, (batch,)).astype(dtype)


def _check(name: str, values: np.ndarray, holds: np.ndarray, wanted: str) -> None:
    bad = np.flatnonzero(~holds)
    if bad.size:
        raise ValueError(f"row {bad[0]}: {name} is {values[bad[0]]}: must be {wanted}")
