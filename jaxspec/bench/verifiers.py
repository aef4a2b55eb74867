"""Time of the verifiers against a floor: the least that they must read.

Calls are timed side by side in one process, one of each in turn, and compared pair by pair, so that a
drift in the speed of the machine does not matter. What is timed is what a user would write,
`jit(vmap(verify))`.

The floor of a verifier is the faster of two jitted reductions over the rows that it must read, stored
contiguously: `sum(max(p - q, 0))` as written, and the same by tiles. For logits, the sum of
exponentials over the visited rows is added.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
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
      floor_microseconds: the same for its floor.
      ratio: median over pairs of calls of time / floor.
    """

    name: str
    batch: int
    microseconds: float
    floor_microseconds: float
    ratio: float


def measure(vocab: int, drafted: int, batch: int, *, repeats: int, seed: int) -> list[Measurement]:
    """Time the verifiers at one batch size, `repeats` calls of each in turn.

    A path has `drafted` tokens; the point-mass tree has three children at each of as many levels, all
    but the first of them leaves.
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

    logits = Logits(values=jnp.log(target), temperature=jnp.ones(batch))
    verify, verify_trees = jax.jit(jax.vmap(verify_path)), jax.jit(jax.vmap(verify_tree))
    visited = np.minimum(np.asarray(verify(draws, path, target).num_accepted) + 1, drafted)
    visited_rows = jnp.concatenate(
        [values[:count] for values, count in zip(jnp.log(target), visited, strict=True)]
    )
    p, q = jnp.copy(target[:, 0]), jnp.copy(draft[:, 0])
    calls: dict[str, Call] = {
        "two rows": (_naive, (p, q)),
        "two rows by tiles": (_tiled, (p, q)),
        "one row": (jax.jit(lambda p: p.sum(axis=-1)), (p,)),
        "one row by tiles": (jax.jit(_sum_by_tiles), (p,)),
        "exp-sum of visited rows and two rows": (_exponentials, (visited_rows, p, q)),
        "path, probabilities": (verify, (draws, path, target)),
        "point-mass tree, probabilities": (verify_trees, (tree_draws, trees, tree_rows)),
        "path, target as logits": (verify, (draws, path, logits)),
    }
    floors = {
        "path, probabilities": ("two rows", "two rows by tiles"),
        "point-mass tree, probabilities": ("one row", "one row by tiles"),
        "path, target as logits": ("exp-sum of visited rows and two rows",),
    }
    seconds = _interleave(calls, repeats)
    found = []
    for name, alternatives in floors.items():
        taken, floor = seconds[name], min((seconds[each] for each in alternatives), key=np.median)
        micros, floor_micros = (float(np.median(each)) / batch * 1e6 for each in (taken, floor))
        ratio = float(np.median(taken / floor))
        found.append(Measurement(name, batch, micros, floor_micros, ratio))
    return found


@jax.jit
def _naive(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.maximum(p - q, 0).sum(axis=-1)


@jax.jit
def _tiled(p: jax.Array, q: jax.Array) -> jax.Array:
    return _sum_by_tiles(jnp.maximum(p - q, 0))


@jax.jit
def _exponentials(logits: jax.Array, p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.exp(logits).sum(axis=-1), _naive(p, q)


def _sum_by_tiles(x: jax.Array) -> jax.Array:
    tiles = x.shape[-1] // TILE
    full = x[:, : tiles * TILE].reshape(-1, tiles, 32, TILE // 32)
    tail = x[:, tiles * TILE :]
    return full.sum(axis=2).sum(axis=2).sum(axis=1) + tail.sum(axis=-1)


def _interleave(calls: Mapping[str, Call], repeats: int) -> dict[str, np.ndarray]:
    """Time each call in turn, float64 [repeats] in seconds; compilation is not counted."""
    for function, args in calls.values():
        jax.block_until_ready(function(*args))
    seconds = {name: np.zeros(repeats) for name in calls}
    for repeat in range(repeats):
        for name, (function, args) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            seconds[name][repeat] = time.perf_counter() - start
    return seconds
