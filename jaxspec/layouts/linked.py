"""Linked-list trees with coins, as sglang's kernels hold them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import TreeError, struct
from jaxspec.draws import Draws
from jaxspec.layouts.arrays import Array, library_of
from jaxspec.tiles import TILE
from jaxspec.transfers import moves_data
from jaxspec.trees import NONE, Tree, make_tree
from jaxspec.verify import Verdict


@struct
class LinkedTree:
    """A tree of candidates as sglang's kernels hold it, without its batch axis.

    Attributes:
      candidates: int [N], tokens; entry 0 is the root.
      retrive_index: int [N], index of each node in the arrays of the whole batch.
      retrive_next_token: int [N], first child of each node, -1 without children.
      retrive_next_sibling: int [N], next sibling of each node, -1 for the last.
    """

    candidates: jax.Array  # [N]
    retrive_index: jax.Array  # [N]
    retrive_next_token: jax.Array  # [N]
    retrive_next_sibling: jax.Array  # [N]


def _siblings(parents: Array) -> tuple[Array, Array]:
    """Return (whether [n, m] m is a child of n, whether m is an elder sibling of n), bool [N, N]."""
    nodes = library_of(parents).arange(parents.shape[0], dtype=np.int32)
    is_child = (parents[None] == nodes[:, None]) & (parents >= 0)[None]
    is_twin = (parents[None] == parents[:, None]) & (parents >= 0)[None]
    return is_child, is_twin & (nodes[None] < nodes[:, None])


def linked_from_tree(tokens: Array, parents: Array, first: int = 0) -> LinkedTree:
    """Link the children and siblings of a tree (traced).

    Args:
      tokens: int [N], as in `Tree`.
      parents: int [N], as in `Tree`; siblings are linked in the order of their numbers.
      first: index of the root in the arrays of the whole batch, b N for sequence b.

    Returns:
      The linked tree.

    >>> tree = linked_from_tree(np.array([-1, 5, 7, 2]), np.array([-1, 0, 0, 1]))
    >>> tree.retrive_next_token.tolist(), tree.retrive_next_sibling.tolist()
    ([1, 3, -1, -1], [-1, 2, -1, -1])
    """
    library = library_of(parents)
    is_child, is_elder = _siblings(parents)

    def lowest(is_wanted: Array) -> Array:
        found = library.argmax(is_wanted, axis=1).astype(np.int32)
        return library.where(is_wanted.any(axis=1), found, NONE)

    return LinkedTree(
        candidates=tokens,
        retrive_index=first + library.arange(parents.shape[0], dtype=np.int32),
        retrive_next_token=lowest(is_child),
        retrive_next_sibling=lowest(is_elder.T),
    )


@moves_data
def tree_from_linked(linked: LinkedTree) -> tuple[Tree, np.ndarray]:
    """Number the nodes of a linked tree level by level, siblings in their order, on the host.

    Args:
      linked: the tree of one sequence.

    Returns:
      (tree, nodes): nodes int [n], the linked node that each node of the tree is; its target rows are
      `target_probs[nodes]`. Nodes that no link reaches are left out.

    Raises:
      TreeError: a link leads to no node, or to one that was reached before; naming both.
    """
    child, sibling = (
        np.asarray(x).tolist() for x in (linked.retrive_next_token, linked.retrive_next_sibling)
    )
    nodes, parents = [0], [NONE]
    for place, node in enumerate(nodes):  # grows while it is read
        source, name, below = node, "retrive_next_token", child[node]
        while below != NONE:
            if not 0 < below < len(child) or below in nodes:
                fault = "which was reached before" if below in nodes else "which is no candidate"
                raise TreeError(f"{name}[{source}] is {below}, {fault}")
            nodes.append(below)
            parents.append(place)
            source, name, below = below, "retrive_next_sibling", sibling[below]
    tokens = np.asarray(linked.candidates)[nodes]
    return make_tree(tokens, parents), np.array(nodes)


def draws_from_coins(
    tree: Tree, coins: jax.Array, final_coin: jax.Array, target_rows: jax.Array
) -> Draws:
    """Return the draws with which `verify_tree` decides as sglang's rule does with coins (traced).

    sglang tosses one coin for all children of a node: a child is accepted if the coin is below the sum
    of its own and its elder siblings' probabilities. After a rejection the rest of the coin, rescaled
    to [0, 1), is the draw of the next child.

    Args:
      tree: point masses, siblings in sglang's order.
      coins: float32 [N], uniform_samples, of the nodes of `tree`.
      final_coin: float32 [], uniform_samples_for_final_sampling.
      target_rows: float32 [N, V], target_probs; V up to 512, since a larger vocabulary draws its final
        token with two numbers.

    Returns:
      The draws.

    Raises:
      ValueError: V is more than 512.
    """
    if (vocab := target_rows.shape[-1]) > TILE:
        raise ValueError(f"target_rows has {vocab} tokens: one final coin decides up to {TILE}")
    before, _ = _shares(tree, target_rows)
    rest = (coins[tree.parents] - before) / jnp.where(before < 1, 1 - before, 1.0)
    most = np.nextafter(np.float32(1), np.float32(0))
    return Draws(
        accept=jnp.clip(rest, 0.0, most),
        final=jnp.stack([jnp.zeros_like(final_coin), final_coin]),
    )


def coins_from_draws(
    tree: Tree, draws: Draws, target_rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the coins that decide as draws do, the opposite of `draws_from_coins` (traced).

    Args:
      tree: point masses.
      draws: the draws of `verify_tree`.
      target_rows: float32 [N, V].

    Returns:
      (uniform_samples [N], uniform_samples_for_final_sampling []). They are independent and uniform if
      the draws are. The coins of leaves are 0 and are never tossed.
    """
    before, own = _shares(tree, target_rows)
    tossed = before + draws.accept * (1 - before)
    is_child, _ = _siblings(tree.parents)
    is_accepted = is_child & (tossed < before + own)[None]
    first = jnp.argmax(is_accepted, axis=1)
    last = is_child.shape[1] - 1 - jnp.argmax(is_child[:, ::-1], axis=1)
    coins = tossed[jnp.where(is_accepted.any(axis=1), first, last)]
    return jnp.where(is_child.any(axis=1), coins, 0.0), draws.final[1]


