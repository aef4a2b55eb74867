"""Whole rounds as functions of uniforms: what the grid and the law by search count.

A round draws the candidates with the draft's own draws, looks up the rows of the contexts that came
about, and calls the public jitted verifier. What differs between instances is data, so instances of
one capacity share one compiled program.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxspec.audit.brief import brief
from jaxspec.audit.instances import Context, Instance, RowsByContext
from jaxspec.checks import struct
from jaxspec.draws import Draws
from jaxspec.proposals import PointMass, Proposal
from jaxspec.transfers import moves_data
from jaxspec.trees import NONE, Tree, ancestor_mask, make_tree
from jaxspec.verify import Rule, Verdict, Verifier

DrawSiblings = Callable[[jax.Array, jax.Array], jax.Array]
"""Draws siblings: (pairs [C, 2], draft row [V]) -> tokens [C]."""

DraftLength = Callable[[jax.Array, jax.Array], jax.Array]
"""Decides how many of the drawn candidates are proposed, in the order in which they were drawn:
(tokens [N - 1], the draft row of each one's parent [N - 1, V]) -> int32 []. For a path these are
the `tokens` and `draft_rows` of `sampled_path`, and what is returned is its `num_drafted`."""


@struct
class World:
    """An instance as arrays.

    Attributes:
      tree: topology; the tokens are those of point masses, else drawn in the round.
      target: float [contexts, V], rows by context: the child of context i by token x is i V + x + 1.
        The law of a stored row is row / sum(row); `joint_law` reads it so.
      draft: float [contexts, V], likewise.
      bonus: bool [].
      looked_at: bool [N, N], whether a verifier that stopped at a node has looked at a candidate.
      lazy: bool [], whether an outcome leaves out the candidates that were not looked at.
    """

    tree: Tree
    target: jax.Array  # [contexts, V]
    draft: jax.Array  # [contexts, V]
    bonus: jax.Array  # []
    looked_at: jax.Array  # [N, N]
    lazy: jax.Array  # []

    __repr__ = brief


@struct
class Outcome:
    """What one round did.

    Attributes:
      drafted: int32 [N], the candidates as drawn; -1 for the root, on padding, and in a lazy world
        (see `Round.lazily`) for candidates that were not looked at.
      verdict: what the verifier decided.
    """

    drafted: jax.Array  # [N]
    verdict: Verdict

    __repr__ = brief


@dataclasses.dataclass(frozen=True)
class Capacity:
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
        """Return the least capacity that all of the instances fit into.

        Raises:
          ValueError: there are no instances.
        """
        sizes = [
            (tree.max_nodes, tree.max_children, tree.max_depth, instance.vocab)
            for instance, tree in ((instance, _layout(instance)) for instance in instances)
        ]
        if not sizes:
            raise ValueError("instances is empty: a capacity must fit at least one")
        return cls(*map(max, zip(*sizes, strict=True)))


@dataclasses.dataclass(frozen=True)
class Round:
    """A rule played in an instance, as a function of uniforms.

    Attributes:
      play: maps (world, float32 [K]) to an `Outcome`; the same object for all instances of a rule.
      world: the instance.
      axes: what each of the K numbers is: "draft 1", ..., "accept 1", ..., "final".
      causal_order: the axes that can matter, in the order in which they first can.
      lazy_order: likewise in the lazy world, where the candidates below a node are drawn when the
        verifier comes to them; None if the round has no such order.
    """

    play: Callable[[World, jax.Array], Outcome]
    world: World
    axes: tuple[str, ...]
    causal_order: tuple[int, ...]
    lazy_order: tuple[int, ...] | None = None

    __repr__ = brief

    def axis(self, name: str) -> int:
        """Return the position of a named axis."""
        return self.axes.index(name)

    @property
    def depth(self) -> int:
        """D, so that a round emits at most D + 1 tokens."""
        return self.world.tree.max_depth

    def lazily(self) -> "Round | None":
        """Return the same round with outcomes that name only the candidates that were looked at.

        All candidates of a tree are drawn, and the verifier looks at few of them: below the root,
        and below those that it came to. Whatever the others are, the verdict is the same, so boxes
        of draws that differ in them alone need not be told apart. With k siblings of V tokens below
        each of n nodes the boxes of a search are some V^k times as many as paths through the tree,
        not V^(k n).

        Which candidates were looked at is read off the verdict's `stop_node`. If a verifier says it
        wrongly, boxes are wrong too, and the certificate of the search shows misses.

        Returns:
          The round; None for point masses, whose candidates are not drawn, and where the number of
          candidates is decided by looking at all of them.
        """
        if self.lazy_order is None:
            return None
        world = replace(self.world, lazy=jnp.bool_(True))
        return dataclasses.replace(self, world=world, causal_order=self.lazy_order)


@moves_data
def make_round(
    rule: Rule,
    instance: Instance,
    *,
    capacity: Capacity | None = None,
    verify: Verifier | None = None,
    draw: DrawSiblings | None = None,
    num_drafted: DraftLength | None = None,
    tests_deepest_first: bool | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Round:
    """Make the round that a rule plays in an instance.

    What a draft may depend on is the contract of `jaxspec.decode.Drafter`. `draw` and `num_drafted`
    are where a draft's own rules are put to the test of it: whether a draft may stop, drop, sort or
    merge candidates as it does is what `exact_law` of the round tells.

    Args:
      rule: which verifier, and how candidates are drawn.
      instance: where.
      capacity: sizes to pad to, so that several instances share one compiled program.
      verify: another verifier of the same arguments, to audit in the place of the rule's.
      draw: another way to draw siblings, to audit in the place of the proposal's.
      num_drafted: how many of the drawn candidates are proposed, for a draft that stops by looking
        at them; default all.
      tests_deepest_first: in which order `verify` reads its accept draws, from the deepest candidate
        back or from the root; default the rule's. The search for edges follows it: told the wrong
        order it overlooks some, and finds a lossless verifier biased.
      dtype: what the rows are stored in. The mass of a row in half precision is not 1; its law, by
        which a token is drawn and by which the text is judged, is row / sum(row).

    Returns:
      The `Round`.

    Raises:
      ValueError: `num_drafted` is given for point masses, which are not drawn.
    """
    if tests_deepest_first is None:
        tests_deepest_first = rule.tests_deepest_first
    is_sampled = rule.proposal is not PointMass
    if num_drafted is not None and not is_sampled:
        raise ValueError(
            f"num_drafted is given, rule {rule.name!r} is for point masses: nothing is drawn that a "
            "draft could look at before it stops; leave candidates out of the instance instead"
        )
    capacity = capacity or Capacity.of([instance])
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
        play=_make_play(rule.proposal, verify or rule.verify, draw, num_drafted),
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
) -> Callable[[World, jax.Array], Outcome]:
    """Make the function of a round; one object for each rule, so that it compiles once."""
    is_sampled = kind is not PointMass

    def play(world: World, u: jax.Array) -> Outcome:
        tree = world.tree
        nodes, vocab = tree.max_nodes, world.target.shape[1]
        zero = jnp.zeros(1, jnp.float32)
        accept = jnp.concatenate([zero, u[-nodes:-1]])
        draws = Draws(accept=accept, final=jnp.concatenate([zero, u[-1:]]))
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
        proposal = kind(tree=proposed, draft_rows=draft_rows)
        verdict = verify(draws, proposal, world.target[places], world.bonus)
        is_left_out = world.lazy & ~world.looked_at[verdict.stop_node]
        return Outcome(drafted=jnp.where(is_left_out, NONE, tokens), verdict=verdict)

    return play


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
    sizes = {}
    if capacity is not None:
        sizes = {
            "max_nodes": capacity.nodes,
            "max_children": capacity.children,
            "max_depth": capacity.depth,
        }
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


def causal_nodes(tree: Tree, *, deepest_first: bool) -> list[int]:
    """List the nodes below the root in the order in which their accept draws can first matter."""
    if not deepest_first:
        return list(range(1, int(tree.num_nodes)))
    return [node for node, is_tested in _tour(tree) if is_tested and node]


def _tour(tree: Tree) -> list[tuple[int, bool]]:
    """List the nodes as a walk that tests the deepest first comes by, each twice.

    Returns:
      (node, whether it is tested); before that it is entered, and its children looked at.
    """
    children = np.asarray(tree.children)

    def below(node: int) -> list[tuple[int, bool]]:
        inside = [step for child in children[node][children[node] >= 0] for step in below(child)]
        return [(int(node), False), *inside, (int(node), True)]

    return below(0)


def _looked_at(tree: Tree, *, deepest_first: bool) -> np.ndarray:
    """Return which candidates a verifier that stopped at each node has looked at, bool [N, N].

    These are the candidates below the nodes that it came to: from the root on those of the path, or
    all that are entered before the last test if the deepest are tested first.
    """
    parents = np.asarray(tree.parents)
    if deepest_first:
        clock = {step: time for time, step in enumerate(_tour(tree))}
        never = len(clock)
        entered = np.array([clock.get((node, False), never) for node in range(tree.max_nodes)])
        tested = np.array([clock.get((node, True), never) for node in range(tree.max_nodes)])
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
