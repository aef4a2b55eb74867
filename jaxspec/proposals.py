"""Candidates and how they were drawn.

How the candidates of a tree were drawn is a type, because the accept test needs the law a candidate
was drawn from, and recording a row that is not that law is the most common bug in this field.

While a node's candidates are tested, what is left of its target row is described by a few scalars
(`Remainder`); the row itself is never built. The kinds of proposal differ in the short methods here,
so that the walks over the tree hold no case distinctions. The weight `a` and row `r` of a node are

    a r(y) = relu((weight p(y) - first q(y)) - more q(y) - flat) / scale      (0 where removed)

which is closed under rejection because relu(relu(r) - c) = relu(r - c) for c >= 0.
"""

import abc
from dataclasses import replace
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp

from jaxspec.checks import static_field, struct
from jaxspec.loops import choose, scan, varying_alike
from jaxspec.rows import RowsLike
from jaxspec.tiles import draw_token, weights_of
from jaxspec.trees import Tree, chain


@struct
class Remainder:
    """What is left of one node's target row after the candidates rejected so far."""

    weight: jax.Array  # [] the prefix weight `a` the node was entered with
    # Multiples of the draft row subtracted by the first rejection and by later ones. They are kept
    # apart, since their sum would cancel where p is close to q.
    first: jax.Array  # []
    more: jax.Array  # []
    flat: jax.Array  # [] subtracted from every token once a draft's support is exhausted
    scale: jax.Array  # [] divisor of the row
    mass: jax.Array  # [] sum of the undivided row, so that `a` is now mass / scale
    pool: jax.Array  # [] draft mass not drawn yet
    removed: jax.Array  # [C] which siblings are removed from the row for good
    vocab: int = static_field()  # V

    @property
    def is_whole(self) -> jax.Array:
        """Whether nothing was subtracted or removed: the row is the target row."""
        untouched = (self.first == 0) & (self.more == 0) & (self.flat == 0)
        return untouched & ~jnp.any(self.removed)

    def subtract(self, step: jax.Array) -> "Remainder":
        """Subtract a multiple of the draft row."""
        is_first = self.first == 0
        return replace(
            self,
            first=jnp.where(is_first, step, self.first),
            more=jnp.where(is_first, self.more, self.more + step),
        )

    def remove(self, sibling: jax.Array) -> "Remainder":
        """Remove the token of a sibling from the row."""
        siblings = jnp.arange(self.removed.shape[0], dtype=jnp.int32)
        return replace(self, removed=self.removed | (siblings == sibling))


def whole_row(weight: jax.Array, num_siblings: int, vocab: int) -> Remainder:
    """Describe a target row that nothing was subtracted from, entered with prefix weight `a`."""
    zero, one = jnp.float32(0), jnp.float32(1)
    nothing = {"first": zero, "more": zero, "flat": zero, "removed": jnp.zeros(num_siblings, bool)}
    return Remainder(weight=weight, mass=weight, scale=one, pool=one, vocab=vocab, **nothing)


