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

from jaxspec.audit.instances import Context, Instance, RowsByContext
from jaxspec.checks import record
from jaxspec.draws import Draws
from jaxspec.proposals import PointMass, Proposal, propose
from jaxspec.trees import Tree, make_tree
from jaxspec.verify import Rule, Verdict, Verifier

DrawSiblings = Callable[[jax.Array, jax.Array], jax.Array]
"""Draws siblings: (pairs [C, 2], draft row [V]) -> tokens [C]."""


@record
class World:
    """An instance as arrays.

    Attributes:
      tree: topology; the tokens are those of point masses, else drawn in the round.
      target: float32 [contexts, V], rows by context: the child of context i by token x is i V + x + 1.
      draft: float32 [contexts, V].
      bonus: bool [].
    """

    tree: Tree
    target: jax.Array  # [contexts, V]
    draft: jax.Array  # [contexts, V]
    bonus: jax.Array  # []


@record
class Outcome:
    """What one round did.

    Attributes:
      drafted: int32 [N], the candidates; -1 for the root and on padding.
      verdict: what the verifier decided.
    """

    drafted: jax.Array  # [N]
    verdict: Verdict


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
        """Return the least capacity that all of the instances fit into."""
        sizes = [
            (tree.max_nodes, tree.max_children, tree.max_depth, instance.vocab)
            for instance, tree in ((instance, _layout(instance)) for instance in instances)
        ]
        return cls(*map(max, zip(*sizes, strict=True)))


@dataclasses.dataclass(frozen=True)
class Round:
    """A rule played in an instance, as a function of uniforms.

    Attributes:
      play: maps (world, float32 [K]) to an `Outcome`; the same object for all instances of a rule.
      world: the instance.
      axes: what each of the K numbers is: "draft 1", ..., "accept 1", ..., "final".
      causal_order: the axes that can matter, in the order in which they first can.
    """

    play: Callable[[World, jax.Array], Outcome]
    world: World
    axes: tuple[str, ...]
    causal_order: tuple[int, ...]

    def axis(self, name: str) -> int:
        """Return the position of a named axis."""
        return self.axes.index(name)

    @property
    def depth(self) -> int:
        """D, so that a round emits at most D + 1 tokens."""
        return self.world.tree.max_depth


def make_round(
    rule: Rule,
    instance: Instance,
    *,
    capacity: Capacity | None = None,
    verify: Verifier | None = None,
    draw: DrawSiblings | None = None,
    tests_deepest_first: bool | None = None,
) -> Round:
    """Make the round that a rule plays in an instance.

    Args:
      rule: which verifier, and how candidates are drawn.
      instance: where.
      capacity: sizes to pad to, so that several instances share one compiled program.
      verify: another verifier of the same arguments, to audit in the place of the rule's.
      draw: another way to draw siblings, to audit in the place of the proposal's.
      tests_deepest_first: in which order `verify` reads its accept draws, from the deepest candidate
        back or from the root; default the rule's. The search for edges follows it: told the wrong
        order it overlooks some, and finds a lossless verifier biased.
    """
    if tests_deepest_first is None:
        tests_deepest_first = rule.tests_deepest_first
    capacity = capacity or Capacity.of([instance])
    tree = _layout(instance, capacity)
    draft = instance.draft or {(): instance.target[()]}
    is_sampled = rule.proposal is not PointMass
    world = World(
        tree=tree,
        target=_table(instance.target, capacity),
        draft=_table(draft, capacity),
        bonus=jnp.asarray(instance.bonus),
    )
    names = range(1, capacity.nodes)
    axes = tuple(f"draft {n}" for n in names) if is_sampled else ()
    axes += (*(f"accept {n}" for n in names), "final")
    nodes = range(1, int(tree.num_nodes))
    tested = causal_nodes(tree, deepest_first=tests_deepest_first)
    order = [axes.index(f"draft {n}") for n in nodes] if is_sampled else []
    order += [axes.index(f"accept {n}") for n in tested] + [axes.index("final")]
    play = _make_play(rule.proposal, verify or rule.verify, draw)
    return Round(play=play, world=world, axes=axes, causal_order=tuple(order))


@functools.lru_cache(maxsize=64)
def _make_play(
    kind: type[Proposal], verify: Verifier, draw: DrawSiblings | None
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
        proposal = propose(kind, replace(tree, tokens=tokens), draft_rows)
        verdict = verify(draws, proposal, world.target[places], world.bonus)
        return Outcome(drafted=tokens, verdict=verdict)

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


def _table(rows: RowsByContext, capacity: Capacity) -> jax.Array:
    """Lay rows out by context, tokens beyond the instance's vocabulary with probability 0."""
    missing = rows[()]
    contexts = itertools.chain.from_iterable(
        itertools.product(range(capacity.vocab), repeat=n) for n in range(capacity.depth + 1)
    )
    table = [[float(Fraction(x)) for x in rows.get(context, missing)] for context in contexts]
    padding = ((0, 0), (0, capacity.vocab - len(missing)))
    return jnp.asarray(np.pad(np.array(table, np.float32), padding))


def causal_nodes(tree: Tree, *, deepest_first: bool) -> list[int]:
    """List the nodes below the root in the order in which their accept draws can first matter."""
    children = np.asarray(tree.children)

    def post_order(node: int) -> list[int]:
        listed = []
        for child in children[node][children[node] >= 0].tolist():
            listed += [*post_order(child), child]
        return listed

    return post_order(0) if deepest_first else list(range(1, int(tree.num_nodes)))
