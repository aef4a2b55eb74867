"""A network with one cache as target and draft of the host loop.

In the shape descriptions N denotes the nodes that a tree has room for, S the slots of a cache, V the
vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import MOST_TOKENS, assert_between, assert_kind
from jaxspec.decode.target import Scores, Target
from jaxspec.models.network import Block, Cache, CacheError, LanguageModel, assert_language_model
from jaxspec.models.provider import Context, Provider, Softmax, Usage, check_context, probabilities
from jaxspec.transfers import moves_data
from jaxspec.trees import ROOT, Tree, ancestor_mask, node_depths

Span: TypeAlias = tuple[Block, jax.Array | int, int]
"""A block, the first of its tokens whose logits are returned, and how many of them are."""


class CachedNetwork(Target):
    """A network that scores each tree with one forward, or one context at a time as a provider.

    It remembers the text in its cache, in whole chunks. Asked about another text, it feeds the
    chunks that differ, and the rest of the text together with the tree. So a row depends on the text
    and the tree alone, to the last bit, whatever was asked before; rows of one context in two trees,
    or from `provider`, agree up to rounding (about 1e-5). It serves one thread.

    Attributes:
      model: the network.
      slots: S, the most tokens of a context and nodes of a tree together, the root counted once.
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
    >>> target = CachedNetwork(network, slots=16, chunk=4)
    >>> scores = target.rows(make_tree([4, 0, 1, 2], [-1, 0, 0, 1]), [3, 1, 4])
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
        """Start with an empty cache.

        Raises:
          CacheError: the network's cache cannot roll back.
          ValueError: an argument is of another kind or out of range.
        """
        assert_language_model("model", model)
        model.assert_rolls_back()
        assert_between("slots", slots, 1, MOST_TOKENS)
        assert_between("chunk", chunk, 1, MOST_TOKENS)
        if transform is not None:
            assert_kind("transform", transform, Softmax, "a Softmax(temperature), or None")
        self.model, self.name, self.vocab = model, model.name, model.vocab
        self.slots = int(slots)
        most = model.max_context
        self.max_context = self.slots if most is None else min(self.slots, most)
        self.transform = Softmax() if transform is None else transform
        self.chunk = int(chunk)
        self.forwards = 0
        self._held: Context = ()  # entry i is the token in slot i
        self._cache: Cache | None = None

    def provider(self, name: str | None = None) -> Provider:
        """Return the network as a provider, of its name unless another is given."""
        return Provider(
            name=self.name if name is None else name,
            vocab=self.vocab,
            ask=self.logits_after,
            transform=self.transform,
            max_context=self.max_context,
        )

    def room_after(self, length: int) -> int:
        """Return the most nodes, padding and the root counted, of a tree after `length` tokens."""
        return self.slots - length + 1

    @moves_data
    def logits_after(self, context: Context) -> np.ndarray:
        """Return the logits float32 [V] after a context; raises as `rows`."""
        context = check_context(self.name, self.vocab, context)
        self._assert_fits(len(context), 1, 0)
        start = self._feed(context)
        return self._run_chunk(context, start)[len(context) - 1 - start]

    @moves_data
    def rows(self, tree: Tree, context: Sequence[int], *, bonus: bool = False) -> Scores:
        """Score a tree with one forward, after those that feed the new part of the context.

        See `Target.rows`; `usage.calls` counts forwards.

        Raises:
          CacheError: context and tree are longer than the cache or the network's `max_context`, or
            there are siblings and the network takes no trees. Nothing was fed.
        """
        contexts, nodes = self.nodes_to_score(tree, context, bonus=bonus)
        before = self.forwards
        logits = self._tree_logits(tree, contexts)
        rows = np.zeros((tree.max_nodes, self.vocab), np.float32)
        for each, equal in nodes.items():
            row = logits[equal[0]]
            rows[equal] = probabilities(self.name, self.vocab, each, row, self.transform)
        return Scores(rows=rows, usage=Usage(len(nodes), self.forwards - before), batches=1)

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
        """Feed all whole chunks before the last token; return where the rest begins."""
        start, common = (len(context) - 1) // self.chunk * self.chunk, 0
        while common < start:
            end = common + self.chunk
            if self._held[common:end] != context[common:end]:
                break
            common = end
        for at in range(common, start, self.chunk):
            self._run_chunk(context, at)
        return start

    def _run_chunk(self, context: Context, at: int) -> np.ndarray:
        """Run the chunk of a context that begins at an entry; return its logits.

        An incomplete last one is never reused, since no whole chunk equals it.
        """
        part = context[at : at + self.chunk]
        tokens = np.zeros(self.chunk, np.int32)
        tokens[: len(part)] = part
        logits = self._run(_text, at, tokens)
        self._held += part
        return logits

    def _run(self, make: Callable[..., Span], first: int, *arguments: Any) -> np.ndarray:
        """Run a block from slot `first` on, overwriting what follows it; return its logits."""
        held, cache = self._held[:first], self._cache
        # The cache is donated, so nothing is held until the call has succeeded.
        self._held, self._cache = (), None
        if cache is None:
            # Copied, for it may hold one array twice, and each is donated once.
            cache = jax.tree.map(jnp.copy, self.model.init_cache(self._room))
        model = self.model
        logits, cache = _forward(
            model.guarded, make, self._room, model.params, cache, np.int32(first), *arguments
        )
        rows = np.asarray(logits)
        self.forwards += 1
        self._held, self._cache = held, cache
        return rows

    @property
    def _room(self) -> int:
        """Slots of the cache: a padded block may reach beyond `slots` by a chunk."""
        return self.slots + self.chunk - 1

    def _assert_fits(self, length: int, nodes: int, depth: int) -> None:
        """Raise CacheError unless a context of `length` tokens and a tree fit."""
        needed = length + nodes - 1
        if needed > self.slots:
            raise CacheError(
                f"{self.name}: a context of {length} tokens and a tree with room for {nodes} nodes, "
                f"the root in both, need {needed} slots; the cache has {self.slots}"
            )
        most = self.model.max_context
        if most is not None and length + depth > most:
            raise CacheError(
                f"{self.name}: a context of {length} tokens and a tree {depth} deep reach "
                f"{length + depth} positions; it was made for {most}"
            )


