"""What a foreign verifier emits in a setting: its exact law by search, or counts of a sample."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxspec.audit.boxes import UNITS, cut
from jaxspec.audit.foreign import Emissions, Foreign, emissions_of, text_of
from jaxspec.audit.settings import Setting, Text
from jaxspec.audit.suspects import Joint
from jaxspec.trees import NONE

_REPLAYS = 8
_SPLITS = 4


@dataclasses.dataclass
class Observed:
    """What was emitted in one setting.

    Attributes:
      setting: the setting.
      is_exact: whether `joint` has exact masses instead of counts.
      joint: mass or count of each (drawing of the candidates, emitted tokens).
      problems: the first emission of each kind that no verifier may emit, in words, by kind.
      halves: for samples, counts of the first and the second half of the calls, as `joint`.
      calls: of the verifier.
      points: uniform draws among them at which the outcome was that of the exact law.
      boxes: for an exact law, the (low, high) corners of its boxes in units, drawing first.
    """

    setting: Setting
    is_exact: bool = False
    joint: Joint = dataclasses.field(default_factory=dict)
    problems: dict[str, str] = dataclasses.field(default_factory=dict)
    halves: tuple[Joint, Joint] = dataclasses.field(default_factory=lambda: ({}, {}))
    calls: int = 0
    points: int = 0
    boxes: tuple[np.ndarray, np.ndarray] | None = dataclasses.field(default=None, repr=False)

    def add(self, drawings: np.ndarray, emissions: Emissions, masses: np.ndarray | None) -> None:
        """Add emissions, with masses or each counted once; the empty ones are not kept."""
        columns = [drawings[:, None], emissions.tokens]
        width = 1 + emissions.tokens.shape[1]
        if emissions.slots is not None:
            columns.append(emissions.slots)
        if masses is None:
            halves = np.arange(len(drawings)) % 2
            columns = [halves[:, None], *columns]
        else:
            columns = [np.zeros((len(drawings), 1), np.int64), *columns]
        rows, inverse = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
        weights = np.bincount(inverse.reshape(-1), masses, len(rows))
        for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
            half, drawing, *tokens = row[: 1 + width]
            slots = None if emissions.slots is None else row[1 + width :]
            for kind, words in problems_of(self.setting, drawing, tokens, slots):
                self.problems.setdefault(kind, words)
            key = drawing, tuple(text_of(tokens))
            self.joint[key] = self.joint.get(key, 0) + weight
            if masses is None:
                self.halves[half][key] = self.halves[half].get(key, 0) + weight

    @property
    def impossible(self) -> float:
        """Mass or count of emissions that have target probability 0."""
        chance_of = self.setting.chance_of
        return sum(mass for (_, text), mass in self.joint.items() if chance_of(text) == 0)

    @property
    def size(self) -> float:
        """Number of calls, or the mass 1."""
        return sum(self.joint.values())


def search(
    foreign: Foreign, setting: Setting, most: int, points: int = 0, known: Observed | None = None
) -> Observed | None:
    """Find the exact law of a verifier of explicit uniforms, None if it is not found.

    The boxes of a law that is `known` are not searched again, but replayed.

    That is if it takes more than `most` calls, or replays go on to disagree with the boxes that they
    are in: both corners, random points inside, and `points` uniform ones. The axes are cut in their
    order: accept draws from the root on, then the final draw. If replays disagree, since a draw
    matters only once a later one is known, all axes are cut again; if that changes nothing, the boxes
    are split where replays disagree.
    """
    axes = foreign.num_axes(setting)
    drawings = np.arange(len(setting.tokens))
    low = np.zeros((len(drawings), 1 + axes), np.int64)
    high = np.full_like(low, UNITS)
    low[:, 0], high[:, 0] = drawings, drawings + 1
    if known is not None and known.boxes is not None:
        low, high = known.boxes
    evaluate = _Evaluator(foreign, setting)
    evaluate.calls = known.calls if known else 0
    generator = np.random.default_rng(foreign.seed)
    for attempt in range(axes + 1 + _SPLITS):
        before = len(low)
        for axis in range(1, 1 + axes) if attempt or known is None else ():
            low, high = cut(evaluate, low, high, axis)
            if evaluate.calls > most:
                return None
        middle = evaluate((low + high) // 2)
        volumes = np.prod((high - low)[:, 1:] / UNITS, axis=1)
        every = np.arange(len(low))
        drawn = generator.choice(every, points, p=volumes / volumes.sum())
        boxes = np.concatenate([every, every, np.tile(every, _REPLAYS), drawn])
        inside = boxes[2 * len(low) :]
        replays = np.concatenate([low, high - 1, generator.integers(low[inside], high[inside])])
        is_missed = evaluate(replays) != middle[boxes]
        if not is_missed.any():
            break
        if len(low) == before:
            missed, first = np.unique(boxes[is_missed], return_index=True)
            low, high = _split(evaluate, low, high, missed, replays[is_missed][first])
    else:
        return None
    observed = Observed(
        setting, is_exact=True, calls=evaluate.calls, points=points, boxes=(low, high)
    )
    observed.add(low[:, 0], evaluate.unpack(middle), volumes * setting.chances[low[:, 0]])
    return observed


def _split(
    evaluate: "_Evaluator", low: np.ndarray, high: np.ndarray, boxes: np.ndarray, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Split boxes at points whose outcome is not that of their middle, along the axis that matters."""
    way = (low[boxes] + high[boxes]) // 2
    middle, axes = evaluate(way), np.zeros(len(boxes), np.int64)
    for axis in range(1, low.shape[1]):
        way[:, axis] = points[:, axis]
        axes = np.where((axes == 0) & (evaluate(way) != middle), axis, axes)
    rows = np.arange(len(boxes))
    at = points[rows, axes]
    edges = [low[boxes, axes], at, at + 1, high[boxes, axes]]
    pieces = []
    for start, end in itertools.pairwise(edges):
        corners = low[boxes].copy(), high[boxes].copy()
        corners[0][rows, axes], corners[1][rows, axes] = start, end
        pieces.append([corner[start < end] for corner in corners])
    lows, highs = zip(*pieces, strict=True)
    others = np.delete(np.arange(len(low)), boxes)
    return np.concatenate([low[others], *lows]), np.concatenate([high[others], *highs])


