"""What the verifiers are timed with: rows, drafts, sampler settings, and the rows they must read."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audit.reference import PLAIN_RULES, Nodes, Now, PlainOutcome, Row
from jaxspec.bench.plain import plain_rows
from jaxspec.draws import Draws, round_draws
from jaxspec.logits import Logits
from jaxspec.proposals import PointMass, Proposal, WithoutReplacement
from jaxspec.rows import Probabilities, RowSource
from jaxspec.slabs import AdjustedLogits, token_bits
from jaxspec.trees import Tree, make_tree
from jaxspec.verify import RULES, Rule

CHILDREN = 3
"""Siblings in the trees: node n > 0 is a child of node (n - 1) // 3."""

Settings = Mapping[str, Any]

ALONE: dict[str, Settings] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "bias": {"bias": 100},
    "allowed": {"allowed": 0.5},
}
"""Sampler settings that are timed alone and together: fields of `Logits`; `bias`, how many tokens have
one; `allowed`, the share of the tokens that the mask allows."""

ALL = "all settings"

SETTINGS: dict[str, Settings | None] = {
    "probabilities": None,
    "logits": {},
    **ALONE,
    # So flat that the nucleus has tens of thousands of tokens: it is found bit by bit.
    "top_p, flat rows": {"temperature": 4.0, "top_p": 0.9},
    ALL: {name: value for each in ALONE.values() for name, value in each.items()},
}
"""What is timed, by name; None for rows of probabilities."""


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """What is timed.

    Attributes:
      rule: its name in `RULES`.
      setting: its name in `SETTINGS`.
      vocab: V.
      nodes: N, with the root: T + 1 of a path.
      batch: B.
    """

    rule: str
    setting: str
    vocab: int
    nodes: int
    batch: int

    @property
    def drafted(self) -> int | None:
        """T of a path, None for a tree."""
        return self.nodes - 1 if RULES[self.rule].is_path else None

    @property
    def size(self) -> str:
        """T or N, with its letter."""
        return f"N {self.nodes}" if self.drafted is None else f"T {self.drafted}"

    def __str__(self) -> str:
        """Name the case on one line."""
        return f"{self.rule}, {self.setting}, V {self.vocab}, {self.size}, B {self.batch}"


@dataclasses.dataclass(frozen=True)
class Workload:
    """The arguments of `vmap(verify)`, and the same rows for whoever reads them otherwise.

    Attributes:
      case: what is timed.
      draws: leading B.
      proposal: leading B.
      values: float32 [B, N, V], the target rows as stored: probabilities or logits.
      settings: of the sampler, None for probabilities; `bias` float32 [V], `allowed` bool [V].
    """

    case: Case
    draws: Draws
    proposal: Proposal
    values: jax.Array
    settings: Settings | None

    @property
    def rule(self) -> Rule:
        """The rule."""
        return RULES[self.case.rule]

    @property
    def target_rows(self) -> RowSource:
        """The target rows as a verifier takes them, with a leading B."""
        if self.settings is None:
            return Probabilities(values=self.values)
        batch, nodes, _ = self.values.shape
        given = {"temperature": 1.0, **self.settings}
        adjust: dict[str, Any] = {}
        if (bias := given.pop("bias", None)) is not None:
            adjust["bias"] = jnp.broadcast_to(bias, (batch, 1, *bias.shape))
        if (allowed := given.pop("allowed", None)) is not None:
            words = token_bits(allowed)
            adjust["allowed"] = jnp.broadcast_to(words, (batch, nodes, *words.shape))
        values = AdjustedLogits(values=self.values, **adjust) if adjust else self.values
        dtypes = {name: jnp.int32 if name == "top_k" else jnp.float32 for name in given}
        arrays: dict[str, Any] = {
            name: jnp.full(batch, value, dtypes[name]) for name, value in given.items()
        }
        return Logits(values=values, **arrays)

    @functools.cached_property
    def children(self) -> list[list[int]]:
        """The children of each node; all sequences share the topology."""
        tree = self.proposal.tree
        return [row[row >= 0].tolist() for row in np.asarray(tree.children[0])]


