"""How far float32 is from the exact law: one round of a real vocabulary, weight by weight.

A round of one candidate has the law

    P(y) = q(y) a(y) + sum_x q(x) (1 - a(x)) r(y)

with q the draft's law, a(x) the chance that x is accepted and r the law of the replacement. Here a and
r are those of the verifier's own float32 numbers: the two sides of its test, the sums of its tiles and
the weights inside them; all else is float64. In exact arithmetic P is the target row.

Two laws are taken from these numbers: that of uniforms that are real numbers ("as weighed"), and that
of uniforms k / 2^24 with the running totals that a draw compares them with ("as drawn").
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.draws import Draws
from jaxspec.logits import Logits
from jaxspec.loops import choose
from jaxspec.proposals import Proposal, WithReplacement, whole_row
from jaxspec.rows import Probabilities, RowSource
from jaxspec.tiles import TILE, tile_span
from jaxspec.trees import ROOT, chain
from jaxspec.verify.arguments import arguments
from jaxspec.verify.kernel import final_draw, left_piece, left_sums, test
from jaxspec.verify.reader import RowReader

GRID = 2**24
"""Uniforms are multiples of 1 / GRID."""

LIMIT = 2e-6
"""What total variations as weighed must not exceed."""

VOCABS = (32000, 262144)
DTYPES = ("float32", "bfloat16", "float16")
FORMS = ("probabilities", "logits")


@dataclasses.dataclass(frozen=True)
class Precision:
    """The distance of the law of one round from the exact one.

    Attributes:
      rows: which rows, see `rows_of`.
      form: "probabilities" or "logits".
      dtype: what the rows are stored as.
      vocab: V.
      weighed: total variation of a round of one candidate, as weighed.
      drawn: the same as drawn.
      bonus_weighed: that of a bonus token, drawn from the whole row, as weighed.
      bonus_drawn: the same as drawn.
    """

    rows: str
    form: str
    dtype: str
    vocab: int
    weighed: float
    drawn: float
    bonus_weighed: float
    bonus_drawn: float


def precisions(vocabs: Sequence[int] = VOCABS) -> Iterator[Precision]:
    """Measure all rows, forms, dtypes and sizes."""
    for vocab, name, form, dtype in itertools.product(vocabs, ROWS, FORMS, DTYPES):
        target, draft = rows_of(name, form, dtype, vocab)
        exact = exact_row(target)
        laws = (*round_law(target, draft), *bonus_law(target, draft))
        away = [0.5 * float(np.abs(law - exact).sum()) for law in laws]
        yield Precision(name, form, dtype, vocab, *away)


def markdown(measured: Iterable[Precision]) -> str:
    """Return the distances as a table in Markdown, the greatest of each dtype over its rows."""
    groups: dict[tuple[str, str, int], list[Precision]] = {}
    for each in measured:
        groups.setdefault((each.form, each.dtype, each.vocab), []).append(each)
    fields = ("weighed", "drawn", "bonus_weighed", "bonus_drawn")
    heads = ("rows", "V", "round, as weighed", "as drawn", "bonus, as weighed", "as drawn")
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for (form, dtype, vocab), group in groups.items():
        most = (max(getattr(each, field) for each in group) for field in fields)
        lines.append(_line((f"{form}, {dtype}", str(vocab), *(f"{tv:.1e}" for tv in most))))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- rows


def _peaked(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(vocab)
    target = 5 * generator.normal(size=vocab)
    return target, target + generator.normal(size=vocab)


def _flat(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    draft = np.log(np.random.default_rng(vocab).uniform(0.5, 1.5, vocab))
    return np.full(vocab, -np.log(vocab)), draft - np.log(vocab)


def _certain(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    def row(rest: float) -> np.ndarray:
        masses = np.full(vocab, rest / (vocab - 1))
        masses[vocab // 3] = 1 - rest
        return np.log(masses)

    return row(1e-7), row(3e-7)


ROWS = {"peaked": _peaked, "flat, 1 / V": _flat, "one token of 1 - 1e-7": _certain}
"""Names of pairs of rows: functions of V that return (target, draft) as logits, float64 [V]."""


def rows_of(name: str, form: str, dtype: str, vocab: int) -> tuple[RowSource, RowSource]:
    """Return a target row and a draft row as stored, [1, V]; V is the width of the slab."""

    def source(logits: np.ndarray) -> RowSource:
        if form == "logits":
            return Logits(values=jnp.asarray(logits[None], dtype), temperature=jnp.float32(1))
        weights = np.exp(logits - logits.max())
        return Probabilities(values=jnp.asarray(weights[None] / weights.sum(), dtype))

    target, draft = ROWS[name](vocab)
    return source(target), source(draft)


def exact_row(source: RowSource) -> np.ndarray:
    """Return the law of the first row as stored, in float64 [V]."""
    assert isinstance(source.values, jax.Array)
    row = np.asarray(source.values[0].astype(jnp.float32), np.float64)
    if isinstance(source, Logits):
        scaled = row / float(source.temperature)
        row = np.exp(scaled - scaled.max())
    row = np.where(row < np.finfo(np.float32).tiny, 0.0, row)
    return row / row.sum()


# --- laws


def round_law(target: RowSource, draft: RowSource) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of the token of a round of one sampled candidate, as weighed and as drawn.

    Args:
      target: the target row, [1, V].
      draft: the draft row that the candidate is drawn from, [1, V].

    Returns:
      Two laws, float64 [V].
    """
    numbers = _Numbers.of(target, draft, is_bonus=False)
    q = exact_row(draft)
    weighed, drawn = (
        _composed(q, numbers.accepted(on_grid=on_grid), numbers.replaced(on_grid=on_grid))
        for on_grid in (False, True)
    )
    return weighed, drawn


