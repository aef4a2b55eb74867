"""Experiments: drafters compared with plain decoding of the same target, in cost and in law."""

from jaxspec.experiments.comparison import (
    Comparison,
    LawComparison,
    MismatchError,
    Run,
    compare,
    compare_laws,
    compare_tree_decoding,
    run,
)
from jaxspec.experiments.plots import plot, plot_acceptance
from jaxspec.experiments.report import load, save, table

__all__ = (
    "Comparison",
    "LawComparison",
    "MismatchError",
    "Run",
    "compare",
    "compare_laws",
    "compare_tree_decoding",
    "load",
    "plot",
    "plot_acceptance",
    "run",
    "save",
    "table",
)
