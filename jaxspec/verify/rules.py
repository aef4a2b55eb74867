"""The rules by name. A rule listed here is audited, tested, exported and documented by that alone."""

import dataclasses
from types import MappingProxyType
from typing import Any

from jaxspec.checks import assert_kind
from jaxspec.proposals import PointMass, Proposal, WithoutReplacement, WithReplacement
from jaxspec.verify.bottom_up import verify_block, verify_traversal
from jaxspec.verify.checked import Verifier
from jaxspec.verify.top_down import verify_path, verify_tree


@dataclasses.dataclass(frozen=True)
class Rule:
    """A lossless rule: a verifier and the kind of proposal it is used with.

    Attributes:
      name: the name in reports.
      verify: the public jitted verifier.
      proposal: how candidates are drawn.
      is_path: whether it takes single paths only.
      tests_deepest_first: order of the accept tests, from the deepest candidate back or from the root.
      source: paper.
    """

    name: str
    verify: Verifier
    proposal: type[Proposal]
    is_path: bool
    tests_deepest_first: bool
    source: str


RULES = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            Rule("token", verify_path, WithReplacement, True, False, "Leviathan et al. 2023"),
            Rule("block", verify_block, WithReplacement, True, True, "Sun et al. 2025"),
            Rule("point_mass", verify_tree, PointMass, False, False, "contract; EAGLE-2 2024"),
            Rule("with_replacement", verify_tree, WithReplacement, False, False, "SpecInfer 2024"),
            Rule(
                "without_replacement",
                verify_tree,
                WithoutReplacement,
                False,
                False,
                "Sequoia 2024; Jeon et al. 2024",
            ),
            Rule(
                "traversal", verify_traversal, WithoutReplacement, False, True, "Weng et al. 2025"
            ),
        )
    }
)
"""Every lossless rule by name."""


def assert_rule(name: str, rule: Any) -> None:
    """Raise ValueError unless `rule` is a `Rule` (for example, its name is none).

    Raises:
      ValueError: naming the argument, what was given and what to give instead.
    """
    is_name = isinstance(rule, str) and rule in RULES
    which = f'RULES["{rule}"]' if is_name else f"one of RULES: {', '.join(RULES)}"
    assert_kind(name, rule, Rule, f"a jaxspec.Rule, {which}")
