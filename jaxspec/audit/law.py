"""The exact law of a jitted function of uniforms, by search.

Every verifier is piecewise constant in each of its draws. Axis by axis, in the order in which draws
can first matter, all boxes found so far are cut in lock-step: every bracket whose ends differ is
halved until its edge is known on the grid of multiples of 2^-24, which holds every float32 uniform
that JAX draws. One compiled `vmap` of a fixed batch evaluates all of it. Replays inside the boxes
found then certify that none was missed.

What it costs: 20 to 60 evaluations for each box, at 10^5 to 10^6 evaluations a second on CPU, after
a compilation of a few seconds. A path of T tokens has about (V + 1)^(T + 1) boxes. A tree with k
siblings below each node and depth D has about (D + 1) V^(k D + 1) if it is tested from the root on,
since only the candidates below one path are looked at; tested from the deepest on, up to V^N for N
candidates, and so has any tree whose draft decides by looking at all of them. Without a lazy order
(`Round.lazily`) every tree costs that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.audit.brief import brief
from jaxspec.audit.instances import Instance
from jaxspec.audit.rounds import Capacity, Outcome, Round, make_round
from jaxspec.checks import assert_whole
from jaxspec.transfers import moves_data
from jaxspec.verify import Rule

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as progress(what was just done, steps done, all steps), first when nothing is done."""

_TELL_EVERY = 2**16
"""Evaluations after which progress is told of in the middle of an axis."""

UNITS = 2**24
"""Grid points of a draw: k / 2^24 for k = 0 ... 2^24 - 1."""


@dataclasses.dataclass(frozen=True)
class Cells:
    """A partition of the cube of draws into boxes of one outcome each.

    Attributes:
      low: int64 [M, K], lower corner of each box in units of 2^-24.
      high: int64 [M, K], upper corner, exclusive.
      outcomes: the outcome of each box, a pytree with leading [M].
      evaluations: calls of the function that the search took.
      replays: further calls inside the boxes.
      misses: replays whose outcome was not that of their box; a law with misses proves nothing.
    """

    low: np.ndarray
    high: np.ndarray
    outcomes: Any
    evaluations: int
    replays: int
    misses: int

    __repr__ = brief

    @property
    def mass(self) -> np.ndarray:
        """Volume of each box, float64 [M]."""
        return np.prod((self.high - self.low) / UNITS, axis=1)


