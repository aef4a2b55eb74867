"""The algebra that every lossless rule here is made of.

State at a node: a prefix weight `a` in (0, 1] and a row `r`, both held as the scalars of a
`Remainder`. For a candidate x drawn from a row s that may depend only on the past:

    test x      u s(x) < a r(x)            strict, without division or epsilon
    on reject   Z = sum relu(a r - s), D = sum relu(s - a r);  r <- relu(a r - s) / Z, a <- Z / D

Top-down walks keep a = 1; bottom-up walks carry it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checks import struct
from jaxspec.loops import choose, while_loop
from jaxspec.proposals import Remainder, whole_row
from jaxspec.tiles import LEAST, TILE, draw_from_tiles, is_uniform, tokens_from, used_pair
from jaxspec.verify.reader import Piece, RowReader, Site
from jaxspec.verify.verdict import Status, flag


@struct
class Test:
    """One candidate, ready to be tested."""

    weight: jax.Array  # [] undivided weight in the remaining row, `scale a r(x)`
    top: jax.Array  # [] `top / bottom` is the probability s(x) it was drawn with
    bottom: jax.Array  # []
    is_possible: jax.Array  # [] False if it is skipped
    is_doubtful: jax.Array  # [] an entry is impossible in a row whose unit mass was assumed
    status: jax.Array  # [] bits of `Status`


@struct
class Sums:
    """The result of one pass over a node's rows after a rejection."""

    mass: jax.Array  # [] of the remaining row
    deficit: jax.Array  # [] `scale D`: the draft's share beyond the row before the rejection
    pool: jax.Array  # [] draft mass not drawn yet; 1 where no sibling can follow
    is_doubtful: jax.Array  # [] the mass of a row whose unit mass was assumed is not 1


def test(reader: RowReader, site: Site, left: Remainder, child: jax.Array) -> Test:
    """Prepare the test of one candidate from the entries at its token."""
    token = reader.tree.tokens[child]
    is_token = (token >= 0) & (token < reader.vocab)
    p_at, q_at, is_sound = reader.at(site, child)
    is_removed = reader.is_removed(site.node, left, token)
    top, bottom = reader.kind.share(left, q_at, is_removed)
    could_draw = top > 0
    is_open = ~site.is_cut & ~site.is_lost
    return Test(
        weight=reader.kind.row(left, p_at, q_at, is_removed),
        top=top,
        bottom=bottom,
        is_possible=is_token & could_draw & is_sound & is_open,
        is_doubtful=is_token & ~is_sound & ~reader.is_exact,
        status=(
            flag(~is_token, Status.BAD_CANDIDATE)
            | flag(is_token & is_sound & ~could_draw & is_open, Status.OUTSIDE_SUPPORT)
            | flag(is_token & ~is_sound & is_open, Status.NON_FINITE_ROW)
        ),
    )


def accepts(u: jax.Array, test: Test, left: Remainder) -> jax.Array:
    """Test `u s(x) < a r(x)`, multiplied out."""
    return u * test.top * left.scale < test.weight * test.bottom


def is_close_call(u: jax.Array, test: Test, left: Remainder, slack: float) -> jax.Array:
    """Return whether a relative error `slack` of the entries could change the result of a test."""
    drawn, kept = u * test.top, test.weight * test.bottom
    return jnp.abs(drawn * left.scale - kept) <= slack * (drawn + kept)


def measure(
    reader: RowReader, site: Site, before: Remainder, after: Remainder, *, may_assume: bool
) -> Sums:
    """Sum in one pass what a rejection left of a row that was `before` and is `after` it.

    Where unit mass may be assumed, measured masses are compared with 1.
    """
    has_siblings = reader.tree.max_children > 1

    def quantity(piece: Piece, tokens: jax.Array | None) -> tuple[jax.Array, ...]:
        was = reader.is_removed(site.node, before, tokens)
        is_now = reader.is_removed(site.node, after, tokens)
        p, q = piece.p, piece.q
        top, bottom = reader.kind.share(before, q, was)
        drawn = before.scale / bottom * top
        mass = reader.kind.row(after, p, q, is_now)
        deficit = jnp.maximum(drawn - reader.kind.row(before, p, q, was), 0.0)
        pool = (jnp.where(is_now, 0.0, q),) if has_siblings else ()
        if not may_assume:
            return mass, deficit, *pool
        return reader.guarded(mass, piece), deficit, *pool, *_masses(piece, with_draft=True)

    gone = reader.removed_tokens(site.node, after)
    mass, deficit, *others = map(jnp.sum, reader.sums(site, gone, quantity))
    pool = others.pop(0) if has_siblings else jnp.float32(1)
    is_doubtful = ~reader.is_exact & ~jnp.isfinite(mass) if may_assume else jnp.zeros((), bool)
    for other in others:
        is_doubtful |= reader.is_off(other)
    return Sums(mass=mass, deficit=deficit, pool=pool, is_doubtful=is_doubtful)


