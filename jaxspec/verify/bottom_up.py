"""Bottom-up verification: from the deepest candidate back, keep the longest that passes.

The prefix weight `a` is carried down and every rejected child updates its parent, so a candidate
that a token-wise rule would reject can still be kept for the sake of what follows it.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec.checks import struct
from jaxspec.draws import Draws
from jaxspec.logits import Logits
from jaxspec.loops import when, while_loop
from jaxspec.proposals import Proposal, Remainder, Rows, whole_row
from jaxspec.rows import Probabilities, is_uniform
from jaxspec.verify.arguments import assert_arguments, assert_path
from jaxspec.verify.batching import run
from jaxspec.verify.kernel import Node, Room, Site, choose, flag
from jaxspec.verify.verdict import Status, Verdict


@struct
class _Frame:
    """One node on the way from the root to where the walk stands."""

    site: Site
    rank: jax.Array  # [] child to be entered next
    left: Remainder


@struct
class _Walk:
    frames: _Frame  # every field with a leading [D + 1]
    depth: jax.Array  # []
    status: jax.Array  # []
    is_done: jax.Array  # []
    is_lost: jax.Array  # [] a row that was read is bad: nothing is to be drawn any more
    is_failed: jax.Array  # [] nothing can be decided any more
    is_doubtful: jax.Array  # [] rows must not be taken on trust


def bottom_up(
    draws: Draws,
    proposal: Proposal,
    target: Probabilities | Logits,
    bonus: jax.Array,
    room: Room,
    *,
    is_exact: jax.Array,
    spans: bool,
) -> tuple[Verdict, jax.Array]:
    """Walk the tree in post-order; see `verify_block`.

    A weight that is carried on adds up what the masses of its rows are off by. So rows are taken on
    trust only until the first candidate is rejected.

    Returns:
      (the verdict, whether rows must not be taken on trust: then it is to be walked with `is_exact`).
    """
    nodes = Node(proposal, target, draws, room, is_exact=is_exact, spans=spans)
    tree = proposal.tree

    def enter(node: jax.Array, weight: jax.Array) -> _Frame:
        return _Frame(
            site=nodes.visit(node, jnp.ones((), bool), bonus=bonus),
            rank=jnp.int32(0),
            left=whole_row(weight, tree.max_children),
        )

    root = enter(jnp.int32(0), jnp.float32(1))
    has_rows = nodes.has_children(jnp.int32(0))
    start = _Walk(
        frames=jax.tree.map(lambda x: jnp.broadcast_to(x, (tree.max_depth + 1, *x.shape)), root),
        depth=jnp.int32(0),
        status=jnp.where(has_rows, root.site.status, 0) | flag(nodes.is_torn, Status.BAD_TREE),
        is_done=nodes.is_torn,
        is_lost=has_rows & root.site.is_lost,
        is_failed=nodes.is_torn,
        is_doubtful=jnp.zeros((), bool),
    )

    def step(walk: _Walk) -> _Walk:
        here = jax.tree.map(lambda x: x[walk.depth], walk.frames)
        slot = nodes.child(here.site.node, here.rank)
        is_too_deep = (slot >= 0) & (walk.depth >= tree.max_depth)
        is_torn = is_too_deep | nodes.contradicts(here.site.node, here.rank)
        child = jnp.where(is_too_deep | here.site.is_lost, -1, slot)
        after = choose(child >= 0, _descend(walk, here, child), _leave(walk, here, child < 0))
        return replace(
            after,
            status=after.status | flag(is_torn, Status.BAD_TREE),
            is_done=after.is_done | is_torn,
            is_failed=after.is_failed | is_torn,
        )

    def _descend(walk: _Walk, here: _Frame, child: jax.Array) -> _Walk:
        """Enter the next child with its prefix weight, or skip it."""
        has_child = child >= 0
        child = jnp.maximum(child, 0)
        test = nodes.test(here.site, here.left, child)
        draft_weight = test.top * here.left.scale
        target_weight = test.weight * test.bottom
        # Nothing is left of the row if rounding made both 0: then no candidate has any weight.
        weight = jnp.where(
            target_weight < draft_weight,
            target_weight / jnp.where(draft_weight == 0, 1.0, draft_weight),
            jnp.where(target_weight > 0, 1.0, 0.0),
        )
        is_entered = has_child & test.is_possible
        stay = replace(here, rank=jnp.where(test.is_possible, here.rank, here.rank + 1))
        below = when(is_entered, lambda: enter(child, weight))
        depth = jnp.where(is_entered, walk.depth + 1, walk.depth)
        is_read = is_entered & nodes.has_children(child)
        return replace(
            walk,
            frames=_put(walk.frames, depth, choose(is_entered, below, stay)),
            depth=depth,
            status=walk.status | test.status | jnp.where(is_read, below.site.status, 0),
            is_lost=walk.is_lost | (is_read & below.site.is_lost),
            is_done=test.is_doubtful,
            is_doubtful=test.is_doubtful,
        )

    def _leave(walk: _Walk, here: _Frame, is_done_below: jax.Array) -> _Walk:
        """Keep the node, or reject it and update its parent."""
        is_root = walk.depth == 0
        u = draws.accept[here.site.node]
        bad_draw = ~is_root & ~is_uniform(u)
        left = here.left
        is_kept = is_root | (left.scale == 0) | (u * left.scale < left.mass)
        slack = nodes.slack() * (tree.max_depth + 1)
        is_close = ~is_root & (jnp.abs(u * left.scale - left.mass) <= slack * left.weight)
        above_depth = jnp.maximum(walk.depth - 1, 0)
        above = jax.tree.map(lambda x: x[above_depth], walk.frames)
        is_rejected = is_done_below & ~is_kept & ~bad_draw
        is_doubtful = ~nodes.is_exact & is_done_below & (is_close | is_rejected)
        is_rejected &= ~is_doubtful
        # The weight the child was entered with is that of its last test, unchanged since.
        weight = nodes.test(above.site, above.left, here.site.node).weight
        after = proposal.reject(above.left, weight, above.rank)
        lost = jnp.zeros((), bool)
        if proposal.is_measured:
            sums = when(
                is_rejected, lambda: nodes.measure(above.site, above.left, after, may_trust=False)
            )
            after = replace(after, scale=sums.missed, mass=sums.mass, pool=sums.pool)
            lost = is_rejected & ~(jnp.isfinite(sums.mass) & jnp.isfinite(sums.missed))
        above = replace(above, left=after, rank=above.rank + 1)
        return replace(
            walk,
            frames=choose(is_kept, walk.frames, _put(walk.frames, above_depth, above)),
            depth=jnp.where(is_kept, walk.depth, above_depth),
            status=walk.status
            | flag(bad_draw, Status.BAD_DRAW)
            | flag(lost, Status.NON_FINITE_ROW),
            is_done=is_kept | bad_draw | lost | is_doubtful,
            is_failed=bad_draw | lost,
            is_doubtful=is_doubtful,
        )

    walk = while_loop(lambda walk: ~walk.is_done, step, start)
    depth = jnp.where(walk.is_failed, 0, walk.depth)
    last = jax.tree.map(lambda x: x[depth], walk.frames)
    verdict, is_doubtful = nodes.conclude(
        last.site,
        last.left,
        walk.frames.site.node,
        depth,
        walk.status,
        bonus=bonus,
        may_draw=~walk.is_failed & ~walk.is_lost & ~walk.is_doubtful,
        trusts_draft=False,
    )
    return verdict, walk.is_doubtful | is_doubtful


def _put(frames: _Frame, depth: jax.Array, frame: _Frame) -> _Frame:
    return jax.tree.map(lambda xs, x: xs.at[depth].set(x), frames, frame)


@jax.jit
def verify_block(
    draws: Draws, proposal: Proposal, target_rows: Rows, bonus: jax.Array | bool = False
) -> Verdict:
    """Verify a single path as a block: keep the longest prefix that passes, tested from the end.

    With a_0 = 1 and a_i = min(1, a_{i-1} p(x_i) / q(x_i)), prefix i < T is kept with probability
    Z_i / D_i, where Z_i = sum relu(a_i p_i - q_i) and D_i = sum relu(q_i - a_i p_i), and prefix T
    with a_T; the longest kept one counts. A kept prefix i < T is followed by one token of
    normalize(relu(a_i p_i - q_i)). On average at least as many tokens are accepted as by
    `verify_path`, and no rule that leaves later targets alone accepts more.

    Each rejected length costs one pass over its two rows.

    Args:
      draws: the uniforms; `accept` [T + 1], entry i tests prefix i (entry 0 is unused), `final` [2].
      proposal: a path, as made by `jaxspec.sampled_path`.
      target_rows: [T + 1, V], row t is the target's law after t drafted tokens.
      bonus: bool [], emit one more token after a fully accepted path.

    Returns:
      The `Verdict`. A candidate outside its draft row's support cuts the path before it. Where a
      used accept draw is bad, or a row that decides between lengths holds NaN, nothing is certain:
      no token is accepted or emitted.

    Raises:
      AssertionError: a shape, rank or dtype is wrong, or the proposal branches.

    Guarantee: lossless, if draws are not shared between rounds: the draws of tokens beyond the kept
      prefix have been looked at, so the next round must not read them again.

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
    draws: Draws, proposal: Proposal, target_rows: Rows, bonus: jax.Array | bool = False
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

    Guarantee: lossless, if draws are not shared between rounds.

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
    assert_arguments(draws, proposal, target_rows, bonus)
    return run(bottom_up, draws, proposal, target_rows, bonus)
