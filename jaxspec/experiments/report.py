"""Runs side by side: a table, plain values for JSON, and a plot."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.decode.metrics import Metrics, Rate
from jaxspec.experiments.compare import Comparison, LawComparison, Run

COUNTS = (
    "rounds",
    "new_tokens",
    "drafted",
    "accepted",
    "target_queries",
    "target_calls",
    "target_batches",
    "draft_queries",
    "draft_calls",
    "draft_batches",
)
"""The counts of `Metrics` that a report gives."""


def run_to_json(run: Run) -> dict[str, Any]:
    """Give a run in plain values; a rate that had no chance is absent."""
    metrics = run.metrics
    rates = {
        "acceptance": metrics.acceptance.value,
        "tokens_per_target_batch": metrics.tokens_per_target_batch,
        "block_efficiency": metrics.block_efficiency,
    }
    return {
        "name": run.name,
        "decoder": run.decoder,
        "seed": run.seed,
        "text": list(run.text),
        "finished": run.finished,
        **{name: getattr(metrics, name) for name in COUNTS},
        **{name: value for name, value in rates.items() if value is not None},
        "by_depth": [_rate_to_json(rate) for rate in metrics.by_depth],
        "by_rank": [_rate_to_json(rate) for rate in metrics.by_rank],
    }


def _rate_to_json(rate: Rate) -> dict[str, Any]:
    counts: dict[str, Any] = {"hits": rate.hits, "chances": rate.chances}
    return counts if rate.value is None else counts | {"rate": rate.value}


def law_to_json(law: LawComparison) -> dict[str, Any]:
    """Give a comparison of laws in plain values."""
    if law.test is None:
        return {"tokens": law.tokens, "tv": law.tv, "target_tv": law.target_tv}
    test = law.test
    return {
        "tokens": law.tokens,
        "g": test.statistic,
        "degrees": test.degrees,
        "p_value": test.p_value,
        "runs": list(test.sizes),
        "detectable_tv": test.detectable,
        "level": test.level,
        "power": test.power,
    }


def law_in_words(law: LawComparison) -> str:
    """Say what a comparison of laws found and what it could have found."""
    if law.test is None:
        return (
            f"exact law of the first {law.tokens} tokens: total variation {law.tv:.1e} between the "
            f"two, at most {law.target_tv:.1e} from the target's"
        )
    test = law.test
    return (
        f"G-test on the first {law.tokens} tokens of {test.sizes[0]} + {test.sizes[1]} runs: "
        f"G = {test.statistic:.1f} on {test.degrees} degrees, p = {test.p_value:.3f}; finds a total "
        f"variation of {test.detectable:.2f} with power {test.power} at level {test.level}"
    )


def table(runs: Sequence[Run]) -> str:
    """Lay runs out in a table, what was really asked apart from hypothetical batches."""
    lines = [
        f"{'':14} {'':>6} {'tokens/':>8} {'accep-':>7} "
        f"{'------ target ------':>23} {'------- draft ------':>23}",
        f"{'':14} {'rounds':>6} {'batch':>8} {'tance':>7} "
        f"{'queries':>8} {'calls':>6} {'batches':>7} {'queries':>8} {'calls':>6} {'batches':>7}",
    ]
    lines += [f"{run.name:14} {_row(run.metrics)}" for run in runs]
    return "\n".join(lines)


def _row(m: Metrics) -> str:
    efficiency = "-" if m.tokens_per_target_batch is None else f"{m.tokens_per_target_batch:.2f}"
    acceptance = "-" if m.acceptance.value is None else f"{m.acceptance.value:.2f}"
    return (
        f"{m.rounds:6} {efficiency:>8} {acceptance:>7} "
        f"{m.target_queries:8} {m.target_calls:6} {m.target_batches:7} "
        f"{m.draft_queries:8} {m.draft_calls:6} {m.draft_batches:7}"
    )


def plot(comparisons: Sequence[Comparison], path: str | Path) -> None:
    """Plot tokens per target batch and acceptance by depth and by sibling rank.

    Args:
      comparisons: of one baseline.
      path: an image file; its suffix decides the format.

    Raises:
      ImportError: matplotlib is not installed; it comes with the extra `plot`.
      ValueError: matplotlib does not know the format.
    """
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'jaxspec-decoding[plot]'") from error
    runs = [comparisons[0].baseline, *(comparison.speculative for comparison in comparisons)]
    sheet = figure.Figure(figsize=(11, 3.6), layout="constrained")
    by_batch, by_depth, by_rank = sheet.subplots(1, 3)
    names = [run.name for run in runs]
    by_batch.barh(names, [run.metrics.tokens_per_target_batch or 0.0 for run in runs], color="C0")
    by_batch.invert_yaxis()
    by_batch.set(title="new tokens per target batch")
    for axis, rates_of, label in (
        (by_depth, lambda m: m.by_depth, "depth"),
        (by_rank, lambda m: m.by_rank, "sibling"),
    ):
        for run in runs[1:]:
            rates = [(n, r.value) for n, r in enumerate(rates_of(run.metrics), 1) if r.chances]
            axis.plot(*zip(*rates, strict=True) if rates else ((), ()), marker="o", label=run.name)
        axis.set(title=f"acceptance by {label}", xlabel=label, ylim=(0, 1))
        axis.xaxis.get_major_locator().set_params(integer=True)
    by_depth.legend(frameon=False)
    sheet.savefig(path, dpi=150)
