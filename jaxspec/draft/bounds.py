"""What a decode asks of drafts: whose tokens, and which end the text.

A draft that knows other tokens than the target is asked about the common ones alone.

In the shape descriptions V denotes the target's vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.models.provider import Context, Provider, Usage


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a decode asks of drafts beside their depth.

    Attributes:
      vocab: V.
      stop_tokens: tokens that end a text. Nothing is drafted below one, and no model is asked about a
        context that holds one after the committed text.
      apply: applies the request's temperature and filters to rows of probabilities [n, V]; sampled
        candidates are drawn from what it returns. None to leave them as they are.
    """

    vocab: int
    stop_tokens: frozenset[int] = frozenset()
    apply: Callable[[np.ndarray], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Aligned(Provider):
    """A draft with rows over the target's vocabulary.

    Tokens that the draft does not have get probability 0. Of tokens that the target does not have the
    probability is left off, and the row is taken over what is left: softmax of the common logits. It
    is all zeros where nothing is left.

    Attributes:
      inner: the draft.
    """

    inner: Provider | None = None

    def rows(self, contexts: Sequence[Context]) -> tuple[np.ndarray, Usage]:
        """Ask the draft; see `Provider.rows`."""
        assert self.inner is not None
        rows, usage = self.inner.rows(contexts)
        common = rows[:, : self.vocab].astype(np.float64)
        if rows.shape[1] > self.vocab:
            mass = common.sum(axis=1, keepdims=True)
            common /= np.where(mass > 0, mass, 1.0)
        padded = np.pad(common, ((0, 0), (0, self.vocab - common.shape[1])))
        return padded.astype(np.float32), usage


def aligned(draft: Provider, bounds: Bounds | None) -> Provider:
    """Return a draft with rows over the target's vocabulary; itself if that is its own."""
    if bounds is None or draft.vocab == bounds.vocab:
        return draft
    return Aligned(draft.name, bounds.vocab, draft.ask, draft.is_batched, inner=draft)
