"""Requests: what one text is decoded from and to, validated once for both loops.

In the shape descriptions B denotes the batch, N nodes, V the vocabulary.
"""

import dataclasses
from collections.abc import Collection, Sequence, Set
from typing import Annotated, Any, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import MOST_TOKENS
from jaxspec.logits import Logits
from jaxspec.models.provider import Context
from jaxspec.rows import row_of
from jaxspec.storage import Range
from jaxspec.tiles import LEAST
from jaxspec.values import entries_of, is_key, number, token_ids, value_error

KeyWord = Annotated[int, Range(0, 2**32 - 1)]
Tokens: TypeAlias = Collection[int] | np.ndarray | jax.Array


class Options(TypedDict, total=False):
    """Keyword arguments of a decode, in a batch one value for all sequences or one for each.

    Attributes:
      new_tokens: how many tokens to emit, unless the text ends before; default 64.
      stop_tokens: tokens that end the text; one is emitted, and no model is asked what follows it.
        Default none.
      temperature: of the target's rows and of those that sampled drafts draw from; 0 for greedy.
        Default 1.
      top_k: keep the k most probable tokens; None, 0 and -1 keep all. Default None.
      top_p: keep the most probable tokens up to this mass; 1 keeps all. Default 1.
    """

    new_tokens: int | Sequence[int]
    stop_tokens: Tokens | Sequence[Tokens]
    temperature: float | Sequence[float]
    top_k: int | Sequence[int | None] | None
    top_p: float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to decode; see `Options`. Both loops make it of their arguments.

    Attributes:
      prompt: token ids, at least one.
      key_data: words of the request's key.
      key_type: the key's implementation.
      new_tokens: at least 1.
      stop_tokens: rising.
      temperature: finite and at least 0.
      top_k: at least 1; None keeps all.
      top_p: in (0, 1].
    """

    prompt: Context
    key_data: tuple[KeyWord, ...]
    key_type: str
    new_tokens: int
    stop_tokens: Context
    temperature: float
    top_k: int | None
    top_p: float

    @property
    def key(self) -> jax.Array:
        """The request's typed key."""
        words = jnp.asarray(np.asarray(self.key_data, np.uint32))
        return jax.random.wrap_key_data(words, impl=self.key_type)

    def limit(self, max_context: int) -> int:
        """Length at which the text ends at the latest."""
        return min(len(self.prompt) + self.new_tokens, max_context)

    def is_budget(self, max_context: int) -> bool:
        """Whether `new_tokens` sets the limit, not the capacity."""
        return len(self.prompt) + self.new_tokens <= max_context

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Apply temperature and filters to rows of probabilities, float32 [N, V].

        A row p becomes that of `Logits(log p)`; without temperature and filters it stays as it is.
        """
        if (self.temperature, self.top_k, self.top_p) == (1, None, 1):
            return rows
        sampling: dict[str, Any] = {
            name: value[0] for name, value in _sampling([self], rows.shape[1]).items()
        }
        return np.asarray(_apply(rows, sampling))


@jax.jit
def _apply(rows: jax.Array, sampling: dict[str, Any]) -> jax.Array:
    source = Logits(values=jnp.log(rows), **sampling)
    return jax.vmap(lambda row: row_of(source, row))(jnp.arange(rows.shape[0], dtype=jnp.int32))


def requests_of(
    prompts: Sequence[Sequence[int] | np.ndarray],
    keys: jax.Array,
    options: Options,
    *,
    vocab: int,
    max_context: int,
    is_batch: bool = True,
) -> list[Request]:
    """Validate the arguments of a batch of decodes.

    Args:
      prompts: B prompts.
      keys: typed keys [B], or one key for one prompt.
      options: see `Options`.
      vocab: V.
      max_context: most tokens of a text.
      is_batch: False for one decode, whose options are never one for each sequence.

    Raises:
      ValueError: naming the sequence of a batch, the argument and its value.
    """
    texts = None if isinstance(prompts, Set) else entries_of(prompts)
    if not texts:
        raise value_error(
            "prompts", prompts, "a sequence of at least one prompt, each of token ids"
        )
    if is_batch and isinstance(texts[0], int | np.integer):
        raise value_error("prompts", prompts, "a sequence of prompts: put a single one into a list")
    batch = len(texts)
    keys = _keys(keys, batch)
    key_type = str(jax.random.key_impl(keys))
    words = np.asarray(jax.random.key_data(keys)).reshape(batch, -1).tolist()
    columns = {
        name: _column(name, value, batch) if is_batch else [value]
        for name, value in options.items()
    }
    requests = []
    for n, text in enumerate(texts):
        place = f"sequence {n}: " if is_batch else ""
        given = {name: column[n] for name, column in columns.items()}
        request = validated(place, text, tuple(words[n]), key_type, vocab=vocab, **given)
        if (length := len(request.prompt)) > max_context:
            raise ValueError(f"{place}prompt has {length} tokens, max_context is {max_context}")
        requests.append(request)
    return requests


def validated(
    place: str,
    prompt: Any,
    key_data: tuple[int, ...],
    key_type: str,
    *,
    vocab: int,
    new_tokens: Any = 64,
    stop_tokens: Any = (),
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = 1.0,
) -> Request:
    """Make a request of values that are not trusted; `place` begins the errors.

    Raises:
      ValueError: naming the argument and its value.
    """
    tokens = token_ids(f"{place}prompt", prompt, vocab)
    if not tokens or isinstance(prompt, Set):
        raise value_error(f"{place}prompt", prompt, "a sequence of at least one token")
    wanted = "an integer, at least 1"
    budget = number(f"{place}new_tokens", new_tokens, int, (1, np.inf), wanted)
    wanted = "an integer, at least 1; None, 0 or -1 keep all tokens"
    rank = -1 if top_k is None else number(f"{place}top_k", top_k, int, (-1, np.inf), wanted)
    wanted, warmest = "finite and at least 0", float(np.finfo(np.float32).max)
    warmth = number(f"{place}temperature", temperature, float, (0, warmest), wanted)
    mass = number(f"{place}top_p", top_p, float, (5e-324, 1), "above 0 and at most 1")
    return Request(
        prompt=tokens,
        key_data=key_data,
        key_type=key_type,
        new_tokens=min(budget, MOST_TOKENS),  # positions are int32
        stop_tokens=tuple(sorted({*token_ids(f"{place}stop_tokens", stop_tokens, vocab)})),
        temperature=warmth,
        top_k=rank if 1 <= rank < vocab else None,
        top_p=mass,
    )


def arrays_of(
    requests: Sequence[Request], *, vocab: int, max_context: int, slots: int, max_stop_tokens: int
) -> dict[str, np.ndarray | jax.Array]:
    """Return the fields of a `BatchState` that requests decide, by name.

    Raises:
      ValueError: a request has more than `max_stop_tokens` stop tokens.
    """
    tokens = np.zeros((len(requests), slots), np.int32)
    stops = np.full((len(requests), max_stop_tokens), -1, np.int32)
    for n, each in enumerate(requests):
        if (count := len(each.stop_tokens)) > max_stop_tokens:
            raise ValueError(
                f"sequence {n}: stop_tokens are {count} tokens, there is room for "
                f"{max_stop_tokens}: raise max_stop_tokens"
            )
        tokens[n, : len(each.prompt)] = each.prompt
        stops[n, :count] = each.stop_tokens
    words = jnp.asarray(np.array([each.key_data for each in requests], np.uint32))
    return {
        "tokens": tokens,
        "length": np.array([len(each.prompt) for each in requests], np.int32),
        "limit": np.array([each.limit(max_context) for each in requests], np.int32),
        "is_budget": np.array([each.is_budget(max_context) for each in requests]),
        "stop_tokens": stops,
        "keys": jax.random.wrap_key_data(words, impl=requests[0].key_type),
        **_sampling(requests, vocab),
    }


def _sampling(requests: Sequence[Request], vocab: int) -> dict[str, np.ndarray]:
    """Return temperature float32 [B], top_k int32 [B] and top_p float32 [B]."""
    temperature = np.array([each.temperature for each in requests], np.float32)
    ranks = [vocab if each.top_k is None else min(each.top_k, vocab) for each in requests]
    top_p = np.array([each.top_p for each in requests]).astype(np.float32)
    return {
        "temperature": np.where(temperature < LEAST, np.float32(0), temperature),
        "top_k": np.array(ranks, np.int32),
        "top_p": np.maximum(top_p, np.float32(LEAST)),
    }


def _column(name: str, value: Any, batch: int) -> list[Any]:
    """Spread one value over the batch, or take one for each sequence."""
    entries = entries_of(value)
    if name == "stop_tokens" and all(entries_of(each) is None for each in entries or ()):
        entries = None  # the stop tokens of all
    if entries is None:
        return [value] * batch
    if len(entries) != batch or isinstance(value, Set):
        wanted = f"one value for all sequences, or one for each of {batch}"
        raise value_error(name, value, wanted)
    return entries


def _keys(keys: Any, batch: int) -> jax.Array:
    if isinstance(keys, jax.Array) and is_key(keys):
        if keys.shape == (batch,):
            return keys
        if keys.shape == () and batch == 1:
            return keys[None]
    if batch == 1:
        raise value_error("key", keys, "one typed key, jax.random.key(seed)")
    raise value_error(
        "keys", keys, f"{batch} typed keys, jax.random.split(jax.random.key(seed), {batch})"
    )
