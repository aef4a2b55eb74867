"""The rows of a round, read at the nodes that a walk visits, each at most once.

Rows of probabilities are assumed to have unit mass at first: only their entries at candidates are
read. If a measured mass could have changed a decision (masses differ from 1 within the dtype's
tolerance), the decision is doubtful, and the walk is repeated with exact masses.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxspec.checks import struct
from jaxspec.loops import when, zeros_like_result
from jaxspec.proposals import Remainder
from jaxspec.rows import UNIT_MASS, Normalizer, RowSource, StoredRow, index_of, vocab_of
from jaxspec.slabs.base import AnySlab, entries_at
from jaxspec.tiles import LEAST, TILE, tile_sums, tokens_from
from jaxspec.trees import ROOT, child_slots
from jaxspec.verify.arguments import Arguments
from jaxspec.verify.verdict import Status, flag

Slabs: TypeAlias = tuple[AnySlab, AnySlab | None]
"""The slabs of the target rows [R, V] and of the draft rows, apart from what is small."""


@struct
class Site:
    """A visited node and the result of reading its rows once."""

    node: jax.Array  # []
    target: Normalizer  # of its target row
    draft: Normalizer  # of its draft row; () without one
    status: jax.Array  # [] bits of `Status` of these two rows
    is_lost: jax.Array  # [] nothing can be tested or drawn here
    is_cut: jax.Array  # [] the draft row is invalid: candidates are skipped


class Piece(NamedTuple):
    """Consecutive entries of a node's rows."""

    p: jax.Array  # float32 [size], of the target row, normalized
    q: jax.Array  # float32 [size], of the draft row, normalized; zeros without one
    target_raw: jax.Array | None  # [size], as stored, where unit mass is assumed
    draft_raw: jax.Array | None  # [size], as stored, where unit mass is assumed


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of one source: a slab, and how it is read."""

    slab: AnySlab  # [R, V]
    source: RowSource  # without its slab
    room: jax.Array  # [], rows of the slab from the first on
    spans: bool

    @property
    def is_assumed(self) -> bool:
        return self.source.assumes_unit_mass(self.slab.dtype)

    @property
    def tolerance(self) -> float:
        return self.source.mass_tolerance(self.slab.dtype)

    def row(self, node: jax.Array) -> StoredRow:
        # The row of a leaf may be missing; it is then not used, and reading is clipped.
        vocab = vocab_of(self.source, self.slab)
        return StoredRow(self.slab, index_of(self.source, node), vocab, self.spans)

    def entries(self, nodes: jax.Array, tokens: jax.Array) -> jax.Array:
        """Gather stored entries, one of each node's row, both clipped into range."""
        last = vocab_of(self.source, self.slab) - 1
        return entries_at(self.slab, index_of(self.source, nodes), jnp.clip(tokens, 0, last))

    def is_sound(self, entry: jax.Array) -> jax.Array:
        """Return whether an entry can be one of a valid row; a NaN cannot."""
        return entry <= 1 + min(self.tolerance, 1.0)


