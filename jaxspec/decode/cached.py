"""A network as a model of the host loop: one cache, and a memory of the text that it holds.

In the shape descriptions N denotes the nodes that a tree has room for, S the slots of a cache, V the
vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import assert_kind
from jaxspec.decode.target import Scores, node_contexts, score_batched
from jaxspec.models.network import (
    Block,
    Cache,
    CacheError,
    Forward,
    LanguageModel,
    assert_language_model,
)
from jaxspec.models.provider import Answer, Context, Provider, Query, Softmax
from jaxspec.transfers import moves_data
from jaxspec.trees import ROOT, Tree, ancestor_mask, node_depths


class CachedNetwork:
    """A network as target and draft of the host loop, each tree scored with one forward.

    It remembers the text that its cache holds, in whole chunks; asked about another, it feeds the
    chunks that differ, and what is left of the text together with the tree. A row is therefore a
    function of the text and the tree alone, to the last bit, whatever was asked before; rows of one
    context in two trees, or from `provider`, agree as closely as two programs do (about 1e-5).
    It serves one thread.

    Attributes:
      model: the network.
      slots: most tokens of a context and nodes that a tree has room for, the root counted once.
      transform: how logits become probabilities, default `Softmax()`.
      chunk: tokens fed at once. 1 suits a text that grows by one token a round.
      forwards: how often the network was run so far.

    >>> from jaxspec.models.llama import LlamaConfig, init_llama, llama, rope_frequencies
    >>> from jaxspec.trees import make_tree
    >>> config = LlamaConfig(
    ...     vocab=5, width=8, layers=1, heads=2, kv_heads=1, head_width=4, hidden=16,
    ...     rope_frequencies=rope_frequencies(4),
    ... )
    >>> network = llama(config, init_llama(jax.random.key(0), config))
    >>> attention = CachedNetwork(network, slots=16, chunk=4)
    >>> tree = make_tree([4, 0, 1, 2], [-1, 0, 0, 1])
    >>> scores = attention(attention.provider(), tree, [3, 1, 4])
    >>> scores.rows.shape, scores.usage
    ((4, 5), Usage(queries=2, calls=1))
    """

    @moves_data
    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int,
        transform: Softmax | None = None,
        chunk: int = 16,
    ) -> None:
        """Make an empty memory.

        Raises:
          CacheError: the network's cache cannot roll back.
          ValueError: an argument is of another kind, there is no room for a token, or a chunk holds
            none.
        """
        assert_language_model("model", model)
        model.assert_rolls_back()
        for size_name, size in (("slots", slots), ("chunk", chunk)):
            is_whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
            if not is_whole or not 1 <= size < 2**31:
                raise ValueError(
                    f"slots is {slots!r} and chunk {chunk!r}: both must be at least 1, and "
                    f"{size_name} an integer of 32 bits"
                )
        if transform is not None:
            assert_kind("transform", transform, Softmax, "a Softmax(temperature), or None")
        slots, chunk = int(slots), int(chunk)
        self.model = model
        self.slots = slots
        self.transform = Softmax() if transform is None else transform
        self.chunk = chunk
        self.forwards = 0
        self._held: Context = ()  # the token of slot i is entry i
        self._cache: Cache | None = None

    def provider(self, name: str | None = None) -> Provider:
        """Return the network as a model that is asked about one context at a time.

        Args:
          name: its id in records, default the network's.
        """
        return Provider(
            name=self.model.name if name is None else name,
            vocab=self.model.vocab,
            ask=self.logits_after,
            transform=self.transform,
            max_context=self._most,
        )

    @property
    def _most(self) -> int:
        """Most tokens of a context."""
        most = self.model.max_context
        return self.slots if most is None else min(self.slots, most)

    def room_after(self, length: int) -> int:
        """Return how many nodes, padding and the root counted, a tree may have after a context.

        Args:
          length: tokens of the context.
        """
        return self.slots - length + 1

    @moves_data
    def logits_after(self, context: Context) -> np.ndarray:
        """Return the logits float32 [V] after a context.

        Raises:
          CacheError: it is longer than the cache or than what the network was made for.
          ValueError: it is empty, or holds something that is not a token of the vocabulary.
        """
        context = self.provider().check_context(context)
        self._assert_fits(len(context), 1, 0)
        start = self._feed(context)
        return self._run_chunk(context, start)[len(context) - 1 - start]

    @moves_data
    def __call__(
        self, target: Provider, tree: Tree, context: Sequence[int], *, bonus: bool = False
    ) -> Scores:
        """Score a tree with one forward, after what was not fed before of the context.

        Args:
          target: one of `provider`; its transform counts.
          tree: the candidates; `tokens[0]` is the last token of the context, or -1.
          context: prompt and committed tokens, at least one.
          bonus: score leaves too, for the token after a fully accepted path.

        Returns:
          `Scores`, whose `usage.calls` are forwards.

        Raises:
          CacheError: context and tree are longer than the cache or than what the network was made
            for, or there are siblings and the network takes none.
          ValueError: the context or the tree does not fit the model or the other, or the target is
            not this network. Whatever is refused, nothing was fed.
          RowError: the network gave NaN.
        """
        if getattr(target.ask, "__self__", None) is not self:
            raise ValueError(f"{target.name} is not of this network: make it with `provider`")

        def ask(queries: list[Query]) -> list[Answer]:
            contexts = node_contexts(tree, context)
            logits = self._tree_logits(tree, contexts)
            node_of = {each: node for node, each in reversed(list(enumerate(contexts)))}
            return [Answer(query.id, logits[node_of[query.context]]) for query in queries]

        before = self.forwards
        asked = dataclasses.replace(target, ask=ask, is_batched=True)
        scores = score_batched(asked, tree, context, bonus=bonus)
        usage = dataclasses.replace(scores.usage, calls=self.forwards - before)
        return dataclasses.replace(scores, usage=usage)

    def _tree_logits(self, tree: Tree, contexts: list[Context]) -> np.ndarray:
        """Return logits [N, V] by node."""
        context = contexts[0]
        parents = np.asarray(tree.parents)[: len(contexts)]
        if not np.array_equal(parents, np.arange(-1, len(contexts) - 1)):
            self.model.assert_takes_trees()
        self._assert_fits(len(context), tree.max_nodes, max(map(len, contexts)) - len(context))
        start = self._feed(context)
        left = context[start:-1]
        text = np.zeros(self.chunk - 1, np.int32)
        text[: len(left)] = left
        tokens = np.array(tree.tokens)
        tokens[ROOT] = context[-1]
        rooted = dataclasses.replace(tree, tokens=jnp.asarray(tokens))
        return self._run(_text_and_tree, start, text, np.int32(len(left)), rooted)

    def _feed(self, context: Context) -> int:
        """Have all whole chunks before the last token in the cache; return where the rest begins."""
        start, common = (len(context) - 1) // self.chunk * self.chunk, 0
        while common < start and self._chunk(self._held, common) == self._chunk(context, common):
            common += self.chunk
        for at in range(common, start, self.chunk):
            self._run_chunk(context, at)
        return start

    def _chunk(self, context: Context, at: int) -> Context:
        """Return the chunk of a context that begins at an entry, what there is of it."""
        return context[at : at + self.chunk]

    def _run_chunk(self, context: Context, at: int) -> np.ndarray:
        """Run the chunk of a context that begins at an entry.

        A last one that is not whole is never taken for one that is held, since no whole one equals it.
        """
        part = self._chunk(context, at)
        tokens = np.zeros(self.chunk, np.int32)
        tokens[: len(part)] = part
        logits = self._run(_stretch, at, tokens)
        self._held += part
        return logits

    def _run(self, block: Callable[..., Any], at: int, *arguments: Any) -> np.ndarray:
        """Run a block through the network from slot `at` on; what stood there is forgotten."""
        held, cache = self._held[:at], self._cache
        # Nothing is held until the call is through: the cache is given up to it.
        self._held, self._cache = (), None
        if cache is None:
            # Copied, for it may hold one array twice, and each is given up once.
            cache = jax.tree.map(jnp.copy, self.model.init_cache(self._room))
        model = self.model
        logits, cache = block(
            model.guarded, self._room, model.params, cache, np.int32(at), *arguments
        )
        rows = np.asarray(logits)
        self.forwards += 1
        self._held, self._cache = held, cache
        return rows

    @property
    def _room(self) -> int:
        """Slots of the cache: a padded block may stand over the edge by a chunk."""
        return self.slots + self.chunk - 1

    def _assert_fits(self, length: int, nodes: int, depth: int) -> None:
        """Refuse a context of so many tokens and a tree of so many nodes and levels."""
        needed = length + nodes - 1
        if needed > self.slots:
            raise CacheError(
                f"{self.model.name}: a context of {length} tokens and a tree with room for "
                f"{nodes} nodes, the root in both, need {needed} slots; the cache has {self.slots}"
            )
        most = self.model.max_context
        if most is not None and length + depth > most:
            raise CacheError(
                f"{self.model.name}: a context of {length} tokens and a tree {depth} deep reach "
                f"{length + depth} positions; it was made for {most}"
            )


# The cache is given up in each call, so that it is written in place.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _stretch(
    forward: Forward, slots: int, params: Any, cache: Cache, at: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, Cache]:
    """Run a stretch of text from slot `at` on."""
    return forward(params, cache, Block.of_text(tokens, at, slots))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _text_and_tree(
    forward: Forward,
    slots: int,
    params: Any,
    cache: Cache,
    at: jax.Array,
    text: jax.Array,
    count: jax.Array,
    tree: Tree,
) -> tuple[jax.Array, Cache]:
    """Run the first `count` tokens of a text from slot `at` on, and a tree after them."""
    length, nodes = text.shape[0] + tree.max_nodes, tree.max_nodes
    places = jnp.arange(length, dtype=jnp.int32)
    depths = jnp.maximum(node_depths(tree), 0)
    tokens = jnp.pad(text, (0, nodes))
    tokens = lax.dynamic_update_slice(tokens, tree.tokens, (count,))
    offsets = lax.dynamic_update_slice(places, count + depths, (count,))
    # What stands after the tree is padding. It sees the text and itself, and nobody sees it.
    is_text = places < count
    seen = jnp.where(is_text[:, None], places[None] <= places[:, None], is_text[None])
    seen |= places[None] == places[:, None]
    seen = lax.dynamic_update_slice(seen, ancestor_mask(tree), (count, count))
    logits, cache = forward(params, cache, Block.of_tree(tokens, offsets, seen, at, slots))
    return lax.dynamic_slice_in_dim(logits, count, nodes), cache
