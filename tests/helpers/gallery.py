"""Faulty verifiers of every kind as foreign functions: today's known ones, holes, published ones.

Most are a plain rule with lines replaced, drawing by name from a generator or from uniforms; some are
changes of what a right one emits. `RIGHT` has the lossless rules in the same form.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from helpers import engines, foreign
from jaxspec.audit import from_flat, from_linked_list, from_transformers
from jaxspec.audit.choices import Uniforms
from jaxspec.audit.reference import PLAIN_RULES, Nodes, Now, normalise, relu
from jaxspec.audit.settings import RULES_OF_KIND, is_path
from jaxspec.audit.suspects import Suspect
from jaxspec.audit.wrong_lines import chance, change_target, floored, left, left_of_top, replaced


@dataclasses.dataclass(frozen=True)
class Entry:
    """A verifier and how it is checked.

    Attributes:
      verify: the foreign function.
      kind: of `check_lossless`.
      how: other arguments of `check_lossless`.
      randomness: "numpy", or "uniforms" for a fault that only an exact law shows.
    """

    verify: Callable[..., Any]
    kind: str
    how: dict[str, Any] = dataclasses.field(default_factory=dict)
    randomness: str = "numpy"


def play(suspect: Suspect, kind: str, bonus: bool = True) -> Callable[..., Any]:
    """Return a plain rule as a foreign function: of a path the tokens, of a tree also the slots."""

    def verify(*arguments: Any) -> Any:
        *before, draft, target, source = arguments
        tokens = [-1, *before[0].tolist()] if is_path(kind) else before[0].tolist()
        parents = list(range(-1, len(tokens) - 1)) if is_path(kind) else before[1].tolist()
        drawn: dict[str, float] = {}

        def draw(slot: str) -> float:
            if slot not in drawn:
                place = int(slot.split()[1]) - 1 if slot.startswith("accept") else -1
                is_given = isinstance(source, np.ndarray)
                drawn[slot] = float(source[place]) if is_given else source.random()
            return 0.0 if slot.endswith("tile") and isinstance(source, np.ndarray) else drawn[slot]

        def rows(node: int) -> tuple[np.ndarray, np.ndarray]:
            p = normalise(np.asarray(target[node], np.float64))
            is_drafted = draft is not None and node < len(draft)
            return p, normalise(np.asarray(draft[node], np.float64)) if is_drafted else p

        changed = suspect.rows(rows, parents) if suspect.rows else rows
        children: list[Any] = [
            [n for n in range(len(tokens)) if parents[n] == node] for node in range(len(tokens))
        ]
        if suspect.order:
            children = [suspect.order(below, tokens, rows(n)) for n, below in enumerate(children)]
        nodes = Nodes(children, lambda now, choices: tokens[now.child], changed, bonus)
        outcome = suspect.verify(nodes, Uniforms(draw))
        emitted = list(outcome.tokens)
        return emitted if is_path(kind) else (emitted, list(outcome.path[1:]))

    return verify


def one_line(name: str, rows: Any = None, order: Any = None, **lines: Any) -> Suspect:
    """Return a registered rule with lines replaced."""
    return Suspect(name, replaced(PLAIN_RULES[name], **lines), rows, order)


RIGHT = {
    name: Entry(play(one_line(name), kind), kind, {"rule": name})
    for kind in ("path", "point_mass", "with_replacement", "without_replacement")
    for name in RULES_OF_KIND[kind]
} | {
    "point mass path": Entry(play(one_line("point_mass"), "point_mass_path"), "point_mass_path"),
}


# --- lines of rules


def _only(condition: Callable[[Now], bool], wrong: Any, name: str, line: str) -> dict[str, Any]:
    """Take a wrong line where a condition holds, else the rule's."""
    right = getattr(PLAIN_RULES[name], line)
    return {line: lambda now: wrong(now) if condition(now) else right(now)}


def _uncapped_below(now: Now) -> float:
    return float(now.a * now.r[now.x] / now.s[now.x])


