"""Trees of candidates as arrays: built on the host, or as a chain under a trace."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js

TOKENS, PARENTS = [-1, 5, 7, 2, 5, 9], [-1, 0, 0, 1, 1, 3]


def as_lists(tree: js.Tree) -> dict[str, list]:
    return {name: np.asarray(value).tolist() for name, value in vars(tree).items()}


def test_a_tree_is_laid_out_by_parent_in_the_order_of_its_nodes() -> None:
    tree = js.make_tree(TOKENS, PARENTS)
    assert as_lists(tree) == {
        "tokens": TOKENS,
        "parents": PARENTS,
        "children": [[1, 2], [3, 4], [-1, -1], [5, -1], [-1, -1], [-1, -1]],
        "level_sizes": [1, 2, 2, 1],
    }
    assert (tree.max_nodes, tree.max_children, tree.max_depth) == (6, 2, 3)
    assert int(tree.num_nodes) == 6
    assert all(array.dtype == jnp.int32 for array in jax.tree.leaves(tree))


def test_capacity_pads_a_tree_and_changes_nothing_in_it() -> None:
    tree = as_lists(js.make_tree(TOKENS, PARENTS))
    wide = js.make_tree(TOKENS, PARENTS, max_nodes=8, max_children=3, max_depth=5)
    assert as_lists(wide) == {
        "tokens": [*tree["tokens"], -1, -1],
        "parents": [*tree["parents"], -1, -1],
        "children": [[*slots, -1] for slots in tree["children"]] + [[-1] * 3] * 2,
        "level_sizes": [*tree["level_sizes"], 0, 0],
    }
    assert int(wide.num_nodes) == 6


def test_nodes_may_be_in_depth_first_order() -> None:
    tree = js.make_tree([-1, 5, 2, 7], [-1, 0, 1, 0])
    assert tree.children.tolist() == [[1, 3], [2, -1], [-1, -1], [-1, -1]]
    assert tree.level_sizes.tolist() == [1, 2, 1]


def test_the_root_alone_is_a_tree() -> None:
    tree = js.make_tree([3], [-1])
    assert as_lists(tree) == {
        "tokens": [3],
        "parents": [-1],
        "children": [[-1]],
        "level_sizes": [1],
    }
    assert tree.max_depth == 0


INVALID = (
    ([-1, 5], [0, 0], {}, "node 0 is the root: its parent must be -1, not 0"),
    ([-1, 5], [-1, 1], {}, "node 1: parent 1 must be a node before it"),
    ([-1, 5, 6], [-1, 2, 0], {}, "node 1: parent 2 must be a node before it"),
    ([-1, 5], [-1, -1], {}, "node 1: parent -1 must be a node before it"),
    ([-1, -5], [-1, 0], {}, "node 1: token -5 must be a non-negative int32"),
    ([-1, 2**31], [-1, 0], {}, "node 1: token 2147483648 must be a non-negative int32"),
    ([-1, 4, 6, 4], [-1, 0, 0, 0], {}, "nodes 1 and 3: siblings with one token, 4"),
    ([-1, 5], [-1], {}, "got 2 tokens and 1 parents"),
    ([], [], {}, "integers|at least the root"),
    ([-1.0, 5.0], [-1, 0], {}, "tokens must be a list of integers"),
    ([-1, 5], [-1.0, 0.0], {}, "parents must be a list of integers"),
    ([[-1, 5]], [-1, 0], {}, "tokens must be a list of integers"),
    ([-1, [5, 6]], [-1, 0], {}, "tokens must be a list of integers"),
    ([2**40, 5], [-1, 0], {}, "node 0: token 1099511627776"),
    ([-7, 5], [-1, 0], {}, "node 0: token -7"),
    (TOKENS, PARENTS, {"max_nodes": 5}, "max_nodes=5 is too small: this tree needs 6"),
    (TOKENS, PARENTS, {"max_children": 1}, "max_children=1 is too small: this tree needs 2"),
    (TOKENS, PARENTS, {"max_depth": 2}, "max_depth=2 is too small: this tree needs 3"),
)


def test_an_invalid_tree_is_named_with_the_node_and_the_value() -> None:
    for tokens, parents, sizes, message in INVALID:
        with pytest.raises(js.TreeError, match=message):
            js.make_tree(tokens, parents, **sizes)


def test_siblings_may_repeat_where_they_were_drawn_with_replacement() -> None:
    tree = js.make_tree([-1, 4, 4], [-1, 0, 0], distinct_siblings=False)
    assert tree.tokens.tolist() == [-1, 4, 4]


def test_one_token_may_be_below_different_parents() -> None:
    js.make_tree([-1, 4, 6, 4, 4], [-1, 0, 0, 1, 2])


@pytest.mark.parametrize("length", [0, 2, 3])
def test_a_chain_is_the_padded_tree_of_one_path_under_jit_and_vmap(length: int) -> None:
    tokens = jnp.array([5, 7, 2])
    wanted = js.make_tree(
        [-1, *tokens.tolist()][: length + 1],
        list(range(-1, length)),
        max_nodes=4,
        max_children=1,
        max_depth=3,
    )
    assert as_lists(js.chain(tokens, length)) == as_lists(wanted)
    assert as_lists(jax.jit(js.chain)(tokens, jnp.int32(length))) == as_lists(wanted)
    batch = jax.vmap(js.chain, in_axes=(None, 0))(tokens, jnp.arange(4))
    assert as_lists(jax.tree.map(lambda x: x[length], batch)) == as_lists(wanted)


def test_a_chain_counts_all_its_tokens_by_default() -> None:
    tokens = jnp.array([5, 7])
    assert as_lists(js.chain(tokens)) == as_lists(js.chain(tokens, 2))
    assert js.chain(jnp.zeros(0, jnp.int32)).children.tolist() == [[-1]]


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(jnp.zeros((1, 2), jnp.int32), None), (jnp.zeros(2), None), (jnp.array([1]), jnp.array([1]))],
)
def test_a_chain_of_wrong_rank_or_dtype_is_rejected(tokens: jax.Array, length: Any) -> None:
    with pytest.raises(AssertionError):
        js.chain(tokens, length)


def test_a_tree_of_wrong_shapes_or_dtypes_is_rejected_by_the_verifiers() -> None:
    tree = js.make_tree(TOKENS, PARENTS)
    draws, rows = js.round_draws(jax.random.key(0), 6).verify, jnp.full((6, 10), 0.1)
    for change in (
        {"tokens": tree.tokens[:5]},
        {"parents": tree.parents.astype(jnp.float32)},
        {"children": tree.children[0]},
        {"children": tree.children[:, :0]},
        {"level_sizes": tree.level_sizes[:0]},
        {"tokens": tree.tokens.astype(jnp.int16)},
    ):
        proposal = js.PointMass(tree=dataclasses.replace(tree, **change))
        with pytest.raises(AssertionError):
            js.verify_tree(draws, proposal, rows)
