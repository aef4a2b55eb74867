"""A batch of sequences through a network, one block each.

In the shape descriptions B denotes the batch, L the tokens of a block, N the nodes of a tree, S the
slots of a cache, V the vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.network import Block, Cache, LanguageModel


def _each(function: Callable[..., Any], cache: Cache, *arguments: Any) -> tuple[Any, Cache]:
    """Apply `function(cache, *arguments) -> (result, cache)` to each sequence of a batch.

    Arguments and results have a leading B. The cache of a batch has it too, that of a single
    sequence does not: XLA would copy the cache to take off an axis of one and put it back around
    every write. Without `vmap`, conditions also run one branch only, and loops copy no finished rows.
    """
    if jax.tree.leaves(arguments)[0].shape[0] > 1:
        return jax.vmap(function)(cache, *arguments)
    result, cache = function(cache, *jax.tree.map(lambda x: x[0], arguments))
    return jax.tree.map(lambda x: x[None], result), cache


def per_sequence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `vmap` of a function, except that a batch of one runs without `vmap`.

    >>> per_sequence(lambda row, at: row[at])(jnp.array([[3, 5]]), jnp.array([1])).tolist()
    [5]
    """

    def over_batch(*arguments: Any) -> Any:
        return _each(lambda _, *arguments: (function(*arguments), ()), (), *arguments)[0]

    return over_batch


@dataclasses.dataclass(frozen=True, eq=False)
class BatchedNetwork:
    """A network over a batch, its caches of `slots` slots each.

    Attributes:
      model: the network.
      slots: S.
      batch: B.
      vocab: V of the logits returned, if not the network's: tokens that the network lacks get -inf,
        those beyond V are dropped.
    """

    model: LanguageModel
    slots: int
    batch: int
    vocab: int | None = None

    def empty_cache(self) -> Cache:
        """Make an empty cache for each sequence."""
        cache = self.model.init_cache(self.slots)
        if self.batch > 1:
            return jax.tree.map(lambda x: jnp.repeat(x[None], self.batch, axis=0), cache)
        return jax.tree.map(jnp.copy, cache)  # fields may share a buffer, but each is donated once

    def forward(self, params: Any, cache: Cache, block: Block) -> tuple[jax.Array, Cache]:
        """Run a block of each sequence, every field with a leading B; logits are [B, L, V]."""
        guarded = self.model.guarded
        logits, cache = _each(lambda cache, block: guarded(params, cache, block), cache, block)
        if self.vocab is not None and self.vocab != self.model.vocab:
            logits = logits[..., : self.vocab]
            lacking = [(0, 0), (0, 0), (0, self.vocab - logits.shape[-1])]
            logits = jnp.pad(logits, lacking, constant_values=-jnp.inf)
        return logits, cache

    def text(
        self, params: Any, cache: Cache, tokens: jax.Array, first: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Run a span of each text, int32 [B, L], from slot and position `first` [B] on."""
        of_text = per_sequence(lambda tokens, first: Block.of_text(tokens, first, self.slots))
        return self.forward(params, cache, of_text(tokens, first))

    def nodes(
        self,
        params: Any,
        cache: Cache,
        tokens: jax.Array,
        depths: jax.Array,
        seen: jax.Array,
        root: jax.Array,
        offset: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache]:
        """Run consecutive nodes of each tree, the nodes before them being in the cache.

        Arguments are those of `Block.of_tree` with a leading B; `offset` may also be a scalar.
        """
        offset = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), (self.batch,))

        def one(
            tokens: jax.Array, depths: jax.Array, seen: jax.Array, root: Any, offset: Any
        ) -> Block:
            return Block.of_tree(tokens, depths, seen, root, self.slots, offset)

        return self.forward(params, cache, per_sequence(one)(tokens, depths, seen, root, offset))

    def fitting(
        self,
        params: Any,
        cache: Cache,
        block_sizes: Sequence[int],
        tokens: jax.Array,
        depths: jax.Array,
        seen: jax.Array | None,
        root: jax.Array,
        needed: jax.Array,
        is_end: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Run the first nodes of each tree, in the smallest block that holds the largest tree.

        Args:
          params: the network's parameters.
          cache: of the batch.
          block_sizes: compiled block sizes, increasing; the last is N.
          tokens: int32 [B, N].
          depths: int32 [B, N].
          seen: bool [B, N, N]; None for single paths.
          root: int32 [B].
          needed: int32 [], nodes of the largest tree.
          is_end: bool [B, N], nodes that end their text: their rows are zeros.

        Returns:
          (float32 [B, N, V], the cache). Rows of nodes that were not run are zeros.
        """

        def of_size(size: int, cache: Cache) -> tuple[jax.Array, Cache]:
            front = tokens[:, :size]
            if seen is None:
                logits, cache = self.text(params, cache, front, root)
            else:
                within = seen[:, :size, :size]
                logits, cache = self.nodes(params, cache, front, depths[:, :size], within, root)
            return jnp.where(is_end[:, :size, None], 0.0, logits), cache

        if len(block_sizes) == 1:
            return of_size(block_sizes[0], cache)
        # A cache that goes through `cond` or `switch` is copied twice each time; through a loop of
        # one or no trips it is not.
        chosen = jnp.sum(needed > jnp.asarray(block_sizes, jnp.int32), dtype=jnp.int32)
        logits = jnp.zeros((*tokens.shape, self.model.vocab), jnp.float32)
        for number, size in enumerate(block_sizes):

            def once(state: tuple[Any, Any, Cache], size: int = size) -> tuple[Any, Any, Cache]:
                _, logits, cache = state
                rows, cache = of_size(size, cache)
                written = lax.dynamic_update_slice(logits, rows, (0, 0, 0))
                return jnp.zeros((), bool), written, cache

            state = (chosen == number, logits, cache)
            _, logits, cache = lax.while_loop(lambda state: state[0], once, state)
        return logits, cache

    def prefill(
        self, params: Any, cache: Cache, tokens: jax.Array, chunk: jax.Array, width: int
    ) -> Cache:
        """Run one chunk of each text, from slot `chunk * width` on.

        Args:
          params: the network's parameters.
          cache: of the batch.
          tokens: int32 [B, S'], S' at least `(chunk + 1) * width`. What follows a text is run too,
            into slots that are overwritten before they are attended to.
          chunk: int32 [].
          width: tokens of a chunk.
        """
        span = lax.dynamic_slice_in_dim(tokens, chunk * width, width, axis=1)
        first = jnp.broadcast_to(chunk * width, (self.batch,))
        return self.text(params, cache, span, first)[1]

    def keep(self, cache: Cache, first: jax.Array, path: jax.Array) -> Cache:
        """Move the accepted slots of each block, path int32 [B, D + 1], to its front."""
        keep = self.model.keep
        if keep is None:
            raise AssertionError(f"{self.model.name}: trees need `keep`")
        return _each(
            lambda cache, first, path: (first, keep(cache, first, path)), cache, first, path
        )[1]
