"""A tree of candidates as arrays.

Node 0 is the root: the last committed token. Parents come before their children, and siblings are
ordered by node number, which is the order they are tested in. Capacities (nodes, children of a node,
depth) are read off the shapes, so trees of one capacity share one compiled program.
"""

from collections.abc import Sequence
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import TreeError, assert_array, check_all, struct
from jaxspec.transfers import moves_data

GREATEST = 2**24
"""Limit of the capacities of a tree: nodes, child slots, levels."""

ROOT = 0
NONE = -1
TORN = -2
"""Padding: the parent of the root, an empty child slot, a padded node, a token not emitted."""


@struct
class Tree:
    """Candidates by parent.

    Attributes:
      tokens: int32 [N], the candidate at each node; entry 0 is the last committed token, which no
        verifier reads (-1 if unknown). -1 on padding.
      parents: int32 [N], node number of the parent; -1 for the root and on padding.
      children: int32 [N, C], node numbers of the children in the order they are tested, then -1.
      level_sizes: int32 [D + 1], nodes at each depth; `level_sizes[0] == 1`. Padded nodes come
        after the real ones and are not counted.
    """

    tokens: jax.Array  # [N]
    parents: jax.Array  # [N]
    children: jax.Array  # [N, C]
    level_sizes: jax.Array  # [D + 1]

    @property
    def max_nodes(self) -> int:
        """N, including the root and padding."""
        return self.parents.shape[-1]

    @property
    def max_children(self) -> int:
        """C, child slots of a node."""
        return self.children.shape[-1]

    @property
    def max_depth(self) -> int:
        """D, the capacity in depth."""
        return self.level_sizes.shape[-1] - 1

    @property
    def num_nodes(self) -> jax.Array:
        """Nodes that are not padding, including the root."""
        return self.level_sizes.sum(axis=-1, dtype=self.level_sizes.dtype)

    @property
    def tokens_above(self) -> jax.Array:
        """The candidates from the root's child down to each node, itself included, then -1, [N, D].

        Those that were drafted before what the node's row scores; for one tree, traced.

        >>> make_tree([-1, 5, 7, 2], [-1, 0, 0, 1]).tokens_above.tolist()
        [[-1, -1], [5, -1], [7, -1], [5, 2]]
        """
        depths, sees = node_depths(self), ancestor_mask(self)
        levels = jnp.arange(1, self.max_depth + 1, dtype=jnp.int32)[None, None]
        is_at = sees[:, :, None] & (depths[None, :, None] == levels)
        return jnp.max(jnp.where(is_at, self.tokens[None, :, None], NONE), axis=1, initial=NONE)


