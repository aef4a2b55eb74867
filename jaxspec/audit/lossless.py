"""Is a foreign verifier lossless? Its exact law where its draws are explicit, else samples."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.audit import observed as observations
from jaxspec.audit.boxes import TOLERANCE
from jaxspec.audit.diagnosis import fitting_faults
from jaxspec.audit.foreign import RANDOMNESS, Foreign
from jaxspec.audit.instances import Instance
from jaxspec.audit.lossless_report import InstanceResult, LosslessReport, Shift
from jaxspec.audit.observed import Observed, complete, complete_counts, marginal, num_accepted
from jaxspec.audit.settings import (
    KINDS,
    RULES_OF_KIND,
    Setting,
    Text,
    make_setting,
    settings_of_kind,
)
from jaxspec.audit.statistics import GTest, fit_test, total_variation
from jaxspec.audit.suspects import Joint, right_rules
from jaxspec.checks import Progress, assert_bool, assert_function, assert_whole
from jaxspec.transfers import moves_data

FALSE_ALARM = 1e-6
"""Probability that a sampled lossless verifier is rejected."""

BUDGET = 300_000
"""Calls of the verifier by default, over all instances."""

_STAGES = (0.04, 0.2, 1.0)
_FITS = 1e-4
"""A suspect is excluded by a sample at this level."""


@moves_data
def check_lossless(
    verify: Callable[..., Any],
    *,
    kind: str,
    randomness: str,
    rule: str | None = None,
    batched: bool = False,
    bonus: bool = True,
    num_uniforms: int | None = None,
    budget: int = BUDGET,
    seed: int = 0,
    instances: Sequence[Instance] | None = None,
    progress: Progress | None = None,
) -> LosslessReport:
    """Check whether any Python function verifies without loss, and name the fault if it does not.

    The candidates of every call are drawn here, as `kind` says. A verifier of explicit uniforms gets
    its exact law, by a search for all edges in its draws; any other, and one whose edges do not follow
    the axes of its draws, is sampled. Samples are compared with the target's law by G-tests of the
    first token, the first two, and so on (what is emitted, completed by the target), after
    4 %, 20 % and 100 % of the calls, so that a strong fault ends the check early.

    Args:
      verify: the verifier. For a path verify(draft_tokens [T], draft_rows [T, V], target_rows
        [T + 1, V], source); for a tree verify(tokens [N], parents [N], draft_rows [N, V], target_rows
        [N, V], source), node 0 being the root and row n the distribution after node n. Tokens are
        int32, rows float32; draft rows are None for point masses. Returns the emitted token ids:
        accepted ones, then the replacement or bonus, then maybe -1; for a tree also (emitted, slots),
        slots being the accepted nodes without the root.
      kind: "path", "point_mass_path" (given candidates, as of an n-gram draft), or for trees
        "point_mass", "with_replacement" or "without_replacement".
      randomness: what `source` is: "uniforms" (float32 [K]), "jax_key", "numpy" (a generator), "torch"
        (a generator), or "seed" (an integer). Arrays are of JAX for "jax_key", torch tensors for
        "torch", else of NumPy.
      rule: name of the rule that it is meant to be, whose acceptance it must have: one of "token",
        "block", "point_mass", "with_replacement", "without_replacement", "traversal".
      batched: whether every argument has a leading [B] and `source` is one for each sequence: [B, K]
        uniforms, [B] keys, or a list.
      bonus: whether a token follows a fully accepted path.
      num_uniforms: K; default one for each candidate, one more, and those that an adapter of
        `jaxspec.audit` takes for itself.
      budget: most calls, over all instances; a search that finds no law may take as many again. The
        default takes half a minute at 100 us a call.
      seed: of all draws. A verdict by samples is wrong with probability 1e-6 over seeds.
      instances: where to call it; default a set in which faults show.
      progress: called as progress(what, done, total) before each instance and at the end.

    Returns:
      The `LosslessReport`; printed, it is a page.

    Raises:
      ValueError: an argument is unknown; the verifier raises, or returns something else than token
        ids.
      ImportError: randomness is "torch", which is not installed.

    >>> import numpy as np
    >>> def greedy(draft_tokens, draft_rows, target_rows, uniforms):  # ignores its draws
    ...     return [int(np.argmax(target_rows[0]))]
    >>> report = check_lossless(greedy, kind="path", randomness="uniforms")
    >>> report.is_lossless, report.results[0].shift.token
    (False, 3)
    """
    _assert_arguments(verify, kind, randomness, rule, batched, bonus, budget, seed)
    if num_uniforms is not None:
        assert_whole("num_uniforms", num_uniforms, 1)
    if instances is None:
        settings = settings_of_kind(kind, bonus)
    elif instances:
        settings = tuple(make_setting(each, kind, bonus) for each in instances)
    else:
        raise ValueError(
            "instances is empty: a verifier needs at least one instance to be called in"
        )
    foreign = Foreign(verify, randomness, batched, num_uniforms, seed)
    steps = len(settings) + 1

    def tell(what: str, done: int) -> None:
        if progress:
            progress(what, done, steps)

    problems = observations.repeat(foreign, settings[min(2, len(settings) - 1)])
    found = [Observed(setting) for setting in settings]
    share = max(budget // len(settings), 1)
    notes: list[str] = []
    searched = settings if randomness == "uniforms" and "seed" not in problems else ()
    for place, setting in enumerate(searched):
        tell(f"exact law: {setting.name}", place)
        law = observations.search(foreign, setting, share)
        if law is None:
            notes.append(
                f"{setting.name}: no exact law: the outcome is not piecewise constant along its "
                f"draws, or took over {share:,} calls; sampled instead"
            )
        else:
            found[place] = law
    if searched and all(each.is_exact and _is_right(each) for each in found):
        # Intervals of draws that a search has missed; a law that is wrong needs none.
        for place, each in enumerate(found):
            points = max(min(share - each.calls, budget // 20), 0)
            law = observations.search(foreign, each.setting, 4 * share, points, each)
            found[place] = law or Observed(each.setting)
    sampled = [place for place, each in enumerate(found) if not each.is_exact]
    # At each stage: one for each length of a text, and one for the number of accepted tokens.
    tests = len(_STAGES) * sum(settings[place].depth + 2 for place in sampled)
    level = FALSE_ALARM / max(tests, 1)
    generator = np.random.default_rng([seed, 1])
    results = {
        place: _result(each, level, generator) for place, each in enumerate(found) if each.is_exact
    }
    for stage in _STAGES if sampled else ():
        for place in sampled:
            tell(f"sampling: {settings[place].name}", place)
            calls = max(int(share * stage) - found[place].calls, 1)
            observations.sample(foreign, found[place], calls, generator)
            results[place] = _result(found[place], level, generator)
        if not all(result.is_right for result in results.values()):
            break
    if foreign.modified:
        words = ", ".join(sorted(foreign.modified))
        problems["arguments"] = f"its arguments are modified in place: {words}"
    matches = _matching_rules(kind, found, level)
    tell("diagnosis", steps - 1)
    report = LosslessReport(
        kind=kind,
        randomness=randomness,
        rule=rule,
        results=tuple(results[place] for place in sorted(results)),
        contract=problems,
        matches=matches,
        suspects=_suspects(kind, found, results),
        notes=tuple(notes),
        calls=foreign.calls,
        budget=budget,
        seed=seed,
        false_alarm=FALSE_ALARM if len(sampled) else 0.0,
        uncertified=1 - FALSE_ALARM ** (1 / max(sum(each.points for each in found), 1)),
    )
    tell("done", steps)
    return report


def _assert_arguments(
    verify: object,
    kind: str,
    randomness: str,
    rule: str | None,
    batched: bool,
    bonus: bool,
    budget: int,
    seed: int,
) -> None:
    assert_function("verify", verify, "a verifier")
    for name, value, known in (("kind", kind, KINDS), ("randomness", randomness, RANDOMNESS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: must be one of {', '.join(known)}")
    rules = RULES_OF_KIND[kind]
    if rule is not None and rule not in rules:
        raise ValueError(f"rule is {rule!r}: for kind {kind!r} must be one of {', '.join(rules)}")
    assert_bool("batched", batched)
    assert_bool("bonus", bonus)
    assert_whole("budget", budget, 1)
    assert_whole("seed", seed, 0)


# --- verdicts


def _is_right(seen: Observed) -> bool:
    """Whether an exact law is the target's."""
    is_same = total_variation(complete(seen), seen.setting.text) <= TOLERANCE
    return is_same and not seen.impossible


