"""Vectors: every cell of the exact partitions replayed, every law compared with the search.

A vector is a small world, worked out in fractions: rows by context, and the partition of the cube
of draws into cells of one outcome each, [low, high) for each draw that is looked at ("slot"). Slots
are `draft:i` and `acc:i` on a path, `sib:<path>:<j>` and `acc:<path>:<j>` for siblings that are drawn
and tested in turn, `acc:<path>` for a node of a tree that is there from the start, and `final`.
A slot that a cell lacks is not looked at. Here a round draws all its candidates beforehand, so
draws of siblings that the cell never asks for choose candidates that do not matter.

Points are taken well inside the cells, since a lower edge may be off by a rounding; edges themselves
are replayed where nothing that decides there is rounded.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.rounds import Outcome, Round, make_round

RULE_OF = {
    "token": "token",
    "block": "block",
    "rrs_iid": "with_replacement",
    "rrs_wor": "without_replacement",
    "det_chain": "point_mass",
    "traversal": "traversal",
}
UNUSED = (0.0, 0.5, 1 - 2**-23)
"""Values of draws that are not looked at: the outcome must not change."""

BATCH = 256
TOLERANCE = 1e-6


def load() -> dict[str, dict[str, Any]]:
    files = sorted((Path(__file__).parent / "vectors").glob("*.json"))
    return {v["id"]: v for file in files for v in json.loads(file.read_text())}


VECTORS = load()


def tokens_of(path: str) -> tuple[int, ...]:
    return tuple(int(token) for token in path.split(".")) if path else ()


def by_context(rows: Mapping[str, Sequence[str]]) -> dict[tuple[int, ...], list[Fraction]]:
    return {tokens_of(path): [Fraction(x) for x in row] for path, row in rows.items()}


def rule_of(name: str) -> js.Rule:
    return js.RULES[RULE_OF[VECTORS[name]["rule"]]]


@functools.cache
def instance_of(name: str) -> audit.Instance:
    vector, params = VECTORS[name], VECTORS[name]["params"]
    tree = vector["tree"]
    return audit.Instance(
        name=name,
        target=by_context(vector["p"]),
        draft=by_context(vector["q"]) if vector["q"] else None,
        branching=tuple(params.get("branching", (1,) * params.get("gamma", 0))),
        candidates={tokens_of(path): tuple(below) for path, below in tree.items()}
        if tree
        else None,
        bonus=params["bonus"],
        expected_accepted={rule_of(name).name: Fraction(vector["expected_accepted"])},
    )


@functools.cache
def instances_of(rule: js.Rule) -> tuple[audit.Instance, ...]:
    return tuple(instance_of(name) for name in VECTORS if rule_of(name) is rule)


@functools.cache
def round_of(name: str) -> Round:
    rule = rule_of(name)
    return make_round(rule, instance_of(name), padded_to=instances_of(rule))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell in the axes of the round.

    Attributes:
      edges: [low, high) for each axis that is looked at.
      drafted: the token at each node whose draw is looked at.
      tokens: what is emitted.
      accepted: how many of them were drafted.
    """

    edges: dict[int, tuple[Fraction, Fraction]]
    drafted: dict[int, int]
    tokens: tuple[int, ...]
    accepted: int

    @property
    def middle(self) -> dict[int, Fraction]:
        return {axis: (low + high) / 2 for axis, (low, high) in self.edges.items()}


@functools.cache
def cells_of(name: str) -> list[Cell]:
    return [read_cell(name, cell) for cell in VECTORS[name]["cells"]]


