"""The benchmark of the verifiers at tiny sizes: that it runs, and that its references agree."""

import contextlib

import jax
import numpy as np
import pytest

from jaxspec import dense_rows
from jaxspec.bench import verifiers
from jaxspec.bench.plain import plain_rows
from jaxspec.bench.verifiers import measure
from jaxspec.bench.workloads import ALL, SETTINGS, Case, PlainRound, make_workload, rows_read
from jaxspec.verify import RULES

VOCAB, BATCH = 4100, 12  # batched by offsets into one slab; with a tail behind the last tile


@pytest.fixture(autouse=True)
def with_caches(monkeypatch):
    """Use compilation caches, which a measurement does not."""
    monkeypatch.setattr(verifiers, "as_if_first", contextlib.nullcontext)


def case_of(rule: str, setting: str) -> Case:
    return Case(rule, setting, VOCAB, 5, BATCH)


@pytest.mark.parametrize(
    ("rule", "setting"),
    [
        ("token", "probabilities"),
        ("token", ALL),
        ("traversal", "probabilities"),
        ("point_mass", ALL),
    ],
)
def test_the_textbook_loop_decides_as_the_verifier_does(rule, setting):
    work = make_workload(case_of(rule, setting), seed=3)
    verify = verifiers._rule(rule)
    verdict = jax.jit(verify)(work.draws, work.proposal, work.target_rows)
    outcomes = [PlainRound(work, sequence).play() for sequence in range(BATCH)]
    accepted = [each.num_accepted for each in outcomes]
    assert verdict.num_accepted.tolist() == accepted
    assert len(set(accepted)) > 1
    for outcome, path in zip(outcomes, np.asarray(verdict.path), strict=True):
        assert list(outcome.path) == path[path >= 0].tolist()
    # A path's visited rows are those above its stop, and of this whatever a rejection or bonus reads.
    read = rows_read(work)
    stops = [(sequence, each.path[-1]) for sequence, each in enumerate(outcomes)]
    assert set(stops) <= set(read.pairs) | set(read.singles)
    assert not set(read.pairs) & set(read.singles)
    if rule in ("token", "point_mass"):
        visited = {(sequence, node) for sequence, each in enumerate(outcomes) for node in each.path}
        assert set(read.normalized) == visited
        assert len(read.pairs) + len(read.singles) == BATCH


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_plain_law_of_a_row_is_that_of_the_row_source(setting):
    work = make_workload(case_of("point_mass", setting), seed=1)
    given = jax.tree.map(lambda x: x[0], work.target_rows)
    ours = np.asarray(dense_rows(given, 5))
    values = np.asarray(work.values[0])
    settings = work.settings
    if settings is None:
        plain = values / values.sum(axis=-1, keepdims=True)
        in_jax = verifiers._laws(None, work.values[0])
    else:
        plain = plain_rows(values, np, **jax.tree.map(np.asarray, dict(settings)))
        in_jax = verifiers._laws(settings, work.values[0])
    for found in (plain, in_jax):
        np.testing.assert_allclose(found, ours, rtol=2e-5, atol=1e-9)
    is_kept = ours > 0
    filters = {"top_k": 50, "top_p": 30, "min_p": 30, ALL: 30}
    if setting in filters:
        assert is_kept.sum(axis=-1).max() <= filters[setting]
    if setting == "top_p, flat rows":
        assert is_kept.sum(axis=-1).min() > 256  # beyond what is sorted


def test_drafted_tokens_are_those_of_their_kind():
    for name, rule in RULES.items():
        work = make_workload(case_of(name, "logits"), seed=2)
        tokens = np.asarray(work.proposal.tree.tokens)
        assert (tokens[:, 1:] >= 0).all() and (tokens < VOCAB).all(), name
        siblings = tokens[:, 1:4] if not rule.is_path else tokens[:, 1:2]
        if rule.proposal.distinct_siblings:
            assert all(len(set(row)) == len(row) for row in siblings.tolist()), name


@pytest.mark.parametrize("rule", ["token", "traversal"])
def test_a_case_is_measured_in_one_run(rule, monkeypatch):
    """Ratios are of calls that followed each other; the medians are those of the same calls."""
    runs = []

    def interleave(calls, *, repeats, seconds):
        for call in calls.values():
            call()
        times = {name: np.arange(1.0, 6) * (place + 1) for place, name in enumerate(calls)}
        times["verify"] = np.array([2.0, 30, 4, 50, 6])
        runs.append(times)
        return times

    monkeypatch.setattr(verifiers, "interleave", interleave)
    found = measure(case_of(rule, "probabilities"), repeats=5, seconds=1, seed=0)
    with_floor, with_references = runs
    assert set(with_floor) == {"verify", "floor", "floor by tiles"}
    assert set(with_references) == {"verify", "dense", "loop"}
    assert found.calls == 5
    assert found.time.median == 6e6 / BATCH
    assert found.floor.median == 3 * 2e6 / BATCH
    ratios = [2 / 2, 30 / 4, 4 / 6, 50 / 8, 6 / 10]
    assert found.of_floor.median == pytest.approx(np.median(ratios))
    assert found.dense_batch == BATCH
    dense = np.median([2 / 2, 4 / 30, 6 / 4, 8 / 50, 10 / 6])
    assert found.of_dense.median == pytest.approx(dense)
    loop = np.median([3 / 2, 6 / 30, 9 / 4, 12 / 50, 15 / 6])
    assert found.loop_batch == verifiers.MOST_PLAYED
    assert found.of_loop.median == pytest.approx(loop * BATCH / verifiers.MOST_PLAYED)


@pytest.mark.parametrize("setting", ["probabilities", ALL])
def test_temporary_memory_is_a_few_rows_for_a_sequence_and_not_all_rows(setting):
    """O(V) a sequence: the dense reference, which has the laws of all rows, shows the difference."""
    work = make_workload(case_of("token", setting), seed=0)
    args = (work.draws, work.proposal, work.target_rows)
    program = verifiers.compiled(verifiers._rule("token"), *args)
    assert program.temporary_bytes is not None
    row = 4 * VOCAB
    assert program.temporary_bytes <= BATCH * row  # on a CPU it does not grow with B
    _, dense_bytes = verifiers.dense_call(work, BATCH)
    assert dense_bytes >= BATCH * 5 * row
