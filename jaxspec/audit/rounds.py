"""Rounds as functions of uniforms: what grids and exact laws evaluate.

A round draws the candidates with the draft's own draws, looks up the rows of the resulting contexts,
and calls the public jitted verifier. What differs between instances is data, so instances of one
capacity share one compiled program.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxspec.audit.instances import Context, Instance, RowsByContext, floats
from jaxspec.checks import struct
from jaxspec.draws import Draws
from jaxspec.proposals import PointMass, Proposal
from jaxspec.rows import RowsLike, RowSource
from jaxspec.transfers import moves_data
from jaxspec.trees import NONE, Tree, ancestor_mask, make_tree
from jaxspec.verify import Rule, Verdict, Verifier

DrawSiblings = Callable[[jax.Array, jax.Array], jax.Array]
"""Draws siblings: (pairs [C, 2], draft row [V]) -> tokens [C]."""

DraftLength = Callable[[jax.Array, jax.Array], jax.Array]
"""Decides how many of the drawn candidates are proposed, in the order in which they were drawn:
(tokens [N - 1], the draft row of each one's parent [N - 1, V]) -> int32 []. For a path these are
the `tokens` and `draft_rows` of `sampled_path`, and the result is its `num_drafted`."""

MakeRows = Callable[[jax.Array], RowSource]
"""Makes a row source of dense probability rows [N, V]."""


@struct
class World:
    """An instance as arrays.

    Attributes:
      tree: topology; the tokens are those of point masses, else drawn in the round.
      target: float [contexts, V], rows by context: the child of context i by token x is i V + x + 1.
      draft: float [contexts, V], as `target`.
      bonus: bool [].
      looked_at: bool [N, N], whether a verifier that stopped at a node has read a candidate.
      lazy: bool [], whether an outcome leaves out the candidates that were not read.
    """

    tree: Tree
    target: jax.Array  # [contexts, V]
    draft: jax.Array  # [contexts, V]
    bonus: jax.Array  # []
    looked_at: jax.Array  # [N, N]
    lazy: jax.Array  # []


@struct
class Outcome:
    """The result of one round.

    Attributes:
      drafted: int32 [N], the candidates as drawn; -1 for the root, on padding, and in a lazy world
        for candidates that were not read.
      verdict: of the verifier.
    """

    drafted: jax.Array  # [N]
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Round:
    """A rule played in an instance, as a function of uniforms.

    All candidates of a tree are drawn, but the verdict depends only on those below the root and below
    the nodes that the verifier reached. In a lazy world, draws that differ only in the others are one
    box: with k siblings of V tokens below each of n nodes a search finds some V^k times as many boxes
    as paths through the tree, not V^(k n). Which candidates were read follows from the verdict's
    `stop_node`; if a verifier reports it wrongly, the certificate of the search shows misses.

    Attributes:
      play: maps (world, float32 [K]) to an `Outcome`; the same object for all instances of a rule.
      world: the instance.
      axes: what each of the K numbers is: "draft 1", ..., "accept 1", ..., "final".
      causal_order: the axes that can matter, in the order in which they first can.
      lazy_order: the same for the lazy world; None for point masses, which are not drawn, and if the
        number of candidates is decided by looking at all of them.
    """

    play: Callable[[World, jax.Array], Outcome]
    world: World
    axes: tuple[str, ...]
    causal_order: tuple[int, ...]
    lazy_order: tuple[int, ...] | None = None


@moves_data
def make_round(
    rule: Rule,
    instance: Instance,
    *,
    verify: Verifier | None = None,
    draw: DrawSiblings | None = None,
    num_drafted: DraftLength | None = None,
    rows: MakeRows | None = None,
    tests_deepest_first: bool | None = None,
    dtype: DTypeLike = jnp.float32,
    padded_to: Iterable[Instance] = (),
) -> Round:
    """Make the round that a rule plays in an instance; the arguments are those of `exact_law`."""
    if tests_deepest_first is None:
        tests_deepest_first = rule.tests_deepest_first
    is_sampled = rule.proposal is not PointMass
    if num_drafted is not None and not is_sampled:
        raise ValueError(
            f"num_drafted is given, rule {rule.name!r} is for point masses: nothing is drawn that a "
            "draft could look at before it stops; leave candidates out of the instance instead"
        )
    instances = [instance, *padded_to]
    layouts = [layout(each) for each in instances]
    depth, vocab = max(t.max_depth for t in layouts), max(each.vocab for each in instances)
    nodes, children = max(t.max_nodes for t in layouts), max(t.max_children for t in layouts)
    tree = layout(instance, max_nodes=nodes, max_children=children, max_depth=depth)
    world = World(
        tree=tree,
        target=_table(instance.target, vocab, depth, dtype),
        draft=_table(instance.draft or instance.target, vocab, depth, dtype),
        bonus=jnp.asarray(instance.bonus),
        looked_at=jnp.asarray(_looked_at(tree, deepest_first=tests_deepest_first)),
        lazy=jnp.bool_(False),
    )
    names = range(1, nodes)
    axes = tuple(f"draft {n}" for n in names) if is_sampled else ()
    axes += (*(f"accept {n}" for n in names), "final")
    tested = causal_nodes(tree, deepest_first=tests_deepest_first)
    order = [f"draft {n}" for n in range(1, int(tree.num_nodes))] if is_sampled else []
    order += [*(f"accept {n}" for n in tested), "final"]
    lazy = [*_lazy_axes(tree, deepest_first=tests_deepest_first), "final"]
    return Round(
        play=_make_play(rule.proposal, verify or rule.verify, draw, num_drafted, rows),
        world=world,
        axes=axes,
        causal_order=tuple(map(axes.index, order)),
        lazy_order=tuple(map(axes.index, lazy)) if is_sampled and num_drafted is None else None,
    )


@functools.lru_cache(maxsize=64)
def _make_play(
    kind: type[Proposal],
    verify: Verifier,
    draw: DrawSiblings | None,
    num_drafted: DraftLength | None,
    rows: MakeRows | None,
) -> Callable[[World, jax.Array], Outcome]:
    """Make the function of a round; one object for each rule, so that it compiles once."""
    is_sampled = kind is not PointMass

    def play(world: World, u: jax.Array) -> Outcome:
        tree = world.tree
        nodes, vocab = tree.max_nodes, world.target.shape[1]
        zero = jnp.zeros(1, jnp.float32)
        draws = draws_of(u[-nodes:-1], u[-1:])
        inside = jnp.concatenate([zero, u[: nodes - 1]])

        def expand(
            node: jax.Array, state: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            tokens, places = state
            below = tree.children[node]
            slots = jnp.where(below >= 0, below, nodes)
            if is_sampled:
                pairs = jnp.stack([jnp.zeros(below.shape, jnp.float32), inside[below]], axis=1)
                drawn = (draw or kind.draw)(pairs, world.draft[places[node]])
                tokens = tokens.at[slots].set(drawn, mode="drop")
            after = places[node] * vocab + tokens[below] + 1
            return tokens, places.at[slots].set(after, mode="drop")

        start = (tree.tokens, jnp.zeros(nodes, jnp.int32))
        tokens, places = lax.fori_loop(0, nodes, expand, start)
        draft_rows: RowsLike | None = world.draft[places] if is_sampled else None
        proposed = replace(tree, tokens=tokens)
        if num_drafted is not None:
            count = num_drafted(tokens[1:], world.draft[places][tree.parents[1:]])
            proposed = _first_candidates(proposed, count)
        target_rows: RowsLike = world.target[places]
        if rows is not None:
            target_rows = rows(world.target[places])
            draft_rows = rows(world.draft[places]) if is_sampled else None
        verdict = verify(
            draws, kind(tree=proposed, draft_rows=draft_rows), target_rows, world.bonus
        )
        is_left_out = world.lazy & ~world.looked_at[verdict.stop_node]
        return Outcome(drafted=jnp.where(is_left_out, NONE, tokens), verdict=verdict)

    return play


def draws_of(accept: jax.Array, final: jax.Array) -> Draws:
    """Make a verifier's draws of uniforms, accept [N - 1] and final [1]; 0 where none is read."""
    zero = jnp.zeros(1, jnp.float32)
    return Draws(accept=jnp.concatenate([zero, accept]), final=jnp.concatenate([zero, final]))


def layout(instance: Instance, **sizes: int) -> Tree:
    """Lay the tree of an instance out, level by level, padded to sizes."""
    parents, tokens = [-1], [-1]
    if instance.candidates is None:
        level = [0]
        for width in instance.branching:
            parents += [node for node in level for _ in range(width)]
            level = list(range(len(parents) - len(level) * width, len(parents)))
        tokens += [0] * (len(parents) - 1)
    else:
        contexts: list[Context] = [()]
        for node, context in enumerate(contexts):
            for token in instance.candidates.get(context, ()):
                contexts.append((*context, token))
                parents.append(node)
                tokens.append(token)
    return make_tree(tokens, parents, distinct_siblings=instance.candidates is not None, **sizes)


def _first_candidates(tree: Tree, count: jax.Array) -> Tree:
    """Keep the first candidates of a tree that is laid out level by level; the others are padding."""
    count = jnp.asarray(count, jnp.int32)
    is_kept = jnp.arange(tree.max_nodes, dtype=jnp.int32) <= count
    before = jnp.cumsum(tree.level_sizes, dtype=jnp.int32) - tree.level_sizes
    return Tree(
        tokens=jnp.where(is_kept, tree.tokens, NONE),
        parents=jnp.where(is_kept, tree.parents, NONE),
        children=jnp.where(tree.children <= count, tree.children, NONE),
        level_sizes=jnp.clip(count + 1 - before, 0, tree.level_sizes),
    )


def _table(rows: RowsByContext, vocab: int, depth: int, dtype: DTypeLike) -> jax.Array:
    """Lay rows out by context, tokens beyond the instance's vocabulary with probability 0."""
    missing = rows[()]
    contexts = itertools.chain.from_iterable(
        itertools.product(range(vocab), repeat=n) for n in range(depth + 1)
    )
    table = [floats(rows.get(context, missing)) for context in contexts]
    padding = ((0, 0), (0, vocab - len(missing)))
    # Rounded once, from the exact value to the type that the rows are stored in.
    return jnp.asarray(np.pad(np.array(table, np.float64), padding).astype(np.dtype(dtype)))


# --- what can matter when


def causal_nodes(tree: Tree, *, deepest_first: bool) -> list[int]:
    """List the nodes below the root in the order in which their accept draws can first matter."""
    return [node for node, is_tested in _steps(tree, deepest_first) if is_tested]


def _steps(tree: Tree, deepest_first: bool) -> list[tuple[int, bool]]:
    """List what a walk does: (node, False) reads the children of a node, (node, True) tests it."""
    children = {node: row[row >= 0].tolist() for node, row in enumerate(np.asarray(tree.children))}
    if not deepest_first:
        return [
            step
            for node in range(int(tree.num_nodes))
            for step in ((node, False), *((child, True) for child in children[node]))
        ]

    def below(node: int) -> list[tuple[int, bool]]:
        inside = [step for child in children[node] for step in (*below(child), (child, True))]
        return [(node, False), *inside]

    return below(0)


def _looked_at(tree: Tree, *, deepest_first: bool) -> np.ndarray:
    """Return which candidates a verifier that stopped at each node has read, bool [N, N].

    The nodes above them are those of the path, or if the deepest are tested first all that the walk
    came to before its last test.
    """
    parents = np.asarray(tree.parents)
    reached = np.asarray(ancestor_mask(tree))
    if deepest_first:
        clock = {step: time for time, step in enumerate(_steps(tree, True))}
        nodes, never = range(tree.max_nodes), len(clock)
        read, tested = ([clock.get((n, end), never) for n in nodes] for end in (False, True))
        reached = np.array(read)[None] < np.array(tested)[:, None]
    return reached[:, parents] & (parents >= 0)


def _lazy_axes(tree: Tree, *, deepest_first: bool) -> list[str]:
    """List the draft and accept axes for a draft that draws siblings when the verifier reads them."""
    parents = np.asarray(tree.parents)
    return [
        axis
        for node, is_tested in _steps(tree, deepest_first)
        for axis in (
            [f"accept {node}"]
            if is_tested
            else [f"draft {child}" for child in np.flatnonzero(parents == node)]
        )
    ]
