"""Small instances to prove rules in: rows by context, and how much is drafted."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from jaxspec.proposals import PointMass
from jaxspec.tiles import TILE
from jaxspec.verify import Rule

Context = tuple[int, ...]
RowsByContext = Mapping[Context, Sequence[Fraction | float | int]]


@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """Rows by context, and what is drafted.

    Attributes:
      name: the name in reports.
      target: the target's row for each context of drafted tokens; missing contexts have the row
        of `()`.
      draft: the draft's rows, as `target`, for sampled candidates; None for point masses.
      branching: candidates of each node by depth, (1, 1, 1) for a path of three.
      candidates: for point masses, the ordered candidates after each context, instead of
        `branching`.
      bonus: whether a fully accepted path is followed by one more token.
      temperature, top_k, top_p: settings that both models are sampled with, as `jaxspec.Logits` has
        them. If any is set, the verifier is handed logits and the settings, and its law must be that
        of the processed rows; top_k 0 is off.
      dtype: what the rows are stored in, "float16" for half precision. The mass of such a row is not
        1; its law, by which tokens are drawn and by which the text is judged, is row / sum(row).
      expected_accepted: the exact mean number of accepted tokens by rule, worked out in fractions.
    """

    name: str
    target: RowsByContext = dataclasses.field(repr=False)
    draft: RowsByContext | None = dataclasses.field(default=None, repr=False)
    branching: tuple[int, ...] = ()
    candidates: Mapping[Context, Sequence[int]] | None = None
    bonus: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    dtype: str = "float32"
    expected_accepted: Mapping[str, Fraction] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError unless the rows are distributions over one vocabulary."""
        for name, rows in (("target", self.target), ("draft", self.draft)):
            if rows is None:
                continue
            if len(rows.get((), ())) == 0:
                raise ValueError(f"{name} has no row for the context (), or an empty one")
            for context, row in rows.items():
                place = f"the {name} row for context {context}"
                if len(row) != self.vocab:
                    raise ValueError(f"{place} has {len(row)} entries: must be {self.vocab}")
                entries = floats(row)
                if min(entries) < 0 or abs(sum(entries) - 1) > 0.01:
                    raise ValueError(f"{place} is {entries}: not a distribution")

    @property
    def vocab(self) -> int:
        """V."""
        return len(self.target[()])

    @property
    def is_processed(self) -> bool:
        """Whether the rows are handed over as logits with settings."""
        return (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0)

    def processed(self, row: Sequence[Fraction | float | int]) -> np.ndarray:
        """Return the law of a row at the instance's settings, float64 [V]; see `processed`."""
        exact = np.array(floats(row))
        if not self.is_processed:
            return exact
        return processed(exact, self.temperature, self.top_k, self.top_p)