# The cache is donated, so that it is written in place.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _forward(
    forward: Callable[..., tuple[jax.Array, Cache]],
    make: Callable[..., Span],
    slots: int,
    params: Any,
    cache: Cache,
    first: jax.Array,
    *arguments: Any,
) -> tuple[jax.Array, Cache]:
    """Run the block that `make` gives, and return the logits that it asks for."""
    block, start, count = make(first, slots, *arguments)
    logits, cache = forward(params, cache, block)
    return lax.dynamic_slice_in_dim(logits, start, count), cache


def _text(first: jax.Array, slots: int, tokens: jax.Array) -> Span:
    return Block.of_text(tokens, first, slots), 0, tokens.shape[0]


def _text_and_tree(
    first: jax.Array, slots: int, text: jax.Array, count: jax.Array, tree: Tree
) -> Span:
    """Make the block of the first `count` tokens of a text, and a tree after them."""
    length, nodes = text.shape[0] + tree.max_nodes, tree.max_nodes
    places = jnp.arange(length, dtype=jnp.int32)
    depths = node_depths(tree)
    tokens = jnp.pad(text, (0, nodes))
    tokens = lax.dynamic_update_slice(tokens, tree.tokens, (count,))
    offsets = lax.dynamic_update_slice(places, count + depths, (count,))
    # Padding after the tree attends to the text and itself; nothing attends to it.
    is_text = places < count
    seen = jnp.where(is_text[:, None], places[None] <= places[:, None], is_text[None])
    seen |= places[None] == places[:, None]
    seen = lax.dynamic_update_slice(seen, ancestor_mask(tree), (count, count))
    return Block.of_tree(tokens, offsets, seen, first, slots), count, nodes
