"""Random rounds of one capacity: whatever is drawn, a rule's batch is one compiled program.

Everything goes through `jax.vmap(verify)` with every argument mapped, so that tests of one rule in
different files share the program too.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec as js

BATCH = 512
VOCAB = 8
DRAFTED = 5  # of a path
NODES, CHILDREN, DEPTH = 8, 3, 3  # of a tree
WIDE = 33380  # two spans of 32 tiles, one more tile, a tail of 100
WIDE_BATCH = 8

EDGES = (0.0, -0.0, 2**-24, 0.5, 1 - 2**-23, 1 - 2**-24)
"""Draws that may be drawn and sit at an edge."""


@dataclasses.dataclass
class Rounds:
    """A batch of rounds as arrays that a test may write into."""

    tokens: np.ndarray  # [B, N]
    parents: np.ndarray  # [B, N]
    children: np.ndarray  # [B, N, C]
    level_sizes: np.ndarray  # [B, D + 1]
    target: np.ndarray  # [B, N, V]
    draft: np.ndarray  # [B, N, V]
    accept: np.ndarray  # [B, N]
    final: np.ndarray  # [B, 2]
    bonus: np.ndarray  # [B]
    temperature: np.ndarray  # [B], of the target; used by logits alone
    draft_temperature: np.ndarray  # [B]

    def copy(self) -> "Rounds":
        return Rounds(**{k: v.copy() for k, v in vars(self).items()})

    def tree(self) -> js.Tree:
        names = ("tokens", "parents", "children", "level_sizes")
        return js.Tree(**{name: jnp.asarray(getattr(self, name)) for name in names})

    def arguments(self, kind: type[js.Proposal], *, logits: bool = False) -> tuple:
        """Make (draws, proposal, target rows, bonus); rows are logits where they are to be so read."""

        def rows(values: np.ndarray, temperature: np.ndarray) -> js.Logits | jax.Array:
            if not logits:
                return jnp.asarray(values)
            return js.Logits(values=jnp.asarray(values), temperature=jnp.asarray(temperature))

        draws = js.Draws(accept=jnp.asarray(self.accept), final=jnp.asarray(self.final))
        tree = self.tree()
        if kind is js.PointMass:
            proposal = js.PointMass(tree=tree)
        else:
            proposal = kind(tree=tree, draft_rows=rows(self.draft, self.draft_temperature))
        return draws, proposal, rows(self.target, self.temperature), jnp.asarray(self.bonus)


def play(rule: js.Rule, rounds: Rounds, *, logits: bool = False) -> js.Verdict:
    """Verify a batch of rounds by the public verifier under the user's plain `vmap`."""
    verdict = jax.vmap(rule.verify)(*rounds.arguments(rule.proposal, logits=logits))
    return jax.tree.map(np.asarray, verdict)


def emitted(verdict: js.Verdict, index: int) -> list[int]:
    return verdict.tokens[index, : verdict.num_tokens[index]].tolist()


