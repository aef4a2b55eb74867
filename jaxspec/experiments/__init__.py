"""Experiments: decoders of one target, compared in cost and in law."""

from jaxspec.experiments.compare import (
    Comparison,
    LawComparison,
    MismatchError,
    Run,
    assert_comparable,
    compare_adaptive_decoding,
    compare_decoding,
    compare_laws,
    compare_path_decoding,
    compare_tree_decoding,
    run_decoder,
)
from jaxspec.experiments.plots import assert_plottable, draw, plot, plot_acceptance
from jaxspec.experiments.records import load_runs, save_runs
from jaxspec.experiments.report import law_in_words, law_to_json, run_to_json, table

__all__ = (
    "Comparison",
    "LawComparison",
    "MismatchError",
    "Run",
    "assert_comparable",
    "assert_plottable",
    "compare_adaptive_decoding",
    "compare_decoding",
    "compare_laws",
    "compare_path_decoding",
    "compare_tree_decoding",
    "draw",
    "law_in_words",
    "law_to_json",
    "load_runs",
    "plot",
    "plot_acceptance",
    "run_decoder",
    "run_to_json",
    "save_runs",
    "table",
)
