"""Any model as a callable from contexts to rows, with its answers checked.

A provider must be a pure function of the context: the same row for the same context, whatever was
asked before or beside it. Laws are lossless only then. `audit_provider` asks again and tells; the
loops themselves never ask twice, so that their counts stay exact.

The law of a row of probabilities, in any dtype, is row / sum(row), where entries below the least
normal float32 (1.1754944e-38) count as 0. Rows are brought to it once, as they arrive.
"""

import dataclasses
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxspec.checks import MASS_TOLERANCE, RowError, assert_kind, assert_whole, described
from jaxspec.storage import Token, shortened, shown

Context: TypeAlias = tuple[Token, ...]
"""Token ids of the prompt, the committed tokens and a path, in order."""


class Query(NamedTuple):
    """One context to be scored, with the id that its answer must carry."""

    id: int
    context: Context


class Answer(NamedTuple):
    """The row for the query of the same id."""

    id: int
    row: Any  # [V]


class MalformedAnswerError(RowError):
    """A callback gave back something that is no row, or in a batch no pair of an id and a row."""


class MissingRowError(RowError):
    """A callback gave back fewer rows than it was asked for."""


class ExtraRowError(RowError):
    """A callback gave back a row that it was not asked for."""


class ReorderedRowError(RowError):
    """A callback gave back the rows in another order than it was asked for."""


class RowWidthError(RowError):
    """A row does not have one entry for each token of the vocabulary."""


class NonFiniteRowError(RowError):
    """A row holds NaN or an infinity that is not allowed there."""


class NotADistributionError(RowError):
    """A row has a negative entry, or its mass is not 1."""


class ImpureProviderError(RowError):
    """A provider answered the same context differently."""


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The transform of a provider whose rows are logits: softmax(logits / temperature).

    Logits may be -inf, not +inf or NaN. At temperature 0 the row is exactly the point mass on the
    lowest token of greatest logit.

    Attributes:
      temperature: 0 for greedy.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a temperature that is no number, negative or not finite."""
        given = self.temperature
        is_number = isinstance(given, int | float | np.integer | np.floating)
        if not is_number or isinstance(given, bool):
            raise ValueError(f"temperature is {described(given)}: it must be a number, at least 0")
        if not 0 <= given <= sys.float_info.max:
            raise ValueError(f"temperature is {given}: it must be finite and at least 0")

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Turn logits [V] into probabilities, float32 [V].

        >>> Softmax(temperature=0)(np.array([1.0, 3.0, 3.0])).tolist()
        [0.0, 1.0, 0.0]
        """
        temperature = float(self.temperature)
        if temperature == 0:
            return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float32)
        exact = logits.astype(np.float64)
        # The peak goes off first: a logit over a tiny temperature may overflow, downwards only.
        with np.errstate(over="ignore"):
            weights = np.exp((exact - exact.max()) / temperature)
        return _single(weights / weights.sum())


