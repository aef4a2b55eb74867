"""What a decode cost and what it got for it.

Counts of what was really asked stand apart from hypothetical batches, which say how often a model
would run if all contexts of a round (or of a level) went into one forward pass. Nothing here is a
time: no speed-up is claimed that was not measured.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_kind
from jaxspec.decode.rounds import RoundRecord
from jaxspec.decode.state import RoundSummary
from jaxspec.models.provider import Usage
from jaxspec.rows import as_source


@dataclasses.dataclass(frozen=True)
class Rate:
    """How often something happened out of how many chances."""

    hits: int
    chances: int

    @property
    def value(self) -> float | None:
        """Return hits / chances; None where there was no chance."""
        return self.hits / self.chances if self.chances else None


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Totals over rounds.

    Attributes:
      rounds: how many.
      new_tokens: tokens emitted.
      drafted: candidates.
      accepted: candidates accepted and emitted.
      target_queries: contexts the target scored.
      target_calls: invocations of its callback.
      target_batches: hypothetical: one for each round, or for each level of a layered scorer.
      draft_queries: contexts the draft scored.
      draft_calls: invocations of its callback.
      draft_batches: hypothetical: one for each level drafted.
      by_depth: for depth 1, 2, ...: how often the path went on to this depth, out of the times that
        it had got to the depth before and there were candidates.
      by_rank: for sibling 1, 2, ...: how often it was accepted, out of the times that it was tested,
        its elder siblings having been rejected.
    """

    rounds: int
    new_tokens: int
    drafted: int
    accepted: int
    target_queries: int
    target_calls: int
    target_batches: int
    draft_queries: int
    draft_calls: int
    draft_batches: int
    by_depth: tuple[Rate, ...]
    by_rank: tuple[Rate, ...]

    @property
    def tokens_per_target_batch(self) -> float | None:
        """New tokens for each hypothetical batch of the target."""
        return self.new_tokens / self.target_batches if self.target_batches else None

    @property
    def block_efficiency(self) -> float | None:
        """New tokens for each round; Leviathan et al. 2023 call it tokens per iteration."""
        return self.new_tokens / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> Rate:
        """How often a path went one deeper, out of the times that it could."""
        return Rate(
            hits=sum(rate.hits for rate in self.by_depth),
            chances=sum(rate.chances for rate in self.by_depth),
        )


def metrics_of(rounds: Iterable[RoundSummary]) -> Metrics:
    """Add up what rounds did."""
    rounds = tuple(rounds)
    depth_hits: list[list[bool]] = []
    rank_hits: list[list[bool]] = []

    def note(table: list[list[bool]], place: int, hit: bool) -> None:
        while len(table) <= place:
            table.append([])
        table[place].append(hit)

    for each in rounds:
        for depth, (tested, is_accepted) in enumerate(each.tested):
            note(depth_hits, depth, is_accepted)
            for rank in range(tested):
                note(rank_hits, rank, is_accepted and rank == tested - 1)
    target = sum((each.target for each in rounds), Usage())
    draft = sum((each.draft for each in rounds), Usage())
    return Metrics(
        rounds=len(rounds),
        new_tokens=sum(each.num_emitted for each in rounds),
        drafted=sum(each.num_drafted for each in rounds),
        accepted=sum(each.num_accepted for each in rounds),
        target_queries=target.queries,
        target_calls=target.calls,
        target_batches=sum(each.target_batches for each in rounds),
        draft_queries=draft.queries,
        draft_calls=draft.calls,
        draft_batches=sum(each.draft_batches for each in rounds),
        by_depth=tuple(Rate(sum(hits), len(hits)) for hits in depth_hits),
        by_rank=tuple(Rate(sum(hits), len(hits)) for hits in rank_hits),
    )


def chances_of(record: RoundRecord) -> tuple[float, ...]:
    """Return how likely each node of the accepted path was, beforehand, to be followed by a candidate.

    Point masses: the target's mass on the candidates below it. A path verified token by token:
    sum min(p, q). Summed over rounds, this is the mean of the accepted tokens.

    Args:
      record: a round of point masses, or of a sampled path verified by the rule "token".

    Returns:
      One for each node of the accepted path that has candidates, from the root on.

    Raises:
      ValueError: another rule, whose chances depend on more than one row.
    """
    if record.rule not in ("point_mass", "token"):
        raise ValueError(f"rule {record.rule!r}: its chances are not those of single rows")
    tree = record.proposal.tree
    children, tokens = np.asarray(tree.children), np.asarray(tree.tokens)
    rows = record.proposal.draft_rows
    draft_rows = None if rows is None else np.asarray(as_source("draft_rows", rows).values)
    chances = []
    for node in record.verdict.path[: int(record.verdict.num_accepted) + 1]:
        below = children[node][children[node] >= 0]
        if below.size == 0:
            break
        row = record.target_rows[node]
        if draft_rows is None:
            chances.append(float(row[tokens[below]].sum()))
        else:
            chances.append(float(np.minimum(row, draft_rows[node]).sum()))
    return tuple(chances)


def overlap(first: jax.Array, second: jax.Array) -> jax.Array:
    """Return `sum(min(p, q))` over the last axis: the acceptance probability of token verification.

    Args:
      first: float [..., V], probabilities.
      second: float [..., V], probabilities.

    >>> import jax.numpy as jnp
    >>> float(overlap(jnp.array([0.25, 0.75]), jnp.array([0.5, 0.5])))
    0.75
    """
    for name, rows in (("first", first), ("second", second)):
        assert_kind(name, rows, jax.Array | np.ndarray, "an array of probabilities")
    if first.shape != second.shape:
        raise AssertionError(f"first has shape {first.shape}, second {second.shape}: must be equal")
    return jnp.minimum(first.astype(jnp.float32), second.astype(jnp.float32)).sum(axis=-1)
