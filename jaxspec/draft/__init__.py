"""Drafters: what proposes the candidates of a round, the same classes for both decoding loops."""

from jaxspec.draft.adaptive import AdaptiveTree
from jaxspec.draft.base import Asked, Drafter, ModelDrafter, NoDraft, Proposed, View
from jaxspec.draft.best_first import BestFirstTree
from jaxspec.draft.drivers import HostDraft
from jaxspec.draft.likely import build_from_depth_logits, normalized_entropy, top_k
from jaxspec.draft.lookup import Lookup
from jaxspec.draft.ngram import NGramTree
from jaxspec.draft.policy import AdaptiveTreePolicy
from jaxspec.draft.shape import Capacity, Shape
from jaxspec.draft.tree import FixedTree, SampledPath

__all__ = (
    "AdaptiveTree",
    "AdaptiveTreePolicy",
    "Asked",
    "BestFirstTree",
    "Capacity",
    "Drafter",
    "FixedTree",
    "HostDraft",
    "Lookup",
    "ModelDrafter",
    "NGramTree",
    "NoDraft",
    "Proposed",
    "SampledPath",
    "Shape",
    "View",
    "build_from_depth_logits",
    "normalized_entropy",
    "top_k",
)
