"""Developers' benchmarks of HMT: beside other engines, of its parts, and for long."""
