"""Proofs by counting: grids of draws, exact laws.

`audit_rules` proves every rule. To audit your own work: `exact_law` of a round made by `make_round`,
for a verifier, a way to draw siblings, a rule by which a draft stops (`num_drafted`) or rows in half
precision (`dtype`); `decoding_law` for a drafter or a loop. What a draft may depend on is the contract
of `jaxspec.decode.Drafter`: on tokens drawn before, never on the token that it decides about. A draft
that breaks it is seen here, as total variation from the target's law.
"""

from jaxspec.audit.decoding import DecodingLaw, decoding_law, target_law
from jaxspec.audit.grid import count_outcomes, single_path_counts, two_level_tree_counts
from jaxspec.audit.instances import Instance, instances_for
from jaxspec.audit.law import Cells, Law, exact_law, joint_law, replay, search
from jaxspec.audit.report import AuditReport, audit_rules
from jaxspec.audit.rounds import Capacity, Outcome, Round, World, make_round
from jaxspec.audit.statistics import GTest, fit_test, g_test

__all__ = (
    "AuditReport",
    "Capacity",
    "Cells",
    "DecodingLaw",
    "GTest",
    "Instance",
    "Law",
    "Outcome",
    "Round",
    "World",
    "audit_rules",
    "count_outcomes",
    "decoding_law",
    "exact_law",
    "fit_test",
    "g_test",
    "instances_for",
    "joint_law",
    "make_round",
    "replay",
    "search",
    "single_path_counts",
    "target_law",
    "two_level_tree_counts",
)
