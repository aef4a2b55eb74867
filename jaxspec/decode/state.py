"""Where a decode stands: a plain immutable record, and what each round did.

A state is its own snapshot. Two decodes that continue from one state do not know of each other, and
one that was saved and read back continues to the identical outcome.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import records
from jaxspec.providers import Context, Usage

SNAPSHOT = "snapshot"
"""Kind of record that `save_state` writes."""

_ENDS = (None, "budget", "stop", "capacity")


@dataclasses.dataclass(frozen=True)
class RoundSummary:
    """What one round did.

    Attributes:
      position: position in the text of its root.
      proposed_depth: levels drafted; 0 for a plain step.
      num_drafted: candidates.
      num_accepted: tokens of the accepted path that were emitted.
      num_emitted: tokens emitted.
      tested: for each node of the accepted path that had candidates, from the root on: how many
        siblings were tested there, and whether the last of them was accepted.
      target: what was asked of the target.
      draft: what was asked of the draft.
      target_batches: hypothetical batches of the target.
      draft_batches: hypothetical batches of the draft.
      status: bits of `jaxspec.Status`.
    """

    position: int
    proposed_depth: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    tested: tuple[tuple[int, bool], ...]
    target: Usage
    draft: Usage
    target_batches: int
    draft_batches: int
    status: int


@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Where a decode stands.

    Attributes:
      tokens: prompt and emitted tokens.
      prompt_length: how many of them are the prompt.
      depth: depth to ask the drafter for in the next round.
      key_data: the key's words; each round derives its draws from it and the root's position.
      key_type: the key's implementation.
      rounds: what has been done.
      finished: None while it goes on; else "budget", "stop" or "capacity".
    """

    tokens: Context
    prompt_length: int
    depth: int
    key_data: tuple[int, ...]
    key_type: str
    rounds: tuple[RoundSummary, ...] = ()
    finished: str | None = None

    @property
    def new_tokens(self) -> Context:
        """The tokens emitted so far."""
        return self.tokens[self.prompt_length :]

    @property
    def key(self) -> jax.Array:
        """The request's key."""
        data = jnp.asarray(np.asarray(self.key_data, np.uint32))
        return jax.random.wrap_key_data(data, impl=self.key_type)


def start_state(prompt: Sequence[int], key: jax.Array, depth: int) -> DecodeState:
    """Begin at a prompt.

    Raises:
      ValueError: the prompt is empty, or the key is not one typed key (`jax.random.key`).
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: a decode starts after at least one token")
    is_key = isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_key or key.shape:
        raise ValueError(f"key must be one typed key, jax.random.key(seed), not {key}")
    return DecodeState(
        tokens=tuple(int(token) for token in prompt),
        prompt_length=len(prompt),
        depth=depth,
        key_data=tuple(np.asarray(jax.random.key_data(key)).ravel().tolist()),
        key_type=str(jax.random.key_impl(key)),
    )


def save_state(path: str | Path, state: DecodeState, decoder: Mapping[str, Any]) -> None:
    """Save a snapshot together with the description of the decoder it belongs to."""
    content = {"decoder": dict(decoder), "state": dataclasses.asdict(state)}
    records.save(path, SNAPSHOT, content)


def load_state(path: str | Path, decoder: Mapping[str, Any]) -> DecodeState:
    """Read a snapshot back.

    Args:
      path: a file written by `save_state`.
      decoder: description of the decoder that is to continue.

    Raises:
      RecordError: the file is no whole snapshot, or it belongs to a decoder of another description;
        the message says which field differs.
    """
    content = records.load(path, SNAPSHOT)
    try:
        saved, state = dict(content["decoder"]), _state_from_plain(content["state"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise records.RecordError(f"{path}: not a whole snapshot: {error!r}") from error
    for name in sorted({*saved, *decoder}):
        if saved.get(name) != decoder.get(name):
            raise records.RecordError(
                f"{path}: {name} was {saved.get(name)!r} when this was saved, is now "
                f"{decoder.get(name)!r}"
            )
    return state


def _state_from_plain(plain: dict[str, Any]) -> DecodeState:
    rounds = tuple(_summary_from_plain(each) for each in plain["rounds"])
    state = DecodeState(
        **{
            **plain,
            "tokens": tuple(_whole(token) for token in plain["tokens"]),
            "prompt_length": _whole(plain["prompt_length"]),
            "depth": _whole(plain["depth"]),
            "key_data": tuple(_whole(word) for word in plain["key_data"]),
            "rounds": rounds,
        }
    )
    if not 1 <= state.prompt_length <= len(state.tokens):
        raise ValueError(f"{len(state.tokens)} tokens, {state.prompt_length} of them the prompt")
    if sum(each.num_emitted for each in rounds) != len(state.new_tokens):
        raise ValueError(f"its rounds did not emit {len(state.new_tokens)} tokens")
    if state.finished not in _ENDS:
        raise ValueError(f"finished is {state.finished!r}")
    if type(state.key_type) is not str or state.key.shape:
        raise ValueError(f"{len(state.key_data)} words are not one key of type {state.key_type!r}")
    return state


def _summary_from_plain(plain: dict[str, Any]) -> RoundSummary:
    counts = {name: value for name, value in dict(plain).items() if type(value) is int}
    summary = RoundSummary(
        **counts,
        tested=tuple((_whole(number), _truth(hit)) for number, hit in plain["tested"]),
        target=Usage(**plain["target"]),
        draft=Usage(**plain["draft"]),
    )
    for usage in (summary.target, summary.draft):
        _whole(usage.queries + usage.calls)
    return summary


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} stands where true or false must")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} stands where a whole number must")
    return value
