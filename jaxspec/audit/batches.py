"""Batches of rounds over a real vocabulary, sound and unsound, and the verdicts they must have.

Exact laws are for a few tokens, on sound rows. Here whole batches go through `jit(vmap(verify))`:
rows of many tiles, read in spans where the platform does that, from probabilities and from logits
with settings; and rounds of bad rows, draws, candidates and trees, whose verdict is documented.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audit.choices import Uniforms
from jaxspec.audit.instances import laws_of, processed
from jaxspec.audit.reference import (
    Choices,
    Nodes,
    Now,
    PlainOutcome,
    PlainRule,
    Row,
)
from jaxspec.draws import Draws
from jaxspec.logits import Logits
from jaxspec.proposals import PointMass, WithoutReplacement
from jaxspec.rows import Probabilities
from jaxspec.transfers import moves_data
from jaxspec.trees import Tree, make_tree
from jaxspec.verify import Rule, Status, Verdict

VOCAB = 2 * 32 * 512 + 512 + 100
"""Two spans of 32 tiles, one more tile, and a tail."""

_SOUND = 12
"""Sound rounds in a batch."""

_NEAR = 3e-5
"""A draw this near to where a choice changes may be decided otherwise in float32."""

_CHAIN, _BRANCHES = [-1, 0, 1, 2], [-1, 0, 0, 0, 1, 1, 4]
_TARGET = [[0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]
_DRAFT = [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]


@dataclasses.dataclass
class _Case:
    """One round, and what it must come to; `outcome` is None if its draws are too near to an edge."""

    name: str
    tree: Tree
    target: np.ndarray  # [N, V] as stored
    draft: np.ndarray  # [N, V]
    accept: np.ndarray  # [N]
    final: np.ndarray  # [2]
    bonus: bool
    outcome: PlainOutcome | None
    status: int = 0
    first: int = 0
    settings: tuple[float, int, float] = (1.0, 0, 1.0)


@moves_data
def batch_faults(rule: Rule, plain: PlainRule, *, seed: int = 0) -> tuple[str, ...]:
    """Return which rounds of a rule's batches come to something else than they must, in words."""
    faults = []
    for is_logits in (False, True):
        cases = [_sound(rule, plain, seed + index, is_logits) for index in range(_SOUND)]
        cases += _unsound_logits(rule) if is_logits else _unsound(rule)
        verdicts = _play(rule, cases, is_logits)
        kind = "logits" if is_logits else "probabilities"
        for index, case in enumerate(cases):
            if case.outcome is None:
                continue
            one = jax.tree.map(lambda leaf, index=index: leaf[index], verdicts)
            wanted: dict[str, Any] = {
                "tokens": _padded(case.outcome.tokens, one.tokens.shape[0]),
                "num_tokens": len(case.outcome.tokens),
                "num_accepted": case.outcome.num_accepted,
                "path": _padded(case.outcome.path, one.path.shape[0]),
                "stop_node": case.outcome.path[-1],
                "status": case.status,
            }
            off = [
                f"{name} is {getattr(one, name).tolist()}, must be {right}"
                for name, right in wanted.items()
                if not np.array_equal(getattr(one, name), right)
            ]
            if off:
                faults.append(f"{case.name}, {kind} of {VOCAB} tokens: {'; '.join(off)}")
    return tuple(faults)


def _padded(values: Sequence[int], size: int) -> list[int]:
    return [*values, *[-1] * (size - len(values))]


def _play(rule: Rule, cases: list[_Case], is_logits: bool) -> Verdict:
    """Verify all rounds in one batch; slabs start with a row that is nobody's."""
    nobody = np.full((len(cases), 1, VOCAB), np.nan, np.float32)

    def rows(name: str, move: bool) -> Probabilities | Logits:
        values = np.concatenate([nobody, np.stack([getattr(c, name) for c in cases])], axis=1)
        first = np.array([1 + (case.first if move else 0) for case in cases], np.int32)
        if not is_logits:
            return Probabilities(values=jnp.asarray(values), first=jnp.asarray(first))
        temperature, top_k, top_p = zip(*(case.settings for case in cases), strict=True)
        return Logits(
            values=jnp.asarray(values),
            first=jnp.asarray(first),
            temperature=jnp.asarray(temperature, jnp.float32),
            top_k=jnp.asarray(top_k, jnp.int32),
            top_p=jnp.asarray(top_p, jnp.float32),
        )

    def stacked(name: str) -> jax.Array:
        return jnp.asarray(np.stack([np.asarray(getattr(case, name)) for case in cases]))

    draws = Draws(accept=stacked("accept"), final=stacked("final"))
    trees = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(case.tree for case in cases))
    draft = None if rule.proposal is PointMass else rows("draft", move=False)
    proposal = rule.proposal(tree=trees, draft_rows=draft)
    verdicts = _batch(rule.verify)(draws, proposal, rows("target", move=True), stacked("bonus"))
    return jax.tree.map(np.asarray, verdicts)


