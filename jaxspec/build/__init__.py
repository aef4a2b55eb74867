"""Who is drafted: trees of candidates for a context, from a draft model or from a fixture."""

from jaxspec.build.cut import cut, cut_below, node_rows
from jaxspec.build.growth import (
    MAX_NODES,
    Capacity,
    Drafted,
    assert_between,
    capacity_of,
    count_nodes,
)
from jaxspec.build.likely import TINY, best_of, entropies, likeliest, normalised_entropy
from jaxspec.build.top_k import build_adaptive, build_from_depth_logits, build_top_k, top_k

__all__ = (
    "MAX_NODES",
    "TINY",
    "Capacity",
    "Drafted",
    "assert_between",
    "best_of",
    "build_adaptive",
    "build_from_depth_logits",
    "build_top_k",
    "capacity_of",
    "count_nodes",
    "cut",
    "cut_below",
    "entropies",
    "likeliest",
    "node_rows",
    "normalised_entropy",
    "top_k",
)
