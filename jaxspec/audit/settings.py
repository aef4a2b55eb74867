"""Where a foreign verifier is called: small instances, their candidates enumerated with their chances.

Rows depend on the context. Rare target tokens are likely in the draft (p = 0.02 where q = 0.9) and the
reverse, so that a verifier that is wrong in one call of a hundred is seen within some 20,000 calls;
there are zeros in both rows, equal rows, one-hot rows, and a vocabulary above one tile. Rows of two or
three tokens are filled up to four with zeros, so that few shapes have to be compiled.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxspec.audit.instances import Context, Instance, RowsByContext, floats
from jaxspec.audit.reference import Row, normalise
from jaxspec.audit.rounds import layout

KINDS = ("path", "point_mass_path", "point_mass", "with_replacement", "without_replacement")
"""What a foreign verifier takes: a path, or a tree, and how its candidates were chosen."""

RULES_OF_KIND = {
    "path": ("token", "block"),
    "point_mass_path": ("point_mass",),
    "point_mass": ("point_mass",),
    "with_replacement": ("with_replacement",),
    "without_replacement": ("without_replacement", "traversal"),
}
"""The rules of `jaxspec.RULES` that verify candidates of a kind."""

Text = tuple[int, ...]


def is_path(kind: str) -> bool:
    """Whether a verifier of this kind takes a path instead of a tree."""
    return kind.endswith("path")


def is_sampled(kind: str) -> bool:
    """Whether candidates of this kind are drawn from draft rows."""
    return not kind.startswith("point_mass")


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """An instance with every way in which its candidates can be drawn; M of them.

    Attributes:
      name: of the instance.
      kind: one of `KINDS`.
      bonus: whether an accepted leaf is followed by one more token.
      parents: int32 [N], of each node; -1 for the root.
      children: child nodes of each node, in the order in which they were drawn.
      tokens: int32 [M, N], -1 for the root.
      chances: float64 [M], of each drawing.
      target: float32 [M, N, V], the target row after each node.
      draft: float32 [M, N, V], the draft rows; None for point masses.
      rows: the target rows by context.
    """

    name: str
    kind: str
    bonus: bool
    parents: np.ndarray
    children: tuple[tuple[int, ...], ...]
    tokens: np.ndarray
    chances: np.ndarray
    target: np.ndarray = dataclasses.field(repr=False)
    draft: np.ndarray | None = dataclasses.field(repr=False)
    rows: RowsByContext = dataclasses.field(repr=False)

    @property
    def vocab(self) -> int:
        """V."""
        return self.target.shape[2]

    @functools.cached_property
    def depth(self) -> int:
        """D, candidates on the longest path."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return max(depths)

    def row(self, context: Context) -> Row:
        """Return the target row after a context, as `as_row` does."""
        known = context if context in self.rows else ()
        if known not in self._rows:
            self._rows[known] = as_row(self.rows[known])
        return self._rows[known]

    def follow(self, context: Context, length: int) -> dict[Text, float]:
        """Return the law of the `length` tokens that the target continues a context with."""
        if length == 0:
            return {(): 1.0}
        if (context, length) not in self._known:
            row = self.row(context)
            self._known[context, length] = {
                (token, *rest): float(row[token]) * mass
                for token in np.flatnonzero(row).tolist()
                for rest, mass in self.follow((*context, token), length - 1).items()
            }
        return self._known[context, length]

    @functools.cached_property
    def rows_of(self) -> list[list[tuple[Row, Row]]]:
        """(target row, draft row) of every node of every drawing; for point masses twice p."""

        def normalised(rows: np.ndarray) -> list[list[Row]]:
            return [[normalise(row.astype(np.float64)) for row in line] for line in rows]

        target = normalised(self.target)
        draft = target if self.draft is None else normalised(self.draft)
        return [list(zip(*pair, strict=True)) for pair in zip(target, draft, strict=True)]

    @functools.cached_property
    def _rows(self) -> dict[Context, Row]:
        return {}

    @functools.cached_property
    def _known(self) -> dict[tuple[Context, int], dict[Text, float]]:
        return {}

    @functools.cached_property
    def text(self) -> dict[Text, float]:
        """The target's law of D + 1 tokens."""
        return self.follow((), self.depth + 1)

    def chance_of(self, text: Text) -> float:
        """Return the probability that the target's text begins with these tokens, or D + 1 of them."""
        chance = 1.0
        for place, token in enumerate(text[: self.depth + 1]):
            row = self.row(text[:place])
            chance *= float(row[token]) if 0 <= token < self.vocab else 0.0
        return chance


@functools.lru_cache(maxsize=4096)
def _as_row(row: tuple[float, ...]) -> Row:
    return normalise(np.asarray(row, np.float32).astype(np.float64))


def as_row(row: Sequence[object]) -> Row:
    """Return a row as the verifier is given it, in float32, normalised in float64."""
    return _as_row(tuple(floats(row)))  # type: ignore[arg-type]


