"""Boxes of constant outcome of a jitted function of uniforms.

Every verifier is piecewise constant in each of its draws. Axis by axis, in the order in which draws
can first matter, all boxes found so far are cut in lock-step: every bracket whose ends differ is
halved until its edge is known on the grid of multiples of 2^-24, which holds every float32 uniform
that JAX draws. One compiled `vmap` of a fixed batch evaluates all of it. Replays inside the boxes
then certify that no edge was missed.

A box costs 20 to 60 evaluations, at 10^5 to 10^6 evaluations a second on CPU, after a compilation of
a few seconds. A path of T tokens has about (V + 1)^(T + 1) boxes. A tree with k siblings below each
node and depth D has about (D + 1) V^(k D + 1) if it is tested from the root on, since only the
candidates below one path are read; tested from the deepest on, or if its draft decides by looking at
all candidates, up to V^N for N candidates.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import Progress, assert_whole
from jaxspec.transfers import moves_data

Play = Callable[[Any, jax.Array], Any]
"""A function of uniforms: (world, float32 [K]) -> a pytree of integer arrays."""

UNITS = 2**24
"""Grid points of a draw: k / 2^24 for k = 0 ... 2^24 - 1."""

TOLERANCE = 1e-6
"""Total variation that a law found by search may have from the true one: edges are known to 2^-24."""

_UNSEEN = 1e-6
"""Probability that is accepted of not seeing draws whose outcome is not that of their box."""

_CHUNK = 2**15
"""Uniform points that are replayed at a time."""

_REPORT_EVERY = 2**16
"""Evaluations between calls of `progress` within a step."""


@dataclasses.dataclass(frozen=True)
class Cells:
    """A partition of the cube of draws into boxes of one outcome each.

    Attributes:
      low: int64 [M, K], lower corner of each box in units of 2^-24.
      high: int64 [M, K], upper corner, exclusive.
      outcomes: the outcome of each box, a pytree with leading [M].
      evaluations: evaluations of the function that the search took.
      replays: further evaluations inside the boxes.
      misses: replays whose outcome differed from that of their box; a law with misses proves nothing.
      points: replays among them at points drawn uniformly from the cube.
    """

    low: np.ndarray = dataclasses.field(repr=False)
    high: np.ndarray = dataclasses.field(repr=False)
    outcomes: Any = dataclasses.field(repr=False)
    evaluations: int
    replays: int
    misses: int
    points: int = 0

    @property
    def uncertified(self) -> float:
        """Return the volume v of draws that could have other outcomes than their boxes unseen.

        A set of volume v, such as all draws with one of them in an interval of width v, is hit by none
        of the uniform points with probability (1 - v)^points; v is where that is 1e-6.
        """
        return 1 - _UNSEEN ** (1 / self.points) if self.points else 1.0

    @property
    def mass(self) -> np.ndarray:
        """Volume of each box, float64 [M]."""
        return np.prod((self.high - self.low) / UNITS, axis=1)


@moves_data
def search(
    play: Play,
    world: Any,
    num_axes: int,
    causal_order: Sequence[int],
    *,
    batch: int = 256,
    replays: int = 4,
    points: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Cells:
    """Find the boxes of constant outcome of a function of uniforms.

    Args:
      play: maps (world, float32 [K]) to a pytree of integer arrays; jitted and mapped over K-vectors
        here. Calls with the same `play` and worlds of equal shapes share a compiled program.
      world: a pytree of arrays that `play` is given as it is.
      num_axes: K. Axes that are not in `causal_order` must not matter.
      causal_order: the axes, each after those that decide whether it matters. For a verifier: draft
        draws, accept draws in the order in which they are tested, the final draw. In a wrong order
        the boxes are wrong, and the certificate shows misses.
      batch: evaluations in one call of the compiled program.
      replays: random points inside each box, in addition to its two corners, that must agree with it.
      points: further points, uniform in the cube, that must agree with the boxes they are in; what
        they certify is `Cells.uncertified`.
      seed: of those random points.
      progress: called as progress(what, done, total) before each axis, within a long one, before and
        after the replays.

    Returns:
      The `Cells`.

    Raises:
      ValueError: `num_axes`, `batch` or `replays` is out of range, `causal_order` has an axis out of
        range or twice, or `play` returns no array.
    """
    assert_whole("num_axes", num_axes, 0)
    assert_whole("replays", replays, 0)
    assert_whole("points", points, 0)
    for place, axis in enumerate(causal_order):
        if not 0 <= axis < num_axes or axis in causal_order[:place]:
            raise ValueError(
                f"causal_order[{place}] is {axis}: must be one of the {num_axes} axes from 0 on, "
                "each at most once"
            )
    evaluate = _Evaluator(play, world, num_axes, batch, progress, len(causal_order) + 1)
    low, high = np.zeros((1, num_axes), np.int64), np.full((1, num_axes), UNITS, np.int64)
    for axis in causal_order:
        evaluate.begin_step(len(low))
        low, high = cut(evaluate, low, high, axis)
    evaluate.begin_step(len(low))
    rows = evaluate.rows(((low + high) // 2 / UNITS).astype(np.float32))
    found, searched = evaluate.codes(rows), evaluate.count
    generator = np.random.default_rng(seed)
    inside = [low, high - 1, *(generator.integers(low, high) for _ in range(replays))]
    misses = sum(int(np.sum(evaluate(each) != found)) for each in inside)
    ends = np.cumsum(np.prod((high - low) / UNITS, axis=1))
    for start in range(0, points, _CHUNK):
        size = min(_CHUNK, points - start)
        box = np.searchsorted(ends[:-1], generator.random(size) * ends[-1], side="right")
        misses += int(np.sum(evaluate(generator.integers(low[box], high[box])) != found[box]))
    evaluate.begin_step(len(low))
    return Cells(
        low=low,
        high=high,
        outcomes=evaluate.unpack(rows),
        evaluations=searched,
        replays=evaluate.count - searched,
        misses=misses,
        points=points,
    )


@moves_data
def replay(play: Play, world: Any, draws: np.ndarray, *, batch: int = 256) -> Any:
    """Return the outcomes at points, float32 [P, K], by the compiled program of `search`."""
    evaluate = _Evaluator(play, world, draws.shape[1], batch, None, 0)
    return evaluate.unpack(evaluate.rows(draws))


@functools.lru_cache(maxsize=64)
def _compile(play: Play) -> Callable[[Any, jax.Array], jax.Array]:
    """Jit a function of uniforms over a batch of them, its outcome written as one row of integers."""

    def rows(world: Any, u: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(play(world, u))
        return jnp.concatenate([leaf.reshape(-1).astype(jnp.int32) for leaf in leaves])

    return jax.jit(jax.vmap(rows, in_axes=(None, 0)))


class _Evaluator:
    """Evaluates points of the grid in batches of one compiled shape; equal outcomes, equal codes."""

    def __init__(
        self,
        play: Play,
        world: Any,
        num_axes: int,
        batch: int,
        progress: Progress | None,
        steps: int,
    ) -> None:
        assert_whole("batch", batch, 1)
        point = jax.ShapeDtypeStruct((num_axes,), jnp.float32)
        self._shapes, self._treedef = jax.tree.flatten(jax.eval_shape(play, world, point))
        if not self._shapes:
            raise ValueError("play returns no array: an outcome must have at least one")
        self._play, self._world, self._batch = play, world, batch
        self._progress, self._steps, self._step, self._boxes = progress, steps, -1, 0
        self._codes: dict[bytes, int] = {}
        self.count = 0

    def begin_step(self, boxes: int) -> None:
        self._step, self._boxes = self._step + 1, boxes
        self._report()

    def _report(self) -> None:
        if self._progress:
            what = f"{self._boxes:,} boxes, {self.count:,} evaluations"
            self._progress(what, self._step, self._steps)

    def rows(self, uniforms: np.ndarray) -> np.ndarray:
        parts = []
        for start in range(0, len(uniforms), self._batch):
            part = uniforms[start : start + self._batch]
            padded = jnp.asarray(np.pad(part, ((0, self._batch - len(part)), (0, 0))))
            parts.append(np.asarray(_compile(self._play)(self._world, padded))[: len(part)])
            before, self.count = self.count, self.count + len(part)
            if before // _REPORT_EVERY < self.count // _REPORT_EVERY:
                self._report()
        return np.concatenate(parts)

    def codes(self, rows: np.ndarray) -> np.ndarray:
        distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
        codes = [self._codes.setdefault(row.tobytes(), len(self._codes)) for row in distinct]
        return np.asarray(codes, np.int64)[inverse.reshape(-1)]

    def __call__(self, points: np.ndarray) -> np.ndarray:
        return self.codes(self.rows((points / UNITS).astype(np.float32)))

    def unpack(self, rows: np.ndarray) -> Any:
        """Turn rows of integers back into outcomes with a leading axis."""
        columns = np.split(rows, np.cumsum([shape.size for shape in self._shapes])[:-1], axis=1)
        pairs = zip(columns, self._shapes, strict=True)
        leaves = [column.reshape(len(rows), *shape.shape) for column, shape in pairs]
        return jax.tree.unflatten(self._treedef, leaves)


def cut(
    evaluate: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray, axis: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut every box along one axis wherever the outcome changes.

    `evaluate` maps points of the grid, int64 [P, K], to a code of each one's outcome, int64 [P].
    """
    middle = (low + high) // 2

    def at(boxes: np.ndarray, values: np.ndarray) -> np.ndarray:
        points = middle[boxes]
        points[:, axis] = values
        return evaluate(points)

    every = np.arange(len(low))
    # Brackets (box, left, right) with the codes at both ends; a few probes first, since ends that
    # agree could hide a piece between them.
    span = high[:, axis] - 1 - low[:, axis]
    probes = [low[:, axis] + span * quarter // 4 for quarter in range(5)]
    ends = [(probe, at(every, probe)) for probe in probes]
    brackets = np.concatenate(
        [
            np.stack([every, a, b, left, right])
            for (a, left), (b, right) in itertools.pairwise(ends)
        ],
        axis=1,
    )
    cuts = [np.stack([every, low[:, axis]])]
    while True:
        brackets = brackets[:, brackets[3] != brackets[4]]
        is_edge = brackets[2] - brackets[1] == 1
        cuts.append(brackets[:, is_edge][[0, 2]])
        box, left, right, left_code, right_code = brackets[:, ~is_edge]
        if not box.size:
            break
        centre = (left + right) // 2
        code = at(box, centre)
        halves = (box, left, centre, left_code, code), (box, centre, right, code, right_code)
        brackets = np.concatenate([np.stack(half) for half in halves], axis=1)
    starts = np.concatenate(cuts, axis=1)
    box, start = starts[:, np.lexsort((starts[1], starts[0]))]
    is_last = np.append(box[1:] != box[:-1], True)
    new_low, new_high = low[box], high[box]
    new_low[:, axis] = start
    new_high[:, axis] = np.where(is_last, new_high[:, axis], np.append(start[1:], 0))
    return new_low, new_high
