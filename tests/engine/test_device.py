"""The GPU tier on a fake device: placing, copying and slots never change a result."""

import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hmt
from hmt.base.errors import BudgetError, ConfigError, MachineError
from hmt.cli.options import embedded_model
from hmt.contracts.blocks import BlockKind
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.contracts.machine import ComputeRates, DeviceRates, Machine
from hmt.contracts.plan import Plan, Tier
from hmt.engine import EngineConfig
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.engine.execution.graphs.segmented_weights import HostFfnBuffers
from hmt.engine.loading import prepare
from hmt.engine.snapshot import ExpertTier
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.kernels import host_experts, ops
from hmt.memory.device import FakeDevice, InlineRecorder
from hmt.profiling.random_model import Shape, write_random_model
from hmt.weights.store import device_store

pytestmark = pytest.mark.each_once

MODELS = {"dense": embedded_model(), "moe": Path(__file__).parents[2] / "assets" / "mini-moe"}
TOKENS = list(range(20, 60))
GPU = {"gpus": "fake"}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HMT_POISON", "on")
    # Beside what the memory gives: so that some layers are copied, and some compute on the CPU.
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    yield


def run(kind: str, **options: object) -> tuple[torch.Tensor, list[int], Plan]:
    with hmt.Engine(context=256, **options) as engine:
        model = engine.load_model(MODELS[kind])
        logits = model.logits(TOKENS, range(40), prefill=24)
        request = hmt.Request(input="Once upon", max_new_tokens=8)
        tokens = list(model.infer(request).token_ids)
        plan = model.plan
    assert engine._ledger.reserved_bytes(Tier.DEVICE) == 0
    return logits, tokens, plan


@pytest.fixture(scope="module", params=list(MODELS))
def on_cpu(request: pytest.FixtureRequest) -> tuple[str, torch.Tensor, list[int]]:
    logits, tokens, _ = run(request.param, host_memory="64MiB")
    return request.param, logits, tokens


