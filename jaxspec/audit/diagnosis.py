"""Which named faults fit what a verifier was seen to do."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.audit.faults import faults_of_kind
from jaxspec.audit.settings import Setting
from jaxspec.audit.suspects import Joint, Suspect, right_rules

Score = Callable[[int, Joint], float | None]
"""Log likelihood of what was observed in a setting, by its place, under a law; None: excluded."""

_CLOSE = 7.0
"""Faults whose log likelihood is this much below that of the best are not named."""


def fitting_faults(
    kind: str, settings: Sequence[Setting], score: Score, most: int = 3
) -> tuple[str, ...]:
    """Return the words of the faults whose law fits in every setting, the most likely first.

    Args:
      kind: of verifier.
      settings: where to compare, first those in which fewest fit.
      score: compares a law with what was observed in a setting.
      most: of them to return.
    """
    fits = {each.words: total(each.law, settings, score) for each in faults_of_kind(kind)}
    found = {words: fit for words, fit in fits.items() if fit is not None}
    least = max(found.values(), default=0.0) - _CLOSE
    likely = [
        words for words in sorted(found, key=lambda each: -found[each]) if found[words] >= least
    ]
    return tuple(likely[:most])


def total(
    law: Callable[[Setting], Joint], settings: Sequence[Setting], score: Score
) -> float | None:
    """Add the scores of a law in all settings up; None once it is excluded in one."""
    found = 0.0
    for place, setting in enumerate(settings):
        here = score(place, law(setting))
        if here is None:
            return None
        found += here
    return found


def fitting_mixture(
    kind: str, settings: Sequence[Setting], observed: Sequence[Joint], score: Score
) -> tuple[str, ...]:
    """Return the fault that fits if only a share of the calls has it, and the others are right.

    Args:
      kind: of verifier.
      settings: as for `fitting_faults`.
      observed: frequencies in the first of them, by which the share is estimated.
      score: as for `fitting_faults`.
    """
    best: tuple[float, str] | None = None
    for rule in right_rules(kind).values():
        for fault in faults_of_kind(kind):
            share = _share(
                [
                    (seen, rule.law(setting), fault.law(setting))
                    for seen, setting in zip(observed, settings, strict=False)
                ]
            )
            if not 1e-3 < share < 0.95:
                continue

            def mixed(
                setting: Setting, rule: Suspect = rule, fault: Suspect = fault, share: float = share
            ) -> Joint:
                right, wrong = rule.law(setting), fault.law(setting)
                return {
                    key: (1 - share) * right.get(key, 0.0) + share * wrong.get(key, 0.0)
                    for key in {*right, *wrong}
                }

            fit = total(mixed, settings, score)
            if fit is not None and (best is None or fit > best[0]):
                best = fit, f"{fault.words}, in about {share:.1%} of the calls"
    return () if best is None else (best[1],)


def _share(laws: Sequence[tuple[Joint, Joint, Joint]]) -> float:
    """Estimate how much of (observed, right, wrong) laws is wrong, by least squares."""
    explained, size = 0.0, 0.0
    for seen, right, wrong in laws:
        keys = {*right, *wrong}
        was, law, other = (
            np.array([x.get(key, 0.0) for key in keys]) for x in (seen, right, wrong)
        )
        weights, step = 1 / (law + other), other - law
        explained += float(np.sum(weights * step * (was - law)))
        size += float(np.sum(weights * step**2))
    return explained / size if size > 0 else 0.0
