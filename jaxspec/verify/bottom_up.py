"""Bottom-up verification: from the deepest candidate back, keep the longest that passes.

The prefix weight `a` is carried down and every rejected child updates its parent, so a candidate
that a token-wise rule would reject can still be kept because of what follows it.
"""

import enum
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxspec.checks import struct
from jaxspec.draws import Draws
from jaxspec.loops import choose, when, while_loop
from jaxspec.proposals import Proposal, Remainder, whole_row
from jaxspec.rows import RowsLike
from jaxspec.tiles import is_uniform
from jaxspec.trees import ROOT, TORN
from jaxspec.verify.arguments import arguments, assert_path
from jaxspec.verify.batching import run
from jaxspec.verify.kernel import Test, final_draw, measure, test
from jaxspec.verify.reader import RowReader, Site
from jaxspec.verify.verdict import Status, Verdict, conclude, flag

T = TypeVar("T")


class _Ending(enum.IntEnum):
    """Why a walk ends."""

    NONE = 0  # it goes on
    KEPT = 1  # a node is kept, with all above it
    FAILED = 2  # nothing can be decided any more: no token is accepted or emitted
    DOUBTFUL = 3  # unit masses must not be assumed: the tree is walked again


@struct
class _Frame:
    """A node on the way from the root to the current one."""

    node: jax.Array  # []
    rank: jax.Array  # [] child to be entered next
    left: Remainder


@struct
class _Walk:
    frames: _Frame  # every field with a leading [D + 1]
    sites: Site  # the same nodes once their rows are read; every field with a leading [D + 1]
    depth: jax.Array  # []
    is_new: jax.Array  # [] the rows of the node at `depth` have not been read
    status: jax.Array  # []
    is_lost: jax.Array  # [] a row that was read is invalid: no token is drawn
    ending: jax.Array  # [] an `_Ending`


@struct
class _Move:
    """A step down or up the tree: where it leads, and the frame there."""

    frame: _Frame
    depth: jax.Array  # [] of the frame, and of the node to go on with
    is_new: jax.Array  # [] that node was entered just now
    status: jax.Array  # [] bits of `Status`
    ending: jax.Array  # [] an `_Ending`


def bottom_up(reader: RowReader) -> tuple[Verdict, jax.Array]:
    """Walk the tree in post-order; see `verify_block`.

    A carried weight accumulates the errors of the masses of its rows. So unit mass is assumed only
    until the first candidate is rejected.

    Returns:
      (the verdict, whether it is doubtful: then the tree must be walked with exact masses).
    """
    tree = reader.tree
    walk = while_loop(
        lambda walk: walk.ending == _Ending.NONE, lambda walk: _step(reader, walk), _start(reader)
    )
    is_failed = walk.ending == _Ending.FAILED
    is_doubtful = walk.ending == _Ending.DOUBTFUL
    depth = jnp.where(is_failed, 0, walk.depth)
    site, left = _at(walk.sites, depth), _at(walk.frames.left, depth)
    may_draw = ~is_failed & ~walk.is_lost & ~is_doubtful
    token, status, is_off = final_draw(reader, site, left, may_draw, assumes_draft=False)
    path = walk.frames.node
    verdict = conclude(tree, path, site.node, depth, token, walk.status | status)
    return verdict, is_doubtful | is_off


def _start(reader: RowReader) -> _Walk:
    tree = reader.tree
    root = _entered(reader, jnp.int32(ROOT), jnp.float32(1))
    is_torn = tree.level_sizes[0] != 1  # a path of an impossible length, for example

    def stacked(one: T) -> T:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (tree.max_depth + 1, *x.shape)), one)

    return _Walk(
        frames=stacked(root),
        sites=stacked(reader.unvisited()),
        depth=jnp.int32(0),
        is_new=jnp.ones((), bool),
        status=flag(is_torn, Status.BAD_TREE),
        is_lost=jnp.zeros((), bool),
        ending=_end(jnp.int32(_Ending.NONE), is_torn, _Ending.FAILED),
    )


def _entered(reader: RowReader, node: jax.Array, weight: jax.Array) -> _Frame:
    left = whole_row(weight, reader.tree.max_children, reader.vocab)
    return _Frame(node=node, rank=jnp.int32(0), left=left)


