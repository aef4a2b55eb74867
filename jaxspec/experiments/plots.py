"""Plots of runs: the cost of each drafter, and how often its candidates were accepted."""

import importlib
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.decode import Rate
from jaxspec.experiments.comparison import Comparison, Run
from jaxspec.extras import needs

_Z = 1.959964  # two-sided 95 %
_BASELINE = "0.6"
_MOST_TICKS = 12
_NAME_WIDTH = 16


def assert_plottable(path: str | Path) -> None:
    """Raise ImportError or ValueError, before long work, if `plot` cannot write to a path."""
    canvas = _matplotlib("backend_bases").FigureCanvasBase
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in canvas.get_supported_filetypes():
        formats = ", ".join(sorted(canvas.get_supported_filetypes()))
        raise ValueError(f"{path}: its suffix must be one of {formats}")


def plot(comparisons: Sequence[Comparison], path: str | Path | None = None) -> Any:
    """Plot tokens per target batch, and acceptance by depth and by sibling rank.

    A run has the same colour in all three parts.

    Args:
      comparisons: comparisons with one baseline.
      path: an image file to write, its suffix decides the format; None to write none.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      ImportError: matplotlib is not installed; it is in the extra `plot`.
      ValueError: there is nothing to plot, or matplotlib does not know the format.
      OSError: the file cannot be written.
    """
    if not comparisons:
        raise ValueError("there is nothing to plot: no comparisons")
    if path is not None:
        assert_plottable(path)
    figure = _matplotlib("figure").Figure(figsize=(11, 3.6), layout="constrained")
    runs = [comparison.speculative for comparison in comparisons]
    by_batch, by_depth, by_rank = figure.subplots(1, 3)
    _plot_tokens(by_batch, [comparisons[0].baseline, *runs])
    plot_acceptance(by_depth, runs, "depth")
    plot_acceptance(by_rank, runs, "sibling")
    by_depth.set_ylabel("share accepted, 95 % interval")
    handles, labels = by_depth.get_legend_handles_labels()
    columns = max(1, min(len(labels), 4))
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=columns)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def plot_acceptance(axis: Any, runs: Sequence[Run], by: str) -> None:
    """Plot how often candidates were accepted, with 95 % intervals (Wilson's).

    Args:
      axis: a `matplotlib.axes.Axes`.
      runs: run i has the colour Ci.
      by: "depth" or "sibling".

    Raises:
      ValueError: `by` is something else.
    """
    if by not in ("depth", "sibling"):
        raise ValueError(f'by is {by!r}: must be "depth" or "sibling"')
    furthest = 1
    for number, run in enumerate(runs):
        rates = run.metrics.by_depth if by == "depth" else run.metrics.by_rank
        seen = [(place, rate) for place, rate in enumerate(rates, 1) if rate.chances]
        # Side by side, so that no interval hides another.
        shift = min(0.08, 0.6 / len(runs)) * (number - (len(runs) - 1) / 2)
        shares = [rate.hits / rate.chances for _, rate in seen]
        ends = [_interval(rate) for _, rate in seen]
        axis.errorbar(
            [place + shift for place, _ in seen],
            shares,
            yerr=[
                [abs(share - end[side]) for share, end in zip(shares, ends, strict=True)]
                for side in (0, 1)
            ],
            marker="o",
            capsize=2,
            elinewidth=1,
            color=f"C{number}",
            label=run.name,
        )
        furthest = max([furthest, *(place for place, _ in seen)])
    step = -(-furthest // _MOST_TICKS)
    axis.set(
        title=f"acceptance by {by}",
        xlabel=by,
        xlim=(0.5, furthest + 0.5),
        xticks=range(1, furthest + 1, step),
        ylim=(-0.04, 1.04),  # so that markers at 0 and 1 are not cut
    )


def _plot_tokens(axis: Any, runs: Sequence[Run]) -> None:
    """Plot a labelled bar for each run, the first in grey."""
    values = [run.metrics.tokens_per_target_batch for run in runs]
    colours = [_BASELINE, *(f"C{number}" for number in range(len(runs) - 1))]
    bars = axis.barh(range(len(runs)), [value or 0.0 for value in values], color=colours)
    labels = ["none" if value is None else f"{value:.2f}" for value in values]
    axis.bar_label(bars, labels, padding=3)
    names = [textwrap.fill(run.name, _NAME_WIDTH) for run in runs]
    axis.set_yticks(range(len(runs)), names)
    axis.invert_yaxis()
    longest = max((value or 0.0 for value in values), default=0.0)
    axis.set(title="new tokens per target batch", xlim=(0, 1.2 * longest or 1.0))


def _interval(rate: Rate) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share; it contains the share."""
    n, share = rate.chances, rate.hits / rate.chances
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return min(middle - half, share), max(middle + half, share)


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(needs("a plot", "matplotlib", "plot")) from error
