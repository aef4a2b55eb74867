"""Runs as files: those of this library, and those of experiments run elsewhere.

Two runs are compared only where they are comparable: the same target, prompts and lengths.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import records
from jaxspec.decode.metrics import Metrics, Rate
from jaxspec.experiments.compare import Run
from jaxspec.records import RecordError

EXPERIMENT = "experiment"
"""Kind of record that `save_runs` writes."""


class MismatchError(ValueError):
    """Two experiments are not comparable."""


def save_runs(path: str | Path, runs: Sequence[Run]) -> None:
    """Save runs to a .json or .npz file."""
    records.save(path, EXPERIMENT, [dataclasses.asdict(run) for run in runs])


def load_runs(path: str | Path) -> list[Run]:
    """Read runs back, or import those of an experiment run elsewhere.

    An import is JSON of the form that `save_runs` writes. Of each run `name`, `decoder` with at least
    `target` (the target model's id), `prompt`, `text` and `metrics` must be there; rates are pairs of
    hits and chances.

    Raises:
      RecordError: the file holds no runs, or a run in it is malformed; the message says which.
    """
    content = records.load(path, EXPERIMENT)
    if not isinstance(content, list):
        raise RecordError(f"{path}: an experiment is a list of runs")
    runs = []
    for number, plain in enumerate(content):
        try:
            runs.append(_run_of(plain))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"{path}: run {number}: {error!r}") from error
    return runs


def _run_of(plain: dict[str, Any]) -> Run:
    if "target" not in plain["decoder"]:
        raise RecordError("decoder names no target")
    counts = dict(plain["metrics"])
    for table in ("by_depth", "by_rank"):
        counts[table] = tuple(Rate(**rate) for rate in counts.get(table, ()))
    return Run(
        name=str(plain["name"]),
        decoder=dict(plain["decoder"]),
        prompt=tuple(int(token) for token in plain["prompt"]),
        seed=int(plain.get("seed", 0)),
        text=tuple(int(token) for token in plain["text"]),
        finished=str(plain.get("finished", "budget")),
        metrics=Metrics(**counts),
    )


def assert_comparable(first: Sequence[Run], second: Sequence[Run]) -> None:
    """Refuse to compare experiments that differ in more than the decoder.

    Args:
      first: runs, one for each prompt.
      second: runs for the same prompts in the same order.

    Raises:
      MismatchError: saying which of target model, prompt or continuation length differs, and where.
    """
    if len(first) != len(second):
        raise MismatchError(f"number of runs differs: {len(first)} and {len(second)}")
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        facts = (
            ("target model", a.decoder["target"], b.decoder["target"]),
            ("prompt", list(a.prompt), list(b.prompt)),
            ("continuation length", len(a.text), len(b.text)),
        )
        for fact, here, there in facts:
            if here != there:
                raise MismatchError(f"run {number}: {fact} differs: {here!r} and {there!r}")
