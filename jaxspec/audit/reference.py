"""The rules in plain float64 over whole rows, as programs that ask for each of their choices.

They share no code with the verifiers: rows are built in full, the rows of siblings are renormalised,
and the walk from the deepest candidate back is a recursion. Asked for all their choices in turn they
give the exact law of a round; given uniforms they replay it. The lines that are most often written
wrong are fields of `PlainRule`, so that a faulty variant is a rule with one line replaced.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxspec.proposals import PointMass, Proposal, WithoutReplacement
from jaxspec.trees import Tree

Row = np.ndarray
"""Probabilities, float64 [V]."""


class Choices(Protocol):
    """What decides a program's choices. A slot is the name of one draw; asked twice it is the same."""

    def flip(self, slot: str, chance: float) -> bool:
        """Return whether the draw of a slot is below `chance`."""

    def pick(self, slot: str, row: Row) -> int:
        """Return the token that the draw of a slot picks from a row, which need not sum to 1."""


@dataclasses.dataclass(frozen=True)
class PlainOutcome:
    """What a round comes to.

    Attributes:
      path: accepted nodes, from the root (0).
      tokens: what is emitted.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """How many of the tokens were drafted."""
        return len(self.path) - 1


@dataclasses.dataclass(frozen=True)
class Now:
    """What can be seen while one candidate is tested.

    Attributes:
      node: its parent.
      child: its own node.
      rank: its place among its siblings.
      depth: of the parent; 0 for the root.
      x: its token.
      p: the target row of its parent.
      q: the draft row of its parent; for point masses the target row.
      r: what is left of p after earlier siblings.
      a: the weight of the parent's prefix; 1 in top-down rules.
      gone: bool [V], tokens of earlier siblings.
      s: the row that the candidate was drawn from.
    """

    node: int
    child: int
    rank: int
    depth: int
    x: int
    p: Row
    q: Row
    r: Row
    a: float
    gone: np.ndarray
    s: Row = dataclasses.field(default_factory=lambda: np.zeros(0))

    @property
    def is_x(self) -> np.ndarray:
        """Bool [V], which token is the candidate's."""
        return np.arange(len(self.p)) == self.x


@dataclasses.dataclass(frozen=True)
class Nodes:
    """A tree to be verified.

    Attributes:
      children: child nodes of each node, in the order in which they are tested.
      token: gives the token of a candidate that is read, whose own token is not known yet (x = -1):
        it may be drawn by the same choices.
      rows: gives (target row, draft row) of a node whose token is known.
      bonus: whether an accepted leaf is followed by one more token.
    """

    children: Sequence[Sequence[int]]
    token: Callable[[Now, Choices], int]
    rows: Callable[[int], tuple[Row, Row]]
    bonus: bool


def normalise(row: Row) -> Row:
    """Divide by the sum; a row without mass stays as it is."""
    total = row.sum()
    return row / total if total > 0 else row


def relu(row: Row) -> Row:
    """Return what is above 0."""
    return np.maximum(row, 0.0)


def from_q(now: Now) -> Row:
    """With replacement: every candidate is drawn from the draft row."""
    return now.q


def certain(now: Now) -> Row:
    """Point masses: the candidate was not drawn at all."""
    return np.where(now.is_x, 1.0, 0.0)


def not_drawn_yet(now: Now) -> Row:
    """Without replacement: the draft row without earlier siblings, uniform once it is exhausted."""
    rest = np.where(now.gone, 0.0, now.q)
    return normalise(rest if rest.sum() > 0 else np.where(now.gone, 0.0, 1.0))


def _chance(now: Now) -> float:
    """The probability that a candidate is accepted, or entered with."""
    s, r = now.s[now.x], now.a * now.r[now.x]
    return min(1.0, float(r / s)) if s > 0 else 0.0


def _left(now: Now) -> Row:
    """What a rejection leaves of a row; if rounding leaves nothing, the row."""
    left = relu(now.a * now.r - now.s)
    return normalise(left) if left.sum() > 0 else now.r


def _kept(now: Now) -> float:
    """The weight of a prefix after one of the candidates below it is rejected: Z / D, 0 / 0 is 1."""
    above, below = relu(now.a * now.r - now.s).sum(), relu(now.s - now.a * now.r).sum()
    return float(above / below) if below > 0 else 1.0


def _slot(now: Now) -> str:
    return f"accept {now.child}"


@dataclasses.dataclass(frozen=True)
class PlainRule:
    """A rule, its lines as fields; the defaults are those of every lossless rule here.

    Attributes:
      share: the row that a candidate was drawn from, as the verifier believes.
      deepest_first: whether the deepest candidates are tested first and weights are carried down.
      is_tested: whether a candidate is tested at all.
      chance: the probability that a candidate is accepted; deepest first, its weight on entry.
      left: the row after a rejection.
      kept: the weight of a prefix after a rejection below it, if the deepest are tested first.
      bonus_row: the row of the token after an accepted leaf, of its rows p and q.
      slot: the draw that a candidate is tested with.
      last_slot: the draw of the last token, of the last rejected candidate, None if there is none.
    """

    share: Callable[[Now], Row]
    deepest_first: bool = False
    is_tested: Callable[[Now], bool] = lambda now: True
    chance: Callable[[Now], float] = _chance
    left: Callable[[Now], Row] = _left
    kept: Callable[[Now], float] = _kept
    bonus_row: Callable[[Row, Row], Row] = lambda p, q: p
    slot: Callable[[Now], str] = _slot
    last_slot: Callable[[Now | None], str] = lambda now: "final"

    def verify(self, nodes: Nodes, choices: Choices) -> PlainOutcome:
        """Verify one round."""
        walk = _Walk(self, nodes, choices)
        found = walk.up((0,), (), 1.0) if self.deepest_first else walk.down()
        assert found is not None  # the root is always kept
        path, row, tokens, last = found
        is_leaf = len(path) > 1 and not nodes.children[path[-1]]
        if not is_leaf:
            tokens = (*tokens, choices.pick(self.last_slot(last), row))
        elif nodes.bonus:
            bonus_row = self.bonus_row(*nodes.rows(path[-1]))
            tokens = (*tokens, choices.pick(self.last_slot(last), bonus_row))
        return PlainOutcome(path=path, tokens=tokens)