def _shares(tree: Tree, target_rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return for each node (the probability of its elder siblings, its own), float32 [N]."""
    own = jnp.where(tree.parents >= 0, target_rows[tree.parents, tree.tokens], 0.0)
    _, is_elder = _siblings(tree.parents)
    return jnp.sum(jnp.where(is_elder, own[None], 0.0), axis=1), own


def linked_output(
    verdict: Verdict, linked: LinkedTree, nodes: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a verdict as sglang's kernel does (traced).

    Args:
      verdict: of one sequence.
      linked: its tree.
      nodes: int [n], the linked node of each node of the verifier's tree, see `tree_from_linked`.

    Returns:
      (predicts int32 [N], the token after each kept node, -1 elsewhere; accept_index int32 [D + 1],
      the kept nodes in the whole batch, from the root, then -1; accept_token_num int32 []).
    """
    num = linked.candidates.shape[0]
    kept = jnp.where(verdict.path >= 0, jnp.asarray(nodes, jnp.int32)[verdict.path], num)
    index = jnp.asarray(linked.retrive_index, jnp.int32)
    return (
        jnp.full(num, NONE, jnp.int32).at[kept].set(verdict.tokens, mode="drop"),
        jnp.where(verdict.path >= 0, index[jnp.minimum(kept, num - 1)], NONE),
        verdict.num_accepted,
    )


def emitted_from_linked(
    predicts: Array, accept_index: Array, accept_token_num: Array
) -> tuple[Array, Array]:
    """Return what a kernel's output for one sequence emits (traced).

    Args:
      predicts: int [B N], of the whole batch.
      accept_index: int [S], the row of the sequence.
      accept_token_num: int [], the accepted candidates.

    Returns:
      (emitted tokens int [S], kept slots of the whole batch int [S - 1] without the root), then -1.
    """
    library = library_of(predicts)
    places = library.arange(accept_index.shape[0], dtype=np.int32)
    is_kept = places <= accept_token_num
    emitted = library.where(is_kept, predicts[library.where(is_kept, accept_index, 0)], NONE)
    return emitted, library.where(is_kept, accept_index, NONE)[1:]
