"""The list of named faults: what published verifiers got wrong, each one line of a plain rule."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxspec.audit.reference import (
    PLAIN_RULES,
    Now,
    PlainRule,
    Row,
    from_q,
    not_drawn_yet,
    relu,
)
from jaxspec.audit.settings import RULES_OF_KIND, is_path, is_sampled
from jaxspec.audit.suspects import Suspect
from jaxspec.audit.wrong_lines import (
    EPSILONS,
    MASSES,
    POWERS,
    Change,
    above,
    after,
    at_depth,
    bonus_from_last_draft,
    chance,
    change_target,
    draft_of,
    floored,
    leaf_above,
    left,
    left_of_top,
    left_plus,
    lenient,
    raised,
    ratio,
    ratio_plus,
    replaced,
    stop_at_first_failure,
    strict,
    target_of,
    top,
    without_rare,
)

# --- the list


@functools.cache
def faults_of_kind(kind: str) -> tuple[Suspect, ...]:
    """List the faults that a verifier of a kind may have."""
    name, *others = RULES_OF_KIND[kind]
    base = PLAIN_RULES[name]
    found = [
        *_residuals(base, kind),
        *_noise(base, kind),
        *_tests(base, kind),
        *_wrong_rows(base, kind),
    ]
    if is_sampled(kind):
        found += [*_draft_tests(base), *_draft_laws(base, kind)]
    if is_sampled(kind) and not is_path(kind):
        found += _siblings(base, kind)
    for other in others:
        found += _deepest_first(PLAIN_RULES[other], kind, other)
    return tuple(found)


def _suspects(base: PlainRule, field: str, lines: Mapping[str, object]) -> list[Suspect]:
    """Put each line, by its words, in place of one of a rule's."""
    return [Suspect(words, replaced(base, **{field: line})) for words, line in lines.items()]


def _residuals(base: PlainRule, kind: str) -> list[Suspect]:
    lines: dict[str, Callable[[Now], Row]] = {
        "replacement drawn from p instead of the residual": lambda now: now.p,
        "replacement drawn from |p - q| instead of relu(p - q)": left(
            lambda now: np.abs(now.r - now.s)
        ),
        "replacement is the most likely token": lambda now: top(now.p),
        "replacement is the most likely token of the residual": lambda now: top(
            relu(now.r - now.s) if relu(now.r - now.s).sum() > 0 else now.r
        ),
    }
    if is_sampled(kind):
        lines |= {
            "replacement drawn from q": lambda now: now.q,
            "replacement drawn from p without the rejected token": left(
                lambda now: np.where(now.is_x, 0.0, now.p)
            ),
            "replacement drawn from relu(q - p)": left(lambda now: relu(now.s - now.r)),
        }
    if not is_path(kind):
        lines |= {
            "draft row subtracted from p, not from what is left": left(
                lambda now: relu(now.p - now.s)
            ),
            "not renormalised between siblings": lambda now: relu(now.r - now.s),
        }
    if is_sampled(kind) and not is_path(kind):
        lines["rejected token removed from what is left instead of subtracting the draft row"] = (
            left(lambda now: np.where(now.is_x, 0.0, now.r))
        )
    lines = {f"residual: {words}": line for words, line in lines.items()}
    for epsilon in EPSILONS:
        words = f"epsilon: {epsilon:g} added to the"
        lines[f"{words} residual"] = left_plus(epsilon, is_normalised=False)
        lines[f"{words} normalised residual"] = left_plus(epsilon, is_normalised=True)
    for mass in MASSES:
        words = f"transform order: top-p {mass:g} applied to the target in the residual only"
        lines[words] = left_of_top(mass)
    return _suspects(base, "left", lines)


def _noise(base: PlainRule, kind: str) -> list[Suspect]:
    def rejected(last: Now | None) -> str:
        return "final" if last is None else f"accept {last.child}"

    found = [
        Suspect(
            "reused noise: the uniform of the rejected candidate draws the replacement too",
            replaced(base, last_slot=rejected),
        ),
        Suspect(
            "reused noise: one uniform tests every candidate",
            replaced(base, slot=lambda now: "accept 1"),
        ),
        Suspect(
            "reused noise: one uniform tests every candidate and draws the last token",
            replaced(base, slot=lambda now: "accept 1", last_slot=lambda last: "accept 1"),
        ),
        Suspect(
            "reused noise: the last token is drawn with the first accept uniform",
            replaced(base, last_slot=lambda last: "accept 1"),
        ),
    ]
    if not is_path(kind):
        found.append(
            Suspect(
                "reused noise: siblings share one uniform",
                replaced(base, slot=lambda now: f"accept {now.depth + 1}"),
            )
        )
    return found


