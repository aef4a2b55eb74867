"""Proofs by counting: grids of draws, exact laws."""

from jaxspec.audit.grid import count_outcomes, single_path_counts, two_level_tree_counts
from jaxspec.audit.instances import Instance, Outcome, Round, instances_for, make_round
from jaxspec.audit.law import Cells, Law, exact_law, joint_law, search

__all__ = (
    "Cells",
    "Instance",
    "Law",
    "Outcome",
    "Round",
    "count_outcomes",
    "exact_law",
    "instances_for",
    "joint_law",
    "make_round",
    "search",
    "single_path_counts",
    "two_level_tree_counts",
)