class _Evaluator:
    """Calls a verifier at points (drawing, uniforms in units); equal emissions have equal codes."""

    def __init__(self, foreign: Foreign, setting: Setting) -> None:
        self._foreign, self._setting = foreign, setting
        self._codes: dict[bytes, int] = {}
        self._rows: list[tuple[list[int], list[int] | None]] = []
        self.calls = 0

    def __call__(self, points: np.ndarray) -> np.ndarray:
        self.calls += len(points)
        uniforms = (points[:, 1:] / UNITS).astype(np.float32)
        found = self._foreign.emit(self._setting, points[:, 0], uniforms)
        width = found.tokens.shape[1]
        slots = [] if found.slots is None else [found.slots]
        both = np.concatenate([found.tokens, *slots], axis=1)
        rows, inverse = np.unique(both, axis=0, return_inverse=True)
        codes = []
        for row in rows.tolist():
            tokens = row[:width]
            while len(tokens) > 1 and tokens[-2:] == [NONE, NONE]:
                tokens = tokens[:-1]
            path = None if found.slots is None else [n for n in row[width:] if n != NONE]
            key = repr((tokens, path)).encode()
            if key not in self._codes:
                self._codes[key] = len(self._rows)
                self._rows.append((tokens, path))
            codes.append(self._codes[key])
        return np.array(codes, np.int64)[inverse.reshape(-1)]

    def unpack(self, codes: np.ndarray) -> Emissions:
        return emissions_of([self._rows[code] for code in codes.tolist()])


