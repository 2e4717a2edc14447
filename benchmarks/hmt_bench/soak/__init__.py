"""A server under everything at once, for long: whether it leaks, errs, or does not end."""

from hmt_bench.soak.run import Plan, run

__all__ = ["Plan", "run"]
