"""Plans with a part for each device: which one computes what, and what it costs to change."""

from dataclasses import replace

import pytest
from models import machine_with, outlook, setting, small_model

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.plan import DevicePlan, Plan, Tier
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.demand import Demand
from hmt.planner.cost.workload import workload_of

LAYERS = 8


def divided(plan: Plan, devices: list[int]) -> Plan:
    """`plan`, all of it on a device, with each layer on one of `devices`; the head on the last."""
    (share,) = plan.devices
    wanted = [*devices, devices[-1]]

    def of(block: BlockId) -> int:
        return wanted[block.layer]  # the trunk's is -1

    parts = tuple(
        replace(
            share,
            index=index,
            computes=frozenset(b for b in share.computes if of(b) == index),
            computes_prompts=frozenset(b for b in share.computes_prompts if of(b) == index),
            stages=frozenset(stage for stage in share.stages if wanted[stage] == index),
        )
        for index in sorted(set(devices))
    )
    return replace(plan, devices=parts)


@pytest.fixture
def demand() -> Demand:
    return small_model(LAYERS)


@pytest.fixture
def plan(demand: Demand) -> Plan:
    return outlook(demand).plan(setting(machine_with(demand, device=2.0))).plan


def test_a_plan_without_a_device_has_no_part_of_one(demand: Demand) -> None:
    alone = outlook(demand).plan(setting(machine_with(demand))).plan
    assert alone.devices == () and alone.device == DevicePlan() and not alone.stage_devices
    assert {alone.device_of(block) for block in alone.homes} == {None}


def test_each_block_and_stage_has_its_device(plan: Plan) -> None:
    assert [share.index for share in plan.devices] == [0]
    assert plan.stage_devices == dict.fromkeys(range(LAYERS + 1), 0)
    there = {block for block, home in plan.homes.items() if home is Tier.DEVICE}
    assert {block for block in plan.homes if plan.device_of(block) == 0} == there
    two = divided(plan, [0, 0, 0, 0, 1, 1, 1, 1])
    assert two.stage_devices == {stage: int(stage >= 4) for stage in range(LAYERS + 1)}
    assert two.device_of(BlockId(3, BlockKind.FFN)) == 0
    assert two.device_of(BlockId(4, BlockKind.FFN)) == 1


def test_work_names_the_device_that_does_it(demand: Demand, plan: Plan) -> None:
    loads = workload_of(demand, divided(plan, [0, 1] * 4))
    for index, load in enumerate(loads.layers):
        assert load.attention_device == index % 2
        assert {site.device for site, _ in (*load.few, *load.many)} == {index % 2}
    assert {site.device for site, _ in loads.head.few} == {1}


def test_going_from_one_device_to_another_is_handed_over(demand: Demand, plan: Plan) -> None:
    machine = machine_with(demand, device=2.0)
    sync_s = machine.devices[0].sync_overhead_s

    def overhead_s(devices: list[int]) -> float:
        return CostModel(workload_of(demand, divided(plan, devices)), machine).decode(1, 0).seconds

    one = overhead_s([0] * LAYERS)
    assert one == CostModel(workload_of(demand, plan), machine).decode(1, 0).seconds
    assert overhead_s([0] * 4 + [1] * 4) - one == pytest.approx(sync_s)
    assert overhead_s([0, 1] * 4) - one == pytest.approx((LAYERS - 1) * sync_s)
