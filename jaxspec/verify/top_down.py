"""Top-down verification: from the root, siblings in order, follow the first that is accepted.

Each node on the way is entered with weight a = 1, so only candidates of visited nodes are tested.
"""

from dataclasses import replace

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
from jaxspec.verify.kernel import accepts, final_draw, is_close_call, measure, test
from jaxspec.verify.reader import RowReader, Site
from jaxspec.verify.verdict import Status, Verdict, conclude, flag


@struct
class _Walk:
    node: jax.Array  # [] the last that was entered
    is_new: jax.Array  # [] its rows have not been read: `site` is its parent's
    site: Site
    rank: jax.Array  # [] sibling to be tested next
    left: Remainder
    depth: jax.Array  # []
    path: jax.Array  # [D + 1]
    status: jax.Array  # []
    is_halted: jax.Array  # []
    is_doubtful: jax.Array  # []


def top_down(reader: RowReader) -> tuple[Verdict, jax.Array]:
    """Walk the tree from the root; see `verify_tree`.

    A trip reads the rows of the node that the one before entered, so that this is compiled once, and
    tests the next of its candidates.

    Returns:
      (the verdict, whether it is doubtful: then the tree must be walked with exact masses).
    """
    tree, kind = reader.tree, reader.kind
    fresh = whole_row(jnp.float32(1), tree.max_children, reader.vocab)
    has_root = tree.level_sizes[0] == 1  # not so for a path of an impossible length
    start = _Walk(
        node=jnp.int32(ROOT),
        is_new=jnp.ones((), bool),
        site=reader.unvisited(),
        rank=jnp.int32(0),
        left=fresh,
        depth=jnp.int32(0),
        path=jnp.zeros(tree.max_depth + 1, jnp.int32),
        status=jnp.int32(0),
        is_halted=~has_root,
        is_doubtful=jnp.zeros((), bool),
    )

    def is_open(walk: _Walk) -> jax.Array:
        has_child = (walk.depth < tree.max_depth) & (reader.slots[walk.node, walk.rank] >= 0)
        is_stopped = walk.is_halted | walk.is_doubtful | walk.site.is_lost
        return ~is_stopped & (walk.is_new | has_child)

    def step(walk: _Walk) -> _Walk:
        site = choose(walk.is_new, reader.visit(walk.node, walk.is_new), walk.site)
        slot = reader.slots[walk.node, walk.rank]
        is_tested = (slot >= 0) & (walk.depth < tree.max_depth) & ~site.is_lost
        child = jnp.maximum(slot, 0)
        candidate = test(reader, site, walk.left, child)
        is_possible = is_tested & candidate.is_possible
        u = reader.draws.accept[child]
        is_halted = bad_draw = is_possible & ~is_uniform(u)
        is_accepted = is_possible & ~is_halted & accepts(u, candidate, walk.left)
        is_rejected = is_possible & ~is_halted & ~is_accepted
        is_close = is_close_call(u, candidate, walk.left, reader.slack())
        is_doubtful = (is_tested & candidate.is_doubtful) | (is_possible & is_close)
        is_doubtful &= ~reader.is_exact
        status = jnp.where(is_tested, candidate.status, 0)
        status |= walk.status | flag(bad_draw, Status.BAD_DRAW)

        after = kind.reject(walk.left, candidate.weight, walk.rank)
        if kind.is_measured and tree.max_children > 1:
            is_tested_again = is_rejected & (reader.slots[walk.node, walk.rank + 1] >= 0)
            sums = when(
                is_tested_again, lambda: measure(reader, site, walk.left, after, may_assume=True)
            )
            after = replace(after, scale=sums.mass, mass=sums.mass, pool=sums.pool)
            lost = is_tested_again & ~jnp.isfinite(sums.mass)
            status |= flag(lost, Status.NON_FINITE_ROW)
            is_halted |= lost
            is_doubtful |= is_tested_again & sums.is_doubtful

        depth = jnp.where(is_accepted, walk.depth + 1, walk.depth)
        node = jnp.where(is_accepted, child, walk.node)
        return _Walk(
            node=node,
            is_new=is_accepted,
            site=site,
            rank=jnp.where(is_accepted, 0, walk.rank + jnp.where(is_tested, 1, 0)),
            left=choose(is_accepted, fresh, choose(is_rejected, after, walk.left)),
            depth=depth,
            path=walk.path.at[depth].set(node),
            status=status,
            is_halted=is_halted,
            is_doubtful=is_doubtful,
        )

    walk = while_loop(is_open, step, start)
    slot = reader.slots[walk.node, walk.rank]
    is_too_deep = (walk.depth >= tree.max_depth) & (slot >= 0)
    is_torn = ~has_root | (slot == TORN) | is_too_deep
    may_draw = ~walk.is_halted & ~is_torn & ~walk.is_doubtful
    token, status, is_doubtful = final_draw(
        reader, walk.site, walk.left, may_draw, assumes_draft=True
    )
    status |= walk.status | flag(is_torn, Status.BAD_TREE)
    verdict = conclude(tree, walk.path, walk.node, walk.depth, token, status)
    return verdict, walk.is_doubtful | is_doubtful


