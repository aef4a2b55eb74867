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
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxspec.audit.instances import Context, Instance, RowsByContext
from jaxspec.checks import struct
from jaxspec.draws import Draws
from jaxspec.proposals import PointMass, Proposal, propose
from jaxspec.transfers import moves_data
from jaxspec.trees import NONE, Tree, ancestor_mask, make_tree
from jaxspec.verify import Rule, Verdict, Verifier

DrawSiblings = Callable[[jax.Array, jax.Array], jax.Array]
"""Draws siblings: (pairs [C, 2], draft row [V]) -> tokens [C]."""

DraftLength = Callable[[jax.Array, jax.Array], jax.Array]
"""Decides how many of the drawn candidates are proposed, in the order in which they were drawn:
(tokens [N - 1], the draft row of each one's parent [N - 1, V]) -> int32 []. For a path these are
the `tokens` and `draft_rows` of `sampled_path`, and the result is its `num_drafted`."""

MakeRows = Callable[[jax.Array], Any]
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


class Capacity(NamedTuple):
    """Static sizes of a round: nodes (the root counted), children of a node, depth, vocabulary.

    Tokens added to an instance's vocabulary have probability 0. An instance whose draft runs out of
    support draws uniformly from all tokens then, so its vocabulary must not be padded.
    """

    nodes: int
    children: int
    depth: int
    vocab: int

    @classmethod
    def of(cls, instances: Iterable[Instance]) -> "Capacity":
        """Return the least capacity that all of the instances fit into."""
        pairs = [(instance, _layout(instance)) for instance in instances]
        sizes = [(t.max_nodes, t.max_children, t.max_depth, i.vocab) for i, t in pairs]
        return cls(*map(max, zip(*sizes, strict=True)))


@dataclasses.dataclass(frozen=True)
class Round:
    """A rule played in an instance, as a function of uniforms.

    All candidates of a tree are drawn, and the verifier reads few of them: below the root, and below
    those that it reached. The verdict does not depend on the others, so in a lazy world boxes of
    draws that differ in them alone are one box. With k siblings of V tokens below each of n nodes a
    search finds some V^k times as many boxes as paths through the tree, not V^(k n). Which
    candidates were read follows from the verdict's `stop_node`; if a verifier reports it wrongly, the
    certificate of the search shows misses.

    Attributes:
      play: maps (world, float32 [K]) to an `Outcome`; the same object for all instances of a rule.
      world: the instance.
      axes: what each of the K numbers is: "draft 1", ..., "accept 1", ..., "final".
      causal_order: the axes that can matter, in the order in which they first can.
      lazy_order: as `causal_order`, in the lazy world, where the candidates below a node are drawn
        when the verifier reaches it; None for point masses, which are not drawn, and if the number
        of candidates is decided by looking at all of them.
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
    capacity = Capacity.of([instance, *padded_to])
    tree = _layout(instance, capacity)
    draft = instance.draft or {(): instance.target[()]}
    world = World(
        tree=tree,
        target=_table(instance.target, capacity, dtype),
        draft=_table(draft, capacity, dtype),
        bonus=jnp.asarray(instance.bonus),
        looked_at=jnp.asarray(_looked_at(tree, deepest_first=tests_deepest_first)),
        lazy=jnp.bool_(False),
    )
    names = range(1, capacity.nodes)
    axes = tuple(f"draft {n}" for n in names) if is_sampled else ()
    axes += (*(f"accept {n}" for n in names), "final")
    tested = causal_nodes(tree, deepest_first=tests_deepest_first)
    order = [f"draft {n}" for n in range(1, int(tree.num_nodes))] if is_sampled else []
    order += [*(f"accept {n}" for n in tested), "final"]
    lazy = [*_as_looked_at(tree, deepest_first=tests_deepest_first), "final"]
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
        draft_rows = world.draft[places] if is_sampled else None
        proposed = replace(tree, tokens=tokens)
        if num_drafted is not None and draft_rows is not None:
            count = num_drafted(tokens[1:], draft_rows[tree.parents[1:]])
            proposed = _first_candidates(proposed, count)
        target_rows = world.target[places]
        if rows is not None:
            target_rows = rows(target_rows)
            draft_rows = None if draft_rows is None else rows(draft_rows)
        verdict = verify(draws, propose(kind, proposed, draft_rows), target_rows, world.bonus)
        is_left_out = world.lazy & ~world.looked_at[verdict.stop_node]
        return Outcome(drafted=jnp.where(is_left_out, NONE, tokens), verdict=verdict)

    return play


def draws_of(accept: jax.Array, final: jax.Array) -> Draws:
    """Make a verifier's draws of uniforms, accept [N - 1] and final [1]; 0 where none is read."""
    zero = jnp.zeros(1, jnp.float32)
    return Draws(accept=jnp.concatenate([zero, accept]), final=jnp.concatenate([zero, final]))