def _step(reader: RowReader, walk: _Walk) -> _Walk:
    tree = reader.tree
    here = _at(walk.frames, walk.depth)
    site = choose(walk.is_new, reader.visit(here.node, walk.is_new), _at(walk.sites, walk.depth))
    walk = replace(walk, sites=_put(walk.sites, walk.depth, site))
    is_read = walk.is_new & reader.has_children(here.node)
    slot = reader.slots[here.node, here.rank]
    is_too_deep = (slot >= 0) & (walk.depth >= tree.max_depth)
    is_torn = is_too_deep | (slot == TORN)
    is_down = (slot >= 0) & ~is_too_deep & ~site.is_lost
    down = _descend(reader, walk, site, here, is_down, jnp.maximum(slot, 0))
    move = choose(is_down, down, _leave(reader, walk, here, ~is_down))
    return replace(
        walk,
        frames=_put(walk.frames, move.depth, move.frame),
        depth=move.depth,
        is_new=move.is_new,
        status=walk.status
        | move.status
        | jnp.where(is_read, site.status, 0)
        | flag(is_torn, Status.BAD_TREE),
        is_lost=walk.is_lost | (is_read & site.is_lost),
        ending=_end(move.ending, is_torn, _Ending.FAILED),
    )


def _descend(
    reader: RowReader, walk: _Walk, site: Site, here: _Frame, is_down: jax.Array, child: jax.Array
) -> _Move:
    """Enter the next child with its prefix weight, or skip it."""
    candidate = test(reader, site, here.left, child)
    is_entered = is_down & candidate.is_possible
    below = _entered(reader, child, _prefix_weight(candidate, here.left))
    return _Move(
        frame=choose(is_entered, below, replace(here, rank=here.rank + 1)),
        depth=jnp.where(is_entered, walk.depth + 1, walk.depth),
        is_new=is_entered,
        status=candidate.status,
        ending=_end(walk.ending, candidate.is_doubtful, _Ending.DOUBTFUL),
    )


def _prefix_weight(candidate: Test, left: Remainder) -> jax.Array:
    """Return min(1, a r(x) / s(x))."""
    draft_weight = candidate.top * left.scale
    target_weight = candidate.weight * candidate.bottom
    # Nothing is left of the row if rounding made both 0: then no candidate has any weight.
    return jnp.where(
        target_weight < draft_weight,
        target_weight / jnp.where(draft_weight == 0, 1.0, draft_weight),
        jnp.where(target_weight > 0, 1.0, 0.0),
    )


def _leave(reader: RowReader, walk: _Walk, here: _Frame, is_done_below: jax.Array) -> _Move:
    """Keep the node, or reject it and update its parent."""
    is_root = walk.depth == 0
    u = reader.draws.accept[here.node]
    bad_draw = ~is_root & ~is_uniform(u)
    left = here.left
    is_kept = is_root | (left.scale == 0) | (u * left.scale < left.mass)
    slack = reader.slack() * (reader.tree.max_depth + 1)
    is_close = ~is_root & (jnp.abs(u * left.scale - left.mass) <= slack * left.weight)
    above_depth = jnp.maximum(walk.depth - 1, 0)
    above, above_site = _at(walk.frames, above_depth), _at(walk.sites, above_depth)
    is_rejected = is_done_below & ~is_kept & ~bad_draw
    is_doubtful = ~reader.is_exact & is_done_below & (is_close | is_rejected)
    is_rejected &= ~is_doubtful
    # The weight the child was entered with is that of its last test, unchanged since.
    weight = test(reader, above_site, above.left, here.node).weight
    after = reader.kind.reject(above.left, weight, above.rank)
    lost = jnp.zeros((), bool)
    if reader.kind.is_measured:
        sums = when(
            is_rejected, lambda: measure(reader, above_site, above.left, after, may_assume=False)
        )
        after = replace(after, scale=sums.deficit, mass=sums.mass, pool=sums.pool)
        lost = is_rejected & ~(jnp.isfinite(sums.mass) & jnp.isfinite(sums.deficit))
    ending = _end(walk.ending, is_kept, _Ending.KEPT)
    ending = _end(ending, bad_draw | lost, _Ending.FAILED)
    return _Move(
        frame=choose(is_kept, here, replace(above, left=after, rank=above.rank + 1)),
        depth=jnp.where(is_kept, walk.depth, above_depth),
        is_new=jnp.zeros((), bool),
        status=flag(bad_draw, Status.BAD_DRAW) | flag(lost, Status.NON_FINITE_ROW),
        ending=_end(ending, is_doubtful, _Ending.DOUBTFUL),
    )


