"""The rules by name. A rule listed here is audited, tested, exported and documented."""

import dataclasses
from types import MappingProxyType
from typing import Any

from jaxspec.checks import assert_kind
from jaxspec.proposals import PointMass, Proposal, WithoutReplacement, WithReplacement
from jaxspec.verify.bottom_up import verify_block, verify_traversal
from jaxspec.verify.checked import Verifier
from jaxspec.verify.top_down import verify_path, verify_tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A lossless rule: a verifier and the kind of proposal it is used with.

    Attributes:
      name: the name in reports.
      verify: the public jitted verifier.
      proposal: how candidates are drawn.
      is_path: whether it takes single paths only.
      tests_deepest_first: order of the accept tests: from the deepest candidate back, or from the
        root.
      source: paper.
    """

    name: str
    verify: Verifier
    proposal: type[Proposal]
    is_path: bool = False
    tests_deepest_first: bool = False
    source: str

    def __reduce__(self) -> Any:
        """Pickle a rule of `RULES` by its name: jitted functions cannot be pickled."""
        if RULES.get(self.name) is self:
            return _rule, (self.name,)
        return super().__reduce__()


def _rule(name: str) -> Rule:
    return RULES[name]


_RULES = (
    Rule(
        name="token", verify=verify_path, proposal=WithReplacement, is_path=True,
        source="Leviathan et al. 2023",
    ),
    Rule(
        name="block", verify=verify_block, proposal=WithReplacement, is_path=True,
        tests_deepest_first=True, source="Sun et al. 2025",
    ),
    Rule(
        name="point_mass", verify=verify_tree, proposal=PointMass,
        source="contract; EAGLE-2 2024",
    ),
    Rule(
        name="with_replacement", verify=verify_tree, proposal=WithReplacement,
        source="SpecInfer 2024",
    ),
    Rule(
        name="without_replacement", verify=verify_tree, proposal=WithoutReplacement,
        source="Sequoia 2024; Jeon et al. 2024",
    ),
    Rule(
        name="traversal", verify=verify_traversal, proposal=WithoutReplacement,
        tests_deepest_first=True, source="Weng et al. 2025",
    ),
)  # fmt: skip

RULES = MappingProxyType({rule.name: rule for rule in _RULES})
"""Every lossless rule by name."""


def assert_rule(name: str, rule: Any) -> None:
    """Raise ValueError unless `rule` is a `Rule`, naming the argument (the name of one is not)."""
    is_name = isinstance(rule, str) and rule in RULES
    which = f'RULES["{rule}"]' if is_name else f"one of RULES: {', '.join(RULES)}"
    assert_kind(name, rule, Rule, f"a jaxspec.Rule, {which}")
