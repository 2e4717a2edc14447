"""Where everything lives, decided before a byte is loaded: footprint, solver, explanation."""

from hmt.planner.cost.demand import Demand, KVTierSizes
from hmt.planner.placement.encoder import encoder_remark
from hmt.planner.placement.footprint import activation_bytes, scored_rows
from hmt.planner.placement.kv_tiers import KVBudgets
from hmt.planner.placement.solver import PlanOptions, smallest_budget, solve
from hmt.planner.what_if.explain import explain
from hmt.planner.what_if.objectives import GOALS
from hmt.planner.what_if.profiles import Profile, read_profile
