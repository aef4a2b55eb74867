"""What a decode cost and what it got for it.

Counts of what was really asked are kept apart from hypothetical batches: how often a model would run
if all contexts of a round (or of a level) went into one forward pass. Nothing here is a time.
"""

import dataclasses
from collections import defaultdict
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
    """How often something happened (`hits`) out of `chances`."""

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
      rounds: number of rounds.
      new_tokens: tokens emitted.
      drafted: candidates.
      accepted: candidates accepted and emitted.
      target_queries: contexts that the target scored.
      target_calls: invocations of its callback.
      target_batches: hypothetical: one for each round, or for each level of a target asked by depth.
      draft_queries: contexts that the draft scored.
      draft_calls: invocations of its callback.
      draft_batches: hypothetical: one for each level drafted.
      by_depth: for depth 1, 2, ...: how often the path reached this depth, out of the times that it
        reached the depth before and there were candidates.
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
        return Rate(self.new_tokens, self.target_batches).value

    @property
    def block_efficiency(self) -> float | None:
        """New tokens for each round; Leviathan et al. 2023 call it tokens per iteration."""
        return Rate(self.new_tokens, self.rounds).value

    @property
    def acceptance(self) -> Rate:
        """How often a path went one deeper, out of the times that it could."""
        return Rate(*(sum(getattr(r, name) for r in self.by_depth) for name in ("hits", "chances")))


def metrics_of(rounds: Iterable[RoundSummary]) -> Metrics:
    """Add up what rounds did."""
    rounds = tuple(rounds)
    by_depth: dict[int, list[bool]] = defaultdict(list)
    by_rank: dict[int, list[bool]] = defaultdict(list)
    for each in rounds:
        for depth, (tested, is_accepted) in enumerate(each.tested):
            by_depth[depth].append(is_accepted)
            for rank in range(tested):
                by_rank[rank].append(is_accepted and rank == tested - 1)
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
        by_depth=tuple(Rate(sum(hits), len(hits)) for hits in by_depth.values()),
        by_rank=tuple(Rate(sum(hits), len(hits)) for hits in by_rank.values()),
    )


def chances_of(record: RoundRecord) -> tuple[float, ...]:
    """Return the probability, beforehand, that each node of the accepted path goes on.

    It is the target's mass on the candidates below a node for point masses, sum min(p, q) for a path
    verified token by token. Their sum over rounds is the mean number of accepted tokens.

    Args:
      record: of the rule "point_mass" or "token".

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
        share = row[tokens[below]] if draft_rows is None else np.minimum(row, draft_rows[node])
        chances.append(float(share.sum()))
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
