"""Any model as a callable from contexts to rows, with its answers checked.

A provider must be a pure function of the context: the same row for the same context, whatever was
asked before or in the same batch. Laws are lossless only then. `audit_provider` asks again and
compares; the loops themselves never ask twice, so that their counts stay exact.

The law of a row of probabilities, in any dtype, is row / sum(row), where entries below the least
normal float32 (1.1754944e-38) count as 0. Rows are normalised once, as they arrive.

In the shape descriptions V denotes the vocabulary.
"""

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxspec.checks import MASS_TOLERANCE, RowError, assert_kind, assert_whole, described
from jaxspec.storage import Token, shortened, shown

Context: TypeAlias = tuple[Token, ...]
"""Token ids of the prompt, the committed tokens and a path, in order."""


class Query(NamedTuple):
    """One context to be scored, with the id of its answer."""

    id: int
    context: Context


class Answer(NamedTuple):
    """The row for the query of the same id."""

    id: int
    row: Any  # [V]


class AnswerError(RowError):
    """A callback's answers do not match what it was asked.

    Attributes:
      fault: "malformed" (not a row, or in a batch not pairs of id and row), "missing", "extra" or
        "reordered".
    """


class ImpureProviderError(RowError):
    """A provider answered the same context differently."""


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The transform of a provider whose rows are logits: softmax(logits / temperature).

    Logits may be -inf, not +inf or NaN. At temperature 0 the row is exactly the point mass on the
    lowest token of greatest logit.

    Attributes:
      temperature: finite, at least 0; 0 for greedy.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError unless the temperature is a finite number >= 0."""
        given = self.temperature
        is_number = isinstance(given, int | float | np.integer | np.floating)
        if not is_number or isinstance(given, bool):
            raise ValueError(f"temperature is {described(given)}: it must be a number, at least 0")
        if not 0 <= given <= sys.float_info.max:
            raise ValueError(f"temperature is {given}: it must be finite and at least 0")

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities of logits [V], computed in float64, as float32 [V].

        >>> Softmax(temperature=0)(np.array([1.0, 3.0, 3.0])).tolist()
        [0.0, 1.0, 0.0]
        """
        temperature = float(self.temperature)
        if temperature == 0:
            return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float32)
        exact = logits.astype(np.float64)
        # The max goes off first: a logit over a tiny temperature may overflow, downwards only.
        with np.errstate(over="ignore"):
            weights = np.exp((exact - exact.max()) / temperature)
        return _single(weights / weights.sum())


@dataclasses.dataclass(frozen=True)
class Usage:
    """What was asked of a model: contexts scored, and calls of the callback or forwards."""

    queries: int = 0
    calls: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        """Add up."""
        return Usage(self.queries + other.queries, self.calls + other.calls)