def _layout(instance: Instance, capacity: Capacity | None = None) -> Tree:
    """Lay the tree of an instance out, level by level, padded to a capacity."""
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
    names = ("max_nodes", "max_children", "max_depth")
    sizes = dict(zip(names, capacity, strict=False)) if capacity else {}
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


def _table(rows: RowsByContext, capacity: Capacity, dtype: DTypeLike) -> jax.Array:
    """Lay rows out by context, tokens beyond the instance's vocabulary with probability 0."""
    missing = rows[()]
    contexts = itertools.chain.from_iterable(
        itertools.product(range(capacity.vocab), repeat=n) for n in range(capacity.depth + 1)
    )
    table = [[float(Fraction(x)) for x in rows.get(context, missing)] for context in contexts]
    padding = ((0, 0), (0, capacity.vocab - len(missing)))
    # Rounded once, from the exact value to the type that the rows are stored in.
    return jnp.asarray(np.pad(np.array(table, np.float64), padding).astype(np.dtype(dtype)))


# --- what can matter when


def causal_nodes(tree: Tree, *, deepest_first: bool) -> list[int]:
    """List the nodes below the root in the order in which their accept draws can first matter."""
    if not deepest_first:
        return list(range(1, int(tree.num_nodes)))
    return [node for node, is_tested in _tour(tree) if is_tested and node]


def _tour(tree: Tree) -> list[tuple[int, bool]]:
    """List (node, whether it is tested) as a walk that tests the deepest first reaches them.

    Each node is listed twice: when it is entered, and its children read, and when it is tested.
    """
    children = np.asarray(tree.children)

    def below(node: int) -> list[tuple[int, bool]]:
        inside = [step for child in children[node][children[node] >= 0] for step in below(child)]
        return [(int(node), False), *inside, (int(node), True)]

    return below(0)


def _looked_at(tree: Tree, *, deepest_first: bool) -> np.ndarray:
    """Return which candidates a verifier that stopped at each node has read, bool [N, N].

    These are the candidates below the nodes that it reached: from the root on those of the path, or
    all that are entered before the last test if the deepest are tested first.
    """
    parents = np.asarray(tree.parents)
    if deepest_first:
        clock = {step: time for time, step in enumerate(_tour(tree))}
        times = [
            [clock.get((n, end), len(clock)) for n in range(tree.max_nodes)]
            for end in (False, True)
        ]
        entered, tested = np.array(times)
        came_to = entered[None] < tested[:, None]
    else:
        came_to = np.asarray(ancestor_mask(tree))
    return came_to[:, parents] & (parents >= 0)


def _as_looked_at(tree: Tree, *, deepest_first: bool) -> list[str]:
    """List the draft and accept axes as a verifier that draws siblings when it needs them would."""
    children = np.asarray(tree.children)
    steps = _tour(tree) if deepest_first else [(n, False) for n in range(int(tree.num_nodes))]
    axes = []
    for node, is_tested in steps:
        below = children[node][children[node] >= 0].tolist()
        if not is_tested:
            axes += [f"draft {child}" for child in below]
            axes += [f"accept {child}" for child in below if not deepest_first]
        elif node:
            axes.append(f"accept {node}")
    return axes
