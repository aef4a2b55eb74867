"""The arguments of a verifier: asserted, then brought to one form.

Every message names the argument, what was given and what to give.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import (
    assert_array,
    assert_kind,
    assert_told_apart,
    described,
    static_field,
    struct,
)
from jaxspec.draws import Draws, RoundDraws
from jaxspec.proposals import Proposal
from jaxspec.rows import RowsLike, RowSource, as_source, vocab_of
from jaxspec.trees import Tree, assert_tree

BOOLS = bool | int | float | np.generic | np.ndarray | jax.Array


@struct
class Arguments:
    """The arguments of a verifier for one sequence; in a walk, sources are apart from their slabs."""

    kind: type[Proposal] = static_field()
    draws: Draws
    tree: Tree
    target: RowSource
    draft: RowSource | None
    target_room: jax.Array  # [] rows of the target's slab from the sequence's first on
    draft_room: jax.Array  # [] rows of the draft's slab from the sequence's first on
    bonus: jax.Array  # [] whether a leaf's row is drawn from


def arguments(
    draws: Draws, proposal: Proposal, target_rows: RowsLike, bonus: jax.Array | bool
) -> Arguments:
    """Assert the arguments of a verifier, for one sequence, and return them with rows as sources.

    Raises:
      ValueError: an argument is of another type.
      AssertionError: a shape or dtype is wrong; a batch must be mapped by `jax.vmap`.
    """
    if isinstance(draws, RoundDraws):
        raise ValueError("draws is a RoundDraws, for draft and verifier: give its field `.verify`")
    assert_kind("draws", draws, Draws, "a Draws, such as round_draws(key, num_nodes).verify")
    target, draft = assert_proposal(proposal, target_rows)
    tree = proposal.tree
    assert_array("draws.accept", draws.accept, {"N": tree.max_nodes}, jnp.float32)
    assert_array("draws.final", draws.final, {"2": 2}, jnp.float32)
    assert_kind("bonus", bonus, BOOLS, "a bool")
    bonus = jnp.asarray(bonus)
    assert_array("bonus", bonus, {}, jnp.bool_)
    return Arguments(
        kind=type(proposal),
        draws=draws,
        tree=tree,
        target=target,
        draft=draft,
        target_room=_room(target),
        draft_room=_room(draft),
        bonus=bonus,
    )


def assert_proposal(
    proposal: Proposal, target_rows: RowsLike
) -> tuple[RowSource, RowSource | None]:
    """Assert a proposal and the rows that verify it; return (target, draft) rows as sources."""
    tree = _tree_of(proposal)
    target = as_source("target_rows", target_rows)
    assert_tree(tree)
    nodes = tree.max_nodes
    _assert_rows("target", target, (nodes,))
    if proposal.draft_rows is None:
        return target, None
    draft = as_source("proposal.draft_rows", proposal.draft_rows)
    _assert_rows("draft", draft, (nodes - 1, nodes))
    drafted, wanted = vocab_of(draft, draft.values), vocab_of(target, target.values)
    if drafted != wanted:
        raise AssertionError(
            f"draft rows have {drafted} entries, target rows {wanted}: pad both to one vocabulary, "
            "with probability 0 (logit -inf) for tokens that one of them lacks, or give `vocab` where "
            "rows are padded"
        )
    return target, draft if draft.values.shape[0] else None  # a path of no tokens has no rows


def _room(source: RowSource | None) -> jax.Array:
    """Count the rows of a slab from a sequence's first on; 0 if that lies outside."""
    if source is None or source.first is None:
        return jnp.int32(0 if source is None else source.values.shape[0])
    slab = jnp.int32(source.values.shape[0])
    is_inside = (source.first >= 0) & (source.first < slab)
    return jnp.where(is_inside, slab - source.first, 0).astype(jnp.int32)


def assert_path(proposal: Proposal) -> None:
    """Assert that a proposal has the capacity of a single path."""
    tree = _tree_of(proposal)
    if (tree.max_children, tree.max_depth) != (1, tree.max_nodes - 1):
        raise AssertionError(
            f"a path has one child slot and a depth for each drafted token: this tree has "
            f"{tree.max_nodes} nodes, {tree.max_children} child slots and depth {tree.max_depth}"
        )


def _tree_of(proposal: Any) -> Tree:
    kinds = (
        "PointMass(tree=...), WithReplacement(...), WithoutReplacement(...) or sampled_path(...)"
    )
    if isinstance(proposal, Tree):
        raise ValueError(
            f"proposal is a bare Tree: wrap it by how its candidates were drawn, in one of {kinds}"
        )
    if not isinstance(proposal, Proposal):
        raise ValueError(f"proposal is {described(proposal)}: must be one of {kinds}")
    assert_told_apart("proposal", proposal)
    assert_kind("proposal.tree", proposal.tree, Tree, "a Tree, such as make_tree(...)")
    if proposal.is_measured and proposal.draft_rows is None:
        raise ValueError(
            "proposal.draft_rows is None: sampled candidates need the rows they were drawn from; "
            "candidates that were not sampled are a PointMass"
        )
    if not proposal.is_measured and proposal.draft_rows is not None:
        raise ValueError("proposal.draft_rows is given: a PointMass was not drawn from a row")
    return proposal.tree


def _assert_rows(name: str, source: RowSource, counts: tuple[int, ...]) -> None:
    source.validate(name)
    rows, vocab = source.values.shape
    if vocab == 0:
        raise AssertionError(f"{name} rows have no entries: a vocabulary has at least one token")
    if source.first is None and rows not in counts:
        raise AssertionError(
            f"{name} rows: {rows} given, must be {' or '.join(map(str, counts))}"
            " (one for each node, the root's first)"
        )
    if source.first is not None:
        assert_array(f"{name} rows: first", source.first, {}, jnp.integer)
        if rows == 0:
            raise AssertionError(f"{name} rows: the slab is empty, so there is no row to start at")
