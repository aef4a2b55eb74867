"""A provider that records what it was asked."""

from collections.abc import Callable
from typing import Any

from jaxspec.models import Answer, Provider, Query
from jaxspec.models.provider import Context


class CountingModel:
    """A model that records the contexts of each call; `row` may be replaced between calls."""

    def __init__(
        self, name: str, row: Callable[[Context], Any], *, vocab: int = 3, is_batched: bool = False
    ) -> None:
        self.row = row
        self.calls: list[list[Context]] = []
        self.single = Provider(name, vocab, self._one)
        self.batched = Provider(name, vocab, self._many, is_batched=True)
        self.provider = self.batched if is_batched else self.single

    def _many(self, queries: list[Query]) -> list[Answer]:
        self.calls.append([query.context for query in queries])
        return [Answer(query.id, self.row(query.context)) for query in queries]

    def _one(self, context: Context) -> Any:
        self.calls.append([context])
        return self.row(context)

    @property
    def asked(self) -> list[Context]:
        """All contexts asked about, in order."""
        return [context for call in self.calls for context in call]
