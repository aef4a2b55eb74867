"""Reports: tables that align, laws in words, plots."""

import dataclasses
import sys

import pytest

from jaxspec import experiments
from jaxspec.audit import g_test
from jaxspec.decode import Metrics, Rate

PLAIN = experiments.Run(
    name="plain",
    decoder={"target": "toy", "drafter": "none"},
    prompt=(0,),
    request={"new_tokens": 6},
    text=(1,) * 6,
    finished="budget",
    metrics=Metrics(6, 6, 0, 0, 6, 6, 6, 0, 0, 0, by_depth=(), by_rank=()),
)
TREE = dataclasses.replace(
    PLAIN,
    name="tree",
    decoder={"target": "toy", "drafter": "fixed tree"},
    metrics=Metrics(
        rounds=3,
        new_tokens=6,
        drafted=10,
        accepted=3,
        target_queries=13,
        target_calls=4,
        target_batches=3,
        draft_queries=7,
        draft_calls=5,
        draft_batches=2,
        by_depth=(Rate(3, 3), Rate(0, 2)),
        by_rank=(Rate(0, 5), Rate(3, 3), Rate(0, 0)),
    ),
)
HUGE = dataclasses.replace(
    TREE,
    name="a tree with a name that is longer than any",
    metrics=dataclasses.replace(TREE.metrics, target_queries=123_456_789_012),
)


@pytest.mark.parametrize("runs", [[], [PLAIN], [PLAIN, TREE], [PLAIN, TREE, HUGE]])
def test_all_lines_of_a_table_have_one_width(runs):
    lines = experiments.table(runs).split("\n")
    assert len(lines) == 2 + len(runs)
    assert len({len(line) for line in lines}) == 1


def test_a_table_separates_queries_and_calls_from_batches():
    _, heads, plain, tree = experiments.table([PLAIN, TREE]).split("\n")
    assert heads.split()[-6:] == ["queries", "calls", "batches"] * 2
    assert plain.split() == ["plain", "6", "1.00", "-", "6", "6", "6", "0", "0", "0"]
    assert tree.split() == ["tree", "3", "2.00", "0.60", "13", "4", "3", "7", "5", "2"]


def test_rates_of_a_run_that_drafted_nothing_are_blank():
    nothing = dataclasses.replace(
        PLAIN, text=(), metrics=Metrics(*[0] * 10, by_depth=(), by_rank=())
    )
    assert experiments.table([nothing]).split("\n")[-1].split()[2:4] == ["-", "-"]


def test_a_sampled_law_states_its_power_and_an_exact_one_its_distances():
    exact = experiments.LawComparison(tokens=3, tv=1e-8, target_tv=2e-8, test=None)
    assert exact.agrees
    assert "total variation 1.0e-08 between" in str(exact)
    test = g_test([60, 40], [40, 60], level=0.01)
    sampled = experiments.LawComparison(tokens=2, tv=None, target_tv=None, test=test)
    assert not sampled.agrees
    assert f"detects a total variation of {test.detectable:.2f}" in str(sampled)
    assert "(power 0.9, level 0.01)" in str(sampled)


@pytest.mark.parametrize(("tv", "target_tv"), [(1e-5, 0.0), (0.0, 1e-5)])
def test_an_exact_law_off_by_more_than_rounding_does_not_agree(tv, target_tv):
    law = experiments.LawComparison(tokens=3, tv=tv, target_tv=target_tv, test=None)
    assert not law.agrees


@pytest.mark.parametrize(
    ("counts", "words"),
    [(([1, 0], [0, 1]), "too few runs to compare"), (([6, 6], [6, 6]), "too few runs to detect")],
)
def test_too_few_runs_claim_no_power(counts, words):
    test = g_test(*counts, power=0.99)
    law = experiments.LawComparison(tokens=2, tv=None, target_tv=None, test=test)
    assert words in str(law)


def test_a_plot_is_a_png_and_holds_runs_without_rates(tmp_path):
    comparisons = [experiments.Comparison(baseline=PLAIN, speculative=run) for run in (TREE, PLAIN)]
    experiments.plot(comparisons, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_has_one_colour_in_all_parts_and_bars_show_their_values():
    matplotlib = pytest.importorskip("matplotlib.colors")
    comparisons = [experiments.Comparison(PLAIN, run) for run in (TREE, PLAIN, HUGE)]
    by_batch, by_depth, by_rank = experiments.plot(comparisons).axes
    bars = [matplotlib.to_hex(bar.get_facecolor()) for bar in by_batch.patches]
    for axis in (by_depth, by_rank):
        lines = [matplotlib.to_hex(drawn.lines[0].get_color()) for drawn in axis.containers]
        assert lines == bars[1:]
    assert len(set(bars)) == len(comparisons) + 1
    assert [text.get_text() for text in by_batch.texts] == ["1.00", "2.00", "1.00", "2.00"]
    assert len(by_batch.get_yticklabels()) == 4  # also where names are the same


@pytest.mark.parametrize("depth", [1, 2, 3, 30])
def test_acceptance_is_drawn_whole_with_intervals_over_integer_ticks(depth):
    pytest.importorskip("matplotlib")
    rates = (Rate(3, 3), Rate(0, 2), *[Rate(1, 2)] * depth)[:depth]
    run = dataclasses.replace(TREE, metrics=dataclasses.replace(TREE.metrics, by_depth=rates))
    _, axis, _ = experiments.plot([experiments.Comparison(PLAIN, run)]).axes
    assert all(tick == int(tick) >= 1 for tick in axis.get_xticks())
    assert len(axis.get_xticks()) <= 12
    ((marks, _, (bars,)),) = axis.containers
    assert len(marks.get_xdata()) == len(bars.get_segments()) == depth
    for (x, low), (_, high) in bars.get_segments():
        share = rates[round(x) - 1].value
        assert low <= share <= high
        assert high - low > 0.3  # wide, as chances are few, also at 0 and 1
        assert axis.get_ylim()[0] < share < axis.get_ylim()[1]


def test_acceptance_by_something_else_is_an_error():
    with pytest.raises(ValueError, match="by is 'rank': must be"):
        experiments.plot_acceptance(None, [TREE], "rank")


def test_what_cannot_be_plotted_is_an_error_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="no comparisons"):
        experiments.plot([], tmp_path / "none.png")
    for name in ("runs.txt", "runs"):
        with pytest.raises(ValueError, match=r"suffix must be one of .*png"):
            experiments.plot([experiments.Comparison(PLAIN, TREE)], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install -e '\.\[plot\]'"):
        experiments.plot([experiments.Comparison(PLAIN, TREE)], tmp_path / "runs.png")
