"""The plan of a loaded model: solved for its budgets, searched for a goal, or as a profile says."""

from dataclasses import replace

from hmt.base.errors import BudgetError
from hmt.base.units import format_bytes
from hmt.contracts.machine import Machine
from hmt.contracts.plan import Plan, Tier
from hmt.engine.config import EngineConfig
from hmt.memory import physical_host_bytes
from hmt.planner import Demand, PlanOptions, solve
from hmt.planner.what_if.objectives import plan_for_objective
from hmt.planner.what_if.profiles import plan_profile, settled
from hmt.planner.what_if.scenario import Scenario, ScenarioPlanner


def planned(demand: Demand, options: PlanOptions, machine: Machine, config: EngineConfig) -> Plan:
    """The plan of `options`, or the best for a goal.  Raises BudgetError."""
    if config.goal is None and config.profile is None:
        return solve(demand, options, machine)
    return _searched(demand, options, machine, config)


def check_physical(plan: Plan) -> None:
    """Refuse a plan that this machine cannot hold; a budget that is not used up may be larger."""
    needed, most = sum(plan.reserved.values()), physical_host_bytes()
    if needed > most:
        raise BudgetError(
            f"with {format_bytes(plan.budgets[Tier.HOST])} of host memory the plan takes "
            f"{format_bytes(needed)}, and this process can have {format_bytes(most)} at most; "
            "lower --host-memory"
        )


def _searched(demand: Demand, options: PlanOptions, machine: Machine, config: EngineConfig) -> Plan:
    """The best plan that is found for `config.goal`, or the one that `config.profile` asks for.

    What `options` say stays as they say.  Raises BudgetError as `solve` does.
    """
    users = config.max_batch
    setting = Scenario(
        # Budgets are the user's: what is physically there is looked at for the plan that is found.
        replace(
            machine.with_device_bytes(max(machine.device_bytes, options.device_bytes)),
            ram_bytes=max(machine.ram_bytes, options.host_bytes),
        ),
        users=users,
        context=None if options.context is None else -(-options.context // users),
        max_prefill_tokens=options.max_prefill_tokens,
        prefetch_distance=options.prefetch_distance,
        host_bytes=options.host_bytes,
        device_bytes=options.device_bytes,
        kv=options.kv,
    )
    planner = ScenarioPlanner(lambda scheme, count: replace(demand, batch=count))
    if config.profile is not None:
        return plan_profile(planner, setting, settled(config.profile, setting)).plan
    assert config.goal is not None
    return plan_for_objective(planner, setting, config.goal).plan