def read_cell(name: str, cell: Mapping[str, Any]) -> Cell:
    """Find the axis of each slot, following the candidates as the cell's draws choose them."""
    instance, played = instance_of(name), round_of(name)
    tree = jax.tree.map(np.asarray, played.world.tree)
    context: dict[int, tuple[int, ...]] = {0: ()}
    if instance.candidates is not None:
        for node in range(1, int(tree.num_nodes)):
            context[node] = (*context[tree.parents[node]], int(tree.tokens[node]))
    edges, drafted = {}, {}
    for slot, (low, high) in cell["u"].items():
        kind, *place = slot.split(":")
        if kind == "final":
            axis = "final"
        else:
            if rule_of(name).is_path:
                parent, node = int(place[0]), int(place[0]) + 1
            else:
                # The last sibling drawn is the one that was accepted, if two hold one token.
                at = max(n for n, tokens in context.items() if tokens == tokens_of(place[0]))
                parent, node = at, int(tree.children[at, int(place[1])]) if place[1:] else at
            if kind in ("draft", "sib"):
                twins = [drafted[n] for n in tree.children[parent] if n in drafted]
                row = draft_row(rule_of(name), instance, context[parent], twins)
                drafted[node] = invert(row, Fraction(low))
                context[node] = (*context[parent], drafted[node])
                axis = f"draft {node}"
            else:
                axis = f"accept {node}"
        edges[played.axes.index(axis)] = (Fraction(low), Fraction(high))
    return Cell(edges=edges, drafted=drafted, tokens=tuple(cell["tokens"]), accepted=cell["acc"])


def draft_row(
    rule: js.Rule, instance: audit.Instance, context: tuple[int, ...], twins: Sequence[int]
) -> list[Fraction]:
    """Return the exact law of the next sibling, undivided."""
    row = list(instance.draft.get(context, instance.draft[()]))
    if rule.proposal is not js.WithoutReplacement:
        return row
    left = [0 if token in twins else q for token, q in enumerate(row)]
    return left if any(left) else [0 if token in twins else 1 for token in range(len(row))]


def invert(row: Sequence[Fraction], u: Fraction) -> int:
    """Return the first token whose running total exceeds `u * total`."""
    running = itertools.accumulate(row)
    return next(token for token, mass in enumerate(running) if u * sum(row) < mass)


def is_dyadic(x: Fraction) -> bool:
    return x.denominator & (x.denominator - 1) == 0


def exact_edges(name: str, cell: Cell) -> list[tuple[int, Fraction]]:
    """List the (axis, low) of a cell where no intermediate quantity of the rule is rounded.

    Rows and edge must be dyadic. Rules from the root down multiply and subtract and never divide, so
    then they are exact; but drafts without replacement divide by the draft mass not drawn yet from a
    node's second rejection on, which only the final draw comes after. Block verification divides on
    its way down: its prefix weights must be dyadic too.
    """
    if not VECTORS[name]["dyadic_rows"]:
        return []
    edges = [(axis, low) for axis, (low, _) in cell.edges.items() if is_dyadic(low)]
    rule = rule_of(name)
    if rule.tests_deepest_first:
        return edges if all(map(is_dyadic, prefix_weights(name, cell))) else []
    if rule.proposal is js.WithoutReplacement and len(cell.drafted) > cell.accepted + 1:
        return [(axis, low) for axis, low in edges if axis != round_of(name).axes.index("final")]
    return edges


def prefix_weights(name: str, cell: Cell) -> list[Fraction]:
    """Return a_1, ..., a_T of the path that a cell drafts."""
    instance = instance_of(name)
    weights, context = [Fraction(1)], ()
    for _, token in sorted(cell.drafted.items()):
        p, q = (rows.get(context, rows[()])[token] for rows in (instance.target, instance.draft))
        weights.append(min(Fraction(1), weights[-1] * p / q))
        context = (*context, token)
    return weights


@dataclasses.dataclass(frozen=True)
class Points:
    """Points of the cube of draws and the cell whose outcome each must have."""

    draws: np.ndarray  # float32 [P, K]
    cells: np.ndarray  # int [P]


