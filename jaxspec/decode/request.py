"""Requests: what one text is decoded from and to, validated once for both loops.

In the shape descriptions B denotes the batch, N nodes, V the vocabulary.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Annotated, Any, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import MOST_TOKENS
from jaxspec.models.provider import Context
from jaxspec.rows import row_of
from jaxspec.sampling import Sampling
from jaxspec.slabs import Penalties
from jaxspec.storage import Range, Token
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
      min_p: keep the tokens at least this times as probable as the most probable; 0 keeps all.
        Default 0.
      logit_bias: from token to nats that are added to its logit, finite; -1e9 forbids it. Default
        none.
      allowed_tokens: the only tokens that may be emitted; None allows all. Default None.
      frequency_penalty: nats taken from a token's logit for each time it was emitted. Default 0.
      presence_penalty: nats taken from the logit of a token that was emitted. Default 0.

    The order is bias, penalties, allowed tokens, temperature, top_k, top_p, min_p. A penalty counts
    the tokens emitted, drafted ones above a node included, not the prompt. The repetition penalty,
    which is not a function of probabilities, is in `jaxspec.slabs.Penalties` alone.
    """

    new_tokens: int | Sequence[int]
    stop_tokens: Tokens | Sequence[Tokens]
    temperature: float | Sequence[float]
    top_k: int | Sequence[int | None] | None
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]]
    allowed_tokens: Tokens | Sequence[Tokens | None] | None
    frequency_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]


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
      min_p: in [0, 1].
      logit_bias: (token, nats) by rising token.
      allowed_tokens: rising; None allows all.
      frequency_penalty: nats.
      presence_penalty: nats.
    """

    prompt: Context
    key_data: tuple[KeyWord, ...]
    key_type: str
    new_tokens: int
    stop_tokens: Context
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float = 0.0
    logit_bias: tuple[tuple[Token, float], ...] = ()
    allowed_tokens: Context | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

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

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were emitted are penalized."""
        return (self.frequency_penalty, self.presence_penalty) != (0, 0)

    @property
    def has_token_settings(self) -> bool:
        """Whether any setting tells tokens apart."""
        return bool(self.logit_bias) or self.allowed_tokens is not None or self.has_penalties

    @property
    def is_neutral(self) -> bool:
        """Whether rows are sampled from as they are."""
        filters = (self.temperature, self.top_k, self.top_p, self.min_p)
        return filters == (1, None, 1, 0) and not self.has_token_settings

    def apply(self, rows: np.ndarray, contexts: Sequence[Context]) -> np.ndarray:
        """Apply the settings to rows of probabilities, float32 [N, V].

        A row p becomes that of `Sampling.logits(log p)`; without settings it stays as it is.

        Args:
          rows: the rows.
          contexts: the text before each row, from the prompt on; rows beyond them are padding.
        """
        if self.is_neutral:
            return rows
        sampling = sampling_of([self], rows.shape[1], has_token_settings=self.has_token_settings)
        counts: Any = None
        if self.has_penalties:
            counts = np.zeros(rows.shape, np.int32)
            for row, context in zip(counts, contexts, strict=False):
                np.add.at(row, np.asarray(context[len(self.prompt) :], np.int64), 1)
        return np.asarray(_apply(rows, sampling, counts))


@jax.jit
def _apply(rows: jax.Array, sampling: Sampling, counts: jax.Array | None) -> jax.Array:
    own = jax.tree.map(lambda x: x[0], sampling)

    def one(row: jax.Array, counts: jax.Array | None) -> jax.Array:
        settings = own
        if counts is not None:
            assert own.penalties is not None
            penalties = dataclasses.replace(own.penalties, counts=counts)
            settings = dataclasses.replace(own, penalties=penalties)
        return row_of(settings.logits(jnp.log(row)[None]), jnp.int32(0))

    return jax.vmap(one)(rows, counts)


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
    min_p: Any = 0.0,
    logit_bias: Any = (),
    allowed_tokens: Any = None,
    frequency_penalty: Any = 0.0,
    presence_penalty: Any = 0.0,
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
    share = number(f"{place}min_p", min_p, float, (0, 1), "from 0 to 1")
    costs = {
        name: number(f"{place}{name}", value, float, (-warmest, warmest), "a finite number of nats")
        for name, value in (
            ("frequency_penalty", frequency_penalty),
            ("presence_penalty", presence_penalty),
        )
    }
    allowed = None
    if allowed_tokens is not None:
        allowed = tuple(sorted({*token_ids(f"{place}allowed_tokens", allowed_tokens, vocab)}))
        if not allowed:
            raise value_error(
                f"{place}allowed_tokens", allowed_tokens, "at least one token, or None for all"
            )
    return Request(
        prompt=tokens,
        key_data=key_data,
        key_type=key_type,
        new_tokens=min(budget, MOST_TOKENS),  # positions are int32
        stop_tokens=tuple(sorted({*token_ids(f"{place}stop_tokens", stop_tokens, vocab)})),
        temperature=warmth,
        top_k=rank if 1 <= rank < vocab else None,
        top_p=mass,
        min_p=share,
        logit_bias=_bias(f"{place}logit_bias", logit_bias, vocab),
        allowed_tokens=allowed,
        **costs,
    )