def _end(ending: jax.Array, condition: jax.Array, new: _Ending) -> jax.Array:
    """Replace an ending by a greater one if the condition holds."""
    return jnp.maximum(ending, condition.astype(jnp.int32) * int(new))


def _at(stacked: T, depth: jax.Array) -> T:
    return jax.tree.map(lambda x: x[depth], stacked)


def _put(stacked: T, depth: jax.Array, one: T) -> T:
    return jax.tree.map(lambda xs, x: xs.at[depth].set(x), stacked, one)


@jax.jit
def verify_block(
    draws: Draws, proposal: Proposal, target_rows: RowsLike, bonus: jax.Array | bool = False
) -> Verdict:
    """Verify a single path as a block: keep the longest prefix that passes, tested from the end.

    With a_0 = 1 and a_i = min(1, a_{i-1} p(x_i) / q(x_i)), prefix i < T is kept with probability
    Z_i / D_i, where Z_i = sum relu(a_i p_i - q_i) and D_i = sum relu(q_i - a_i p_i), and prefix T
    with a_T; the longest kept one counts. A kept prefix i < T is followed by one token of
    normalize(relu(a_i p_i - q_i)). On average at least as many tokens are accepted as by
    `verify_path`, and no rule that keeps the rows of later rounds accepts more.

    Each rejected length costs one pass over its two rows.

    Args:
      draws: the uniforms; `accept` [T + 1], entry i tests prefix i (entry 0 is unused), `final` [2].
      proposal: a path, as made by `jaxspec.sampled_path`.
      target_rows: [T + 1, V], row t is the target's law after t drafted tokens.
      bonus: bool [], emit one more token after a fully accepted path.

    Returns:
      The `Verdict`. A candidate outside its draft row's support cuts the path before it. If a
      used accept draw is invalid, or a row that decides between lengths holds NaN, no token is
      accepted or emitted.

    Raises:
      AssertionError: a shape, rank or dtype is wrong, or the proposal branches.

    Guarantee: lossless.

    The draws of tokens beyond the kept prefix have been read, so the next round must not use them.

    >>> import jax.numpy as jnp
    >>> import jaxspec as js
    >>> q, p = jnp.array([2 / 3, 1 / 3]), jnp.array([1 / 3, 2 / 3])
    >>> path = js.sampled_path(jnp.array([1, 0]), draft_rows=jnp.stack([q, q]))
    >>> draws = js.Draws(accept=jnp.array([0.0, 0.9, 0.6]), final=jnp.array([0.0, 0.5]))
    >>> js.verify_block(draws, path, jnp.stack([p, p, p])).tokens.tolist()
    [1, 1, -1]

    References:
      Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025, Algorithm 2.
    """
    assert_path(proposal)
    return verify_traversal(draws, proposal, target_rows, bonus)


@jax.jit
def verify_traversal(
    draws: Draws, proposal: Proposal, target_rows: RowsLike, bonus: jax.Array | bool = False
) -> Verdict:
    """Verify a tree from its deepest candidates back (traversal verification).

    Candidates are tested in post-order; each is entered with the prefix weight
    a(x) = min(1, a(v) r_v(x) / s_v(x)) of its parent v as it is then, and a rejected one updates its
    parent's weight and row. On a chain this is block verification.

    Args:
      draws: the uniforms; `accept` [N] by node, `final` [2].
      proposal: the tree and how it was drawn.
      target_rows: [N, V], row n is the target's law of the token after node n.
      bonus: bool [], emit one more token after a fully accepted path.

    Returns:
      The `Verdict`, with the fallbacks of `verify_block`.

    Raises:
      AssertionError: a shape, rank or dtype is wrong.

    Guarantee: lossless, under the condition on draws of `verify_block`.

    >>> import jax.numpy as jnp
    >>> import jaxspec as js
    >>> tree = js.make_tree([-1, 0, 1], [-1, 0, 0])
    >>> rows = jnp.full((3, 2), 0.5)
    >>> proposal = js.WithoutReplacement(tree=tree, draft_rows=rows)
    >>> draws = js.Draws(accept=jnp.array([0.0, 0.9, 0.9]), final=jnp.array([0.0, 0.0]))
    >>> js.verify_traversal(draws, proposal, rows).tokens.tolist()
    [0, -1]

    References:
      Weng et al., "Traversal Verification for Speculative Tree Decoding", NeurIPS 2025.
    """
    return run(bottom_up, arguments(draws, proposal, target_rows, bonus))
