"""A round as a record: everything its verdict follows from, kept, and replayed.

Replay re-derives the candidates of a sampled path from the draft's own draws, and the verdict from
the accept and final draws, through the same public verifier.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import storage
from jaxspec.checks import DrawError, TreeError, assert_kind
from jaxspec.draws import RoundDraws, draws_from_record, draws_to_record
from jaxspec.proposals import Proposal, assert_proposal, propose
from jaxspec.rows import draw_token
from jaxspec.storage import Place, Range, RecordError, StoredArray, shown
from jaxspec.transfers import moves_data
from jaxspec.trees import NONE, Tree, make_tree
from jaxspec.verify import RULES, Rule, Verdict

ROUNDS = "rounds"
"""Kind of record that `save_rounds` writes."""

MOST_NODES = 1 << 14
"""Nodes of a tree, its levels, and child slots of a node, in a file of rounds."""

MOST_SLOTS = 1 << 22
"""Child slots of all nodes of a tree in a file of rounds."""

MOST_VOCAB = 1 << 24
"""Entries of a row in a file of rounds."""


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
            f"{_listed(self.recorded)}, is now {_listed(self.replayed)}"
        )


def _listed(value: Any) -> str:
    """Return a value of a verdict, a long list shortened."""
    is_long = isinstance(value, list) and len(value) > 64
    return f"{value[:64]} and {len(value) - 64} more" if is_long else f"{value}"


@moves_data
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
      DrawError: other draft draws were given, and they lead to other candidates; or the draws are
        for another number of nodes.
      ValueError: the draws are no `RoundDraws`.
    """
    if draws is not None:
        assert_kind("draws", draws, RoundDraws, "RoundDraws, as round_draws makes them")
        nodes, given = record.proposal.tree.max_nodes, draws.verify.accept.shape
        if given != (nodes,) or draws.draft.shape != (nodes, 2):
            raise DrawError(
                f"draws are of shapes {draws.draft.shape} and {given}: the record's tree has room for "
                f"{nodes} nodes, which need {(nodes, 2)} and {(nodes,)}"
            )
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


@moves_data
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
    """Save rounds to one file, .json to read it or .npz to keep it small.

    Raises:
      RecordError: a value cannot be stored, or a tree is larger than `load_rounds` takes.
      OSError: the file cannot be written.
    """
    for number, each in enumerate(rounds):
        shape = each.proposal.tree.children.shape
        if max(shape) > MOST_NODES or shape[0] * shape[1] > MOST_SLOTS:
            raise RecordError(
                f"{path}: round {number}: its tree has {shape[0]} nodes of {shape[1]} child slots: at "
                f"most {MOST_NODES} of each and {MOST_SLOTS} in all can be stored"
            )
    storage.save(path, ROUNDS, [_to_plain(record) for record in rounds])


@moves_data
def load_rounds(path: str | Path) -> list[RoundRecord]:
    """Read rounds back, such that each can be replayed.

    Raises:
      RecordError: the file holds no rounds, or a round in it is malformed; the message says which
        round, field and entry.
      OSError: the file cannot be read.
    """
    content = storage.load(path, ROUNDS)
    if not isinstance(content, list):
        raise RecordError(f"{path}: rounds must be a list")
    return [
        _round_of(plain, Place(f"{path}: round {number}")) for number, plain in enumerate(content)
    ]


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


@dataclasses.dataclass(frozen=True, eq=False)
class _Stored:
    """A round as it is on file: the fields that `_to_plain` writes."""

    position: storage.Token
    rule: str
    target: str
    draft: str | None
    bonus: bool
    draws: dict[str, StoredArray]
    tree: dict[str, StoredArray]
    draft_rows: StoredArray | None
    target_rows: StoredArray
    verdict: dict[str, StoredArray]


def _round_of(plain: Any, place: Place) -> RoundRecord:
    stored = storage.read(_Stored, plain, place)
    rule = RULES.get(stored.rule)
    if rule is None:
        raise place.error(f"rule {shown(stored.rule)} is none of {', '.join(RULES)}")
    tree_place, rows_place = place.field("tree"), place.field("target_rows")
    nodes, slots, depth = _capacity(_arrays(Tree, stored.tree, tree_place), rule, tree_place)
    _, vocab = storage.axes_of(stored.target_rows, (MOST_NODES, MOST_VOCAB), rows_place)
    storage.assert_shape(stored.target_rows, (nodes, vocab), rows_place)
    draws = _draws_of(stored.draws, nodes, place.field("draws"))
    tree = _tree_of(stored.tree, rule, (nodes, slots, depth), vocab, tree_place)
    draft_rows = _draft_rows_of(stored.draft_rows, rule, (nodes, vocab), place.field("draft_rows"))
    record = RoundRecord(
        position=stored.position,
        rule=rule.name,
        target=stored.target,
        draft=stored.draft,
        draws=draws,
        proposal=propose(rule.proposal, tree, draft_rows),
        target_rows=storage.numbers(stored.target_rows, (nodes, vocab), rows_place),
        bonus=stored.bonus,
        verdict=_verdict_of(stored.verdict, nodes, depth, place.field("verdict")),
    )
    try:
        assert_proposal(record.proposal, jnp.asarray(record.target_rows))
    except (AssertionError, TypeError, ValueError) as error:
        raise place.error(storage.shortened(str(error))) from error
    return record