@functools.lru_cache(maxsize=16)
def _batch(verify: Callable[..., Verdict]) -> Any:
    return jax.jit(jax.vmap(verify))


def _tree(rule: Rule, parents: list[int], tokens: list[int]) -> Tree:
    full = _CHAIN if rule.is_path else _BRANCHES
    sizes = {"max_nodes": len(full), "max_children": 1 if rule.is_path else 3, "max_depth": 3}
    return make_tree(tokens, parents, distinct_siblings=False, **sizes)


# --- sound rounds


def _sound(rule: Rule, plain: PlainRule, seed: int, is_logits: bool) -> _Case:
    """Draw a round and play it by the plain rule."""
    generator = np.random.default_rng(seed)
    parents = _CHAIN if rule.is_path else _BRANCHES
    logits = generator.normal(0, 3, (len(parents), VOCAB)).astype(np.float32)
    logits[:, generator.integers(VOCAB, size=4)] += 9  # a few likely tokens
    near = (logits + generator.normal(0, 1, logits.shape)).astype(np.float32)
    settings = (1.0, 0, 1.0)
    if is_logits:
        settings = ((0.7, 40, 0.95), (1.5, 300, 1.0), (1.0, 0, 0.8), (1.0, 0, 1.0))[seed % 4]
        target, draft = (processed_rows(each, settings) for each in (logits, near))
    else:
        logits, near = (
            np.asarray(jax.nn.softmax(jnp.asarray(x)), np.float32) for x in (logits, near)
        )
        target, draft = laws_of(logits), laws_of(near)
    tokens = _draw_candidates(rule, parents, draft, target, generator)
    tree, bonus = _tree(rule, parents, tokens), bool(seed % 2)
    accept, final = generator.random(len(parents)), generator.random(2)
    accept, final = accept.astype(np.float32), final.astype(np.float32)
    draws = {f"accept {n}": float(u) for n, u in enumerate(accept)}
    draws |= {"final tile": float(final[0]), "final": float(final[1])}
    children = [[n for n, p in enumerate(parents) if p == node] for node in range(len(parents))]

    def token(now: Now, choices: Choices) -> int:
        return tokens[now.child]

    def rows(node: int) -> tuple[Row, Row]:
        return target[node], draft[node]

    choices = Uniforms(draws.__getitem__)
    outcome = plain.verify(Nodes(children, token, rows, bonus), choices)
    return _Case(
        name=f"sound round {seed}",
        tree=tree,
        target=logits,
        draft=near,
        accept=accept,
        final=final,
        bonus=bonus,
        outcome=outcome if choices.margin > _NEAR else None,
        settings=settings,
    )


def processed_rows(logits: np.ndarray, settings: tuple[float, int, float]) -> np.ndarray:
    """Return the laws of rows of logits at settings, float64."""
    exact = logits.astype(np.float64)
    weights = np.exp(exact - exact.max(axis=1, keepdims=True))
    return np.stack([processed(row, *settings) for row in laws_of(weights)])


def _draw_candidates(
    rule: Rule, parents: list[int], draft: np.ndarray, target: np.ndarray, generator: Any
) -> list[int]:
    """Draw candidates as the kind does; point masses are the target's likeliest."""
    tokens = [-1]
    for node, parent in enumerate(parents[1:], 1):
        before = [tokens[n] for n in range(1, node) if parents[n] == parent]
        row = draft[parent] if rule.proposal is not PointMass else target[parent] ** 2
        if rule.proposal in (WithoutReplacement, PointMass):
            is_gone = np.isin(np.arange(VOCAB), before)
            row = np.where(is_gone, 0, row)
            row = row if row.sum() > 0 else np.where(is_gone, 0.0, 1.0)
        tokens.append(int(generator.choice(VOCAB, p=row / row.sum())))
    return tokens


# --- unsound rounds


