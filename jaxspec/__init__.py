"""Verify speculative decoding in JAX: which drafted tokens a target model keeps, losslessly."""

from jaxspec.checks import DrawError, RowError, TreeError, raise_if
from jaxspec.draws import Draws, RoundDraws, draws_from_record, draws_to_record, round_draws
from jaxspec.logits import Logits
from jaxspec.proposals import (
    PointMass,
    Proposal,
    Rows,
    WithoutReplacement,
    WithReplacement,
    sampled_path,
)
from jaxspec.rows import Probabilities, dense_rows, draw_token, overlap
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
    "Rows",
    "Rule",
    "Status",
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
    "draws_from_record",
    "draws_to_record",
    "make_tree",
    "overlap",
    "raise_if",
    "round_draws",
    "sampled_path",
    "strict",
    "verify_block",
    "verify_path",
    "verify_traversal",
    "verify_tree",
)
