"""The planner: plans fit, the smallest budget works, more memory never reads more."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hmt.base.errors import BudgetError, ConfigError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSize
from hmt.contracts.machine import ComputeRates, Machine
from hmt.contracts.model import CHUNK_TOKENS, PAGE_TOKENS, ModelSpec
from hmt.contracts.plan import Tier
from hmt.planner import Demand, PlanOptions, activation_bytes, explain, smallest_budget, solve
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.workload import workload_of
from hmt.planner.placement.encoder import image_bytes

MACHINE = Machine("test", 2, 1 << 34, 2e9, ComputeRates(40e9))


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    layers = draw(st.integers(1, 12))
    experts = draw(st.sampled_from([0, 0, 4, 32]))
    size = st.integers(1, 200).map(lambda pages: pages * 4096)
    attention, ffn, expert, table, head = (draw(size) for _ in range(5))
    blocks = [BlockSize(BlockId(TRUNK, BlockKind.EMBEDDING), table, table)]
    for layer in range(layers):
        blocks.append(BlockSize(BlockId(layer, BlockKind.ATTENTION), attention, attention))
        kind = BlockKind.ROUTER if experts else BlockKind.FFN
        blocks.append(BlockSize(BlockId(layer, kind), ffn, ffn))
        for index in range(experts):
            blocks.append(BlockSize(BlockId(layer, BlockKind.EXPERT, index), expert, expert))
    for chunk in range(draw(st.integers(1, 4))):
        blocks.append(BlockSize(BlockId(TRUNK, BlockKind.HEAD, chunk), head, head))
    spec = ModelSpec(
        "Test", layers, 64, 1000, 4096, (), (), draw(st.integers(1, 5000)), 4, min(experts, 4)
    )
    staging = draw(st.sampled_from([0, 4096 * 30]))
    kv = draw(st.integers(1, 3000))
    return Demand(spec, tuple(blocks), staging, 8192, kv, kv // layers, 1 << 16)


def options(host_bytes: int) -> PlanOptions:
    return PlanOptions(host_bytes, context=512)


@settings(deadline=None)
@given(demand=demands(), extra=st.integers(0, 1 << 26), distance=st.sampled_from([None, 0, 1, 5]))
def test_every_plan_fits_its_budget(demand: Demand, extra: int, distance: int | None) -> None:
    budget = smallest_budget(demand, options(0)) + extra
    plan = solve(demand, replace(options(budget), prefetch_distance=distance), MACHINE)
    assert sum(plan.reserved.values()) <= budget
    sizes = {block.id: block.slot_bytes for block in demand.blocks}
    assert sum(sizes[b] for b in plan.blocks_in(Tier.HOST)) == plan.reserved["resident"]
    streamed = [b for b in plan.blocks_in(Tier.DISK) if b.kind is not BlockKind.EMBEDDING]
    experts = [sizes[b] for b in streamed if b.kind is BlockKind.EXPERT]
    dense = [sizes[b] for b in streamed if b.kind is not BlockKind.EXPERT]
    need = max(dense, default=0) + max(experts, default=0)
    assert plan.reserved["slots"] >= need, "a step could never finish"
    assert plan.kv_tokens >= 512 and plan.kv_tokens % PAGE_TOKENS == 0
    assert plan.kv_tokens * demand.kv_token_bytes <= plan.reserved["kv"]
    assert explain(plan, demand, MACHINE)


@settings(deadline=None)
@given(demand=demands())
def test_one_byte_less_than_the_smallest_budget_is_refused_and_says_so(demand: Demand) -> None:
    least = smallest_budget(demand, options(0))
    solve(demand, options(least), MACHINE)
    with pytest.raises(BudgetError, match=f"smallest --host-memory that works is {least} bytes"):
        solve(demand, options(least - 1), MACHINE)


@settings(deadline=None)
@given(
    demand=demands(),
    extra=st.integers(0, 1 << 24) | st.integers(1, 128).map(lambda steps: (steps << 17) - 1),
    more=st.integers(0, 1 << 24) | st.just(1),
)
def test_more_memory_never_keeps_less(demand: Demand, extra: int, more: int) -> None:
    """Not by a byte, but for a second buffer of conversions, which is there or not."""
    least = smallest_budget(demand, options(0))
    small = solve(demand, options(least + extra), MACHINE)
    large = solve(demand, options(least + extra + more), MACHINE)
    kept = [p.reserved["resident"] + p.reserved["slots"] for p in (small, large)]
    assert kept[1] >= kept[0] - (large.reserved["staging"] - small.reserved["staging"])
    assert large.max_prefill_tokens == small.max_prefill_tokens, "the chunk decides kernels' shapes"


@settings(deadline=None)
@given(
    demand=demands(), extra=st.integers(0, 1 << 26), usual=st.integers(1, 1 << 24),
    most=st.integers(1, 1 << 26),
)  # fmt: skip
def test_images_get_room_for_a_usual_one_without_taking_most(
    demand: Demand, extra: int, usual: int, most: int
) -> None:
    """An eighth of what is left, or a quarter where the CPU encodes one that takes it."""
    demand = replace(demand, image_bytes=usual + most, encoding_bytes=(usual, usual + most))
    least = smallest_budget(demand, options(0))
    held = solve(demand, options(least + extra), MACHINE).reserved["images"]
    assert held <= extra // 4
    assert image_bytes(demand, extra, on_host=True) >= min(usual, extra // 4)
    for on_host in (True, False):
        assert image_bytes(demand, extra, on_host=on_host) >= min(usual + most, extra // 8)
    assert image_bytes(demand, extra, on_host=False) <= extra // 8


@given(demand=demands())
def test_everything_is_resident_when_it_fits_and_plans_are_equal_for_equal_input(
    demand: Demand,
) -> None:
    plan = solve(demand, options(1 << 30), MACHINE)
    assert not plan.blocks_in(Tier.DISK) and plan.disk_bytes_per_token == 0
    assert plan == solve(demand, options(1 << 30), MACHINE)


def test_streamed_blocks_are_spread_over_the_model() -> None:
    blocks = tuple(BlockSize(BlockId(i, BlockKind.FFN), 1 << 20, 1 << 20) for i in range(32))
    demand = Demand(ModelSpec("Test", 32, 64, 10, 4096, (), (), 10), blocks, 0, 0, 16)
    plan = solve(demand, options(20 << 20), MACHINE)
    streamed = [block.layer for block in plan.blocks_in(Tier.DISK)]
    gaps = [after - before for before, after in pairwise(streamed)]
    assert 10 <= len(streamed) <= 18 and max(gaps) <= 4


@pytest.mark.parametrize("context", [0, 5000])
def test_a_context_the_model_was_not_made_for_is_refused(context: int) -> None:
    demand = Demand(ModelSpec("Test", 1, 64, 10, 4096, (), (), 10), (), 0, 0, 16)
    with pytest.raises(ConfigError, match="1 to 4096"):
        solve(demand, PlanOptions(1 << 20, context=context), MACHINE)


def test_activations_of_pieces_do_not_grow_with_the_chunk() -> None:
    def taken(chunk: int, width: int) -> int:
        spec = ModelSpec("Test", 1, 64, 10, 4096, (), (), 10, piece_width=width)
        return activation_bytes(Demand(spec, (), 0, 0, 16), chunk, 0)

    for chunk, piece in ((1, 1), (100, 100), (CHUNK_TOKENS, CHUNK_TOKENS), (4096, CHUNK_TOKENS)):
        assert taken(chunk, 7) - taken(chunk, 0) == 4 * 7 * piece


@given(demand=demands(), matrix=st.integers(0, 1 << 22), token=st.integers(0, 1 << 12))
def test_a_device_keeps_room_for_what_its_kernels_take(
    demand: Demand, matrix: int, token: int
) -> None:
    options = PlanOptions(1 << 30, context=64, max_prefill_tokens=16, device_bytes=1 << 30)
    plans = [
        solve(one, options, MACHINE)
        for one in (demand, replace(demand, matrix_bytes=matrix, expert_token_bytes=token))
    ]
    without, with_room = (plan.device.reserved["activations"] for plan in plans)
    assert with_room == without + matrix + 16 * token


def sparse_demand(experts: int, size: int) -> Demand:
    """Two layers of attention, routers and experts, and a head."""
    spec = ModelSpec("Test", 2, 64, 10, 4096, (), (), 10, experts_per_token=2)
    blocks = [BlockSize(BlockId(TRUNK, BlockKind.EMBEDDING), size, size)]
    for layer in range(2):
        blocks += [
            BlockSize(BlockId(layer, kind), size, size)
            for kind in (BlockKind.ATTENTION, BlockKind.ROUTER)
        ]
        blocks += [
            BlockSize(BlockId(layer, BlockKind.EXPERT, number), size, size)
            for number in range(experts)
        ]
    blocks.append(BlockSize(BlockId(TRUNK, BlockKind.HEAD), size, size))
    return Demand(spec, tuple(blocks), 0, 0, 16)


@given(kept=st.integers(0, 40), lookup_ms=st.sampled_from([0.0, 0.01, 0.2, 1.0]))
def test_a_table_stays_in_memory_where_looking_up_takes_longer_than_what_its_room_would_save(
    kept: int, lookup_ms: float
) -> None:
    """All layers but their 40 experts are there, `kept` of these, and what is left over."""
    size, embedding = 1 << 20, BlockId(TRUNK, BlockKind.EMBEDDING)
    demand = replace(sparse_demand(20, size), row_bytes=4096)
    dense_bytes = 6 * size  # and a little
    budget = options(smallest_budget(demand, options(0)) + dense_bytes + kept * size)
    for lookup_s in (lookup_ms * 1e-3, 1.0):
        machine = replace(MACHINE, disk_block_overhead_s=lookup_s)
        plan = solve(demand, budget, machine)
        assert sum(plan.reserved.values()) <= budget.host_bytes
        there = plan.homes[embedding] is Tier.HOST
        slots = plan.reserved["slots"] + (size if there else -size)
        if slots < size or (there and kept >= 40):
            continue  # no expert could be read; all are there
        home = Tier.DISK if there else Tier.HOST
        turned = replace(
            plan,
            homes={**plan.homes, embedding: home},
            reserved={**plan.reserved, "slots": slots},
            slot_counts={size: slots // size},
        )
        other = CostModel(workload_of(demand, turned), machine).decode(1, 0)
        assert plan.predicted_token_s <= other.seconds


@given(room=st.integers(4, 60))
def test_experts_can_be_brought_wherever_a_few_slots_fit(room: int) -> None:
    size = 1 << 20
    demand = sparse_demand(20, size)
    options = PlanOptions(1 << 30, context=64, max_prefill_tokens=16, device_bytes=1 << 30)
    reserved = solve(demand, options, MACHINE).device.reserved
    activations = reserved["activations"] + reserved["mapping"]
    spare = room * size + 4096  # keys and values are small
    plan = solve(demand, replace(options, device_bytes=activations + spare), MACHINE)
    share = plan.device
    assert sum(share.reserved.values()) <= activations + spare
    if any(
        home is Tier.HOST for block, home in plan.homes.items() if block.kind is BlockKind.EXPERT
    ):
        # Attention and routers take 4, experts of prompts 4 slots at least; others come there, too.
        assert (share.staging_slots > 0) == (room >= 4 + 4)
        assert not share.staging_slots or share.slot_counts[size] in (4, 8, 16)
        head_is_there = plan.homes[BlockId(TRUNK, BlockKind.HEAD)] is Tier.DEVICE
        assert head_is_there or room < 4 + 4 + 1
