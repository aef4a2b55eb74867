"""Any model as a callable from contexts to rows, with its answers checked.

A provider must be a pure function of the context: the same row for the same context, whatever was
asked before. Laws are lossless only then. `audit_provider` asks again and tells; the loops
themselves never ask twice, so that their counts stay exact.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxspec.checks import MASS_TOLERANCE, RowError

Context: TypeAlias = tuple[int, ...]
"""Token ids of the prompt, the committed tokens and a path, in order."""


class Query(NamedTuple):
    """One context to be scored, with the id that its answer must carry."""

    id: int
    context: Context


class Answer(NamedTuple):
    """The row for the query of the same id."""

    id: int
    row: Any  # [V]


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
        """Refuse a temperature that is negative or not finite."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: it must be finite and at least 0")

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Turn logits [V] into probabilities, float32 [V]."""
        if self.temperature == 0:
            return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float32)
        scaled = logits.astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled.max())
        return (weights / weights.sum()).astype(np.float32)


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
      ask: one context -> row [V]; or, with `is_batched`, a list of `Query` -> a list of `Answer`
        with the same ids in the same order.
      is_batched: which of the two `ask` is.
      transform: None if rows are probabilities; `Softmax(temperature)` if they are logits.
    """

    name: str
    vocab: int
    ask: Callable[[Any], Any]
    is_batched: bool = False
    transform: Softmax | None = None

    def __post_init__(self) -> None:
        """Refuse an empty vocabulary."""
        if self.vocab < 1:
            raise ValueError(f"provider {self.name!r}: vocab is {self.vocab}, must be at least 1")

    def rows(self, contexts: Sequence[Context]) -> tuple[np.ndarray, Usage]:
        """Ask for the rows of some contexts, in one call if the provider is batched.

        Args:
          contexts: token ids, each of them a tuple.

        Returns:
          (float32 [n, V] probabilities, what it took).

        Raises:
          RowError: one of its subclasses, naming the provider, the context and the value.
        """
        if not contexts:
            return np.zeros((0, self.vocab), np.float32), Usage()
        if self.is_batched:
            queries = [Query(number, context) for number, context in enumerate(contexts)]
            answers = self._match(queries, self.ask(queries))
            usage = Usage(len(contexts), 1)
        else:
            answers = [self.ask(context) for context in contexts]
            usage = Usage(len(contexts), len(contexts))
        checked = [self._check(c, row) for c, row in zip(contexts, answers, strict=True)]
        return np.stack(checked), usage

    def _match(self, queries: list[Query], answers: Iterable[Any]) -> list[Any]:
        """Hold the ids of a batch of answers against those of its queries."""
        found = [Answer(*answer) for answer in answers]
        wanted = {query.id: query for query in queries}
        ids = [int(answer.id) for answer in found]
        for answer_id in ids:
            if answer_id not in wanted:
                raise ExtraRowError(
                    f"{self.name}: a row for id {answer_id}, which was not asked for; asked were "
                    f"ids 0 to {len(queries) - 1}, the first for context {queries[0].context}"
                )
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ExtraRowError(
                f"{self.name}: two rows for id {twice}, context {wanted[twice].context}"
            )
        for query in queries:
            if query.id not in ids:
                raise MissingRowError(
                    f"{self.name}: no row for id {query.id}, context {query.context}"
                )
        for place, (query, answer_id) in enumerate(zip(queries, ids, strict=True)):
            if query.id != answer_id:
                raise ReorderedRowError(
                    f"{self.name}: answer {place} is for id {answer_id}, wanted id {query.id}, "
                    f"context {query.context}; give rows back in the order asked"
                )
        return [answer.row for answer in found]

    def _check(self, context: Context, row: Any) -> np.ndarray:
        """Check one row and turn it into float32 probabilities."""
        values = np.asarray(row)
        place = f"{self.name}: row for context {context}"
        if values.shape != (self.vocab,):
            raise RowWidthError(f"{place} has shape {values.shape}, wanted ({self.vocab},)")
        dtype = values.dtype.name
        if dtype not in MASS_TOLERANCE:
            raise NotADistributionError(f"{place} has dtype {dtype}, wanted a float type")
        values = values.astype(np.float32)
        if self.transform is not None:
            bad = np.flatnonzero(np.isnan(values) | (values == np.inf))
            if bad.size:
                raise NonFiniteRowError(f"{place}: logit {bad[0]} is {values[bad[0]]}")
            if np.all(values == -np.inf):
                raise NotADistributionError(f"{place}: every logit is -inf, so it has no mass")
            return self.transform(values)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise NonFiniteRowError(f"{place}: entry {bad[0]} is {values[bad[0]]}")
        bad = np.flatnonzero(values < 0)
        if bad.size:
            raise NotADistributionError(f"{place}: entry {bad[0]} is {values[bad[0]]}, below 0")
        mass = float(values.sum(dtype=np.float64))
        if abs(mass - 1) > MASS_TOLERANCE[dtype]:
            raise NotADistributionError(
                f"{place}: mass is {mass}, not 1 within {MASS_TOLERANCE[dtype]}"
            )
        return values


def audit_provider(provider: Provider, contexts: Sequence[Context], *, repeats: int = 2) -> None:
    """Ask a provider again, in another order and one by one, and compare bit for bit.

    A provider with state, or whose rows depend on what stands beside them in a batch, is caught if
    the difference shows on these contexts. It is asked `1 + repeats` times for each of them, so call
    this on its own and not inside a decode whose calls are counted.

    Args:
      provider: the model.
      contexts: what to ask.
      repeats: how often to ask again.

    Raises:
      ImpureProviderError: naming the context, the entry and both values.
    """
    first, _ = provider.rows(contexts)
    for repeat in range(repeats):
        order = range(len(contexts) - 1, -1, -1) if repeat % 2 == 0 else range(len(contexts))
        for index in order:
            again, _ = provider.rows([contexts[index]])
            differs = np.flatnonzero(again[0] != first[index])
            if differs.size:
                entry = int(differs[0])
                raise ImpureProviderError(
                    f"{provider.name}: asked again for context {contexts[index]}, entry {entry} is "
                    f"{again[0][entry]}, was {first[index][entry]}"
                )
