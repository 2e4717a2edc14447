"""Simulations: nothing is lost, queues are as long as theory says, and more is never slower."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from models import machine_with, outlook, setting, small_model, with_cpu, with_gpu

from hmt.base.errors import ConfigError
from hmt.contracts.machine import Machine
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.step_costs import StepCosts
from hmt.planner.cost.workload import Workload, workload_of
from hmt.simulator.simulator import SimulationResult, simulate
from hmt.simulator.traffic import (
    Lengths,
    SimulatedRequest,
    Traffic,
    arrivals,
    closed_loop,
    read_requests,
)


def small(
    device: float = 0.0, experts: int = 0, ram: float = 1.5, users: int = 4
) -> tuple[Machine, Workload]:
    demand = small_model(6, experts, min(experts, 2))
    machine = machine_with(demand, ram=ram, device=device)
    plan = outlook(demand).plan(setting(machine, users=users, max_prefill_tokens=64)).plan
    return machine, workload_of(demand, plan)


def answered(
    traffic: Traffic, given: tuple[Machine, Workload], positions: int = 4096, max_batch: int = 4
) -> SimulationResult:
    costs = StepCosts(CostModel(given[1], given[0]))
    return simulate(traffic, costs, positions=positions, max_prefill_tokens=64, max_batch=max_batch)


def mixture(count: int, seed: int) -> Traffic:
    """All at once, of all lengths, some of which stop before they have to."""
    chance = random.Random(seed)
    asked = []
    for _ in range(count):
        tokens = chance.randint(1, 300)
        most = tokens + chance.choice([0, 0, 200])
        owner, priority = chance.choice("ab"), chance.choice([0, 0, 1])
        asked.append(SimulatedRequest(0.0, chance.randint(1, 400), tokens, most, owner, priority))
    return Traffic(tuple(asked))


def test_every_request_ends_and_every_token_is_counted() -> None:
    too_long = SimulatedRequest(0.0, 1500, 20, 20)
    asked = (*mixture(300, 1).requests, too_long)
    found = answered(Traffic(asked), small(), positions=1024, max_batch=8)
    assert found.refused == 1
    assert sorted(map(str, asked)) == sorted(
        map(str, [*(o.request for o in found.answered), too_long])
    )
    assert found.tokens == sum(one.tokens for one in asked) - too_long.tokens
    prompts = sum(one.prompt_tokens for one in asked) - too_long.prompt_tokens
    assert found.preemptions > 0, "little room: somebody gave way"
    assert found.prompt_tokens >= prompts  # what was dropped is computed again
    assert found.most_batch <= 8 and found.longest_queue > 200
    for one in found.answered:
        assert one.request.due_s <= one.begun_s < one.first_s <= one.ended_s <= found.wall_s
    summary = found.summary()
    assert summary["idle"] == pytest.approx(0, abs=1e-9)
    assert sum(summary["bound_by"].values()) == pytest.approx(1)
    assert all(0 <= share <= 1 + 1e-9 for share in summary["utilisation"].values())
    assert found == answered(Traffic(asked), small(), positions=1024, max_batch=8)


def test_steps_that_are_taken_together_are_as_those_one_by_one() -> None:
    """Arrivals that are refused cut what would be one leap into many."""
    traffic, given = mixture(20, 5), small(experts=8)
    whole = answered(traffic, given, max_batch=3)
    cuts = [SimulatedRequest(n * whole.wall_s / 500, 1 << 20, 1, 1) for n in range(500)]
    asked = sorted([*traffic.requests, *cuts], key=lambda one: one.due_s)
    single = answered(Traffic(tuple(asked)), given, max_batch=3)
    assert single.steps == whole.steps and single.refused == 500
    ends = zip(whole.answered, single.answered, strict=True)
    assert all(
        a.request == b.request and a.ended_s == pytest.approx(b.ended_s, 1e-3) for a, b in ends
    )
    assert single.nbytes == pytest.approx(whole.nbytes, rel=1e-3)


def test_one_at_a_time_waits_as_the_formula_says() -> None:
    """M/D/1, by Pollaczek and Khinchine: of equal services a request waits rho D / 2 (1 - rho)."""
    given, load = small(), 0.6
    alone = answered(Traffic((SimulatedRequest(0.0, 48, 1, 1),)), given, max_batch=1)
    service_s = alone.wall_s
    traffic = arrivals(load / service_s, 8000 * service_s / load, Lengths(48, 1), seed=2)
    found = answered(traffic, given, max_batch=1)
    waited = sum(one.begun_s - one.request.due_s for one in found.answered) / len(found.answered)
    assert len(found.answered) > 7700
    assert waited == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.08)
    assert found.summary()["idle"] == pytest.approx(1 - load, abs=0.02)


@pytest.mark.parametrize(("device", "experts", "ram"), [(0, 0, 0.4), (0.4, 0, 1.5), (0.3, 16, 0.8)])
def test_more_bandwidth_is_never_slower(device: float, experts: int, ram: float) -> None:
    machine, loads = small(device, experts, ram)
    traffic = mixture(40, 3)
    before = answered(traffic, (machine, loads))
    faster = [
        with_cpu(machine, read_rate=1.5 * machine.cpu.read_rate),
        replace(machine, disk_read_rate=1.5 * machine.disk_read_rate),
    ]
    for gpu in machine.devices:
        faster.append(with_gpu(machine, read_rate=1.5 * gpu.compute.read_rate))
        faster.append(with_gpu(machine, link_rate=1.5 * gpu.link_rate))
    for other in faster:
        assert answered(traffic, (other, loads)).wall_s <= before.wall_s * (1 + 1e-9), other


def test_a_full_batch_decodes_at_the_predicted_rate() -> None:
    """Users with short prompts and long answers reach what `hmt plan` says, and seeds decide."""
    machine, loads = small()
    found = answered(closed_loop(4, 0.5, Lengths(1, 900)), (machine, loads), positions=1 << 14)
    expected = CostModel(loads, machine).predict(4, 450).tokens_per_s
    assert found.tokens / found.wall_s == pytest.approx(expected, rel=0.05)
    assert found.batch == pytest.approx(4, abs=0.1)
    for seed in (1, 2):
        varied = closed_loop(4, 0.5, Lengths(40, 90, 0.7), seed)
        one, again = (answered(varied, (machine, loads)) for _ in range(2))
        assert one == again
    assert one != answered(closed_loop(4, 0.5, Lengths(40, 90, 0.7), 1), (machine, loads))


def test_records_are_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    rows = [
        {"due_s": 9.0, "prompt_tokens": 5, "tokens": 7, "max_tokens": 9, "owner": "b"},
        {"due_s": 8.0, "prompt_tokens": 3, "tokens": 2, "priority": 1},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    traffic = read_requests(file)
    assert traffic.requests == (
        SimulatedRequest(0.0, 3, 2, 2, "", 1),
        SimulatedRequest(1.0, 5, 7, 9, "b", 0),
    )
    assert traffic.longest == 14
    each = {"due_s": 1.0, "status": "ok", "ttft_s": 0.1, "prompt_tokens": 4, "tokens": 6}
    cells = [{"each": [each, each | {"status": "503", "tokens": 0}]}, {"each": [each]}]
    file.write_text(json.dumps({"results": cells}))
    assert read_requests(file, 1).requests == (SimulatedRequest(0.0, 4, 6, 6),)
    for cell, told in ((None, "choose one"), (3, "2 rows")):
        with pytest.raises(ConfigError, match=told):
            read_requests(file, cell)
    for text, told in (
        ("", "no request"), ("{", "line 1"), ("[]", "line 1"), ('{"due_s": 0}', "line 1 needs"),
        ('{"due_s": 0, "prompt_tokens": 1, "tokens": 0}', "of 1 at least"),
        ('{"due_s": 0, "prompt_tokens": 1, "tokens": 1, "word": 2}', "line 1 must"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_requests(file)
    for results in ([], 3, {"a": 1}, [3], [{}], [{"each": 3}], [{"each": [3]}]):
        file.write_text(json.dumps({"results": results}))
        with pytest.raises(ConfigError, match=r"row.* results"):
            read_requests(file)
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(ConfigError, match="--cell 1"):
        read_requests(file, 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(tmp_path / "none")


def test_traffic_without_end_and_without_a_request_is_refused() -> None:
    for rate, seconds, told in ((1e-9, 1.0, "no request"), (1e9, 1e9, "at most")):
        with pytest.raises(ConfigError, match=told):
            arrivals(rate, seconds, Lengths(4, 4))


def test_a_machine_of_unknown_rates_is_refused() -> None:
    machine, loads = small()
    with pytest.raises(ConfigError, match="not known"):
        answered(mixture(1, 1), (with_cpu(machine, read_rate=0.0), loads))
