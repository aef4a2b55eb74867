"""Any network with a key-value cache, as three functions of one sequence.

A network is asked about a block of tokens at a time. Which earlier tokens each of them sees is said
by a mask over cache slots, and where it stands in the text by its position; so a block may be a
stretch of text or a tree of candidates, and the same function prefills, drafts and verifies.

Slots and positions are two things. Committed text holds slot i at position i. A tree's nodes stand in
consecutive slots after it, at the position of their depth, so that siblings have slots of their own
at one position. To roll back is to write the next block from a smaller slot on: what stands
beyond is masked until it is overwritten.

In the shape descriptions L denotes the tokens of a block, S the slots of a cache, D a depth, V the
vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from jaxspec.checks import assert_kind, assert_whole

Cache: TypeAlias = Any
"""A pytree of arrays, of sizes that do not change from call to call."""


class CacheError(ValueError):
    """A cache is too small for what it is to hold, or cannot do what it is asked to."""


class ForwardError(ValueError):
    """A network's `forward` gives something else than the protocol says."""


class TokensDifferError(ValueError):
    """A target and a draft do not mean the same by the same token ids."""


class Forward(Protocol):
    """Run the network over a block and remember it."""

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        at: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Write a block's keys and values to slots at .. at + L - 1 and attend to the cache.

        Args:
          params: the network's parameters.
          tokens: int32 [L], all in [0, V); padding is shown as token 0.
          positions: int32 [L], place in the text of each token; below `max_context`.
          mask: bool [L, S], the slots that each token sees, its own among them.
          cache: as `init_cache` made it or an earlier call left it.
          at: int32 [], from 0 to S - L. Whatever stood at these slots is forgotten.

        Returns:
          (logits [L, V] of the token after each, the cache). Other slots are left as they are.
        """


@dataclasses.dataclass(frozen=True)
class GuardedForward:
    """A network's forward, shown what the protocol promises and held to what it promises itself.

    Attributes:
      name: the network's.
      vocab: V.
      max_context: its positions; None for no limit.
      forward: the network's.
    """

    name: str
    vocab: int
    max_context: int | None
    forward: Forward

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        at: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Run a block; see `Forward`.

        Padding may be any token and stand at any position here: what it is and where is nobody's
        concern, but a table of tokens or positions that is read beyond its end may give NaN, and a
        masked NaN is NaN still.

        Returns:
          (logits float32 [L, V], the cache).

        Raises:
          ForwardError: when traced, if logits or cache have another shape or type.
        """
        tokens = jnp.clip(tokens, 0, self.vocab - 1)
        if self.max_context is not None:
            positions = jnp.minimum(positions, self.max_context - 1)
        logits, after = self.forward(params, tokens, positions, mask, cache, at)
        wanted = (tokens.shape[0], self.vocab)
        if logits.shape != wanted or not jnp.issubdtype(logits.dtype, jnp.floating):
            raise ForwardError(
                f"{self.name}: forward gave logits {logits.dtype} {list(logits.shape)} for a block of "
                f"{wanted[0]} tokens: must be floats {list(wanted)}, a row for each token"
            )
        if (given := shapes_of(after)) != (kept := shapes_of(cache)):
            raise ForwardError(
                f"{self.name}: forward was given a cache of {kept} and returned {given}: a cache must "
                "keep its structure, shapes and types"
            )
        return logits.astype(jnp.float32), after


def shapes_of(cache: Cache) -> Any:
    """Describe a cache by its structure and the type of each array."""
    return jax.tree.map(lambda x: f"{x.dtype} {list(x.shape)}", cache)


class Keep(Protocol):
    """Move accepted slots of a block to its front."""

    def __call__(self, cache: Cache, at: jax.Array, path: jax.Array) -> Cache:
        """Make slot at + i hold what slot at + path[i] holds, for each i where path[i] >= 0.

        Args:
          cache: the cache.
          at: int32 [], the block's first slot.
          path: int32 [D + 1], increasing, path[i] >= i; -1 after the accepted nodes. Slots
            at + i beyond them may hold anything afterwards.
        """


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def pieces(self) -> Sequence[str]:
        """The token of each id; two models speak of the same tokens if these are equal."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids."""


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """A network with a cache.

    `forward` and `keep` are pure functions of one sequence, traced under `jit` and `vmap`; a batch,
    with its own slot for each sequence, is made by jaxspec. A network whose cache keeps one write
    index for the whole batch fits, for it is only ever shown one sequence.

    Attributes:
      name: its id in records and messages.
      vocab: V.
      params: a pytree, handed to `forward` in every call and never closed over.
      forward: see `Forward`.
      init_cache: makes an empty cache of S slots.
      keep: see `Keep`. None for a cache whose slots cannot be moved: then trees are refused.
      takes_trees: whether mask and positions are honoured as given. False for a network that only
        knows stretches of text, each token after the one in the slot before: it verifies paths.
      rolls_back: whether a block may be written over slots that were written before. A network that
        carries a state forward (recurrent, or a ring of slots) cannot: decoding with it is refused.
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
        """Refuse an empty vocabulary.

        Its tokenizer may have more tokens: an id beyond the vocabulary is refused in a prompt.
        """
        assert_whole(f"{self.name}: vocab", self.vocab, 1)

    @property
    def guarded(self) -> GuardedForward:
        """The network's forward, guarded; equal for models that share it."""
        return GuardedForward(self.name, self.vocab, self.max_context, self.forward)

    def assert_rolls_back(self) -> None:
        """Refuse a cache that speculative decoding would make wrong text from.

        Raises:
          CacheError: it cannot roll back.
        """
        if not self.rolls_back:
            raise CacheError(
                f"{self.name}: its cache cannot roll back, so tokens that were not kept would stay in "
                "it; decode it plainly with its own generator"
            )

    def assert_takes_trees(self) -> None:
        """Refuse to score a tree with a network that only knows stretches of text.

        Raises:
          CacheError: it honours no masks, or its slots cannot be moved.
        """
        if not self.takes_trees or self.keep is None:
            why = "takes no mask" if not self.takes_trees else "has a cache whose slots cannot move"
            raise CacheError(f"{self.name} {why}, so it verifies paths only: propose a path")


def assert_language_model(name: str, value: Any) -> None:
    """Refuse what is no `LanguageModel`, such as a provider, bare parameters or a path.

    Raises:
      ValueError: naming the argument and what was given.
    """
    wanted = "a jaxspec.models.network.LanguageModel, such as models.load_huggingface gives"
    assert_kind(name, value, LanguageModel, wanted)


def assert_same_tokens(target: LanguageModel, draft: LanguageModel) -> None:
    """Raise unless the token ids that target and draft have in common mean the same.

    The vocabularies may be padded to different sizes: ids beyond the smaller have probability 0 there.

    Args:
      target: the target.
      draft: the draft.

    Raises:
      TokensDifferError: the tokenizers differ in a common token; which.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        return
    # One of them may name more tokens than the other: those are not common.
    pairs = zip(target.tokenizer.pieces, draft.tokenizer.pieces, strict=False)
    for token, (mine, other) in enumerate(pairs):
        if mine != other:
            raise TokensDifferError(
                f"token {token} is {mine!r} to target {target.name}, {other!r} to draft {draft.name}: "
                "their tokenizers differ"
            )
