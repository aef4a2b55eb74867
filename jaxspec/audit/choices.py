"""Who decides the choices of a plain program: all branches in turn, or uniforms."""

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from jaxspec.audit.reference import Choices, Row
from jaxspec.tiles import TILE

Result = TypeVar("Result", bound=Hashable)


def exact_outcomes(program: Callable[[Choices], Result]) -> dict[Result, float]:
    """Return the probability of each outcome of a program, by playing all of its choices.

    The draws of all slots are independent and uniform; a slot that is asked twice is one draw.
    """
    law: dict[Result, float] = defaultdict(float)
    for branches in _every_branch():
        outcome = program(branches)
        law[outcome] += branches.mass
    return dict(law)


def _every_branch() -> Iterator["_Branches"]:
    script: list[int] = []
    while True:
        branches = _Branches(script)
        yield branches
        script = [choice for choice, _ in branches.made]
        while script and script[-1] == branches.made[len(script) - 1][1] - 1:
            script.pop()
        if not script:
            return
        script[-1] += 1


class _Branches:
    """Follows a script of choices, and from its end on takes the first branch each time."""

    def __init__(self, script: list[int]) -> None:
        self.mass = 1.0
        self.made: list[tuple[int, int]] = []
        self._script = script
        self._where: dict[str, tuple[float, float]] = {}

    def flip(self, slot: str, chance: float) -> bool:
        return self._piece(slot, (chance,)) < chance

    def pick(self, slot: str, row: Row) -> int:
        tokens = np.flatnonzero(row)
        if not len(tokens):
            tokens = np.array([len(row) - 1])
        edges = _running(row[tokens])[:-1].tolist()
        return int(tokens[bisect.bisect_right(edges, self._piece(slot, edges))])

    def _piece(self, slot: str, edges: Sequence[float]) -> float:
        """Take a piece of a slot's interval between ascending edges, and return where it starts."""
        low, high = self._where.get(slot, (0.0, 1.0))
        inside = edges[bisect.bisect_right(edges, low) : bisect.bisect_left(edges, high)]
        bounds = [low, *dict.fromkeys(inside), high]
        place = len(self.made)
        choice = self._script[place] if place < len(self._script) else 0
        self.made.append((choice, len(bounds) - 1))
        self._where[slot] = bounds[choice], bounds[choice + 1]
        self.mass *= (bounds[choice + 1] - bounds[choice]) / (high - low)
        return bounds[choice]


@dataclasses.dataclass
class Uniforms:
    """Choices by uniforms.

    Attributes:
      draw: gives the uniform in [0, 1) of a slot; a token is picked with `slot` inside a tile of 512
        tokens, and with `slot + " tile"` among the tiles if there are several.
      margin: the least distance of a draw from where its choice changes, so far.
    """

    draw: Callable[[str], float]
    margin: float = 1.0

    def flip(self, slot: str, chance: float) -> bool:
        """Return whether the draw of a slot is below `chance`."""
        u = self.draw(slot)
        self.margin = min(self.margin, abs(u - chance))
        return u < chance

    def pick(self, slot: str, row: Row) -> int:
        """Return the token that a slot's draws pick by inverse CDF."""
        first = 0
        if len(row) > TILE:
            starts = np.arange(0, len(row), TILE)
            first = TILE * self._invert(f"{slot} tile", np.add.reduceat(row, starts))
        return first + self._invert(slot, row[first : first + TILE])

    def _invert(self, slot: str, weights: np.ndarray) -> int:
        u, edges = self.draw(slot), _running(weights)[:-1]
        self.margin = min(self.margin, float(np.min(np.abs(edges - u), initial=1.0)))
        return int(np.searchsorted(edges, u, side="right"))


def _running(row: Row) -> np.ndarray:
    """Return the running sums of a row over its mass; a row without mass picks its last token."""
    running = np.cumsum(row, dtype=np.float64)
    return running / running[-1] if running[-1] > 0 else running
