"""What is fast, held against a floor measured in the same run."""

from jaxspec.bench.verifiers import Measurement, main, measure

__all__ = ("Measurement", "main", "measure")
