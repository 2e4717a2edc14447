"""Prompt tokens per step: the plan's choice, where a device computes."""

import random

import pytest
from models import machine_with, outlook, random_machine, random_model, setting, small_model

from hmt.contracts.plan import Tier
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.workload import workload_of
from hmt.planner.placement.footprint import default_chunk


@pytest.mark.parametrize("device", [0.7, 2.0], ids=["copied", "resident"])
def test_devices_take_larger_steps(device: float) -> None:
    demand = small_model(8, experts=16, chosen=2)
    machine = machine_with(demand, device=device)
    found = outlook(demand).plan(setting(machine, context=16384)).plan
    assert default_chunk(demand) < found.max_prefill_tokens
    resident = all(found.homes[block] is Tier.DEVICE for block in found.device.computes_prompts)
    assert resident == (device > 1)
    assert found.max_prefill_tokens <= (2048 if resident else 8192)
    asked = outlook(demand).plan(setting(machine, context=16384, max_prefill_tokens=64)).plan
    assert asked.max_prefill_tokens == 64


@pytest.mark.parametrize("seed", range(20))
def test_larger_steps_fit_and_slow_no_token_down(seed: int) -> None:
    chance = random.Random(seed)
    demand = random_model(chance)
    machine, context = random_machine(chance, demand), chance.choice([256, 2048, 16384])
    usual = outlook(demand).fits(
        setting(machine, context=context, max_prefill_tokens=default_chunk(demand))
    )
    found = outlook(demand).fits(setting(machine, context=context))
    assert (found is None) == (usual is None)
    if found is None or usual is None:
        return
    if not found.plan.device.stages:
        assert found.plan == usual.plan, "logits of a CPU may not depend on the budget"
        return
    assert found.plan.max_prefill_tokens <= max(context, default_chunk(demand))
    assert found.plan.device.stages == usual.plan.device.stages
    for tier, budget in found.plan.budgets.items():
        reserved = found.plan.device.reserved if tier is Tier.DEVICE else found.plan.reserved
        assert sum(reserved.values()) <= budget
    took = [
        CostModel(workload_of(demand, one.plan), machine).decode(1, 0) for one in (found, usual)
    ]
    assert took[0].seconds <= 1.031 * took[1].seconds
