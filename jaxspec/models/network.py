"""Any network with a key-value cache, as pure functions of one sequence.

A network is fed a `Block` of tokens at a time. The block's mask says which cache slots each token
attends to, and its positions say where the tokens are in the text. A block is a span of text or
(part of) a tree of candidates, so one function prefills, drafts and verifies.

Slots and positions differ. Committed text has slot i at position i. The nodes of a tree take
consecutive slots after it, each at the position of its depth, so siblings share a position but not a
slot and do not attend to each other: the logits after node n are those after the text that ends
with node n. To roll back, write the next block from a smaller slot on: the slots beyond it are masked
until they are overwritten.

In the shape descriptions L denotes the tokens of a block, S the slots of a cache, N the nodes of a
tree, D a depth, V the vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import assert_kind, assert_whole, struct

Cache: TypeAlias = Any
"""A pytree of arrays whose structure, shapes and dtypes stay the same from call to call."""


class CacheError(ValueError):
    """A cache is too small, or does not support what is asked of it."""


class ForwardError(ValueError):
    """The results of a network's `forward` differ from its protocol."""


class TokensDifferError(ValueError):
    """A token id has different meanings in a target and its draft."""


@struct
class Block:
    """What a network is fed in one forward; build it with `of_text` or `of_tree`.

    Attributes:
      tokens: int32 [L]; -1 on padding.
      positions: int32 [L], the position of each token in the text.
      mask: bool [L, S], the cache slots that each token attends to, its own included.
      first: int32 [], the slot of the first token, from 0 to S - L; the others follow it.
    """

    tokens: jax.Array  # [L]
    positions: jax.Array  # [L]
    mask: jax.Array  # [L, S]
    first: jax.Array  # []

    @classmethod
    def of_text(cls, tokens: jax.Array, first: jax.Array | int, slots: int) -> "Block":
        """Make the block of a span of text, in which each token attends to all before it.

        Args:
          tokens: int32 [L].
          first: int32 [], slot and position of the first token.
          slots: S.

        >>> block = Block.of_text(jnp.array([7, 5]), 1, slots=4)
        >>> block.positions.tolist(), block.mask.astype(int).tolist()
        ([1, 2], [[1, 1, 0, 0], [1, 1, 1, 0]])
        """
        first = jnp.asarray(first, jnp.int32)
        positions = first + jnp.arange(tokens.shape[0], dtype=jnp.int32)
        mask = jnp.arange(slots, dtype=jnp.int32)[None] <= positions[:, None]
        return cls(tokens=tokens, positions=positions, mask=mask, first=first)

    @classmethod
    def of_tree(
        cls,
        tokens: jax.Array,
        depths: jax.Array,
        seen: jax.Array,
        root: jax.Array | int,
        slots: int,
        offset: jax.Array | int = 0,
    ) -> "Block":
        """Make the block of consecutive nodes of a tree, which attend to all slots before the root.

        Args:
          tokens: int32 [L].
          depths: int32 [L], depth of each node, 0 for the root.
          seen: bool [L, N], the nodes that each node attends to: its ancestors and itself.
          root: int32 [], slot and position of the root, node 0; node n has slot root + n.
          slots: S.
          offset: int32 [], the node number of the first token.

        >>> seen = jnp.array([[True, False], [True, True]])
        >>> block = Block.of_tree(jnp.array([7, 5]), jnp.array([0, 1]), seen, 2, slots=5)
        >>> block.positions.tolist(), block.mask.astype(int).tolist()
        ([2, 3], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
        """
        root = jnp.asarray(root, jnp.int32)
        nodes = jnp.arange(slots, dtype=jnp.int32) - root
        inside = seen[:, jnp.clip(nodes, 0, seen.shape[1] - 1)]
        mask = jnp.where((nodes < seen.shape[1])[None], inside | (nodes < 0)[None], False)
        return cls(tokens=tokens, positions=root + depths, mask=mask, first=root + offset)


class Forward(Protocol):
    """Run the network over a block and store its keys and values."""

    def __call__(self, params: Any, cache: Cache, block: Block) -> tuple[jax.Array, Cache]:
        """Write the block's keys and values to its slots, then attend to the cache.

        Args:
          params: the network's parameters.
          cache: as `init_cache` made it or an earlier call returned it.
          block: its tokens are in [0, V), its positions below `max_context`.

        Returns:
          (logits [L, V], row i for the token after token i; the cache). The previous contents of
          the block's slots are overwritten, all other slots are unchanged.
        """


class Keep(Protocol):
    """Move the slots of accepted nodes to the front of their block."""

    def __call__(self, cache: Cache, first: jax.Array, path: jax.Array) -> Cache:
        """Copy slot first + path[i] to slot first + i, for each i where path[i] >= 0.

        Args:
          cache: the cache.
          first: int32 [], the block's first slot.
          path: int32 [D + 1], increasing, path[i] >= i; -1 after the accepted nodes, where slots
            first + i may hold anything afterwards.
        """