def _thresholds(accept_all: float, accept_one: float) -> dict[str, Any]:
    """Accept by one coin against thresholds below 1, as sglang's target-only sampling can."""

    def accepted(now: Now) -> float:
        below = now.p[now.gone].sum()
        if now.p[now.x] >= accept_one:
            return 1.0
        return float(min(1.0, (below + now.p[now.x]) / accept_all))

    return {"chance": accepted, "slot": lambda now: f"accept {now.depth + 1}"}


def _forgets(now: Now) -> np.ndarray:
    """Put a rejected point mass back, if it is the third."""
    without = left(lambda each: relu(each.r - each.s))
    return now.r if now.rank == 2 else without(now)


def _unscaled_second(now: Now) -> np.ndarray:
    right = left(lambda each: relu(each.r - each.s))
    return relu(now.r - now.s) if now.rank == 1 else right(now)


def _first_tile(row: np.ndarray) -> np.ndarray:
    return normalise(np.where(np.arange(len(row)) < 512, row, 0.0))


_LINES: dict[str, tuple[str, Suspect]] = {
    # holes that an audit of shallow instances does not see
    "block weight not capped from depth 3": (
        "path",
        one_line("block", **_only(lambda n: n.depth >= 2, _uncapped_below, "block", "chance")),
    ),
    "block accepts by the token's ratio p / q": (
        "path",
        one_line("block", chance=lambda n: min(1.0, float(n.r[n.x] / n.s[n.x]))),
    ),
    "residual not renormalised after the second of three siblings": (
        "with_replacement",
        one_line("with_replacement", left=_unscaled_second),
    ),
    "third point mass put back": ("point_mass", one_line("point_mass", left=_forgets)),
    "only the first tile of 512 tokens is drawn from": (
        "path",
        one_line("token", left=left(lambda n: _first_tile(relu(n.r - n.s)))),
    ),
    "bonus from the first tile": (
        "path",
        one_line("token", bonus_row=lambda p, q: _first_tile(p)),
    ),
    # published faults
    "u divided by q + 1e-2": (
        "path",
        one_line("token", chance=chance(lambda n: float(n.r[n.x] / (n.s[n.x] + 1e-2)))),
    ),
    "lenience 1/2": (
        "path",
        one_line("token", chance=chance(lambda n: float(n.r[n.x] / n.s[n.x] * 2))),
    ),
    "lenience with a residual relu(p - l q)": (
        "path",
        one_line(
            "token",
            chance=chance(lambda n: float(n.r[n.x] / n.s[n.x] / 0.7)),
            left=left(lambda n: relu(n.r - 0.7 * n.s)),
        ),
    ),
    "drafted token of low q dropped after a look": (
        "path",
        one_line("token", is_tested=lambda n: bool(n.q[n.x] > 0.1)),
    ),
    "sibling of low q dropped after a look": (
        "without_replacement",
        one_line("without_replacement", is_tested=lambda n: bool(n.q[n.x] > 0.18)),
    ),
    "thresholds of 0.9 for all candidates": (
        "point_mass",
        one_line("point_mass", **_thresholds(0.9, 2.0)),
    ),
    "threshold of 0.25 for one candidate": (
        "point_mass",
        one_line("point_mass", **_thresholds(1.0, 0.25)),
    ),
    "rows in float8: kept to 3 bits": (
        "path",
        one_line("token", rows=change_target(lambda p: normalise(np.ldexp(
            np.round(np.ldexp(np.frexp(p)[0], 3)), np.frexp(p)[1] - 3
        )))),
    ),
    "temperature 0.9 on the target": (
        "path",
        one_line("token", rows=change_target(lambda p: normalise(p ** (1 / 0.9)))),
    ),
    "traversal tests each candidate by its own ratio": (
        "without_replacement",
        one_line("traversal", chance=lambda n: min(1.0, float(n.r[n.x] / max(n.s[n.x], 1e-30)))),
    ),
    "traversal forgets the weight after a rejection": (
        "without_replacement",
        one_line("traversal", kept=lambda n: 1.0),
    ),
}  # fmt: skip

