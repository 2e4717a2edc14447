"""The cost model against sums by hand, and against chance."""

import random
from dataclasses import replace

import pytest
from hmt.planner.overlap import Overlap
from hmt.planner.products import Times
from models import machine_with, outlook, random_machine, random_model, setting, small_model

from hmt.base.errors import BudgetError
from hmt.base.units import KIB
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.machine import Machine
from hmt.contracts.model import KVKind
from hmt.contracts.plan import Tier
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of
from hmt.planner.routing import PUBLISHED, UNIFORM, measured_curve, needed_experts, usual_curve

NETWORKS = 8 * (20 + 60) + 2 * 30  # units of 256 KiB in a small model, its embedding aside


def test_a_model_in_memory_costs_its_bytes() -> None:
    demand = small_model()
    machine = replace(machine_with(demand), step_s=0.0, layer_s=0.0)
    found = outlook(demand).plan(setting(machine, context=16)).plan
    step = CostModel(loads_of(demand, found), machine).decode(1, 0)
    assert step.seconds == pytest.approx(NETWORKS * (1 << 18) / 100e9)
    assert step.nbytes == {"GPU": 0, "CPU": NETWORKS << 18, "link": 0, "disk": 0}
    assert step.limit == "CPU" and found.predicted_token_s == step.seconds
    # Keys and values of the context are read, too, and fixed costs are added.
    more = replace(machine, step_s=1.0, layer_s=0.5)
    later = CostModel(loads_of(demand, found), more).decode(2, 1000)
    kv = 2 * 1000 * demand.kv_token_bytes
    assert later.nbytes["CPU"] == pytest.approx((NETWORKS << 18) + kv)
    assert later.seconds == pytest.approx(5 + later.nbytes["CPU"] / 100e9)


