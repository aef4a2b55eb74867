"""Which named faults fit what a verifier was seen to do."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.audit.faults import faults_of_kind
from jaxspec.audit.settings import Setting
from jaxspec.audit.suspects import Joint, Suspect, right_rules

Score = Callable[[int, Joint], float | None]
"""Log likelihood of what was observed in a setting, by its place, under a law; None: excluded."""

_CLOSE = 7.0
"""Faults whose log likelihood is this much below that of the best are not named."""

_EM_STEPS = 40

_MOST = 2
"""Settings by which the share of a mixture is estimated."""


def fitting_faults(
    kind: str,
    settings: Sequence[Setting],
    frequencies: Sequence[Joint],
    score: Score,
    most: int = 3,
) -> tuple[str, ...]:
    """Return the words of the faults whose law fits in every setting, the most likely first.

    A fault may also occur in a share of the calls only, the others being right.

    Args:
      kind: of verifier.
      settings: where to compare, first those in which fewest fit.
      frequencies: what was observed in the first of them, by which that share is estimated.
      score: compares a law with what was observed in a setting.
      most: of the faults to return.
    """
    fits = {each.words: total(each.law, settings, score) for each in faults_of_kind(kind)}
    found = {words: fit for words, fit in fits.items() if fit is not None}
    is_exact = found and max(found.values()) == 0  # no law can fit better
    mixture = None if is_exact else _fitting_mixture(kind, settings, frequencies, score)
    if mixture is not None and mixture[1] > max(found.values(), default=-math.inf) + _CLOSE:
        return (mixture[0],)
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


def _fitting_mixture(
    kind: str, settings: Sequence[Setting], frequencies: Sequence[Joint], score: Score
) -> tuple[str, float] | None:
    """Return the most likely fault that occurs in a share of the calls only, and its score."""
    best: tuple[str, float] | None = None
    for rule in right_rules(kind).values():
        for fault in faults_of_kind(kind):
            share = _share(
                [
                    (seen, rule.law(setting), fault.law(setting))
                    for seen, setting in zip(frequencies[:_MOST], settings, strict=False)
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
            if fit is not None and (best is None or fit > best[1]):
                best = f"{fault.words}, in about {share:.1%} of the calls", fit
    return best


def _share(laws: Sequence[tuple[Joint, Joint, Joint]]) -> float:
    """Estimate how much of (observed, right, wrong) laws is wrong, by greatest likelihood."""
    columns = [
        (mass, right.get(key, 0.0), wrong.get(key, 0.0))
        for seen, right, wrong in laws
        for key, mass in seen.items()
        if right.get(key, 0.0) + wrong.get(key, 0.0) > 0
    ]
    if not columns:
        return 0.0
    masses, right_masses, wrong_masses = np.array(columns).reshape(-1, 3).T
    share = 0.02
    for _ in range(_EM_STEPS):
        part = share * wrong_masses
        share = float(np.sum(masses * part / ((1 - share) * right_masses + part)) / masses.sum())
    return share