_EXACT: dict[str, tuple[str, Suspect]] = {
    f"q floored at {least:g}": ("path", one_line("token", chance=floored(least)))
    for least in (1e-2, 1e-3, 1e-4)
} | {
    "top-p 0.95 on the target in the residual only": (
        "path",
        one_line("token", left=left_of_top(0.95)),
    ),
    "1e-3 added to q": (
        "path",
        one_line("token", chance=chance(lambda n: float(n.r[n.x] / (n.s[n.x] + 1e-3)))),
    ),
}
"""Faults too small for samples."""


# --- changes of what a right verifier takes and emits


def emission(change: Callable[..., list[int]]) -> Callable[..., Any]:
    """Change the tokens that token verification emits."""
    return lambda tokens, q, p, source: change(foreign.token(tokens, q, p, source), tokens.tolist())


def slots(change: Callable[[list[int]], list[int]], how: str = "without") -> Callable[..., Any]:
    """Change the slots that a tree's verifier returns."""

    def verify(*arguments: Any) -> Any:
        emitted, found = foreign.tree(*arguments, how=how)
        return emitted, change(found)

    return verify


def other_twin(tokens: Any, parents: Any, q: Any, p: Any, source: Any) -> Any:
    """Return the slot of the last sibling with the accepted token."""
    emitted, found = foreign.tree(tokens, parents, q, p, source, how="with")
    twins = [n for n in range(len(tokens)) if parents[n] == 0 and tokens[n] == emitted[0]]
    return emitted, [twins[-1]] if len(found) == 1 else found


def island(width: float) -> Callable[..., Any]:
    """Accept every first candidate whose draw lies in an interval."""

    def verify(tokens: Any, q: Any, p: Any, u: Any) -> list[int]:
        is_inside = 0.611 < u[0] < 0.611 + width
        return foreign.token(tokens, q, p, np.append(0 if is_inside else u[0], u[1:]))

    return verify


def mixed(share: float) -> Callable[..., Any]:
    """Accept everything in a share of the calls."""

    def verify(tokens: Any, q: Any, p: Any, source: np.random.Generator) -> list[int]:
        fault = "always" if source.random() < share else ""
        return foreign.token(tokens, q, p, source, fault=fault)

    return verify


def one_sample_per_leaf(
    tokens: Any, parents: Any, q: Any, p: Any, source: np.random.Generator
) -> list[int]:
    """Sample the target along every path by itself, and keep the longest match."""
    best: list[int] = []
    for leaf in [n for n in range(len(tokens)) if n not in parents]:
        path = [leaf]
        while path[0] > 0:
            path.insert(0, int(parents[path[0]]))
        emitted = []
        for node, child in zip(path, [*path[1:], None], strict=True):
            emitted.append(foreign.pick(source.random(), p[node]))
            if child is None or emitted[-1] != tokens[child]:
                break
        best = max(best, emitted, key=len)
    return best


_hidden = np.random.default_rng(0)