def _tests(base: PlainRule, kind: str) -> list[Suspect]:
    lines: dict[str, Callable[[Now], float]] = {
        "accept test: every candidate is accepted": lambda now: 1.0,
        "accept test: no candidate is accepted, yet the residual is drawn from": lambda now: 0.0,
        "accept test: accepted whenever p(x) > 0": lambda now: float(now.p[now.x] > 0),
        "greedy mixing: accepted only if it is the target's most likely token": lambda now: float(
            now.x == np.argmax(now.p)
        ),
        "greedy mixing: accepted for certain if it is the target's most likely token": lambda now: (
            1.0 if now.x == np.argmax(now.p) else min(1.0, ratio(now))
        ),
        "accept test: accepted if p(x) >= q(x), else rejected": lambda now: float(
            now.r[now.x] >= now.s[now.x]
        ),
        "typical acceptance: accepted if p(x) > min(0.09, 0.3 exp(-entropy))": lambda now: float(
            now.p[now.x]
            > min(0.09, 0.3 * np.exp(np.sum(now.p * np.log(np.where(now.p > 0, now.p, 1.0)))))
        ),
    }
    for factor in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
        lines[f"lenience: accepts with min(1, p / ({factor:g} q))"] = lenient(factor)
        lines[f"strictness: accepts with {factor:g} min(1, p / q)"] = strict(factor)
    for epsilon in EPSILONS:
        lines[f"epsilon: {epsilon:g} added to p in the accept test"] = ratio_plus(epsilon, 0.0)
    if not is_path(kind):
        lines["accept test: p before any rejection instead of what is left of it"] = chance(
            lambda now: float(now.p[now.x] / now.s[now.x]) if now.s[now.x] > 0 else 0.0
        )
    found = [Suspect(words, replaced(base, chance=line)) for words, line in lines.items()]
    found.append(
        Suspect(
            "greedy mixing: accepts the target's most likely token only, and replaces by it",
            replaced(
                base,
                chance=lambda now: float(now.x == np.argmax(now.p)),
                left=lambda now: top(now.p),
            ),
        )
    )
    return found


def _draft_tests(base: PlainRule) -> list[Suspect]:
    lines: dict[str, Callable[[Now], float]] = {
        "accept test: accepts with the probability p(x), and then subtracts q": lambda now: float(
            now.r[now.x]
        ),
        "accept test: the ratio is q / p": chance(
            lambda now: float(now.s[now.x] / now.r[now.x]) if now.r[now.x] > 0 else 1.0
        ),
    }
    for epsilon in EPSILONS:
        lines[f"epsilon: {epsilon:g} added to q in the accept test"] = ratio_plus(0.0, epsilon)
        lines[f"epsilon: q floored at {epsilon:g} in the accept test"] = floored(epsilon)
    found = [Suspect(words, replaced(base, chance=line)) for words, line in lines.items()]
    for floor in (0.05, 0.1, 0.2):
        words = f"pruning: candidates of q < {floor:g} are dropped after they were drawn"
        is_kept = functools.partial(lambda least, now: bool(now.q[now.x] >= least), floor)
        found.append(Suspect(words, replaced(base, is_tested=is_kept)))
    return found


def _wrong_rows(base: PlainRule, kind: str) -> list[Suspect]:
    nodes: dict[str, Callable[[int, Sequence[int]], int]] = {
        "bonus row: the row before the last candidate instead of after it": leaf_above,
        "bonus row: the root's row": lambda node, parents: node if node in parents else 0,
        "row: target row of the position before": above,
        "row: target row of the position before, but for the bonus": lambda node, parents: (
            above(node, parents) if node in parents else node
        ),
        "row: target row of the position after": after,
        "row: every position verified with the root's row": lambda node, parents: 0,
        "row: from the third token on the second's row": lambda node, parents: at_depth(
            node, parents, 1
        ),
    }
    if not is_path(kind):
        nodes["row: target row of the node before in the list instead of the parent's"] = (
            lambda node, parents: max(node - 1, 0)
        )
    bonus_rows: dict[str, Callable[[Row, Row], Row]] = {
        "bonus row: the most likely token": lambda p, q: top(p),
        "padding: counted as a candidate, token 0 follows every accepted path": lambda p, q: (
            np.where(np.arange(len(p)) == 0, 1.0, 0.0)
        ),
    }
    changes = {
        f"transform order: the target row is sharpened again, p ** {power:g}": raised(power)
        for power in POWERS
    }
    changes |= {
        f"transform order: top-p {mass:g} applied to the target row again": without_rare(mass)
        for mass in (0.99, *MASSES)
    }
    changes["greedy mixing: the target row is replaced by its most likely token"] = top
    rows = {words: target_of(node_of) for words, node_of in nodes.items()}
    rows |= {words: change_target(change) for words, change in changes.items()}
    if is_sampled(kind):
        bonus_rows["bonus row: drawn from q"] = lambda p, q: q
        rows |= {
            "bonus row: drawn from the last draft row": bonus_from_last_draft,
            "row: draft row of the position before": draft_of(above),
            "row: draft row of the position after": draft_of(after),
            "row: target and draft rows exchanged": lambda rows, parents: (
                lambda node: rows(node)[::-1]
            ),
        }
    return [
        *_suspects(base, "bonus_row", bonus_rows),
        *(Suspect(words, base.verify, rows=changed) for words, changed in rows.items()),
    ]


