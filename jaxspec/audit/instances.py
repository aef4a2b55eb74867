"""Small worlds to prove rules in: target and draft rows by context, and how much is drafted.

An instance plays whole rounds: it draws the candidates with the draft's own draws, looks up the rows
of the contexts that came about, and calls the public jitted verifier. All of it is one function from
a vector of uniforms to a verdict, which the grid and the law by search then count.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import record
from jaxspec.draws import Draws
from jaxspec.proposals import PointMass, Proposal
from jaxspec.trees import Tree, make_tree
from jaxspec.verify import Rule, Verdict
from jaxspec.verify.checked import Verifier

Context = tuple[int, ...]
Rows = Mapping[Context, Sequence[Fraction | float | int]]


@record
class Outcome:
    """What one round did.

    Attributes:
      drafted: int32 [N], the candidates, -1 for the root.
      verdict: what the verifier decided.
    """

    drafted: jax.Array  # [N]
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Instance:
    """Rows by context, and what is drafted.

    Attributes:
      name: the name in reports.
      target: the target's row for each context of drafted tokens; the row of `()` stands in for
        contexts that are missing.
      draft: likewise the draft's rows, for sampled candidates; None for point masses.
      branching: candidates of each node by depth, (1, 1, 1) for a path of three.
      candidates: for point masses, the ordered candidates after each context, in place of
        `branching`.
      bonus: whether a fully accepted path is followed by one more token.
      expected_accepted: the exact mean number of accepted tokens by rule, where it is known.
    """

    name: str
    target: Rows
    draft: Rows | None = None
    branching: tuple[int, ...] = ()
    candidates: Mapping[Context, Sequence[int]] | None = None
    bonus: bool = True
    expected_accepted: Mapping[str, Fraction] = dataclasses.field(default_factory=dict)

    @property
    def vocab(self) -> int:
        """V."""
        return len(self.target[()])

    def layout(self) -> tuple[Tree, list[Context] | None]:
        """Lay out the tree: nodes level by level; the contexts of point masses."""
        if self.candidates is None:
            parents, level = [-1], [0]
            for width in self.branching:
                parents += [node for node in level for _ in range(width)]
                level = list(range(len(parents) - len(level) * width, len(parents)))
            tokens = [-1] + [0] * (len(parents) - 1)
            return make_tree(tokens, parents, distinct_siblings=False), None
        contexts, parents, tokens = [()], [-1], [-1]
        for node, context in enumerate(contexts):
            for token in self.candidates.get(context, ()):
                contexts.append((*context, token))
                parents.append(node)
                tokens.append(token)
        return make_tree(tokens, parents), contexts

    def table(self, rows: Rows, depth: int) -> np.ndarray:
        """Lay rows out by context, float32 [contexts, V]: child c of context i is i V + c + 1."""
        contexts = itertools.chain.from_iterable(
            itertools.product(range(self.vocab), repeat=length) for length in range(depth + 1)
        )
        missing = rows[()]
        return np.array(
            [[float(Fraction(x)) for x in rows.get(c, missing)] for c in contexts], np.float32
        )


@dataclasses.dataclass(frozen=True)
class Round:
    """A rule played in an instance, as a function of uniforms.

    Attributes:
      play: maps float32 [K] to an `Outcome`.
      axes: what each of the K numbers is, such as "draft 1", "accept 3", "final".
      causal_order: the axes in the order in which they can first matter.
      target: float32 [contexts, V], as from `Instance.table`.
      depth: greatest depth of a candidate.
    """

    play: Callable[[jax.Array], Outcome]
    axes: tuple[str, ...]
    causal_order: tuple[int, ...]
    target: np.ndarray
    depth: int

    def axis(self, name: str) -> int:
        """Return the position of a named axis."""
        return self.axes.index(name)


def make_round(
    rule: Rule,
    instance: Instance,
    *,
    verify: Verifier | None = None,
    draw: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> Round:
    """Make the round that a rule plays in an instance.

    Args:
      rule: which verifier, and how candidates are drawn.
      instance: where.
      verify: another verifier of the same arguments, to audit in the place of the rule's.
      draw: another way to draw siblings, (pairs [C, 2], draft row [V]) -> tokens [C], to audit in
        the place of the proposal's.
    """
    tree, contexts = instance.layout()
    verify = verify or rule.verify
    nodes, depth, vocab = tree.max_nodes, tree.max_depth, instance.vocab
    is_sampled = rule.proposal is not PointMass
    target = instance.table(instance.target, depth)
    draft = instance.table(instance.draft or {(): instance.target[()]}, depth)
    children = np.asarray(tree.children)
    node_names = range(1, nodes)
    axes = tuple(f"draft {n}" for n in node_names) if is_sampled else ()
    axes += (*(f"accept {n}" for n in node_names), "final")
    tested = _post_order(children) if rule.tests_deepest_first else list(node_names)
    order = [n - 1 for n in node_names] if is_sampled else []
    order += [axes.index(f"accept {n}") for n in tested] + [len(axes) - 1]

    def play(u: jax.Array) -> Outcome:
        target_table, draft_table = jnp.asarray(target), jnp.asarray(draft)
        where = [jnp.int32(0)] * nodes
        tokens = [jnp.int32(-1)] * nodes
        if contexts is not None:
            tokens = list(tree.tokens)
            for node, context in enumerate(contexts):
                for token in context:
                    where[node] = where[node] * vocab + token + 1
        else:
            for node in range(nodes):
                below = [int(c) for c in children[node] if c >= 0]
                if not below:
                    continue
                pairs = jnp.stack([jnp.stack([jnp.float32(0), u[c - 1]]) for c in below])
                drawn = _draw(rule, tree, draw)(pairs, draft_table[where[node]])
                for rank, child in enumerate(below):
                    tokens[child] = drawn[rank]
                    where[child] = where[node] * vocab + drawn[rank] + 1
        places = jnp.stack(where)
        drafted = tree.replace(tokens=jnp.stack(tokens))
        fields = {"draft_rows": draft_table[places]} if is_sampled else {}
        proposal = rule.proposal(tree=drafted, **fields)  # type: ignore[call-arg]
        accept = u[len(axes) - nodes : -1]
        draws = Draws(
            accept=jnp.concatenate([jnp.zeros(1, jnp.float32), accept]),
            final=jnp.stack([jnp.float32(0), u[-1]]),
        )
        verdict = verify(draws, proposal, target_table[places], jnp.asarray(instance.bonus))
        return Outcome(drafted=drafted.tokens, verdict=verdict)

    return Round(
        play=play, axes=axes, causal_order=tuple(order), target=target, depth=depth
    )


def _draw(
    rule: Rule, tree: Tree, draw: Callable[[jax.Array, jax.Array], jax.Array] | None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if draw is not None:
        return draw
    kind: type[Proposal] = rule.proposal
    return kind(tree=tree, draft_rows=None).draw  # type: ignore[call-arg]


def _post_order(children: np.ndarray, node: int = 0) -> list[int]:
    """List the nodes below `node` so that each stands after everything below it."""
    listed = []
    for child in children[node]:
        if child >= 0:
            listed += [*_post_order(children, int(child)), int(child)]
    return listed


def _iid(row: Sequence[Fraction]) -> Rows:
    return {(): row}


def _thirds(*numerators: int) -> list[Fraction]:
    return [Fraction(n, sum(numerators)) for n in numerators]


SINGLE_PATH = Instance(
    name="contract single path",
    target=_iid(_thirds(1, 3)),
    draft=_iid(_thirds(1, 1)),
    branching=(1,),
    bonus=False,
    expected_accepted={"token": Fraction(3, 4), "block": Fraction(3, 4)},
)
"""The contract's binary path: P(token 0) = 1/4, drafted from a fair coin."""

