"""Where everything lives, decided before a byte is loaded: footprint, solver, explanation."""

from hmt.planner.explain import explain
from hmt.planner.footprint import Demand, activation_bytes, default_chunk, kv_bytes, scored_rows
from hmt.planner.goals import GOALS
from hmt.planner.levels import KVBudgets, KVSizes
from hmt.planner.profiles import Profile, read_profile
from hmt.planner.solver import PlanOptions, smallest_budget, solve

__all__ = [
    "GOALS",
    "Demand",
    "KVBudgets",
    "KVSizes",
    "PlanOptions",
    "Profile",
    "activation_bytes",
    "default_chunk",
    "explain",
    "kv_bytes",
    "read_profile",
    "scored_rows",
    "smallest_budget",
    "solve",
]
