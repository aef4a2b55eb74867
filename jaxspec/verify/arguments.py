"""What a verifier is called with, asserted before anything is traced: kinds, shapes, dtypes.

Every message names the argument, what was given and what to give.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_array, assert_kind, described
from jaxspec.draws import Draws, RoundDraws
from jaxspec.logits import Logits
from jaxspec.proposals import (
    PointMass,
    Proposal,
    Rows,
    WithoutReplacement,
    WithReplacement,
    assert_proposal,
)
from jaxspec.rows import Probabilities
from jaxspec.trees import Tree


def assert_arguments(
    draws: Draws, proposal: Proposal, target_rows: Rows, bonus: jax.Array | bool
) -> None:
    """Assert the arguments of a verifier, for one sequence.

    Raises:
      ValueError: an argument is of another kind.
      AssertionError: a shape or dtype is wrong; for a batch, the call is to be mapped by `jax.vmap`.
    """
    if isinstance(draws, RoundDraws):
        raise ValueError("draws is a RoundDraws, of draft and verifier: give its part `.verify`")
    assert_kind("draws", draws, Draws, "a Draws, such as round_draws(key, num_nodes).verify")
    _assert_is_proposal(proposal)
    wanted = "an array [N, V] of probabilities, a Probabilities or a Logits"
    assert_kind("target_rows", target_rows, jax.Array | Probabilities | Logits, wanted)
    assert_proposal(proposal, target_rows)
    nodes = proposal.tree.max_nodes
    assert_array("draws.accept", draws.accept, {"N": nodes}, jnp.float32)
    assert_array("draws.final", draws.final, {"2": 2}, jnp.float32)
    assert_kind("bonus", bonus, bool | int | float | np.generic | np.ndarray | jax.Array, "a bool")
    assert_array("bonus", jnp.asarray(bonus), {}, jnp.bool_)


def assert_path(proposal: Proposal) -> None:
    """Assert that a proposal has room for a single path only."""
    _assert_is_proposal(proposal)
    tree = proposal.tree
    if (tree.max_children, tree.max_depth) != (1, tree.max_nodes - 1):
        raise AssertionError(
            f"a path has one child slot and a depth for each drafted token: this tree has "
            f"{tree.max_nodes} nodes, {tree.max_children} child slots and depth {tree.max_depth}"
        )


def _assert_is_proposal(proposal: Any) -> None:
    kinds = (
        "PointMass(tree=...), WithReplacement(...), WithoutReplacement(...) or sampled_path(...)"
    )
    if isinstance(proposal, Tree):
        raise ValueError(
            f"proposal is a bare Tree: say how its candidates were drawn, by one of {kinds}"
        )
    if isinstance(proposal, PointMass | WithReplacement | WithoutReplacement):
        assert_kind("proposal.tree", proposal.tree, Tree, "a Tree, such as make_tree(...)")
    if not isinstance(getattr(proposal, "tree", None), Tree):
        raise ValueError(f"proposal is {described(proposal)}: must be one of {kinds}")
