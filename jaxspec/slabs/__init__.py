"""Slabs whose entries are computed as they are read: sampler settings of single tokens, draft ids.

Where a source of rows takes an array [R, W], it takes a `Slab` as well:
`Logits(values=AdjustedLogits(values=logits, ...), temperature=...)`.
"""

from jaxspec.slabs.adjusted import AdjustedLogits, Penalties
from jaxspec.slabs.base import Slab
from jaxspec.slabs.bits import token_bits
from jaxspec.slabs.reduced import ReducedVocabulary

__all__ = ("AdjustedLogits", "Penalties", "ReducedVocabulary", "Slab", "token_bits")
