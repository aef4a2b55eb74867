"""Who is drafted: trees of candidates for a context, from a draft model or from a fixture."""

from jaxspec.build.growth import Capacity, Drafted
from jaxspec.build.top_k import (
    build_adaptive,
    build_from_depth_logits,
    build_top_k,
    normalised_entropy,
    top_k,
)

__all__ = (
    "Capacity",
    "Drafted",
    "build_adaptive",
    "build_from_depth_logits",
    "build_top_k",
    "normalised_entropy",
    "top_k",
)
