"""The rules written out in float64 over whole rows, for one round with finite rows.

It shares no code with the package: rows are really built, siblings' rows are really renormalised,
and the walk from the deepest candidate back is a recursion.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

import jaxspec as js
from helpers.random_rounds import Rounds

TILE = 512
DECISIVE = 1e-4


@dataclasses.dataclass
class PlainOutcome:
    """What a round must come to.

    Attributes:
      path: accepted nodes, from the root.
      tokens: what is emitted.
      status: of faulty candidates.
      margin: how near, relatively, a decision was to its edge; where it is not above `DECISIVE`,
        float32 may decide otherwise.
    """

    path: list[int]
    tokens: list[int]
    status: int
    margin: float


def softmax(logits: np.ndarray, temperature: float | np.ndarray) -> np.ndarray:
    scaled = logits / temperature
    weights = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def walk_plainly(
    rule: js.Rule, rounds: Rounds, index: int, *, logits: bool = False
) -> PlainOutcome:
    p, q = (table[index].astype(np.float64) for table in (rounds.target, rounds.draft))
    if logits:
        p = softmax(p, float(rounds.temperature[index]))
        q = softmax(q, float(rounds.draft_temperature[index]))
    walk = _Walk(rule.proposal, rounds.tokens[index], rounds.children[index], p, q)
    u = rounds.accept[index].astype(np.float64)
    path, row = walk.up(u, [0], 1.0) if rule.tests_deepest_first else walk.down(u)
    tokens = [int(rounds.tokens[index, node]) for node in path[1:]]
    is_leaf = rounds.children[index, path[-1], 0] < 0
    if rounds.bonus[index] or not is_leaf or path == [0]:
        tokens.append(walk.draw(rounds.final[index].astype(np.float64), row))
    return PlainOutcome(path=path, tokens=tokens, status=walk.status, margin=walk.margin)


class _Walk:
    def __init__(
        self,
        kind: type[js.Proposal],
        tokens: np.ndarray,
        children: np.ndarray,
        p: np.ndarray,
        q: np.ndarray,
    ) -> None:
        self.kind, self.tokens, self.children, self.p, self.q = kind, tokens, children, p, q
        self.status = 0
        self.margin = 1.0

    def below(self, left: float, right: float) -> bool:
        """Tell whether left < right, and remember how near they were."""
        if left != right:
            self.margin = min(self.margin, abs(left - right) / max(left, right))
        elif left > 0:
            self.margin = 0.0
        return bool(left < right)

    def candidates(self, node: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (child, token, the row it was drawn from), skipping what cannot have been drawn."""
        vocab = self.p.shape[1]
        is_left = np.ones(vocab, bool)
        for child in self.children[node][self.children[node] >= 0].tolist():
            token = int(self.tokens[child])
            if not 0 <= token < vocab:
                self.status |= js.Status.BAD_CANDIDATE
                continue
            row = self.q[node]
            if self.kind is js.PointMass:
                row = np.zeros(vocab)
                row[token] = 1
            elif self.kind is js.WithoutReplacement:
                row = row * is_left if (row * is_left).sum() > 0 else is_left.astype(np.float64)
                row = row / row.sum()
            if row[token] <= 0:
                self.status |= js.Status.OUTSIDE_SUPPORT
                continue
            yield child, token, row
            is_left[token] = False

    def down(self, u: np.ndarray) -> tuple[list[int], np.ndarray]:
        path = [0]
        while True:
            row = self.p[path[-1]]
            for child, token, drawn_from in self.candidates(path[-1]):
                if self.below(u[child] * drawn_from[token], row[token]):
                    path.append(child)
                    break
                rest = np.maximum(row - drawn_from, 0)
                self.margin = min(self.margin, float(rest.sum()))
                row = rest / rest.sum() if rest.sum() > 0 else self.p[path[-1]]
            else:
                return path, row

    def up(
        self, u: np.ndarray, path: list[int], weight: float
    ) -> tuple[list[int], np.ndarray] | None:
        row = self.p[path[-1]]
        for child, token, drawn_from in self.candidates(path[-1]):
            entered = min(1.0, weight * row[token] / drawn_from[token])
            found = self.up(u, [*path, child], entered)
            if found:
                return found
            over = np.maximum(weight * row - drawn_from, 0)
            under = np.maximum(drawn_from - weight * row, 0)
            if over.sum() == 0 and under.sum() == 0:
                # Only by rounding is a candidate rejected where nothing can be.
                weight, self.margin = 1.0, 0.0
            elif over.sum() == 0:
                weight = 0.0
            else:
                self.margin = min(self.margin, float(over.sum()))
                row, weight = over / over.sum(), min(1.0, over.sum() / max(under.sum(), 1e-300))
        is_kept = len(path) == 1 or self.below(u[path[-1]], weight)
        return (path, row) if is_kept else None

    def draw(self, pair: np.ndarray, row: np.ndarray) -> int:
        """Draw by inverse CDF: a block with the first number, a token inside it with the second."""
        block = 0
        if len(row) > TILE:
            block = self.invert(pair[0], np.add.reduceat(row, np.arange(0, len(row), TILE)))
        return block * TILE + self.invert(pair[1], row[block * TILE : (block + 1) * TILE])

    def invert(self, u: float, weights: np.ndarray) -> int:
        running = np.cumsum(weights) / weights.sum()
        self.margin = min(self.margin, 10 * float(np.abs(running[:-1] - u).min(initial=1.0)))
        return int(np.argmax(running > u))