@dataclasses.dataclass(frozen=True)
class Provider:
    """A model given as a callable.

    Attributes:
      name: the model's id in records; comparisons need equal ids.
      vocab: V.
      ask: one context -> row [V]; or, with `is_batched`, a list of `Query` -> an `Answer` (or pair)
        for each, with the same ids in the same order. A row is an array of float64, float32, float16
        or bfloat16, a list of floats, or what numpy copies into such an array. Rows are copied as
        they arrive, so a callback may reuse one buffer.
      is_batched: which of the two `ask` is.
      transform: None if rows are probabilities; `Softmax(temperature)` if they are logits.
      max_context: most tokens of a context that it can be asked about; None for no limit. A target's
        texts end there; a draft is asked as long as it can be.

    >>> coin = Provider(name="coin", vocab=2, ask=lambda context: [0.25, 0.75])
    >>> rows, usage = coin.rows([(0,), (0, 1)])
    >>> rows.tolist(), usage
    ([[0.25, 0.75], [0.25, 0.75]], Usage(queries=2, calls=2))
    """

    name: str
    vocab: int
    ask: Callable[[Any], Any]
    is_batched: bool = False
    transform: Softmax | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming an argument of another kind, or an empty vocabulary."""
        assert_kind("a provider's name", self.name, str, "a string, the model's id in records")
        place = f"provider {self.name!r}: "
        assert_whole(f"{place}vocab", self.vocab, 1)
        assert_kind(f"{place}ask", self.ask, Callable, "a function of a context")
        assert_kind(f"{place}is_batched", self.is_batched, bool, "True or False")
        wanted = "None for rows of probabilities, Softmax(temperature) for logits"
        assert_kind(f"{place}transform", self.transform, Softmax | None, wanted)
        if self.max_context is not None:
            assert_whole(f"{place}max_context", self.max_context, 1)

    def check_context(self, context: Sequence[int] | np.ndarray) -> Context:
        """Return a context as a tuple of plain integers; see `check_context`."""
        return check_context(self.name, self.vocab, context)

    def rows(self, contexts: Sequence[Context]) -> tuple[np.ndarray, Usage]:
        """Ask for the rows of contexts, in one call if the provider is batched.

        Returns:
          (float32 [n, V] probabilities, the usage). Without contexts there is no call. A row of
          probabilities is divided by its sum where that is off 1 by more than float32 rounding.

        Raises:
          RowError: naming the provider, the context and the value; an `AnswerError` if the answers
            do not match the contexts. What the callback itself raises passes through.
        """
        if not contexts:
            return np.zeros((0, self.vocab), np.float32), Usage()
        if self.is_batched:
            queries = [Query(number, context) for number, context in enumerate(contexts)]
            answers: Iterable[np.ndarray] = self._match(queries, self.ask(list(queries)))
            calls = 1
        else:
            answers = (self._copy(self.ask(context), context) for context in contexts)
            calls = len(contexts)
        rows = [
            probabilities(self.name, self.vocab, context, row, self.transform)
            for context, row in zip(contexts, answers, strict=True)
        ]
        return np.stack(rows), Usage(len(contexts), calls)

    def _copy(self, row: Any, context: Context | None) -> np.ndarray:
        """Copy a row into a separate array."""
        place = f"{self.name}: row for context {_shown_context(context)}"
        # numpy would take the numbers of these and drop their meaning: a mask, a unit, a bool.
        if _is_other_array(row):
            is_masked = np.ma.isMA(row)
            wanted = "with a probability where it is masked" if is_masked else "np.asarray(row)"
            what = f"{place} is a {type(row).__name__}: give a plain array, {wanted}"
            raise AnswerError(what, fault="malformed")
        strange = _strange_entry(row)
        if strange is not None:
            raise AnswerError(
                f"{place}: entry {strange} is {described(row[strange])}", fault="malformed"
            )
        try:
            return np.array(row)
        except Exception as error:  # whatever the row's library raises for what it cannot copy
            what = f"{place} is not an array: {shortened(str(error))}"
            raise AnswerError(what, fault="malformed") from error

    def _match(self, queries: list[Query], answers: Any) -> list[np.ndarray]:
        """Compare the ids of a batch of answers with those of its queries; return the rows."""
        first = _shown_context(queries[0].context)
        asked = f"expected ids 0 to {len(queries) - 1}, the first for context {first}"
        shown_pair = f"wanted Answer(id, row); {asked}"
        if not isinstance(answers, Iterable):
            what = f"the batch callback returned a {type(answers).__name__}, wanted a list of"
            raise AnswerError(f"{self.name}: {what} Answer(id, row); {asked}", fault="malformed")
        contexts = dict(queries)
        rows: dict[int, np.ndarray] = {}
        for place, answer in enumerate(answers):
            where = f"{self.name}: answer {place}"
            if not isinstance(answer, tuple | list) or len(answer) != 2:
                what = f"{where} is a {type(answer).__name__}, {shown_pair}"
                raise AnswerError(what, fault="malformed")
            try:
                number = operator.index(answer[0])
            except TypeError as error:
                what = f"{where} has id {answer[0]!r}, not an integer; {asked}"
                raise AnswerError(what, fault="malformed") from error
            if number not in contexts:
                what = f"{self.name}: a row for id {number}, which was not asked for; {asked}"
                raise AnswerError(what, fault="extra")
            if number in rows:
                what = f"two rows for id {number}, context {_shown_context(contexts[number])}"
                raise AnswerError(f"{self.name}: {what}", fault="extra")
            rows[number] = self._copy(answer[1], contexts[number])
        for number, context in queries:
            if number not in rows:
                what = f"no row for id {number}, context {_shown_context(context)}"
                raise AnswerError(f"{self.name}: {what}", fault="missing")
        for place, number in enumerate(rows):
            if place != number:
                wanted = f"wanted id {place}, context {_shown_context(contexts[place])}"
                what = (
                    f"answer {place} is for id {number}, {wanted}; return rows in the order asked"
                )
                raise AnswerError(f"{self.name}: {what}", fault="reordered")
        return list(rows.values())


def check_context(name: str, vocab: int, context: Sequence[int] | np.ndarray) -> Context:
    """Return a context as a tuple of plain integers, if a model can be asked about it.

    Raises:
      ValueError: it is empty, or holds something that is not a token of the vocabulary.

    >>> check_context("coin", 2, np.array([0, 1, 1]))
    (0, 1, 1)
    """
    wanted = f"{name}: a context is a sequence of token ids"
    if _is_other_array(context):
        raise ValueError(f"{wanted} or a plain array of them, not {described(context)}")
    strange = _strange_entry(context)
    if strange is not None:
        raise ValueError(f"{wanted}: entry {strange} is {described(context[strange])}")
    try:
        tokens = np.asarray(context)
    except Exception as error:  # whatever the library of the context raises
        raise ValueError(f"{wanted}: {shortened(str(error))}") from error
    if tokens.shape == (0,):
        raise ValueError(f"{name}: the context is empty; it holds at least the root's token")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{wanted}, not {shown(context)}")
    bad = np.flatnonzero((tokens < 0) | (tokens >= vocab))
    if bad.size:
        raise ValueError(
            f"{name}: context entry {bad[0]} is {tokens[bad[0]]}, outside the vocabulary of {vocab}"
        )
    return tuple(tokens.tolist())


def probabilities(
    name: str, vocab: int, context: Context, values: np.ndarray, transform: Softmax | None
) -> np.ndarray:
    """Check a model's row in the precision it came in; return it as probabilities, float32 [V].

    Raises:
      RowError: naming model, context and value; its `fault` is "width", "non-finite" or
        "not a distribution".
    """

    def bad(what: str, fault: str = "not a distribution") -> RowError:
        place = f"{name}: row for context {_shown_context(context)}"
        return RowError(f"{place}{what}", fault=fault)

    if values.shape != (vocab,):
        raise bad(f" has shape {values.shape}, wanted ({vocab},)", "width")
    dtype = values.dtype.name
    if dtype not in MASS_TOLERANCE:
        raise bad(f" has dtype {dtype}, wanted a float type: {', '.join(MASS_TOLERANCE)}")
    exact = values.astype(np.float64)
    is_bad = ~np.isfinite(exact)
    if transform is not None:
        is_bad &= exact != -np.inf
    if is_bad.any():
        kind, at = "entry" if transform is None else "logit", int(np.argmax(is_bad))
        raise bad(f": {kind} {at} is {exact[at]}", "non-finite")
    if transform is not None:
        if np.all(exact == -np.inf):
            raise bad(": every logit is -inf, so it has no mass")
        return transform(exact)
    if (exact < 0).any():
        at = int(np.argmax(exact < 0))
        raise bad(f": entry {at} is {exact[at]}, below 0")
    mass = float(exact.sum())
    if abs(mass - 1) > MASS_TOLERANCE[dtype]:
        raise bad(f": mass is {mass}, not 1 within {MASS_TOLERANCE[dtype]}")
    # A row that float32 rounded from one of mass 1 has a mass within 2^-24 of it: it stays.
    return _single(exact if abs(mass - 1) <= 2**-23 else exact / mass)


def audit_provider(
    provider: Provider,
    contexts: Sequence[Context],
    *,
    repeats: int = 2,
    tolerance: float = 0.0,
) -> None:
    """Ask a provider again, in another order and one by one, and compare.

    This finds state, and rows that depend on the rest of their batch, if they show on these contexts.
    Each is asked `1 + repeats` times: do not call it inside a decode whose calls are counted.

    Args:
      provider: the model.
      contexts: what to ask.
      repeats: how often to ask again, at least once.
      tolerance: greatest allowed difference of an entry; 0 for equal bits. A network compiled for
        several batch sizes may need 1e-5.

    Raises:
      ImpureProviderError: naming the context, the entry and both values.
      ValueError: nothing would be asked again.

    >>> steps = iter([[0.5, 0.5], [0.25, 0.75]])
    >>> audit_provider(Provider("a", vocab=2, ask=lambda context: next(steps)), [(0,)])
    Traceback (most recent call last):
    jaxspec.models.provider.ImpureProviderError: a: asked again for (0,), entry 0 is 0.25, was 0.5
    """
    if repeats < 1 or not contexts:
        raise ValueError(f"{repeats} repeats for {len(contexts)} contexts: nothing is asked again")
    first, _ = provider.rows(contexts)
    for repeat in range(repeats):
        for index in range(len(contexts))[:: 1 if repeat % 2 else -1]:
            again, _ = provider.rows([contexts[index]])
            differs = np.flatnonzero(np.abs(again[0] - first[index]) > tolerance)
            if differs.size:
                entry = int(differs[0])
                raise ImpureProviderError(
                    f"{provider.name}: asked again for {_shown_context(contexts[index])}, entry "
                    f"{entry} is {again[0][entry]}, was {first[index][entry]}"
                )


def _shown_context(context: Context | None) -> str:
    """Format a context for an error: of a long one its length and its end."""
    if context is None or len(context) <= 16:
        return f"{context}"
    return f"of {len(context)} tokens that ends in {context[-8:]}"


def _single(row: np.ndarray) -> np.ndarray:
    """Round a row to float32; denormals become 0, as on a processor that flushes them."""
    with np.errstate(under="ignore"):
        single = row.astype(np.float32)
    return np.where(single < np.finfo(np.float32).tiny, np.float32(0), single)


def _is_other_array(values: Any) -> bool:
    """Whether values are an array of a subclass, which gives its numbers another meaning."""
    return isinstance(values, np.ndarray) and type(values) not in (np.ndarray, np.memmap)


def _strange_entry(values: Any) -> int | None:
    """Return the first entry of a list that numpy would convert to a number it does not mean."""
    if not isinstance(values, list | tuple):
        return None
    kinds = (bool, np.bool_)
    found = (n for n, each in enumerate(values) if isinstance(each, kinds) or _is_other_array(each))
    return next(found, None)