@pytest.mark.parametrize("link", [40e9, 1e6])
def test_a_plan_for_a_goal_gives_the_same_tokens(
    on_cpu: tuple[str, torch.Tensor, list[int]], link: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _, tokens = on_cpu

    def described(here: Machine, device: object, form: object) -> Machine:
        compute = ComputeRates(1e12, {"bf16@512": 1e14})
        gpu = DeviceRates("fake", 1 << 30, link_rate=link, compute=compute)
        return replace(here, devices=(gpu,), cpu=ComputeRates(1e10, {"bf16@512": 1e11}))

    monkeypatch.setattr(prepare, "with_device", described)
    size = sum(file.stat().st_size for file in MODELS[kind].glob("*.safetensors"))
    options = {"gpu_memory": size // 2 + (6 << 20), "host_memory": "64MiB", **GPU}
    _, answer, plan = run(kind, goal="latency", max_batch=1, max_prefill_tokens=32, **options)
    assert answer == tokens
    assert sum(plan.device.reserved.values()) <= plan.budgets.get(Tier.DEVICE, 0)
    alone = run(kind, goal="latency", max_batch=1, gpu_memory=0, host_memory="64MiB")
    assert alone[1] == tokens and not alone[2].device.stages


def test_a_profile_runs_as_it_says_and_gives_the_same_tokens(
    on_cpu: tuple[str, torch.Tensor, list[int]], tmp_path: Path
) -> None:
    kind, _, tokens = on_cpu
    file = tmp_path / "profile.yaml"
    file.write_text("memory: {gpu_layers: 2, prefetch: 1}\ncompute: {batch_size: 3}\n")
    config = EngineConfig.resolve(profile=file)
    assert (config.max_batch, config.prefetch_distance) == (3, 1)
    assert EngineConfig.resolve(profile=file, max_batch=2).max_batch == 2
    with pytest.raises(ConfigError, match="not both"):
        EngineConfig.resolve(profile="latency", goal="latency")
    options = {"gpu_memory": "64MiB", "host_memory": "64MiB", **GPU}
    _, answer, plan = run(kind, profile=file, **options)
    assert answer == tokens and plan.prefetch_distance == 1
    assert len(plan.device.stages) == 2


@pytest.mark.parametrize(  # each pair of two of them
    ("share", "host", "executor"),
    [
        (share, host, ("overlapped", "plain")[(row + column) % 2])
        for row, share in enumerate((1.0, 0.7, 0.5, 0.35))
        for column, host in enumerate(("64MiB", "12MiB"))
    ],
)
def test_every_split_gives_the_same_logits(
    on_cpu: tuple[str, torch.Tensor, list[int]], share: float, host: str, executor: str
) -> None:
    kind, logits, tokens = on_cpu
    size = sum(file.stat().st_size for file in MODELS[kind].glob("*.safetensors"))
    options = {"gpu_memory": int(share * (size + (6 << 20))), "host_memory": host, **GPU}
    found, answer, plan = run(kind, executor=executor, **options)
    assert torch.equal(found, logits) and answer == tokens
    assert plan.device.stages
    assert sum(plan.device.reserved.values()) <= plan.budgets[Tier.DEVICE]
    if share == 1.0:
        assert not plan.device.slot_counts and plan.blocks_in(Tier.DEVICE)


@pytest.fixture
def steady_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a busy machine may leave nothing to the CPU."""
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9, 30e9, 90e9))


@pytest.mark.usefixtures("steady_rates")
def test_layers_that_do_not_fit_are_copied_and_computed_in_turn() -> None:
    with hmt.Engine(context=256, host_memory="64MiB", gpu_memory="9MiB", **GPU) as engine:
        model = engine.load_model(MODELS["dense"])
        device, weights = model.plan.device, model._core.memory.on_device.weights
        copied = [b for b in device.computes if model.plan.homes[b] is Tier.HOST]
        assert copied, "some are copied"
        before = weights.counters.copied_bytes
        model.logits(TOKENS, [], prefill=0)
        each = sum(model.prepared.layouts[block].slot_bytes for block in copied)
        ahead = device.reserved["slots"]  # for a step that did not come
        found = weights.counters.copied_bytes - before
        assert each * len(TOKENS) <= found <= each * len(TOKENS) + ahead


@pytest.mark.usefixtures("steady_rates")
def test_prompts_compute_on_the_device_what_the_cpu_computes_for_single_tokens() -> None:
    with hmt.Engine(context=256, host_memory="64MiB", gpu_memory="9MiB", **GPU) as engine:
        model = engine.load_model(MODELS["dense"])
        device, weights = model.plan.device, model._core.memory.on_device.weights
        on_cpu = device.computes_prompts - device.computes
        assert on_cpu and all(model.plan.homes[block] is Tier.HOST for block in on_cpu)
        copied = device.computes - {
            b for b in model.plan.homes if model.plan.homes[b] is Tier.DEVICE
        }
        before = weights.counters.copied_bytes
        model.logits(list(range(20, 60)), [])
        layouts = model.prepared.layouts
        each = sum(layouts[block].slot_bytes for block in on_cpu | copied)
        assert weights.counters.copied_bytes - before >= each


@pytest.mark.usefixtures("steady_rates")
def test_experts_are_cached_brought_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"context": 256, "host_memory": "64MiB", "quantization": "w4a16:32"}
    with hmt.Engine(**options) as engine:
        wanted = engine.load_model(MODELS["moe"]).logits(TOKENS, range(40), prefill=24)
    monkeypatch.setattr(device_store, "_MOST_EXPERTS_TOKENS", 24)
    for memory in ("9MiB", "7MiB"):
        with hmt.Engine(gpu_memory=memory, **GPU, **options) as engine:
            model = engine.load_model(MODELS["moe"])
            share, weights = model.plan.device, model._core.memory.on_device.weights
            assert share.expert_slots and share.staging_slots and 0 < share.link_share < 1
            found = model.logits(TOKENS, range(40), prefill=24)
            assert torch.equal(found[:24], wanted[:24]), "prompts compute all on the device"
            assert (found - wanted).norm() / wanted.norm() < 1e-5
            experts = [b for b in model.plan.homes if b.kind is BlockKind.EXPERT]
            layers, spec = len({block.layer for block in experts}), model.prepared.model.spec
            # The first ones are there from the beginning.
            missing = len(experts) - layers * share.expert_slots
            ahead = sum(map(len, weights._free_slots.values()))
            copied = weights.counters.copied_bytes // weights.moe_backends.nbytes
            assert missing <= copied <= missing + ahead
            counts = weights.moe_backends.counts()
            *whole, cut = counts
            assert all(whole) and not cut and sum(whole) == 16 * layers * spec.experts_per_token
            account = model.summary().device.experts
            assert [account.found, account.brought, account.left] == whole
            _watch_shared_slots(model, monkeypatch)
            seen = model.begin_snapshot().result().experts
            for layer, team in weights.moe_backends.by_layer.items():
                held = team.slots.holders[team.slots.holders >= 0]
                assert len(set(held.tolist())) == len(held) <= share.expert_slots
                row = seen.layers.index(layer)
                there = (seen.places[row] == ExpertTier.DEVICE).nonzero()[0]
                assert there.tolist() == sorted(held.tolist()) and seen.counted[row]
                heat = team.slots.scores * 0.03  # as a share of steps
                assert torch.allclose(torch.from_numpy(seen.heat[row]), heat)


@pytest.mark.usefixtures("steady_rates")
@pytest.mark.parametrize("memory", ["9MiB", "7MiB"])
def test_prompts_compute_cached_experts_where_they_are(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens between them change what is cached; prompts follow, to the bit."""
    options = {"context": 256, "host_memory": "64MiB", "quantization": "w4a16:32"}
    texts = [[(n * step + 5) % 500 for n in range(44)] for step in (1, 7, 11)]
    with hmt.Engine(**options) as engine:
        model = engine.load_model(MODELS["moe"])
        wanted = [model.logits(text, range(24), prefill=24) for text in texts]
    monkeypatch.setattr(device_store, "_MOST_EXPERTS_TOKENS", 24)
    with hmt.Engine(gpu_memory=memory, **GPU, **options) as engine:
        model = engine.load_model(MODELS["moe"])
        weights, seen = model._core.memory.on_device.weights, set()
        count = sum(block.kind is BlockKind.EXPERT for block in model.plan.homes)
        for text, its in zip(texts, wanted, strict=True):
            cached, before = weights.moe_backends.cached(), weights.counters.copied_bytes
            seen.add(frozenset(cached))
            assert torch.equal(model.logits(text[:24], range(24), prefill=24), its)
            copied = weights.counters.copied_bytes - before
            # Some are asked for before it is known that they are there.
            ahead = sum(map(len, weights._free_slots.values()))
            left = count - len(cached)
            assert left <= copied // weights.moe_backends.nbytes <= left + ahead
            model.logits(text, [], prefill=24)  # 20 tokens, one by one
        assert len(seen) == len(texts), "another cache each time"


def _watch_shared_slots(model: hmt.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are brought to slots of prompts, and none is there while the other may be."""
    on_device = model._core.memory.on_device
    device, weights = on_device.device, on_device.weights
    shared = [slot.tensor.data_ptr() for slot in weights._shared]
    team = next(iter(weights.moe_backends.by_layer.values()))
    assert shared and team.slots.staging.tolist()[: len(shared)] == shared
    copies: list[object] = []
    fetches: list[int] = []
    copy_each, fetch = device.copy_each, host_experts.fetch
    before = [slot.last_use for slot in weights._shared]

    def copied(targets: list[torch.Tensor], sources: list[torch.Tensor], after: object) -> object:
        copies.extend(list(after) for target in targets if target.data_ptr() in shared)
        return copy_each(targets, sources, after)

    def fetched(*given: object) -> None:
        assert all(one.reached() for one in device._under_way), "a prompt's expert would come later"
        fetches.append(len(copies))
        fetch(*given)

    with monkeypatch.context() as here:
        here.setattr(device, "copy_each", copied)
        here.setattr(host_experts, "fetch", fetched)
        model.logits(TOKENS, [], prefill=24)
    assert fetches and fetches[0] == len(copies)
    first = copies[: len(shared)]
    assert first == first[:1] * len(shared) and first[0][0] not in before, (
        "after all that was brought"
    )


@pytest.mark.usefixtures("steady_rates")
def test_experts_are_brought_where_none_can_be_cached() -> None:
    options = {"context": 256, "host_memory": "64MiB", "quantization": "w4a16:32"}
    with hmt.Engine(**options) as engine:
        wanted = engine.load_model(MODELS["moe"]).logits(TOKENS, range(40), prefill=24)
    with hmt.Engine(gpu_memory="5900KiB", **GPU, **options) as engine:
        model = engine.load_model(MODELS["moe"])
        share = model.plan.device
        assert not share.expert_slots and share.staging_slots
        found = model.logits(TOKENS, range(40), prefill=24)
        assert (found - wanted).norm() / wanted.norm() < 1e-5
        cached, brought, left, _ = model._core.memory.on_device.weights.moe_backends.counts()
        assert not cached and brought and left


@pytest.mark.parametrize("tied", [True, False])
def test_steps_begin_before_they_are_asked_for(tied: bool, tmp_path: Path) -> None:
    path = MODELS["dense"]
    if not tied:
        path = tmp_path
        write_random_model(path, Shape(3, 64, 96, 4, 2))
    prompts = ["Once upon a time", "The dog", "She said", "In the evening"]

    def requests(temperature: float, length: int = 24) -> list[hmt.Request]:
        sampling = hmt.Sampling(temperature=temperature, seed=5)
        return [
            hmt.Request(input=text, sampling=sampling, max_new_tokens=length - 5 * n)
            for n, text in enumerate(prompts)
        ]

    options = {"context": 512, "host_memory": "64MiB", "max_batch": 3, "speculate": "off"}
    answers = {}
    for gpu in ({}, {"gpu_memory": "64MiB", **GPU}):
        with hmt.Engine(**options, **gpu) as engine:
            model = engine.load_model(path)
            found = [model.infer_batch(requests(temperature)) for temperature in (0.0, 1.0)]
            forced = model.logits(TOKENS, range(40), prefill=3)
            found.append(model.infer_batch(requests(0.0, length=40)))
            answers[bool(gpu)] = [[one.token_ids for one in batch] for batch in found], forced
            guesses = model._core.runner.executor.graphs.async_steps if gpu else None
    assert answers[True][0] == answers[False][0]
    assert torch.equal(answers[True][1], answers[False][1])
    assert guesses.right > 40, "of steps that go on as they were"
    wrong = guesses.begun - guesses.right
    assert wrong < 0.5 * guesses.right, "drawn tokens are seldom guessed"


def test_a_step_that_fails_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with hmt.Engine(context=256, host_memory="64MiB", gpu_memory="9MiB", **GPU) as engine:
        model = engine.load_model(MODELS["dense"])
        wanted = model.logits(TOKENS, range(40))
        weights = model._core.memory.on_device.weights
        follow, calls = weights._device.wait_event, []

        def fail_once(mark: object) -> None:
            calls.append(mark)
            if len(calls) == 2:
                raise BudgetError("injected")
            follow(mark)

        monkeypatch.setattr(weights._device, "wait_event", fail_once)
        with pytest.raises(BudgetError, match="injected"):
            model.infer(hmt.Request(input="Once", max_new_tokens=2))
        assert torch.equal(model.logits(TOKENS, range(40)), wanted)


def test_budgets_that_make_no_sense_are_refused() -> None:
    with hmt.Engine(context=256, host_memory="64MiB", gpu_memory="1MiB", **GPU) as engine:
        with pytest.raises(BudgetError, match="smallest attention takes"):
            engine.load_model(MODELS["dense"])
        assert engine._ledger.reserved_bytes(Tier.HOST) == 0
    with pytest.raises(ConfigError, match="number of a GPU"):
        hmt.Engine(gpu_memory="1GiB", gpus="first")
    if not torch.cuda.is_available():
        with pytest.raises(MachineError, match="hmt doctor"):
            hmt.Engine(gpu_memory="1GiB")


def test_two_models_share_the_device() -> None:
    with hmt.Engine(context=256, host_memory="128MiB", gpu_memory="40MiB", **GPU) as engine:
        first = engine.load_model(MODELS["dense"])
        reserved = engine._ledger.reserved_bytes(Tier.DEVICE)
        second = engine.load_model(MODELS["dense"])
        assert engine._ledger.reserved_bytes(Tier.DEVICE) == 2 * reserved
        assert torch.equal(first.logits(TOKENS, [39]), second.logits(TOKENS, [39]))
        first.close()
        gc.collect()
        assert engine._ledger.reserved_bytes(Tier.DEVICE) == reserved


def test_steps_are_captured_in_pieces_where_some_networks_are_elsewhere() -> None:
    request = hmt.Request(input="Once upon", max_new_tokens=40, ignore_eos=True)
    with hmt.Engine(context=256, host_memory="64MiB") as engine:
        wanted = engine.load_model(MODELS["dense"]).infer(request).token_ids
    options = {"context": 256, "host_memory": "64MiB", "gpu_memory": "12MiB", "speculate": "off"}
    with hmt.Engine(**options, **GPU) as engine:
        model = engine.load_model(MODELS["dense"])
        captured = model._core.runner.executor.graphs
        assert isinstance(captured, GraphRunner) and captured.host_ffn
        prompts = hmt.Request(input=TOKENS, max_new_tokens=1)
        for _ in range(2):  # prompts use the slots in another order
            assert model.infer(request).token_ids == wanted
            model.infer(prompts)
        assert len(captured.graphs[False]) == 1
        model.reset_summary()
        model.infer(request)
        phase = model.summary().generation
        home, device = model.plan.homes, model.plan.device
        copied = sum(
            model.prepared.layouts[b].slot_bytes
            for b in device.computes
            if home[b] is not Tier.DEVICE
        )
        assert copied and abs(phase.link_bytes - copied * phase.steps) <= device.reserved["slots"]


def test_hidden_states_go_to_the_cpu_and_back() -> None:
    device, like = FakeDevice(), torch.randn(3, 32)
    params = {
        name: WeightTensor(Encoding.F32, shape, torch.randn(shape))
        for name, shape in (("gate_proj", (64, 32)), ("up_proj", (64, 32)), ("down_proj", (32, 64)))
    }
    params["norm"] = WeightTensor(Encoding.F32, (32,), torch.ones(32))
    layer = ops.FeedForward("silu", ops.NormOptions(1e-6))
    counted: list[int] = []
    weights = SimpleNamespace(waited=lambda seconds: None, count=counted.append)
    buffers = HostFfnBuffers(device, weights, (3, 32), torch.float32)
    for x in (None, torch.randn(3, 32)):
        hidden, wanted = like.clone(), like.clone()
        ops.feed_forward(wanted, None if x is None else x.clone(), params, layer)
        buffers.feed_forward(InlineRecorder(), params, hidden, x, layer)
        assert torch.equal(hidden, wanted)
    nbytes = 4 * (3 * 64 * 32 + 32)
    assert counted == [nbytes, nbytes]


@pytest.mark.parametrize("gpu", ["9MiB", "12MiB"])
def test_steps_of_all_sizes_find_their_weights_in_the_slots(gpu: str) -> None:
    """Prompts and single tokens use the same slots in different orders."""
    rng = random.Random(7)
    calls = []
    for _ in range(10):
        tokens = [rng.randrange(20, 400) for _ in range(rng.randrange(1, 90))]
        calls.append((tokens, rng.randrange(max(0, len(tokens) - 6), len(tokens) + 1)))
    found = []
    for options in ({}, {"gpu_memory": gpu, **GPU}):
        with hmt.Engine(
            context=256, host_memory="64MiB", max_prefill_tokens=48, **options
        ) as engine:
            model = engine.load_model(MODELS["dense"])
            found.append([model.logits(t, range(len(t)), prefill=p) for t, p in calls])
            if options:
                weights = model._core.memory.on_device.weights
                assert weights.counters.copied_bytes and len(weights._taken) <= 2
    assert all(map(torch.equal, *found))


def test_captured_steps_may_leave_the_head_to_the_cpu() -> None:
    options = {"context": 256, "host_memory": "64MiB", "gpu_memory": "1GiB"}
    request = hmt.Request(input=TOKENS, max_new_tokens=20, ignore_eos=True)
    with hmt.Engine(**options, **GPU) as engine:
        model = engine.load_model(MODELS["dense"])
        wanted = model.infer(request).token_ids
        core: Any = model._core
        on_device = core.memory.on_device
        core.runner.executor.graphs = captured = GraphRunner(
            model.prepared.model, on_device.weights, core.memory.kv, on_device.device, head=False
        )
        assert model.infer(request).token_ids == wanted
        results = [one.results for one in captured.graphs[False].values()]
        assert results and all(one.logit_stats is None for kept in results for one in kept)
        assert not captured.async_steps.begun


def test_a_step_that_is_timed_again_and_again_changes_no_token() -> None:
    request = hmt.Request(input=TOKENS, max_new_tokens=40)
    options: dict[str, Any] = {"context": 256, "host_memory": "64MiB", "gpu_memory": "96MiB", **GPU}
    options["speculate"] = "off"  # a step with drafts is not timed: another comes next
    with hmt.Engine(**options) as engine:
        model = engine.load_model(MODELS["dense"])
        assert model.replayed_s(4) == 0, "nothing is captured yet"
        wanted = model.infer(request).token_ids
        stream = model.stream(request)
        found = [next(stream).token_id for _ in range(6)]
        assert 0 < model.replayed_s(8) < 10
        found += [event.token_id for event in stream]
    assert found == list(wanted)
    with hmt.Engine(context=256, host_memory="64MiB") as engine:
        assert engine.load_model(MODELS["dense"]).replayed_s(4) == 0