def keep_slots(cache: Cache, first: jax.Array, path: jax.Array) -> Cache:
    """Move slots as `Keep` says, in a cache whose arrays all have their slots on axis 1."""
    places = jnp.arange(path.shape[0], dtype=jnp.int32)
    sources = first + jnp.where(path >= 0, path, places)

    def move(slots: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(slots, slots[:, sources], first, axis=1)

    return jax.tree.map(move, cache)


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def pieces(self) -> Sequence[str]:
        """The vocabulary entry of each id; models with equal entries share their tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids."""


@dataclasses.dataclass(frozen=True)
class GuardedForward:
    """A `Forward` with its arguments made valid and its results checked.

    It holds no parameters and is equal for models that share a forward: a static argument.
    """

    name: str
    vocab: int
    max_context: int | None
    forward: Forward

    def __call__(self, params: Any, cache: Cache, block: Block) -> tuple[jax.Array, Cache]:
        """Run a block whose padding may be any token at any position; logits are float32.

        Padding is clipped into range: a lookup beyond the end of a table may give NaN, and a masked
        NaN is still NaN.

        Raises:
          ForwardError: when traced, if logits or cache have another shape or dtype.
        """
        tokens, positions = jnp.clip(block.tokens, 0, self.vocab - 1), block.positions
        if self.max_context is not None:
            positions = jnp.minimum(positions, self.max_context - 1)
        block = dataclasses.replace(block, tokens=tokens, positions=positions)
        logits, after = self.forward(params, cache, block)
        wanted = (tokens.shape[0], self.vocab)
        if logits.shape != wanted or not jnp.issubdtype(logits.dtype, jnp.floating):
            raise ForwardError(
                f"{self.name}: forward returned logits {logits.dtype} {list(logits.shape)} for a "
                f"block of {wanted[0]} tokens: must be floats {list(wanted)}, a row for each token"
            )
        if (given := shapes_of(after)) != (before := shapes_of(cache)):
            raise ForwardError(
                f"{self.name}: forward was given a cache of {before} and returned {given}: a cache "
                "must keep its structure, shapes and types"
            )
        return logits.astype(jnp.float32), after


def shapes_of(cache: Cache) -> Any:
    """Describe a cache by its structure and the dtype and shape of each array."""
    return jax.tree.map(lambda x: f"{x.dtype} {list(x.shape)}", cache)


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A network with a cache.

    `forward` and `keep` are pure functions of one sequence, traced under `jit` and `vmap`; jaxspec
    batches them. A network whose cache has one write index for the whole batch can be used, since it
    only ever gets one sequence.

    Attributes:
      name: its id in records and messages.
      vocab: V. The tokenizer may have more tokens: in a prompt an id beyond V is an error.
      params: a pytree, passed to `forward` in every call and never closed over.
      forward: see `Forward`.
      init_cache: makes an empty cache of S slots.
      keep: see `Keep`. None if slots cannot be moved: then the network verifies paths only.
      takes_trees: whether mask and positions are honoured. False for a network that only takes
        spans of text, each token after the one in the slot before: it verifies paths only.
      rolls_back: whether slots can be overwritten, as decoding needs; not so for a network that
        carries a state forward (recurrent, or a ring of slots).
      max_context: most positions it was made for; None for no limit.
      tokenizer: None for a network of bare ids.
    """

    name: str
    vocab: int
    params: Any
    forward: Forward
    init_cache: Callable[[int], Cache]
    keep: Keep | None
    takes_trees: bool
    rolls_back: bool = True
    max_context: int | None = None
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the vocabulary is empty."""
        assert_whole(f"{self.name}: vocab", self.vocab, 1)

    @property
    def guarded(self) -> GuardedForward:
        """The network's forward for blocks with padding, its results checked."""
        return GuardedForward(self.name, self.vocab, self.max_context, self.forward)

    def assert_rolls_back(self) -> None:
        """Raise CacheError if the cache cannot roll back, as speculative decoding needs."""
        if not self.rolls_back:
            raise CacheError(
                f"{self.name}: its cache cannot roll back, so rejected tokens would stay in it; use "
                "the network's own generator without drafts"
            )

    def assert_takes_trees(self) -> None:
        """Raise CacheError if the network ignores masks or its slots cannot be moved."""
        if not self.takes_trees or self.keep is None:
            why = "has a cache whose slots cannot move" if self.takes_trees else "takes no mask"
            raise CacheError(f"{self.name} {why}, so it verifies paths only: propose a path")


def assert_language_model(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a `LanguageModel` (not a provider, parameters or a path)."""
    wanted = "a jaxspec.models.network.LanguageModel, such as models.load_huggingface gives"
    assert_kind(name, value, LanguageModel, wanted)


def assert_same_tokens(target: LanguageModel, draft: LanguageModel) -> None:
    """Raise TokensDifferError naming the first common id with different vocabulary entries.

    The vocabularies may be padded to different sizes: an id that one lacks has probability 0 there.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        return
    pairs = zip(target.tokenizer.pieces, draft.tokenizer.pieces, strict=False)
    for token, (mine, other) in enumerate(pairs):
        if mine != other:
            raise TokensDifferError(
                f"token {token} is {mine!r} to target {target.name}, {other!r} to draft "
                f"{draft.name}: their tokenizers differ"
            )
