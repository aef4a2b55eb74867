"""Proofs by counting: grids of draws, exact laws, and tests that state their power.

`audit_rules` proves every rule, `check_lossless` checks any function. `exact_law` audits one round of
a custom rule, verifier, draft or row source; `decoding_law` audits a drafter or a loop.
"""

from jaxspec.audit.adapters import from_flat, from_linked_list, from_transformers
from jaxspec.audit.boxes import Cells, search
from jaxspec.audit.decoding import decoding_law
from jaxspec.audit.grid import count_outcomes
from jaxspec.audit.instances import Instance, instances_for
from jaxspec.audit.law import Law, exact_law
from jaxspec.audit.lossless import check_lossless
from jaxspec.audit.lossless_report import InstanceResult, LosslessReport, Shift
from jaxspec.audit.report import AuditReport, audit_rules
from jaxspec.audit.statistics import GTest, fit_test, g_test
from jaxspec.audit.texts import DecodingLaw

__all__ = (
    "AuditReport",
    "Cells",
    "DecodingLaw",
    "GTest",
    "Instance",
    "InstanceResult",
    "Law",
    "LosslessReport",
    "Shift",
    "audit_rules",
    "check_lossless",
    "count_outcomes",
    "decoding_law",
    "exact_law",
    "fit_test",
    "from_flat",
    "from_linked_list",
    "from_transformers",
    "g_test",
    "instances_for",
    "search",
)
