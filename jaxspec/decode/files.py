"""Files of decodes: states to resume, and rounds to replay.

A file is not trusted. The dataclasses say what each field must be, and what contradicts the other
fields is a `RecordError` that names file, record and field. Sizes are compared before numbers are
read.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import storage
from jaxspec.checks import DrawError, TreeError, assert_kind
from jaxspec.decode.commit import Ending
from jaxspec.decode.request import validated
from jaxspec.decode.rounds import RoundRecord
from jaxspec.decode.state import DecodeState, RoundSummary
from jaxspec.draws import RoundDraws
from jaxspec.proposals import PointMass
from jaxspec.storage import INT32, Place, Range, RecordError, StoredArray, shortened, shown
from jaxspec.transfers import moves_data
from jaxspec.trees import NONE, Tree, make_tree
from jaxspec.verify import RULES, Rule, Verdict
from jaxspec.verify.arguments import assert_proposal

STATE, ROUNDS = "decode state", "rounds"
"""Kinds of record."""

MOST_NODES, MOST_SLOTS, MOST_VOCAB, MOST_KEY_WORDS = 1 << 14, 1 << 22, 1 << 24, 16
"""In a file: nodes of a tree, its levels, and child slots of a node; child slots of all nodes; entries
of a row; words of a key."""

Arrays = dict[str, StoredArray]


def save(path: str | Path, thing: DecodeState | Sequence[RoundRecord]) -> None:
    """Save a state or some rounds to one file, .json to read it or .npz to keep it small.

    Raises:
      ValueError: `thing` is neither.
      RecordError: a value cannot be stored, or a tree is larger than `load` takes.
      OSError: the file cannot be written.
    """
    if isinstance(thing, DecodeState):
        content = {**dataclasses.asdict(thing), "ending": thing.ending.name.lower()}
        storage.save(path, STATE, content)
        return
    wanted = "a DecodeState or a sequence of RoundRecords; a compiled decode cannot be saved"
    assert_kind("thing", thing, Iterable, wanted)
    for number, each in enumerate(thing):
        assert_kind(f"round {number}", each, RoundRecord, "a RoundRecord")
        nodes, slots = each.proposal.tree.children.shape
        if max(nodes, slots) > MOST_NODES or nodes * slots > MOST_SLOTS:
            raise RecordError(
                f"{path}: round {number}: its tree has {nodes} nodes of {slots} child slots: at most "
                f"{MOST_NODES} of each and {MOST_SLOTS} in all can be stored"
            )
    storage.save(path, ROUNDS, [_round_to_plain(each) for each in thing])


@moves_data
def load(path: str | Path) -> DecodeState | list[RoundRecord]:
    """Load what `save` wrote: a state that can be resumed, or rounds that can be replayed.

    Raises:
      RecordError: the file holds neither, or it is malformed; the message says which field.
      OSError: the file cannot be read.
    """
    kind = storage.kind_of(path)
    if kind not in (STATE, ROUNDS):
        raise RecordError(f"{path}: holds {shown(kind)}, wanted {STATE!r} or {ROUNDS!r}")
    content = storage.load(path, kind)
    if kind == STATE:
        return _state_of(content, Place(f"{path}: not a whole state"))
    if not isinstance(content, list):
        raise RecordError(f"{path}: rounds must be a list")
    return [_round_of(each, Place(f"{path}: round {n}")) for n, each in enumerate(content)]


# --- states


def _state_of(plain: Any, place: Place) -> DecodeState:
    """Build a state that a decode can have reached."""
    state = storage.read(DecodeState, plain, place)
    request, tokens, at = state.request, place.field("tokens"), place.field("request")
    try:
        is_key = len(request.key_data) <= MOST_KEY_WORDS and request.key.shape == ()
    except Exception:  # an unknown type of keys, or words that it does not take
        is_key = False
    if not is_key:
        raise at.field("key_data").error(
            f"has {len(request.key_data)} words: they are not one key of type "
            f"{shown(request.key_type)}"
        )
    try:
        validated("", **dataclasses.asdict(request), vocab=2**31)
    except ValueError as error:
        raise at.error(f"is not valid: {shortened(str(error))}") from error
    if state.tokens[: state.prompt_length] != request.prompt:
        raise tokens.error("do not begin with the prompt")
    position = state.prompt_length - 1
    for number, each in enumerate(state.rounds):
        at = place.field("rounds").item(number)
        _check_summary(each, at)
        if each.position != position:
            raise at.field("position").error(f"is {each.position}, and its root is at {position}")
        position += each.num_emitted
    if position != len(state.tokens) - 1:
        emitted = position + 1 - state.prompt_length
        given = len(state.new_tokens)
        raise tokens.error(f"are {given} after the prompt, and the rounds emitted {emitted}")
    _check_ending(state, place)
    return state


def _check_summary(summary: RoundSummary, place: Place) -> None:
    """Reject counts that contradict each other."""
    tests = summary.tested
    orders = (
        (summary.num_emitted >= 1, "num_emitted >= 1"),
        (summary.num_accepted <= summary.num_emitted, "num_accepted <= num_emitted"),
        (summary.num_accepted <= summary.num_drafted, "num_accepted <= num_drafted"),
        (summary.proposed_depth <= summary.num_drafted, "proposed_depth <= num_drafted"),
        (all(number >= 1 for number, _ in tests), "1 candidate tested at each node of tested"),
        (sum(number for number, _ in tests) <= summary.num_drafted, "sum of tested <= num_drafted"),
        (sum(hit for _, hit in tests) <= summary.num_accepted, "hits of tested <= num_accepted"),
        (summary.status < 2**31, "status < 2^31"),
    )
    for holds, order in orders:
        if not holds:
            raise place.error(f"must satisfy {order}")


def _check_ending(state: DecodeState, place: Place) -> None:
    """Reject an ending that the limits contradict: the text would go on past it, or end early."""
    name = state.ending.name.lower()
    for ending, count, limit in (
        (Ending.BUDGET, len(state.new_tokens), state.request.new_tokens),
        (Ending.CAPACITY, len(state.tokens), state.decoder.get("max_context")),
    ):
        if not isinstance(limit, int):
            continue
        if count > limit or (count == limit and state.ending == Ending.NONE):
            what = ending.name.lower()
            raise place.error(f"has {count} tokens and goes on, and the {what} is {limit}")
        if state.ending == ending and count < limit:
            raise place.field("ending").error(f"is {name!r}: {count} tokens of {limit}")
    is_stopped = bool(state.new_tokens) and state.tokens[-1] in state.request.stop_tokens
    if is_stopped != (state.ending == Ending.STOP) or state.ending == Ending.UNDECIDED:
        last = f"the last token {'is' if is_stopped else 'is not'} a stop token"
        raise place.field("ending").error(f"is {name!r}, and {last}")


# --- rounds


@dataclasses.dataclass(frozen=True, eq=False)
class _StoredRound:
    """A round in a file."""

    position: storage.Token
    rule: str
    target: str
    draft: str | None
    bonus: bool
    draws: Arrays
    tree: Arrays
    draft_rows: StoredArray | None
    target_rows: StoredArray
    verdict: Arrays


def _round_to_plain(record: RoundRecord) -> dict[str, Any]:
    rows, tree, verdict = record.proposal.draft_rows, record.proposal.tree, record.verdict
    return {
        **{
            name: getattr(record, name) for name in ("position", "rule", "target", "draft", "bonus")
        },
        "draws": record.draws.to_plain(),
        "tree": {name: np.asarray(getattr(tree, name)) for name in _names(Tree)},
        "draft_rows": None if rows is None else np.asarray(rows),
        "target_rows": np.asarray(record.target_rows),
        "verdict": {name: np.asarray(getattr(verdict, name)) for name in _names(Verdict)},
    }


def _round_of(plain: Any, place: Place) -> RoundRecord:
    stored = storage.read(_StoredRound, plain, place)
    rule = RULES.get(stored.rule)
    if rule is None:
        raise place.error(f"rule {shown(stored.rule)} is none of {', '.join(RULES)}")
    nodes, slots, levels = _capacity(stored.tree, rule, place.field("tree"))
    in_rows = place.field("target_rows")
    _, vocab = storage.axes_of(stored.target_rows, (MOST_NODES, MOST_VOCAB), in_rows)
    target_rows = storage.numbers(stored.target_rows, (nodes, vocab), in_rows)
    shapes: dict[str, tuple[int, ...]] = {"tokens": (levels,), "path": (levels,)}
    shapes |= dict.fromkeys({*_names(Verdict)} - {*shapes}, ())
    # The path names nodes; the other numbers are only compared.
    ranges = {"path": Range(NONE, nodes - 1)}
    verdict = _integers(stored.verdict, shapes, ranges, place.field("verdict"))
    draws = _draws_of(stored.draws, nodes, place.field("draws"))
    tree = _tree_of(stored.tree, rule, (nodes, slots, levels), vocab, place.field("tree"))
    draft_rows = _draft_rows_of(stored.draft_rows, rule, (nodes, vocab), place.field("draft_rows"))
    proposal = rule.proposal(tree=tree, draft_rows=draft_rows)
    try:
        assert_proposal(proposal, jnp.asarray(target_rows))
    except (AssertionError, TypeError, ValueError) as error:
        raise place.error(shortened(str(error))) from error
    return RoundRecord(
        position=stored.position,
        rule=rule.name,
        target=stored.target,
        draft=stored.draft,
        draws=draws,
        proposal=proposal,
        target_rows=target_rows,
        bonus=stored.bonus,
        verdict=Verdict(**verdict),  # type: ignore[arg-type]
    )


def _names(struct: type) -> list[str]:
    return [field.name for field in dataclasses.fields(struct)]


def _assert_fields(stored: Arrays, names: Iterable[str], place: Place) -> None:
    for name in names:
        if name not in stored:
            raise place.missing(name)


def _integers(
    stored: Arrays,
    shapes: dict[str, tuple[int, ...]],
    ranges: dict[str, Range],
    place: Place,
) -> dict[str, np.ndarray]:
    """Read int32 arrays of known shapes."""
    _assert_fields(stored, shapes, place)
    return {
        name: storage.numbers(stored[name], shape, place.field(name), ranges.get(name, INT32))
        for name, shape in shapes.items()
    }


def _capacity(tree: Arrays, rule: Rule, place: Place) -> tuple[int, int, int]:
    """Return the nodes, child slots and levels that a tree declares to have room for."""
    _assert_fields(tree, _names(Tree), place)
    (nodes,) = storage.axes_of(tree["tokens"], (MOST_NODES,), place.field("tokens"))
    _, slots = storage.axes_of(tree["children"], (nodes, MOST_NODES), place.field("children"))
    (levels,) = storage.axes_of(tree["level_sizes"], (MOST_NODES,), place.field("level_sizes"))
    if nodes * slots > MOST_SLOTS:
        raise place.error(
            f"has {nodes} nodes of {slots} child slots: more than {MOST_SLOTS} in all"
        )
    if rule.is_path and (slots, levels) != (1, nodes):
        raise place.error(
            f"has {nodes} nodes, {slots} child slots and {levels} levels, and rule {rule.name!r} is "
            f"for single paths: 1 child slot and {nodes} levels"
        )
    return nodes, slots, levels


def _tree_of(
    stored: Arrays, rule: Rule, capacity: tuple[int, int, int], vocab: int, place: Place
) -> Tree:
    """Build a tree from tokens and parents: a walk over child slots as stored need not end."""
    nodes, slots, levels = capacity
    shapes = {"tokens": (nodes,), "parents": (nodes,), "children": (nodes, slots)}
    shapes["level_sizes"] = (levels,)
    arrays = _integers(stored, shapes, {"tokens": Range(INT32.least, vocab - 1)}, place)
    count = int(arrays["level_sizes"].sum(dtype=np.int64))
    if not 1 <= count <= nodes:
        raise place.field("level_sizes").error(f"count {count} nodes, wanted 1 to {nodes}")
    try:
        tree = make_tree(
            arrays["tokens"][:count],
            arrays["parents"][:count],
            max_nodes=nodes,
            max_children=slots,
            max_depth=levels - 1,
            distinct_siblings=rule.proposal.distinct_siblings,
        )
    except TreeError as error:
        raise place.error(f"is not one: {error}") from error
    for name, value in arrays.items():
        if not np.array_equal(value, getattr(tree, name)):
            raise place.field(name).error("do not follow from the tokens and parents")
    return tree


def _draws_of(stored: Arrays, nodes: int, place: Place) -> RoundDraws:
    shapes = {"draft": (nodes, 2), "accept": (nodes,), "final": (2,)}
    _assert_fields(stored, shapes, place)
    for name, shape in shapes.items():
        storage.assert_shape(stored[name], shape, place.field(name))
    try:
        with np.errstate(over="ignore"):  # a draw beyond float32 is an error with its place
            return RoundDraws.from_plain({name: stored[name].read() for name in shapes})
    except DrawError as error:
        raise place.error(f"are not valid: {error}") from error


def _draft_rows_of(
    stored: StoredArray | None, rule: Rule, shape: tuple[int, int], place: Place
) -> jax.Array | None:
    is_sampled = rule.proposal is not PointMass
    if (stored is not None) != is_sampled:
        raise place.error(
            f"must {'be there' if is_sampled else 'be null'}: candidates of rule {rule.name!r} are "
            f"{'drawn from them' if is_sampled else 'point masses'}"
        )
    if stored is None:
        return None
    nodes, vocab = shape
    # Rows of leaves are never read: those of a path's last node may be left out.
    count = nodes - 1 if stored.shape == (nodes - 1, vocab) else nodes
    return jnp.asarray(storage.numbers(stored, (count, vocab), place))
