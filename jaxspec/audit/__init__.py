"""Proofs by counting: grids of draws, exact laws."""

from jaxspec.audit.grid import count_outcomes, single_path_counts, two_level_tree_counts
from jaxspec.audit.instances import Instance, instances_for
from jaxspec.audit.law import Cells, Law, exact_law, joint_law, replay, search
from jaxspec.audit.rounds import Capacity, Outcome, Round, World, make_round

__all__ = (
    "Capacity",
    "Cells",
    "Instance",
    "Law",
    "Outcome",
    "Round",
    "World",
    "count_outcomes",
    "exact_law",
    "instances_for",
    "joint_law",
    "make_round",
    "replay",
    "search",
    "single_path_counts",
    "two_level_tree_counts",
)
