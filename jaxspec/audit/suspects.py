"""A verifier written in plain float64, right or wrong, and its exact law in a setting."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

from jaxspec.audit.choices import exact_outcomes
from jaxspec.audit.reference import (
    PLAIN_RULES,
    Choices,
    Nodes,
    PlainOutcome,
    Row,
)
from jaxspec.audit.settings import RULES_OF_KIND, Setting, Text

Joint = dict[tuple[int, Text], float]
"""Mass of each (drawing of the candidates, emitted tokens)."""

Verify = Callable[[Nodes, Choices], PlainOutcome]
Rows = Callable[[int], tuple[Row, Row]]


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A way to verify, wrong or right.

    Attributes:
      words: what is wrong, "family: fault".
      verify: verifies one round.
      rows: changes which rows a node is given: (rows by node, parents) -> rows by node.
      order: changes the order of siblings: (children, token of each, rows by node) -> children.
    """

    words: str
    verify: Verify
    rows: Callable[[Rows, Sequence[int]], Rows] | None = None
    order: Callable[[Sequence[int], Sequence[int], tuple[Row, Row]], Sequence[int]] | None = None

    def law(self, setting: Setting) -> Joint:
        """Return the exact law of the emitted tokens in a setting, jointly with the candidates."""
        return _law(self, setting)

    def compute(self, setting: Setting) -> Joint:
        """Compute this law."""
        law: Joint = defaultdict(float)
        parents = setting.parents.tolist()
        for drawing, chance in enumerate(setting.chances.tolist()):
            tokens = setting.tokens[drawing].tolist()
            rows: Rows = setting.rows_of[drawing].__getitem__
            if self.rows is not None:
                rows = self.rows(rows, parents)
            children: Sequence[Sequence[int]] = setting.children
            if self.order is not None:
                children = [
                    self.order(below, tokens, rows(node)) for node, below in enumerate(children)
                ]
            nodes = Nodes(
                children=children,
                token=lambda now, choices, tokens=tokens: tokens[now.child],  # type: ignore[misc]
                rows=rows,
                bonus=setting.bonus,
            )
            found = exact_outcomes(lambda choices, nodes=nodes: self.verify(nodes, choices))  # type: ignore[misc]
            for outcome, mass in found.items():
                law[drawing, outcome.tokens] += chance * mass
        return dict(law)


@functools.lru_cache(maxsize=4096)
def _law(suspect: Suspect, setting: Setting) -> Joint:
    return suspect.compute(setting)


@functools.cache
def right_rules(kind: str) -> dict[str, Suspect]:
    """Return the lossless rules of a kind by name."""
    return {name: Suspect(name, PLAIN_RULES[name].verify) for name in RULES_OF_KIND[kind]}
