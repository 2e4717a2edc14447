"""What is seen of a loaded model: experts as the trace has them, bytes as the accounts do."""

from pathlib import Path

import numpy as np
import pytest
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Tier
from hmt.engine.experts.trace import TraceFile
from hmt.engine.snapshot import ExpertTier
from hmt.kernels import ops
from hmt.profiling.random_model import Shape, write_random_model

FADES = 0.97  # per step, as on a device


def test_experts_and_memory_are_seen_as_they_are(tmp_path: Path) -> None:
    trace = tmp_path / "experts.jsonl"
    options = {"host_memory": "15MiB", "context": 512, "max_prefill_tokens": 128}
    with hmt.Engine(expert_trace=trace, **options) as engine:
        model = engine.load_model(MINI_MOE)
        before = model.begin_snapshot().result()
        assert before.experts is not None and before.experts.heat.max() == 0
        model.infer(hmt.Request(list(range(40, 60)), 24, ignore_eos=True))
        look = model.begin_snapshot().result()
        again = model.begin_snapshot().result()
        cached = list(model._core.memory.weights._policy.eviction_order())
        accounts = model.summary().used_bytes
    seen, plan = look.experts, model.plan
    assert seen is not None and again.experts is not None
    assert (again.experts.heat == seen.heat).all()  # no step, no change

    needed = {(r.step, r.layer, block.index) for r in TraceFile(trace) for block in r.blocks()}
    steps = len({step for step, _, _ in needed})
    uses = np.zeros_like(seen.heat)
    for _, layer, index in needed:
        uses[seen.layers.index(layer), index] += 1
    assert steps == 24 and seen.layers == (1, 2, 3, 4) and uses.shape == (4, 32)
    assert seen.counted.all()
    assert seen.heat == pytest.approx((1 - FADES**steps) * uses / steps, abs=1e-6)

    slots = {(b.layer, b.index) for b in cached if b.kind is BlockKind.EXPERT}
    rows, columns = np.nonzero(seen.places == ExpertTier.SLOT)
    assert {(seen.layers[row], column) for row, column in zip(rows, columns, strict=True)} == slots
    assert 0 < len(slots) < 128 and (seen.places != ExpertTier.SLOT).sum() == 128 - len(slots)

    host, disk = look.fills[Tier.HOST], look.fills[Tier.DISK]
    sizes = {size.id: size.slot_bytes for size in model.prepared.demand.blocks}
    there = [b for b, home in plan.homes.items() if home is Tier.HOST] + cached
    assert host.weights_bytes + host.experts_bytes == sum(sizes[b] for b in there)
    assert host.experts_bytes == sum(sizes[b] for b in cached if b.kind is BlockKind.EXPERT)
    assert host.kv_bytes == accounts["kv"] > 0 == host.kv_taken_bytes  # nobody is left
    assert disk.weights_bytes + disk.experts_bytes == look.summary.streamed_bytes
    held = host.weights_bytes + host.experts_bytes + host.kv_bytes + host.other_bytes
    assert held <= sum(accounts.values()) <= host.budget_bytes == 15 << 20


def test_heat_fades_with_the_steps_and_is_that_of_each_look(tmp_path: Path) -> None:
    trace = tmp_path / "experts.jsonl"
    with hmt.Engine(expert_trace=trace, host_memory="64MiB", context=512) as engine:
        model = engine.load_model(MINI_MOE)
        looks = []
        for first in (40, 90):
            model.infer(hmt.Request(list(range(first, first + 9)), 5, ignore_eos=True))
            looks.append(model.begin_snapshot().result())
    heat = np.zeros((4, 32))
    for part in range(2):
        uses = np.zeros((4, 32))
        for record in TraceFile(trace):
            for block in record.blocks() if part * 5 <= record.step < part * 5 + 5 else ():
                uses[record.layer - 1, block.index] += 1
        heat = heat * FADES**5 + (1 - FADES**5) * uses / 5
        assert looks[part].experts.heat == pytest.approx(heat, abs=1e-6)
    assert (looks[1].experts.places == ExpertTier.HOST).all()  # all of it has room


def test_layers_that_run_in_one_call_count_their_experts_as_well(tmp_path: Path) -> None:
    shape = Shape(3, 64, 32, 4, 2, experts=16, experts_per_token=2)
    write_random_model(tmp_path / "model", shape)
    heat = []
    for options in ({"expert_trace": tmp_path / "trace"}, {}):  # which has them run one by one
        with hmt.Engine(
            host_memory="64MiB", context=256, max_prefill_tokens=96, **options
        ) as engine:
            model = engine.load_model(tmp_path / "model")
            for prompt in (9, 80):  # fewer tokens than run in one call, and more
                model.infer(hmt.Request(list(range(40, 40 + prompt)), 9, ignore_eos=True))
            heat.append(model.begin_snapshot().result().experts)
            together = sum(map(sum, model._core.runner.executor.expert_uses.values()))
            assert bool(together) == (not options and ops.stack([]) is not None)
    assert heat[0].counted.all() and heat[1].counted.all()
    assert (heat[0].heat == heat[1].heat).all() and heat[0].heat.max() > 0


def test_a_dense_model_has_no_map_and_phases_are_copies() -> None:
    with hmt.Engine(host_memory="96MiB", context=512) as engine:
        model = engine.load_model(MINI_DENSE)
        model.infer(hmt.Request([5, 6, 7], 3, ignore_eos=True))
        first = model.begin_snapshot().result()
        model.infer(hmt.Request([5, 6, 7], 3, ignore_eos=True))
        second = model.begin_snapshot().result()
    assert first.experts is None and Tier.DISK not in first.fills
    grown = second.summary.generation.since(first.summary.generation)
    assert (first.summary.generation.tokens, grown.tokens, grown.steps) == (2, 2, 2)
    assert first.summary.generation.since(second.summary.generation) == first.summary.generation