def processed(row: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Apply a temperature above 0, then top_k, then top_p of what it keeps, to probabilities [V].

    Tokens of equal probability are kept or dropped together. Rows are sorted here, in float64, and
    only here.
    """
    weights = row ** (1 / temperature)
    falling = np.sort(weights)[::-1]
    if 0 < top_k < len(row):
        weights = np.where(weights < falling[top_k - 1], 0, weights)
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        kept = weights[order][before < top_p * weights.sum()]
        weights = np.where(weights < kept.min(), 0, weights)
    return weights / weights.sum()


def laws_of(table: np.ndarray) -> np.ndarray:
    """Return the laws of stored rows, row / sum(row), in float64."""
    rows = table.astype(np.float64)
    return rows / rows.sum(axis=-1, keepdims=True)


def floats(row: Sequence[Fraction | float | int]) -> list[float]:
    """Return the entries of a row; fractions in text are numbers too, NaN and infinity are not."""
    return [float(Fraction(entry)) for entry in row]


def _row(*weights: int) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


SINGLE_PATH = Instance(
    "contract single path",
    {(): _row(1, 3)},
    {(): _row(1, 1)},
    branching=(1,),
    bonus=False,
    expected_accepted={"token": Fraction(3, 4), "block": Fraction(3, 4)},
)
"""The contract's binary path: P(token 0) = 1/4, drafted from a fair coin."""

TWO_LEVEL_TREE = Instance(
    "contract two-level tree",
    {(): _row(1, 3), (0,): _row(4, 1), (1,): _row(2, 3)},
    candidates={(): (0, 1), (0,): (0, 1), (1,): (0, 1)},
    bonus=False,
    expected_accepted={"point_mass": Fraction(2)},
)
"""The contract's tree: joint law (00, 01, 10, 11) = (2000, 500, 3000, 4500) / 10000."""

_KILL_P: RowsByContext = {(): _row(1, 3, 7, 9)}
_KILL_Q: RowsByContext = {(): _row(12, 3, 4, 1)}
_WIDE_P: RowsByContext = {
    (): _row(*(2 + token // 64 if token % 32 == 18 else 0 for token in range(600)))
}
_WIDE_Q: RowsByContext = {
    (): _row(*({18: 5, 530: 2, 594: 1}.get(token, 0) for token in range(600)))
}
"""Two tiles of tokens, 512 and 88, with mass in both."""

_CONTEXTS_P: RowsByContext = {
    (): _row(1, 3, 8),
    (0,): _row(5, 6, 1),
    (1,): _row(2, 4, 6),
    (2,): _row(7, 1, 4),
    (0, 0): _row(3, 5, 4),
    (1, 1): _row(1, 10, 1),
    (2, 0): _row(4, 0, 8),
}
_CONTEXTS_Q: RowsByContext = {
    (): _row(6, 4, 2),
    (0,): _row(2, 3, 7),
    (1,): _row(6, 1, 5),
    (2,): _row(1, 9, 2),
}


def _by_context(vocab: int, depth: int, shift: int) -> RowsByContext:
    """Make rows that differ from context to context, none like that of a neighbour."""
    return {
        context: _row(
            *(1 + (7 * token + 5 * shift + _number(context)) % 11 for token in range(vocab))
        )
        for length in range(depth + 1)
        for context in itertools.product(range(vocab), repeat=length)
    }


def _number(context: Context) -> int:
    """Return a number that differs between short contexts."""
    return sum((3 * place + 4) * (token + 1) for place, token in enumerate(context))


_PATHS = (
    SINGLE_PATH,
    Instance(
        "toy of two",
        {(): _row(1, 2)},
        {(): _row(2, 1)},
        branching=(1, 1),
        expected_accepted={"token": Fraction(10, 9), "block": Fraction(11, 9)},
    ),
    Instance("contexts of three tokens", _CONTEXTS_P, _CONTEXTS_Q, branching=(1, 1)),
    Instance("kill row", _KILL_P, _KILL_Q, branching=(1,)),
    Instance(
        "target zeros",
        {(): _row(0, 1, 3), (1,): _row(4, 0, 0), (2,): _row(1, 0, 1)},
        {(): _row(2, 1, 1)},
        branching=(1, 1),
    ),
    Instance(
        "draft zeros, rare target token",
        {(): _row(1, 4999, 4000, 1000), (1,): _row(4000, 1, 4999, 1000)},
        {(): _row(1, 29999, 0, 0), (1,): _row(0, 1, 14999, 15000)},
        branching=(1, 1),
    ),
    Instance("three tokens deep", _by_context(3, 3, 0), _by_context(3, 3, 1), branching=(1, 1, 1)),
    Instance("four tokens deep", _by_context(2, 4, 2), _by_context(2, 4, 0), branching=(1,) * 4),
    Instance(
        "temperature, top_k and top_p",
        {(): _row(2, 6, 9, 5, 4), (2,): _row(8, 3, 3, 5, 1)},
        {(): _row(1, 9, 5, 6, 2), (2,): _row(2, 9, 1, 4, 4)},
        branching=(1, 1),
        temperature=0.5,
        top_k=4,
        top_p=0.85,
    ),
    Instance("two tiles, half precision", _WIDE_P, _WIDE_Q, branching=(1,), dtype="float16"),
)

_TREES = (
    Instance(
        "kill row, two siblings",
        _KILL_P,
        _KILL_Q,
        branching=(2,),
        expected_accepted={
            "with_replacement": Fraction(47, 80),
            "without_replacement": Fraction(107, 160),
        },
    ),
    Instance("contexts of three tokens, two levels", _CONTEXTS_P, _CONTEXTS_Q, branching=(2, 1)),
    Instance(
        "draft support exhausted", {(): _row(2, 8, 5, 5)}, {(): _row(3, 1, 0, 0)}, branching=(3,)
    ),
    Instance("three siblings", {(): _row(1, 8, 5, 6)}, {(): _row(10, 2, 2, 5)}, branching=(3,)),
    Instance(
        "four siblings", {(): _row(1, 2, 6, 1, 10)}, {(): _row(8, 5, 3, 3, 1)}, branching=(4,)
    ),
    Instance(
        "two by two", _by_context(3, 2, 0), _by_context(3, 2, 3), branching=(2, 2), bonus=False
    ),
    Instance("three deep", _by_context(3, 3, 4), _by_context(3, 3, 1), branching=(1, 2, 1)),
    Instance(
        "temperature, top_k and top_p",
        {(): _row(2, 6, 9, 5, 4), (2,): _row(8, 3, 3, 5, 1)},
        {(): _row(1, 9, 5, 6, 2), (2,): _row(2, 9, 1, 4, 4)},
        branching=(2,),
        temperature=2.0,
        top_k=4,
        top_p=0.8,
    ),
    Instance("two tiles, half precision", _WIDE_P, _WIDE_Q, branching=(2,), dtype="float16"),
)

_POINT_MASS_TREES = (
    TWO_LEVEL_TREE,
    Instance(
        "kill row, top two",
        _KILL_P,
        candidates={(): (3, 2)},
        expected_accepted={"point_mass": Fraction(4, 5)},
    ),
    Instance(
        "contexts of three tokens, uneven tree",
        _CONTEXTS_P,
        candidates={(): (2, 0), (2,): (1, 0), (2, 0): (2,), (0,): (1,)},
    ),
    Instance("no candidates", _KILL_P, candidates={}, bonus=False),
    Instance("four candidates", {(): _row(2, 3, 7, 8, 4)}, candidates={(): (4, 0, 3, 1)}),
    Instance(
        "three deep",
        _by_context(3, 3, 2),
        candidates={(): (1, 2), (1,): (0, 2), (1, 0): (2, 1), (2,): (2,), (2, 2): (0,)},
    ),
    Instance(
        "temperature, top_k and top_p",
        {(): _row(2, 6, 9, 5, 4), (2,): _row(8, 3, 3, 5, 1)},
        candidates={(): (2, 0), (2,): (4, 3)},
        temperature=2.0,
        top_k=4,
        top_p=0.8,
    ),
    Instance("two tiles, half precision", _WIDE_P, candidates={(): (18, 530)}, dtype="float16"),
)


def instances_for(rule: Rule) -> tuple[Instance, ...]:
    """Return the instances that a rule is proved in."""
    if rule.proposal is PointMass:
        return _POINT_MASS_TREES
    return _PATHS if rule.is_path else _PATHS[1:3] + _TREES


def alike(instance: Instance, others: Iterable[Instance]) -> list[Instance]:
    """Return an instance and those of others that can share a compiled program with it."""

    def program(each: Instance) -> tuple[bool, bool, str]:
        return each.vocab > TILE, each.is_processed, each.dtype

    return [instance, *(each for each in others if program(each) == program(instance))]
