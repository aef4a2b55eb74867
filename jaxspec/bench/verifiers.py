"""How long verification takes against the least that must be read.

Everything is timed side by side in one process, one call of each in turn, and compared pair by pair,
so that a machine whose speed drifts does not matter. What is timed is what a user would write,
`jit(vmap(verify))`.

The floor of a verifier is the faster of two jitted reductions over the rows it must read, laid out
contiguously: `sum(max(p - q, 0))` as written, and the same by blocks. From logits it is the sum of
exponentials over the rows visited, besides.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.draws import round_draws
from jaxspec.logits import Logits
from jaxspec.proposals import PointMass, sampled_path
from jaxspec.tiles import TILE
from jaxspec.trees import make_tree
from jaxspec.verify import verify_path, verify_tree

Call = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One verifier at one batch size.

    Attributes:
      name: what was timed.
      batch: B.
      microseconds: median time of a call, divided by B.
      floor_microseconds: likewise for its floor.
      ratio: median over pairs of calls of time / floor.
    """

    name: str
    batch: int
    microseconds: float
    floor_microseconds: float
    ratio: float


def measure(vocab: int, drafted: int, batch: int, *, repeats: int, seed: int) -> list[Measurement]:
    """Time the verifiers at one batch size.

    Args:
      vocab: V.
      drafted: T, tokens of a path; the point-mass tree has three children at each of its T levels,
        all but the first of them leaves.
      batch: B.
      repeats: calls of each, in turn.
      seed: of rows and draws.
    """
    generator = np.random.default_rng(seed)

    def rows(count: int) -> jax.Array:
        values = generator.random((batch, count, vocab), dtype=np.float32)
        return jnp.asarray(values / values.sum(axis=-1, keepdims=True))

    target, draft = rows(drafted + 1), rows(drafted)
    tokens = jnp.asarray(generator.integers(0, vocab, (batch, drafted)), jnp.int32)
    keys = jax.random.split(jax.random.key(seed), batch)
    draws = jax.vmap(lambda key: round_draws(key, drafted + 1).verify)(keys)
    path = jax.vmap(sampled_path)(tokens, draft)

    # A caterpillar of candidates: the rows of its leaves are never read.
    parents = [-1] + [0 if level == 0 else 3 * level - 2 for level in range(drafted) for _ in "abc"]
    candidates = generator.choice(vocab, len(parents), replace=False)
    tree = make_tree(candidates, parents)
    trees = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), PointMass(tree=tree))
    tree_rows = rows(len(parents))
    tree_draws = jax.vmap(lambda key: round_draws(key, len(parents)).verify)(keys)

    scores = Logits(values=jnp.log(target), temperature=jnp.ones(batch))
    verified = jax.jit(jax.vmap(verify_path))(draws, path, target)
    visited = np.minimum(np.asarray(verified.num_accepted) + 1, drafted)
    visited_rows = jnp.concatenate(
        [values[:count] for values, count in zip(scores.values, visited, strict=True)]
    )
    p, q = jnp.copy(target[:, 0]), jnp.copy(draft[:, 0])
    floors: dict[str, Sequence[Call]] = {
        "two rows": ((_naive, (p, q)), (_blocked, (p, q))),
        "one row": ((_naive_one, (p,)), (_blocked_one, (p,))),
        "exp-sum of visited rows and two rows": ((_exponentials, (visited_rows, p, q)),),
    }
    timed: dict[str, tuple[str, Call]] = {
        "path, probabilities": (
            "two rows",
            (jax.jit(jax.vmap(verify_path)), (draws, path, target)),
        ),
        "point-mass tree, probabilities": (
            "one row",
            (jax.jit(jax.vmap(verify_tree)), (tree_draws, trees, tree_rows)),
        ),
        "path, target as logits": (
            "exp-sum of visited rows and two rows",
            (jax.jit(jax.vmap(verify_path)), (draws, path, scores)),
        ),
    }
    calls = [call for group in floors.values() for call in group]
    calls += [call for _, call in timed.values()]
    seconds = iter(_interleave(calls, repeats))
    floor_seconds = {}
    for name, group in floors.items():
        candidates_seconds = [next(seconds) for _ in group]
        floor_seconds[name] = min(candidates_seconds, key=np.median)
    found = []
    for name, (floor_name, _) in timed.items():
        taken, floor = next(seconds), floor_seconds[floor_name]
        found.append(
            Measurement(
                name=name,
                batch=batch,
                microseconds=float(np.median(taken)) / batch * 1e6,
                floor_microseconds=float(np.median(floor)) / batch * 1e6,
                ratio=float(np.median(taken / floor)),
            )
        )
    return found


@jax.jit
def _naive(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.maximum(p - q, 0).sum(axis=-1)


@jax.jit
def _blocked(p: jax.Array, q: jax.Array) -> jax.Array:
    return _by_blocks(jnp.maximum(p - q, 0))


@jax.jit
def _naive_one(p: jax.Array) -> jax.Array:
    return p.sum(axis=-1)


@jax.jit
def _blocked_one(p: jax.Array) -> jax.Array:
    return _by_blocks(p)


@jax.jit
def _exponentials(scores: jax.Array, p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.exp(scores).sum(axis=-1), jnp.maximum(p - q, 0).sum(axis=-1)


def _by_blocks(x: jax.Array) -> jax.Array:
    blocks = x.shape[-1] // TILE
    full = x[:, : blocks * TILE].reshape(-1, blocks, 32, TILE // 32)
    tail = x[:, blocks * TILE :]
    return full.sum(axis=2).sum(axis=2).sum(axis=1) + tail.sum(axis=-1)


def _interleave(calls: Sequence[Call], repeats: int) -> np.ndarray:
    """Time each call in turn, float64 [calls, repeats] in seconds; compilation is not counted."""
    for function, args in calls:
        jax.block_until_ready(function(*args))
    seconds = np.zeros((len(calls), repeats))
    for repeat in range(repeats):
        for index, (function, args) in enumerate(calls):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            seconds[index, repeat] = time.perf_counter() - start
    return seconds
