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

from jaxspec.audit.instances import Context, Instance, RowsByContext, alike, floats
from jaxspec.checks import struct
from jaxspec.draws import Draws
from jaxspec.logits import Logits
from jaxspec.proposals import PointMass, Proposal
from jaxspec.rows import RowsLike, RowSource
from jaxspec.tiles import TILE
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
      target: float [contexts, V], laws by context: the child of context i by token x is i V + x + 1.
      draft: float [contexts, V], as `target`.
      stored_target: float [contexts, V], what the verifier is handed for `target`: the same rows, or
        logits if the instance has settings.
      stored_draft: float [contexts, V], as `stored_target`.
      settings: float32 [3], temperature, top_k and top_p.
      bonus: bool [].
      looked_at: bool [N, N], whether a verifier that stopped at a node has read a candidate.
      lazy: bool [], whether an outcome leaves out the candidates that were not read.
    """

    tree: Tree
    target: jax.Array  # [contexts, V]
    draft: jax.Array  # [contexts, V]
    stored_target: jax.Array  # [contexts, V]
    stored_draft: jax.Array  # [contexts, V]
    settings: jax.Array  # [3]
    bonus: jax.Array  # []
    looked_at: jax.Array  # [N, N]
    lazy: jax.Array  # []


@struct
class Outcome:
    """The result of one round.

    Attributes:
      drafted: int32 [N], the candidates as drawn; -1 for the root, on padding, and in a lazy world
        for candidates that were not read.
      num_nodes: int32 [], nodes that were proposed, the root included.
      verdict: of the verifier.
    """

    drafted: jax.Array  # [N]
    num_nodes: jax.Array  # []
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
      axes: what each of the K numbers is: "draft 1", ..., "accept 1", ..., "final"; above one tile of
        tokens, where a pair of numbers draws, also "draft 1 tile", ..., "final tile".
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
    dtype: DTypeLike | None = None,
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
    instances = alike(instance, padded_to)
    layouts = [layout(each) for each in instances]
    depth, vocab = max(t.max_depth for t in layouts), max(each.vocab for each in instances)
    nodes, children = max(t.max_nodes for t in layouts), max(t.max_children for t in layouts)
    tree = layout(instance, max_nodes=nodes, max_children=children, max_depth=depth)
    stored_in = np.dtype(instance.dtype if dtype is None else dtype)
    tables = [
        _tables(instance, table, vocab, depth, stored_in)
        for table in (instance.target, instance.draft or instance.target)
    ]
    (target, stored_target), (draft, stored_draft) = tables
    if rows is not None:
        stored_target, stored_draft = target, draft
    settings = (instance.temperature, instance.top_k, instance.top_p)
    world = World(
        tree=tree,
        target=jnp.asarray(target),
        draft=jnp.asarray(draft),
        stored_target=jnp.asarray(stored_target),
        stored_draft=jnp.asarray(stored_draft),
        settings=jnp.asarray(settings, jnp.float32),
        bonus=jnp.asarray(instance.bonus),
        looked_at=jnp.asarray(looked_at(tree, deepest_first=tests_deepest_first)),
        lazy=jnp.bool_(False),
    )
    numbers = [f"draft {n}" for n in range(1, nodes)] if is_sampled else []
    tiles = [*numbers, "final"] if vocab > TILE else []
    axes = [f"{name} tile" for name in tiles] + numbers
    axes += [*(f"accept {n}" for n in range(1, nodes)), "final"]
    tested = causal_nodes(tree, deepest_first=tests_deepest_first)
    order = [f"draft {n}" for n in range(1, int(tree.num_nodes))] if is_sampled else []
    order += [*(f"accept {n}" for n in tested), "final"]
    lazy = [*_lazy_axes(tree, deepest_first=tests_deepest_first), "final"]

    def places(names: list[str]) -> tuple[int, ...]:
        return tuple(
            axes.index(name)
            for drawn in names
            for name in ([f"{drawn} tile", drawn] if drawn in tiles else [drawn])
        )

    return Round(
        play=_make_play(
            rule.proposal,
            verify or rule.verify,
            draw,
            num_drafted,
            _as_logits if instance.is_processed and rows is None else rows,
        ),
        world=world,
        axes=tuple(axes),
        causal_order=places(order),
        lazy_order=places(lazy) if is_sampled and num_drafted is None else None,
    )


@functools.lru_cache(maxsize=64)
def _make_play(
    kind: type[Proposal],
    verify: Verifier,
    draw: DrawSiblings | None,
    num_drafted: DraftLength | None,
    rows: MakeRows | Callable[[jax.Array, jax.Array], RowSource] | None,
) -> Callable[[World, jax.Array], Outcome]:
    """Make the function of a round; one object for each rule, so that it compiles once."""
    is_sampled = kind is not PointMass

    def play(world: World, u: jax.Array) -> Outcome:
        tree = world.tree
        nodes, vocab = tree.max_nodes, world.target.shape[1]
        zeros = jnp.zeros(nodes, jnp.float32)
        tiles, final_tile = zeros, zeros[:1]
        if vocab > TILE:
            drawn = nodes - 1 if is_sampled else 0
            tiles, final_tile = jnp.append(zeros[:1], u[:drawn]), u[drawn : drawn + 1]
            u = u[drawn + 1 :]
        draws = draws_of(u[-nodes:-1], jnp.append(final_tile, u[-1:]))
        inside = jnp.concatenate([zeros[:1], u[: nodes - 1]])

        def expand(
            node: jax.Array, state: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            tokens, places = state
            below = tree.children[node]
            slots = jnp.where(below >= 0, below, nodes)
            if is_sampled:
                pairs = jnp.stack([tiles[below], inside[below]], axis=1)
                drawn = (draw or kind.draw)(pairs, world.draft[places[node]])
                tokens = tokens.at[slots].set(drawn, mode="drop")
            after = places[node] * vocab + tokens[below] + 1
            return tokens, places.at[slots].set(after, mode="drop")

        start = (tree.tokens, jnp.zeros(nodes, jnp.int32))
        tokens, places = lax.fori_loop(0, nodes, expand, start)
        proposed = replace(tree, tokens=tokens)
        if num_drafted is not None:
            count = num_drafted(tokens[1:], world.draft[places][tree.parents[1:]])
            proposed = _first_candidates(proposed, count)
        given = (world.stored_target[places], world.stored_draft[places])
        sources: list[RowsLike] = list(given)
        if rows is _as_logits:
            sources = [_as_logits(each, world.settings) for each in given]
        elif rows is not None:
            sources = [rows(each) for each in given]  # type: ignore[call-arg]
        target_rows, draft_rows = sources[0], sources[1] if is_sampled else None
        verdict = verify(
            draws, kind(tree=proposed, draft_rows=draft_rows), target_rows, world.bonus
        )
        is_left_out = world.lazy & ~world.looked_at[verdict.stop_node]
        return Outcome(
            drafted=jnp.where(is_left_out, NONE, tokens),
            num_nodes=proposed.num_nodes,
            verdict=verdict,
        )

    return play


def _as_logits(values: jax.Array, settings: jax.Array) -> Logits:
    temperature, top_k, top_p = settings
    return Logits(
        values=values, temperature=temperature, top_k=top_k.astype(jnp.int32), top_p=top_p
    )


def draws_of(accept: jax.Array, final: jax.Array) -> Draws:
    """Make a verifier's draws of uniforms, accept [N - 1], final [1] or [2], with 0 before them."""
    zero = jnp.zeros(1, jnp.float32)
    return Draws(accept=jnp.append(zero, accept), final=jnp.append(zero, final)[-2:])


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


def _tables(
    instance: Instance,
    rows: RowsByContext,
    vocab: int,
    depth: int,
    dtype: np.dtype,
) -> tuple[np.ndarray, np.ndarray]:
    """Lay rows out by context, tokens beyond the instance's vocabulary with probability 0.

    Returns:
      (the laws, what is stored), [contexts, V].
    """
    contexts = itertools.chain.from_iterable(
        itertools.product(range(vocab), repeat=n) for n in range(depth + 1)
    )
    places = {context: place for place, context in enumerate(contexts)}
    laws, stored = np.zeros((2, len(places), vocab))
    for table, of in ((laws, instance.processed), (stored, floats)):
        table[:, : instance.vocab] = of(rows[()])
        for context, row in rows.items():
            if context in places:
                table[places[context], : instance.vocab] = of(row)
    if instance.is_processed:
        with np.errstate(divide="ignore"):
            stored = np.log(stored)
    # Rounded once, from the exact value to the type that the rows are stored in.
    laws = laws.astype(dtype)
    stored = stored.astype(dtype) if instance.is_processed else laws
    return laws, stored


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


def looked_at(tree: Tree, *, deepest_first: bool) -> np.ndarray:
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
