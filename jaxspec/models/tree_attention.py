"""Score a whole tree with one forward of a network.

The nodes of a tree stand in consecutive slots of the cache, after the text; each sees the text, its
ancestors and itself, and stands at the position of its depth. So siblings, which have slots of their
own at one position, do not see each other, and row n is the one that the network gives for the
stretch of text that ends with node n.

In the shape descriptions L denotes the tokens of a block, N the nodes of a tree, S the slots of a
cache, V the vocabulary.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxspec.models.network import Cache, LanguageModel
from jaxspec.trees import Tree, ancestor_mask, assert_tree, node_depths


def block_mask(seen: jax.Array, at: jax.Array, slots: int) -> jax.Array:
    """Return which slots each token of a block sees: all before the block, and some of its own.

    Args:
      seen: bool [L, N], which of the nodes at slots at .. at + N - 1 each token sees.
      at: int32 [], the first slot of the nodes.
      slots: S.

    Returns:
      bool [L, S].

    >>> at = jnp.int32(2)
    >>> block_mask(jnp.array([[True, False], [True, True]]), at, slots=5).astype(int).tolist()
    [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    """
    chex.assert_rank([seen, at], [2, 0])
    offsets = jnp.arange(slots, dtype=jnp.int32) - at
    inside = seen[:, jnp.clip(offsets, 0, seen.shape[1] - 1)]
    return jnp.where((offsets < seen.shape[1])[None], inside | (offsets < 0)[None], False)


def chain_mask(length: int, at: jax.Array, slots: int) -> jax.Array:
    """Return which slots each token of a stretch of text sees: its own and all before it.

    Args:
      length: L.
      at: int32 [], the slot of the first token.
      slots: S.

    Returns:
      bool [L, S].

    >>> chain_mask(2, jnp.int32(1), slots=4).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0]]
    """
    own = at + jnp.arange(length, dtype=jnp.int32)
    return jnp.arange(slots, dtype=jnp.int32)[None] <= own[:, None]


def score_tree(
    model: LanguageModel,
    params: Any,
    cache: Cache,
    tree: Tree,
    at: jax.Array,
    *,
    slots: int,
) -> tuple[jax.Array, Cache]:
    """Run a network once over all nodes of a tree.

    Works under `jit` and `vmap`. A tree with one child slot is a stretch of text, which every
    network takes.

    Args:
      model: the network.
      params: its parameters.
      cache: holds the text before the root: slot i the token at position i, for all i < at.
      tree: the candidates. `tokens[0]` is read: it must be the last committed token.
      at: int32 [], slot and position of the root, from 0 to S - N. Nodes stand at slots
        at .. at + N - 1 in their order, and at positions at + depth.
      slots: S.

    Returns:
      (logits [N, V], row n after node n, of padding rows that mean nothing; the cache, which
      `model.keep` of a verdict's path turns into that of the accepted text).

    Raises:
      CacheError: there is room for siblings, and the network takes none.
    """
    assert_tree(tree)
    if tree.max_children > 1:
        model.assert_takes_trees()
    # Padding is shown as token 0 at the root's position: an id that a network does not have may
    # become NaN, which no mask hides.
    depths = node_depths(tree)
    mask = block_mask(ancestor_mask(tree), at, slots)
    return model.guarded(params, tree.tokens, at + depths, mask, cache, at)
