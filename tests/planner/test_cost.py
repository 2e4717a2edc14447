"""The cost model against sums by hand, and against chance."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from models import (
    machine_with,
    outlook,
    random_machine,
    random_model,
    setting,
    small_model,
    with_cpu,
    with_gpu,
)  # fmt: skip

from hmt.base.errors import BudgetError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.machine import Machine
from hmt.contracts.plan import Tier
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.expert_hit_rate import (
    PUBLISHED,
    UNIFORM,
    measured_curve,
    needed_experts,
    usual_curve,
)
from hmt.planner.cost.step_prediction import RunFactors
from hmt.planner.cost.workload import workload_of

NETWORKS = 8 * (20 + 60) + 2 * 30  # units of 256 KiB in a small model, its embedding aside


def test_a_model_in_memory_costs_its_bytes() -> None:
    demand = small_model()
    machine = with_cpu(machine_with(demand), step_overhead_s=0.0, layer_overhead_s=0.0)
    found = outlook(demand).plan(setting(machine, context=16)).plan
    step = CostModel(workload_of(demand, found), machine).decode(1, 0)
    assert step.seconds == pytest.approx(NETWORKS * (1 << 18) / 100e9)
    assert step.nbytes == {"GPU": 0, "CPU": NETWORKS << 18, "link": 0, "disk": 0}
    assert step.limit == "CPU" and found.predicted_token_s == step.seconds
    # Keys and values of the context are read, too, and fixed costs are added.
    more = with_cpu(machine, step_overhead_s=1.0, layer_overhead_s=0.5)
    later = CostModel(workload_of(demand, found), more).decode(2, 1000)
    kv = 2 * 1000 * demand.kv_token_bytes
    assert later.nbytes["CPU"] == pytest.approx((NETWORKS << 18) + kv)
    assert later.seconds == pytest.approx(5 + later.nbytes["CPU"] / 100e9)


def test_overheads_are_paid_by_step_sequence_layer_and_block_from_disk() -> None:
    demand = small_model(24)
    bare = replace(machine_with(demand), disk_read_rate=1e15)
    bare = with_cpu(bare, step_overhead_s=0.0, layer_overhead_s=0.0)
    asked = setting(bare, context=16, host_bytes=demand.weight_bytes // 2 + (64 << 20))
    plan = outlook(demand).plan(asked).plan
    loads = workload_of(demand, plan)
    # Of the embedding only rows are read.
    read = [b for b, home in plan.homes.items() if home is Tier.DISK]
    assert loads.read_blocks == sum(b.kind is not BlockKind.EMBEDDING for b in read) > 0

    def step_s(machine: Machine, users: int = 3) -> float:
        return CostModel(loads, machine).decode(users, 0).seconds

    before = step_s(bare)
    assert step_s(with_cpu(bare, step_overhead_s=1.0)) - before == pytest.approx(1)
    assert step_s(with_cpu(bare, sequence_overhead_s=1.0)) - before == pytest.approx(3)
    assert step_s(with_cpu(bare, layer_overhead_s=1.0)) - before == pytest.approx(24)
    blocks = step_s(replace(bare, disk_block_overhead_s=1.0)) - before
    assert blocks == pytest.approx(loads.read_blocks)
    prompts = [
        CostModel(loads, machine).prompt(64, 0).seconds
        for machine in (bare, with_cpu(bare, layer_overhead_s=9.0, prefill_layer_overhead_s=1.0))
    ]
    assert prompts[1] - prompts[0] == pytest.approx(24)


def test_experts_that_are_missing_cost_their_reads() -> None:
    demand = small_model(4, 8, 2)
    machine = replace(machine_with(demand), disk_read_rate=1e15)
    host = setting(machine, context=16, host_bytes=demand.weight_bytes * 2 // 3)
    loads = workload_of(demand, outlook(demand).plan(host).plan)
    assert all(load.experts and load.experts.home.name == "DISK" for load in loads.layers)
    before = CostModel(loads, machine).decode(1, 0)
    after = CostModel(loads, replace(machine, disk_block_overhead_s=0.25)).decode(1, 0)
    missed = before.nbytes["disk"] / (8 << 18)
    assert after.seconds - before.seconds == pytest.approx(0.25 * missed, rel=0.05)


def test_rows_that_are_looked_up_on_the_drive_are_waited_for() -> None:
    demand = replace(small_model(4, 8, 2), row_bytes=4096)
    machine = replace(machine_with(demand), disk_read_rate=1e15)
    host = setting(machine, context=16, host_bytes=demand.weight_bytes // 2)
    plan = outlook(demand).plan(host).plan
    embedding = BlockId(TRUNK, BlockKind.EMBEDDING)
    costs = {}
    for home in (Tier.DISK, Tier.HOST):
        loads = workload_of(demand, replace(plan, homes={**plan.homes, embedding: home}))
        slow = replace(machine, disk_block_overhead_s=0.25)
        costs[home] = CostModel(loads, slow).decode(1, 0).seconds
    assert costs[Tier.DISK] - costs[Tier.HOST] == pytest.approx(0.25)


def test_factors_of_runs_multiply_what_is_predicted() -> None:
    demand = small_model()
    machine = machine_with(demand)
    loads = workload_of(demand, outlook(demand).plan(setting(machine)).plan)
    plain, slow = CostModel(loads, machine), CostModel(loads, machine, RunFactors(2.0, 3.0))
    assert slow.decode(2, 100).seconds == 2 * plain.decode(2, 100).seconds
    assert slow.prompt(64, 32).seconds == 3 * plain.prompt(64, 32).seconds
    before, after = (costs.predict(1, 512, 64) for costs in (plain, slow))
    assert after.tokens_per_s == before.tokens_per_s / 2
    assert after.ttft_s == pytest.approx(3 * before.ttft_s)


def test_many_tokens_cost_arithmetic() -> None:
    demand = small_model()
    machine = with_cpu(machine_with(demand), step_overhead_s=0.0, layer_overhead_s=0.0)
    planned = outlook(demand).plan(setting(machine))
    prompt = CostModel(workload_of(demand, planned.plan), machine).prompt(512, 0)
    # Each unit of 256 KiB holds twice as many weights; the head computes one row.
    expected = 2 * 512 * 2 * (NETWORKS - 60 << 18) / 1e12 + (60 << 18) / 100e9
    assert prompt.seconds == pytest.approx(expected, rel=0.01)


def test_a_drive_bounds_a_step_that_reads_ahead() -> None:
    demand = small_model(24)
    machine = machine_with(demand)
    planned = outlook(demand).plan(setting(machine, host_bytes=demand.weight_bytes // 3))
    step = planned.prediction.step
    assert step.limit == "disk" and step.nbytes["disk"] > demand.weight_bytes / 2
    assert step.seconds == pytest.approx(step.nbytes["disk"] / 5e9)
    unknown = outlook(demand).plan(setting(replace(machine, disk_read_rate=0.0),
                                           host_bytes=demand.weight_bytes // 3))  # fmt: skip
    assert unknown.prediction.tokens_per_s == 0, "nothing is predicted without the disk's rate"


def test_copying_and_computing_share_memory() -> None:
    demand = small_model(24)
    machine = with_cpu(machine_with(demand, device=0.45), step_overhead_s=0.0)
    planned = outlook(demand).plan(setting(machine, context=16))
    step = CostModel(workload_of(demand, planned.plan), machine).decode(1, 0)
    copied, computed = step.nbytes["link"], step.nbytes["CPU"]
    assert copied and computed
    alone = max(copied / 25e9, computed / 100e9)
    both = max(copied / 22e9, computed / 80e9)
    assert alone < max(step.busy_s["link"], step.busy_s["CPU"]) <= both * (1 + 1e-9)
    assert step.seconds >= max(step.busy_s.values())


@pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (1, 16), (4, 16), (16, 40)])
def test_experts_of_several_tokens_are_their_union(tokens: int, cached: int) -> None:
    chance = random.Random(5)
    found = needed_experts(64, 4, tokens, cached, UNIFORM)
    near = far = 0
    for _ in range(2000):
        union = set().union(*(chance.sample(range(64), 4) for _ in range(tokens)))
        near += sum(expert < cached for expert in union)
        far += sum(expert >= cached for expert in union)
    assert found.cached == pytest.approx(near / 2000, rel=0.05, abs=0.02)
    assert found.absent == pytest.approx(far / 2000, rel=0.05, abs=0.02)


def test_more_cache_never_misses_more() -> None:
    for curve in (PUBLISHED, UNIFORM, usual_curve(8)):
        for tokens in (1, 3, 32):
            for texts in {1, tokens}:
                found = [needed_experts(64, 4, tokens, n, curve, texts) for n in range(65)]
                absent = [each.absent for each in found]
                assert absent == sorted(absent, reverse=True) and absent[-1] == 0
                assert all(0 <= each.cached <= n + 1e-9 for n, each in enumerate(found))
    # No token has two choices in a cache of one, whatever the curve says.
    assert needed_experts(64, 8, 1, 1, PUBLISHED).cached <= 1
    assert measured_curve([0.1, 0.5, 0.9], [0.4, 0.3, 2.0]).hits(0.5) == 0.4


def test_a_plan_is_never_slower_on_a_faster_machine() -> None:
    chance, compared = random.Random(8), 0
    while compared < 60:
        demand = random_model(chance)
        machine = random_machine(chance, demand)
        try:
            planned = outlook(demand).plan(setting(machine, users=chance.choice([1, 4])))
        except BudgetError:
            continue
        compared += 1
        before, loads = planned.prediction, workload_of(demand, planned.plan)
        for machine_there in _faster(machine):
            other = CostModel(loads, machine_there)
            after = other.predict(before.users, before.context, before.prompt_tokens)
            assert after.step.seconds <= before.step.seconds * (1 + 1e-9)
            assert after.ttft_s <= before.ttft_s * (1 + 1e-9)
        fewer = CostModel(loads, machine).predict(1, before.context // 2, 32)
        assert fewer.step.seconds <= before.step.seconds * (1 + 1e-9)


def _faster(machine: Machine) -> Iterator[Machine]:
    """With one rate twice as high."""
    yield with_cpu(machine, read_rate=2 * machine.cpu.read_rate)
    yield replace(machine, disk_read_rate=2 * machine.disk_read_rate)
    for gpu in machine.devices:
        yield with_gpu(machine, read_rate=2 * gpu.compute.read_rate)
        yield with_gpu(machine, link_rate=2 * gpu.link_rate)


def test_a_gpu_computes_the_next_step_while_the_cpu_looks_at_one() -> None:
    demand = small_model()
    bare = with_cpu(machine_with(demand, device=4.0), step_overhead_s=0.0)
    bare = with_gpu(bare, layer_overhead_s=0.0, sync_overhead_s=0.0)
    loads = workload_of(demand, outlook(demand).plan(setting(bare)).plan)
    computing_s = CostModel(loads, bare).decode(2, 0).seconds

    def step_s(share: float) -> float:
        """The CPU's part is so long, of the GPU's."""
        long = share * computing_s
        machine = with_cpu(bare, step_overhead_s=long / 2, sequence_overhead_s=long / 4)
        return CostModel(loads, machine).decode(2, 0).seconds / computing_s

    assert step_s(0.5) == pytest.approx(1) and step_s(3) == pytest.approx(3)
    # Where the CPU computes a part of the layers there is no next step to begin.
    away = workload_of(demand, outlook(demand).plan(setting(bare.with_device_bytes(0))).plan)
    alone, more = (
        CostModel(away, with_cpu(bare, step_overhead_s=n)).decode(2, 0).seconds for n in (0.0, 1.0)
    )
    assert more == pytest.approx(alone + 1)


def test_a_gpus_layers_cost_their_overheads() -> None:
    demand = small_model()
    bare = with_cpu(machine_with(demand, device=4.0), step_overhead_s=0.0)
    bare = with_gpu(bare, layer_overhead_s=0.0, sync_overhead_s=0.0)
    loads = workload_of(demand, outlook(demand).plan(setting(bare)).plan)
    layers = len(loads.layers)
    before = CostModel(loads, bare).decode(2, 0).seconds
    slow = with_gpu(bare, layer_overhead_s=1.0, step_overhead_s=0.5)
    assert CostModel(loads, slow).decode(2, 0).seconds - before == pytest.approx(layers + 0.5)

    def prompt_s(launch_s: float) -> float:
        machine = with_gpu(bare, prefill_layer_overhead_s=launch_s)
        return CostModel(loads, machine).prompt(512, 0).seconds

    # The GPU computes a prefill's kernels while the CPU launches those that follow.
    each_s = prompt_s(1e-15) / layers
    assert prompt_s(each_s / 10) == pytest.approx(layers * each_s)
    assert prompt_s(10 * each_s) == pytest.approx(10 * layers * each_s)


def test_prefill_copies_all_experts_that_are_not_cached() -> None:
    demand = small_model(4, 8, 2)
    bare = machine_with(demand, device=0.8)
    loads = workload_of(demand, outlook(demand).plan(setting(bare)).plan)
    away = [
        load.experts
        for load in loads.layers
        if load.experts and load.many_experts_device is not None
    ]
    for experts in away:
        experts.on_device = experts.count / 2
    copied = sum(experts.count / 2 for experts in away)
    few, many = (CostModel(loads, bare).prompt(tokens, 0).nbytes["link"] for tokens in (256, 2048))
    assert few == many >= copied * away[0].each.nbytes