def points_of(name: str, choose: Callable[[Cell], list[dict[int, Fraction]]]) -> Points:
    """Take points of each cell, with every filling of the draws that are not looked at."""
    num_axes = len(round_of(name).axes)
    rows, cells = [], []
    for index, cell in enumerate(cells_of(name)):
        for point, fill in itertools.product(choose(cell), UNUSED):
            row = [fill] * num_axes
            for axis, u in point.items():
                row[axis] = float(u)
            rows.append(row)
            cells.append(index)
    return Points(
        draws=np.array(rows, np.float32).reshape(-1, num_axes), cells=np.array(cells, int)
    )


def inside(cell: Cell) -> list[dict[int, Fraction]]:
    """Return the middle of a cell, and the points near both edges of each of its draws."""
    points = [cell.middle]
    for axis, (low, high) in cell.edges.items():
        step = (high - low) / 1000
        points += [cell.middle | {axis: low + step}, cell.middle | {axis: high - step}]
    return points


def owners(name: str, draws: np.ndarray) -> np.ndarray:
    """Find the one cell that holds each point."""
    shape = (len(cells_of(name)), draws.shape[1])
    low, high = np.zeros(shape), np.ones(shape)
    for index, cell in enumerate(cells_of(name)):
        for axis, edges in cell.edges.items():
            low[index, axis], high[index, axis] = map(float, edges)
    points = draws.astype(np.float64)[:, None]
    holds = np.all((low <= points) & (points < high), axis=2)
    assert (holds.sum(axis=1) == 1).all(), "the cells do not partition the cube"
    return holds.argmax(axis=1)


@functools.cache
def program(play: Callable[..., Outcome]) -> Callable[..., Outcome]:
    return jax.jit(jax.vmap(play, in_axes=(None, 0)))


def replay(name: str, draws: np.ndarray) -> Outcome:
    """Replay points of a vector, in one program for all vectors of its rule."""
    played, padding = round_of(name), -len(draws) % BATCH
    padded = np.pad(draws, ((0, padding), (0, 0)))
    parts = [
        jax.device_get(program(played.play)(played.world, part))
        for part in padded.reshape(-1, BATCH, draws.shape[1])
    ]
    return jax.tree.map(lambda *xs: np.concatenate(xs)[: len(draws)], *parts)


def assert_outcomes(name: str, points: Points, outcome: Outcome) -> None:
    """Assert that every point has the outcome of its cell, candidates included."""
    cells = [cells_of(name)[index] for index in points.cells]
    verdict = outcome.verdict
    found = [
        (tuple(tokens[:count].tolist()), int(accepted))
        for tokens, count, accepted in zip(
            verdict.tokens, verdict.num_tokens, verdict.num_accepted, strict=True
        )
    ]
    wrong = [
        (points.draws[i].tolist(), found[i], (cell.tokens, cell.accepted))
        for i, cell in enumerate(cells)
        if found[i] != (cell.tokens, cell.accepted)
    ]
    assert not wrong, f"{len(wrong)} of {len(cells)} points: (draws, found, wanted) = {wrong[0]}"
    for i, cell in enumerate(cells):
        assert {n: int(outcome.drafted[i, n]) for n in cell.drafted} == cell.drafted
    np.testing.assert_array_equal(verdict.status, 0)


EXACT = (
    "token/zeros1",
    "token/dyadic1",
    "token/dyadic_g3",
    "token/seed_binary",
    "block/zeros5_onehot",
    "block/dyadic1",
    "block/dyadic_g3",
    "rrs_iid/dyadic_k2",
    "rrs_wor/dyadic_k2",
    "det_chain/dyadic",
)
"""Vectors with edges that no rule here rounds."""


def at_edges(name: str, cell: Cell) -> list[dict[int, Fraction]]:
    return [cell.middle | {axis: low} for axis, low in exact_edges(name, cell)]


def below_edges(name: str, cell: Cell) -> list[dict[int, Fraction]]:
    step = Fraction(1, 2**24)
    return [cell.middle | {a: low - step} for a, low in exact_edges(name, cell) if low > 0]


