"""The plan of a loaded model, where a goal is to be searched for, or a profile says how."""

from dataclasses import replace

from hmt.contracts.machine import Machine
from hmt.contracts.plan import Plan
from hmt.engine.config import EngineConfig
from hmt.planner import Demand, PlanOptions
from hmt.planner.what_if.objectives import plan_for_objective
from hmt.planner.what_if.profiles import plan_profile, settled
from hmt.planner.what_if.scenario import Scenario, ScenarioPlanner


def searched_plan(
    demand: Demand, options: PlanOptions, machine: Machine, config: EngineConfig
) -> Plan:
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
