"""Layouts in which serving engines hold a round, converted to the records of jaxspec and back.

Flat batches (vLLM, tpu-inference), one sequence of logits (transformers), linked-list trees with coins
(sglang), from their public signatures, with their names.

Functions marked "traced" have static shapes and run under `jit` and `vmap`; the others run on the
host, where shapes or checks depend on values. NumPy arrays in give NumPy arrays out.
"""

from jaxspec.layouts.assisted import assisted_from_path, assisted_output, path_from_assisted
from jaxspec.layouts.beside import accept_probs, emitted_log_probs, synthetic_output
from jaxspec.layouts.flat import (
    FlatBatch,
    emitted_from_flat,
    flat_from_paths,
    flat_output,
    path_at,
    paths_from_flat,
)
from jaxspec.layouts.linked import (
    LinkedTree,
    coins_from_draws,
    draws_from_coins,
    emitted_from_linked,
    linked_from_tree,
    linked_output,
    tree_from_linked,
)
from jaxspec.layouts.trees import verify_trees
from jaxspec.layouts.verify import FlatOutput, request_draws, request_keys, verify_flat

__all__ = (
    "FlatBatch",
    "FlatOutput",
    "LinkedTree",
    "accept_probs",
    "assisted_from_path",
    "assisted_output",
    "coins_from_draws",
    "draws_from_coins",
    "emitted_from_flat",
    "emitted_from_linked",
    "emitted_log_probs",
    "flat_from_paths",
    "flat_output",
    "linked_from_tree",
    "linked_output",
    "path_at",
    "path_from_assisted",
    "paths_from_flat",
    "request_draws",
    "request_keys",
    "synthetic_output",
    "tree_from_linked",
    "verify_flat",
    "verify_trees",
)