def test_the_vectors_with_exact_edges_are_those_listed() -> None:
    found = {name for name in VECTORS if any(exact_edges(name, c) for c in cells_of(name))}
    assert found == set(EXACT)


@pytest.mark.parametrize("name", VECTORS)
def test_draws_have_the_outcome_of_their_cell_whatever_the_unused_draws_are(name: str) -> None:
    points = points_of(name, inside)
    np.testing.assert_array_equal(owners(name, points.draws), points.cells)
    assert_outcomes(name, points, replay(name, points.draws))
    if name not in EXACT:
        return
    # An exact edge belongs to the cell above it, and the next draw below to the neighbour.
    points = points_of(name, functools.partial(at_edges, name))
    np.testing.assert_array_equal(owners(name, points.draws), points.cells)
    assert_outcomes(name, points, replay(name, points.draws))
    points = points_of(name, functools.partial(below_edges, name))
    neighbours = owners(name, points.draws)
    assert (neighbours != points.cells).all()
    assert_outcomes(name, dataclasses.replace(points, cells=neighbours), replay(name, points.draws))


@pytest.mark.parametrize("name", VECTORS)
def test_the_exact_law_of_the_jitted_verifier_is_that_of_the_vector(name: str) -> None:
    vector = VECTORS[name]
    rule = rule_of(name)
    found = audit.exact_law(rule, instance_of(name), padded_to=instances_of(rule), batch=BATCH)
    assert found.tv <= TOLERANCE
    assert found.impossible == 0
    assert found.cells.misses == 0
    assert found.is_proved
    # Rounds completed by the target have the joint law.
    text: dict[tuple[int, ...], float] = {}
    for tokens, mass in law_of_rounds(found).items():
        for whole, weight in completions(name, tokens, vector["joint_len"]).items():
            text[whole] = text.get(whole, 0.0) + mass * float(weight)
    assert_same_law(text, vector["law_joint"])
    assert_same_law(text, vector["target_joint"])
    # The cells have the masses of the vector's.
    verdict = found.cells.outcomes.verdict
    emitted = float(np.sum(found.cells.mass * verdict.num_tokens))
    wanted = float(Fraction(vector["expected_accepted"]))
    assert found.expected_accepted == pytest.approx(wanted, abs=TOLERANCE)
    assert emitted == pytest.approx(float(Fraction(vector["expected_emitted"])), abs=TOLERANCE)
    assert_same_law(law_of_rounds(found), vector["law_round"])
    accepted = np.bincount(verdict.num_accepted, weights=found.cells.mass)
    assert_same_law({(n,): mass for n, mass in enumerate(accepted)}, vector["law_accepted"])


def law_of_rounds(found: audit.Law) -> dict[tuple[int, ...], float]:
    """Return the law of the tokens that one round emits."""
    verdict = found.cells.outcomes.verdict
    law: dict[tuple[int, ...], float] = {}
    for mass, tokens, count in zip(
        found.cells.mass, verdict.tokens, verdict.num_tokens, strict=True
    ):
        emitted = tuple(tokens[:count].tolist())
        law[emitted] = law.get(emitted, 0.0) + mass
    return law


def completions(name: str, tokens: tuple[int, ...], length: int) -> dict[tuple[int, ...], Fraction]:
    """Return the exact law of some tokens cut or completed by the target to a length."""
    target = instance_of(name).target
    law = {tokens[:length]: Fraction(1)}
    for _ in range(length - len(tokens)):
        law = {
            (*text, token): mass * p
            for text, mass in law.items()
            for token, p in enumerate(target.get(text, target[()]))
        }
    return law


def assert_same_law(found: Mapping[tuple[int, ...], float], wanted: Mapping[str, str]) -> None:
    exact = {tokens_of(text): float(Fraction(mass)) for text, mass in wanted.items()}
    for text in found.keys() | exact.keys():
        assert found.get(text, 0.0) == pytest.approx(exact.get(text, 0.0), abs=TOLERANCE), text