def bonus_law(target: RowSource, draft: RowSource) -> tuple[np.ndarray, np.ndarray]:
    """Return the law of a token drawn from the whole target row, as weighed and as drawn."""
    numbers = _Numbers.of(target, draft, is_bonus=True)
    return numbers.replaced(on_grid=False), numbers.replaced(on_grid=True)


def _composed(q: np.ndarray, accepted: np.ndarray, replaced: np.ndarray) -> np.ndarray:
    return q * accepted + np.sum(q * (1 - accepted)) * replaced


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """What the verifier computes, in float32.

    Attributes:
      drawn: [V], the side of the test of each candidate that a uniform multiplies.
      kept: [V], the other side.
      sums: [tiles], of what a rejection leaves; for a bonus token of the whole row.
      running: [tiles], their running totals.
      weights: [tiles, TILE], what is left of each tile; 0 outside the tile.
      running_inside: [tiles, TILE], running totals.
      starts: [tiles], tokens of the first weights.
    """

    drawn: np.ndarray
    kept: np.ndarray
    sums: np.ndarray
    running: np.ndarray
    weights: np.ndarray
    running_inside: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, target: RowSource, draft: RowSource, *, is_bonus: bool) -> "_Numbers":
        """Compute them."""
        return cls(*(np.asarray(x) for x in _numbers(target, draft, jnp.bool_(is_bonus))))

    def accepted(self, *, on_grid: bool) -> np.ndarray:
        """Return the chance that each candidate is accepted."""
        if on_grid:
            return _below(self.drawn, self.kept) / GRID
        drawn, kept = self.drawn.astype(np.float64), self.kept.astype(np.float64)
        return np.where(kept < drawn, kept / np.where(drawn > 0, drawn, 1), 1.0)

    def replaced(self, *, on_grid: bool) -> np.ndarray:
        """Return the law of the token that replaces a rejected one."""
        tiles = _law(self.sums, self.running, on_grid)
        law = np.zeros(len(self.drawn))
        rows = zip(tiles, self.starts, self.weights, self.running_inside, strict=True)
        for share, start, weights, running in rows:
            if share > 0:
                law[start : start + len(weights)] += share * _law(weights, running, on_grid)
        return law


