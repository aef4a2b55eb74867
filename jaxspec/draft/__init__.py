"""Drafters: who proposes the candidates of a round, for both decoding loops."""

from jaxspec.draft.adaptive import AdaptiveModelTree
from jaxspec.draft.base import FusedDrafter, NetworkDraft, Plain, View
from jaxspec.draft.best_first import BestFirstTree
from jaxspec.draft.bounds import Bounds
from jaxspec.draft.cut import cut, cut_below, node_rows
from jaxspec.draft.growth import (
    MAX_NODES,
    Capacity,
    Drafted,
    capacity_of,
    count_nodes,
)
from jaxspec.draft.host import AdaptiveTree, Draft, Drafter, FixedTree, NoDraft, SampledPath
from jaxspec.draft.likely import TINY, best_of, entropies, likeliest, normalised_entropy
from jaxspec.draft.lookup import Lookup
from jaxspec.draft.ngram import NGramTree
from jaxspec.draft.policy import AdaptiveTreePolicy
from jaxspec.draft.top_k import build_adaptive, build_from_depth_logits, build_top_k, top_k
from jaxspec.draft.tree import ModelTree, model_path

__all__ = (
    "MAX_NODES",
    "TINY",
    "AdaptiveModelTree",
    "AdaptiveTree",
    "AdaptiveTreePolicy",
    "BestFirstTree",
    "Bounds",
    "Capacity",
    "Draft",
    "Drafted",
    "Drafter",
    "FixedTree",
    "FusedDrafter",
    "Lookup",
    "ModelTree",
    "NGramTree",
    "NetworkDraft",
    "NoDraft",
    "Plain",
    "SampledPath",
    "View",
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
    "model_path",
    "node_rows",
    "normalised_entropy",
    "top_k",
)