class RowReader:
    """Access to the rows of a round, shared by both walks; made anew for each trace."""

    def __init__(self, slabs: Slabs, given: Arguments, *, is_exact: jax.Array, spans: bool) -> None:
        """Gather the stored entries at every candidate; nothing is normalized yet."""
        self.kind, self.tree, self.draws, self.bonus = (
            given.kind,
            given.tree,
            given.draws,
            given.bonus,
        )
        self.is_exact = is_exact
        self.spans = spans
        self.vocab = vocab_of(given.target, slabs[0])
        self.target = _Rows(slabs[0], given.target, given.target_room, spans)
        self.draft: _Rows | None = None
        if slabs[1] is not None and given.draft is not None:
            self.draft = _Rows(slabs[1], given.draft, given.draft_room, spans)
        self.slots = child_slots(self.tree)
        self._visit_once = jax.jit(self._visit)  # traced once for its shapes and its results
        parents, tokens = self.tree.parents, self.tree.tokens
        self._target_at = self.target.entries(parents, tokens)
        self._draft_at = None if self.draft is None else self.draft.entries(parents, tokens)

    def may_emit(self, node: jax.Array) -> jax.Array:
        """Return whether stopping at a node emits one more token: not at a leaf without `bonus`."""
        return self.has_children(node) | self.bonus | (node == ROOT)

    def has_children(self, node: jax.Array) -> jax.Array:
        """Return whether a node has candidates below it."""
        return self.slots[node, 0] >= 0

    def _visit(self, node: jax.Array, is_entered: jax.Array) -> Site:
        needs_draft = is_entered & self.has_children(node)
        needs_target = needs_draft | (is_entered & self.may_emit(node))
        target, target_status = self._normalizer(self.target, node, needs_target)
        is_outside = needs_target & (node >= self.target.room)
        draft: Normalizer = ()
        draft_status = jnp.int32(0)
        if self.draft is not None:
            draft, draft_status = self._normalizer(self.draft, node, needs_draft)
            is_outside |= needs_draft & (node >= self.draft.room)
        return Site(
            node=node,
            target=target,
            draft=draft,
            status=target_status | draft_status | flag(is_outside, Status.OUTSIDE_SLAB),
            is_lost=(target_status != 0) | is_outside,
            is_cut=draft_status != 0,
        )

    def visit(self, node: jax.Array, is_entered: jax.Array) -> Site:
        """Enter a node: read what normalizing its rows needs, if they are needed."""
        return self._visit_once(node, is_entered)

    def unvisited(self) -> Site:
        """Return a site of which nothing is known, at the root."""
        return zeros_like_result(lambda: self.visit(jnp.int32(ROOT), jnp.ones((), bool)))

    def at(self, site: Site, child: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return p and q at a candidate (q is 1 without draft rows), and whether they are sound."""
        token = self.tree.tokens[child]
        p = self.target.source.probability(self._target_at[child], token, site.target)
        is_sound = self.target.is_sound(p)
        if self.draft is None or self._draft_at is None:
            return p, jnp.float32(1), is_sound
        q = self.draft.source.probability(self._draft_at[child], token, site.draft)
        return p, q, is_sound & self.draft.is_sound(q)

    def piece(self, site: Site, start: Any, size: int) -> Piece:
        """Return consecutive entries of a node's rows, to be summed."""
        tokens = tokens_from(start, size)
        target_raw = self.target.row(site.node).read(start, size)
        p = self.target.source.summand(target_raw, tokens, site.target)
        kept = target_raw if self.target.is_assumed else None
        if self.draft is None:
            return Piece(p, jnp.zeros_like(p), kept, None)
        draft_raw = self.draft.row(site.node).read(start, size)
        q = self.draft.source.summand(draft_raw, tokens, site.draft)
        return Piece(p, q, kept, draft_raw if self.draft.is_assumed else None)

    def sums(
        self,
        site: Site,
        removed: jax.Array,
        quantity: Callable[[Piece, jax.Array | None], tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, ...]:
        """Sum quantities over the tiles of a node's rows.

        `quantity(piece, tokens)` is given the tokens only where one of the `removed` tokens [C] may be
        among them, so that the pass over all other tiles need not compare.
        """

        def piece(start: Any, size: int, tokens: jax.Array | None) -> tuple[jax.Array, ...]:
            return quantity(self.piece(site, start, size), tokens)

        mended = jnp.where(removed >= 0, removed // TILE, 0)
        return tile_sums(piece, self.vocab, mended=mended, spans=self.spans)

    def removed_tokens(self, node: jax.Array, left: Remainder) -> jax.Array:
        """Return the tokens [C] of removed siblings, -1 for the others."""
        children = self.tree.children[node]
        return jnp.where(left.removed & (children >= 0), self.tree.tokens[children], -1)

    def is_removed(self, node: jax.Array, left: Remainder, tokens: jax.Array | None) -> jax.Array:
        """Return which tokens [...] are those of removed siblings; None for no such token."""
        if tokens is None:
            return jnp.zeros((), bool)
        gone = self.removed_tokens(node, left)
        return jnp.any(tokens[..., None] == gone.reshape((1,) * tokens.ndim + (-1,)), axis=-1)

    def slack(self) -> float:
        """Return the relative error of the sides of a test where unit mass is assumed."""
        return 3 * sum(rows.tolerance for rows in self._assumed())

    def is_off(self, mass: jax.Array) -> jax.Array:
        """Return whether a measured mass contradicts the assumption that it is 1."""
        return ~self.is_exact & ~(jnp.abs(mass - 1) <= UNIT_MASS)

    def guarded(self, weights: jax.Array, piece: Piece) -> jax.Array:
        """Return the weights, infinite where a row of assumed unit mass has a negative entry."""
        raws = [raw for raw in (piece.target_raw, piece.draft_raw) if raw is not None]
        if not raws:
            return weights
        least = functools.reduce(jnp.minimum, raws)
        is_bad = ~self.is_exact & (least.astype(jnp.float32) <= -LEAST)
        return jnp.where(is_bad, jnp.inf, weights)

    def _assumed(self) -> list[_Rows]:
        return [rows for rows in (self.target, self.draft) if rows is not None and rows.is_assumed]

    def _normalizer(
        self, rows: _Rows, node: jax.Array, is_needed: jax.Array
    ) -> tuple[Normalizer, jax.Array]:
        """Return a row's normalizer, and the status of the row if it was read."""
        is_read, unread = is_needed, None
        if rows.is_assumed:
            is_read, unread = is_needed & self.is_exact, jnp.float32(1)
        norm = when(is_read, lambda: rows.source.visit(rows.row(node)), unread)
        mass = rows.source.mass(norm)
        is_finite = jnp.isfinite(mass)
        has_mass = mass != 0
        is_one = jnp.abs(mass - 1) <= rows.tolerance
        return norm, (
            flag(is_read & ~is_finite, Status.NON_FINITE_ROW)
            | flag(is_read & ~has_mass, Status.MASSLESS_ROW)
            | flag(is_read & is_finite & has_mass & ~is_one, Status.NOT_NORMALIZED)
        )
