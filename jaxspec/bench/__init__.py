"""What is fast, held against a floor or the plain loop measured in the same run."""

from jaxspec.bench.decoding import (
    FusedRun,
    Request,
    Run,
    Speed,
    Spread,
    measure_pair,
    measure_smollm2,
    time_pairs,
)
from jaxspec.bench.verifiers import Measurement, measure

__all__ = (
    "FusedRun",
    "Measurement",
    "Request",
    "Run",
    "Speed",
    "Spread",
    "measure",
    "measure_pair",
    "measure_smollm2",
    "time_pairs",
)
