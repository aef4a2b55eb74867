"""The list of named faults: what published verifiers got wrong, each one line of a plain rule."""

import dataclasses
import functools
from collections.abc import Callable

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
    before,
    bonus_from_last_draft,
    chance,
    change_target,
    draft_of,
    exchanged,
    floored,
    is_likely,
    leaf_above,
    left,
    left_of_top,
    left_plus,
    lenient,
    raised,
    ratio,
    ratio_plus,
    replaced,
    root,
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
    found = [
        Suspect(f"residual: {words}", replaced(base, left=line)) for words, line in lines.items()
    ]
    for epsilon in EPSILONS:
        plain, normal = (
            left_plus(epsilon, is_normalised=False),
            left_plus(epsilon, is_normalised=True),
        )
        words = f"epsilon: {epsilon:g} added to the"
        found.append(Suspect(f"{words} residual", replaced(base, left=plain)))
        found.append(Suspect(f"{words} normalised residual", replaced(base, left=normal)))
    for mass in MASSES:
        words = f"transform order: top-p {mass:g} applied to the target in the residual only"
        found.append(Suspect(words, replaced(base, left=left_of_top(mass))))
    return found


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
        found.append(Suspect(words, replaced(base, is_tested=is_likely(floor))))
    return found


def _wrong_rows(base: PlainRule, kind: str) -> list[Suspect]:
    verify = base.verify
    found = [
        Suspect(
            "bonus row: the row before the last candidate instead of after it",
            verify,
            rows=target_of(leaf_above),
        ),
        Suspect(
            "bonus row: the most likely token",
            replaced(base, bonus_row=lambda p, q: top(p)),
        ),
        Suspect(
            "padding: counted as a candidate, token 0 follows every accepted path",
            replaced(base, bonus_row=lambda p, q: np.where(np.arange(len(p)) == 0, 1.0, 0.0)),
        ),
        Suspect(
            "bonus row: the root's row",
            verify,
            rows=target_of(lambda node, parents: node if node in parents else 0),
        ),
        Suspect("row: target row of the position before", verify, rows=target_of(above)),
        Suspect(
            "row: target row of the position before, but for the bonus",
            verify,
            rows=target_of(lambda node, parents: above(node, parents) if node in parents else node),
        ),
        Suspect("row: target row of the position after", verify, rows=target_of(after)),
        Suspect("row: every position verified with the root's row", verify, rows=target_of(root)),
        Suspect(
            "row: from the third token on the second's row",
            verify,
            rows=target_of(lambda node, parents: at_depth(node, parents, 1)),
        ),
        *(
            Suspect(
                f"transform order: the target row is sharpened again, p ** {power:g}",
                verify,
                rows=change_target(raised(power)),
            )
            for power in POWERS
        ),
        *(
            Suspect(
                f"transform order: top-p {mass:g} applied to the target row again",
                verify,
                rows=change_target(without_rare(mass)),
            )
            for mass in (0.99, *MASSES)
        ),
        Suspect(
            "greedy mixing: the target row is replaced by its most likely token",
            verify,
            rows=change_target(top),
        ),
    ]
    if not is_path(kind):
        found.append(
            Suspect(
                "row: target row of the node before in the list instead of the parent's",
                verify,
                rows=target_of(before),
            )
        )
    if is_sampled(kind):
        found += [
            Suspect("bonus row: drawn from q", replaced(base, bonus_row=lambda p, q: q)),
            Suspect("bonus row: drawn from the last draft row", verify, rows=bonus_from_last_draft),
            Suspect("row: draft row of the position before", verify, rows=draft_of(above)),
            Suspect("row: draft row of the position after", verify, rows=draft_of(after)),
            Suspect(
                "row: target and draft rows exchanged",
                verify,
                rows=exchanged,
            ),
        ]
    return found


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
    found = [
        Suspect(f"draft law mismatch: {words}", replaced(base, share=share(change)))
        for words, change in changes.items()
    ]
    found.append(
        Suspect(
            "draft law mismatch: q taken as its most likely token",
            replaced(base, share=share(top)),
        )
    )
    return found


def _siblings(base: PlainRule, kind: str) -> list[Suspect]:
    def by(score: Callable[[int, Row, Row], float]) -> Callable[..., list[int]]:
        return lambda below, tokens, rows: sorted(
            below, key=lambda node: -score(tokens[node], *rows)
        )

    verify = base.verify
    found = [
        Suspect("sibling order: sorted by q", verify, order=by(lambda x, p, q: q[x])),
        Suspect("sibling order: sorted by p", verify, order=by(lambda x, p, q: p[x])),
        Suspect(
            "sibling order: sorted by p / q",
            verify,
            order=by(lambda x, p, q: p[x] / max(q[x], 1e-30)),
        ),
    ]
    if kind == "without_replacement":
        found += [
            Suspect(
                "sibling order: tested in the reverse order",
                verify,
                order=lambda below, tokens, rows: list(reversed(below)),
            ),
            Suspect(
                "siblings: drawn without replacement, verified as if with it",
                replaced(base, share=from_q),
            ),
            Suspect(
                "siblings: the draft row without earlier siblings is not renormalised",
                replaced(base, share=lambda now: np.where(now.gone, 0.0, now.q)),
            ),
        ]
    if kind == "with_replacement":
        found += [
            Suspect(
                "siblings: drawn with replacement, verified as if without it",
                replaced(base, share=not_drawn_yet),
            ),
            Suspect(
                "siblings: duplicates are skipped",
                replaced(base, is_tested=lambda now: not now.gone[now.x]),
            ),
        ]
    return found


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