def _bias(name: str, value: Any, vocab: int) -> tuple[tuple[int, float], ...]:
    """Return a mapping from tokens to biases, or pairs of them, as pairs by rising token."""
    pairs = list(value.items()) if isinstance(value, Mapping) else entries_of(value)
    if pairs is None or any(len(entries_of(pair) or ()) != 2 for pair in pairs):
        raise value_error(name, value, "a mapping from token ids to nats")
    most = float(np.finfo(np.float32).max)
    found = {}
    for token, nats in pairs:
        (token_id,) = token_ids(name, [token], vocab)
        wanted = "a finite number of nats; -1e9 forbids a token"
        found[token_id] = number(f"{name}: token {token_id}", nats, float, (-most, most), wanted)
    return tuple(sorted(found.items()))


def arrays_of(
    requests: Sequence[Request],
    *,
    vocab: int,
    max_context: int,
    slots: int,
    max_stop_tokens: int,
    has_token_settings: bool,
) -> dict[str, Any]:
    """Return the fields of a `BatchState` that requests decide, by name.

    Raises:
      ValueError: a request has more than `max_stop_tokens` stop tokens, or settings of tokens for
        which there is no room.
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
        "sampling": sampling_of(requests, vocab, has_token_settings=has_token_settings),
    }


def sampling_of(requests: Sequence[Request], vocab: int, *, has_token_settings: bool) -> Sampling:
    """Return the settings of requests as arrays [B].

    Args:
      requests: B of them.
      vocab: V.
      has_token_settings: whether bias and penalties are arrays, or None.

    Raises:
      ValueError: a request needs the arrays that are None.
    """
    for n, each in enumerate(requests):
        if each.has_token_settings and not has_token_settings:
            raise ValueError(
                f"sequence {n} has logit_bias, allowed_tokens or a penalty: make the decoder with "
                "token_settings=True"
            )
    temperature = np.array([each.temperature for each in requests], np.float32)
    ranks = [vocab if each.top_k is None else min(each.top_k, vocab) for each in requests]
    top_p = np.array([each.top_p for each in requests]).astype(np.float32)
    bias, penalties = None, None
    if has_token_settings:
        bias = np.zeros((len(requests), vocab), np.float32)
        for row, each in zip(bias, requests, strict=True):
            for token, nats in each.logit_bias:
                row[token] = nats
            if each.allowed_tokens is not None:
                is_allowed = np.isin(np.arange(vocab), each.allowed_tokens)
                row[~is_allowed] = -np.inf
        strengths: dict[str, Any] = {
            "counts": np.zeros((len(requests), vocab), np.int32),
            "repetition": np.ones(len(requests), np.float32),
            "frequency": np.array([each.frequency_penalty for each in requests], np.float32),
            "presence": np.array([each.presence_penalty for each in requests], np.float32),
        }
        penalties = Penalties(**strengths)
    settings: dict[str, Any] = {
        "temperature": np.where(temperature < LEAST, np.float32(0), temperature),
        "top_k": np.array(ranks, np.int32),
        "top_p": np.maximum(top_p, np.float32(LEAST)),
        "min_p": np.array([each.min_p for each in requests], np.float32),
        "bias": bias,
        "penalties": penalties,
    }
    return Sampling(**settings)


def _column(name: str, value: Any, batch: int) -> list[Any]:
    """Spread one value over the batch, or take one for each sequence."""
    entries = entries_of(value)
    is_of_tokens = name in ("stop_tokens", "allowed_tokens")
    if is_of_tokens and all(
        entries_of(each) is None and each is not None for each in entries or ()
    ):
        entries = None  # the tokens of all
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