def sample(
    foreign: Foreign, observed: Observed, calls: int, generator: np.random.Generator
) -> None:
    """Add a sample to what was observed; the candidates of each call are drawn as their kind says."""
    chances = observed.setting.chances
    drawings = generator.choice(len(chances), calls, p=chances / chances.sum())
    observed.add(drawings, foreign.sample(observed.setting, drawings), None)
    observed.calls += calls


# --- what a single emission must be


def walk(setting: Setting, drawing: int, tokens: Sequence[int]) -> list[int]:
    """Follow tokens from the root as far as the tree goes, of twins along the one drawn first."""
    tree = setting.tokens[drawing]
    path = [0]
    for token in tokens:
        below = [child for child in setting.children[path[-1]] if tree[child] == token]
        if not below:
            break
        path.append(below[0])
    return path[1:]


def _reach(setting: Setting, drawing: int, tokens: Sequence[int], node: int = 0) -> int:
    """Return how many tokens can be followed from a node along any twins."""
    tree = setting.tokens[drawing]
    below = [child for child in setting.children[node] if tokens and tree[child] == tokens[0]]
    return max((1 + _reach(setting, drawing, tokens[1:], child) for child in below), default=0)


def _has_twins(setting: Setting, drawing: int) -> bool:
    tree = setting.tokens[drawing]
    return any(len(set(tree[list(below)])) < len(below) for below in setting.children if below)


def num_accepted(setting: Setting, drawing: int, text: Text) -> int:
    """Return how many of the emitted tokens were candidates: all but the replacement or bonus."""
    path = walk(setting, drawing, text)
    is_whole = len(path) == len(text) > 0 and not setting.children[path[-1]]
    return len(text) if is_whole else max(len(text) - 1, 0)


INVALID = ("range", "impossible")
"""Kinds of problems that make a verifier lossy whatever the law; the others break its contract."""


def problems_of(
    setting: Setting, drawing: int, row: Sequence[int], slots: Sequence[int] | None
) -> Iterator[tuple[str, str]]:
    """Yield (kind, words) of what no right verifier emits."""
    text = tuple(text_of(row))
    tree = setting.tokens[drawing].tolist()
    where = f"in instance {setting.name!r} with candidates {tree[1:]} it emits {list(text)}"
    if any(token != NONE for token in row[len(text) :]):
        yield "padding", f"tokens after the first -1: {where}, of {list(row)}"
    if not text:
        yield "empty", f"no token is emitted: {where}"
        return
    bad = [token for token in text if not 0 <= token < setting.vocab]
    if bad:
        yield (
            "range",
            f"token {bad[0]} is outside the vocabulary 0..{setting.vocab - 1}: {where}",
        )
        return
    if len(text) > setting.depth + 1:
        yield (
            "too long",
            f"more than {setting.depth + 1} tokens: a second bonus, or padding or another sequence's "
            f"tokens counted as candidates: {where}",
        )
        return
    place = _reach(setting, drawing, text)
    if place < len(text) - 1:
        yield (
            "prefix",
            f"token {text[place]} at position {place} is no candidate there, and yet more tokens "
            f"follow: {where}",
        )
    path = walk(setting, drawing, text)
    is_leaf = bool(path) and not setting.children[path[-1]]
    is_clear = not _has_twins(setting, drawing)
    if setting.bonus and is_leaf and is_clear and len(path) == len(text):
        yield (
            "bonus missing",
            "nothing follows the last candidate: the bonus is missing, or the replacement is the "
            f"rejected candidate: {where}",
        )
    if not setting.bonus and is_leaf and len(path) < len(text):
        yield "bonus", f"a bonus token is emitted although bonus=False: {where}"
    for place in range(len(text)):
        if setting.chance_of(text[: place + 1]) == 0:
            yield (
                "impossible",
                f"token {text[place]} at position {place} has target probability 0: {where}",
            )
            break
    if slots is not None:
        yield from _slot_problems(setting, drawing, text, text_of(slots), where)


