"""Time and memory of the verifiers, next to a floor and two plain references.

What is timed is what a user would write, `jit(vmap(verify))` with a bonus token, on float32 rows.

- The floor is the least that must be read, as jitted reductions over just these rows: for logits
  `logsumexp` of the target rows of visited nodes; then, where a candidate was rejected,
  `sum(max(p - q, 0))` of the target row and the draft row (of the target row alone for point masses),
  and where a whole path was accepted the sum of its last row. The faster of plain XLA and a reduction
  by tiles counts.
- The dense reference computes the law of all rows in JAX (softmax, filters by sorting), then applies
  the rule to these probabilities. It takes as many sequences of the batch as have 2^24 entries.
- The loop reference is the rule as a textbook writes it, in NumPy, one sequence after the other, with
  the law of a row computed when the row is visited. It takes at most four sequences.

Ratios are of calls that followed each other in one run; a reference is timed in turn with the verifier
on the whole batch, and compared by time per sequence.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.plain import plain_rows
from jaxspec.bench.timing import Program, Spread, as_if_first, compiled, interleave
from jaxspec.bench.workloads import (
    Case,
    PlainRound,
    RowsRead,
    Settings,
    Workload,
    make_workload,
    rows_read,
)
from jaxspec.draws import Draws
from jaxspec.proposals import Proposal
from jaxspec.rows import RowsLike, RowSource
from jaxspec.tiles import TILE
from jaxspec.verify import RULES, Verdict

MOST_ENTRIES = 2**24
"""Entries of the rows that the dense reference is given."""

MOST_PLAYED = 4
"""Sequences that the loop reference is given."""

UNITS = {
    "time": "microseconds for each sequence: median and quartiles of calls",
    "floor": "microseconds for each sequence",
    "of_floor": "time / floor, call by call",
    "dense": "microseconds for each sequence, of the dense reference in JAX",
    "of_dense": "dense / time, call by call: how many times as fast as it the verifier is",
    "loop": "microseconds for each sequence, of the textbook loop in NumPy",
    "of_loop": "loop / time, call by call",
    "trace_seconds": "CPU seconds of tracing and lowering",
    "compile_seconds": "CPU seconds of XLA, without any cache",
    "temporary_bytes": "greatest temporary memory of a call, by XLA's analysis; null if unknown",
    "temporary_rows": "temporary_bytes in float32 rows [V]",
    "dense_temporary_bytes": "the same for the dense reference, with the laws of all its rows",
    "dense_batch": "sequences in a call of the dense reference",
    "loop_batch": "sequences in a call of the loop reference",
    "calls": "timed calls of verifier and floor",
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One case, in the units of `UNITS`."""

    case: Case
    calls: int
    time: Spread
    floor: Spread
    of_floor: Spread
    dense: Spread
    of_dense: Spread
    dense_batch: int
    loop: Spread
    of_loop: Spread
    loop_batch: int
    trace_seconds: float
    compile_seconds: float
    temporary_bytes: int | None
    temporary_rows: float | None
    dense_temporary_bytes: int | None


