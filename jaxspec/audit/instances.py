"""Small instances to prove rules in: rows by context, and how much is drafted."""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction

from jaxspec.proposals import PointMass
from jaxspec.verify import Rule

Context = tuple[int, ...]
RowsByContext = Mapping[Context, Sequence[Fraction | float | int]]


@dataclasses.dataclass(frozen=True)
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
      expected_accepted: the exact mean number of accepted tokens by rule, where it is known.
    """

    name: str
    target: RowsByContext = dataclasses.field(repr=False)
    draft: RowsByContext | None = dataclasses.field(default=None, repr=False)
    branching: tuple[int, ...] = ()
    candidates: Mapping[Context, Sequence[int]] | None = None
    bonus: bool = True
    expected_accepted: Mapping[str, Fraction] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError unless there is a row for missing contexts."""
        for name, rows in (("target", self.target), ("draft", self.draft)):
            if rows is not None and len(rows.get((), ())) == 0:
                raise ValueError(f"{name} has no row for the context (), or an empty one")

    @property
    def vocab(self) -> int:
        """V."""
        return len(self.target[()])


def _row(*weights: int) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


SINGLE_PATH = Instance(
    name="contract single path",
    target={(): _row(1, 3)},
    draft={(): _row(1, 1)},
    branching=(1,),
    bonus=False,
    expected_accepted={"token": Fraction(3, 4), "block": Fraction(3, 4)},
)
"""The contract's binary path: P(token 0) = 1/4, drafted from a fair coin."""

TWO_LEVEL_TREE = Instance(
    name="contract two-level tree",
    target={(): _row(1, 3), (0,): _row(4, 1), (1,): _row(2, 3)},
    candidates={(): (0, 1), (0,): (0, 1), (1,): (0, 1)},
    bonus=False,
    expected_accepted={"point_mass": Fraction(2)},
)
"""The contract's tree: joint law (00, 01, 10, 11) = (2000, 500, 3000, 4500) / 10000."""

_KILL_P = _row(1, 3, 7, 9)
_KILL_Q = _row(12, 3, 4, 1)
_CONTEXTS_P = {
    (): _row(1, 3, 8),
    (0,): _row(5, 6, 1),
    (1,): _row(2, 4, 6),
    (2,): _row(7, 1, 4),
    (0, 0): _row(3, 5, 4),
    (1, 1): _row(1, 10, 1),
    (2, 0): _row(4, 0, 8),
}
_CONTEXTS_Q = {
    (): _row(6, 4, 2),
    (0,): _row(2, 3, 7),
    (1,): _row(6, 1, 5),
    (2,): _row(1, 9, 2),
}

PATHS = (
    SINGLE_PATH,
    Instance(
        name="toy of two",
        target={(): _row(1, 2)},
        draft={(): _row(2, 1)},
        branching=(1, 1),
        expected_accepted={"token": Fraction(10, 9), "block": Fraction(11, 9)},
    ),
    Instance(
        name="contexts of three tokens",
        target=_CONTEXTS_P,
        draft=_CONTEXTS_Q,
        branching=(1, 1),
    ),
    Instance(name="kill row", target={(): _KILL_P}, draft={(): _KILL_Q}, branching=(1,)),
    Instance(
        name="target zeros",
        target={(): _row(0, 1, 3), (1,): _row(4, 0, 0), (2,): _row(1, 0, 1)},
        draft={(): _row(2, 1, 1)},
        branching=(1, 1),
    ),
)
"""Instances for rules on a single path."""

TREES = (
    Instance(
        name="kill row, two siblings",
        target={(): _KILL_P},
        draft={(): _KILL_Q},
        branching=(2,),
        expected_accepted={
            "with_replacement": Fraction(47, 80),
            "without_replacement": Fraction(107, 160),
        },
    ),
    Instance(
        name="contexts of three tokens, two levels",
        target=_CONTEXTS_P,
        draft=_CONTEXTS_Q,
        branching=(2, 1),
    ),
    Instance(
        name="draft support exhausted",
        target={(): _row(2, 8, 5, 5)},
        draft={(): _row(3, 1, 0, 0)},
        branching=(3,),
    ),
)
"""Instances for sampled siblings."""

POINT_MASS_TREES = (
    TWO_LEVEL_TREE,
    Instance(
        name="kill row, top two",
        target={(): _KILL_P},
        candidates={(): (3, 2)},
        expected_accepted={"point_mass": Fraction(4, 5)},
    ),
    Instance(
        name="contexts of three tokens, uneven tree",
        target=_CONTEXTS_P,
        candidates={(): (2, 0), (2,): (1, 0), (2, 0): (2,), (0,): (1,)},
    ),
    Instance(name="no candidates", target={(): _KILL_P}, candidates={}, bonus=False),
)
"""Instances for deterministic candidates."""


def instances_for(rule: Rule) -> tuple[Instance, ...]:
    """Return the instances a rule is proved in."""
    if rule.proposal is PointMass:
        return POINT_MASS_TREES
    return PATHS if rule.is_path else PATHS[1:3] + TREES
