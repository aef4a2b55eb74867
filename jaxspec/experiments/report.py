"""Runs side by side: a table, and plain values for JSON."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.decode import Rate
from jaxspec.experiments.compare import LawComparison, Run

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
        "prompt": list(run.prompt),
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
        "level": test.level,
        "power": test.power,
        **({} if test.detectable is None else {"detectable_tv": test.detectable}),
    }


def law_in_words(law: LawComparison) -> str:
    """Say what a comparison of laws found and what it could have found."""
    if law.test is None:
        return (
            f"exact law of the first {law.tokens} tokens: total variation {law.tv:.1e} between the "
            f"two, at most {law.target_tv:.1e} from the target's"
        )
    test = law.test
    what = f"G-test on the first {law.tokens} tokens of {test.sizes[0]} + {test.sizes[1]} runs"
    if test.degrees == 0:
        return f"{what}: too few runs to tell anything"
    could = (
        "with too few runs to find any difference for certain"
        if test.detectable is None
        else f"finds a total variation of {test.detectable:.2f}"
    )
    return (
        f"{what}: G = {test.statistic:.1f} on {test.degrees} degrees, p = {test.p_value:.3g}; "
        f"{could} (power {test.power}, level {test.level})"
    )


_HEADS = ("queries", "calls", "batches")


def table(runs: Sequence[Run]) -> str:
    """Lay runs out in a table, what was really asked apart from hypothetical batches.

    All lines are of one width.
    """
    names = ["", "", *(run.name for run in runs)]
    columns = [
        ["", "rounds", *(str(run.metrics.rounds) for run in runs)],
        ["tokens/", "batch", *(_shown(run.metrics.tokens_per_target_batch) for run in runs)],
        ["accep-", "tance", *(_shown(run.metrics.acceptance.value) for run in runs)],
    ]
    groups = [
        [[head, *(str(getattr(run.metrics, f"{model}_{head}")) for run in runs)] for head in _HEADS]
        for model in ("target", "draft")
    ]
    parts = [_aligned(names, str.ljust, least=14), *(_aligned(c, str.rjust) for c in columns)]
    for model, group in zip(("target", "draft"), groups, strict=True):
        lines = [
            " ".join(cells) for cells in zip(*(_aligned(c, str.rjust) for c in group), strict=True)
        ]
        parts.append([f" {model} ".center(len(lines[0]), "-"), *lines])
    return "\n".join("  ".join(cells) for cells in zip(*parts, strict=True))


def _aligned(
    cells: Sequence[str], align: Callable[[str, int], str], *, least: int = 6
) -> list[str]:
    width = max(least, *map(len, cells))
    return [align(cell, width) for cell in cells]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
