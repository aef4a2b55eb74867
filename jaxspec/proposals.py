"""Candidates and how they were drawn.

How the candidates of a tree were drawn is a type, because the accept test needs the law a candidate
was drawn from, and a recorded row that is not that law is the most common real fault in this field.

While a node's candidates are tested, what is left of its target row is described by a few scalars
(`Remainder`); the row itself is never built. What differs between the kinds of proposal are the
short methods here, so that the walks over the tree hold no case distinctions. In the letters of the
design: the weight `a` and row `r` of a node are

    a r(y) = relu((weight p(y) - first q(y)) - more q(y) - flat) / scale      (0 where removed)

which is closed under rejection because relu(relu(r) - c) = relu(r - c) for c >= 0.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeAlias, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import MASS_TOLERANCE, assert_array, assert_kind, check_all, struct
from jaxspec.logits import Logits
from jaxspec.loops import scan, varying_alike
from jaxspec.rows import Probabilities, draw_token, weights_of
from jaxspec.trees import ROOT, Tree, assert_tree, chain, check_tree

Rows: TypeAlias = jax.Array | Probabilities | Logits
"""What a verifier takes as rows: probabilities [R, V], or a record of `Probabilities` or `Logits`."""


@struct
class Remainder:
    """What is left of one node's target row after the candidates rejected so far.

    Attributes:
      weight: float32 [], the prefix weight `a` the node was entered with.
      first: float32 [], multiple of the draft row subtracted by the first rejection. It is kept
        apart from `more`, since their sum would cancel where p is close to q.
      more: float32 [], multiple of the draft row subtracted by later rejections.
      flat: float32 [], subtracted from every token once a draft's support is exhausted.
      scale: float32 [], divisor of the row.
      mass: float32 [], sum of the undivided row, so that `a` is now mass / scale.
      pool: float32 [], draft mass not drawn yet.
      removed: bool [C], which siblings are gone from the row for good.
    """

    weight: jax.Array  # []
    first: jax.Array  # []
    more: jax.Array  # []
    flat: jax.Array  # []
    scale: jax.Array  # []
    mass: jax.Array  # []
    pool: jax.Array  # []
    removed: jax.Array  # [C]

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
        return replace(
            self,
            removed=self.removed | (jnp.arange(self.removed.shape[0], dtype=jnp.int32) == sibling),
        )


def whole_row(weight: jax.Array, num_siblings: int) -> Remainder:
    """Describe a target row that nothing was subtracted from, entered with prefix weight `a`."""
    zero, one = jnp.float32(0), jnp.float32(1)
    return Remainder(
        weight=weight,
        first=zero,
        more=zero,
        flat=zero,
        scale=one,
        mass=weight,
        pool=one,
        removed=jnp.zeros(num_siblings, bool),
    )


class Proposal(Protocol):
    """The candidates of a tree together with the law they were drawn from.

    A new kind of draft is a new record with these methods.

    Attributes:
      distinct_siblings: whether two siblings may not hold one token.
      is_measured: whether the mass left after a rejection must be summed over the row.
    """

    @property
    def tree(self) -> Tree:
        """The candidates."""

    @property
    def draft_rows(self) -> Rows | None:
        """The draft rows, by parent; None where the candidates are point masses."""

    distinct_siblings: ClassVar[bool]
    is_measured: ClassVar[bool]

    def share(self, left: Remainder, q_at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (top, bottom): the candidate was drawn with probability top / bottom."""

    def could_draw(self, left: Remainder, q_at: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Tell whether the draft could have drawn this candidate."""

    def row(self, left: Remainder, p: jax.Array, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return the undivided row `scale a r` at some tokens."""

    def scaled_share(self, left: Remainder, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return `scale s` at some tokens: the draft's law times the scale."""

    def reject(self, left: Remainder, w_at: jax.Array, sibling: jax.Array) -> Remainder:
        """Describe the row after a candidate of undivided weight `w_at` was rejected.

        Where `is_measured`, the scale, mass and pool are left for the caller to sum.
        """

    @staticmethod
    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        """Draw the siblings below one parent."""


@struct
class PointMass:
    """Candidates chosen by any rule that looks at nothing but the past (top-k, n-gram, lookup).

    A fixed candidate x is a point mass, not a sample of the row it was picked from: x is accepted
    with the probability that is left for it, then removed. Lossless for any candidates.

    Attributes:
      tree: the candidates. A repeated sibling is never accepted and changes nothing.
    """

    tree: Tree

    distinct_siblings: ClassVar[bool] = True
    is_measured: ClassVar[bool] = False

    @property
    def draft_rows(self) -> None:
        """No draft row takes part."""
        return None

    def share(self, left: Remainder, q_at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return 1 / 1: the candidate was certain."""
        del left, q_at
        return jnp.float32(1), jnp.float32(1)

    def could_draw(self, left: Remainder, q_at: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return True: any token may be proposed."""
        del left, q_at
        return jnp.ones_like(is_removed)

    def row(self, left: Remainder, p: jax.Array, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return `weight p`, 0 where removed."""
        del q
        return jnp.where(is_removed, 0.0, jnp.maximum(left.weight * p, 0.0))

    def scaled_share(self, left: Remainder, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return 0: off the candidate a point mass has no share, and its own is in closed form."""
        del left, is_removed
        return jnp.zeros_like(q)

    def reject(self, left: Remainder, w_at: jax.Array, sibling: jax.Array) -> Remainder:
        """Take the candidate's weight off; no row is read (a rejection implies mass > w_at)."""
        return replace(left, scale=left.scale - w_at, mass=left.mass - w_at).remove(sibling)

    @staticmethod
    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        """Take the tokens of greatest draft probability, the lowest first among equals.

        Args:
          pairs: float32 [C, 2], not read: nothing is drawn.
          draft_row: float [V], the draft row.

        Returns:
          int32 [C].
        """
        return jax.lax.top_k(draft_row, pairs.shape[0])[1].astype(jnp.int32)


@struct
class WithReplacement:
    """Candidates drawn independently, each from its parent's draft row.

    On a single path this is the usual sampled draft.

    Attributes:
      tree: the candidates. Siblings stand in the order they were drawn in; none is dropped, sorted
        or merged by looking at its token.
      draft_rows: [N - 1, V] or [N, V], row n is the law that the children of node n were drawn
        from, exactly. Rows of leaves are never read, so a path of T tokens needs T of them.
    """

    tree: Tree
    draft_rows: Rows  # [N - 1, V] or [N, V]

    distinct_siblings: ClassVar[bool] = False
    is_measured: ClassVar[bool] = True

    def share(self, left: Remainder, q_at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return q(x) / 1."""
        del left
        return q_at, jnp.float32(1)

    def could_draw(self, left: Remainder, q_at: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Tell whether q(x) > 0."""
        del left, is_removed
        return q_at > 0

    def row(self, left: Remainder, p: jax.Array, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return relu((weight p - first q) - more q)."""
        del is_removed
        # A whole row must not depend on a draft row that may not even be there (a leaf's).
        q = jnp.where(left.is_whole, 0.0, q)
        return jnp.maximum((left.weight * p - left.first * q) - left.more * q, 0.0)

    def scaled_share(self, left: Remainder, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return scale q."""
        del is_removed
        return left.scale * q

    def reject(self, left: Remainder, w_at: jax.Array, sibling: jax.Array) -> Remainder:
        """Subtract scale q."""
        del w_at, sibling
        return left.subtract(left.scale)

    @staticmethod
    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        """Draw siblings one by one, each from the whole row.

        Args:
          pairs: float32 [C, 2] in [0, 1), a pair for each sibling.
          draft_row: float [V], probabilities.

        Returns:
          int32 [C], in the order drawn.
        """
        return jax.vmap(draw_token, in_axes=(0, None))(pairs, draft_row)


@struct
class WithoutReplacement:
    """Candidates drawn from their parent's draft row with earlier siblings removed.

    Once the row's support is exhausted, further siblings are uniform over the tokens not drawn yet.
    Gumbel top-k, in the order of the perturbed logits, draws from this law.

    Attributes:
      tree: the candidates, as for `WithReplacement`; siblings are distinct.
      draft_rows: [N - 1, V] or [N, V], row n is the row of node n before any was removed.
    """

    tree: Tree
    draft_rows: Rows  # [N - 1, V] or [N, V]

    distinct_siblings: ClassVar[bool] = True
    is_measured: ClassVar[bool] = True

    def share(self, left: Remainder, q_at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return q(x) / pool, or 1 / (tokens not drawn yet) once the support is exhausted."""
        is_exhausted = left.pool <= 0
        drawn = jnp.sum(left.removed, dtype=jnp.float32)
        others = jnp.float32(_vocab(self.draft_rows)) - drawn
        return jnp.where(is_exhausted, 1.0, q_at), jnp.where(is_exhausted, others, left.pool)

    def could_draw(self, left: Remainder, q_at: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Tell whether x is new and q(x) > 0, or new and the support exhausted."""
        return ~is_removed & ((q_at > 0) | (left.pool <= 0))

    def row(self, left: Remainder, p: jax.Array, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return relu((weight p - first q) - more q - flat), 0 where removed."""
        q = jnp.where(left.is_whole, 0.0, q)  # as in WithReplacement.row
        kept = (left.weight * p - left.first * q) - left.more * q - left.flat
        kept = jnp.maximum(kept, 0.0)
        return jnp.where(is_removed, 0.0, kept)

    def scaled_share(self, left: Remainder, q: jax.Array, is_removed: jax.Array) -> jax.Array:
        """Return scale s, 0 where removed."""
        top, bottom = self.share(left, q)
        return jnp.where(is_removed, 0.0, left.scale / bottom * top)

    def reject(self, left: Remainder, w_at: jax.Array, sibling: jax.Array) -> Remainder:
        """Subtract scale s and remove the candidate from further drafts."""
        del w_at
        _, bottom = self.share(left, jnp.float32(0))
        step = left.scale / bottom
        sampled = left.subtract(step)
        spread = replace(left, flat=left.flat + step)
        is_exhausted = left.pool <= 0
        return jax.tree.map(lambda a, b: jnp.where(is_exhausted, a, b), spread, sampled).remove(
            sibling
        )

    @staticmethod
    @jax.jit  # called outside of a trace the loop would be compiled at every call
    def draw(pairs: jax.Array, draft_row: jax.Array) -> jax.Array:
        """Draw siblings one by one, each from what earlier ones left of the row.

        Args:
          pairs: float32 [C, 2] in [0, 1), a pair for each sibling; C <= V.
          draft_row: float [V], probabilities.

        Returns:
          int32 [C], distinct, in the order drawn.
        """
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
    tokens: jax.Array, draft_rows: Rows, num_drafted: jax.Array | int | None = None
) -> WithReplacement:
    """Record a single path of sampled tokens with the rows they were drawn from.

    Args:
      tokens: int32 [T], each drawn from its draft row.
      draft_rows: [T, V], row t is exactly the law that token t was drawn from: after temperature and
        filters, in the precision that was sampled.
      num_drafted: int32 [], how many tokens count, 0 to T. Default T. It may depend on the context and
        on the tokens that count, the last one's value included: stop after a token for what it is, but
        never drop a token for what it is (`jaxspec.trees.chain`).

    Returns:
      The proposal, with node t + 1 for token t.

    Raises:
      AssertionError: tokens are not a vector of integers.
      TreeError: `num_drafted` is known and outside 0 to T. Under a trace the verifiers set
        `Status.BAD_TREE` and emit nothing.

    >>> import jax.numpy as jnp
    >>> path = sampled_path(jnp.array([1, 0]), jnp.array([[0.5, 0.5], [0.5, 0.5]]))
    >>> path.tree.max_depth
    2
    """
    return WithReplacement(tree=chain(tokens, num_drafted), draft_rows=draft_rows)


def propose(kind: type[Proposal], tree: Tree, draft_rows: Rows | None) -> Proposal:
    """Make a proposal of a kind that is only known at run time; point masses take no draft rows."""
    make = cast(Callable[..., Proposal], kind)
    return make(tree=tree) if draft_rows is None else make(tree=tree, draft_rows=draft_rows)


def with_draft_rows(proposal: Proposal, draft_rows: Rows) -> Proposal:
    """Return the proposal with other draft rows, of the same law."""
    return replace(cast(Any, proposal), draft_rows=draft_rows)


def as_source(rows: Rows) -> Probabilities | Logits:
    """Take an array of probabilities [R, V] as the row source it stands for."""
    return rows if isinstance(rows, Probabilities | Logits) else Probabilities(values=rows)


def _vocab(rows: Rows) -> int:
    return as_source(rows).values.shape[-1]


def assert_proposal(proposal: Proposal, target_rows: Rows) -> None:
    """Assert the static shapes and dtypes of a proposal and of the rows that verify it."""
    assert_tree(proposal.tree)
    nodes = proposal.tree.max_nodes
    _assert_rows("target", as_source(target_rows), (nodes,))
    if proposal.draft_rows is None:
        if proposal.is_measured:
            raise ValueError(
                "proposal.draft_rows is None: sampled candidates need the rows they were drawn from; "
                "candidates that nobody drew are a PointMass"
            )
        return
    form = "an array [N, V] of probabilities, a Probabilities or a Logits"
    kinds = jax.Array | np.ndarray | Probabilities | Logits
    assert_kind("proposal.draft_rows", proposal.draft_rows, kinds, form)
    _assert_rows("draft", as_source(proposal.draft_rows), (nodes - 1, nodes))
    drafted, wanted = _vocab(proposal.draft_rows), _vocab(target_rows)
    if drafted != wanted:
        raise AssertionError(
            f"draft rows have {drafted} entries, target rows {wanted}: give both one vocabulary, with "
            "probability 0 (logit -inf) for tokens that one of them does not have"
        )


def _assert_rows(name: str, source: Probabilities | Logits, counts: tuple[int, ...]) -> None:
    assert_array(f"{name} rows", source.values, {"N": None, "V": None}, jnp.floating)
    if source.values.dtype.name not in MASS_TOLERANCE:
        raise AssertionError(
            f"{name} rows: dtype {source.values.dtype.name} is none of {', '.join(MASS_TOLERANCE)}"
        )
    rows, vocab = source.values.shape
    if vocab == 0:
        raise AssertionError(f"{name} rows have no entries: a vocabulary has at least one token")
    if source.first is None and rows not in counts:
        raise AssertionError(
            f"{name} rows: {rows} of them, wanted {' or '.join(map(str, counts))}"
            " (one for each node, the root's first)"
        )
    if source.first is not None:
        assert_array(f"{name} rows: first", source.first, {}, jnp.integer)
        if rows == 0:
            raise AssertionError(f"{name} rows: the slab is empty, so there is no row to start at")
    if isinstance(source, Logits):
        assert_array(f"{name} rows: temperature", source.temperature, {}, jnp.floating)
        if source.top_k is not None:
            assert_array(f"{name} rows: top_k", source.top_k, {}, jnp.integer)
        if source.top_p is not None:
            assert_array(f"{name} rows: top_p", source.top_p, {}, jnp.floating)


def check_proposal(proposal: Proposal, target_rows: Rows, bonus: jax.Array) -> None:
    """Check the values of a proposal and of the rows that verify it, under a trace.

    Rows of padding are not looked at, nor leaves' draft rows, nor their target rows without `bonus`.
    """
    tree = proposal.tree
    check_tree(tree, _vocab(target_rows), distinct_siblings=proposal.distinct_siblings)
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
    has_children = tree.children[:, 0] >= 0
    is_read = (nodes < tree.num_nodes) & (has_children | bonus | (nodes == ROOT))
    _check_first("target", target_rows, is_read)
    as_source(target_rows).check("target", is_read)
    if proposal.draft_rows is not None:
        is_drafted = (has_children & (nodes < tree.num_nodes))[:-1]
        _check_first("draft", proposal.draft_rows, is_drafted)
        as_source(proposal.draft_rows).check("draft", is_drafted)


def _check_first(name: str, rows: Rows, is_read: jax.Array) -> None:
    """Check under a trace that the rows of a sequence that are read lie inside its slab."""
    source = as_source(rows)
    if source.first is None or is_read.shape[0] == 0:
        return
    count = jnp.max(jnp.where(is_read, jnp.arange(1, is_read.shape[0] + 1, dtype=jnp.int32), 0))
    slab = source.values.shape[0]
    last = slab - count
    check_all(
        (count == 0) | ((source.first >= 0) & (source.first <= last)),
        name
        + " rows: first is {first}: {count} rows of a slab of "
        + str(slab)
        + " start at 0 to {last}",
        first=source.first,
        count=count,
        last=last,
    )
