"""Who asks the target for the rows of a tree, and when."""

from jaxspec.score.adapters import (
    Scores,
    node_contexts,
    score_batched,
    score_layered,
    score_sequential,
)

__all__ = ("Scores", "node_contexts", "score_batched", "score_layered", "score_sequential")