def final_draw(
    reader: RowReader, site: Site, left: Remainder, may_draw: jax.Array, *, assumes_draft: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw the final token, if one is due, from what is left of the row of the last node.

    `assumes_draft`: `left` may depend on a draft row whose unit mass was assumed.

    Returns:
      (token, status, whether a mass that was assumed to be 1 is not); the token is -1 where none can
      be drawn.
    """
    is_due = may_draw & reader.may_emit(site.node)
    is_wanted = is_due & ~site.is_lost
    whole = whole_row(jnp.float32(1), reader.tree.max_children, reader.vocab)
    left = choose(left.is_whole, whole, left)

    def attempt(state: Any) -> Any:
        _, left, _ = state
        sums = left_sums(reader, site, left, assumes_draft=assumes_draft)
        is_empty = (jnp.sum(sums[0]) == 0) & ~left.is_whole
        return is_empty, choose(is_empty, whole, left), sums

    no_sums = jnp.zeros(-(-reader.vocab // TILE), jnp.float32)
    measured = (reader.target, reader.draft if assumes_draft else None)
    no_masses = [jnp.float32(0) for rows in measured if rows is not None and rows.is_assumed]
    start = (is_wanted, left, (no_sums, *no_masses))
    _, drawn_from, (sums, *masses) = while_loop(lambda state: state[0], attempt, start)
    is_doubtful = is_wanted & ~reader.is_exact & ~jnp.isfinite(jnp.sum(sums))
    if reader.target.is_assumed:
        is_doubtful |= is_wanted & reader.is_off(masses.pop(0))
    if masses:
        is_doubtful |= is_wanted & ~left.is_whole & reader.is_off(masses.pop(0))

    def piece(start: Any, size: int) -> jax.Array:
        return left_piece(reader, site, drawn_from, start, size)

    total = jnp.sum(sums)
    pair = reader.draws.final
    bad_draw = ~jnp.all(is_uniform(used_pair(pair, reader.vocab)))
    is_drawn = is_wanted & jnp.isfinite(total) & (total > 0) & ~bad_draw
    token = jnp.where(is_drawn, draw_from_tiles(pair, sums, piece, reader.vocab), -1)
    status = (
        jnp.where(is_due, site.status, 0)
        | flag(is_wanted & ~jnp.isfinite(total), Status.NON_FINITE_ROW)
        | flag(is_wanted & (total == 0), Status.MASSLESS_ROW)
        | flag(is_wanted & ~left.is_whole & drawn_from.is_whole, Status.EMPTY_RESIDUAL)
        | flag(is_wanted & bad_draw, Status.BAD_DRAW)
    )
    return token, status, is_doubtful


def left_sums(
    reader: RowReader, site: Site, left: Remainder, *, assumes_draft: bool
) -> tuple[jax.Array, ...]:
    """Sum what is left of a node's row by tiles, [tiles]; then the masses assumed to be 1."""

    def quantity(piece: Piece, tokens: jax.Array | None) -> tuple[jax.Array, ...]:
        is_removed = reader.is_removed(site.node, left, tokens)
        row = reader.guarded(reader.kind.row(left, piece.p, piece.q, is_removed), piece)
        return row, *_masses(piece, with_draft=assumes_draft)

    sums, *masses = reader.sums(site, reader.removed_tokens(site.node, left), quantity)
    return sums, *map(jnp.sum, masses)


def left_piece(reader: RowReader, site: Site, left: Remainder, start: Any, size: int) -> jax.Array:
    """Return what is left of a node's row at consecutive tokens, float32 [size]."""
    piece = reader.piece(site, start, size)
    p, q = _without_denormals(piece.p), _without_denormals(piece.q)
    removed = reader.is_removed(site.node, left, tokens_from(start, size))
    return reader.kind.row(left, p, q, removed)


def _masses(piece: Piece, *, with_draft: bool) -> tuple[jax.Array, ...]:
    """Return what is summed to see whether the masses assumed to be 1 are."""
    raws = (piece.target_raw, piece.draft_raw if with_draft else None)
    return tuple(raw.astype(jnp.float32) for raw in raws if raw is not None)


def _without_denormals(entries: jax.Array) -> jax.Array:
    return jnp.where(jnp.abs(entries) < LEAST, 0.0, entries)  # a NaN stays
