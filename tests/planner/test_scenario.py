"""Outlooks: refusals name what fits, what helps does, and no machine is too strange."""

import random
from dataclasses import replace

import pytest
from default_part import rounds
from models import machine_with, outlook, random_machine, random_model, setting, small_model

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import format_bytes, parse_bytes, shown_at_least
from hmt.contracts.plan import Tier
from hmt.engine import EngineConfig
from hmt.engine.loading.what_if import scenarios_for
from hmt.hardware.machine_file import read_machine
from hmt.planner import explain
from hmt.planner.what_if.placement_reasons import reasons
from hmt.planner.what_if.plan_drawing import draw
from hmt.planner.what_if.scenario import Scenario


def test_any_machine_and_model_has_a_plan_or_a_reason() -> None:
    chance, planned, refused = random.Random(1), 0, 0
    for _ in range(count := rounds(250)):
        demand = random_model(chance)
        machine = random_machine(chance, demand)
        asked = setting(machine, users=chance.choice([1, 4]), context=chance.choice([64, 100_000]))
        plans = outlook(demand)
        try:
            found = plans.plan(asked)
        except BudgetError:
            refused += 1
            for change in plans.remedies(asked) if refused % 2 else ():  # it takes ten plans
                plan = change.planned.plan
                assert plans.plan(change.planned.setting).plan == plan
                assert sum(plan.reserved.values()) <= plan.budgets[Tier.HOST]
            continue
        planned += 1
        assert sum(found.plan.reserved.values()) <= asked.host_budget()
        reserved = sum(found.plan.device.reserved.values())
        assert reserved <= asked.device_budget()
        assert found.plan == plans.plan(asked).plan
        assert found.prediction.tokens_per_s > 0 and found.prediction.ttft_s > 0
    assert planned > count / 9 and refused > count / 25