@dataclasses.dataclass(frozen=True)
class Usage:
    """What was asked of a provider.

    Attributes:
      queries: contexts scored.
      calls: invocations of the callback.
    """

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
        for each, with the same ids in the same order. A row is a numpy or JAX array of float64,
        float32, float16 or bfloat16, a list of floats, or an object that numpy copies into such an
        array. Rows are copied as they arrive, so a callback may fill one buffer again and again.
      is_batched: which of the two `ask` is.
      transform: None if rows are probabilities; `Softmax(temperature)` if they are logits.
      max_context: most tokens of a context that it can be asked about; None for no limit. A target's
        texts end there, a draft is asked as long as it can be.

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
        """Refuse arguments of another kind, and an empty vocabulary."""
        assert_kind("a provider's name", self.name, str, "a string, the model's id in records")
        place = f"provider {self.name!r}: "
        assert_whole(f"{place}vocab", self.vocab, 1)
        if not callable(self.ask):
            raise ValueError(
                f"{place}ask is {described(self.ask)}: must be a function of a context"
            )
        assert_kind(f"{place}is_batched", self.is_batched, bool, "True or False")
        wanted = "None for rows of probabilities, Softmax(temperature) for logits"
        assert_kind(f"{place}transform", self.transform, Softmax | None, wanted)
        if self.max_context is not None:
            assert_whole(f"{place}max_context", self.max_context, 1)

    def check_context(self, context: Sequence[int] | np.ndarray) -> Context:
        """Return a context as a tuple of plain integers, if this model can be asked about it.

        Raises:
          ValueError: it is empty, or holds something that is not a token of the vocabulary.

        >>> Provider(name="coin", vocab=2, ask=len).check_context(np.array([0, 1, 1]))
        (0, 1, 1)
        """
        wanted = f"{self.name}: a context is a sequence of token ids"
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
            raise ValueError(
                f"{self.name}: the context is empty; it holds at least the root's token"
            )
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{wanted}, not {shown(context)}")
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab))
        if bad.size:
            raise ValueError(
                f"{self.name}: context entry {bad[0]} is {tokens[bad[0]]}, outside the vocabulary of "
                f"{self.vocab}"
            )
        return tuple(tokens.tolist())

    def rows(self, contexts: Sequence[Context]) -> tuple[np.ndarray, Usage]:
        """Ask for the rows of some contexts, in one call if the provider is batched.

        Args:
          contexts: token ids, each of them a tuple.

        Returns:
          (float32 [n, V] probabilities, what it took). No contexts, no call. A row of probabilities is
          divided by its mass where that is off 1 by more than float32 rounds: in half precision it
          may be by 1e-2, and draws are from row / sum(row). Entries below the least normal float32
          are 0.

        Raises:
          RowError: one of its subclasses, naming the provider, the context and the value. What the
            callback itself raises passes through.
        """
        if not contexts:
            return np.zeros((0, self.vocab), np.float32), Usage()
        if self.is_batched:
            queries = [Query(number, context) for number, context in enumerate(contexts)]
            answers = self._match(queries, self.ask(list(queries)))
            checked = [self._check(c, row) for c, row in zip(contexts, answers, strict=True)]
            return np.stack(checked), Usage(len(contexts), 1)
        checked = [self._check(c, self._copy(self.ask(c), c)) for c in contexts]
        return np.stack(checked), Usage(len(contexts), len(contexts))

    def _copy(self, row: Any, context: Context | None) -> np.ndarray:
        """Take a row as an array that the callback no longer holds."""
        place = f"{self.name}: row for context {_shown_context(context)}"
        # Of these numpy would take the numbers and drop what they mean: a mask, a unit, a truth value.
        if _is_other_array(row):
            raise MalformedAnswerError(
                f"{place} is a {type(row).__name__}: give a plain array, "
                + (
                    "with a probability where it is masked"
                    if np.ma.isMA(row)
                    else "np.asarray(row)"
                )
            )
        strange = _strange_entry(row)
        if strange is not None:
            raise MalformedAnswerError(f"{place}: entry {strange} is {described(row[strange])}")
        try:
            return np.array(row)
        except Exception as error:  # whatever the library of the row raises for what it cannot copy
            raise MalformedAnswerError(
                f"{place} is not an array: {shortened(str(error))}"
            ) from error

    def _match(self, queries: list[Query], answers: Any) -> list[np.ndarray]:
        """Hold the ids of a batch of answers against those of its queries."""
        first = _shown_context(queries[0].context)
        asked = f"asked were ids 0 to {len(queries) - 1}, the first for context {first}"
        if not hasattr(answers, "__iter__"):
            raise MalformedAnswerError(
                f"{self.name}: the batch callback gave back a {type(answers).__name__}, wanted a "
                f"list of Answer(id, row); {asked}"
            )
        contexts = dict(queries)
        ids: list[int] = []
        rows: list[np.ndarray] = []
        for place, answer in enumerate(answers):
            if not isinstance(answer, tuple | list) or len(answer) != 2:
                raise MalformedAnswerError(
                    f"{self.name}: answer {place} is a {type(answer).__name__}, wanted "
                    f"Answer(id, row); {asked}"
                )
            try:
                ids.append(operator.index(answer[0]))
            except TypeError as error:
                raise MalformedAnswerError(
                    f"{self.name}: answer {place} has id {answer[0]!r}, not an integer; {asked}"
                ) from error
            rows.append(self._copy(answer[1], contexts.get(ids[-1])))
        seen: set[int] = set()
        for answer_id in ids:
            if answer_id not in contexts:
                raise ExtraRowError(
                    f"{self.name}: a row for id {answer_id}, which was not asked for; {asked}"
                )
            if answer_id in seen:
                raise ExtraRowError(
                    f"{self.name}: two rows for id {answer_id}, context "
                    f"{_shown_context(contexts[answer_id])}"
                )
            seen.add(answer_id)
        for query in queries:
            if query.id not in seen:
                raise MissingRowError(
                    f"{self.name}: no row for id {query.id}, context "
                    f"{_shown_context(query.context)}"
                )
        for place, (query, answer_id) in enumerate(zip(queries, ids, strict=True)):
            if query.id != answer_id:
                raise ReorderedRowError(
                    f"{self.name}: answer {place} is for id {answer_id}, wanted id {query.id}, "
                    f"context {_shown_context(query.context)}; give rows back in the order asked"
                )
        return rows

    def _check(self, context: Context, values: np.ndarray) -> np.ndarray:
        """Check one row, in the precision it came in, and turn it into float32 probabilities."""
        place = f"{self.name}: row for context {_shown_context(context)}"
        if values.shape != (self.vocab,):
            raise RowWidthError(f"{place} has shape {values.shape}, wanted ({self.vocab},)")
        dtype = values.dtype.name
        if dtype not in MASS_TOLERANCE:
            wanted = f"wanted a float type: {', '.join(MASS_TOLERANCE)}"
            raise NotADistributionError(f"{place} has dtype {dtype}, {wanted}")
        exact = values.astype(np.float64)
        if self.transform is not None:
            bad = np.flatnonzero(np.isnan(exact) | (exact == np.inf))
            if bad.size:
                raise NonFiniteRowError(f"{place}: logit {bad[0]} is {exact[bad[0]]}")
            if np.all(exact == -np.inf):
                raise NotADistributionError(f"{place}: every logit is -inf, so it has no mass")
            return self.transform(exact)
        bad = np.flatnonzero(~np.isfinite(exact))
        if bad.size:
            raise NonFiniteRowError(f"{place}: entry {bad[0]} is {exact[bad[0]]}")
        bad = np.flatnonzero(exact < 0)
        if bad.size:
            raise NotADistributionError(f"{place}: entry {bad[0]} is {exact[bad[0]]}, below 0")
        mass = float(exact.sum())
        if abs(mass - 1) > MASS_TOLERANCE[dtype]:
            raise NotADistributionError(
                f"{place}: mass is {mass}, not 1 within {MASS_TOLERANCE[dtype]}"
            )
        # A row that float32 rounded from one of mass 1 has a mass within 2^-24 of it: it stays.
        return _single(exact if abs(mass - 1) <= 2**-23 else exact / mass)


