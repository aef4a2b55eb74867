"""What is fast, held against a floor or the plain loop measured in the same run."""

from jaxspec.bench.decoding import Speed, measure_pair, measure_smollm2
from jaxspec.bench.report import main
from jaxspec.bench.verifiers import Measurement, measure

__all__ = ("Measurement", "Speed", "main", "measure", "measure_pair", "measure_smollm2")
