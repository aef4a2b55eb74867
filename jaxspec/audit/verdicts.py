"""Whether the fields of verdicts agree with each other, with their round, and with the plain rule."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from jaxspec.audit.boxes import UNITS, Cells, replay
from jaxspec.audit.choices import Choices, Uniforms
from jaxspec.audit.reference import PlainOutcome
from jaxspec.audit.rounds import Outcome, Round

_NEAR = 1e-5
"""A draw this near to where a choice changes may be decided otherwise in float32."""


def outcome_of(outcomes: Outcome, index: int) -> PlainOutcome:
    """Return one of several outcomes as a plain rule would have it."""
    verdict = outcomes.verdict
    length = int(verdict.num_accepted[index]) + 1
    return PlainOutcome(
        path=tuple(verdict.path[index, :length].tolist()),
        tokens=tuple(verdict.tokens[index, : verdict.num_tokens[index]].tolist()),
    )


def outcome_law(cells: Cells) -> dict[PlainOutcome, float]:
    """Return the law of accepted path and emitted tokens."""
    law: dict[PlainOutcome, float] = defaultdict(float)
    for index, mass in enumerate(cells.mass.tolist()):
        law[outcome_of(cells.outcomes, index)] += mass
    return dict(law)


def field_faults(played: Round, cells: Cells) -> list[str]:
    """Say which fields of the verdicts contradict the round, with the mass of such draws."""
    outcomes, world = cells.outcomes, played.world
    verdict, vocab = outcomes.verdict, world.target.shape[1]
    parents, children = np.asarray(world.tree.parents), np.asarray(world.tree.children)
    count, slots = verdict.num_accepted, np.arange(verdict.path.shape[1])
    deepest = np.clip(count, 0, slots[-1])
    end = np.take_along_axis(verdict.path, deepest[:, None], axis=1)[:, 0]
    is_kept = slots[None] <= deepest[:, None]
    is_node = (verdict.path >= 0) & (verdict.path < outcomes.num_nodes[:, None])
    nodes = np.where(is_node, verdict.path, 0)
    above = np.concatenate([np.full((len(nodes), 1), -1), nodes[:, :-1]], axis=1)
    drafted = np.take_along_axis(outcomes.drafted, nodes, axis=1)[:, 1:]
    emitted = np.arange(verdict.tokens.shape[1])[None] < verdict.num_tokens[:, None]
    below = children[np.where((end >= 0) & (end < len(parents)), end, 0)]
    is_inner = ((below >= 0) & (below < outcomes.num_nodes[:, None])).any(axis=1)
    wants_last = is_inner | (count == 0) | bool(world.bonus)
    is_clean = verdict.status == 0
    checks = {
        "num_accepted is not a depth of the tree": (count < 0) | (count > slots[-1]),
        "path does not go from the root down by children": (
            is_kept & ~(is_node & (parents[nodes] == above))
        ).any(axis=1),
        "path has nodes after the last accepted one": (~is_kept & (verdict.path != -1)).any(axis=1),
        "stop_node is not the last node of path": verdict.stop_node != end,
        "an accepted token is not the one drafted at its node of path": (
            is_kept[:, 1:] & (verdict.tokens[:, :-1] != drafted)
        ).any(axis=1),
        "a token is missing after the accepted ones": (
            wants_last & (verdict.num_tokens <= count) & is_clean
        ),
        "a bonus token is emitted without being asked for": ~wants_last
        & (verdict.num_tokens > count),
        "num_tokens is not num_accepted or one more": (verdict.num_tokens < count)
        | (verdict.num_tokens > count + 1),
        "a token is not below the size of the vocabulary": (
            emitted & ((verdict.tokens < 0) | (verdict.tokens >= vocab))
        ).any(axis=1),
        "tokens are left after num_tokens": (~emitted & (verdict.tokens != -1)).any(axis=1),
    }
    return [
        f"{what}: {cells.mass[is_wrong].sum():.1e} of all draws, such as {_round_at(cells, is_wrong)}"
        for what, is_wrong in checks.items()
        if is_wrong.any()
    ]


def _round_at(cells: Cells, is_wrong: np.ndarray) -> str:
    index = int(np.argmax(np.where(is_wrong, cells.mass, -1)))
    verdict = cells.outcomes.verdict
    fields = ("tokens", "num_tokens", "num_accepted", "path", "stop_node", "status")
    found = ", ".join(f"{name} {getattr(verdict, name)[index].tolist()}" for name in fields)
    return f"drafted {cells.outcomes.drafted[index, 1:].tolist()}: {found}"


def replay_faults(
    played: Round, program: Callable[[Choices], PlainOutcome], num: int, *, batch: int
) -> tuple[int, str]:
    """Compare verdicts at random draws with what a plain rule makes of the same draws.

    Returns:
      (the number of draws at which they differ, the first of them in words). Draws too near to an
      edge of a choice to be decided in float32 are left out.
    """
    points = np.random.default_rng(1).integers(0, UNITS, (num, len(played.axes))) / UNITS
    outcomes = replay(played.play, played.world, points.astype(np.float32), batch=batch)
    wrong = []
    for index, point in enumerate(points):
        draws = dict(zip(played.axes, point.tolist(), strict=True))
        choices = Uniforms(draws.__getitem__)
        wanted = program(choices)
        if choices.margin > _NEAR and outcome_of(outcomes, index) != wanted:
            wrong.append((draws, outcome_of(outcomes, index), wanted))
    if not wrong:
        return 0, ""
    draws, found, wanted = wrong[0]
    given = ", ".join(f"{name} {value:.4f}" for name, value in draws.items())
    return len(wrong), f"at {given}: {found}, must be {wanted}"