_OUTPUT = {
    "no bonus": Entry(functools.partial(foreign.token, fault="no bonus"), "path"),
    "bonus although False": Entry(foreign.token, "path", {"bonus": False}),
    "two bonus tokens": Entry(functools.partial(foreign.token, fault="extra bonus"), "path"),
    "arguments changed in place": Entry(functools.partial(foreign.token, fault="in place"), "path"),
    "rejected drafts left after the end": Entry(
        emission(lambda emitted, drafted: [*emitted, -1, *drafted[len(emitted) - 1 :]]), "path"
    ),
    "rejected token emitted again": Entry(
        emission(lambda emitted, drafted: [*emitted[:-1], *drafted[len(emitted) - 1 :][:1]]), "path"
    ),
    "nothing emitted after a rejection": Entry(
        emission(lambda emitted, drafted: emitted[: len(emitted) - (len(emitted) <= len(drafted))]),
        "path",
    ),
    "token outside the vocabulary": Entry(
        emission(lambda emitted, drafted: [*emitted[:-1], 99_999]), "path"
    ),
    "token never drafted before the replacement": Entry(
        emission(lambda emitted, drafted: [(drafted[0] + 1) % 2, *emitted[1:]]), "path"
    ),
    "slots all -1": Entry(slots(lambda found: [-1] * len(found)), "without_replacement"),
    "slots 0 .. n": Entry(slots(lambda found: list(range(len(found)))), "without_replacement"),
    "slots 1 .. n": Entry(slots(lambda found: [*range(1, len(found) + 1)], "point"), "point_mass"),
    "last slot missing": Entry(slots(lambda found: found[:-1]), "without_replacement"),
    "slot of the other twin": Entry(other_twin, "with_replacement"),
    "draws from elsewhere": Entry(
        lambda tokens, q, p, source: foreign.token(tokens, q, p, _hidden), "path"
    ),
    "token rule in place of block": Entry(foreign.token, "path", {"rule": "block"}),
    "tree rule in place of traversal": Entry(
        functools.partial(foreign.tree, how="without"), "without_replacement", {"rule": "traversal"}
    ),
    "certain candidates in place of sampled ones": Entry(
        functools.partial(foreign.token, fault="certain"), "path", {"rule": "token"}
    ),
    "one draw shared by a batch": Entry(
        lambda tokens, q, p, sources: [
            foreign.token(*each, sources[0]) for each in zip(tokens, q, p, strict=True)
        ],
        "path",
        {"batched": True},
        "uniforms",
    ),
    "one sample of the target per leaf": Entry(one_sample_per_leaf, "point_mass"),
    "everything accepted in 1 % of the calls": Entry(mixed(0.01), "path"),
    "<= instead of <": Entry(functools.partial(foreign.token, fault="<="), "path", {}, "uniforms"),
    "island of width 1e-3": Entry(island(1e-3), "path", {}, "uniforms"),
    "island of width 1e-4": Entry(island(1e-4), "path", {"budget": 3_000_000}, "uniforms"),
}

_FUNCTIONS = {
    "token": (foreign.token, "path", (
        "residual p", "residual p without x", "residual |p - q|", "residual argmax",
        "residual epsilon", "row before", "row after", "third by second", "hotter q",
        "target cut again", "lenience", "floor", "always", "never", "greedy", "one coin", "reused",
        "bonus q", "bonus row before",
    )),
    "block": (foreign.block, "path", ("uncapped", "own weight", "first failure", "token residual")),
    "point mass": (foreign.point_mass, "point_mass_path", ("kept",)),
    "tree of points": (
        functools.partial(foreign.tree, how="point"), "point_mass", ("kept", "unnormalised")
    ),
    "tree with": (
        functools.partial(foreign.tree, how="with"), "with_replacement",
        ("sorted", "skip duplicates", "zeroed", "unnormalised"),
    ),
    "tree without": (
        functools.partial(foreign.tree, how="without"), "without_replacement",
        ("sorted", "reversed", "with", "zeroed", "q unnormalised"),
    ),
}  # fmt: skip

_ENGINES = {
    f"flat sampler: {fault}": Entry(from_flat(engines.flat_sampler(fault)), "path")
    for fault in ("bonus", "bonus of another", "cu_num", "padding")
} | {
    "assisted sampler: prompt": Entry(
        from_transformers(engines.assisted_sampler("prompt")), "path", {}, "uniforms"
    ),
    **{
        f"linked sampler: {fault}": Entry(
            from_linked_list(engines.linked_sampler(fault)), "point_mass"
        )
        for fault in ("coin", "final", "index")
    },
}

FAULTS: dict[str, Entry] = {
    **{
        f"{name}: {fault}": Entry(functools.partial(function, fault=fault), kind)
        for name, (function, kind, names) in _FUNCTIONS.items()
        for fault in names
    },
    **{name: Entry(play(line, kind), kind) for name, (kind, line) in _LINES.items()},
    **{
        name: Entry(play(line, kind), kind, {}, "uniforms") for name, (kind, line) in _EXACT.items()
    },
    **_OUTPUT,
    **_ENGINES,
}