def make_setting(instance: Instance, kind: str, bonus: bool) -> Setting:
    """Enumerate the candidates of an instance; those of a `point_mass` one are given.

    Raises:
      ValueError: the instance has no draft rows, no candidates, or is not a path, where the kind needs
        it.
    """
    where = f"instance {instance.name!r}"
    if is_sampled(kind) and (instance.draft is None or not instance.branching):
        raise ValueError(f"{where} has no draft rows or no branching: kind {kind!r} needs both")
    if not is_sampled(kind) and instance.candidates is None:
        raise ValueError(f"{where} has no candidates: kind {kind!r} needs them")
    tree = layout(instance)
    parents, given = np.asarray(tree.parents), np.asarray(tree.tokens)
    if is_path(kind) and (parents != np.arange(len(parents)) - 1).any():
        raise ValueError(f"{where} is a tree: kind {kind!r} needs one candidate at each depth")
    draft = instance.draft or instance.target

    def context(tokens: Sequence[int], node: int) -> Context:
        found: Context = ()
        while node > 0:
            found, node = (tokens[node], *found), int(parents[node])
        return found

    drawings: list[tuple[list[int], float]] = [([-1], 1.0)]
    for node in range(1, len(parents)):
        drawings = [
            ([*tokens, token], mass * chance)
            for tokens, mass in drawings
            for token, chance in _draws(
                kind, draft, context(tokens, parents[node]), tokens, parents, int(given[node])
            )
        ]
    contexts = [[context(tokens, n) for n in range(len(parents))] for tokens, _ in drawings]

    def table(rows: RowsByContext) -> np.ndarray:
        found = {each: floats(rows.get(each, rows[()])) for each in set(itertools.chain(*contexts))}
        return np.array([[found[each] for each in line] for line in contexts], np.float32)

    return Setting(
        name=instance.name,
        kind=kind,
        bonus=bonus,
        parents=parents.astype(np.int32),
        children=tuple(tuple(np.flatnonzero(parents == n).tolist()) for n in range(len(parents))),
        tokens=np.array([tokens for tokens, _ in drawings], np.int32),
        chances=np.array([mass for _, mass in drawings]),
        target=table(instance.target),
        draft=table(draft) if is_sampled(kind) else None,
        rows=instance.target,
    )


def _draws(
    kind: str,
    draft: RowsByContext,
    context: Context,
    tokens: Sequence[int],
    parents: np.ndarray,
    given: int,
) -> Iterator[tuple[int, float]]:
    """List the tokens that the next node can have, with their chances."""
    if not is_sampled(kind):
        yield given, 1.0
        return
    row = as_row(draft.get(context, draft[()]))
    if kind == "without_replacement":
        parent = parents[len(tokens)]
        row = row.copy()
        row[[token for n, token in enumerate(tokens) if n and parents[n] == parent]] = 0.0
        row = normalise(row)
    for token in np.flatnonzero(row).tolist():
        yield token, float(row[token])


# --- instances


def _rows(seed: int, vocab: int, depth: int, **special: Sequence[float]) -> RowsByContext:
    """Return rows of small fractions, one for each context; those named by their tokens are given."""
    generator = np.random.default_rng(seed)
    rows: dict[Context, Sequence[float]] = {}
    for length in range(depth + 1):
        for context in itertools.product(range(vocab), repeat=length):
            weights = generator.integers(1, 13, vocab)
            rows[context] = (weights / weights.sum()).tolist()
    for name, row in special.items():
        rows[tuple(int(digit) for digit in name[1:])] = row
    return rows


def _same(*row: float) -> RowsByContext:
    """Return one row for all contexts."""
    return {(): row}


def _sparse(vocab: int, **weights: float) -> list[float]:
    row = [0.0] * vocab
    for name, weight in weights.items():
        row[int(name[1:])] = weight
    return row


