"""Runs side by side in a table, and in files: also those of experiments run elsewhere."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec import storage
from jaxspec.experiments.comparison import Run
from jaxspec.storage import Place, RecordError

EXPERIMENT = "experiment"
"""Kind of the files that `save` writes."""

_COSTS = [
    f"{model} {what}" for model in ("target", "draft") for what in ("queries", "calls", "batches")
]


def save(path: str | Path, runs: Sequence[Run]) -> None:
    """Save runs to a .json or .npz file."""
    storage.save(path, EXPERIMENT, [plain(run) for run in runs])


def plain(run: Run) -> dict[str, Any]:
    """Return a run as an object of plain values, without its records."""
    values = dataclasses.asdict(dataclasses.replace(run, records=()))
    del values["records"]
    return values


def load(path: str | Path) -> list[Run]:
    """Load runs, or import those of an experiment run elsewhere.

    An import is JSON of the form that `save` writes. Each run must have `name`, `decoder` with at
    least `target` (the target model's name), `prompt`, `text` and `metrics`. `metrics` holds all
    counts of `Metrics`; `by_depth` and `by_rank` may be absent, rates are objects of hits and
    chances. Compare loaded runs by making a `Comparison`.

    Raises:
      RecordError: the file does not hold runs, or a run is malformed; the message says which run and
        field.
      OSError: the file cannot be read.
    """
    content = storage.load(path, EXPERIMENT)
    if not isinstance(content, list):
        raise RecordError(f"{path}: an experiment is a list of runs")
    return [_run_of(value, Place(f"{path}: run {number}")) for number, value in enumerate(content)]


def _run_of(value: Any, place: Place) -> Run:
    if isinstance(value, dict):
        value = {"request": {}, "finished": "budget", **value, "records": []}
        if isinstance(value.get("metrics"), dict):
            value["metrics"] = {"by_depth": [], "by_rank": [], **value["metrics"]}
    run = storage.read(Run, value, place, extras=True)
    if not isinstance(run.decoder.get("target"), str):
        raise place.field("decoder").error("names no target model")
    for name in ("by_depth", "by_rank"):
        for number, rate in enumerate(getattr(run.metrics, name)):
            if rate.hits > rate.chances:
                at = place.field("metrics").field(name).item(number)
                raise at.error(f"has {rate.hits} hits of {rate.chances} chances")
    if run.metrics.new_tokens != len(run.text):
        raise place.field("metrics").error(
            f"count {run.metrics.new_tokens} new tokens, but the text has {len(run.text)}"
        )
    return run


def cells(run: Run) -> Mapping[str, str]:
    """Return the cells of a run's row in a table by their heads."""
    metrics = run.metrics
    rates = {
        "tokens/batch": metrics.tokens_per_target_batch,
        "acceptance": metrics.acceptance.value,
    }
    return {
        "rounds": str(metrics.rounds),
        **{head: "-" if rate is None else f"{rate:.2f}" for head, rate in rates.items()},
        **{head: str(getattr(metrics, head.replace(" ", "_"))) for head in _COSTS},
    }


def table(runs: Sequence[Run]) -> str:
    """Return a table of runs, actual queries and calls apart from hypothetical batches.

    All lines have one width.
    """
    rows = [cells(run) for run in runs]

    def column(*heads: str, key: str) -> list[str]:
        return _aligned([*heads, *(row[key] for row in rows)], str.rjust)

    parts = [
        _aligned(["", "", *(run.name for run in runs)], str.ljust, least=14),
        column("", "rounds", key="rounds"),
        column("tokens/", "batch", key="tokens/batch"),
        column("accep-", "tance", key="acceptance"),
    ]
    for model in ("target", "draft"):
        heads = [head for head in _COSTS if head.startswith(model)]
        group = [column(head.split()[1], key=head) for head in heads]
        lines = [" ".join(line) for line in zip(*group, strict=True)]
        parts.append([f" {model} ".center(len(lines[0]), "-"), *lines])
    return "\n".join("  ".join(line) for line in zip(*parts, strict=True))


def _aligned(
    column: Sequence[str], align: Callable[[str, int], str], *, least: int = 6
) -> list[str]:
    width = max(least, *map(len, column))
    return [align(cell, width) for cell in column]
