"""The one piece of algebra that every lossless rule here is made of.

State at a node: a prefix weight `a` in (0, 1] and a row `r`, both held as the scalars of a
`Remainder`. For a candidate x drawn from a row s that may depend only on the past:

    test x      u s(x) < a r(x)            strict, without division or epsilon
    on reject   Z = sum relu(a r - s), D = sum relu(s - a r);  r <- relu(a r - s) / Z, a <- Z / D

Top-down walks keep a = 1; bottom-up walks carry it. Two files walk; this one holds what they share.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import record
from jaxspec.draws import Draws
from jaxspec.logits import Logits
from jaxspec.proposals import Proposal, Remainder, as_source, whole_row
from jaxspec.rows import (
    BLOCK,
    Normaliser,
    Probabilities,
    block_span,
    block_sums,
    draw_from_blocks,
    entries,
    is_uniform,
    stretch,
    used_pair,
    when,
)
from jaxspec.verify.verdict import Status, Verdict

T = TypeVar("T")


@record
class Site:
    """A visited node and what reading its rows once has told.

    Attributes:
      node: int32 [].
      target: normaliser of its target row.
      draft: normaliser of its draft row; () without one.
    """

    node: jax.Array  # []
    target: Normaliser
    draft: Normaliser


@record
class Test:
    """One candidate, ready to be tested.

    Attributes:
      weight: float32 [], its undivided weight in the remaining row, `scale a r(x)`.
      top: float32 [], `top / bottom` is the probability s(x) it was drawn with.
      bottom: float32 [].
      is_possible: bool [], False if it is to be skipped.
      is_finite: bool [], False if an entry read for it is NaN or infinite.
      status: int32 [], bits of `Status`.
    """

    weight: jax.Array  # []
    top: jax.Array  # []
    bottom: jax.Array  # []
    is_possible: jax.Array  # []
    is_finite: jax.Array  # []
    status: jax.Array  # []


@record
class Sums:
    """What one pass over a node's rows tells after a rejection.

    Attributes:
      mass: float32 [], of the remaining row.
      missed: float32 [], `scale D`: the draft's share beyond the row before the rejection.
      pool: float32 [], draft mass not drawn yet.
      target: float32 [], of the target row as it is stored; 0 for a row that is none.
    """

    mass: jax.Array  # []
    missed: jax.Array  # []
    pool: jax.Array  # []
    target: jax.Array  # []


class Node:
    """Access to the rows of a round, shared by both walks; made anew for each trace."""

    def __init__(
        self, proposal: Proposal, target: Probabilities | Logits, draws: Draws, *, spans: bool
    ) -> None:
        """Gather the stored entries at every candidate; nothing is normalised yet."""
        self.proposal = proposal
        self.tree = proposal.tree
        self.target = target
        self.draws = draws
        self.spans = spans
        self.vocab = target.values.shape[1]
        self.draft = None if proposal.draft_rows is None else as_source(proposal.draft_rows)
        if self.draft is not None and self.draft.values.shape[0] == 0:
            self.draft = None  # a path of no tokens: no row was drawn from
        tokens = self.tree.tokens
        self._target_at = entries(target, self.tree.parents, tokens)
        self._draft_at = (
            None if self.draft is None else entries(self.draft, self.tree.parents, tokens)
        )

    def child(self, node: jax.Array, rank: jax.Array) -> jax.Array:
        """Return the child of a node by rank; -1 if it has no such child.

        A slot that does not lead onwards is none: so a walk ends whatever the slots hold.
        """
        width = self.tree.max_children
        child = self.tree.children[node, jnp.minimum(rank, width - 1)]
        is_child = (rank < width) & (child > node) & (child < self.tree.max_nodes)
        return jnp.where(is_child, child, -1)

    def has_children(self, node: jax.Array) -> jax.Array:
        """Tell whether a node has candidates below it."""
        return self.child(node, jnp.int32(0)) >= 0

    def may_emit(self, node: jax.Array, bonus: jax.Array) -> jax.Array:
        """Tell whether stopping at a node emits one more token: not at a leaf without `bonus`."""
        return self.has_children(node) | bonus | (node == 0)

    def visit(self, node: jax.Array, is_entered: jax.Array, *, bonus: jax.Array) -> Site:
        """Arrive at a node: read from its rows what normalising them needs, if they are needed."""
        needs_draft = is_entered & self.has_children(node)
        needs_target = needs_draft | (is_entered & self.may_emit(node, bonus))
        return Site(
            node=node,
            target=self._visit(self.target, node, needs_target),
            draft=() if self.draft is None else self._visit(self.draft, node, needs_draft),
        )

    def _visit(
        self, source: Probabilities | Logits, node: jax.Array, is_needed: jax.Array
    ) -> Normaliser:
        if isinstance(source, Probabilities):
            return ()
        return when(is_needed, lambda: source.visit(node, spans=self.spans))

    def test(self, site: Site, left: Remainder, child: jax.Array) -> Test:
        """Look up what testing one candidate needs: the entries at its token, nothing else."""
        token = self.tree.tokens[child]
        is_token = (token >= 0) & (token < self.vocab)
        p_at = self.target.probability(self._target_at[child], token, site.target)
        if self.draft is None or self._draft_at is None:
            q_at = jnp.float32(1)
        else:
            q_at = self.draft.probability(self._draft_at[child], token, site.draft)
        is_removed = self._is_removed(site.node, left, token)
        top, bottom = self.proposal.share(left, q_at)
        is_finite = ~is_token | (jnp.isfinite(p_at) & jnp.isfinite(q_at))
        could_draw = self.proposal.could_draw(left, q_at, is_removed)
        return Test(
            weight=self.proposal.row(left, p_at, q_at, is_removed),
            top=top,
            bottom=bottom,
            is_possible=is_token & could_draw & is_finite,
            is_finite=is_finite,
            status=(
                flag(~is_token, Status.BAD_CANDIDATE)
                | flag(is_token & is_finite & ~could_draw, Status.OUTSIDE_SUPPORT)
                | flag(~is_finite, Status.NON_FINITE_ROW)
            ),
        )

    def _is_removed(self, node: jax.Array, left: Remainder, tokens: jax.Array) -> jax.Array:
        """Tell which tokens [...] are those of removed siblings."""
        gone = self._removed_tokens(node, left)
        return jnp.any(tokens[..., None] == gone.reshape((1,) * tokens.ndim + (-1,)), axis=-1)

    def _removed_tokens(self, node: jax.Array, left: Remainder) -> jax.Array:
        """Return the tokens [C] of removed siblings, -1 for the others."""
        children = self.tree.children[node]
        return jnp.where(left.removed & (children >= 0), self.tree.tokens[children], -1)

    def _rows_at(self, site: Site, start: Any, size: int) -> tuple[jax.Array, jax.Array]:
        """Return target and draft probabilities [size] from a token on."""
        p = stretch(self.target, site.node, site.target, start, size)
        if self.draft is None:
            return p, jnp.zeros_like(p)
        # A leaf's draft row may be missing; whatever stands there is not used (Proposal.row).
        row = site.node
        if self.draft.first is None:
            row = jnp.minimum(row, self.draft.values.shape[0] - 1)
        return p, stretch(self.draft, row, site.draft, start, size)

    def _sums(
        self,
        site: Site,
        removed: jax.Array,
        quantity: Callable[[jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, ...]:
        """Sum quantities over the blocks of a node's rows.

        `quantity(p, q, tokens)` is told the tokens only where one of the `removed` tokens may be
        among them. Everywhere else the pass over the row need not compare.
        """

        def piece(start: Any, size: int) -> tuple[jax.Array, ...]:
            return quantity(*self._rows_at(site, start, size), None)

        def exact(block: jax.Array) -> tuple[jax.Array, ...]:
            start, size = block_span(block, self.vocab)
            tokens = start + jnp.arange(size, dtype=jnp.int32)
            inside = tokens >= block * BLOCK
            quantities = quantity(*self._rows_at(site, start, size), tokens)
            return tuple(jnp.sum(jnp.where(inside, x, 0.0)) for x in quantities)

        if self.vocab <= BLOCK:
            return tuple(x[None] for x in exact(jnp.int32(0)))
        sums = block_sums(piece, self.vocab, spans=self.spans)
        blocks = jnp.where(removed >= 0, removed // BLOCK, 0)
        mended = jax.vmap(exact)(blocks)
        return tuple(x.at[blocks].set(y) for x, y in zip(sums, mended, strict=True))

    def measure(self, site: Site, before: Remainder, after: Remainder) -> Sums:
        """Sum in one pass what a rejection left."""
        gone = self._removed_tokens(site.node, after)

        def quantity(p: jax.Array, q: jax.Array, tokens: jax.Array | None) -> tuple[jax.Array, ...]:
            if tokens is None:
                was = is_now = jnp.zeros((), bool)
            else:
                was = self._is_removed(site.node, before, tokens)
                is_now = self._is_removed(site.node, after, tokens)
            owed = self.proposal.scaled_share(before, q, was)
            return (
                self.proposal.row(after, p, q, is_now),
                jnp.maximum(owed - self.proposal.row(before, p, q, was), 0.0),
                jnp.where(is_now, 0.0, q),
                p,
            )

        mass, missed, pool, target = map(jnp.sum, self._sums(site, gone, quantity))
        return Sums(mass=mass, missed=missed, pool=pool, target=target)

    def final_draw(
        self, site: Site, left: Remainder, is_wanted: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Draw the final token from what is left of a node's row.

        Returns:
          (token, status): -1 and why where no token can be drawn.
        """
        whole = whole_row(jnp.float32(1), self.tree.max_children)
        left = choose(left.is_whole, whole, left)

        def sums_of(left: Remainder) -> jax.Array:
            def quantity(p: jax.Array, q: jax.Array, tokens: jax.Array | None) -> tuple[jax.Array]:
                if tokens is None:
                    return (self.proposal.row(left, p, q, jnp.zeros((), bool)),)
                return (self.proposal.row(left, p, q, self._is_removed(site.node, left, tokens)),)

            return self._sums(site, self._removed_tokens(site.node, left), quantity)[0]

        def attempt(
            state: tuple[jax.Array, Remainder, jax.Array],
        ) -> tuple[jax.Array, Remainder, jax.Array]:
            _, left, _ = state
            sums = sums_of(left)
            is_empty = (jnp.sum(sums) == 0) & ~left.is_whole
            return is_empty, choose(is_empty, whole, left), sums

        no_sums = jnp.zeros(-(-self.vocab // BLOCK), jnp.float32)
        start = (is_wanted, left, no_sums)
        _, drawn_from, sums = lax.while_loop(lambda state: state[0], attempt, start)

        def piece(start: Any, size: int) -> jax.Array:
            p, q = self._rows_at(site, start, size)
            tokens = start + jnp.arange(size, dtype=jnp.int32)
            removed = self._is_removed(site.node, drawn_from, tokens)
            return self.proposal.row(drawn_from, p, q, removed)

        total = jnp.sum(sums)
        pair = self.draws.final
        bad_draw = ~jnp.all(is_uniform(used_pair(pair, self.vocab)))
        is_drawn = is_wanted & jnp.isfinite(total) & (total > 0) & ~bad_draw
        token = jnp.where(is_drawn, draw_from_blocks(pair, sums, piece, self.vocab), -1)
        status = (
            flag(is_wanted & ~jnp.isfinite(total), Status.NON_FINITE_ROW)
            | flag(is_wanted & (total == 0), Status.MASSLESS_ROW)
            | flag(is_wanted & ~left.is_whole & drawn_from.is_whole, Status.EMPTY_RESIDUAL)
            | flag(is_wanted & bad_draw, Status.BAD_DRAW)
        )
        return token, status

    def conclude(
        self,
        site: Site,
        left: Remainder,
        path: jax.Array,
        depth: jax.Array,
        status: jax.Array,
        *,
        bonus: jax.Array,
        may_draw: jax.Array,
    ) -> Verdict:
        """Draw the final token where there is one and write the verdict."""
        is_wanted = may_draw & self.may_emit(site.node, bonus)
        token, final_status = self.final_draw(site, left, is_wanted)
        slots = jnp.arange(path.shape[0], dtype=jnp.int32)
        is_accepted = (slots > 0) & (slots <= depth)
        accepted = jnp.where(is_accepted, self.tree.tokens[path], -1)
        # Slot i of `path` is the node at depth i; its token is the i-th emitted, from 0.
        tokens = jnp.roll(accepted, -1).at[depth].set(token)
        return Verdict(
            tokens=tokens,
            num_tokens=depth + jnp.where(token >= 0, 1, 0).astype(jnp.int32),
            num_accepted=depth,
            path=jnp.where(slots <= depth, path, -1),
            stop_node=site.node,
            status=status | final_status,
        )


def accepts(u: jax.Array, test: Test, left: Remainder) -> jax.Array:
    """Test `u s(x) < a r(x)`, multiplied out."""
    return u * test.top * left.scale < test.weight * test.bottom


def flag(is_set: jax.Array, status: Status) -> jax.Array:
    """Return the bit of a status where the condition holds."""
    return jnp.where(is_set, int(status), 0).astype(jnp.int32)


def choose(condition: jax.Array, yes: T, no: T) -> T:
    """Choose between two records of arrays of like shapes, field by field."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
