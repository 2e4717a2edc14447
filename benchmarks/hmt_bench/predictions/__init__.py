"""Runs, what was predicted of them, and how far that was from what they were."""

from hmt_bench.predictions.cases import Case, cpu_cases, gpu_cases
from hmt_bench.predictions.compare import content_of, error, runs_of, summed_up, table

__all__ = [
    "Case",
    "content_of",
    "cpu_cases",
    "error",
    "gpu_cases",
    "runs_of",
    "summed_up",
    "table",
]
