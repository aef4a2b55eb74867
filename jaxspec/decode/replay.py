"""A round as a record: everything its verdict follows from, kept, and replayed.

Replay re-derives the candidates of a sampled path from the draft's own draws, and the verdict from
the accept and final draws, through the same public verifier.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import records
from jaxspec.checks import DrawError
from jaxspec.draws import RoundDraws, draws_from_record, draws_to_record
from jaxspec.proposals import Proposal, assert_proposal, propose
from jaxspec.records import RecordError
from jaxspec.rows import draw_token
from jaxspec.trees import Tree, make_tree
from jaxspec.verify import RULES, Verdict

T = TypeVar("T")

ROUNDS = "rounds"
"""Kind of record that `save_rounds` writes."""


@dataclasses.dataclass(frozen=True, eq=False)
class RoundRecord:
    """One round, whole.

    Attributes:
      position: position in the text of its root.
      rule: name in `jaxspec.RULES`.
      target: name of the target model.
      draft: name of the draft model, if any.
      draws: the uniforms, those of the draft apart.
      proposal: the candidates and the rows they were drawn from.
      target_rows: float32 [N, V].
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
      recorded: as it was.
      replayed: as it comes out now.
    """

    round: int
    position: int
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        """Say it in a line."""
        return (
            f"round {self.round} (root at position {self.position}): {self.field} was "
            f"{self.recorded}, is now {self.replayed}"
        )


def replay_round(
    record: RoundRecord, draws: RoundDraws | None = None
) -> tuple[np.ndarray, Verdict]:
    """Derive a round's candidates and verdict again.

    Args:
      record: the round.
      draws: other uniforms to play it with, those of the draft independent of the verifier's. Other
        draft draws must lead to the same candidates, since a record holds rows for no other
        contexts.

    Returns:
      (int32 [N] the candidates, -1 for the root and padding; the verdict).

    Raises:
      DrawError: other draft draws were given, and they lead to other candidates.
    """
    used = record.draws if draws is None else draws
    drafted = _draft_again(record, used)
    if draws is not None and not np.array_equal(drafted, _drafted(record)):
        node = int(np.flatnonzero(drafted != _drafted(record))[0])
        raise DrawError(
            f"draft draw of node {node} leads to token {drafted[node]}, the record has rows for "
            f"token {_drafted(record)[node]}: decode again to follow it"
        )
    verify = RULES[record.rule].verify
    rows = jnp.asarray(record.target_rows)
    return drafted, jax.device_get(verify(used.verify, record.proposal, rows, record.bonus))


def differences(rounds: Sequence[RoundRecord]) -> list[Difference]:
    """Replay rounds and list every difference from their records, none if all is as it was."""
    found = []
    for number, record in enumerate(rounds):
        drafted, verdict = replay_round(record)
        pairs = [("tokens drafted", _drafted(record), drafted)]
        pairs += [
            (field.name, getattr(record.verdict, field.name), getattr(verdict, field.name))
            for field in dataclasses.fields(verdict)
        ]
        found += [
            Difference(
                round=number,
                position=record.position,
                field=name,
                recorded=np.asarray(old).tolist(),
                replayed=np.asarray(new).tolist(),
            )
            for name, old, new in pairs
            if not np.array_equal(old, new)
        ]
    return found


def save_rounds(path: str | Path, rounds: Sequence[RoundRecord]) -> None:
    """Save rounds to one file, .json to read it or .npz to keep it small."""
    records.save(path, ROUNDS, [_to_plain(record) for record in rounds])


def load_rounds(path: str | Path) -> list[RoundRecord]:
    """Read rounds back.

    Raises:
      RecordError: the file holds no rounds, or a round in it is malformed; the message says which.
    """
    content = records.load(path, ROUNDS)
    if not isinstance(content, list):
        raise RecordError(f"{path}: rounds must be a list")
    rounds = []
    for number, plain in enumerate(content):
        try:
            rounds.append(_from_plain(plain))
        except KeyError as error:
            raise RecordError(f"{path}: round {number}: {error} is missing") from error
        except (TypeError, ValueError, AssertionError, OverflowError) as error:
            raise RecordError(f"{path}: round {number}: {error}") from error
    return rounds


def _drafted(record: RoundRecord) -> np.ndarray:
    """Return the candidates as recorded, -1 for the root."""
    tokens = np.array(record.proposal.tree.tokens)
    tokens[0] = -1
    return tokens


def _draft_again(record: RoundRecord, draws: RoundDraws) -> np.ndarray:
    """Draw the candidates of a sampled path again; point masses are as recorded."""
    drafted = _drafted(record)
    if record.proposal.draft_rows is None:
        return drafted
    parents = np.asarray(record.proposal.tree.parents)
    rows = record.proposal.draft_rows
    for node in range(1, int(record.proposal.tree.num_nodes)):
        row = jnp.asarray(rows)[int(parents[node])]
        drafted[node] = int(_draw_token(jnp.asarray(draws.draft)[node], row))
    return drafted


_draw_token = jax.jit(draw_token)


def _to_plain(record: RoundRecord) -> dict[str, Any]:
    tree = record.proposal.tree
    rows = record.proposal.draft_rows
    return {
        "position": record.position,
        "rule": record.rule,
        "target": record.target,
        "draft": record.draft,
        "bonus": record.bonus,
        "draws": draws_to_record(record.draws),
        "tree": {f.name: np.asarray(getattr(tree, f.name)) for f in dataclasses.fields(tree)},
        "draft_rows": None if rows is None else np.asarray(rows),
        "target_rows": np.asarray(record.target_rows),
        "verdict": {
            f.name: np.asarray(getattr(record.verdict, f.name))
            for f in dataclasses.fields(record.verdict)
        },
    }


def _from_plain(plain: Any) -> RoundRecord:
    if not isinstance(plain, dict):
        raise RecordError(f"a {type(plain).__name__}, wanted an object")
    rule = RULES.get(plain["rule"])
    if rule is None:
        raise RecordError(f"rule {plain['rule']!r} is none of {', '.join(RULES)}")
    target_rows = _numbers("target_rows", plain["target_rows"])
    tree = _tree_from_plain(plain["tree"], is_distinct=rule.proposal.distinct_siblings)
    rows = plain["draft_rows"]
    draft_rows = None if rows is None else jnp.asarray(_numbers("draft_rows", rows))
    record = RoundRecord(
        position=_typed("position", plain["position"], int),
        rule=rule.name,
        target=_typed("target", plain["target"], str),
        draft=None if plain["draft"] is None else _typed("draft", plain["draft"], str),
        draws=draws_from_record(plain["draws"]),
        proposal=propose(rule.proposal, tree, draft_rows),
        target_rows=target_rows,
        bonus=_typed("bonus", plain["bonus"], bool),
        verdict=_verdict_from_plain(plain["verdict"], depth=tree.max_depth),
    )
    assert_proposal(record.proposal, jnp.asarray(target_rows))
    if int(tree.tokens.max()) >= target_rows.shape[1]:
        raise RecordError(f"tree: a token is outside the vocabulary of {target_rows.shape[1]}")
    if record.draws.verify.accept.shape != (tree.max_nodes,):
        raise RecordError(
            f"draws for {record.draws.verify.accept.shape[0]} nodes, the tree has room for "
            f"{tree.max_nodes}"
        )
    return record


def _tree_from_plain(plain: dict[str, Any], *, is_distinct: bool) -> Tree:
    """Build a tree anew: a walk over child slots that no parents lead to need not end."""
    stored = {
        field.name: _integers("tree", plain[field.name]) for field in dataclasses.fields(Tree)
    }
    count = int(stored["level_sizes"].sum())
    tree = make_tree(
        stored["tokens"][:count],
        stored["parents"][:count],
        max_nodes=len(stored["tokens"]),
        max_children=np.atleast_2d(stored["children"]).shape[1],
        max_depth=len(stored["level_sizes"]) - 1,
        distinct_siblings=is_distinct,
    )
    for name, value in stored.items():
        if not np.array_equal(value, getattr(tree, name)):
            raise RecordError(f"tree: {name} do not follow from the tokens and parents")
    return tree


def _verdict_from_plain(plain: dict[str, Any], *, depth: int) -> Verdict:
    stored: dict[str, Any] = {
        field.name: _integers("verdict", plain[field.name]) for field in dataclasses.fields(Verdict)
    }
    for name, value in stored.items():
        wanted = (depth + 1,) if name in ("tokens", "path") else ()
        if value.shape != wanted:
            raise RecordError(f"verdict: {name} has shape {value.shape}, wanted {wanted}")
    return Verdict(**stored)


def _typed(name: str, value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise RecordError(f"{name} is {value!r}, wanted a {kind.__name__}")
    return value


def _integers(name: str, value: Any) -> np.ndarray:
    given = np.asarray(value)
    if given.dtype.kind not in "iu" or np.any(given != given.astype(np.int32)):
        raise RecordError(f"{name}: wanted whole numbers of 32 bits, got {value!r}")
    return given.astype(np.int32)


def _numbers(name: str, value: Any) -> np.ndarray:
    given = np.asarray(value)
    if given.dtype.kind not in "fiu":
        raise RecordError(f"{name}: wanted numbers, got {value!r}")
    with np.errstate(over="ignore"):
        single = given.astype(np.float32)
    if not np.isfinite(single).all():
        raise RecordError(f"{name}: a number is not finite in float32")
    return single