def _law(weights: np.ndarray, running: np.ndarray, on_grid: bool) -> np.ndarray:
    """Return the law of the index that `tiles.invert` chooses."""
    exact = weights.astype(np.float64)
    if not on_grid:
        return exact / max(exact.sum(), np.finfo(float).tiny)
    # The first whose running total exceeds `u total`, of positive weight; the last if none does.
    (positive,) = np.nonzero(weights > 0)
    if len(positive) == 0:
        return exact
    highest = np.maximum.accumulate(running[positive])
    ends = _below(np.broadcast_to(running[-1], highest.shape), highest)
    ends[-1] = GRID
    law = np.zeros(len(weights))
    law[positive] = np.diff(ends, prepend=0) / GRID
    return law


def _below(factor: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Count the uniforms u = k / GRID with `u factor < bound` in float32."""
    low, high = np.zeros(factor.shape, np.int64), np.full(factor.shape, GRID, np.int64)
    while (low < high).any():  # those below `low` are, those from `high` on are not
        middle = (low + high) // 2
        u = (middle / GRID).astype(np.float32)
        is_below = (u * factor < bound) & (low < high)
        low, high = np.where(is_below, middle + 1, low), np.where(is_below, high, middle)
    return low


@jax.jit
def _numbers(target: RowSource, draft: RowSource, is_bonus: jax.Array) -> tuple[jax.Array, ...]:
    slab = target.values
    assert isinstance(slab, jax.Array)
    vocab = slab.shape[1]
    # One row is both that of the root and, never read, that of the leaf.
    two = dataclasses.replace(target, values=jnp.broadcast_to(slab, (2, vocab)))
    spans = jax.default_backend() == "cpu"

    def reader_of(token: jax.Array, *, is_exact: jax.Array) -> RowReader:
        proposal: Proposal = WithReplacement(tree=chain(token[None]), draft_rows=draft)
        draws = Draws(accept=jnp.zeros(2), final=jnp.zeros(2))
        given = arguments(draws, proposal, two, False)
        slabs = (two.values, draft.values)
        return RowReader(slabs, given, is_exact=is_exact, spans=spans)

    whole = whole_row(jnp.float32(1), 1, vocab)

    def sides(token: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Where the masses that are assumed could decide a test, they are measured.
        reader = reader_of(token, is_exact=jnp.ones((), bool))
        site = reader.visit(jnp.int32(ROOT), jnp.ones((), bool))
        candidate = test(reader, site, whole, jnp.int32(1))
        return candidate.top * whole.scale, candidate.weight * candidate.bottom

    drawn, kept = jax.vmap(sides)(jnp.arange(vocab, dtype=jnp.int32))
    rejected = WithReplacement.reject(whole, jnp.float32(0), jnp.int32(0))
    wanted = choose(is_bonus, whole, rejected)
    tiles = jnp.arange(-(-vocab // TILE), dtype=jnp.int32)
    size = min(TILE, vocab)

    def of_tiles(is_exact: jax.Array) -> tuple[jax.Array, ...]:
        reader = reader_of(jnp.int32(0), is_exact=is_exact)
        site = reader.visit(jnp.int32(ROOT), jnp.ones((), bool))
        sums, *_ = left_sums(reader, site, wanted, assumes_draft=True)
        # Nothing is left where rounding made the rows equal: then the whole row is drawn from.
        left = choose(jnp.sum(sums) == 0, whole, wanted)
        sums, *_ = left_sums(reader, site, left, assumes_draft=True)

        def inside(tile: jax.Array) -> tuple[jax.Array, jax.Array]:
            start, _ = tile_span(tile, vocab)
            weights = left_piece(reader, site, left, start, size)
            tokens = start + jnp.arange(size, dtype=jnp.int32)
            return jnp.where(tokens >= tile * TILE, weights, 0.0), start

        weights, starts = jax.lax.map(inside, tiles)
        _, _, is_doubtful = final_draw(reader, site, wanted, jnp.ones((), bool), assumes_draft=True)
        return sums, weights, starts, is_doubtful

    *assumed, is_doubtful = of_tiles(jnp.zeros((), bool))
    *exact, _ = of_tiles(jnp.ones((), bool))
    sums, weights, starts = (
        jnp.where(is_doubtful, x, y) for x, y in zip(exact, assumed, strict=True)
    )
    running = jax.vmap(jnp.cumsum)(weights)
    return drawn, kept, sums, jnp.cumsum(sums), weights, running, starts
