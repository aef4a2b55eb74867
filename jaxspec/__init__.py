"""Lossless verification of speculative decoding in JAX."""

from jaxspec.checks import DrawError, RowError, TreeError, raise_if, struct
from jaxspec.draws import Draws, RoundDraws, round_draws
from jaxspec.logits import Logits
from jaxspec.proposals import (
    PointMass,
    Proposal,
    WithoutReplacement,
    WithReplacement,
    sampled_path,
)
from jaxspec.rows import Probabilities, RowSource, StoredRow, dense_rows
from jaxspec.tiles import draw_token
from jaxspec.trees import Tree, chain, make_tree
from jaxspec.verify import (
    RULES,
    Rule,
    Status,
    Verdict,
    checked,
    strict,
    verify_block,
    verify_path,
    verify_traversal,
    verify_tree,
)

__version__ = "0.1.0"

__all__ = (
    "RULES",
    "DrawError",
    "Draws",
    "Logits",
    "PointMass",
    "Probabilities",
    "Proposal",
    "RoundDraws",
    "RowError",
    "RowSource",
    "Rule",
    "Status",
    "StoredRow",
    "Tree",
    "TreeError",
    "Verdict",
    "WithReplacement",
    "WithoutReplacement",
    "__version__",
    "chain",
    "checked",
    "dense_rows",
    "draw_token",
    "make_tree",
    "raise_if",
    "round_draws",
    "sampled_path",
    "strict",
    "struct",
    "verify_block",
    "verify_path",
    "verify_traversal",
    "verify_tree",
)
