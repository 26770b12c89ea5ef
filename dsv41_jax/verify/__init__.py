"""A checkpoint directory against the vectors it carries, within the tolerances of each tier."""

from dsv41_jax.verify.cases import CASES, recorded_cases, run_cases
from dsv41_jax.verify.measure import Measure
from dsv41_jax.verify.vectors import Directory, VectorError

__all__ = ["CASES", "Directory", "Measure", "VectorError", "recorded_cases", "run_cases"]
