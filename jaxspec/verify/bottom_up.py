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
from jaxspec.trees import ROOT, child_at, contradicts
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

    site: Site
    rank: jax.Array  # [] child to be entered next
    left: Remainder


@struct
class _Walk:
    frames: _Frame  # every field with a leading [D + 1]
    depth: jax.Array  # []
    status: jax.Array  # []
    is_lost: jax.Array  # [] a row that was read is invalid: no token is drawn
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
    last = _at(walk.frames, depth)
    may_draw = ~is_failed & ~walk.is_lost & ~is_doubtful
    token, status, is_off = final_draw(reader, last.site, last.left, may_draw, assumes_draft=False)
    path = walk.frames.site.node
    verdict = conclude(tree, path, last.site.node, depth, token, walk.status | status)
    return verdict, is_doubtful | is_off


def _start(reader: RowReader) -> _Walk:
    tree = reader.tree
    root = _enter(reader, jnp.int32(ROOT), jnp.float32(1))
    has_rows = reader.has_children(jnp.int32(ROOT))
    is_torn = tree.level_sizes[0] != 1  # a path of an impossible length, for example
    return _Walk(
        frames=jax.tree.map(lambda x: jnp.broadcast_to(x, (tree.max_depth + 1, *x.shape)), root),
        depth=jnp.int32(0),
        status=jnp.where(has_rows, root.site.status, 0) | flag(is_torn, Status.BAD_TREE),
        is_lost=has_rows & root.site.is_lost,
        ending=_end(jnp.int32(_Ending.NONE), is_torn, _Ending.FAILED),
    )


def _enter(reader: RowReader, node: jax.Array, weight: jax.Array) -> _Frame:
    return _Frame(
        site=reader.visit(node, jnp.ones((), bool)),
        rank=jnp.int32(0),
        left=whole_row(weight, reader.tree.max_children, reader.vocab),
    )


def _step(reader: RowReader, walk: _Walk) -> _Walk:
    tree = reader.tree
    here = _at(walk.frames, walk.depth)
    slot = child_at(tree, here.site.node, here.rank)
    is_too_deep = (slot >= 0) & (walk.depth >= tree.max_depth)
    is_torn = is_too_deep | contradicts(tree, here.site.node, here.rank)
    child = jnp.where(is_too_deep | here.site.is_lost, -1, slot)
    down, up = _descend(reader, walk, here, child), _leave(reader, walk, here, child < 0)
    after = choose(child >= 0, down, up)
    return replace(
        after,
        status=after.status | flag(is_torn, Status.BAD_TREE),
        ending=_end(after.ending, is_torn, _Ending.FAILED),
    )


def _descend(reader: RowReader, walk: _Walk, here: _Frame, child: jax.Array) -> _Walk:
    """Enter the next child with its prefix weight, or skip it."""
    has_child = child >= 0
    child = jnp.maximum(child, 0)
    candidate = test(reader, here.site, here.left, child)
    is_entered = has_child & candidate.is_possible
    stay = replace(here, rank=jnp.where(candidate.is_possible, here.rank, here.rank + 1))
    weight = _prefix_weight(candidate, here.left)
    below = when(is_entered, lambda: _enter(reader, child, weight))
    depth = jnp.where(is_entered, walk.depth + 1, walk.depth)
    is_read = is_entered & reader.has_children(child)
    return replace(
        walk,
        frames=_put(walk.frames, depth, choose(is_entered, below, stay)),
        depth=depth,
        status=walk.status | candidate.status | jnp.where(is_read, below.site.status, 0),
        is_lost=walk.is_lost | (is_read & below.site.is_lost),
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


def _leave(reader: RowReader, walk: _Walk, here: _Frame, is_done_below: jax.Array) -> _Walk:
    """Keep the node, or reject it and update its parent."""
    is_root = walk.depth == 0
    u = reader.draws.accept[here.site.node]
    bad_draw = ~is_root & ~is_uniform(u)
    left = here.left
    is_kept = is_root | (left.scale == 0) | (u * left.scale < left.mass)
    slack = reader.slack() * (reader.tree.max_depth + 1)
    is_close = ~is_root & (jnp.abs(u * left.scale - left.mass) <= slack * left.weight)
    above_depth = jnp.maximum(walk.depth - 1, 0)
    above = _at(walk.frames, above_depth)
    is_rejected = is_done_below & ~is_kept & ~bad_draw
    is_doubtful = ~reader.is_exact & is_done_below & (is_close | is_rejected)
    is_rejected &= ~is_doubtful
    # The weight the child was entered with is that of its last test, unchanged since.
    weight = test(reader, above.site, above.left, here.site.node).weight
    after = reader.kind.reject(above.left, weight, above.rank)
    lost = jnp.zeros((), bool)
    if reader.kind.is_measured:
        sums = when(
            is_rejected, lambda: measure(reader, above.site, above.left, after, may_assume=False)
        )
        after = replace(after, scale=sums.deficit, mass=sums.mass, pool=sums.pool)
        lost = is_rejected & ~(jnp.isfinite(sums.mass) & jnp.isfinite(sums.deficit))
    above = replace(above, left=after, rank=above.rank + 1)
    ending = _end(walk.ending, is_kept, _Ending.KEPT)
    ending = _end(ending, bad_draw | lost, _Ending.FAILED)
    return replace(
        walk,
        frames=choose(is_kept, walk.frames, _put(walk.frames, above_depth, above)),
        depth=jnp.where(is_kept, walk.depth, above_depth),
        status=walk.status | flag(bad_draw, Status.BAD_DRAW) | flag(lost, Status.NON_FINITE_ROW),
        ending=_end(ending, is_doubtful, _Ending.DOUBTFUL),
    )


def _end(ending: jax.Array, condition: jax.Array, new: _Ending) -> jax.Array:
    """Replace an ending by a greater one if the condition holds."""
    return jnp.maximum(ending, condition.astype(jnp.int32) * int(new))


def _at(frames: T, depth: jax.Array) -> T:
    return jax.tree.map(lambda x: x[depth], frames)


def _put(frames: _Frame, depth: jax.Array, frame: _Frame) -> _Frame:
    return jax.tree.map(lambda xs, x: xs.at[depth].set(x), frames, frame)


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
