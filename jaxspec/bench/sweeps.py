"""Which cases are timed, and how their results are kept, printed as Markdown and plotted."""

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.bench.timing import Spread
from jaxspec.bench.verifiers import UNITS, Measurement
from jaxspec.bench.workloads import ALL, SETTINGS, Case
from jaxspec.extras import require
from jaxspec.storage.files import replace_file
from jaxspec.verify import RULES

LARGE = 151936
VOCABS, BATCHES, DRAFTED, NODES = (32000, LARGE), (1, 8, 64), (1, 4, 8), (16, 64)

WIDE: dict[str, list[Any]] = {
    "rules": list(RULES),
    "settings": list(SETTINGS),
    "vocab": list(VOCABS),
    "batch": list(BATCHES),
    "drafted": list(DRAFTED),
    "nodes": list(NODES),
}
"""The arguments of `product` that make every case: hours on two cores."""

NARROW: dict[str, list[Any]] = {
    "rules": list(RULES),
    "settings": ["logits"],
    "vocab": [LARGE],
    "batch": [1],
    "drafted": [4],
    "nodes": [16],
}
"""Those that make a case of each rule."""


def product(
    rules: Sequence[str],
    settings: Sequence[str],
    vocab: Sequence[int],
    batch: Sequence[int],
    drafted: Sequence[int],
    nodes: Sequence[int],
) -> list[Case]:
    """Return all cases of these; paths have T of `drafted`, trees N of `nodes`."""
    return [
        Case(rule, setting, V, size, B)
        for rule, V, B in itertools.product(rules, vocab, batch)
        for size in ([T + 1 for T in drafted] if RULES[rule].is_path else nodes)
        for setting in settings
    ]


def quick() -> list[Case]:
    """Return the cases of a minute or so: every rule on logits, and what settings cost."""
    more = {"rules": ["token"], "settings": ["probabilities", ALL]}
    return product(**NARROW) + product(**(NARROW | more))


_GROWTH_PATHS = [
    ("token", "probabilities"),
    ("token", "logits"),
    ("token", ALL),
    ("block", "logits"),
]
_GROWTH_TREES = [
    ("point_mass", "logits"),
    ("without_replacement", "logits"),
    ("without_replacement", ALL),
    ("traversal", "logits"),
]


def _growth() -> list[tuple[list[tuple[str, str]], list[tuple[int, int, int]]]]:
    """Return (columns, rows) of two tables; a row is (V, N, B)."""
    paths = [(vocab, 5, 1) for vocab in (4096, *VOCABS)] + [(LARGE, 5, B) for B in BATCHES[1:]]
    paths += [(LARGE, T + 1, 1) for T in DRAFTED if T != 4]
    return [(_GROWTH_PATHS, paths), (_GROWTH_TREES, [(LARGE, N, 1) for N in NODES])]


def growth() -> list[Case]:
    """Return the cases of the table of how cost grows with B, T, N and V."""
    return [
        Case(rule, setting, *row)
        for columns, rows in _growth()
        for row in rows
        for rule, setting in columns
    ]


def growth_table(measured: Iterable[Measurement]) -> str:
    """Return the table of `growth` in Markdown."""
    found = {each.case: each for each in measured}
    lines = [
        "Microseconds a sequence, in brackets times the floor of the same run: medians of calls in",
        f"turn. {jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}, "
        f"{time.strftime('%d %B %Y').lstrip('0')}.",
    ]
    for columns, rows in _growth():
        is_path = RULES[columns[0][0]].is_path
        heads = [("V, T, B" if is_path else "V, N, B"), *(", ".join(each) for each in columns)]
        lines += ["", *_markdown(heads), "|---" * len(heads) + "|"]
        for vocab, nodes, batch in rows:
            cells = [f"{vocab}, {nodes - is_path}, {batch}"]
            for rule, setting in columns:
                each = found.get(Case(rule, setting, vocab, nodes, batch))
                cells.append("" if each is None else _cell(each))
            lines += _markdown(cells)
    return "\n".join(lines)


def _cell(measured: Measurement) -> str:
    return f"{measured.time.median:.0f} ({measured.of_floor.median:.1f})"


def _markdown(cells: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(cells) + " |"]


# --- results in a file


def environment(seed: int) -> dict[str, Any]:
    """Return what results must share to be compared."""
    import jaxspec

    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "versions": {
            "jaxspec": jaxspec.__version__,
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
        "seed": seed,
    }


def document(seed: int, measured: Sequence[Measurement], more: dict[str, Any]) -> dict[str, Any]:
    """Return results as one JSON object."""
    records = [dataclasses.asdict(each) | {"drafted": each.case.drafted} for each in measured]
    return {**environment(seed), "units": UNITS, "verifiers": records, **more}


def save(path: str | Path, results: dict[str, Any]) -> None:
    """Replace a file by results."""
    replace_file(path, lambda file: file.write(json.dumps(results, indent=1).encode()))


def load(path: str | Path, seed: int) -> list[Measurement]:
    """Return what a file of earlier results holds; nothing if there is none.

    Raises:
      ValueError: it is not a file of results, or of another device, version or seed.
      OSError: it cannot be read.
    """
    if not Path(path).exists():
        return []
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
        measured = [_measurement(record) for record in results["verifiers"]]
        then = {name: results[name] for name in environment(seed)}
    except (KeyError, TypeError, ValueError) as error:
        wanted = "not results of bench; give --save another name"
        raise ValueError(f"{path}: {wanted} ({type(error).__name__}: {error})") from error
    for name, now in environment(seed).items():
        if then[name] != now:
            raise ValueError(
                f"{path}: was measured with {name} {then[name]}, this run has {now}: "
                "give --save another name"
            )
    return measured


def _measurement(record: dict[str, Any]) -> Measurement:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Measurement):
        value = record[field.name]
        if field.type is Case:
            value = Case(**value)
        elif field.type is Spread:
            value = Spread(**value)
        values[field.name] = value
    return Measurement(**values)


# --- a plot


def plot(measured: Sequence[Measurement], path: str | Path) -> None:
    """Plot times over the floor, of verifiers and references, a part for each V and B.

    Raises:
      ImportError: matplotlib is not installed; it is in the extra `plot`.
      OSError: the file cannot be written.
    """
    parts = sorted({(each.case.vocab, each.case.batch) for each in measured})
    groups = [
        [each for each in measured if (each.case.vocab, each.case.batch) == part] for part in parts
    ]
    height = 1.5 + 0.22 * max(map(len, groups))
    figures = require("a plot", "matplotlib.figure", "plot")
    figure = figures.Figure(figsize=(7 * len(parts), height), layout="constrained")
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    for axis, part, group in zip(axes, parts, groups, strict=True):
        places = range(len(group))
        floor = np.array([each.floor.median for each in group])
        for name, marker in (("loop", "x"), ("dense", "+"), ("time", "o")):
            spreads = [getattr(each, name) for each in group]
            median, low, high = (
                np.array([getattr(each, end) for each in spreads]) / floor
                for end in ("median", "low", "high")
            )
            label = "verifier" if name == "time" else f"{name} reference"
            axis.errorbar(
                median, places, xerr=[median - low, high - median], fmt=marker, label=label
            )
        axis.axvline(1, color="0.6")
        names = [f"{each.rule}, {each.setting}, {each.size}" for each in (m.case for m in group)]
        axis.set_yticks(places, names)
        axis.invert_yaxis()
        axis.set(xscale="log", title=f"V = {part[0]}, B = {part[1]}", xlabel="times the floor")
    labels = axes[0].get_legend_handles_labels()
    figure.legend(*labels, frameon=False, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
