"""Where a decode stands: a plain immutable record, and what each round did.

A state is its own snapshot. Two decodes that continue from one state do not know of each other, and
one that was saved and read back continues to the identical outcome.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import storage
from jaxspec.models.provider import Context, Usage
from jaxspec.storage import Place, RecordError, shown

SNAPSHOT = "snapshot"
"""Kind of record that `save_state` writes."""

Ending = Literal["budget", "stop", "capacity"]
"""What ended a decode."""

KeyWord = Annotated[int, storage.Range(0, 2**32 - 1)]

_MOST_KEY_WORDS = 16


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
    key_data: tuple[KeyWord, ...]
    key_type: str
    rounds: tuple[RoundSummary, ...] = ()
    finished: Ending | None = None

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
    storage.save(path, SNAPSHOT, content)


def load_state(path: str | Path, decoder: Mapping[str, Any]) -> DecodeState:
    """Read a snapshot back.

    Args:
      path: a file written by `save_state`.
      decoder: description of the decoder that is to continue.

    Raises:
      RecordError: the file is no whole snapshot, or it belongs to a decoder of another description;
        the message says which field differs.
      OSError: the file cannot be read.
    """
    place = Place(f"{path}: not a whole snapshot")
    content = storage.load(path, SNAPSHOT)
    stored = storage.read(_Stored, content, place)
    wanted = storage.plain(dict(decoder), "the decoder that is to continue")
    for name in sorted({*stored.decoder, *wanted}):
        if stored.decoder.get(name) != wanted.get(name):
            raise RecordError(
                f"{path}: {shown(name)[1:-1]} was {shown(stored.decoder.get(name))} when this "
                f"was saved, is now {shown(wanted.get(name))}"
            )
    _check_state(stored.state, place.field("state"))
    _check_ending(stored.state, wanted, place.field("state"))
    return stored.state


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A snapshot as it is on file."""

    decoder: dict[str, Any]
    state: DecodeState


def _check_state(state: DecodeState, place: Place) -> None:
    """Refuse a state that no decode can have got to."""
    if not 1 <= state.prompt_length <= len(state.tokens):
        raise place.field("prompt_length").error(
            f"is {state.prompt_length}: there are {len(state.tokens)} tokens, and 1 at least is the "
            "prompt"
        )
    position = state.prompt_length - 1
    for number, each in enumerate(state.rounds):
        at = place.field("rounds").item(number)
        _check_summary(each, at)
        if each.position != position:
            raise at.field("position").error(f"is {each.position}, and its root is at {position}")
        position += each.num_emitted
    if position != len(state.tokens) - 1:
        raise place.field("tokens").error(
            f"are {len(state.new_tokens)} after the prompt, and the rounds emitted "
            f"{position + 1 - state.prompt_length}"
        )
    try:
        is_key = len(state.key_data) <= _MOST_KEY_WORDS and state.key.shape == ()
    except Exception:  # a type of keys that is not known, or words that it does not take
        is_key = False
    if not is_key:
        raise place.field("key_data").error(
            f"has {len(state.key_data)} words: they are not one key of type {shown(state.key_type)}"
        )


def _check_summary(summary: RoundSummary, place: Place) -> None:
    """Refuse counts that contradict each other."""
    tests = summary.tested
    orders = (
        (summary.num_emitted >= 1, "num_emitted >= 1"),
        (summary.num_accepted <= summary.num_emitted, "num_accepted <= num_emitted"),
        (summary.num_accepted <= summary.num_drafted, "num_accepted <= num_drafted"),
        (summary.proposed_depth <= summary.num_drafted, "proposed_depth <= num_drafted"),
        (all(number >= 1 for number, _ in tests), "1 candidate tested at each node of tested"),
        (sum(number for number, _ in tests) <= summary.num_drafted, "sum of tested <= num_drafted"),
        (sum(hit for _, hit in tests) <= summary.num_accepted, "hits of tested <= num_accepted"),
        (summary.status < 2**31, "status < 2^31"),
    )
    for holds, order in orders:
        if not holds:
            raise place.error(f"must satisfy {order}")


def _check_ending(state: DecodeState, decoder: Mapping[str, Any], place: Place) -> None:
    """Refuse an end that the decoder's limits contradict: it would be passed over, or come early."""
    new = len(state.new_tokens)
    limits = {
        "budget": (new, decoder.get("new_tokens")),
        "capacity": (len(state.tokens), decoder.get("max_context")),
    }
    for ending, (count, limit) in limits.items():
        if not isinstance(limit, int):
            continue
        if count > limit or (count == limit and state.finished is None):
            raise place.error(f"has {count} tokens and goes on, and the {ending} is {limit}")
        if state.finished == ending and count < limit:
            raise place.field("finished").error(f"is {ending!r}: {count} tokens of {limit}")
    stops = decoder.get("stop_tokens")
    is_stopped = bool(new) and isinstance(stops, list) and state.tokens[-1] in stops
    if isinstance(stops, list) and is_stopped != (state.finished == "stop"):
        last = f"the last token {'is' if is_stopped else 'is not'} a stop token"
        raise place.field("finished").error(f"is {state.finished!r}, and {last}")
