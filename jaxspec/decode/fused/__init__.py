"""The loop as one compiled program, for networks with a cache."""

from jaxspec.build import Capacity
from jaxspec.decode.fused.adaptive import AdaptiveModelTree
from jaxspec.decode.fused.best_first import BestFirstTree
from jaxspec.decode.fused.drafters import Draft, FusedDrafter, Plain, View
from jaxspec.decode.fused.lookup import Lookup
from jaxspec.decode.fused.loop import FusedDecoder
from jaxspec.decode.fused.model_tree import ModelTree, model_path
from jaxspec.decode.fused.ngram import NGramTree
from jaxspec.decode.fused.state import Ending, FusedState, FusedText, Source, texts_of

__all__ = (
    "AdaptiveModelTree",
    "BestFirstTree",
    "Capacity",
    "Draft",
    "Ending",
    "FusedDecoder",
    "FusedDrafter",
    "FusedState",
    "FusedText",
    "Lookup",
    "ModelTree",
    "NGramTree",
    "Plain",
    "Source",
    "View",
    "model_path",
    "texts_of",
)
