"""The one piece of algebra that every lossless rule here is made of.

State at a node: a prefix weight `a` in (0, 1] and a row `r`, both held as the scalars of a
`Remainder`. For a candidate x drawn from a row s that may depend only on the past:

    test x      u s(x) < a r(x)            strict, without division or epsilon
    on reject   Z = sum relu(a r - s), D = sum relu(s - a r);  r <- relu(a r - s) / Z, a <- Z / D

Top-down walks keep a = 1; bottom-up walks carry it. Two files walk; this one holds what they share.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxspec.checks import struct
from jaxspec.draws import Draws
from jaxspec.logits import Logits
from jaxspec.loops import varying_alike, when, while_loop
from jaxspec.proposals import Proposal, Remainder, as_source, whole_row
from jaxspec.rows import (
    LEAST,
    TILE,
    TRUST,
    Normaliser,
    Probabilities,
    block_span,
    block_sums,
    draw_from_blocks,
    entries,
    is_uniform,
    slice_of,
    used_pair,
    weights_of,
)
from jaxspec.verify.verdict import Status, Verdict

T = TypeVar("T")


@struct
class Room:
    """How many rows of the slabs a sequence may read, from its first on.

    Attributes:
      target: int32 [].
      draft: int32 [].
    """

    target: jax.Array  # []
    draft: jax.Array  # []


@struct
class Site:
    """A visited node and what reading its rows once has told.

    Attributes:
      node: int32 [].
      target: normaliser of its target row.
      draft: normaliser of its draft row; () without one.
      status: int32 [], bits of `Status` of these two rows.
      is_lost: bool [], nothing can be tested or drawn here.
      is_cut: bool [], the draft row is bad: candidates are skipped.
    """

    node: jax.Array  # []
    target: Normaliser
    draft: Normaliser
    status: jax.Array  # []
    is_lost: jax.Array  # []
    is_cut: jax.Array  # []


@struct
class Test:
    """One candidate, ready to be tested.

    Attributes:
      weight: float32 [], its undivided weight in the remaining row, `scale a r(x)`.
      top: float32 [], `top / bottom` is the probability s(x) it was drawn with.
      bottom: float32 [].
      is_possible: bool [], False if it is to be skipped.
      is_doubtful: bool [], an entry cannot be one of a row that was taken on trust.
      status: int32 [], bits of `Status`.
    """

    weight: jax.Array  # []
    top: jax.Array  # []
    bottom: jax.Array  # []
    is_possible: jax.Array  # []
    is_doubtful: jax.Array  # []
    status: jax.Array  # []


@struct
class Piece:
    """Consecutive entries of a node's rows.

    Attributes:
      p: float32 [size], of the target row, normalised.
      q: float32 [size], of the draft row, normalised; zeros without one.
      p_raw: float [size], as stored.
      q_raw: float [size], as stored; None without a draft row.
    """

    p: jax.Array  # [size]
    q: jax.Array  # [size]
    p_raw: jax.Array  # [size]
    q_raw: jax.Array | None  # [size]


@struct
class Sums:
    """What one pass over a node's rows tells after a rejection.

    Attributes:
      mass: float32 [], of the remaining row.
      missed: float32 [], `scale D`: the draft's share beyond the row before the rejection.
      pool: float32 [], draft mass not drawn yet; 1 where no sibling can follow.
      is_doubtful: bool [], the mass of a row that was taken on trust is not 1.
    """

    mass: jax.Array  # []
    missed: jax.Array  # []
    pool: jax.Array  # []
    is_doubtful: jax.Array  # []


class Node:
    """Access to the rows of a round, shared by both walks; made anew for each trace.

    Rows of probabilities are taken on trust at first: a mass of 1 is assumed and only entries at
    candidates are read. Whatever could have come out otherwise had the masses been read, which lie
    within the dtype's tolerance, is doubtful, and the walk is then repeated with exact masses.
    """

    def __init__(
        self,
        proposal: Proposal,
        target: Probabilities | Logits,
        draws: Draws,
        room: Room,
        *,
        is_exact: jax.Array,
        spans: bool,
    ) -> None:
        """Gather the stored entries at every candidate; nothing is normalised yet."""
        self.proposal = proposal
        self.tree = proposal.tree
        self.target = target
        self.draws = draws
        self.room = room
        self.is_exact = is_exact
        self.spans = spans
        self.vocab = target.values.shape[1]
        self.draft = draft_of(proposal)
        self._target_masses, self._draft_masses = self._masses()
        tokens = self.tree.tokens
        self._target_at = entries(target, self.tree.parents, tokens)
        self._draft_at = (
            None if self.draft is None else entries(self.draft, self.tree.parents, tokens)
        )

    @property
    def is_torn(self) -> jax.Array:
        """Whether the tree is none from the outset: a path of an impossible length, say."""
        return self.tree.level_sizes[0] != 1

    def child(self, node: jax.Array, rank: jax.Array) -> jax.Array:
        """Return the child of a node by rank; -1 if it has no such child, or `contradicts` there.

        Slots count only if they rise and the nodes in them say that this is their parent. So a walk
        visits no node twice, whatever the slots hold.
        """
        width = self.tree.max_children
        slots = self.tree.children[node]
        child = slots[jnp.minimum(rank, width - 1)]
        elder = jnp.where(rank > 0, slots[jnp.clip(rank - 1, 0, width - 1)], node)
        inside = jnp.clip(child, 0, self.tree.max_nodes - 1)
        is_child = (rank < width) & (child > node) & (child > elder) & (child == inside)
        return jnp.where(is_child & (self.tree.parents[inside] == node), child, -1)

    def contradicts(self, node: jax.Array, rank: jax.Array) -> jax.Array:
        """Tell whether a node's slot of this rank holds something that is no child of it."""
        width = self.tree.max_children
        slot = self.tree.children[node, jnp.minimum(rank, width - 1)]
        return (rank < width) & (slot != -1) & (self.child(node, rank) < 0)

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
        target, target_status = self._visit(self.target, self._target_masses, node, needs_target)
        is_outside = needs_target & (node >= self.room.target)
        draft: Normaliser = ()
        draft_status = jnp.int32(0)
        if self.draft is not None:
            draft, draft_status = self._visit(self.draft, self._draft_masses, node, needs_draft)
            is_outside |= needs_draft & (node >= self.room.draft)
        return Site(
            node=node,
            target=target,
            draft=draft,
            status=target_status | draft_status | flag(is_outside, Status.OUTSIDE_SLAB),
            is_lost=(target_status != 0) | is_outside,
            is_cut=draft_status != 0,
        )

    def _masses(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Return the masses of every node's rows, 1 where rows are on trust; None for logits.

        An exact walk over rows that were trusted first is rare, so these are summed in one place,
        not at each visit.
        """
        sources = [s for s in (self.target, self.draft) if s is not None and trusts(s)]
        if not sources:
            return None, None

        def of_row(row: jax.Array) -> tuple[jax.Array, ...]:
            def piece(start: Any, size: int) -> tuple[jax.Array, ...]:
                return tuple(weights_of(slice_of(s, row, start, size)) for s in sources)

            return tuple(map(jnp.sum, block_sums(piece, self.vocab, spans=self.spans)))

        rows = jnp.arange(self.tree.max_nodes, dtype=jnp.int32)
        on_trust = varying_alike((jnp.ones(rows.shape, jnp.float32), self.draws.final))[0]
        masses = when(
            self.is_exact, lambda: jax.lax.map(of_row, rows), tuple(on_trust for _ in sources)
        )
        of = dict(zip(map(id, sources), masses, strict=True))
        return of.get(id(self.target)), of.get(id(self.draft))

    def _visit(
        self,
        source: Probabilities | Logits,
        masses: jax.Array | None,
        node: jax.Array,
        is_needed: jax.Array,
    ) -> tuple[Normaliser, jax.Array]:
        """Return a row's normaliser and what is wrong with the row, if it was read."""
        if masses is None:
            is_read = is_needed
            norm = when(is_read, lambda: source.visit(node, spans=self.spans))
        else:
            is_read = is_needed & self.is_exact
            norm = masses[node]
        mass = source.mass(norm)
        is_finite = jnp.isfinite(mass)
        has_mass = mass != 0
        is_one = jnp.abs(mass - 1) <= source.mass_tolerance
        return norm, (
            flag(is_read & ~is_finite, Status.NON_FINITE_ROW)
            | flag(is_read & ~has_mass, Status.MASSLESS_ROW)
            | flag(is_read & is_finite & has_mass & ~is_one, Status.NOT_NORMALIZED)
        )

    def test(self, site: Site, left: Remainder, child: jax.Array) -> Test:
        """Look up what testing one candidate needs: the entries at its token, nothing else."""
        token = self.tree.tokens[child]
        is_token = (token >= 0) & (token < self.vocab)
        p_at = self.target.probability(self._target_at[child], token, site.target)
        is_sound = self._is_sound(self.target, p_at)
        if self.draft is None or self._draft_at is None:
            q_at = jnp.float32(1)
        else:
            q_at = self.draft.probability(self._draft_at[child], token, site.draft)
            is_sound &= self._is_sound(self.draft, q_at)
        is_removed = self._is_removed(site.node, left, token)
        top, bottom = self.proposal.share(left, q_at)
        could_draw = self.proposal.could_draw(left, q_at, is_removed)
        is_open = ~site.is_cut & ~site.is_lost
        return Test(
            weight=self.proposal.row(left, p_at, q_at, is_removed),
            top=top,
            bottom=bottom,
            is_possible=is_token & could_draw & is_sound & is_open,
            is_doubtful=is_token & ~is_sound & ~self.is_exact,
            status=(
                flag(~is_token, Status.BAD_CANDIDATE)
                | flag(is_token & is_sound & ~could_draw & is_open, Status.OUTSIDE_SUPPORT)
                | flag(is_token & ~is_sound & is_open, Status.NON_FINITE_ROW)
            ),
        )

    def _is_sound(self, source: Probabilities | Logits, entry: jax.Array) -> jax.Array:
        """Tell whether an entry can be one of a row; a NaN cannot."""
        return entry <= 1 + min(source.mass_tolerance, 1.0)

    def slack(self) -> float:
        """Return by how much of their size the sides of a test may be off for rows on trust."""
        return 3 * sum(s.mass_tolerance for s in (self.target, self.draft) if s and trusts(s))

    def is_off(self, mass: jax.Array) -> jax.Array:
        """Tell whether a measured mass shows that a row should not have been taken on trust."""
        return ~self.is_exact & ~(jnp.abs(mass - 1) <= TRUST)

    def _is_removed(self, node: jax.Array, left: Remainder, tokens: jax.Array) -> jax.Array:
        """Tell which tokens [...] are those of removed siblings."""
        gone = self._removed_tokens(node, left)
        return jnp.any(tokens[..., None] == gone.reshape((1,) * tokens.ndim + (-1,)), axis=-1)

    def _removed_tokens(self, node: jax.Array, left: Remainder) -> jax.Array:
        """Return the tokens [C] of removed siblings, -1 for the others."""
        children = self.tree.children[node]
        return jnp.where(left.removed & (children >= 0), self.tree.tokens[children], -1)

    def _draft_row(self, site: Site) -> jax.Array:
        """Return the draft row of a node; a leaf's may be missing, and then is not used."""
        if self.draft is None or self.draft.first is not None:
            return site.node
        return jnp.minimum(site.node, self.draft.values.shape[0] - 1)

    def _piece(self, site: Site, start: Any, size: int) -> Piece:
        """Return a piece of a node's rows to be summed."""
        tokens = start + jnp.arange(size, dtype=jnp.int32)
        p_raw = slice_of(self.target, site.node, start, size)
        p = self.target.summand(p_raw, tokens, site.target)
        if self.draft is None:
            return Piece(p=p, q=jnp.zeros_like(p), p_raw=p_raw, q_raw=None)
        q_raw = slice_of(self.draft, self._draft_row(site), start, size)
        q = self.draft.summand(q_raw, tokens, site.draft)
        return Piece(p=p, q=q, p_raw=p_raw, q_raw=q_raw)

    def _masses_of(self, piece: Piece, *, looks_at_draft: bool) -> tuple[jax.Array, ...]:
        """Return what is summed to see whether rows could be taken on trust."""
        masses = [piece.p_raw] if trusts(self.target) else []
        if looks_at_draft and trusts(self.draft) and piece.q_raw is not None:
            masses.append(piece.q_raw)
        return tuple(x.astype(jnp.float32) for x in masses)

    def _guarded(self, weights: jax.Array, piece: Piece) -> jax.Array:
        """Return the weights, infinite where a row on trust has a negative entry."""
        given = ((self.target, piece.p_raw), (self.draft, piece.q_raw))
        raws = [raw for source, raw in given if raw is not None and trusts(source)]
        if not raws:
            return weights
        least = functools.reduce(jnp.minimum, raws)
        is_bad = ~self.is_exact & (least.astype(jnp.float32) <= -LEAST)
        return jnp.where(is_bad, jnp.inf, weights)

    def _sums(
        self,
        site: Site,
        removed: jax.Array,
        quantity: Callable[[Piece, jax.Array | None], tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, ...]:
        """Sum quantities over the blocks of a node's rows.

        `quantity(piece, tokens)` is told the tokens only where one of the `removed` tokens may be
        among them. Everywhere else the pass over the row need not compare.
        """

        def piece(start: Any, size: int) -> tuple[jax.Array, ...]:
            return quantity(self._piece(site, start, size), None)

        def exact(block: jax.Array) -> tuple[jax.Array, ...]:
            start, size = block_span(block, self.vocab)
            tokens = start + jnp.arange(size, dtype=jnp.int32)
            inside = tokens >= block * TILE
            quantities = quantity(self._piece(site, start, size), tokens)
            return tuple(jnp.sum(jnp.where(inside, x, 0.0)) for x in quantities)

        if self.vocab <= TILE:
            return tuple(x[None] for x in exact(jnp.int32(0)))
        sums = block_sums(piece, self.vocab, spans=self.spans)
        blocks = jnp.where(removed >= 0, removed // TILE, 0)
        mended = jax.vmap(exact)(blocks)
        return tuple(x.at[blocks].set(y) for x, y in zip(sums, mended, strict=True))

    def measure(self, site: Site, before: Remainder, after: Remainder, *, may_trust: bool) -> Sums:
        """Sum in one pass what a rejection left.

        Args:
          site: where.
          before: the row before it.
          after: the row after it.
          may_trust: whether rows may be on trust here, so that their masses are to be looked at.
        """
        gone = self._removed_tokens(site.node, after)
        has_siblings = self.tree.max_children > 1

        def quantity(piece: Piece, tokens: jax.Array | None) -> tuple[jax.Array, ...]:
            if tokens is None:
                was = is_now = jnp.zeros((), bool)
            else:
                was = self._is_removed(site.node, before, tokens)
                is_now = self._is_removed(site.node, after, tokens)
            p, q = piece.p, piece.q
            draft_weight = self.proposal.scaled_share(before, q, was)
            mass = self.proposal.row(after, p, q, is_now)
            missed = jnp.maximum(draft_weight - self.proposal.row(before, p, q, was), 0.0)
            pool = (jnp.where(is_now, 0.0, q),) if has_siblings else ()
            if not may_trust:
                return mass, missed, *pool
            masses = self._masses_of(piece, looks_at_draft=True)
            return self._guarded(mass, piece), missed, *pool, *masses

        mass, missed, *others = map(jnp.sum, self._sums(site, gone, quantity))
        pool = others.pop(0) if has_siblings else jnp.float32(1)
        is_doubtful = ~self.is_exact & ~jnp.isfinite(mass) if may_trust else jnp.zeros((), bool)
        for other in others:
            is_doubtful |= self.is_off(other)
        return Sums(mass=mass, missed=missed, pool=pool, is_doubtful=is_doubtful)

    def final_draw(
        self, site: Site, left: Remainder, is_wanted: jax.Array, *, trusts_draft: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Draw the final token from what is left of a node's row.

        Returns:
          (token, status, whether a row should not have been taken on trust): -1 and why where no token
          can be drawn.
        """
        whole = whole_row(jnp.float32(1), self.tree.max_children)
        left = choose(left.is_whole, whole, left)

        def sums_of(left: Remainder) -> tuple[jax.Array, ...]:
            def quantity(piece: Piece, tokens: jax.Array | None) -> tuple[jax.Array, ...]:
                if tokens is None:
                    is_removed = jnp.zeros((), bool)
                else:
                    is_removed = self._is_removed(site.node, left, tokens)
                row = self._guarded(self.proposal.row(left, piece.p, piece.q, is_removed), piece)
                # The masses come along where a row was taken on trust.
                return row, *self._masses_of(piece, looks_at_draft=trusts_draft)

            sums, *masses = self._sums(site, self._removed_tokens(site.node, left), quantity)
            return sums, *map(jnp.sum, masses)

        def attempt(state: Any) -> Any:
            _, left, _ = state
            sums = sums_of(left)
            is_empty = (jnp.sum(sums[0]) == 0) & ~left.is_whole
            return is_empty, choose(is_empty, whole, left), sums

        no_sums = jnp.zeros(-(-self.vocab // TILE), jnp.float32)
        looked_at = (self.target, self.draft if trusts_draft else None)
        no_masses = [jnp.float32(0) for source in looked_at if trusts(source)]
        start = (is_wanted, left, (no_sums, *no_masses))
        _, drawn_from, (sums, *masses) = while_loop(lambda state: state[0], attempt, start)
        is_doubtful = is_wanted & ~self.is_exact & ~jnp.isfinite(jnp.sum(sums))
        if trusts(self.target):
            is_doubtful |= is_wanted & self.is_off(masses.pop(0))
        if masses:
            is_doubtful |= is_wanted & ~left.is_whole & self.is_off(masses.pop(0))

        def piece(start: Any, size: int) -> jax.Array:
            piece = self._piece(site, start, size)
            p, q = _without_denormals(piece.p), _without_denormals(piece.q)
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
        return token, status, is_doubtful

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
        trusts_draft: bool,
    ) -> tuple[Verdict, jax.Array]:
        """Draw the final token where there is one and write the verdict.

        Args:
          site: the node that the walk stopped at.
          left: what is left of its row.
          path: int32 [D + 1], the nodes of the accepted path, from the root on.
          depth: int32 [], how many of them were accepted.
          status: int32 [], bits of `Status` so far.
          bonus: bool [], whether a leaf's row is drawn from.
          may_draw: bool [], whether a token may be drawn.
          trusts_draft: whether what is left may come of a draft row that was taken on trust.

        Returns:
          (the verdict, whether the draw read a row that should not have been taken on trust).
        """
        is_wanted = may_draw & self.may_emit(site.node, bonus)
        status |= jnp.where(is_wanted, site.status, 0)
        token, final_status, is_doubtful = self.final_draw(
            site, left, is_wanted & ~site.is_lost, trusts_draft=trusts_draft
        )
        slots = jnp.arange(path.shape[0], dtype=jnp.int32)
        is_accepted = (slots > 0) & (slots <= depth)
        accepted = jnp.where(is_accepted, self.tree.tokens[path], -1)
        # Slot i of `path` is the node at depth i; its token is the i-th emitted, from 0.
        tokens = jnp.roll(accepted, -1).at[depth].set(token)
        verdict = Verdict(
            tokens=tokens,
            num_tokens=depth + jnp.where(token >= 0, 1, 0).astype(jnp.int32),
            num_accepted=depth,
            path=jnp.where(slots <= depth, path, -1),
            stop_node=site.node,
            status=status | final_status,
        )
        return verdict, is_doubtful


def draft_of(proposal: Proposal) -> Probabilities | Logits | None:
    """Return the source of a proposal's draft rows; None where no row was drawn from."""
    if proposal.draft_rows is None:
        return None
    source = as_source(proposal.draft_rows)
    return source if source.values.shape[0] else None  # a path of no tokens has no rows


def _without_denormals(entries: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(entries) < LEAST, 0.0, entries)  # a NaN stays


def trusts(source: Probabilities | Logits | None) -> bool:
    """Tell whether rows of a source may be taken on trust at first."""
    return source is not None and source.may_trust


def accepts(u: jax.Array, test: Test, left: Remainder) -> jax.Array:
    """Test `u s(x) < a r(x)`, multiplied out."""
    return u * test.top * left.scale < test.weight * test.bottom


def is_close_call(u: jax.Array, test: Test, left: Remainder, slack: float) -> jax.Array:
    """Tell whether a test could come out otherwise if its entries were off by a share `slack`."""
    drawn, kept = u * test.top, test.weight * test.bottom
    return jnp.abs(drawn * left.scale - kept) <= slack * (drawn + kept)


def flag(is_set: jax.Array, status: Status) -> jax.Array:
    """Return the bit of a status where the condition holds."""
    return jnp.where(is_set, int(status), 0).astype(jnp.int32)


def choose(condition: jax.Array, yes: T, no: T) -> T:
    """Choose between two records of arrays of like shapes, field by field."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