_RARE_P = _rows(1, 4, 2, _=(0.02, 0.08, 0.3, 0.6), _0=(0.9, 0.04, 0.04, 0.02))
_RARE_Q = _rows(2, 4, 2, _=(0.9, 0.04, 0.03, 0.03), _0=(0.02, 0.04, 0.04, 0.9))
_ZEROS_P = _rows(
    3, 4, 2, _=(0, 0.3, 0.5, 0.2), _1=(0, 0, 1, 0), _2=(0.5, 0, 0, 0.5), _3=(0.1, 0.2, 0.3, 0.4)
)
_ZEROS_Q = _rows(
    4,
    4,
    2,
    _=(0.3, 0.2, 0, 0.5),
    _1=(0.1, 0.4, 0.2, 0.3),
    _2=(0, 0.5, 0.2, 0.3),
    _3=(0.1, 0.2, 0.3, 0.4),
)
_EQUAL_P = _rows(
    5,
    3,
    2,
    _=(0.5, 0.3, 0.2),
    **{
        f"_{a}{b}": (0.02, 0.08, 0.9)[a:] + (0.02, 0.08, 0.9)[:a]
        for a in range(3)
        for b in range(3)
    },
)
_EQUAL_Q = _rows(
    5,
    3,
    2,
    _=(0.5, 0.3, 0.2),
    **{
        f"_{a}{b}": (0.9, 0.08, 0.02)[a:] + (0.9, 0.08, 0.02)[:a]
        for a in range(3)
        for b in range(3)
    },
)
_DEEP_P, _DEEP_Q = _rows(6, 3, 3), _rows(7, 3, 3)
_KILL_P, _KILL_Q = _same(0.05, 0.15, 0.35, 0.45), _same(0.6, 0.15, 0.2, 0.05)
_TINY_P, _TINY_Q = _same(2e-5, 0.005, 0.395, 0.59998), _same(5e-5, 0.008, 0.49195, 0.5)
_TOY_P, _TOY_Q = _same(1 / 3, 2 / 3), _same(2 / 3, 1 / 3)
_DENSE_P, _DENSE_Q = _rows(119, 4, 2), _rows(219, 4, 2)
_TILES_P: RowsByContext = {
    (): _sparse(600, _3=0.1, _255=0.2, _511=0.3, _512=0.1, _599=0.3),
    (599,): _sparse(600, _0=0.1, _520=0.6, _598=0.3),
}
_TILES_Q: RowsByContext = {
    (): _sparse(600, _3=0.5, _512=0.3, _599=0.2),
    (599,): _sparse(600, _0=0.7, _598=0.3),
}

_LEAST_VOCAB = 4


def _filled(instance: Instance) -> Instance:
    """Append tokens of probability 0 to small rows."""

    def filled(rows: RowsByContext | None) -> RowsByContext | None:
        return rows and {
            each: [*row, *[0.0] * (_LEAST_VOCAB - len(row))] for each, row in rows.items()
        }

    target = filled(instance.target) or {}
    return dataclasses.replace(instance, target=target, draft=filled(instance.draft))


_PATHS = (
    Instance("a path of one", _KILL_P, _KILL_Q, branching=(1,)),
    Instance("tiny probabilities", _TINY_P, _TINY_Q, branching=(1,)),
    Instance("four tokens of two", _TOY_P, _TOY_Q, branching=(1, 1, 1, 1)),
    Instance("rare target, likely draft", _RARE_P, _RARE_Q, branching=(1, 1)),
    Instance("zeros and one-hot rows", _ZEROS_P, _ZEROS_Q, branching=(1, 1)),
    Instance("equal rows, rare bonus", _EQUAL_P, _EQUAL_Q, branching=(1, 1)),
    Instance("a path of two", _DENSE_P, _DENSE_Q, branching=(1, 1)),
    Instance("a path of three", _DEEP_P, _DEEP_Q, branching=(1, 1, 1)),
    Instance("600 tokens", _TILES_P, _TILES_Q, branching=(1, 1)),
)

_WIDE_P, _WIDE_Q = _same(0.02, 0.04, 0.2, 0.74), _same(0.5, 0.09, 0.05, 0.36)

_TREES = (
    Instance("two siblings", _KILL_P, _KILL_Q, branching=(2,)),
    Instance("two siblings, tiny probabilities", _TINY_P, _TINY_Q, branching=(2,)),
    Instance("three siblings, likely where rare", _WIDE_P, _WIDE_Q, branching=(3,)),
    Instance("one candidate, then two", _EQUAL_P, _EQUAL_Q, branching=(1, 2)),
    Instance("zeros and one-hot rows", _ZEROS_P, _ZEROS_Q, branching=(2,)),
    Instance("one candidate of four, then two", _DENSE_P, _DENSE_Q, branching=(1, 2)),
    Instance("two siblings, two levels", _DEEP_P, _DEEP_Q, branching=(2, 1)),
    Instance("600 tokens, two siblings", _TILES_P, _TILES_Q, branching=(2,)),
)


def _with_top_candidates(instance: Instance) -> Instance:
    """Take the most likely tokens of each draft row as given candidates."""
    draft = instance.draft or {}
    contexts: dict[Context, tuple[int, ...]] = {(): ()}
    for place, width in enumerate(instance.branching):
        for context in [each for each in contexts if len(each) == place]:
            row = np.array(floats(draft.get(context, draft[()])))
            contexts[context] = tuple(np.argsort(-row, kind="stable")[:width].tolist())
            contexts |= {(*context, token): () for token in contexts[context]}
    given = {context: tokens for context, tokens in contexts.items() if tokens}
    return dataclasses.replace(instance, draft=None, branching=(), candidates=given)


def instances_of_kind(kind: str) -> tuple[Instance, ...]:
    """Return the instances that a foreign verifier of a kind is called in, smallest first."""
    found = tuple(map(_filled, _PATHS if is_path(kind) else _TREES))
    return found if is_sampled(kind) else tuple(map(_with_top_candidates, found))


@functools.cache
def settings_of_kind(kind: str, bonus: bool) -> tuple[Setting, ...]:
    """Return the settings of these instances."""
    return tuple(make_setting(each, kind, bonus) for each in instances_of_kind(kind))
