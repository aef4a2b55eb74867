"""Lines of a rule as they are written wrong: of its rows, tests, residuals, and order."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.audit.reference import (
    Choices,
    Nodes,
    Now,
    PlainOutcome,
    PlainRule,
    Row,
    normalise,
    relu,
)
from jaxspec.audit.suspects import Rows, Verify

Change = Callable[[Row], Row]

# The sizes that named faults come in.
EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4)
MASSES = (0.95, 0.9, 0.8)
POWERS = (0.5, 1 / 0.7, 2.0)


def ratio(now: Now) -> float:
    """Return a r(x) / s(x), which may exceed 1."""
    return float(now.a * now.r[now.x] / now.s[now.x]) if now.s[now.x] > 0 else 0.0


def raised(exponent: float) -> Change:
    """Raise a row to a power, as another temperature does."""
    return lambda row: normalise(np.where(row > 0, row, 0.0) ** exponent)


def top(row: Row) -> Row:
    """Return the one-hot row of the most likely token."""
    return np.where(np.arange(len(row)) == np.argmax(row), 1.0, 0.0)


def without_rare(mass: float) -> Change:
    """Keep the most likely tokens until their mass is reached (top-p)."""

    def change(row: Row) -> Row:
        order = np.argsort(-row, kind="stable")
        before = np.cumsum(row[order]) - row[order]
        kept = np.zeros_like(row)
        kept[order[before < mass]] = row[order[before < mass]]
        return normalise(kept)

    return change


def left(row: Callable[[Now], Row]) -> Callable[[Now], Row]:
    """Make the row after a rejection, as it was if nothing is left."""

    def left(now: Now) -> Row:
        found = row(now)
        return normalise(found) if found.sum() > 0 else now.r

    return left


def chance(ratio: Callable[[Now], float]) -> Callable[[Now], float]:
    """Cap a ratio at 1."""
    return lambda now: min(1.0, ratio(now))


def left_plus(epsilon: float, *, is_normalised: bool) -> Callable[[Now], Row]:
    """Add an epsilon to the residual, before or after it is normalised."""

    def left(now: Now) -> Row:
        row = relu(now.r - now.s)
        row = (row / row.sum() if is_normalised and row.sum() > 0 else row) + epsilon
        return row / row.sum()

    return left


def left_of_top(mass: float) -> Callable[[Now], Row]:
    """Cut the target row to top-p in the residual only."""
    cut = without_rare(mass)
    return left(lambda now: relu(cut(now.r) - now.s))


def lenient(factor: float) -> Callable[[Now], float]:
    """Divide the ratio by a factor below 1."""
    return chance(lambda now: ratio(now) / factor)


def strict(factor: float) -> Callable[[Now], float]:
    """Multiply the probability by a factor below 1."""
    return lambda now: factor * min(1.0, ratio(now))


def ratio_plus(above: float, below: float) -> Callable[[Now], float]:
    """Add epsilons to p and q."""
    return chance(lambda now: float((now.r[now.x] + above) / max(now.s[now.x] + below, 1e-30)))


def floored(least: float) -> Callable[[Now], float]:
    """Do not let q fall below a value."""
    return chance(lambda now: float(now.r[now.x] / max(now.s[now.x], least)))


def change_target(change: Change) -> Callable[[Rows, Sequence[int]], Rows]:
    """Change the target row of every node."""

    def changed(rows: Rows, parents: Sequence[int]) -> Rows:
        return lambda node: (change(rows(node)[0]), rows(node)[1])

    return changed


def target_of(node_of: Callable[[int, Sequence[int]], int]) -> Callable[..., Rows]:
    """Give every node the target row of another one."""
    return lambda rows, parents: lambda node: (rows(node_of(node, parents))[0], rows(node)[1])


def draft_of(node_of: Callable[[int, Sequence[int]], int]) -> Callable[..., Rows]:
    """Give every node the draft row of another one."""
    return lambda rows, parents: lambda node: (rows(node)[0], rows(node_of(node, parents))[1])


def above(node: int, parents: Sequence[int]) -> int:
    """Return the parent, of the root itself."""
    return max(parents[node], 0)


def after(node: int, parents: Sequence[int]) -> int:
    """Return the node after in the list."""
    return min(node + 1, len(parents) - 1)


def leaf_above(node: int, parents: Sequence[int]) -> int:
    """Return the parent of a leaf, and any other node itself."""
    return node if node in parents else max(parents[node], 0)


def bonus_from_last_draft(rows: Rows, parents: Sequence[int]) -> Rows:
    """Give a leaf the draft row that its own token was drawn from."""

    def changed(node: int) -> tuple[Row, Row]:
        p, q = rows(node)
        return (p if node in parents else rows(above(node, parents))[1], q)

    return changed


def at_depth(node: int, parents: Sequence[int], depth: int) -> int:
    """Return the ancestor at a depth, or the node itself if it is not deeper."""
    path = [node]
    while path[0] > 0:
        path.insert(0, parents[path[0]])
    return path[min(depth, len(path) - 1)]


def stop_at_first_failure(nodes: Nodes, choices: Choices) -> PlainOutcome:
    """Verify a path by the block rule from the root on, up to the first failure."""
    path, a = [0], 1.0
    tokens: list[int] = []
    while below := nodes.children[path[-1]]:
        p, q = nodes.rows(path[-1])
        now = Now(
            node=path[-1], child=below[0], rank=0, depth=len(tokens), x=-1, p=p, q=q, r=p, a=a,
            gone=np.zeros(len(p), bool), s=q,
        )  # fmt: skip
        x = nodes.token(now, choices)
        after = min(1.0, a * p[x] / q[x]) if q[x] > 0 else 0.0
        kept = after
        if nodes.children[below[0]]:
            next_p, next_q = nodes.rows(below[0])
            above, under = relu(after * next_p - next_q).sum(), relu(next_q - after * next_p).sum()
            kept = above / under if under > 0 else 1.0
        if not choices.flip(f"accept {below[0]}", kept):
            left = relu(a * p - q)
            return PlainOutcome(
                tuple(path), (*tokens, choices.pick("final", left if left.sum() > 0 else p))
            )
        path, tokens, a = [*path, below[0]], [*tokens, x], after
    last = (choices.pick("final", nodes.rows(path[-1])[0]),) if nodes.bonus else ()
    return PlainOutcome(tuple(path), (*tokens, *last))


def replaced(base: PlainRule, **lines: object) -> Verify:
    """Return how a rule with other lines verifies."""
    return dataclasses.replace(base, **lines).verify  # type: ignore[arg-type]
