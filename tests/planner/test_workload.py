"""What experts have of slots that dense blocks share: as the engine's own cache does it."""

import random

from models import UNIT, machine_with, outlook, setting, small_model

from hmt.bench.replay import Cache
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.plan import Plan, Tier
from hmt.planner.cost.workload import ExpertWork, workload_of
from hmt.weights.eviction import open_policy

STEPS = 60


def test_slots_are_the_experts_as_far_as_dense_blocks_leave_them() -> None:
    demand = small_model(8, 8, 2, sizes=(20, 20, 20, 30))  # equal sizes: slots are shared
    dense = [b for b in demand.blocks if b.id.kind is not BlockKind.EXPERT]
    dense_bytes, each = sum(block.slot_bytes for block in dense), 20 * UNIT

    def planned(budget: int) -> tuple[Plan, ExpertWork]:
        plan = outlook(demand).plan(setting(machine_with(demand), host_bytes=budget)).plan
        group = workload_of(demand, plan).layers[0].experts
        assert group is not None and group.home is Tier.DISK
        return plan, group

    plan, group = planned(2 * dense_bytes)
    assert 8 * group.in_memory == plan.reserved["slots"] // each, "dense blocks are elsewhere"
    plan, group = planned(dense_bytes * 9 // 10)
    streamed = [b for b in dense if plan.homes[b.id] is Tier.DISK]
    streamed = [b for b in streamed if b.id.kind is not BlockKind.EMBEDDING]
    assert streamed and not plan.slot_counts
    had = 8 * group.in_memory * each  # of all layers
    slots = plan.reserved["slots"]
    assert had == max(0, slots - sum(block.slot_bytes for block in streamed)) < slots / 2
    # The policy of the engine's store, over steps that read dense blocks in a circle.
    order = {b.id: b.slot_bytes for b in [*streamed, *demand.of_kind(BlockKind.EXPERT)]}
    policy = open_policy("heat")
    cache, chance, hits, wanted = Cache(policy, order, slots), random.Random(1), 0, 0
    for step in range(STEPS):
        for layer in range(8):
            known = [block.id for block in streamed if block.id.layer == layer]
            chosen = [BlockId(layer, BlockKind.EXPERT, n) for n in chance.sample(range(8), 2)]
            for block in [*known, *chosen]:
                there = block in cache.blocks
                if block.kind is BlockKind.EXPERT and step > STEPS // 2:
                    hits, wanted = hits + there, wanted + 1
                if not there:
                    cache.admit(block, [block])
                policy.used(block)
    share = group.in_memory / 8
    assert hits / wanted <= share + 0.05, "and not the share that all slots would be"
    assert hits / wanted < slots / (64 * each)
