"""Who asks the target for the rows of a tree, and when."""

from jaxspec.score.adapters import (
    Scores,
    node_contexts,
    score_batched,
    score_layered,
    score_sequential,
)
from jaxspec.score.network import TreeAttention
from jaxspec.score.tree_attention import block_mask, chain_mask, score_tree

__all__ = (
    "Scores",
    "TreeAttention",
    "block_mask",
    "chain_mask",
    "node_contexts",
    "score_batched",
    "score_layered",
    "score_sequential",
    "score_tree",
)
