"""Runs as files: those of this library, and those of experiments run elsewhere."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import records
from jaxspec.decode.metrics import Metrics, Rate
from jaxspec.experiments.compare import Run
from jaxspec.providers import Context
from jaxspec.records import RecordError

EXPERIMENT = "experiment"
"""Kind of record that `save_runs` writes."""


def save_runs(path: str | Path, runs: Sequence[Run]) -> None:
    """Save runs to a .json or .npz file."""
    records.save(path, EXPERIMENT, [dataclasses.asdict(run) for run in runs])


def load_runs(path: str | Path) -> list[Run]:
    """Read runs back, or import those of an experiment run elsewhere.

    An import is JSON of the form that `save_runs` writes. Of each run `name`, `decoder` with at least
    `target` (the target model's id), `prompt`, `text` and `metrics` must be there. `metrics` holds all
    counts of `Metrics`; `by_depth` and `by_rank` may be left out, rates are objects of hits and
    chances. Compare what was read by `assert_comparable`, or in a `Comparison`.

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
        except KeyError as error:
            raise RecordError(f"{path}: run {number}: {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise RecordError(f"{path}: run {number}: {error}") from error
    return runs


def _run_of(plain: Any) -> Run:
    if not isinstance(plain, dict):
        raise RecordError(f"a {type(plain).__name__}, wanted an object")
    decoder = plain["decoder"]
    if not isinstance(decoder, dict) or not isinstance(decoder.get("target"), str):
        raise RecordError("the decoder names no target model")
    run = Run(
        name=_string("name", plain["name"]),
        decoder=dict(decoder),
        prompt=_tokens("prompt", plain["prompt"]),
        seed=_whole("seed", plain.get("seed", 0), least=None),
        text=_tokens("text", plain["text"]),
        finished=_string("finished", plain.get("finished", "budget")),
        metrics=_metrics_of(plain["metrics"]),
    )
    if run.metrics.new_tokens != len(run.text):
        raise RecordError(
            f"its metrics count {run.metrics.new_tokens} new tokens, its text has {len(run.text)}"
        )
    return run


def _metrics_of(plain: Any) -> Metrics:
    if not isinstance(plain, dict):
        raise RecordError(f"metrics: a {type(plain).__name__}, wanted an object")
    tables = {
        name: tuple(
            _rate(f"{name}[{place}]", rate) for place, rate in enumerate(plain.get(name, ()))
        )
        for name in ("by_depth", "by_rank")
    }
    counts = {name: _whole(name, value) for name, value in plain.items() if name not in tables}
    fields: dict[str, Any] = {**counts, **tables}
    strange = set(fields) ^ {field.name for field in dataclasses.fields(Metrics)}
    if strange:
        raise RecordError(f"metrics: {', '.join(sorted(strange))}: missing, or not known here")
    return Metrics(**fields)


def _rate(name: str, plain: Any) -> Rate:
    if not isinstance(plain, dict):
        raise RecordError(f"{name}: a {type(plain).__name__}, wanted an object")
    rate = Rate(hits=_whole(name, plain["hits"]), chances=_whole(name, plain["chances"]))
    if rate.hits > rate.chances:
        raise RecordError(f"{name}: {rate.hits} hits of {rate.chances} chances")
    return rate


def _tokens(name: str, value: Any) -> Context:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        raise RecordError(f"{name}: a {type(value).__name__}, wanted a list of token ids")
    return tuple(_whole(f"{name}[{place}]", token) for place, token in enumerate(value))


def _whole(name: str, value: Any, *, least: int | None = 0) -> int:
    if type(value) is not int or (least is not None and value < least):
        raise RecordError(f"{name} is {value!r}, wanted a whole number")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{name} is {value!r}, wanted a string")
    return value
