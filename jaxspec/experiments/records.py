"""Runs as files: those of this library, and those of experiments run elsewhere."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import storage
from jaxspec.experiments.compare import Run
from jaxspec.storage import Place, RecordError

EXPERIMENT = "experiment"
"""Kind of record that `save_runs` writes."""


def save_runs(path: str | Path, runs: Sequence[Run]) -> None:
    """Save runs to a .json or .npz file."""
    storage.save(path, EXPERIMENT, [dataclasses.asdict(run) for run in runs])


def load_runs(path: str | Path) -> list[Run]:
    """Read runs back, or import those of an experiment run elsewhere.

    An import is JSON of the form that `save_runs` writes. Of each run `name`, `decoder` with at least
    `target` (the target model's id), `prompt`, `text` and `metrics` must be there. `metrics` holds all
    counts of `Metrics`; `by_depth` and `by_rank` may be left out, rates are objects of hits and
    chances. Compare what was read by `assert_comparable`, or in a `Comparison`.

    Raises:
      RecordError: the file holds no runs, or a run in it is malformed; the message says which
        run and field.
      OSError: the file cannot be read.
    """
    content = storage.load(path, EXPERIMENT)
    if not isinstance(content, list):
        raise RecordError(f"{path}: an experiment is a list of runs")
    return [_run_of(plain, Place(f"{path}: run {number}")) for number, plain in enumerate(content)]


def _run_of(plain: Any, place: Place) -> Run:
    if isinstance(plain, dict):
        plain = {"seed": 0, "finished": "budget", **plain}
        if isinstance(plain.get("metrics"), dict):
            plain["metrics"] = {"by_depth": [], "by_rank": [], **plain["metrics"]}
    run = storage.read(Run, plain, place, extras=True)
    if not isinstance(run.decoder.get("target"), str):
        raise place.field("decoder").error("names no target model")
    for name in ("by_depth", "by_rank"):
        for number, rate in enumerate(getattr(run.metrics, name)):
            if rate.hits > rate.chances:
                at = place.field("metrics").field(name).item(number)
                raise at.error(f"has {rate.hits} hits of {rate.chances} chances")
    if run.metrics.new_tokens != len(run.text):
        raise place.field("metrics").error(
            f"count {run.metrics.new_tokens} new tokens, its text has {len(run.text)}"
        )
    return run
