"""How many pages of keys and values lie where, beside a device and without one."""

from dataclasses import replace

import pytest

from hmt.contracts.kv import PinnedPages, min_device_pages
from hmt.planner.cost.demand import KVTierSizes
from hmt.planner.placement.kv_tiers import KVBudgets, device_bytes, plan_kv_tiers

SIZES = KVTierSizes(
    device_page=1000, host_page=500, disk_group=16000, layer_group=500, kind_group=16000
)
GIVEN = {"most": 16000, "chunk": 32, "batch": 1}


@pytest.mark.parametrize("context", [None, 16000])
def test_a_device_has_room_for_what_it_fetches(context: int | None) -> None:
    budgets = KVBudgets(device_bytes=400_000)
    plain = plan_kv_tiers(SIZES, budgets, context=context, **GIVEN)
    beside = plan_kv_tiers(SIZES, budgets, context=context, device=0, **GIVEN)
    assert plain.staged_pages == 0 and plain.device_pages == 400
    assert beside.staged_pages == 25 and beside.device_pages == 375
    assert plain.pages == beside.pages == 1000
    assert device_bytes(beside, SIZES) == device_bytes(plain, SIZES)


def test_what_needs_no_room_gets_none() -> None:
    given = GIVEN | {"context": 16000, "device": 0}
    enough = plan_kv_tiers(SIZES, KVBudgets(device_bytes=1_000_000), **given)
    assert enough.staged_pages == 0 and enough.device_pages == 1000
    drive = plan_kv_tiers(SIZES, KVBudgets(400_000, host_bytes=0, disk_bytes=None), **given)
    assert drive.staged_pages == 0, "the disk's pages are the CPU's"
    few = plan_kv_tiers(replace(SIZES, host_format="int4"), KVBudgets(400_000), **given)
    assert few.staged_pages == 0, "no kernel of a device reads them"
    least = min_device_pages(32, 1, PinnedPages())
    tight = plan_kv_tiers(SIZES, KVBudgets(device_bytes=least * 1000), **given)
    assert tight.staged_pages == 0 and tight.device_pages == least
