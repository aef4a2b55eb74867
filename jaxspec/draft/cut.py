"""Trees with nodes left out: candidates below a stop token, too deep, too many, or impossible.

In the shape descriptions N denotes the nodes that a tree has room for, K the stop tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.loops import while_loop
from jaxspec.rows import RowsLike, as_source
from jaxspec.slabs.base import AnySlab, take
from jaxspec.trees import NONE, ROOT, Tree, ancestor_mask, tree_of_parents


def cut_below(
    tree: Tree,
    stop_tokens: jax.Array,
    max_depth: jax.Array,
    max_nodes: jax.Array,
    is_in: jax.Array | None = None,
) -> tuple[Tree, jax.Array]:
    """Leave out nodes below a stop token, nodes too deep, and the last nodes where there are too many.

    Whether a node is left out depends on the nodes before it, never on its own token: this changes
    the tokens per round and never their law, also where the tokens were sampled.

    Args:
      tree: the candidates, level by level.
      stop_tokens: int32 [K], -1 for none.
      max_depth: int32 [], levels below the root.
      max_nodes: int32 [], the root counted.
      is_in: bool [N], nodes that count; None for all.

    Returns:
      (the tree, int32 [N] the number that each of its nodes had before, -1 on padding).
    """
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
    is_stop = jnp.any(tree.tokens[:, None] == stop_tokens[None], axis=1)
    is_stop &= (nodes > ROOT) & (tree.tokens >= 0)
    seen = ancestor_mask(tree)
    above = seen & (nodes[:, None] != nodes[None])
    depths = jnp.sum(above, axis=1, dtype=jnp.int32)
    keep = ~jnp.any(above & is_stop[None], axis=1) & (depths <= max_depth)
    if is_in is not None:
        keep &= ~jnp.any(seen & ~is_in[None], axis=1)
    keep &= jnp.cumsum(keep & _is_node(tree), dtype=jnp.int32) <= max_nodes
    return cut(tree, keep)


def cut(tree: Tree, keep: jax.Array) -> tuple[Tree, jax.Array]:
    """Leave nodes out of a tree, and all that is below them.

    Args:
      tree: the candidates, level by level.
      keep: bool [N]; its entries for the root and for padding are not read.

    Returns:
      (the tree of the same sizes, int32 [N] the number that each of its nodes had before, -1 on
      padding).

    >>> from jaxspec.trees import make_tree
    >>> tree = make_tree([-1, 5, 7, 2], [-1, 0, 0, 1])
    >>> tree, nodes = cut(tree, jnp.array([True, False, True, True]))
    >>> tree.tokens.tolist(), nodes.tolist()
    ([-1, 7, -1, -1], [0, 2, -1, -1])
    """
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
    keep = keep | (nodes == ROOT)
    is_in = _is_node(tree) & ~jnp.any(ancestor_mask(tree) & ~keep[None], axis=1)
    place = jnp.cumsum(is_in, dtype=jnp.int32) - 1
    where = jnp.where(is_in, place, tree.max_nodes)
    empty = jnp.full_like(nodes, NONE)
    above = jnp.where(tree.parents >= 0, place[jnp.maximum(tree.parents, 0)], NONE)
    cut_tree = tree_of_parents(
        empty.at[where].set(tree.tokens, mode="drop"),
        empty.at[where].set(above, mode="drop"),
        jnp.sum(is_in, dtype=jnp.int32),
        max_children=tree.max_children,
        max_depth=tree.max_depth,
    )
    return cut_tree, empty.at[where].set(nodes, mode="drop")


def node_rows(rows: RowsLike, nodes: jax.Array) -> RowsLike:
    """Return the draft rows of one tree after `cut` returned `nodes`: row n was row `nodes[n]`."""
    source = as_source("rows", rows)
    first = jnp.int32(0) if source.first is None else source.first
    at = jnp.arange(source.values.shape[0], dtype=jnp.int32) - first
    node = nodes[jnp.clip(at, 0, nodes.shape[0] - 1)]
    is_node = (at >= 0) & (at < nodes.shape[0]) & (node >= 0)
    from_row = jnp.where(is_node, node, at) + first
    is_moved = jnp.any(from_row != at + first)

    # A loop of one trip or none: nothing is copied where nothing is moved.
    def move(state: tuple[jax.Array, AnySlab]) -> tuple[jax.Array, AnySlab]:
        return jnp.zeros((), bool), take(state[1], from_row)

    values: Any
    _, values = while_loop(lambda state: state[0], move, (is_moved, source.values))
    return values if isinstance(rows, jax.Array) else dataclasses.replace(rows, values=values)


def _is_node(tree: Tree) -> jax.Array:
    return jnp.arange(tree.max_nodes, dtype=jnp.int32) < tree.num_nodes.astype(jnp.int32)