@moves_data
def search(
    play: Callable[[Any, jax.Array], Any],
    world: Any,
    num_axes: int,
    causal_order: tuple[int, ...],
    *,
    batch: int = 256,
    replays: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> Cells:
    """Find the boxes of constant outcome of a function of uniforms.

    Args:
      play: maps (world, float32 [K]) to a pytree of integer arrays; jitted and mapped over K-vectors
        here. Calls with one `play` and worlds of equal shapes share a compiled program.
      world: a pytree of arrays that `play` is given as it is.
      num_axes: K. Axes that are not in `causal_order` must not matter.
      causal_order: the axes, each after those that decide whether it matters. For a verifier: draft
        draws, accept draws in the order they are tested, the final draw. In a wrong order the boxes
        are wrong, and the certificate shows misses.
      batch: evaluations in one call of the compiled program.
      replays: random points inside each box, besides its two corners, that must agree with it.
      seed: of those random points.
      progress: see `Progress`; a step is an axis or the replays. It is called in the middle of a long
        step too.

    Returns:
      The `Cells`.

    Raises:
      ValueError: `num_axes`, `batch` or `replays` is out of range, `causal_order` names an axis that
        is not there or one twice, or `play` returns no array.
    """
    _check_order(num_axes, causal_order)
    assert_whole("replays", replays, 0)
    evaluate = _Evaluator(play, world, num_axes, batch)
    low = np.zeros((1, num_axes), np.int64)
    high = np.full((1, num_axes), UNITS, np.int64)
    steps = len(causal_order) + 1
    for done, axis in enumerate(causal_order):
        if progress:
            evaluate.tell = functools.partial(_tell, progress, done, steps, len(low))
            evaluate.tell(evaluate.count)
        low, high = _cut(evaluate, low, high, axis)
    if progress:
        evaluate.tell = functools.partial(_tell, progress, steps - 1, steps, len(low))
        evaluate.tell(evaluate.count)
    middle = (low + high) // 2
    found = evaluate(middle)
    searched = evaluate.count
    generator = np.random.default_rng(seed)
    points = [low, high - 1]
    points += [generator.integers(low, high) for _ in range(replays)]
    misses = sum(int(np.sum(evaluate(p).codes != found.codes)) for p in points)
    if progress:
        _tell(progress, steps, steps, len(low), evaluate.count)
    return Cells(
        low=low,
        high=high,
        outcomes=evaluate.unpack(found.rows),
        evaluations=searched,
        replays=evaluate.count - searched,
        misses=misses,
    )


def _tell(progress: Progress, done: int, steps: int, boxes: int, evaluations: int) -> None:
    progress(f"{boxes:,} boxes, {evaluations:,} evaluations", done, steps)


def _check_order(num_axes: int, causal_order: tuple[int, ...]) -> None:
    assert_whole("num_axes", num_axes, 0)
    for place, axis in enumerate(causal_order):
        if not 0 <= axis < num_axes or axis in causal_order[:place]:
            raise ValueError(
                f"causal_order[{place}] is {axis}: must be one of the {num_axes} axes from 0 on, "
                "each at most once"
            )


@moves_data
def replay(
    play: Callable[[Any, jax.Array], Any], world: Any, draws: np.ndarray, *, batch: int = 256
) -> Any:
    """Evaluate a function of uniforms at given points, in the compiled program of `search`.

    Args:
      play: see `search`.
      world: see `search`.
      draws: float32 [P, K], points of [0, 1)^K; none at all (P = 0) has no outcomes.
      batch: see `search`.

    Returns:
      The outcomes, a pytree with leading [P].

    Raises:
      ValueError: `draws` is no array [P, K], `batch` is below 1, or `play` returns no array.
    """
    draws = np.asarray(draws, np.float32)
    if draws.ndim != 2:
        raise ValueError(f"draws has shape {list(draws.shape)}: must be [points, axes]")
    evaluate = _Evaluator(play, world, draws.shape[1], batch)
    return evaluate.unpack(evaluate.rows(draws))


@dataclasses.dataclass(frozen=True)
class _Outcomes:
    """Outcomes as rows of integers, with a code that is equal where the rows are."""

    rows: np.ndarray  # [M, width]
    codes: np.ndarray  # [M]


@functools.lru_cache(maxsize=64)
def _compile(play: Callable[[Any, jax.Array], Any]) -> Callable[[Any, jax.Array], jax.Array]:
    """Jit a function of uniforms over a batch of them, its outcome written as one row of integers."""

    def rows(world: Any, u: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(play(world, u))
        return jnp.concatenate([leaf.reshape(-1).astype(jnp.int32) for leaf in leaves])

    return jax.jit(jax.vmap(rows, in_axes=(None, 0)))


class _Evaluator:
    """Evaluates points of the grid in batches of one compiled shape."""

    def __init__(
        self, play: Callable[[Any, jax.Array], Any], world: Any, num_axes: int, batch: int
    ) -> None:
        self._play = play
        self._world = world
        assert_whole("batch", batch, 1)
        self._batch = batch
        self._codes: dict[bytes, int] = {}
        self.count = 0
        self.tell: Callable[[int], None] | None = None
        point = jax.ShapeDtypeStruct((num_axes,), jnp.float32)
        self._shapes, self._treedef = jax.tree.flatten(jax.eval_shape(play, world, point))
        if not self._shapes:
            raise ValueError("play returns no array: an outcome must have at least one")

    def rows(self, uniforms: np.ndarray) -> np.ndarray:
        parts = [np.zeros((0, sum(shape.size for shape in self._shapes)), np.int32)]
        for start in range(0, len(uniforms), self._batch):
            part = uniforms[start : start + self._batch]
            padded = jnp.asarray(np.pad(part, ((0, self._batch - len(part)), (0, 0))))
            parts.append(np.asarray(_compile(self._play)(self._world, padded))[: len(part)])
            before, self.count = self.count, self.count + len(part)
            if self.tell and before // _TELL_EVERY < self.count // _TELL_EVERY:
                self.tell(self.count)
        return np.concatenate(parts)

    def __call__(self, points: np.ndarray) -> _Outcomes:
        rows = self.rows((points / UNITS).astype(np.float32))
        distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
        codes = [self._codes.setdefault(row.tobytes(), len(self._codes)) for row in distinct]
        return _Outcomes(rows=rows, codes=np.asarray(codes, np.int64)[inverse.reshape(-1)])

    def unpack(self, rows: np.ndarray) -> Any:
        """Turn rows of integers back into outcomes with a leading axis."""
        sizes = [shape.size for shape in self._shapes]
        columns = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
        leaves = [
            column.reshape(len(rows), *shape.shape)
            for column, shape in zip(columns, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)


def _cut(
    evaluate: _Evaluator, low: np.ndarray, high: np.ndarray, axis: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut every box along one axis wherever the outcome changes."""
    middle = (low + high) // 2

    def at(boxes: np.ndarray, values: np.ndarray) -> np.ndarray:
        points = middle[boxes]
        points[:, axis] = values
        return evaluate(points).codes

    everyone = np.arange(len(low))
    # Brackets (box, left, right) with the codes at both ends; a few probes first, since ends that
    # agree could hide a piece between them.
    probes = np.linspace(0, UNITS - 1, 5).astype(np.int64)
    at_probes = [at(everyone, np.full(len(low), probe)) for probe in probes]
    pending = [
        np.stack([everyone, np.full_like(everyone, a), np.full_like(everyone, b), left, right])
        for a, b, left, right in zip(
            probes[:-1], probes[1:], at_probes[:-1], at_probes[1:], strict=True
        )
    ]
    brackets = np.concatenate(pending, axis=1)
    edges = []
    while True:
        brackets = brackets[:, brackets[3] != brackets[4]]
        is_edge = brackets[2] - brackets[1] == 1
        edges.append(brackets[:, is_edge][[0, 2]])
        brackets = brackets[:, ~is_edge]
        if not brackets.size:
            break
        box, left, right, left_code, right_code = brackets
        centre = (left + right) // 2
        code = at(box, centre)
        brackets = np.concatenate(
            [
                np.stack([box, left, centre, left_code, code]),
                np.stack([box, centre, right, code, right_code]),
            ],
            axis=1,
        )
    cuts = np.concatenate(edges, axis=1)
    starts = np.concatenate([np.stack([everyone, low[:, axis]]), cuts], axis=1)
    order = np.lexsort((starts[1], starts[0]))
    box, start = starts[:, order]
    is_last = np.append(box[1:] != box[:-1], True)
    stop = np.where(is_last, UNITS, np.append(start[1:], 0))
    new_low, new_high = low[box], high[box]
    new_low[:, axis], new_high[:, axis] = start, stop
    return new_low, new_high


@dataclasses.dataclass(frozen=True)
class Law:
    """The exact law of one round of a rule in an instance, held against the target's.

    Attributes:
      rule: name of the rule.
      case: name of the instance.
      tv: total variation between the law of the text (the round's tokens completed by the target
        to D + 1) and the target's joint law.
      impossible: total mass of rounds that emit text of target mass 0. A `<=` in the place of `<`
        shows here alone, as a mass of 2^-24.
      expected_accepted: mean number of accepted tokens.
      known_accepted: what it must be, where that is known.
      total_mass: of all boxes.
      flagged: mass of rounds whose status is not clean.
      text: float64 [V] * (D + 1), the law of the text.
      target_text: float64 [V] * (D + 1), the target's joint law.
      cells: the partition.
    """

    rule: str
    case: str
    tv: float
    impossible: float
    expected_accepted: float
    known_accepted: float | None
    total_mass: float
    flagged: float
    text: np.ndarray
    target_text: np.ndarray
    cells: Cells

    __repr__ = brief

    @property
    def is_proved(self) -> bool:
        """Whether the rule is lossless here: certified, within 1e-6, nothing impossible."""
        fits = self.known_accepted is None or (
            abs(self.expected_accepted - self.known_accepted) <= 1e-6
        )
        whole = abs(self.total_mass - 1) <= 1e-9
        clean = self.tv <= 1e-6 and self.impossible == 0 and self.flagged <= 1e-6
        return fits and whole and clean and self.cells.misses == 0


@moves_data
def exact_law(
    rule: Rule,
    instance: Instance,
    *,
    capacity: Capacity | None = None,
    played: Round | None = None,
    dtype: DTypeLike = jnp.float32,
    batch: int = 256,
    progress: Progress | None = None,
) -> Law:
    """Compute the exact law of one round, draft draws included, from the public jitted verifier.

    Args:
      rule: the rule.
      instance: where it is played.
      capacity: sizes to pad to, so that several instances share one compiled program.
      played: a round made by `make_round` to examine in its place (a variant of the rule, of the
        draft, or of its length).
      dtype: what the rows are stored in, see `make_round`; not read if `played` is given.
      batch: see `search`; 4096 is up to three times as fast where there are millions of evaluations.
      progress: see `Progress`; the steps are those of `search`.

    Returns:
      The `Law`. Each edge is known to 2^-24, so total variations of a few 1e-8 are those of float32.

    The draws are searched lazily (see `Round.lazily`) where that can be. Should the certificate show
    misses, they are searched once more in full.
    """
    played = played or make_round(rule, instance, capacity=capacity, dtype=dtype)
    lazy = played.lazily()
    cells = _cells_of(lazy or played, batch, progress)
    if lazy and cells.misses:
        cells = _cells_of(played, batch, progress)
    outcome: Outcome = cells.outcomes
    verdict = outcome.verdict
    length = played.depth + 1
    table = np.asarray(played.world.target)
    target = joint_law(table, length)
    text = np.zeros_like(target)
    impossible = 0.0
    for mass, tokens, count in zip(cells.mass, verdict.tokens, verdict.num_tokens, strict=True):
        emitted = tuple(int(token) for token in tokens[:count])
        if min(emitted, default=0) < 0 or max(emitted, default=0) >= table.shape[1]:
            impossible += mass
            continue
        if target[emitted].sum() == 0:
            impossible += mass
        text[emitted] += mass * _completion(table, emitted, length)
    accepted = float(np.sum(cells.mass * verdict.num_accepted))
    known = instance.expected_accepted.get(rule.name)
    return Law(
        rule=rule.name,
        case=instance.name,
        tv=float(np.abs(text - target).sum() / 2),
        impossible=float(impossible),
        expected_accepted=accepted,
        known_accepted=None if known is None else float(known),
        total_mass=float(cells.mass.sum()),
        flagged=float(np.sum(cells.mass * (verdict.status != 0))),
        text=text,
        target_text=target,
        cells=cells,
    )


def _cells_of(played: Round, batch: int, progress: Progress | None) -> Cells:
    return search(
        played.play,
        played.world,
        len(played.axes),
        played.causal_order,
        batch=batch,
        progress=progress,
    )


def joint_law(table: np.ndarray, length: int) -> np.ndarray:
    """Return the joint law of the first tokens, float64 [V] * length, from rows by context.

    Args:
      table: float [contexts, V], rows as they are stored: `World.target` for the law of the text,
        `World.draft` for that of drafted tokens. Each row's law is row / sum(row), in float64.
      length: how many tokens, at least 0.

    Raises:
      ValueError: the table does not hold the contexts of so many tokens.
    """
    assert_whole("length", length, 0)
    table = np.asarray(table)
    needed = sum(table.shape[-1] ** tokens for tokens in range(length))
    if table.ndim != 2 or len(table) < needed:
        raise ValueError(
            f"table has shape {list(table.shape)}: the first {length} tokens have {needed} contexts, "
            "and a row for each"
        )
    return _completion(table, (), length)


def _completion(table: np.ndarray, prefix: tuple[int, ...], length: int) -> np.ndarray:
    """Return the law of what the target adds to a prefix up to `length` tokens."""
    vocab = table.shape[1]
    place = 0
    for token in prefix:
        place = place * vocab + token + 1
    places = np.array(place)
    law = np.array(1.0)
    for _ in range(length - len(prefix)):
        rows = table[places].astype(np.float64)
        law = law[..., None] * (rows / rows.sum(axis=-1, keepdims=True))
        places = places[..., None] * vocab + np.arange(vocab) + 1
    return law