@jax.jit
def verify_tree(
    draws: Draws, proposal: Proposal, target_rows: RowsLike, bonus: jax.Array | bool = False
) -> Verdict:
    """Verify a tree of candidates from the root down, siblings in order.

    A sibling is accepted with the mass that is left for it and the walk follows it; a rejected one
    is subtracted from the row, by the law it was drawn from. If none is accepted, one token is drawn
    from what is left and ends the round; at a leaf the round ends, with `bonus` after one more token
    from the leaf's row. A tree of the root alone emits one token of the target row.

    The emitted tokens, completed with the target, have exactly the target's law: for point masses
    whatever the candidates; for sampled ones if siblings are in the order drawn and each draft
    row is exactly the law its children were drawn from.

    Args:
      draws: the uniforms; `accept` [N], `final` [2].
      proposal: the tree and how it was drawn, `PointMass`, `WithReplacement`, `WithoutReplacement`.
      target_rows: [N, V], row n is the target's law of the token after node n; probabilities, or
        `Logits` with a temperature.
      bonus: bool [], emit one more token after a fully accepted path.

    Returns:
      The `Verdict`. Invalid values never raise: see `Status` and `jaxspec.checked`.

    Raises:
      AssertionError: a shape, rank or dtype is wrong.

    Guarantee: lossless.

    >>> import jax.numpy as jnp
    >>> import jaxspec as js
    >>> proposal = js.PointMass(tree=js.make_tree([-1, 0, 1], [-1, 0, 0]))
    >>> rows = jnp.array([[0.25, 0.75], [0.8, 0.2], [0.4, 0.6]])
    >>> draws = js.Draws(accept=jnp.array([0.0, 0.3, 0.9]), final=jnp.array([0.0, 0.5]))
    >>> js.verify_tree(draws, proposal, rows).tokens.tolist()
    [1, -1]

    References:
      Point masses: Miao et al., "SpecInfer", ASPLOS 2024, with one-hot proposals; Li et al.,
      "EAGLE-2", EMNLP 2024. With replacement: "SpecInfer", Algorithm 2 (multi-step speculative
      sampling). Without: Jeon et al., "Recursive Speculative Decoding", 2024; Chen et al.,
      "Sequoia", NeurIPS 2024.
    """
    return run(top_down, arguments(draws, proposal, target_rows, bonus))


@jax.jit
def verify_path(
    draws: Draws, proposal: Proposal, target_rows: RowsLike, bonus: jax.Array | bool = False
) -> Verdict:
    """Verify a single path token by token: Algorithm 1 of speculative sampling.

    Token x_t, drawn from q_t, is accepted with probability min(1, p_t(x_t) / q_t(x_t)); the first
    that is rejected is replaced by a token drawn from normalize(max(p_t - q_t, 0)), which ends the
    round. After T accepted tokens the round ends; with `bonus` it ends after one more, drawn from
    the last row.

    Args:
      draws: the uniforms; `accept` [T + 1] by node (entry 0, the root's, is unused), `final` [2].
      proposal: a path, as made by `jaxspec.sampled_path`, or `PointMass` over `jaxspec.chain`.
      target_rows: [T + 1, V], row t is the target's law after t drafted tokens.
      bonus: bool [], emit one more token after a fully accepted path.

    Returns:
      The `Verdict`, of at most T tokens, T + 1 with `bonus`.

    Raises:
      AssertionError: a shape, rank or dtype is wrong, or the proposal branches.

    Guarantee: lossless.

    >>> import jax, jax.numpy as jnp
    >>> import jaxspec as js
    >>> path = js.sampled_path(jnp.array([0]), draft_rows=jnp.array([[0.5, 0.5]]))
    >>> rows = jnp.array([[0.25, 0.75], [0.5, 0.5]])
    >>> draws = js.Draws(accept=jnp.array([0.0, 0.5]), final=jnp.array([0.0, 0.0]))
    >>> verdict = js.verify_path(draws, path, rows)  # 0.5 * q(0) < p(0) fails: replaced
    >>> verdict.tokens.tolist(), int(verdict.num_accepted)
    ([1, -1], 0)

    References:
      Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
      Algorithm 1; Chen et al., "Accelerating Large Language Model Decoding with Speculative
      Sampling", 2023, Algorithm 2.
    """
    assert_path(proposal)
    return verify_tree(draws, proposal, target_rows, bonus)