def _result(seen: Observed, level: float, generator: np.random.Generator) -> InstanceResult:
    """Compare what was seen in a setting with the target's law."""
    setting = seen.setting
    accepted = sum(count * mass for count, mass in enumerate(_accepted(setting, seen.joint)))
    text: Mapping[Text, float] = complete(seen)
    lengths = range(1, setting.depth + 2)
    if seen.is_exact:
        tvs = {n: total_variation(marginal(text, n), marginal(setting.text, n)) for n in lengths}
        wrong = [n for n in lengths if tvs[n] > TOLERANCE]
        test, bias, interval = None, tvs[lengths[-1]], None
        shown = wrong[0] if wrong else lengths[-1]
    else:
        counts = complete_counts(setting, seen.joint, generator)
        tests = {n: _fit(marginal(counts, n), marginal(setting.text, n), level) for n in lengths}
        wrong = [n for n in lengths if tests[n].p_value <= level]
        shown = wrong[0] if wrong else min(lengths, key=lambda n: tests[n].p_value)
        test = tests[shown]
        bias, interval = _bias(seen, shown)
    problems = dict(seen.problems)
    if seen.is_exact and seen.impossible:
        words = problems.get("impossible") or problems.get("range")
        problems["impossible"] = f"{words}, with probability {seen.impossible:.1e}"
    expected, observed = marginal(setting.text, shown), marginal(text, shown)
    total = sum(observed.values())
    observed = {each: mass / total for each, mass in observed.items()}
    return InstanceResult(
        name=setting.name,
        is_exact=seen.is_exact,
        calls=seen.calls,
        is_right=not wrong and not seen.impossible,
        bias=bias,
        interval=interval,
        test=test,
        level=None if seen.is_exact else level,
        problems=problems,
        accepted=accepted / seen.size,
        accepted_by_rule={
            name: sum(mass * count for count, mass in enumerate(law))
            for name, law in _accepted_by_rule(setting).items()
        },
        shift=_shift(expected, observed) if wrong else None,
        expected=expected,
        observed=observed,
    )