def test_a_refusal_comes_with_the_smallest_changes() -> None:
    demand = small_model(8)
    machine = machine_with(demand, ram=10)
    asked = setting(machine, context=1 << 17, users=4, host_bytes=1 << 30)
    with pytest.raises(BudgetError):
        outlook(demand).plan(asked)
    changes = outlook(demand).remedies(asked)
    assert len(changes) == 3
    texts = " ".join(change.text for change in changes)
    assert "host memory" in texts and "context" in texts
    memory = next(change for change in changes if "host memory" in change.text)
    nbytes = memory.planned.setting.host_bytes
    assert nbytes is not None
    less = replace(memory.planned.setting, host_bytes=nbytes - nbytes // 100)
    assert outlook(demand).fits(less) is None, "a hundredth less is too little"


def test_suggestions_are_as_small_as_can_be() -> None:
    demand = small_model(8)
    plans, machine = outlook(demand), machine_with(demand, ram=10)

    def text(**given: object) -> str:
        asked = setting(machine, **given)
        assert plans.fits(asked) is None
        return "; ".join(change.text for change in plans.remedies(asked, 9))

    found = text(users=50_000)
    users = int(next(part for part in found.split("; ") if "at once" in part).split()[0])
    assert plans.fits(setting(machine, users=users)) is not None
    assert plans.fits(setting(machine, users=users + 1)) is None
    found = text(max_prefill_tokens=1 << 26)
    pieces = int(next(part for part in found.split("; ") if "pieces of" in part).split()[4])
    assert plans.fits(setting(machine, max_prefill_tokens=pieces)) is not None
    assert plans.fits(setting(machine, max_prefill_tokens=pieces + 16)) is None
    # Where one change is not enough, two are.
    small = replace(machine, disk_bytes=demand.weight_bytes // 2)
    asked = setting(small, users=50_000)
    changes = plans.remedies(asked)
    assert changes and all(" and " in change.text for change in changes)
    assert all(plans.fits(change.planned.setting) is not None for change in changes)


def test_memory_that_is_suggested_suffices_as_it_is_written() -> None:
    """1.92 GiB is not 1.9: what is shown is never less than what fits."""
    demand = small_model(8, experts=16, chosen=2)
    plans, told = outlook(demand), 0
    for context in range(1000, 1 << 17, 9000):
        machine = machine_with(demand, ram=10, device=1.5)
        asked = setting(machine, context=context, users=8, host_bytes=64 << 20, device_bytes=1)
        for change in plans.remedies(asked, 9):
            if change.text.endswith((" of host memory", " of GPU memory")):
                size = change.text.rpartition(" and ")[2].rsplit(" of ", 1)[0]
                wanted = change.planned.setting
                nbytes = parse_bytes(size)
                assert nbytes == (
                    wanted.host_bytes if "host" in change.text else wanted.device_bytes
                )
                told += 1
    assert told > 5
    for nbytes in (0, 1, 1023, 1024, 1025, 10**6, (1 << 20) - 1, 12345678, 99999 << 10, 1 << 50):
        shown = shown_at_least(nbytes)
        assert nbytes <= shown <= 1.011 * nbytes + 1 and parse_bytes(format_bytes(shown)) == shown


def test_a_drive_that_is_too_small_is_refused() -> None:
    demand = small_model()
    machine = replace(machine_with(demand), disk_bytes=demand.weight_bytes - 1)
    with pytest.raises(BudgetError, match="on a disk"):
        outlook(demand).plan(setting(machine))
    (change,) = outlook(demand).remedies(setting(machine))
    assert change.text.startswith("a disk of")


def test_what_helps_is_what_bounds() -> None:
    demand = small_model(24)
    machine = machine_with(demand, ram=0.3)
    found = outlook(demand).plan(setting(machine))
    changes = outlook(demand).helpful(found)
    assert found.prediction.step.limit == "disk"
    assert {"RAM", "disk"} & set(changes[0].text.split())
    for change in changes:
        rate = change.planned.prediction.tokens_per_s
        assert change.gain > 0 and rate == pytest.approx(
            found.prediction.tokens_per_s * (1 + change.gain)
        )
    assert [c.gain for c in changes] == sorted((c.gain for c in changes), reverse=True)
    given = setting(replace(machine, ram_bytes=1 << 40), host_bytes=machine.ram_bytes)
    changes = outlook(demand).helpful(outlook(demand).plan(given))
    assert changes[0].text.endswith("of host memory"), "twice what was given"


def test_plans_are_drawn_and_explained() -> None:
    demand = small_model(8, experts=32, chosen=4, dense_first=2)
    for device in (0.0, 0.3, 1.5):
        found = outlook(demand).plan(setting(machine_with(demand, device=device)))
        drawing = draw(found.plan, demand)
        assert "attention" in drawing and "experts" in drawing and "host" in drawing
        assert ("GPU       [" in drawing) is bool(device)
        machine = replace(found.setting.machine, process_bytes=300 << 20)
        text = explain(found.plan, demand, machine)
        assert "tokens/s" in text and "beside it 300 MiB" in text
        why = "; ".join(reasons(found.plan, demand, machine))
        assert ("GPU" in why) is bool(device) and "nothing is read from the disk" in why
        assert ("a token chooses 4 of 32" in why) is (device < 1)
    few = outlook(demand).plan(setting(machine_with(demand, ram=0.2)))
    assert "dense blocks" in "; ".join(reasons(few.plan, demand, few.setting.machine))


def test_a_context_beyond_the_model_is_refused() -> None:
    demand = small_model()
    with pytest.raises(ConfigError, match="1 to"):
        outlook(demand).plan(setting(machine_with(demand), context=1 << 21))


def test_windows_are_rings_by_default_where_that_is_faster() -> None:
    """Gemma at 128K on 48 GB: with all positions in all layers 8 tokens/s, with rings 28."""
    plans = scenarios_for("gemma-3-27b", EngineConfig.resolve(quantization="w4a8", max_batch=1))
    asked = Scenario(read_machine("l20-epyc-7742"), "w4a8", context=1 << 17, prompt_tokens=2048)
    found, short = plans.plan(asked), plans.plan(replace(asked, context=4096))
    levels = found.plan.kv_tiers
    assert levels is not None and levels.pages == levels.device_pages == (1 << 17) // 16
    assert found.prediction.tokens_per_s > 20 and levels.ring_pages[1024] < 200
    assert short.plan.kv_tiers is None, "everything is on the GPU as it is"
    demand = plans.demand(asked)
    shared = outlook(replace(demand, kv_sizes=None)).plan(asked)
    assert shared.plan.kv_tiers is None and shared.prediction.tokens_per_s < 10
    assert sum(found.plan.device.reserved.values()) <= asked.device_budget()