@struct
class Proposal(abc.ABC):
    """The candidates of a tree together with the law they were drawn from.

    A new kind of draft is a subclass that defines the static methods.

    Attributes:
      tree: the candidates.
      draft_rows: [N - 1, V] or [N, V], the draft rows by parent; None for candidates that were not
        sampled.
    """

    tree: Tree
    draft_rows: RowsLike | None = None

    distinct_siblings: ClassVar[bool]
    """Whether two siblings may not hold one token."""
    is_measured: ClassVar[bool]
    """Whether candidates are sampled from draft rows, so that the mass left after a rejection must be
    summed over the row."""

    @staticmethod
    @abc.abstractmethod
    def share(left: Remainder, q: jax.Array, is_removed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (top, bottom): the draft draws a token with probability s = top / bottom."""

    @staticmethod
    @abc.abstractmethod
    def row(left: Remainder, p: jax.Array, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return the undivided row `scale a r` at some tokens."""

    @staticmethod
    @abc.abstractmethod
    def reject(left: Remainder, w_at: jax.Array, sibling: jax.Array) -> Remainder:
        """Describe the row after a candidate of undivided weight `w_at` was rejected.

        Where `is_measured`, the scale, mass and pool are left for the caller to sum.
        """

    @staticmethod
    @abc.abstractmethod
    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        """Draw siblings, int32 [C] in order, with pairs [C, 2] in [0, 1) from a draft row [V]."""


@struct
class PointMass(Proposal):
    """Candidates chosen by any rule that depends only on the past (top-k, n-gram, lookup).

    A fixed candidate x is a point mass, not a sample of the row it was picked from: x is accepted
    with the probability that is left for it, then removed. Lossless for any candidates.

    Attributes:
      tree: the candidates. A repeated sibling is never accepted and changes nothing.
      draft_rows: None.
    """

    distinct_siblings: ClassVar[bool] = True
    is_measured: ClassVar[bool] = False

    @staticmethod
    def share(left: Remainder, q: jax.Array, is_removed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return 1 / 1: the candidate was certain, and any token may be."""
        del left, q, is_removed
        return jnp.float32(1), jnp.float32(1)

    @staticmethod
    def row(left: Remainder, p: jax.Array, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return `weight p`, 0 where removed."""
        del q
        return jnp.where(is_removed, 0.0, jnp.maximum(left.weight * p, 0.0))

    @staticmethod
    def reject(left: Remainder, w_at: jax.Array, sibling: jax.Array) -> Remainder:
        """Subtract the candidate's weight; no row is read (a rejection implies mass > w_at)."""
        return replace(left, scale=left.scale - w_at, mass=left.mass - w_at).remove(sibling)

    @staticmethod
    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        """Return the tokens of greatest draft probability, the lowest first among equals."""
        return jax.lax.top_k(draft_row, pairs.shape[0])[1].astype(jnp.int32)


@struct
class WithReplacement(Proposal):
    """Candidates drawn independently, each from its parent's draft row.

    On a single path this is the usual sampled draft.

    Attributes:
      tree: the candidates. Siblings are in the order they were drawn in; none is dropped, sorted or
        merged because of its token.
      draft_rows: [N - 1, V] or [N, V], row n is the law that the children of node n were drawn
        from, exactly. Rows of leaves are never read, so a path of T tokens needs T of them.
    """

    distinct_siblings: ClassVar[bool] = False
    is_measured: ClassVar[bool] = True

    @staticmethod
    def share(left: Remainder, q: jax.Array, is_removed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return q(x) / 1."""
        del left, is_removed
        return q, jnp.float32(1)

    @staticmethod
    def row(left: Remainder, p: jax.Array, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return relu((weight p - first q) - more q)."""
        del is_removed
        # A whole row must not depend on a draft row that may be missing (a leaf's).
        q = jnp.where(left.is_whole, 0.0, q)
        return jnp.maximum((left.weight * p - left.first * q) - left.more * q, 0.0)

    @staticmethod
    def reject(left: Remainder, w_at: jax.Array, sibling: jax.Array) -> Remainder:
        """Subtract scale q."""
        del w_at, sibling
        return left.subtract(left.scale)

    @staticmethod
    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        """Draw siblings one by one, each from the whole row."""
        return jax.vmap(draw_token, in_axes=(0, None))(pairs, draft_row)


@struct
class WithoutReplacement(Proposal):
    """Candidates drawn from their parent's draft row with earlier siblings removed.

    Once the row's support is exhausted, further siblings are uniform over the tokens not drawn yet.
    Gumbel top-k, in the order of the perturbed logits, draws from this law.

    Attributes:
      tree: the candidates, as for `WithReplacement`; siblings are distinct.
      draft_rows: [N - 1, V] or [N, V], row n is the row of node n before any was removed.
    """

    distinct_siblings: ClassVar[bool] = True
    is_measured: ClassVar[bool] = True

    @staticmethod
    def share(left: Remainder, q: jax.Array, is_removed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return q(x) / pool, or 1 / (tokens not drawn yet) once the support is exhausted."""
        is_exhausted = left.pool <= 0
        others = jnp.float32(left.vocab) - jnp.sum(left.removed, dtype=jnp.float32)
        others = jnp.maximum(others, 1.0)  # none is left where every token was drawn
        top = jnp.where(is_removed, 0.0, jnp.where(is_exhausted, 1.0, q))
        return top, jnp.where(is_exhausted, others, left.pool)

    @staticmethod
    def row(left: Remainder, p: jax.Array, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return relu((weight p - first q) - more q - flat), 0 where removed."""
        q = jnp.where(left.is_whole, 0.0, q)  # as in WithReplacement.row
        kept = (left.weight * p - left.first * q) - left.more * q - left.flat
        return jnp.where(is_removed, 0.0, jnp.maximum(kept, 0.0))

    @staticmethod
    def reject(left: Remainder, w_at: jax.Array, sibling: jax.Array) -> Remainder:
        """Subtract scale s and remove the candidate from further drafts."""
        del w_at
        _, bottom = WithoutReplacement.share(left, jnp.float32(0), jnp.bool_(False))
        step = left.scale / bottom
        spread = replace(left, flat=left.flat + step)
        return choose(left.pool <= 0, spread, left.subtract(step)).remove(sibling)

    @staticmethod
    @jax.jit  # called outside of a trace the loop would be compiled at every call
    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        """Draw siblings one by one, each from what earlier ones left of the row; C <= V."""
        chex.assert_axis_dimension_gteq(draft_row, 0, pairs.shape[0])
        pairs, weights = varying_alike((pairs, weights_of(draft_row)))

        def step(is_left: jax.Array, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
            pool = jnp.where(is_left, weights, 0.0)
            uniform = jnp.where(is_left, 1.0, 0.0)
            token = draw_token(pair, jnp.where(jnp.all(pool <= 0), uniform, pool))
            tokens = jnp.arange(is_left.shape[0], dtype=jnp.int32)
            return is_left & (tokens != token), token

        return scan(step, jnp.ones(draft_row.shape, bool), pairs)[1]


def sampled_path(
    tokens: jax.Array, draft_rows: RowsLike, num_drafted: jax.Array | int | None = None
) -> WithReplacement:
    """Return the proposal of a single path of sampled tokens with the rows they were drawn from.

    Args:
      tokens: int32 [T], each drawn from its draft row.
      draft_rows: [T, V], row t is exactly the law that token t was drawn from: after temperature and
        filters, in the precision that was sampled.
      num_drafted: int32 [], how many tokens count, 0 to T; default T. See `jaxspec.chain` for what
        it may depend on.

    Returns:
      The proposal, with node t + 1 for token t.

    Raises:
      AssertionError: tokens are not a vector of integers.
      TreeError: `num_drafted` is concrete and outside 0 to T. Under a trace the verifiers set
        `Status.BAD_TREE` and emit nothing.

    >>> import jax.numpy as jnp
    >>> path = sampled_path(jnp.array([1, 0]), jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> path.tree.max_depth
    2
    """
    return WithReplacement(tree=chain(tokens, num_drafted), draft_rows=draft_rows)