def measure(case: Case, *, repeats: int, seconds: float, seed: int) -> Measurement:
    """Time a case: at most `repeats` calls, for about `seconds` once more than three are done."""
    work = make_workload(case, seed=seed)
    args = (work.draws, work.proposal, work.target_rows)
    with as_if_first():
        verify = compiled(_rule(case.rule), *args)
    calls = {"verify": lambda: verify.run(*args)}
    taken = interleave(
        {**calls, **floor_calls(work, rows_read(work))}, repeats=repeats, seconds=seconds
    )
    floor = min((taken[name] for name in taken if name != "verify"), key=np.median)
    dense_batch = max(1, min(case.batch, MOST_ENTRIES // (case.nodes * case.vocab)))
    dense, dense_bytes = dense_call(work, dense_batch)
    rounds = [PlainRound(work, sequence) for sequence in range(min(case.batch, MOST_PLAYED))]
    references = {"dense": dense, "loop": lambda: [each.play() for each in rounds]}
    beside = interleave({**calls, **references}, repeats=repeats, seconds=seconds)

    def ratio(name: str, batch: int) -> Spread:
        return Spread.of((beside[name] / batch) / (beside["verify"] / case.batch))

    size = verify.temporary_bytes
    return Measurement(
        case=case,
        calls=len(floor),
        time=Spread.of(taken["verify"] * 1e6 / case.batch),
        floor=Spread.of(floor * 1e6 / case.batch),
        of_floor=Spread.of(taken["verify"] / floor),
        dense=Spread.of(beside["dense"] * 1e6 / dense_batch),
        of_dense=ratio("dense", dense_batch),
        dense_batch=dense_batch,
        loop=Spread.of(beside["loop"] * 1e6 / len(rounds)),
        of_loop=ratio("loop", len(rounds)),
        loop_batch=len(rounds),
        trace_seconds=verify.trace_seconds,
        compile_seconds=verify.compile_seconds,
        temporary_bytes=size,
        temporary_rows=None if size is None else size / (4 * case.vocab),
        dense_temporary_bytes=dense_bytes,
    )


def _rule(name: str) -> Callable[[Draws, Proposal, RowsLike], Verdict]:
    return jax.vmap(functools.partial(RULES[name].verify, bonus=True))


def dense_call(work: Workload, batch: int) -> tuple[Callable[[], Any], int | None]:
    """Return a call of the dense reference on the first sequences, and its temporary memory.

    The laws of all rows count as temporary.
    """
    draws, proposal, values = jax.tree.map(
        lambda x: x[:batch], (work.draws, work.proposal, work.values)
    )
    laws = compiled(functools.partial(_laws, work.settings), values)
    rule = _dense_rule(work.case, batch, draws, proposal, laws.run(values))
    sizes = (laws.temporary_bytes, rule.temporary_bytes)
    most = None if None in sizes else max(filter(None, (0, *sizes)), default=0) + values.nbytes
    return lambda: rule.run(draws, proposal, laws.run(values)), most


def _laws(settings: Settings | None, values: jax.Array) -> jax.Array:
    if settings is None:
        return values / jnp.sum(values, axis=-1, keepdims=True)
    return plain_rows(values, jnp, **settings)


_dense_rules: dict[Any, Program] = {}


def _dense_rule(case: Case, batch: int, *args: Any) -> Program:
    """Compile a rule for probabilities, once for all sampler settings."""
    key = (case.rule, case.vocab, case.nodes, batch)
    if key not in _dense_rules:
        _dense_rules.clear()  # cases that share one follow each other
        _dense_rules[key] = compiled(_rule(case.rule), *args)
    return _dense_rules[key]


def floor_calls(work: Workload, read: RowsRead) -> dict[str, Callable[[], Any]]:
    """Return the floor twice: as plain XLA reductions, and by tiles."""
    is_logits = work.settings is not None
    draft = work.proposal.draft_rows

    def rows(slab: Any, places: list[tuple[int, int]]) -> jax.Array:
        where = np.array(places, np.int32).reshape(-1, 2)
        return jnp.asarray(np.asarray(slab)[where[:, 0], where[:, 1]])  # stored contiguously

    assert draft is None or not isinstance(draft, RowSource)
    normalized = rows(work.values, read.normalized if is_logits else [])
    pairs, singles = rows(work.values, read.pairs), rows(work.values, read.singles)
    drafts = jnp.zeros((0, work.case.vocab)) if draft is None else rows(draft, read.pairs)

    def floor(total: Callable[[jax.Array], jax.Array], *given: jax.Array) -> Any:
        normalized, pairs, singles, drafts = given
        p = jnp.exp(pairs) if is_logits else pairs
        last = jnp.exp(singles) if is_logits else singles
        left = total(p) if draft is None else total(jnp.maximum(p - drafts, 0))
        return jax.nn.logsumexp(normalized, axis=-1), left, total(last)

    calls = {"floor": lambda x: x.sum(axis=-1), "floor by tiles": _sum_by_tiles}
    given = (normalized, pairs, singles, drafts)
    programs = {
        name: compiled(functools.partial(floor, total), *given) for name, total in calls.items()
    }
    return {name: functools.partial(program.run, *given) for name, program in programs.items()}


def _sum_by_tiles(x: jax.Array) -> jax.Array:
    tiles = x.shape[-1] // TILE
    full = x[:, : tiles * TILE].reshape(-1, tiles, 32, TILE // 32)
    tail = x[:, tiles * TILE :]
    return full.sum(axis=2).sum(axis=2).sum(axis=1) + tail.sum(axis=-1)