def _draft_laws(base: PlainRule, kind: str) -> list[Suspect]:
    def share(change: Change) -> Callable[[Now], Row]:
        return lambda now: base.share(dataclasses.replace(now, q=change(now.q)))

    changes: dict[str, Change] = {
        f"q at another temperature, q ** {power:g}": raised(power) for power in POWERS
    }
    changes |= {f"q cut to top-p {mass:g}": without_rare(mass) for mass in MASSES}
    changes["q taken as uniform"] = lambda q: np.full(len(q), 1 / len(q))
    if kind != "without_replacement":
        changes["q not normalised, half of it"] = lambda q: q / 2
    changes["q taken as its most likely token"] = top
    lines = {f"draft law mismatch: {words}": share(change) for words, change in changes.items()}
    return _suspects(base, "share", lines)


def _siblings(base: PlainRule, kind: str) -> list[Suspect]:
    def by(score: Callable[[int, Row, Row], float]) -> Callable[..., list[int]]:
        return lambda below, tokens, rows: sorted(
            below, key=lambda node: -score(tokens[node], *rows)
        )

    orders: dict[str, Callable[..., Sequence[int]]] = {
        "sorted by q": by(lambda x, p, q: q[x]),
        "sorted by p": by(lambda x, p, q: p[x]),
        "sorted by p / q": by(lambda x, p, q: p[x] / max(q[x], 1e-30)),
    }
    shares: dict[str, Callable[[Now], Row]] = {}
    tested: dict[str, Callable[[Now], bool]] = {}
    if kind == "without_replacement":
        orders["tested in the reverse order"] = lambda below, tokens, rows: below[::-1]
        shares = {
            "siblings: drawn without replacement, verified as if with it": from_q,
            "siblings: the draft row without earlier siblings is not renormalised": lambda now: (
                np.where(now.gone, 0.0, now.q)
            ),
        }
    if kind == "with_replacement":
        shares["siblings: drawn with replacement, verified as if without it"] = not_drawn_yet
        tested["siblings: duplicates are skipped"] = lambda now: not now.gone[now.x]
    return [
        *(
            Suspect(f"sibling order: {words}", base.verify, order=order)
            for words, order in orders.items()
        ),
        *_suspects(base, "share", shares),
        *_suspects(base, "is_tested", tested),
    ]


def _deepest_first(base: PlainRule, kind: str, name: str) -> list[Suspect]:
    found = [
        Suspect(
            f"{name} weights: a prefix is kept with its own weight instead of Z / D",
            replaced(base, kept=lambda now: now.a),
        ),
        Suspect(f"{name} weights: not capped at 1", replaced(base, chance=ratio)),
        Suspect(
            f"{name} residual: relu(p - q), without the weight of the prefix",
            replaced(base, left=left(lambda now: relu(now.r - now.s))),
        ),
        Suspect(f"{name} residual: drawn from p", replaced(base, left=lambda now: now.p)),
        Suspect(
            f"{name} weights: a prefix is kept with 1 - the weight",
            replaced(base, kept=lambda now: 1.0 - now.a),
        ),
        *(
            dataclasses.replace(each, words=f"{each.words} ({name})")
            for each in [
                *_noise(base, kind),
                *_wrong_rows(base, kind),
                *_draft_laws(base, kind),
                *(() if is_path(kind) else _siblings(base, kind)),
            ]
        ),
    ]
    if is_path(kind):
        found.append(Suspect(f"{name} order: stops at the first failure", stop_at_first_failure))
    return found