def make_workload(case: Case, *, seed: int) -> Workload:
    """Draw rows and drafts.

    Logits are normal with a spread of 5, so that some tens of tokens hold most of the mass; draft
    logits differ from them by normal noise. Draft rows are stored as probabilities.
    """
    rule = RULES[case.rule]
    parents = [-1] + [node if rule.is_path else node // CHILDREN for node in range(case.nodes - 1)]
    inner = 1 + max(parents)  # nodes with children
    logits, draft = _rows(case.batch, case.nodes, case.vocab, max(inner, 1), seed)
    generator = np.random.default_rng(seed)
    setting = SETTINGS[case.setting]
    settings = None if setting is None else _settings(setting, case.vocab, generator)
    values = logits if settings is not None else jax.nn.softmax(logits, axis=-1)
    tokens = np.full((case.batch, case.nodes), -1, np.int32)
    laws = np.asarray(draft)
    for sequence in range(case.batch):
        for node in range(inner):
            below = [child for child, parent in enumerate(parents) if parent == node]
            drawn = _candidates(rule, laws[sequence, node], len(below), generator)
            tokens[sequence, below] = drawn
    shape = make_tree(np.arange(-1, case.nodes - 1), parents)
    tree = jax.tree.map(lambda x: jnp.broadcast_to(x, (case.batch, *x.shape)), shape)
    tree = dataclasses.replace(tree, tokens=jnp.asarray(tokens))
    assert isinstance(tree, Tree)
    if inner < case.nodes - 1:  # rows of leaves are not read, but have a place
        draft = jnp.pad(draft, ((0, 0), (0, case.nodes - 1 - inner), (0, 0)))
    rows = None if rule.proposal is PointMass else draft
    keys = jax.random.split(jax.random.key(seed), case.batch)
    draws = jax.jit(jax.vmap(lambda key: round_draws(key, case.nodes).verify))(keys)
    proposal = rule.proposal(tree=tree, draft_rows=rows)
    return Workload(case, draws, proposal, values, settings)


def _settings(setting: Settings, vocab: int, generator: np.random.Generator) -> Settings:
    settings = dict(setting)
    if "bias" in settings:
        bias = np.zeros(vocab, np.float32)
        bias[generator.integers(0, vocab, settings["bias"])] = 1.0
        settings["bias"] = jnp.asarray(bias)
    if "allowed" in settings:
        settings["allowed"] = jnp.asarray(generator.random(vocab) < settings["allowed"])
    return settings


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _rows(batch: int, nodes: int, vocab: int, inner: int, seed: int) -> tuple[jax.Array, jax.Array]:
    key, noise = jax.random.split(jax.random.key(seed))
    logits = 5 * jax.random.normal(key, (batch, nodes, vocab))
    near = logits[:, :inner] + jax.random.normal(noise, (batch, inner, vocab))
    return logits, jax.nn.softmax(near, axis=-1)


def _candidates(rule: Rule, law: Row, count: int, generator: np.random.Generator) -> np.ndarray:
    """Draw the children of a node as their kind says."""
    if rule.proposal is PointMass:
        return np.argsort(-law, kind="stable")[:count]
    if rule.proposal is WithoutReplacement:
        noisy = np.log(np.maximum(law, 1e-38)) + generator.gumbel(size=len(law))
        return np.argsort(-noisy, kind="stable")[:count]
    running = np.cumsum(law, dtype=np.float64)
    return np.searchsorted(running, generator.random(count) * running[-1], side="right")


@dataclasses.dataclass
class RowsRead:
    """The rows that a round must read.

    Attributes:
      normalized: (sequence, node) of target rows whose normalizer is needed: of visited nodes.
      pairs: of nodes at which a candidate was rejected, where what is left of the rows is summed.
      singles: of nodes from whose whole target row a token is drawn.
    """

    normalized: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    pairs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    singles: list[tuple[int, int]] = dataclasses.field(default_factory=list)


class PlainRound:
    """One round by the textbook loop in NumPy, a row at a time as it is visited."""

    def __init__(self, work: Workload, sequence: int) -> None:
        """Take one sequence of a workload."""
        self.work, self.sequence = work, sequence
        self.tokens = np.asarray(work.proposal.tree.tokens[sequence])
        self.u = np.asarray(work.draws.accept[sequence])
        self.final = float(work.draws.final[sequence, 1])
        self.target = np.asarray(work.values)[sequence]
        settings = work.settings
        self.settings = None if settings is None else jax.tree.map(np.asarray, dict(settings))
        sampled = work.rule.proposal is not PointMass
        self.draft = np.asarray(work.proposal.draft_rows)[sequence] if sampled else None
        self.rows: dict[int, tuple[Row, Row]] = {}
        self.rejected: set[int] = set()

    def play(self) -> PlainOutcome:
        """Verify the round, with a bonus token."""
        self.rows, self.rejected = {}, set()
        plain = PLAIN_RULES[self.work.case.rule]
        rule = dataclasses.replace(plain, left=lambda now: self._left(plain.left, now))
        nodes = Nodes(
            self.work.children, lambda now, _: int(self.tokens[now.child]), self.row, True
        )
        return rule.verify(nodes, self)

    def row(self, node: int) -> tuple[Row, Row]:
        """Return (target law, draft law) of a node."""
        if node not in self.rows:
            p = self.target[node]
            p = p / p.sum() if self.settings is None else plain_rows(p, np, **self.settings)
            # Without a draft row, as a leaf's, the rules read none.
            q = p if self.draft is None or node >= len(self.draft) else self.draft[node]
            self.rows[node] = (p, q)
        return self.rows[node]

    def flip(self, slot: str, chance: float) -> bool:
        """Return whether the draw of a slot, "accept n", is below `chance`."""
        return bool(self.u[int(slot.split()[1])] < chance)

    def pick(self, slot: str, row: Row) -> int:
        """Draw the last token by inverse CDF."""
        del slot
        running = np.cumsum(row)
        return int(np.searchsorted(running, self.final * running[-1], side="right"))

    def _left(self, left: Callable[[Now], Row], now: Now) -> Row:
        self.rejected.add(now.node)
        return left(now)


def rows_read(work: Workload) -> RowsRead:
    """Return which rows a verifier must read, by playing the rounds plainly."""
    read = RowsRead()
    for sequence in range(work.case.batch):
        plain = PlainRound(work, sequence)
        stop = plain.play().path[-1]
        read.normalized += [(sequence, node) for node in plain.rows]
        # What a rejected point mass leaves is known without reading a row.
        summed = plain.rejected if work.rule.proposal.is_measured else plain.rejected & {stop}
        read.pairs += [(sequence, node) for node in sorted(summed)]
        if stop not in plain.rejected:
            read.singles.append((sequence, stop))
    return read