def _small(rule: Rule, name: str, tokens: list[int], status: Status, **changes: Any) -> _Case:
    """Make a round of tokens 0 and 2 in a row, both accepted, with three tokens of positive mass.

    `tokens` are those that must be emitted: drafted ones, then token 1, the one that a final draw of
    1/2 takes from the second row.
    """
    parents = _CHAIN if rule.is_path else _BRANCHES
    rows = np.zeros((2, len(parents), VOCAB), np.float32)
    rows[0, :3, :3], rows[1, :3, :3] = _TARGET, _DRAFT
    accept = np.full(len(parents), 0.1, np.float32)
    accepted = tokens[:-1] if tokens[-1:] == [1] else tokens
    case = _Case(
        name=name,
        tree=_tree(rule, [-1, 0, 1], [-1, 0, 2]),
        target=rows[0],
        draft=rows[1],
        accept=accept,
        final=np.full(2, 0.5, np.float32),
        bonus=False,
        outcome=PlainOutcome(tuple(range(len(accepted) + 1)), tuple(tokens)),
        status=int(status),
    )
    return dataclasses.replace(case, **changes)


def _unsound(rule: Rule) -> list[_Case]:
    """List rounds of probabilities with something wrong in each."""
    one = functools.partial(_small, rule)
    outside = _tree(rule, [-1, 0, 1], [-1, 0, VOCAB + 7])
    torn = _tree(rule, [-1, 0, 1], [-1, 0, 2])
    torn = dataclasses.replace(torn, children=torn.children.at[0, 0].set(2))
    alone = _tree(rule, [-1, 0], [-1, 0])
    cases = [
        one("nothing wrong", [0, 2], Status(0)),
        one("a NaN at a candidate", [0], Status.NON_FINITE_ROW),
        one("a negative entry at a candidate", [0], Status.NON_FINITE_ROW),
        one("a bonus row without mass", [0, 2], Status.MASSLESS_ROW, bonus=True),
        one("a candidate outside the vocabulary", [0, 1], Status.BAD_CANDIDATE, tree=outside),
        one("an accept draw of 1", [] if rule.tests_deepest_first else [0], Status.BAD_DRAW),
        one("a final draw of NaN", [0, 2], Status.BAD_DRAW, bonus=True),
        one("a final draw below 0 for the tile", [0, 2], Status.BAD_DRAW, bonus=True),
        one("a target row of mass 2", [], Status.NOT_NORMALIZED, tree=alone, bonus=True),
        one("a child whose parent is another", [], Status.BAD_TREE, tree=torn),
        one("rows outside the slab", [], Status.OUTSIDE_SLAB, first=100),
    ]
    cases[1].target[1, 2], cases[2].target[1, 2] = np.nan, -0.1
    cases[3].target[2] = 0
    cases[5].accept[2] = 1
    cases[6].final[1], cases[7].final[0] = np.nan, -0.1
    cases[8].target[:] *= 2
    cases[8].accept[:] = cases[9].accept[:] = 0.9
    if rule.proposal is not PointMass:
        cases += [
            one("a candidate of draft probability 0", [0, 1], Status.OUTSIDE_SUPPORT),
            one("a NaN in a draft row", [0, 1], Status.NON_FINITE_ROW),
            one("a residual emptied by rounding", [1], Status.EMPTY_RESIDUAL, tree=alone),
        ]
        cases[-3].draft[1, :3] = [0.25, 0.75, 0]
        cases[-2].draft[1, 2] = np.nan
        # No target entry is above the draft's; a draw of the last step rejects the one below.
        cases[-1].target[0, :3], cases[-1].draft[0, :3] = [0.5 - 2.0**-22, 0.5, 0], [0.5, 0.5, 0]
        cases[-1].accept[:] = cases[-1].final[:] = 1 - 2.0**-24
    return cases


def _unsound_logits(rule: Rule) -> list[_Case]:
    """List rounds of logits with something wrong in each."""
    one = functools.partial(_small, rule)
    cases = [
        one("nothing wrong", [0, 2], Status(0)),
        one("a temperature of NaN", [], Status.NON_FINITE_ROW, settings=(np.nan, 0, 1.0)),
        one("a top_p of 0", [], Status.NON_FINITE_ROW, settings=(1.0, 0, 0.0)),
        one("a logit of +inf", [], Status.NON_FINITE_ROW),
        one("a second row of -inf", [0], Status.MASSLESS_ROW),
    ]
    for case in cases:
        with np.errstate(divide="ignore"):
            case.target[:], case.draft[:] = np.log(case.target), np.log(case.draft)
    cases[3].target[0, 7] = np.inf
    cases[4].target[1] = -np.inf
    return cases