def _arrays(cls: type, stored: dict[str, StoredArray], place: Place) -> dict[str, StoredArray]:
    """Return the arrays of all fields of a record of arrays."""
    for field in dataclasses.fields(cls):
        if field.name not in stored:
            raise place.missing(field.name)
    return stored


def _capacity(arrays: dict[str, StoredArray], rule: Rule, place: Place) -> tuple[int, int, int]:
    """Return the nodes, child slots and depth that a tree has room for, its shapes compared."""
    (nodes,) = storage.axes_of(arrays["tokens"], (MOST_NODES,), place.field("tokens"))
    storage.assert_shape(arrays["parents"], (nodes,), place.field("parents"))
    most = (nodes, MOST_NODES)
    _, slots = storage.axes_of(arrays["children"], most, place.field("children"))
    storage.assert_shape(arrays["children"], (nodes, slots), place.field("children"))
    if nodes * slots > MOST_SLOTS:
        raise place.error(
            f"has {nodes} nodes of {slots} child slots: more than {MOST_SLOTS} in all"
        )
    (levels,) = storage.axes_of(arrays["level_sizes"], (MOST_NODES,), place.field("level_sizes"))
    if rule.is_path and (slots, levels) != (1, nodes):
        raise place.error(
            f"has {nodes} nodes, {slots} child slots and {levels} levels, and rule {rule.name!r} is "
            f"for single paths: 1 child slot and {nodes} levels"
        )
    return nodes, slots, levels - 1


def _tree_of(
    arrays: dict[str, StoredArray],
    rule: Rule,
    capacity: tuple[int, int, int],
    vocab: int,
    place: Place,
) -> Tree:
    """Build a tree anew: a walk over child slots that no parents lead to need not end."""
    nodes, slots, depth = capacity
    shapes = {
        "tokens": (nodes,),
        "parents": (nodes,),
        "children": (nodes, slots),
        "level_sizes": (depth + 1,),
    }
    stored = {
        name: storage.numbers(arrays[name], shape, place.field(name), storage.INT32)
        for name, shape in shapes.items()
    }
    count = int(stored["level_sizes"].sum(dtype=np.int64))
    if not 1 <= count <= nodes:
        raise place.field("level_sizes").error(f"count {count} nodes, wanted 1 to {nodes}")
    outside = np.flatnonzero(stored["tokens"] >= vocab)
    if outside.size:
        at = place.field("tokens").item(int(outside[0]))
        token = int(stored["tokens"][outside[0]])
        raise at.error(f"is {token}, outside the vocabulary of {vocab}")
    try:
        tree = make_tree(
            stored["tokens"][:count],
            stored["parents"][:count],
            max_nodes=nodes,
            max_children=slots,
            max_depth=depth,
            distinct_siblings=rule.proposal.distinct_siblings,
        )
    except TreeError as error:
        raise place.error(f"is none: {error}") from error
    for name, value in stored.items():
        if not np.array_equal(value, getattr(tree, name)):
            raise place.field(name).error("do not follow from the tokens and parents")
    return tree


def _draws_of(stored: dict[str, StoredArray], nodes: int, place: Place) -> RoundDraws:
    shapes = {"draft": (nodes, 2), "accept": (nodes,), "final": (2,)}
    for name, shape in shapes.items():
        if name not in stored:
            raise place.missing(name)
        storage.assert_shape(stored[name], shape, place.field(name))
    try:
        with np.errstate(over="ignore"):  # a draw beyond float32 is refused by its place
            return draws_from_record({name: stored[name].read() for name in shapes})
    except DrawError as error:
        raise place.error(f"are none: {error}") from error


def _draft_rows_of(
    stored: StoredArray | None, rule: Rule, shape: tuple[int, int], place: Place
) -> jax.Array | None:
    kind: Any = rule.proposal
    are_wanted = "draft_rows" in {field.name for field in dataclasses.fields(kind)}
    if (stored is not None) != are_wanted:
        raise place.error(
            f"must {'be there' if are_wanted else 'be null'}: candidates of rule {rule.name!r} are "
            f"{'drawn from them' if are_wanted else 'point masses'}"
        )
    if stored is None:
        return None
    nodes, vocab = shape
    # Rows of leaves are never read: those of a path's last node may be left out.
    count = nodes - 1 if stored.shape == (nodes - 1, vocab) else nodes
    return jnp.asarray(storage.numbers(stored, (count, vocab), place))


def _verdict_of(stored: dict[str, StoredArray], nodes: int, depth: int, place: Place) -> Verdict:
    arrays = _arrays(Verdict, stored, place)
    # The path names nodes; the other numbers are only compared.
    ranges = {"path": Range(NONE, nodes - 1)}
    values: dict[str, Any] = {
        field.name: storage.numbers(
            arrays[field.name],
            (depth + 1,) if field.name in ("tokens", "path") else (),
            place.field(field.name),
            ranges.get(field.name, storage.INT32),
        )
        for field in dataclasses.fields(Verdict)
    }
    return Verdict(**values)