TWO_LEVEL_TREE = Instance(
    name="contract two-level tree",
    target={(): _thirds(1, 3), (0,): _thirds(4, 1), (1,): _thirds(2, 3)},
    candidates={(): (0, 1), (0,): (0, 1), (1,): (0, 1)},
    bonus=False,
    expected_accepted={"point_mass": Fraction(2)},
)
"""The contract's tree: joint law (00, 01, 10, 11) = (2000, 500, 3000, 4500) / 10000."""

_KILL_P = _thirds(1, 3, 7, 9)
_KILL_Q = _thirds(12, 3, 4, 1)
_CONTEXTS_P = {
    (): _thirds(1, 3, 8),
    (0,): _thirds(5, 6, 1),
    (1,): _thirds(2, 4, 6),
    (2,): _thirds(7, 1, 4),
    (0, 0): _thirds(3, 5, 4),
    (1, 1): _thirds(1, 10, 1),
    (2, 0): _thirds(4, 0, 8),
}
_CONTEXTS_Q = {
    (): _thirds(6, 4, 2),
    (0,): _thirds(2, 3, 7),
    (1,): _thirds(6, 1, 5),
    (2,): _thirds(1, 9, 2),
}

PATHS = (
    SINGLE_PATH,
    Instance(
        name="toy of two",
        target=_iid(_thirds(1, 2)),
        draft=_iid(_thirds(2, 1)),
        branching=(1, 1),
        expected_accepted={"token": Fraction(10, 9), "block": Fraction(11, 9)},
    ),
    Instance(
        name="contexts of three tokens",
        target=_CONTEXTS_P,
        draft=_CONTEXTS_Q,
        branching=(1, 1),
    ),
    Instance(name="kill row", target=_iid(_KILL_P), draft=_iid(_KILL_Q), branching=(1,)),
    Instance(
        name="target zeros",
        target={(): _thirds(0, 1, 3), (1,): _thirds(4, 0, 0), (2,): _thirds(1, 0, 1)},
        draft=_iid(_thirds(2, 1, 1)),
        branching=(1, 1),
    ),
)
"""Instances for rules on a single path."""

TREES = (
    Instance(
        name="kill row, two siblings",
        target=_iid(_KILL_P),
        draft=_iid(_KILL_Q),
        branching=(2,),
        expected_accepted={
            "with_replacement": Fraction(47, 80),
            "without_replacement": Fraction(107, 160),
        },
    ),
    Instance(
        name="contexts of three tokens, two levels",
        target=_CONTEXTS_P,
        draft=_CONTEXTS_Q,
        branching=(2, 1),
    ),
    Instance(
        name="draft support exhausted",
        target=_iid(_thirds(2, 8, 5, 5)),
        draft=_iid(_thirds(3, 1, 0, 0)),
        branching=(3,),
    ),
)
"""Instances for sampled siblings."""

POINT_MASS_TREES = (
    TWO_LEVEL_TREE,
    Instance(
        name="kill row, top two",
        target=_iid(_KILL_P),
        candidates={(): (3, 2)},
        expected_accepted={"point_mass": Fraction(4, 5)},
    ),
    Instance(
        name="contexts of three tokens, uneven tree",
        target=_CONTEXTS_P,
        candidates={(): (2, 0), (2,): (1, 0), (2, 0): (2,), (0,): (1,)},
    ),
    Instance(name="no candidates", target=_iid(_KILL_P), candidates={}, bonus=False),
)
"""Instances for deterministic candidates."""


def instances_for(rule: Rule) -> tuple[Instance, ...]:
    """Return the instances a rule is proved in."""
    if rule.proposal is PointMass:
        return POINT_MASS_TREES
    return PATHS if rule.is_path else PATHS[1:3] + TREES