_Found = tuple[tuple[int, ...], Row, tuple[int, ...], Now | None]


@dataclasses.dataclass
class _Walk:
    rule: PlainRule
    nodes: Nodes
    choices: Choices

    def see(self, node: int, rank: int, depth: int, r: Row, a: float, gone: np.ndarray) -> Now:
        """Read a candidate: its token, and the row it was drawn from."""
        child = self.nodes.children[node][rank]
        p, q = self.nodes.rows(node)
        now = Now(
            node=node, child=child, rank=rank, depth=depth, x=-1, p=p, q=q, r=r, a=a, gone=gone
        )
        # `Now` is made here alone, and seen by nobody before it is whole.
        object.__setattr__(now, "x", self.nodes.token(now, self.choices))
        object.__setattr__(now, "s", self.rule.share(now))
        return now

    def down(self) -> _Found:
        path: tuple[int, ...] = (0,)
        tokens: tuple[int, ...] = ()
        last = None
        while True:
            node = path[-1]
            r = self.nodes.rows(node)[0]
            gone = np.zeros(len(r), bool)
            for rank in range(len(self.nodes.children[node])):
                now = self.see(node, rank, len(path) - 1, r, 1.0, gone)
                gone = gone | now.is_x
                if not self.rule.is_tested(now):
                    continue
                if self.choices.flip(self.rule.slot(now), self.rule.chance(now)):
                    path, tokens = (*path, now.child), (*tokens, now.x)
                    break
                r, last = self.rule.left(now), now
            else:
                return path, r, tokens, last

    def up(
        self, path: tuple[int, ...], tokens: tuple[int, ...], a: float, slot: str = ""
    ) -> _Found | None:
        node, last = path[-1], None
        r = self.nodes.rows(node)[0]
        gone = np.zeros(len(r), bool)
        for rank in range(len(self.nodes.children[node])):
            now = self.see(node, rank, len(path) - 1, r, a, gone)
            gone = gone | now.is_x
            if not self.rule.is_tested(now):
                continue
            entered = self.rule.chance(now)
            below = (*path, now.child), (*tokens, now.x)
            if found := self.up(*below, entered, self.rule.slot(now)):
                return found
            r, a, last = self.rule.left(now), self.rule.kept(now), now
        is_kept = len(path) == 1 or self.choices.flip(slot, a)
        return (path, r, tokens, last) if is_kept else None


PLAIN_RULES: Mapping[str, PlainRule] = {
    "token": PlainRule(share=from_q),
    "block": PlainRule(share=from_q, deepest_first=True),
    "point_mass": PlainRule(share=certain),
    "with_replacement": PlainRule(share=from_q),
    "without_replacement": PlainRule(share=not_drawn_yet),
    "traversal": PlainRule(share=not_drawn_yet, deepest_first=True),
}
"""The rules of `jaxspec.RULES`, by name."""


def plain_program(
    rule: PlainRule,
    kind: type[Proposal],
    tree: Tree,
    target: np.ndarray,
    draft: np.ndarray,
    *,
    bonus: bool,
) -> Callable[[Choices], PlainOutcome]:
    """Return a round whose candidates are drawn as their kind says, as a program.

    The slots are "draft n", "accept n" and "final", n being the node's number.

    Args:
      rule: how it is verified.
      kind: how candidates are drawn; point masses are those of the tree.
      tree: topology.
      target: float64 [contexts, V], rows by context: the child of context i by token x is i V + x + 1.
      draft: float64 [contexts, V], as `target`.
      bonus: whether an accepted leaf is followed by one more token.
    """
    children = [row[row >= 0].tolist() for row in np.asarray(tree.children)]
    parents, given = np.asarray(tree.parents).tolist(), np.asarray(tree.tokens).tolist()
    drawn_from = not_drawn_yet if kind is WithoutReplacement else from_q
    vocab = target.shape[1]

    def play(choices: Choices) -> PlainOutcome:
        places = {0: 0}

        def token(now: Now, choices: Choices) -> int:
            if kind is PointMass:
                token = given[now.child]
            else:
                token = choices.pick(f"draft {now.child}", drawn_from(now))
            places[now.child] = places[parents[now.child]] * vocab + token + 1
            return token

        def rows(node: int) -> tuple[Row, Row]:
            return target[places[node]], draft[places[node]]

        return rule.verify(Nodes(children, token, rows, bonus), choices)

    return play