def test_layers_that_are_computed_one_by_one_cost_more() -> None:
    demand = small_model(4, 8, 2, 1)
    machine = replace(machine_with(demand), apart_layer_s=0.25, apart_experts_s=0.5)
    plan = outlook(demand).plan(setting(machine, context=16)).plan
    apart = replace(demand, spec=replace(demand.spec, together=False))
    together_s, apart_s = (
        CostModel(loads_of(each, plan), machine).decode(1, 0).seconds for each in (demand, apart)
    )
    # The first of the four layers is dense.
    assert apart_s - together_s == pytest.approx(4 * 0.25 + 3 * 0.5)
    free = replace(machine, apart_layer_s=0.0)  # too little to measure: experts cost theirs still
    free_s = CostModel(loads_of(apart, plan), free).decode(1, 0).seconds
    assert free_s - together_s == pytest.approx(3 * 0.5)
    latent = tuple(replace(kv, kind=KVKind.LATENT) for kv in demand.spec.kv)
    apart = replace(apart, spec=replace(apart.spec, kv=latent))
    slow = replace(machine, apart_latent_s=2.0)
    model = CostModel(loads_of(apart, plan), slow)
    assert model.decode(1, 0).seconds == pytest.approx(apart_s + 8)
    each = CostModel(loads_of(apart, plan), replace(slow, apart_latent_row_s=0.5))
    assert each.decode(1, 0).seconds == pytest.approx(apart_s + 8)
    assert each.decode(3, 0).seconds - model.decode(3, 0).seconds == pytest.approx(4 * 2 * 0.5)
    # Blocks that come from the drive keep them apart, too.
    streamed = small_model(24)
    less = replace(machine_with(streamed), ram_bytes=streamed.weight_bytes // 2 + (64 << 20))
    tight = replace(less, disk_read_rate=1e15, apart_layer_s=0.25)
    found = outlook(streamed).plan(setting(tight, context=16)).plan
    assert CostModel(loads_of(streamed, found), tight).decode(1, 0).seconds > 24 * 0.25


def test_blocks_that_are_read_cost_calls_and_by_themselves_a_wait() -> None:
    streamed = small_model(24)
    machine = replace(machine_with(streamed), disk_read_rate=1e15)
    less = replace(machine, ram_bytes=streamed.weight_bytes // 2 + (64 << 20))
    found = outlook(streamed).plan(setting(less, context=16)).plan
    loads = loads_of(streamed, found)
    # Of the embedding only rows are read.
    read = [b for b, home in found.homes.items() if home is Tier.DISK]
    assert loads.read_blocks == sum(b.kind is not BlockKind.EMBEDDING for b in read) > 0

    def seconds(hidden: float, **costs: float) -> float:
        model = CostModel(replace(loads, overlap=Overlap(hidden)), replace(less, **costs))
        return model.decode(1, 0).seconds

    for hidden in (0.0, 0.75):
        bare = seconds(hidden)
        assert seconds(hidden, read_block_s=1.0) - bare == pytest.approx(loads.read_blocks)
        waited_s = (1 - hidden) * loads.read_blocks
        assert seconds(hidden, read_alone_s=1.0) - bare == pytest.approx(waited_s)


def test_calls_take_longer_where_caches_keep_nothing() -> None:
    demand = small_model()
    machine = replace(machine_with(demand), step_s=1.0, row_s=0.5, layer_s=0.0)
    found = outlook(demand).plan(setting(machine, context=16)).plan
    loads, nbytes = loads_of(demand, found), NETWORKS << 18
    warm = CostModel(loads, machine).decode(2, 0)
    for times in (1.0, 3.0):
        # Half of what is added, since the step reads as much as the mean of both, by logarithms.
        calls = {f"{nbytes // 4 // KIB}KiB": 1.0, f"{nbytes * 4 // KIB}KiB": times}
        cold = CostModel(loads, replace(machine, cold_calls=calls)).decode(2, 0)
        longer_s = (times - 1) / 2  # not what is done for users
        assert cold.seconds - warm.seconds == pytest.approx(longer_s, rel=1e-3)
    # What fits is read faster, and never slower than what does not.
    rates = {"1MiB": 400e9, "1GiB": 200e9}
    fast = CostModel(loads, replace(machine, cached_rates=rates)).decode(2, 0)
    assert nbytes / 400e9 < fast.seconds - 2 < nbytes / 100e9


def test_layers_that_come_from_memory_take_as_long_as_they_did_in_a_step() -> None:
    demand = small_model()
    layers = demand.spec.layers
    machine = replace(machine_with(demand), step_s=0.0, layer_s=1.0)
    found = outlook(demand).plan(setting(machine, context=16)).plan
    loads = loads_of(demand, found)

    def decode(machine: Machine, users: int = 1) -> float:
        return CostModel(loads, machine).decode(users, 0).seconds

    products_s = decode(replace(machine, layer_s=0.0))
    assert decode(machine) == pytest.approx(products_s + layers)
    measured = replace(machine, cpu_in_layers={"bf16": 0.75, "bf16@8": 1.0})
    assert decode(measured) == pytest.approx(0.75 * products_s), "and the layers' own with it"
    assert decode(measured, 8) == pytest.approx(decode(replace(machine, layer_s=0.0), 8))
    # What caches hold is as before; and prompts are arithmetic.
    cached = replace(measured, cached_rates={"1GiB": 400e9})
    fast_s = decode(replace(cached, layer_s=0.0, cpu_in_layers={}))
    assert decode(cached) == pytest.approx(fast_s + layers)
    prompts = [CostModel(loads, each).prompt(64, 0).seconds for each in (machine, measured)]
    assert prompts[0] == prompts[1]


def test_experts_in_slots_and_missing_ones_cost_calls() -> None:
    demand = small_model(4, 8, 2)
    machine = replace(machine_with(demand), disk_read_rate=1e15, apart_experts_s=0.5)
    host = setting(machine, context=16, host_bytes=demand.weight_bytes * 2 // 3)
    plan = outlook(demand).plan(host).plan
    loads = loads_of(demand, plan)
    assert all(load.experts and load.experts.home.name == "DISK" for load in loads.layers)
    before = CostModel(loads, machine).decode(1, 0)
    held = CostModel(loads, replace(machine, held_experts_s=0.25)).decode(1, 0)
    assert held.seconds - before.seconds == pytest.approx(4 * 0.25), "not those that stay"
    missed = CostModel(loads, replace(machine, missed_expert_s=0.25)).decode(1, 0)
    dense = before.nbytes["disk"] - 0.0
    each = 8 << 18
    assert missed.seconds - before.seconds == pytest.approx(0.25 * dense / each, rel=0.05)


def test_rows_that_are_looked_up_on_the_drive_are_waited_for() -> None:
    demand = replace(small_model(4, 8, 2), row_bytes=4096)
    machine = replace(machine_with(demand), disk_read_rate=1e15)
    host = setting(machine, context=16, host_bytes=demand.weight_bytes // 2)
    plan = outlook(demand).plan(host).plan
    embedding = BlockId(TRUNK, BlockKind.EMBEDDING)
    taken = {}
    for home in (Tier.DISK, Tier.HOST):
        loads = loads_of(demand, replace(plan, homes={**plan.homes, embedding: home}))
        before, after = (
            CostModel(loads, replace(machine, lookup_s=lookup_s)).decode(1, 0)
            for lookup_s in (0.0, 0.25)
        )
        taken[home] = after.seconds - before.seconds
    assert taken == {Tier.DISK: pytest.approx(0.25), Tier.HOST: 0.0}


def test_many_tokens_cost_arithmetic() -> None:
    demand = small_model()
    machine = replace(machine_with(demand), step_s=0.0, layer_s=0.0)
    planned = outlook(demand).plan(setting(machine))
    prompt = CostModel(loads_of(demand, planned.plan), machine).prompt(512, 0)
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
    assert unknown.prediction.tokens_per_s == 0, "nothing is predicted without the drive's rate"


def test_copying_and_computing_share_memory() -> None:
    demand = small_model(24)
    machine = replace(machine_with(demand, device=0.45), step_s=0.0)
    planned = outlook(demand).plan(setting(machine, context=16))
    step = CostModel(loads_of(demand, planned.plan), machine).decode(1, 0)
    copied, computed = step.nbytes["link"], step.nbytes["CPU"]
    assert copied and computed
    alone = max(copied / 25e9, computed / 100e9)
    both = max(copied / 22e9, computed / 80e9)
    assert alone < max(step.busy_s["link"], step.busy_s["CPU"]) <= both
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
    faster = ("ram_read_rate", "disk_read_rate", "device_read_rate", "link_rate")
    while compared < 60:
        demand = random_model(chance)
        machine = random_machine(chance, demand)
        try:
            planned = outlook(demand).plan(setting(machine, users=chance.choice([1, 4])))
        except BudgetError:
            continue
        compared += 1
        before, loads = planned.prediction, loads_of(demand, planned.plan)
        for name in faster:
            other = CostModel(loads, replace(machine, **{name: 2 * getattr(machine, name)}))
            after = other.predict(before.users, before.context, before.prompt_tokens)
            assert after.step.seconds <= before.step.seconds * (1 + 1e-9), name
            assert after.ttft_s <= before.ttft_s * (1 + 1e-9), name
        fewer = CostModel(loads, machine).predict(1, before.context // 2, 32)
        assert fewer.step.seconds <= before.step.seconds * (1 + 1e-9)


def test_a_gpu_computes_the_next_step_while_the_cpu_looks_at_one() -> None:
    demand = small_model()
    bare = replace(
        machine_with(demand, device=4.0), step_s=0.0, launch_s=0.0, sync_s=0.0, draw_s=1e-9
    )
    loads = loads_of(demand, outlook(demand).plan(setting(bare)).plan)
    computing_s = CostModel(loads, bare).decode(2, 0).seconds

    def step_s(share: float, *, drawn: bool = False, **more: float) -> float:
        """The CPU's chain is so long, of the GPU's."""
        long = share * computing_s
        machine = replace(bare, step_s=long / 2, row_s=long / 4, draw_s=long, **more)
        return CostModel(loads, machine, drawn=drawn).decode(2, 0).seconds / computing_s

    assert step_s(0.5) == pytest.approx(1) and step_s(3) == pytest.approx(3)
    # What is drawn the next step has to wait for.
    each = computing_s / 2 / demand.spec.vocab_size
    assert step_s(3, drawn=True) == pytest.approx(1 + 3)
    assert step_s(3, drawn=True, draw_row_s=1.0) == pytest.approx(1 + 3 + 2 / computing_s)
    assert step_s(3, drawn=True, logit_s=each) == pytest.approx(1 + 3 + 1)
    # Where the CPU computes a part of the layers there is no next step to begin.
    away = loads_of(demand, outlook(demand).plan(setting(replace(bare, device_bytes=0))).plan)
    alone, more = (CostModel(away, replace(bare, step_s=n)).decode(2, 0).seconds for n in (0, 1))
    assert more == pytest.approx(alone)  # draw_s stands for it there


def test_layers_on_a_gpu_cost_what_was_probed_of_their_kind() -> None:
    demand = small_model(4, 8, 2)
    bare = replace(machine_with(demand, device=4.0), step_s=0.0, launch_s=0.0)
    loads = loads_of(demand, outlook(demand).plan(setting(bare)).plan)
    assert all(load.attends_on_device for load in loads.layers)
    before = {users: CostModel(loads, bare).decode(users, 0).seconds for users in (1, 3, 16)}
    times = {"w4a8": 50.0, "w4a8 experts": 1.0, "w4a8 experts@5": 3.0, "w4a8 experts@9": 4.0}
    costs = CostModel(loads, replace(bare, device_layers=times))
    experts = sum(load.experts is not None for load in loads.layers)
    rest = len(loads.layers) - experts
    for users, each in ((1, 1.0), (3, 2.0), (16, 5.75)):
        more = costs.decode(users, 0).seconds - before[users]
        assert more == pytest.approx(experts * each + rest * 50)
    # An encoding that was not measured is like the nearest: of activations in 8 bits, or not.
    known = Times({"w8a8": 3.0, "w4a16": 2.0, "bf16": 1.0})
    assert [known.seconds(name, 4) for name in ("w4a8", "nvfp4", "bf16")] == [3.0, 2.0, 1.0]
    assert Times({}).seconds("bf16", 1) == 0.0


def test_a_gpu_computes_while_prompts_are_launched() -> None:
    demand = small_model()
    bare = replace(
        machine_with(demand, device=4.0), step_s=0.0, sync_s=0.0, device_layers={"bf16": 0.0}
    )
    loads = loads_of(demand, outlook(demand).plan(setting(bare)).plan)

    def prompt_s(launch_s: float, *, last: bool = False) -> float:
        machine = replace(bare, device_launches={"bf16": launch_s}, prompt_s=1.0)
        return CostModel(loads, machine).prompt(512, 0, last=last).seconds

    computing_s = prompt_s(0.0)
    each_s = computing_s / len(loads.layers)
    assert prompt_s(each_s / 10) == pytest.approx(computing_s)
    assert prompt_s(10 * each_s) == pytest.approx(10 * computing_s)
    assert prompt_s(0.0, last=True) == pytest.approx(1 + computing_s, rel=0.01)
    machine = replace(bare, device_launches={"bf16": 0.0}, prompt_s=1.0, piece_s=2.0)
    piece = CostModel(loads, machine).prompt(512, 0, last=False)
    assert piece.seconds == pytest.approx(2 + computing_s, rel=0.01)


def test_prompts_bring_all_experts_that_are_not_cached() -> None:
    demand = small_model(4, 8, 2)
    bare = replace(machine_with(demand, device=0.8), step_s=0.0, device_launches={"bf16": 0.0})
    loads = loads_of(demand, outlook(demand).plan(setting(bare)).plan)
    away = [load.experts for load in loads.layers if load.experts and load.many_experts_on_device]
    for experts in away:
        experts.on_device = experts.count / 2
    before = CostModel(loads, bare).prompt(512, 0)
    brought = sum(experts.count / 2 for experts in away)
    few, many = (CostModel(loads, bare).prompt(tokens, 0).nbytes["link"] for tokens in (256, 2048))
    assert few == many == before.nbytes["link"] >= brought * away[0].each.nbytes
    after = CostModel(loads, replace(bare, bring_s=1.0)).prompt(512, 0)
    assert after.seconds == pytest.approx(brought, rel=0.01)
