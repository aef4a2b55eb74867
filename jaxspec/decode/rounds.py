"""Rounds as records: everything that a verdict follows from, stored and replayed."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import DrawError, assert_kind
from jaxspec.draws import RoundDraws
from jaxspec.proposals import Proposal
from jaxspec.storage import shortened
from jaxspec.transfers import moves_data
from jaxspec.verify import RULES, Verdict


@functools.partial(jax.jit, static_argnums=0)
def _draw(kind: type[Proposal], pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
    return kind.draw(pairs, draft_row)


@dataclasses.dataclass(frozen=True, eq=False)
class RoundRecord:
    """One round, whole.

    Attributes:
      position: position in the text of its root.
      rule: name in `jaxspec.RULES`.
      target: name of the target model.
      draft: name of the draft model, if any.
      draws: the uniforms, those of the draft apart: a pair for each node that was drawn.
      proposal: the candidates and the rows they were drawn from.
      target_rows: float32 [N, V], at the request's temperature and filters.
      bonus: whether a fully accepted path was to be followed by one more token.
      verdict: what was decided.
    """

    position: int
    rule: str
    target: str
    draft: str | None
    draws: RoundDraws
    proposal: Proposal
    target_rows: np.ndarray
    bonus: bool
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a replay differs from its record.

    Attributes:
      round: number of the round in its file, from 0.
      position: position in the text of its root.
      field: what differs: "tokens drafted" or a field of the verdict.
      recorded: its value in the record.
      replayed: its value in the replay.
    """

    round: int
    position: int
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        """Return a line that describes it."""
        was, now = (shortened(str(each)) for each in (self.recorded, self.replayed))
        place = f"round {self.round} (root at position {self.position})"
        return f"{place}: {self.field} was {was}, is now {now}"


@moves_data
def replay_round(
    record: RoundRecord, draws: RoundDraws | None = None
) -> tuple[np.ndarray, Verdict]:
    """Derive a round's sampled candidates and, by the public verifier, its verdict again.

    Args:
      record: the round.
      draws: other uniforms to replay it with. Their draft draws must lead to the same candidates,
        since a record holds rows for no other contexts.

    Returns:
      (int32 [N] the candidates, -1 for the root and padding; the verdict).

    Raises:
      DrawError: the draft draws given lead to other candidates, or the draws are for another number
        of nodes.
      ValueError: the draws are not `RoundDraws`.
    """
    used = record.draws
    if draws is not None:
        assert_kind("draws", draws, RoundDraws, "RoundDraws, as round_draws makes them")
        nodes, given = record.proposal.tree.max_nodes, draws.verify.accept.shape
        if given != (nodes,) or draws.draft.shape != (nodes, 2):
            raise DrawError(
                f"draws are of shapes {draws.draft.shape} and {given}: the record's tree has room for "
                f"{nodes} nodes, which need {(nodes, 2)} and {(nodes,)}"
            )
        used = draws
    recorded, drafted = _recorded(record), _drafted(record, used)
    differs = np.flatnonzero(drafted != recorded)
    if draws is not None and differs.size:
        raise DrawError(
            f"draft draw of node {differs[0]} leads to token {drafted[differs[0]]}, the record has "
            f"rows for token {recorded[differs[0]]}: decode again to follow it"
        )
    verify = RULES[record.rule].verify
    rows = jnp.asarray(record.target_rows)
    return drafted, jax.device_get(verify(used.verify, record.proposal, rows, record.bonus))


@moves_data
def differences(rounds: Sequence[RoundRecord]) -> list[Difference]:
    """Replay rounds and list every difference from their records."""
    found = []
    for number, record in enumerate(rounds):
        drafted, verdict = replay_round(record)
        pairs = [("tokens drafted", _recorded(record), drafted)]
        pairs += [
            (field.name, getattr(record.verdict, field.name), getattr(verdict, field.name))
            for field in dataclasses.fields(verdict)
        ]
        found += [
            Difference(
                number, record.position, name, np.asarray(old).tolist(), np.asarray(new).tolist()
            )
            for name, old, new in pairs
            if not np.array_equal(old, new)
        ]
    return found


def _recorded(record: RoundRecord) -> np.ndarray:
    """Return the candidates as recorded, -1 for the root."""
    tokens = np.array(record.proposal.tree.tokens)
    tokens[0] = -1
    return tokens


def _drafted(record: RoundRecord, draws: RoundDraws) -> np.ndarray:
    """Draw the candidates again, siblings together; point masses are as recorded."""
    drafted, proposal = _recorded(record), record.proposal
    if proposal.draft_rows is not None:
        rows, pairs = jnp.asarray(proposal.draft_rows), jnp.asarray(draws.draft)
        parents = np.asarray(proposal.tree.parents)[: int(proposal.tree.num_nodes)]
        for parent in np.unique(parents[1:]).tolist():
            siblings = np.flatnonzero(parents == parent)
            drafted[siblings] = _draw(type(proposal), pairs[siblings], rows[parent])
    return drafted