def _fit(counts: Mapping[Any, float], law: Mapping[Any, float], level: float) -> GTest:
    keys = sorted({*counts, *law})
    seen = np.array([round(counts.get(key, 0)) for key in keys])
    exact = np.array([law.get(key, 0.0) for key in keys])
    return fit_test(seen, exact / exact.sum(), level=level, power=0.99)


def _bias(seen: Observed, length: int) -> tuple[float, tuple[float, float]]:
    """Estimate by how much the event that is most in excess in one half is so in the other."""
    setting = seen.setting
    halves = []
    for joint in seen.halves:
        part = dataclasses.replace(seen, joint=joint)
        halves.append((marginal(complete(part), length), max(part.size, 1)))
    (first, n), (second, m) = halves
    expected = marginal(setting.text, length)
    event = {key for key in {*first, *expected} if first.get(key, 0.0) / n > expected.get(key, 0.0)}
    share = sum(second.get(key, 0.0) for key in event) / m
    bias = share - sum(expected.get(key, 0.0) for key in event)
    error = 2.576 * math.sqrt(max(share * (1 - share), 1 / m) / m)
    return bias, (bias - error, bias + error)


def _shift(expected: Mapping[Text, float], observed: Mapping[Text, float]) -> Shift:
    """Return the token in greatest excess, at the last position of these texts."""
    worst = max(observed, key=lambda text: observed[text] - expected.get(text, 0.0))
    *before, token = worst
    prefix = tuple(before)

    def given(law: Mapping[Text, float]) -> float:
        mass = sum(chance for text, chance in law.items() if text[:-1] == prefix)
        return law.get(worst, 0.0) / mass if mass > 0 else 0.0

    return Shift(len(prefix), prefix, token, given(expected), given(observed))


# --- acceptance and diagnosis


def _accepted(setting: Setting, joint: Joint) -> list[float]:
    """Return the mass of each number of accepted tokens, [D + 1]."""
    found = [0.0] * (setting.depth + 1)
    for (drawing, text), mass in joint.items():
        found[min(num_accepted(setting, drawing, text), setting.depth)] += mass
    return found


@functools.lru_cache(maxsize=64)
def _accepted_by_rule(setting: Setting) -> dict[str, list[float]]:
    """Return the exact law of the number of accepted tokens of each lossless rule of a kind."""
    rules = right_rules(setting.kind).items()
    return {name: _accepted(setting, rule.law(setting)) for name, rule in rules}


def _matching_rules(kind: str, found: Iterable[Observed], level: float) -> tuple[str, ...]:
    """Return the rules whose accepted counts are those of a verifier, in every setting."""
    matches = list(right_rules(kind))
    for seen in found:
        counts = _accepted(seen.setting, seen.joint)
        for name, law in _accepted_by_rule(seen.setting).items():
            if seen.is_exact:
                is_same = max(abs(np.array(counts) - law)) <= TOLERANCE
            else:
                test = _fit(dict(enumerate(counts)), dict(enumerate(law)), level)
                is_same = test.p_value > level
            if not is_same and name in matches:
                matches.remove(name)
    return tuple(matches)


def _suspects(
    kind: str, found: Sequence[Observed], results: Mapping[int, InstanceResult]
) -> tuple[str, ...]:
    """Name the faults whose law fits in every setting, those where the verifier is wrong first."""
    if all(result.shift is None for result in results.values()):
        is_edge = any(0 < each.impossible < TOLERANCE for each in found if each.is_exact)
        return (
            ("accept test: <= instead of <, a draw of 0 accepts what cannot be",) if is_edge else ()
        )
    # The faults are told apart where the verifier is wrong; small settings cost least.
    order = sorted(results, key=lambda n: (results[n].shift is None, found[n].setting.target.size))
    settings = [found[place].setting for place in order]

    def score(place: int, law: Joint) -> float | None:
        return _score(found[order[place]], law)

    frequencies = [
        {key: mass / found[place].size for key, mass in found[place].joint.items()}
        for place in order
        if results[place].shift is not None
    ]
    return fitting_faults(kind, settings, frequencies, score)


def _score(seen: Observed, law: Joint) -> float | None:
    """Return the log likelihood of what was observed under a law; None if it is excluded."""
    if seen.is_exact:
        return None if total_variation(seen.joint, law) > TOLERANCE else 0.0
    if (
        any(law.get(key, 0.0) <= 0 for key in seen.joint)
        or _fit(seen.joint, law, _FITS).p_value <= _FITS
    ):
        return None
    return sum(count * math.log(law[key]) for key, count in seen.joint.items())
