"""Shapes: a branching per depth, irregular trees, and their first nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js
from jaxspec.draft import Shape

IRREGULAR = Shape.of_choices([(1,), (0, 0, 1), (0,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0)])


def test_a_branching_gives_all_nodes_of_a_depth_equally_many_children() -> None:
    assert Shape.of_branching((2, 2, 1)).parents == (-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6)
    assert Shape.of_branching((1,) * 3).capacity == (4, 1, 3)
    for most in range(2, 9):
        assert Shape.of_branching((2, 1, 1), most).parents == (-1, 0, 0, 1, 2, 3, 4)[:most]
    wide = Shape.of_branching((10**9, 5), 6)
    assert wide.parents == (-1, 0, 0, 0, 0, 0)


def test_choices_are_paths_of_ranks_in_any_order() -> None:
    assert IRREGULAR.parents == (-1, 0, 0, 0, 1, 1, 2, 4, 4)
    assert IRREGULAR.capacity == (9, 3, 3)
    assert not IRREGULAR.capacity.is_path


def test_the_tree_of_a_shape_is_the_one_that_its_parents_describe() -> None:
    for shape in (IRREGULAR, Shape.of_branching((2, 1, 2)), Shape.of_branching((1, 1))):
        tokens = np.arange(len(shape.parents))
        made = js.make_tree(tokens, shape.parents)
        jax.tree.map(
            np.testing.assert_array_equal, shape.tree(jnp.asarray(tokens, jnp.int32)), made
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shape.of_choices([(0,), (2,)]), r"choice \(2,\) needs the choice \(1,\)"),
        (lambda: Shape.of_choices([(0,), (1, 0)]), r"choice \(1, 0\) needs the choice \(1,\)"),
        (lambda: Shape.of_choices([(0,), (0,)]), r"choice \(0,\) is given twice"),
        (lambda: Shape.of_choices([]), "2 to 4096 nodes, got 1"),
        (lambda: Shape.of_branching(()), r"shape is \(\): must be"),
        (lambda: Shape.of_branching((2, 0)), "the entry at depth 1 is 0"),
        (lambda: Shape.of_branching((1.5,)), "the entry at depth 0 is 1.5"),
        (lambda: Shape.of_branching((64, 64)), "more than 4096 nodes, .* give max_nodes"),
        (lambda: Shape.of_branching((2,), 1), "max_nodes is 1"),
        (lambda: Shape((-1, 0, 1, 0)), "that of node 3 is 0"),
        (lambda: Shape((-1, 1)), "parent 1 must be a node before it"),
    ],
)
def test_invalid_shapes_are_errors(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
