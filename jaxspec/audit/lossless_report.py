"""The report on a foreign verifier: numbers by instance, failures in words, a page of text."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import Any

from jaxspec.audit.settings import RULES_OF_KIND, Text
from jaxspec.audit.statistics import GTest

_WIDTH = 96
_SHOWN_TEXTS = 6
_SHOWN_PROBLEMS = 4


@dataclasses.dataclass(frozen=True)
class Shift:
    """Where a law is off: the token that is emitted too often, at the first position that is wrong.

    Attributes:
      position: of the token in the text, 0 for the first that is emitted.
      after: the tokens before it.
      token: the token.
      expected: its target probability after these tokens.
      observed: its probability after these tokens, emissions being completed by the target.
    """

    position: int
    after: Text
    token: int
    expected: float
    observed: float

    def __str__(self) -> str:
        """Return it in a line."""
        after = f" after {list(self.after)}" if self.after else ""
        return (
            f"position {self.position}, token {self.token}{after}: expected {self.expected:.3f}, "
            f"observed {self.observed:.3f}"
        )


@dataclasses.dataclass(frozen=True)
class InstanceResult:
    """What was found in one instance.

    Attributes:
      name: of the instance.
      is_exact: whether the law was found by search.
      calls: of the verifier.
      is_right: whether the law is the target's and nothing is emitted that it excludes.
      bias: exact total variation from the target's law; for a sample an estimate of how much too often
        an event occurs, chosen in one half of the calls and measured in the other.
      interval: of the estimate, at 99 %; None if exact.
      test: the G-test that decided, or the one of the least p; None if exact.
      level: the level of each such test; None if exact.
      problems: the first emission of each kind that no verifier may emit, in words, by kind.
      accepted: mean number of accepted tokens.
      accepted_by_rule: the exact mean of each lossless rule of this kind.
      shift: where the law is off; None where it is not.
      expected: the target's law of the first tokens of the text, by the tokens.
      observed: the verifier's, exact or as frequencies.
    """

    name: str
    is_exact: bool
    calls: int
    is_right: bool
    bias: float
    interval: tuple[float, float] | None
    test: GTest | None
    level: float | None
    problems: Mapping[str, str]
    accepted: float
    accepted_by_rule: Mapping[str, float]
    shift: Shift | None
    expected: Mapping[Text, float] = dataclasses.field(repr=False)
    observed: Mapping[Text, float] = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, lists and strings; laws as lists of [tokens, expected, observed]."""
        texts = sorted({*self.expected, *self.observed})
        law = [[list(t), self.expected.get(t, 0.0), self.observed.get(t, 0.0)] for t in texts]
        fields = {**vars(self), "law": law}
        fields["shift"] = None if self.shift is None else vars(self.shift)
        fields["test"] = None if self.test is None else _finite(vars(self.test))
        del fields["expected"], fields["observed"]
        return fields


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON does not have by None."""
    is_infinite = {k: isinstance(v, float) and not math.isfinite(v) for k, v in fields.items()}
    return {name: None if is_infinite[name] else value for name, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class LosslessReport:
    """Whether a foreign verifier is lossless, and what it looks like if not.

    Attributes:
      kind: of verifier.
      randomness: what it draws from.
      rule: the rule that it is meant to be, or None.
      results: by instance, the smallest first.
      contract: failures that belong to no instance, in words, by kind: other tokens for the same
        randomness ("seed") or in another batch ("batch"), modified "arguments".
      matches: rules whose acceptance it has in every instance.
      suspects: named faults whose exact law fits what was seen in every instance.
      notes: what could not be done as asked.
      calls: of the verifier, all together.
      budget: most calls that were allowed.
      seed: of all draws.
      false_alarm: probability that a lossless verifier is rejected; 0 if every law is exact.
      uncertified: share of all draws, over all instances, at which other outcomes are missed by exact
        laws with probability 1e-6; near 1 if no points were replayed.
    """

    kind: str
    randomness: str
    rule: str | None
    results: tuple[InstanceResult, ...]
    contract: Mapping[str, str]
    matches: tuple[str, ...]
    suspects: tuple[str, ...]
    notes: tuple[str, ...]
    calls: int
    budget: int
    seed: int
    false_alarm: float
    uncertified: float

    @property
    def is_lossless(self) -> bool:
        """Whether every law is the target's, or not rejected, and nothing impossible is emitted."""
        return all(result.is_right for result in self.results)

    @property
    def is_as_rule(self) -> bool | None:
        """Whether the acceptance is that of `rule` in every instance; None if no rule is named."""
        return None if self.rule is None else self.rule in self.matches

    @property
    def passes(self) -> bool:
        """Whether it is lossless, emits nothing invalid, keeps its contract, and accepts as `rule`."""
        return self.is_lossless and not self._problems and self.is_as_rule is not False

    @property
    def _problems(self) -> dict[str, str]:
        """The first problem of each kind."""
        found = dict(self.contract)
        for result in self.results:
            found = {**result.problems, **found}
        return found

    @property
    def failures(self) -> tuple[str, ...]:
        """What failed, in words."""
        found: list[str] = []
        for result in self.results:
            found += result.problems.values()
            if result.shift is not None:
                how = "exact" if result.is_exact else f"p {_p_value(result)}"
                found.append(f"law ({how}) in instance {result.name!r}: {result.shift}")
        found += self.contract.values()
        if self.is_lossless and self.is_as_rule is False:
            found.append(self._acceptance())
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return the report as one object of plain numbers, lists and strings."""
        verdicts = {"lossless": self.is_lossless, "as_rule": self.is_as_rule, "passes": self.passes}
        results = [result.to_json() for result in self.results]
        return {**verdicts, **vars(self), "results": results, "failures": self.failures}

    def __str__(self) -> str:
        """Return a page of at most 40 lines."""
        lines = [*_wrap(self._headline()), *self._table()]
        worst = next((each for each in self.results if each.shift is not None), None)
        for place, words in enumerate(self.suspects):
            start, end = (
                ("or", "") if place else ("Looks like", f" ({worst.shift})" if worst else "")
            )
            lines += _wrap(f"{start} {words}{end}")
        if not self.suspects and worst is not None:
            lines += _wrap(f"No known fault fits. First wrong at {worst.shift}, in {worst.name!r}")
        if worst is not None:
            lines += _law_table(worst)
        problems = [*self._problems.values()]
        for words in problems[:_SHOWN_PROBLEMS]:
            lines += _wrap(f"Invalid: {words}")[:3]
        lines += _wrap(self._acceptance())
        lines += _wrap(self._power())
        for note in self.notes[:2]:
            lines += _wrap(f"Note: {note}")[:2]
        return "\n".join(lines[:40])

    def _headline(self) -> str:
        if not self.is_lossless:
            verdict = "BIASED"
        elif self._problems:
            verdict = "LAW RIGHT, OUTPUT INVALID"
        elif self.is_as_rule is False:
            verdict = "LOSSLESS, BUT NOT THE RULE"
        else:
            verdict = "LOSSLESS"
        rule = f", meant to be {self.rule!r}" if self.rule else ""
        return (
            f"{verdict}: verifier of kind {self.kind!r}{rule}, drawing from {self.randomness!r}, "
            f"{self.calls:,} calls, seed {self.seed}"
        )

    def _table(self) -> list[str]:
        rules = RULES_OF_KIND[self.kind]
        heads = "".join(f"{name[:11]:>12}" for name in ("accepted", *rules))
        lines = [f"  {'instance':<34}{'law':>8}{'bias':>9}{heads}"]
        for each in self.results:
            how = "exact" if each.is_exact else "sampled"
            means = (each.accepted, *(each.accepted_by_rule[name] for name in rules))
            shown = "".join(f"{mean:>12.4f}" for mean in means)
            verdict = "" if each.is_right else "  FAIL"
            lines.append(f"  {each.name[:33]:<34}{how:>8}{each.bias:>9.0e}{shown}{verdict}")
        return lines

    def _acceptance(self) -> str:
        rules = RULES_OF_KIND[self.kind]
        by_rule = [self.rule] if self.rule is not None and not self.is_as_rule else []
        if self.is_lossless and (by_rule or not self.matches):
            # Where it differs most from the named rule, or from the one that accepts most.
            result, name = max(
                ((each, name) for each in self.results for name in by_rule or rules),
                key=lambda pair: abs(pair[0].accepted - pair[0].accepted_by_rule[pair[1]]),
            )
            exact = result.accepted_by_rule[name]
            verdict = "wasteful" if result.accepted < exact else "another rule"
            also = f"; as {' and '.join(self.matches)} in every instance" if self.matches else ""
            return (
                f"Acceptance: {result.accepted:.4g} tokens a round in {result.name!r}, where {name} "
                f"accepts {exact:.4g}: {verdict}{also}"
            )
        clearest = max(
            self.results,
            key=lambda each: (
                max(each.accepted_by_rule.values()) - min(each.accepted_by_rule.values())
            ),
        )
        as_rule = f", as {' and '.join(self.matches)} in every instance" if self.matches else ""
        others = "".join(
            f"; {name} {clearest.accepted_by_rule[name]:.4g}"
            for name in rules
            if name not in self.matches
        )
        mean = f"Acceptance: {clearest.accepted:.4g} tokens a round in {clearest.name!r}"
        return f"{mean}{as_rule}{others}"

    def _power(self) -> str:
        sampled = [each for each in self.results if each.test is not None]
        if not sampled:
            return (
                "Every law is exact: edges are known to 2^-24, replays inside all pieces agree; other "
                f"outcomes at {self.uncertified:.1e} of all draws are missed with probability 1e-06."
            )
        intervals = [each.interval for each in sampled if each.interval is not None]
        high = max(abs(edge) for interval in intervals for edge in interval)
        seen = [each.test.detectable for each in sampled if each.test is not None]
        known = [each for each in seen if each is not None]
        power = (
            f"a bias of total variation {max(known):.3f} is seen with probability 0.99 in every "
            "instance, a smaller one where it hits rare tokens"
            if known and len(known) == len(seen)
            else "too few calls to state the bias that is surely seen"
        )
        return (
            f"Sampled: a lossless verifier is rejected with probability {self.false_alarm:.0e}; "
            f"{power}. Bias of chosen events at most {high:.3f} at 99 % confidence."
        )


def _p_value(result: InstanceResult) -> str:
    return "?" if result.test is None else f"{result.test.p_value:.1e}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")


def _law_table(result: InstanceResult) -> list[str]:
    """Show the texts that differ most."""
    texts = sorted(
        {*result.expected, *result.observed},
        key=lambda text: -abs(result.expected.get(text, 0.0) - result.observed.get(text, 0.0)),
    )
    length = len(texts[0])
    what = "the first token" if length == 1 else f"the first {length} tokens"
    lines = [f"Law of {what} in {result.name!r}, the smallest failing instance:"]
    lines.append(f"  {'tokens':<20}{'expected':>10}{'observed':>10}")
    for text in texts[:_SHOWN_TEXTS]:
        expected, observed = result.expected.get(text, 0.0), result.observed.get(text, 0.0)
        lines.append(f"  {' '.join(map(str, text)):<20}{expected:>10.4f}{observed:>10.4f}")
    return lines
