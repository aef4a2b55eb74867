"""Mutations of the package that the suite must catch: `python tests/mutations.py [NUMBER ...]`.

Each is one change of one line: an operator, an off-by-one, a swapped argument, a dropped check. The
script applies it to a copy of the repository, runs the tests named beside it, and reports a mutation
that no test notices. Thinning the suite must leave every one of them caught. All of them together
take about half an hour on two cores, so that this is not a part of the suite.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """A change of one file and the tests, paths below tests/, that must notice it."""

    file: str
    old: str
    new: str
    tests: str


VERIFY, PROPOSALS = "verify/test_contract.py", "test_proposals.py"
VECTORS, STATUS, SLABS = "test_vectors.py", "verify/test_status.py", "test_slabs.py"

MUTATIONS = (
    # verify
    Mutation(
        "verify/kernel.py",
        "return u * test.top * left.scale < test.weight * test.bottom",
        "return u * test.top * left.scale <= test.weight * test.bottom",
        VECTORS,
    ),
    Mutation(
        "verify/kernel.py",
        "return u * test.top * left.scale < test.weight * test.bottom",
        "return u * test.top < test.weight * test.bottom",
        VECTORS,
    ),
    Mutation(
        "verify/kernel.py",
        "deficit = jnp.maximum(drawn - reader.kind.row(before, p, q, was), 0.0)",
        "deficit = jnp.maximum(drawn - reader.kind.row(after, p, q, is_now), 0.0)",
        VECTORS,
    ),
    Mutation(
        "verify/kernel.py",
        "pool = (jnp.where(is_now, 0.0, q),) if has_siblings else ()",
        "pool = (q,) if has_siblings else ()",
        f"{VECTORS} audit/test_known_bad.py",
    ),
    Mutation(
        "verify/kernel.py",
        "token = jnp.where(is_drawn, draw_from_tiles(pair, sums, piece, reader.vocab), -1)",
        "token = jnp.where(is_wanted, draw_from_tiles(pair, sums, piece, reader.vocab), -1)",
        STATUS,
    ),
    Mutation(
        "verify/reader.py",
        "return self.has_children(node) | self.bonus | (node == ROOT)",
        "return self.has_children(node) | self.bonus",
        "verify/test_degenerate.py",
    ),
    Mutation(
        "verify/reader.py",
        "is_outside = needs_target & (node >= self.target.room)",
        "is_outside = needs_target & (node > self.target.room)",
        "verify/test_checked.py",
    ),
    Mutation(
        "verify/reader.py",
        "return ~self.is_exact & ~(jnp.abs(mass - 1) <= UNIT_MASS)",
        "return self.is_exact & ~(jnp.abs(mass - 1) <= UNIT_MASS)",
        "audit/test_stored_rows.py",
    ),
    Mutation(
        "verify/reader.py",
        "return entries_at(self.slab, index_of(self.source, nodes), jnp.clip(tokens, 0, last))",
        "return entries_at(self.slab, nodes, jnp.clip(tokens, 0, last))",
        VERIFY,
    ),
    Mutation(
        "verify/verdict.py",
        "tokens=jnp.roll(accepted, -1).at[depth].set(token),",
        "tokens=accepted.at[depth].set(token),",
        VECTORS,
    ),
    Mutation(
        "trees.py",
        "(tree.children > nodes) & (tree.children > elder) & (tree.children == inside)",
        "(tree.children > nodes) & (tree.children == inside)",
        STATUS,
    ),
    Mutation(
        "verify/top_down.py",
        "after = replace(after, scale=sums.mass, mass=sums.mass, pool=sums.pool)",
        "after = replace(after, mass=sums.mass, pool=sums.pool)",
        VECTORS,
    ),
    Mutation(
        "verify/top_down.py",
        "left=choose(is_accepted, fresh, choose(is_rejected, after, walk.left)),",
        "left=choose(is_rejected, after, walk.left),",
        VECTORS,
    ),
    Mutation(
        "verify/top_down.py",
        "rank=jnp.where(is_accepted, 0, walk.rank + jnp.where(is_tested, 1, 0)),",
        "rank=walk.rank + jnp.where(is_tested, 1, 0),",
        VECTORS,
    ),
    Mutation(
        "verify/bottom_up.py",
        "target_weight < draft_weight,",
        "target_weight > draft_weight,",
        VECTORS,
    ),
    Mutation(
        "verify/bottom_up.py",
        "after = replace(after, scale=sums.deficit, mass=sums.mass, pool=sums.pool)",
        "after = replace(after, scale=sums.mass, mass=sums.mass, pool=sums.pool)",
        VECTORS,
    ),
    Mutation(
        "verify/bottom_up.py",
        "replace(above, left=after, rank=above.rank + 1)",
        "replace(above, rank=above.rank + 1)",
        VECTORS,
    ),
    Mutation(
        "verify/bottom_up.py",
        "is_kept = is_root | (left.scale == 0) | (u * left.scale < left.mass)",
        "is_kept = is_root | (left.scale == 0) | (u < left.mass)",
        VECTORS,
    ),
    Mutation(
        "slabs/base.py",
        "return flat, jnp.arange(batch, dtype=jnp.int32) * (flat.shape[0] // max(batch, 1))",
        "return flat, jnp.zeros(batch, jnp.int32)",
        VERIFY,
    ),
    Mutation(
        "verify/batching.py",
        "return is_doubtful & ~is_exact, jnp.ones((), bool), verdict",
        "return jnp.zeros((), bool), jnp.ones((), bool), verdict",
        "audit/test_stored_rows.py",
    ),
    # proposals, rows, draws, trees
    Mutation(
        "proposals.py",
        "first=jnp.where(is_first, step, self.first),",
        "first=self.first + step,",
        f"{VECTORS} audit/test_known_bad.py",
    ),
    Mutation(
        "proposals.py",
        "return replace(left, scale=left.scale - w_at, mass=left.mass - w_at).remove(sibling)",
        "return replace(left, scale=left.scale - w_at, mass=left.mass - w_at)",
        VECTORS,
    ),
    Mutation(
        "proposals.py",
        "spread = replace(left, flat=left.flat + step)",
        "spread = left",
        f"{VECTORS} {VERIFY}",
    ),
    Mutation(
        "proposals.py",
        "return is_left & (tokens != token), token",
        "return is_left, token",
        PROPOSALS,
    ),
    Mutation(
        "tiles.py",
        "jnp.where(running > u * running[-1], positions, 2 * size - positions)",
        "jnp.where(running >= u * running[-1], positions, 2 * size - positions)",
        VECTORS,
    ),
    Mutation(
        "tiles.py",
        "return jnp.where(single <= -LEAST, jnp.inf, kept)",
        "return kept",
        STATUS,
    ),
    Mutation(
        "logits.py",
        "place = jnp.sum(jnp.cumsum(head_weights) < wanted, dtype=jnp.int32)",
        "place = jnp.sum(jnp.cumsum(head_weights) <= wanted, dtype=jnp.int32)",
        "test_logits.py",
    ),
    Mutation(
        "logits.py",
        "is_kept &= row >= kth",
        "is_kept &= row > kth",
        "test_logits.py",
    ),
    Mutation("logits.py", "(p > 0) & (p <= 1)", "p <= 1", "test_logits.py"),
    Mutation(
        "draws.py",
        "draft_key, accept_key, final_key = jax.random.split(key, 3)",
        "draft_key, accept_key, final_key = (key,) * 3",
        "test_draws.py",
    ),
    Mutation(
        "draws.py",
        "key = jax.random.fold_in(_counter_key(key), _position_of(position))",
        "key = jax.random.fold_in(_counter_key(key), _position_of(0))",
        "test_draws.py",
    ),
    Mutation(
        "draws.py",
        "exact >= 0) & (exact < 1) & (single < 1)",
        "exact >= 0) & (exact < 1)",
        "test_draws.py",
    ),
    Mutation("trees.py", "is_node = nodes <= length", "is_node = nodes < length", "test_trees.py"),
    Mutation(
        "trees.py",
        "check_all(below_root | (parents == NONE), message, parent=parents)",
        "check_all(below_root | (parents <= 0), message, parent=parents)",
        "verify/test_checked.py",
    ),
    # draft
    Mutation(
        "draft/likely.py",
        "jnp.where(best >= LEAST, best, 0.0)",
        "best + LEAST",
        "draft/test_one_formula.py draft/test_likely.py draft/test_drafters.py",
    ),
    Mutation(
        "draft/cut.py",
        "& ~jnp.any(ancestor_mask(tree) & ~keep[None], axis=1)",
        "& keep",
        "../jaxspec/draft/cut.py",
    ),
    Mutation(
        "draft/policy.py",
        "share - SLACK <= shorten_at",
        "share - SLACK < shorten_at - 1",
        "draft/test_policy.py",
    ),
    Mutation(
        "draft/policy.py",
        "return jnp.where(proposed == 0, depth, moved)",
        "return moved",
        "draft/test_policy.py",
    ),
    Mutation(
        "draft/lookup.py",
        "at[:, None] + 1 + ahead[None] % distance[:, None]",
        "at[:, None] + ahead[None] % distance[:, None]",
        "draft/test_compiled.py draft/test_drafters.py",
    ),
    Mutation(
        "draft/drivers.py",
        "place = (view.root - first)[:, None, None]",
        "place = (view.root * 0 + 1)[:, None, None]",
        "decode/test_compiled.py draft/test_one_formula.py",
    ),
    Mutation(
        "draft/shape.py",
        "elder = (*choice[:-1], choice[-1] - 1)",
        "elder = (*choice[:-1], choice[-1])",
        "draft/test_shape.py",
    ),
    # decode
    Mutation(
        "decode/commit.py",
        "count = jnp.where(has_stop, until, ",
        "count = jnp.where(False, until, ",
        "decode/test_host.py decode/test_compiled.py",
    ),
    Mutation(
        "decode/commit.py",
        "accepted=jnp.minimum(verdict.num_accepted.astype(jnp.int32), count),",
        "accepted=verdict.num_accepted.astype(jnp.int32),",
        "decode/test_metrics.py decode/test_compiled.py",
    ),
    Mutation(
        "decode/commit.py",
        "most = room - 1 if bonus else room",
        "most = room",
        "decode/test_host.py",
    ),
    Mutation(
        "decode/commit.py",
        "min(max_context, UNLIMITED - 1) + 1 - length, 0)",
        "min(max_context, UNLIMITED - 1) + 2 - length, 0)",
        "decode/test_short_contexts.py",
    ),
    Mutation(
        "decode/metrics.py",
        "by_rank[rank].append(is_accepted and rank == tested - 1)",
        "by_rank[rank].append(is_accepted)",
        "decode/test_metrics.py",
    ),
    Mutation(
        "decode/target.py",
        "inner = {ROOT, *np.asarray(tree.parents)[: len(contexts)].tolist()}",
        "inner = {ROOT, *range(len(contexts))}",
        "decode/test_target.py",
    ),
    # models
    Mutation(
        "models/llama.py",
        "keys.append(lax.dynamic_update_slice(old_keys, key, (0, block.first, 0)))",
        "keys.append(lax.dynamic_update_slice(old_keys, key, (0, 0, 0)))",
        "models/test_llama.py",
    ),
    Mutation(
        "models/llama.py",
        "    x = _norm(x, params.norm, config.norm_epsilon)\n",
        "",
        "models/test_llama.py models/load/test_huggingface.py",
    ),
    Mutation(
        "models/ngram.py",
        "(counts + kinds * rows[alive]) / (counts.sum(1, keepdims=True) + kinds)",
        "counts / counts.sum(1, keepdims=True)",
        "models/test_ngram.py",
    ),
    Mutation(
        "models/ngram.py",
        "older = flat[alive, -depth]",
        "older = flat[alive, depth - 1]",
        "models/test_ngram.py",
    ),
    Mutation(
        "models/provider.py",
        "if abs(mass - 1) > MASS_TOLERANCE[dtype]:",
        "if abs(mass - 1) > 1:",
        "models/test_provider.py",
    ),
    Mutation(
        "models/provider.py",
        "            if place != number:",
        "            if False:",
        "models/test_provider.py",
    ),
    Mutation(
        "models/load/tensors.py",
        "for name in sorted(tensors.keys() - wanted.keys()):",
        "for name in ():",
        "models/load/test_huggingface.py",
    ),
    Mutation(
        "models/load/metadata.py",
        "        attention_bias mlp_bias use_bias",
        "        mlp_bias use_bias",
        "models/load/test_huggingface.py",
    ),
    # storage
    Mutation(
        "storage/records.py",
        'if document["kind"] != kind:',
        "if False:",
        "storage/test_records.py decode/test_files.py",
    ),
    Mutation(
        "storage/typed.py",
        "if type(value) is not int or not least <= value <= most:",
        "if type(value) is not int:",
        "decode/test_files.py experiments/test_records.py",
    ),
    Mutation(
        "storage/typed.py",
        "if not extras and name not in hints:",
        "if False:",
        "decode/test_files.py",
    ),
    # audit and experiments
    Mutation(
        "audit/boxes.py",
        "inside = [low, high - 1, *(generator.integers(low, high) for _ in range(replays))]",
        "inside = [low]",
        "audit/test_law.py",
    ),
    Mutation(
        "audit/statistics.py",
        "correction = 1 + float(spread) / (6 * (n + m) * max(degrees, 1))",
        "correction = 1.0",
        "audit/test_statistics.py",
    ),
    Mutation(
        "audit/statistics.py",
        "while 0 < rare < len(expected) and expected[:rare].sum() < _LEAST_EXPECTED:",
        "while False:",
        "audit/test_statistics.py",
    ),
    Mutation(
        "audit/grid.py",
        "is_cell = jnp.arange(chunk, dtype=jnp.int32) < count",
        "is_cell = jnp.arange(chunk, dtype=jnp.int32) <= count",
        "audit/test_grid.py",
    ),
    Mutation(
        "experiments/comparison.py",
        '            ("prompt", list(a.prompt), list(b.prompt)),\n',
        "",
        "experiments/test_compare.py experiments/test_records.py",
    ),
    # settings of tokens
    Mutation(
        "slabs/adjusted.py",
        "logit = jnp.where(logit > 0, logit / by, logit * by)",
        "logit = logit / by",
        SLABS,
    ),
    Mutation(
        "slabs/adjusted.py",
        "count += jnp.where(above[..., depth] == tokens, 1.0, 0.0)",
        "count += 0.0",
        SLABS,
    ),
    Mutation(
        "slabs/adjusted.py",
        "own = jnp.where(own >= 0, own + starts, own)",
        "own = jnp.where(own >= 0, own, own)",
        SLABS,
    ),
    Mutation(
        "slabs/bits.py",
        "first = jnp.clip(start // WORD, 0, words.shape[1] - count)",
        "first = jnp.minimum(start // WORD, words.shape[1] - 1)",
        SLABS,
    ),
    Mutation(
        "slabs/reduced.py",
        "return jnp.where(places >= 0, entries, jnp.asarray(self.missing, entries.dtype))",
        "return entries",
        SLABS,
    ),
    Mutation(
        "layouts/flat.py",
        "is_above = (sequence >= 0)[:, None] & (places < (rows - first[sequence])[:, None])",
        "is_above = (sequence >= 0)[:, None] & (places <= (rows - first[sequence])[:, None])",
        SLABS,
    ),
    Mutation(
        "decode/loop.py",
        "is_new = is_open[:, None] & (places < kept.count[:, None])",
        "is_new = is_open[:, None] & (places <= kept.count[:, None])",
        "decode/test_settings.py",
    ),
    Mutation(
        "draft/drivers.py",
        "return placed, jnp.where(seen, tokens, -1)",
        "return placed, jnp.full_like(jnp.where(seen, tokens, -1), -1)",
        "decode/test_settings.py",
    ),
)


def catches(mutation: Mutation, copy: Path) -> bool:
    """Return whether a test fails on the mutated package."""
    path = copy / "jaxspec" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    tests = [f"tests/{name}" for name in mutation.tests.split()]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    finally:
        path.write_text(text, encoding="utf-8")
    return done.returncode == 1


def main(numbers: list[int]) -> int:
    """Apply the mutations with these numbers, all by default, and report those not caught."""
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/cache")
        for number in numbers or range(len(MUTATIONS)):
            mutation = MUTATIONS[number]
            is_caught = catches(mutation, copy)
            print(f"{number:3} {'caught' if is_caught else 'MISSED'}  {mutation.file}", flush=True)
            missed += [] if is_caught else [number]
    print(f"{len(missed)} missed: {missed}" if missed else "all caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
