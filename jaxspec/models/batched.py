"""A batch of sequences through a network, a block at a time.

In the shape descriptions B denotes the batch, L the tokens of a block, N the nodes of a tree, S the
slots of a cache, V the vocabulary.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.each import per_sequence
from jaxspec.models.network import Cache, LanguageModel
from jaxspec.models.tree_attention import block_mask, chain_mask


@dataclasses.dataclass(frozen=True, eq=False)
class BatchedNetwork:
    """A network over a batch, with caches of so many slots.

    The cache of a batch has a leading B in every field, that of a single sequence has not: a leading
    axis of one would be taken off and put back around every write, and XLA then copies the cache.

    Attributes:
      model: the network.
      slots: S.
      batch: B.
      vocab: V of the logits that it gives, if not the network's: tokens that the network does not
        have get -inf, and those beyond are left off.
    """

    model: LanguageModel
    slots: int
    batch: int
    vocab: int | None = None

    def empty_cache(self) -> Cache:
        """Make an empty cache for each sequence."""
        one = self.model.init_cache(self.slots)
        if self.batch == 1:
            return jax.tree.map(jnp.copy, one)  # fields may share a buffer, which is given away
        return jax.tree.map(lambda x: jnp.repeat(x[None], self.batch, axis=0), one)

    def forward(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        at: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Run a block of each sequence.

        Args:
          params: the network's parameters.
          tokens: int32 [B, L]; -1 on padding.
          positions: int32 [B, L].
          mask: bool [B, L, S].
          cache: of the batch.
          at: int32 [B].

        Returns:
          (float32 [B, L, V], the cache).
        """

        def one(cache: Any, tokens: Any, positions: Any, mask: Any, at: Any) -> Any:
            return self.model.guarded(params, tokens, positions, mask, cache, at)

        if self.batch == 1:
            logits, cache = one(cache, tokens[0], positions[0], mask[0], at[0])
            logits = logits[None]
        else:
            logits, cache = jax.vmap(one)(cache, tokens, positions, mask, at)
        if self.vocab is not None and self.vocab != self.model.vocab:
            logits = logits[..., : self.vocab]
            lacking = [(0, 0), (0, 0), (0, self.vocab - logits.shape[-1])]
            logits = jnp.pad(logits, lacking, constant_values=-jnp.inf)
        return logits, cache

    def stretch(
        self, params: Any, tokens: jax.Array, cache: Cache, at: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Run a stretch of each text, int32 [B, L], from slot and position `at` [B] on."""
        length = tokens.shape[1]
        mask = per_sequence(lambda at: chain_mask(length, at, self.slots))(at)
        positions = at[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        return self.forward(params, tokens, positions, mask, cache, at)

    def nodes(
        self,
        params: Any,
        tokens: jax.Array,
        depths: jax.Array,
        seen: jax.Array,
        cache: Cache,
        root: jax.Array,
        offset: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache]:
        """Run some consecutive nodes of each tree.

        Args:
          params: the network's parameters.
          tokens: int32 [B, L].
          depths: int32 [B, L].
          seen: bool [B, L, N], which nodes each of them sees.
          cache: of the batch; slots of the nodes before these are filled.
          root: int32 [B], slot and position of the root, node 0.
          offset: int32 [] or [B], number of the first of these nodes.
        """
        mask = per_sequence(lambda seen, at: block_mask(seen, at, self.slots))(seen, root)
        return self.forward(params, tokens, root[:, None] + depths, mask, cache, root + offset)

    def fitting(
        self,
        params: Any,
        widths: Sequence[int],
        tokens: jax.Array,
        depths: jax.Array,
        seen: jax.Array | None,
        cache: Cache,
        root: jax.Array,
        needed: jax.Array,
        is_end: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Run the front of each tree, as wide as the largest tree needs.

        Args:
          params: the network's parameters.
          widths: block widths compiled, rising; the last is N.
          tokens: int32 [B, N].
          depths: int32 [B, N].
          seen: bool [B, N, N], which nodes each node sees; None for single paths.
          cache: of the batch.
          root: int32 [B], slot and position of the root.
          needed: int32 [], nodes of the largest tree.
          is_end: bool [B, N], nodes after which nothing comes: their rows are zeros.

        Returns:
          (float32 [B, N, V], the cache). Rows of nodes beyond the width that was run are zeros.
        """

        def of_width(width: int, cache: Cache) -> tuple[jax.Array, Cache]:
            front = tokens[:, :width]
            if seen is None:
                logits, cache = self.stretch(params, front, cache, root)
            else:
                within = seen[:, :width, :width]
                logits, cache = self.nodes(params, front, depths[:, :width], within, cache, root)
            return jnp.where(is_end[:, :width, None], 0.0, logits), cache

        if len(widths) == 1:
            return of_width(widths[0], cache)
        # A cache that goes through `cond` or `switch` is copied twice each time; through a loop of
        # one trip or none it is not.
        place = jnp.sum(needed > jnp.asarray(widths, jnp.int32), dtype=jnp.int32)
        logits = jnp.zeros((*tokens.shape, self.model.vocab), jnp.float32)
        for number, width in enumerate(widths):

            def once(state: tuple[Any, Any, Cache], width: int = width) -> tuple[Any, Any, Cache]:
                _, logits, cache = state
                rows, cache = of_width(width, cache)
                written = lax.dynamic_update_slice(logits, rows, (0, 0, 0))
                return jnp.zeros((), bool), written, cache

            state = (place == number, logits, cache)
            _, logits, cache = lax.while_loop(lambda state: state[0], once, state)
        return logits, cache

    def prefill(
        self, params: Any, tokens: jax.Array, cache: Cache, chunk: jax.Array, width: int
    ) -> Cache:
        """Run one chunk of each text, from slot `chunk * width` on.

        Args:
          params: the network's parameters.
          tokens: int32 [B, S'], the texts, S' at least `(chunk + 1) * width`. What stands after a
            text is run too, into slots that are overwritten before anybody sees them.
          cache: of the batch.
          chunk: int32 [].
          width: tokens of a chunk.
        """
        block = lax.dynamic_slice_in_dim(tokens, chunk * width, width, axis=1)
        at = jnp.broadcast_to(chunk * width, (self.batch,))
        return self.stretch(params, block, cache, at)[1]

    def keep(self, cache: Cache, at: jax.Array, path: jax.Array) -> Cache:
        """Move the accepted slots of each block, path int32 [B, D + 1], to its front."""
        if self.model.keep is None:
            raise AssertionError(f"{self.model.name}: trees need `keep`")
        if self.batch == 1:
            return self.model.keep(cache, at[0], path[0])
        return jax.vmap(self.model.keep)(cache, at, path)