def random_rows(generator: np.random.Generator, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    """Draw rows from flat to peaked, many with zeros, some of one token."""
    flatness = [0.2, 1.0, 5.0] if vocab <= 512 else [1e-4, 1e-3, 0.5]
    sharpness = generator.choice(flatness, size=(*shape, 1))
    rows = generator.gamma(np.broadcast_to(sharpness, (*shape, vocab)))
    rows *= generator.random(rows.shape) < generator.choice([0.4, 1.0], size=(*shape, 1))
    rows[..., 0] += rows.sum(axis=-1) == 0
    one_token = np.eye(1, vocab)[0]
    rows = np.where(generator.random((*shape, 1)) < 0.1, np.roll(one_token, 3), rows)
    return (rows / rows.sum(axis=-1, keepdims=True)).astype(np.float32)


def random_rounds(
    rule: js.Rule,
    seed: int,
    *,
    batch: int = BATCH,
    vocab: int = VOCAB,
    same_rows: bool = False,
    edge_draws: bool = False,
    max_depth: int | None = None,
) -> Rounds:
    """Draw rounds that a user could have: candidates by the law that the rule's kind says.

    Args:
      rule: whose capacity and kind of proposal.
      seed: of everything.
      batch: B.
      vocab: V.
      same_rows: draft rows equal to the target's; else equal in one node of five.
      edge_draws: half of the uniforms at the edges of [0, 1).
      max_depth: greatest depth drafted, at most that of the capacity.
    """
    generator = np.random.default_rng(seed)
    topology = _paths if rule.is_path else _trees
    parents, children, level_sizes = topology(generator, batch, max_depth)
    target = random_rows(generator, parents.shape, vocab)
    draft = random_rows(generator, parents.shape, vocab)
    is_same = (generator.random((*parents.shape, 1)) < 0.2) | same_rows
    draft = np.where(is_same, target, draft)
    is_fixed = rule.proposal is js.PointMass
    accept, final = _uniforms(generator, parents.shape), _uniforms(generator, (batch, 2))
    if edge_draws:
        for draws in (accept, final):
            is_edge = generator.random(draws.shape) < 0.5
            draws[is_edge] = generator.choice(EDGES, size=int(is_edge.sum()))
    return Rounds(
        tokens=_candidates(generator, rule.proposal, children, target if is_fixed else draft),
        parents=parents,
        children=children,
        level_sizes=level_sizes,
        target=target,
        draft=draft,
        accept=accept,
        final=final,
        bonus=generator.random(batch) < 0.5,
        temperature=np.ones(batch, np.float32),
        draft_temperature=np.ones(batch, np.float32),
    )


def made_by_hand(
    rule: js.Rule,
    tokens: Sequence[int],
    parents: Sequence[int],
    *,
    target: Sequence[Sequence[float]],
    draft: Sequence[Sequence[float]] | None = None,
    accept: Sequence[float] = (),
    batch: int = BATCH,
    vocab: int = VOCAB,
) -> Rounds:
    """Copy one round, all of whose draws are 1/2 where `accept` says nothing, into a whole batch.

    Rows are padded with tokens of probability 0, and with rows of their first.
    """
    sizes = {"max_nodes": NODES, "max_children": CHILDREN, "max_depth": DEPTH}
    if rule.is_path:
        sizes = {"max_nodes": DRAFTED + 1, "max_children": 1, "max_depth": DRAFTED}
    tree = js.make_tree(tokens, parents, distinct_siblings=False, **sizes)
    nodes = tree.max_nodes

    def rows(given: Sequence[Sequence[float]]) -> np.ndarray:
        table = np.zeros((nodes, vocab), np.float32)
        table[:, : len(given[0])] = given[0]
        table[: len(given), : len(given[0])] = given
        return table

    draws = np.full(nodes, 0.5, np.float32)
    draws[1 : 1 + len(accept)] = accept
    one = {
        **{k: np.asarray(v) for k, v in vars(tree).items()},
        "target": rows(target),
        "draft": rows(target if draft is None else draft),
        "accept": draws,
        "final": np.full(2, 0.5, np.float32),
        "bonus": np.asarray(False),
        "temperature": np.float32(1),
        "draft_temperature": np.float32(1),
    }
    return Rounds(**{k: np.repeat(np.asarray(v)[None], batch, axis=0) for k, v in one.items()})


def _uniforms(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (generator.integers(0, 2**24, shape) / 2**24).astype(np.float32)


def _paths(
    generator: np.random.Generator, batch: int, max_depth: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = generator.integers(0, (max_depth or DRAFTED) + 1, batch)[:, None]
    nodes = np.arange(DRAFTED + 1)
    parents = np.where(nodes <= lengths, nodes - 1, -1)
    children = np.where(nodes < lengths, nodes + 1, -1)[..., None]
    return parents.astype(np.int32), children.astype(np.int32), (nodes <= lengths).astype(np.int32)


def _trees(
    generator: np.random.Generator, batch: int, max_depth: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parents = np.full((batch, NODES), -1, np.int32)
    children = np.full((batch, NODES, CHILDREN), -1, np.int32)
    level_sizes = np.zeros((batch, DEPTH + 1), np.int32)
    for b in range(batch):
        depths, widths = [0], [0]
        for node in range(1, int(generator.integers(1, NODES + 1))):
            deepest = max_depth or DEPTH
            free = [m for m in range(node) if depths[m] < deepest and widths[m] < CHILDREN]
            if not free:
                break
            parent = int(generator.choice(free[-3:]))
            parents[b, node] = parent
            children[b, parent, widths[parent]] = node
            widths[parent] += 1
            widths.append(0)
            depths.append(depths[parent] + 1)
        level_sizes[b] = np.bincount(depths, minlength=DEPTH + 1)
    return parents, children, level_sizes


def _candidates(
    generator: np.random.Generator, kind: type[js.Proposal], children: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Draw the candidates below every node, in order, from its row."""
    batch, nodes, vocab = rows.shape
    tokens = np.full((batch, nodes), -1, np.int32)
    for b, parent in np.argwhere(children[:, :, 0] >= 0):
        row = rows[b, parent].astype(np.float64)
        is_left = np.ones(vocab, bool)
        for child in children[b, parent]:
            if child < 0:
                break
            weights = row * is_left
            if weights.sum() == 0:
                weights = is_left.astype(np.float64)
            tokens[b, child] = generator.choice(vocab, p=weights / weights.sum())
            if kind is not js.WithReplacement:
                is_left[tokens[b, child]] = False
    return tokens
