"""How a drive and layers overlap: as a circle of blocks in few places does, read one by one."""

from dataclasses import replace

import pytest
from hmt.planner.overlap import Overlap, overlap_of
from hypothesis import given
from hypothesis import strategies as st
from models import machine_with, outlook, setting, small_model

from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of

LAYER = 80 << 18  # bytes of small_model's
ROUNDS = 50


def by_turns_s(reads: tuple[float, float], computing: tuple[float, float]) -> float:
    """Of a layer with two blocks, with a place for each of them, over many layers."""
    free, ready = [0.0, 0.0], [0.0, 0.0]
    drive = computed = 0.0
    ends = []
    for _ in range(ROUNDS):
        for block in (0, 1):
            drive = ready[block] = max(drive, free[block]) + reads[block]
            computed = free[block] = max(computed, ready[block]) + computing[block]
        ends.append(computed)
    return (ends[-1] - ends[ROUNDS // 2]) / (ROUNDS - 1 - ROUNDS // 2)


@given(st.floats(0.5, 1.0), st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_prompts_blocks_take_turns(largest: float, computing_s: float, disk_s: float) -> None:
    shares = 1 - largest, largest
    layer_s = by_turns_s(
        (shares[0] * disk_s, shares[1] * disk_s), (shares[0] * computing_s, shares[1] * computing_s)
    )
    found = Overlap(0.0, largest)
    longer = max(computing_s, disk_s)
    assert longer + found.waited_s(computing_s, disk_s, many=True) == pytest.approx(layer_s)
    # One place in all: everything comes one after the other; so does what has little to compute.
    for other, many in ((Overlap(0.0), True), (found, False)):
        waited_s = other.waited_s(computing_s, disk_s, many=many)
        assert longer + waited_s == pytest.approx(computing_s + disk_s)
    for hidden in (0.25, 1.0):
        waited_s = (1 - hidden) * found.waited_s(computing_s, disk_s, many=True)
        partly = Overlap(hidden, largest).waited_s(computing_s, disk_s, many=True)
        assert partly == pytest.approx(waited_s)


def test_a_drive_hides_behind_layers_only_where_the_next_has_room() -> None:
    demand = small_model(24)
    machine = replace(machine_with(demand), disk_read_rate=100e9, step_s=0.0, layer_s=0.0)
    plan = outlook(demand).plan(setting(machine, host_bytes=demand.weight_bytes // 3)).plan
    steps = {}
    for slots in (4 * LAYER, 2 * LAYER, 3 * LAYER // 2, LAYER):
        loads = loads_of(demand, replace(plan, reserved={**plan.reserved, "slots": slots}))
        assert loads.overlap.hidden == pytest.approx(min(1.0, slots / LAYER - 1))
        steps[slots] = CostModel(loads, machine).decode(1, 0)
    both = steps[LAYER].busy_s
    assert steps[4 * LAYER].seconds == steps[2 * LAYER].seconds == max(both["CPU"], both["disk"])
    assert steps[LAYER].seconds == pytest.approx(both["CPU"] + both["disk"])
    half = (steps[LAYER].seconds + steps[2 * LAYER].seconds) / 2
    assert steps[3 * LAYER // 2].seconds == pytest.approx(half)


def test_blocks_take_turns_where_two_sizes_have_slots() -> None:
    demand = small_model(24, sizes=(20, 60, 20, 30))
    machine = replace(machine_with(demand), disk_read_rate=100e9)
    plan = outlook(demand).plan(setting(machine, host_bytes=demand.weight_bytes // 3)).plan
    sizes = sorted({block.slot_bytes for block in demand.blocks})
    for counts in ({}, dict.fromkeys(sizes[-1:], 1)):
        assert overlap_of(demand, replace(plan, slot_counts=counts)).largest_share == 1.0
    found = overlap_of(demand, replace(plan, slot_counts=dict.fromkeys(sizes, 1)))
    assert 0.5 < found.largest_share < 1.0