def _slot_problems(
    setting: Setting, drawing: int, text: Text, slots: list[int], where: str
) -> Iterator[tuple[str, str]]:
    accepted = text[:-1] if setting.bonus else text[: num_accepted(setting, drawing, text)]
    tree, node = setting.tokens[drawing].tolist(), 0
    said = f"{where} and slots {slots}"
    if len(slots) != len(accepted):
        yield "slots", f"{len(slots)} slots for {len(accepted)} accepted tokens: {said}"
        return
    for token, slot in zip(accepted, slots, strict=True):
        below = setting.children[node]
        if slot not in below or tree[slot] != token:
            yield "slots", f"slot {slot} is not the node of token {token} below node {node}: {said}"
            return
        first = next(child for child in below if tree[child] == token)
        if slot != first:
            yield (
                "twin",
                f"slot {slot} is the twin of node {first}, which was drawn first and is the accepted "
                f"one: {said}",
            )
            return
        node = slot


# --- what several calls must be


def repeat(foreign: Foreign, setting: Setting) -> dict[str, str]:
    """Check that a verifier depends on its arguments alone, and not on the rest of a batch."""
    seeds = np.arange(12)
    drawings = seeds * 5 % len(setting.tokens)

    def texts(order: np.ndarray, size: int | None = None) -> list[list[int]]:
        sources = foreign.sources(setting, seeds[order])
        found = (
            foreign.emit(setting, drawings[order], sources)
            if size is None
            else foreign.emit_batches(setting, drawings[order], sources, size)
        )
        rows = {int(n): text_of(row) for n, row in zip(order, found.tokens.tolist(), strict=True)}
        return [rows[n] for n in sorted(rows)]

    def first_difference(ours: list[list[int]], theirs: list[list[int]]) -> str:
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                where = f"in instance {setting.name!r}, candidates "
                return f"{a} and {b}, {where}{setting.tokens[drawings[place]][1:].tolist()}"
        return ""

    problems = {}
    texts(seeds)  # modified arguments are seen here, and copied from then on
    first = texts(seeds)
    if difference := first_difference(first, texts(seeds)):
        problems["seed"] = f"the same randomness gives different tokens: {difference}"
    elif foreign.batched:
        for what, order, size in (
            ("in another order", seeds[::-1], 12),
            ("in a batch of three", seeds, 3),
            ("in a batch of one", seeds, 1),
        ):
            if difference := first_difference(first, texts(order, size)):
                problems["batch"] = (
                    f"a sequence's tokens depend on its batch: {what} it gives {difference}"
                )
                break
    return problems


# --- laws of the text


def complete(observed: Observed) -> dict[Text, float]:
    """Return the exact law of the text: emitted tokens, completed by the target to D + 1."""
    setting = observed.setting
    law: dict[Text, float] = defaultdict(float)
    for (_, text), mass in observed.joint.items():
        for rest, chance in setting.follow(text, max(setting.depth + 1 - len(text), 0)).items():
            law[text + rest] += mass * chance
    return law


def complete_counts(
    setting: Setting, joint: Mapping[tuple[int, Text], float], generator: np.random.Generator
) -> dict[Text, int]:
    """Complete every emission of a sample to D + 1 tokens with tokens drawn from the target."""
    counts: dict[Text, int] = defaultdict(int)
    for (_, text), count in joint.items():
        law = setting.follow(text, max(setting.depth + 1 - len(text), 0))
        chances = np.array(list(law.values()))
        drawn = generator.multinomial(int(count), chances / chances.sum())
        for rest, number in zip(law, drawn.tolist(), strict=True):
            if number:
                counts[text + rest] += number
    return counts


def marginal(law: Mapping[Text, float], length: int) -> dict[Text, float]:
    """Return the law of the first tokens of a text."""
    found: dict[Text, float] = defaultdict(float)
    for text, mass in law.items():
        found[text[:length]] += mass
    return found