@moves_data
def make_tree(
    tokens: Sequence[int] | np.ndarray,
    parents: Sequence[int] | np.ndarray,
    *,
    max_nodes: int | None = None,
    max_children: int | None = None,
    max_depth: int | None = None,
    distinct_siblings: bool = True,
) -> Tree:
    """Build a tree on the host from the token and the parent of each node.

    Args:
      tokens: int [n], candidate tokens; `tokens[0]` is the last committed token, or -1.
      parents: int [n], `parents[0] == -1`; every other parent comes before its child.
      max_nodes: capacity N, default n.
      max_children: capacity C, default the greatest number of siblings (at least 1).
      max_depth: capacity D, default the depth of the tree.
      distinct_siblings: raise if two siblings hold one token, which point masses and drafts without
        replacement do not allow. Siblings drawn with replacement may repeat.

    Raises:
      TreeError: naming the node and the value.

    >>> tree = make_tree([-1, 5, 7, 2], [-1, 0, 0, 1])
    >>> tree.children.tolist()
    [[1, 2], [3, -1], [-1, -1], [-1, -1]]
    >>> tree.level_sizes.tolist()
    [1, 2, 1]
    """
    tokens, parents = _integers("tokens", tokens), _integers("parents", parents)
    if len(tokens) != len(parents) or len(parents) == 0:
        given = f"got {len(tokens)} tokens and {len(parents)} parents"
        raise TreeError(
            f"a tree has a token and a parent for each node, at least the root: {given}"
        )
    if parents[0] != NONE:
        raise TreeError(f"node 0 is the root: its parent must be -1, not {parents[0]}")
    if not NONE <= tokens[0] < 2**31:
        raise TreeError(f"node 0: token {tokens[0]} must be an int32, -1 if it is unknown")
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    seen: dict[tuple[int, int], int] = {}  # the first child of a parent that holds a token
    candidates = zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True)
    for node, (token, parent) in enumerate(candidates, 1):
        if not 0 <= parent < node:
            raise TreeError(f"node {node}: parent {parent} must be a node before it")
        if not 0 <= token < 2**31:
            raise TreeError(f"node {node}: token {token} must be a non-negative int32")
        twin = seen.setdefault((parent, token), node)
        if distinct_siblings and twin != node:
            raise TreeError(f"nodes {twin} and {node}: siblings with one token, {token}")
        children[parent].append(node)
        depths[node] = depths[parent] + 1
    num_nodes = _capacity("max_nodes", len(parents), max_nodes)
    num_slots = _capacity("max_children", max(1, *map(len, children)), max_children)
    num_levels = _capacity("max_depth", max(depths), max_depth) + 1
    slots = np.full((num_nodes, num_slots), NONE, np.int32)
    for node, below in enumerate(children):
        slots[node, : len(below)] = below
    padding = (0, num_nodes - len(parents))
    return Tree(
        tokens=jnp.asarray(np.pad(tokens, padding, constant_values=NONE), jnp.int32),
        parents=jnp.asarray(np.pad(parents, padding, constant_values=NONE), jnp.int32),
        children=jnp.asarray(slots),
        level_sizes=jnp.asarray(np.bincount(depths, minlength=num_levels), jnp.int32),
    )


def _capacity(name: str, used: int, wanted: int | None) -> int:
    if wanted is None:
        return used
    is_integer = isinstance(wanted, int | np.integer) and not isinstance(wanted, bool)
    if not is_integer or wanted > GREATEST:
        raise TreeError(f"{name} is {wanted!r}: must be an integer, at most {GREATEST}")
    if wanted < used:
        raise TreeError(f"{name}={wanted} is too small: this tree needs {used}")
    return int(wanted)