def _shown_context(context: Context | None) -> str:
    """Return a context as it is shown in an error: of a long one its length and its end."""
    if context is None or len(context) <= 16:
        return f"{context}"
    return f"of {len(context)} tokens that ends in {context[-8:]}"


def _single(row: np.ndarray) -> np.ndarray:
    """Round a row to float32; what would be denormal is 0, as it is to a processor that flushes."""
    with np.errstate(under="ignore"):
        single = row.astype(np.float32)
    return np.where(single < np.finfo(np.float32).tiny, np.float32(0), single)


def _is_other_array(values: Any) -> bool:
    """Whether values are an array of a kind whose numbers are not all that it says."""
    return isinstance(values, np.ndarray) and type(values) not in (np.ndarray, np.memmap)


def _strange_entry(values: Any) -> int | None:
    """Return the first entry of a list that numpy would take for a number that it is not."""
    if not isinstance(values, list | tuple):
        return None
    kinds = (bool, np.bool_)
    found = (n for n, each in enumerate(values) if isinstance(each, kinds) or _is_other_array(each))
    return next(found, None)


def audit_provider(
    provider: Provider,
    contexts: Sequence[Context],
    *,
    repeats: int = 2,
    tolerance: float = 0.0,
) -> None:
    """Ask a provider again, in another order and one by one, and compare.

    A provider with state, or whose rows depend on what stands beside them in a batch, is caught if
    the difference shows on these contexts. It is asked `1 + repeats` times for each of them, so call
    this on its own and not inside a decode whose calls are counted.

    Args:
      provider: the model.
      contexts: what to ask.
      repeats: how often to ask again, at least once.
      tolerance: how far two answers may lie apart in an entry; 0 asks for equal bits. A network
        that is compiled for several batch sizes may need 1e-5.

    Raises:
      ImpureProviderError: naming the context, the entry and both values.
      ValueError: nothing would be asked again.

    >>> steps = iter([[0.5, 0.5], [0.25, 0.75]])
    >>> audit_provider(Provider("a", vocab=2, ask=lambda context: next(steps)), [(0,)])
    Traceback (most recent call last):
      ...
    jaxspec.models.provider.ImpureProviderError: a: asked again for context (0,), entry 0 is 0.25, was 0.5
    """
    if repeats < 1 or not contexts:
        raise ValueError(f"{repeats} repeats for {len(contexts)} contexts: nothing is asked again")
    first, _ = provider.rows(contexts)
    for repeat in range(repeats):
        order = range(len(contexts) - 1, -1, -1) if repeat % 2 == 0 else range(len(contexts))
        for index in order:
            again, _ = provider.rows([contexts[index]])
            differs = np.flatnonzero(np.abs(again[0] - first[index]) > tolerance)
            if differs.size:
                entry = int(differs[0])
                raise ImpureProviderError(
                    f"{provider.name}: asked again for context {_shown_context(contexts[index])}, "
                    f"entry {entry} is {again[0][entry]}, was {first[index][entry]}"
                )