def _integers(name: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise TreeError(f"{name} must be a list of integers, got {values!r}") from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TreeError(f"{name} must be a list of integers, got {values!r}")
    return array


def chain(tokens: jax.Array, num_drafted: jax.Array | int | None = None) -> Tree:
    """Build the tree of a single path; works under `jit` and `vmap`.

    Args:
      tokens: int32 [T], the drafted tokens in order.
      num_drafted: int32 [], how many of them count, 0 to T; the rest is padding. Default T. For
        sampled tokens it may depend on the context and on the tokens that count: stopping after a
        token because of its value keeps the law, dropping it because of its value does not. For
        point masses it may depend on anything but the round's draws.

    Returns:
      A tree with N = T + 1, C = 1, D = T: node i + 1 is the i-th drafted token.

    Raises:
      TreeError: `num_drafted` is concrete and outside 0 to T. Under a trace the tree then has that
        number of nodes, which `checked` reports and the verifiers flag: `Status.BAD_TREE`.

    >>> import jax.numpy as jnp
    >>> chain(jnp.array([5, 7, 2]), num_drafted=2).parents.tolist()
    [-1, 0, 1, -1]
    """
    assert_array("tokens", tokens, {"T": None}, jnp.integer)
    num_tokens = tokens.shape[0]
    given = jnp.asarray(num_tokens if num_drafted is None else num_drafted)
    assert_array("num_drafted", given, {}, jnp.integer)
    is_known = not isinstance(given, jax.core.Tracer)
    if is_known and not 0 <= int(given) <= num_tokens:
        raise TreeError(f"num_drafted is {given}: must be 0 to {num_tokens}, the number of tokens")
    length = jnp.clip(given, 0, num_tokens).astype(jnp.int32)
    nodes = jnp.arange(num_tokens + 1, dtype=jnp.int32)
    is_node = nodes <= length
    nowhere = jnp.full((1,), NONE, jnp.int32)
    return Tree(
        tokens=jnp.where(is_node, jnp.concatenate([nowhere, tokens.astype(jnp.int32)]), NONE),
        parents=jnp.where(is_node, nodes - 1, NONE),
        children=jnp.where(nodes < length, nodes + 1, NONE)[:, None],
        level_sizes=_with_excess(is_node.astype(jnp.int32), given, length),
    )


def _with_excess(level_sizes: jax.Array, given: jax.Array, used: jax.Array) -> jax.Array:
    """Add to the root's count by how much a number of nodes is out of range, so that it shows."""
    excess = jnp.clip(given, -(2**30), 2**30).astype(jnp.int32) - used
    return level_sizes.at[ROOT].add(excess)


def tree_of_parents(
    tokens: jax.Array,
    parents: jax.Array,
    num_nodes: jax.Array,
    *,
    max_children: int,
    max_depth: int,
) -> Tree:
    """Build a tree under a trace from tokens and parents [N], in the order of their depth.

    Nothing is checked: no parent may have more than C children or more than D ancestors. A number of
    nodes, including the root, outside 1 to N shows in `Tree.num_nodes`, for `checked` and verifiers.

    >>> import jax.numpy as jnp
    >>> tokens, parents = jnp.array([-1, 5, 7, 2]), jnp.array([-1, 0, 0, 1])
    >>> tree = tree_of_parents(tokens, parents, jnp.int32(3), max_children=2, max_depth=2)
    >>> tree.level_sizes.tolist()
    [1, 2, 0]
    """
    nodes = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    below_root = (nodes > ROOT) & (nodes < num_nodes)
    bare = Tree(
        tokens=jnp.where(nodes < num_nodes, tokens, NONE),
        parents=jnp.where(below_root, parents, NONE),
        children=jnp.full((tokens.shape[0], max_children), NONE, jnp.int32),
        level_sizes=jnp.zeros(max_depth + 1, jnp.int32),
    )
    count = jnp.clip(num_nodes, 1, tokens.shape[0]).astype(jnp.int32)
    sizes = _level_sizes(bare, node_depths(bare), nodes < num_nodes)
    return replace(
        bare,
        children=_child_slots(bare, below_root),
        level_sizes=_with_excess(sizes, num_nodes, count),
    )


def assert_tree(tree: Tree) -> None:
    """Assert the static shapes and dtypes of a tree."""
    nodes = None if jnp.ndim(tree.parents) != 1 else tree.max_nodes
    for name, axes in (
        ("parents", {"N": None}),
        ("tokens", {"N": nodes}),
        ("children", {"N": nodes, "C": None}),
        ("level_sizes", {"D + 1": None}),
    ):
        assert_array(f"tree.{name}", getattr(tree, name), axes, jnp.int32)
    chex.assert_axis_dimension_gt(tree.level_sizes, 0, 0)
    chex.assert_axis_dimension_gt(tree.children, 1, 0)


def check_tree(tree: Tree, vocab: int, *, distinct_siblings: bool) -> None:
    """Check under a trace: topology, padding, tokens in range, distinct siblings where needed."""
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
    tokens, parents, count = tree.tokens, tree.parents, tree.num_nodes
    is_node = nodes < count
    below_root = is_node & (nodes > ROOT)
    message = f"the tree counts {{count}} nodes: it must be from 1 to {tree.max_nodes}"
    check_all((count >= 1) & (count <= tree.max_nodes), message, count=count)
    message = "node {i0}: parent {parent} does not come before it"
    check_all(~below_root | ((parents >= 0) & (parents < nodes)), message, parent=parents)
    message = "node {i0} is the root or padding: its parent must be -1, not {parent}"
    check_all(below_root | (parents == NONE), message, parent=parents)
    message = f"node {{i0}}: token {{token}} is outside the vocabulary of {vocab}"
    check_all(~below_root | ((tokens >= 0) & (tokens < vocab)), message, token=tokens)
    message = "node {i0} is padding: its token must be -1, not {token}"
    check_all(is_node | (tokens == NONE), message, token=tokens)
    depths = node_depths(tree)
    message = f"node {{i0}} is deeper than the {tree.max_depth} levels of the tree"
    check_all(~below_root | (depths[parents] < tree.max_depth), message)
    real = _level_sizes(tree, depths, below_root | (nodes == ROOT))
    message = "depth {i0}: level_sizes has {size} nodes, the parents give {real}"
    check_all(tree.level_sizes == real, message, size=tree.level_sizes, real=real)
    slots = tree.max_children
    message = f"node {{i0}}: its parent {{parent}} has more children than its {slots} slots"
    check_all(_sibling_ranks(tree, below_root) < slots, message, parent=parents)
    real = _child_slots(tree, below_root)
    message = "node {i0}: child slot {i1} holds {child}, the parents give {real}"
    check_all(tree.children == real, message, child=tree.children, real=real)
    if distinct_siblings:
        same = _siblings(tree, below_root) & (nodes[:, None] > nodes[None])
        same &= tokens[:, None] == tokens[None]
        message = "nodes {i1} and {i0}: siblings with one token, {token}"
        check_all(~same, message, token=jnp.broadcast_to(tokens[:, None], same.shape))


def ancestor_mask(tree: Tree) -> jax.Array:
    """Return which nodes each node sees under tree attention, bool [N, N]: itself and its ancestors.

    Padded nodes see themselves and are seen by no other node.

    >>> ancestor_mask(make_tree([-1, 5, 7, 2], [-1, 0, 0, 1])).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
    seen = nodes[:, None] == nodes[None]
    at = nodes
    for _ in range(tree.max_depth):
        at = jnp.where(at > ROOT, tree.parents[at], ROOT)
        seen |= (at[:, None] == nodes[None]) & (tree.parents >= 0)[:, None]
    return seen


def node_depths(tree: Tree) -> jax.Array:
    """Return the depth of every node, int32 [N]: 0 for the root and on padding.

    >>> node_depths(make_tree([-1, 5, 7, 2], [-1, 0, 0, 1], max_nodes=5)).tolist()
    [0, 1, 1, 2, 0]
    """
    return jnp.sum(ancestor_mask(tree), axis=1, dtype=jnp.int32) - 1


def child_slots(tree: Tree) -> jax.Array:
    """Return the children of every node by rank, int32 [N, C + 1]; the last column is `NONE`.

    Slots count only if they rise and the nodes in them have this node as their parent, so that a walk
    visits no node twice, whatever the slots hold. The others are `NONE` if empty, else `TORN`.
    """
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)[:, None]
    elder = jnp.concatenate([nodes, tree.children[:, :-1]], axis=1)
    inside = jnp.clip(tree.children, 0, tree.max_nodes - 1)
    is_child = (tree.children > nodes) & (tree.children > elder) & (tree.children == inside)
    is_child &= tree.parents[inside] == nodes
    absent = jnp.where(tree.children == NONE, NONE, TORN)
    slots = jnp.where(is_child, tree.children, absent)
    return jnp.pad(slots, ((0, 0), (0, 1)), constant_values=NONE)


def _level_sizes(tree: Tree, depths: jax.Array, is_node: jax.Array) -> jax.Array:
    """Count the nodes at each depth."""
    levels = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)
    is_at = (depths[None] == levels[:, None]) & is_node[None]
    return jnp.sum(is_at, axis=1, dtype=jnp.int32)


def _siblings(tree: Tree, below_root: jax.Array) -> jax.Array:
    """Return which pairs of nodes have one parent, bool [N, N]."""
    has_same_parent = tree.parents[:, None] == tree.parents[None]
    return has_same_parent & below_root[:, None] & below_root[None]


def _sibling_ranks(tree: Tree, below_root: jax.Array) -> jax.Array:
    """Count the elder siblings of every node, int32 [N]."""
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
    elder = _siblings(tree, below_root) & (nodes[None] < nodes[:, None])
    return jnp.sum(elder, axis=1, dtype=jnp.int32)


def _child_slots(tree: Tree, below_root: jax.Array) -> jax.Array:
    """Derive the child slots from the parents."""
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
    parent = jnp.where(below_root, tree.parents, tree.max_nodes)
    rank = _sibling_ranks(tree, below_root)
    return jnp.full_like(tree.children, NONE).at[parent, rank].set(nodes, mode="drop")
