"""The GPU tier on a real GPU: close to the CPU, and the same bits at every split."""

from pathlib import Path

import pytest
import torch

import hmt
from hmt.cli.options import embedded_model
from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Tier
from hmt.engine import engine_core
from hmt.engine.execution import warmup
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates

pytestmark = pytest.mark.gpu

MODELS = {"dense": embedded_model(), "moe": Path(__file__).parents[2] / "assets" / "mini-moe"}
TOKENS = list(range(20, 100))


def logits(
    kind: str, quantization: str | None, weights_bytes: int | None, dtype: str = "float32"
) -> torch.Tensor:
    """Of TOKENS: a prompt of 64, then one by one; with so many bytes of the GPU, or the CPU.

    In float32 by default: a mixture of experts chooses others where 16 bits round differently.
    """
    options: dict[str, object] = {"host_memory": "256MiB", "context": 256, "dtype": dtype}
    if weights_bytes is not None:
        taken = machine_taken() + weights_bytes
        options |= {"gpu_memory": taken}
    if quantization:
        options["quantization"] = quantization
    with hmt.Engine(**options) as engine:
        model = engine.load_model(MODELS[kind])
        found = model.logits(TOKENS, range(len(TOKENS)), prefill=64)
        if weights_bytes is not None:
            assert model.plan.device.stages
            used = engine._device.used_bytes()
            assert used <= options["gpu_memory"] + (64 << 20)
            assert sum(model.plan.device.reserved.values()) <= model.plan.budgets[Tier.DEVICE]
    return found


def machine_taken() -> int:
    from hmt.memory.device import open_device

    device = open_device("cuda:0")
    device.empty_cache()  # as an engine does before it counts
    return device.used_bytes()


@pytest.fixture(autouse=True)
def _link(monkeypatch: pytest.MonkeyPatch) -> None:
    name = torch.cuda.get_device_name(0)
    monkeypatch.setitem(machine._links, name, LinkRates(40e9))


@pytest.mark.parametrize("quantization", [None, "w4a16:32", "w4a8:32", "nvfp4a16", "w8a8"])
@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [("dense", "float32", 1e-3), ("dense", "bfloat16", 0.03), ("moe", "float32", 1e-3)],
)
def test_the_gpu_agrees_with_the_cpu(
    kind: str, dtype: str, most: float, quantization: str | None
) -> None:
    cpu = logits(kind, quantization, None, dtype)
    gpu = logits(kind, quantization, 1 << 30, dtype)
    if quantization in ("w4a8:32", "w8a8"):
        # A code rounds to the other side, and layers make more of it: in float32 the compiled
        # kernels of the CPU are 0.030 and 0.008 from the plain ones, and 1e-6 without codes.
        most = max(most, 0.06)
    error = (gpu - cpu).norm() / cpu.norm()
    assert error < most, f"{error}"
    same = gpu.argmax(-1) == cpu.argmax(-1)
    if quantization != "w4a8:32" and (quantization, dtype) != ("w8a8", "bfloat16"):
        assert same.float().mean() > 0.9
    # The tokens follow no text, so some first choices are nearly ties, which codes of activations
    # decide (on a CPU the two kinds of kernels agree in 94% of w4a8 and 84% of w8a8 in bf16): all
    # others must be the same.
    first, second = cpu.topk(2, dim=-1).values.unbind(-1)
    clear = first - second > 6 * (gpu - cpu).square().mean(-1).sqrt()
    assert same[clear].all()
    assert clear.float().mean() > 0.3


@pytest.mark.parametrize("kind", list(MODELS))
def test_copied_layers_give_the_same_bits_as_resident_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = torch.cuda.get_device_name(0)
    monkeypatch.setitem(
        machine._links, name, LinkRates(1e15)
    )  # nothing is left to the CPU but experts
    everything = logits(kind, "w4a16:32", 1 << 30)
    for share in (9 << 20, 7 << 20):
        split = logits(kind, "w4a16:32", share)
        if kind == "dense":
            assert torch.equal(split, everything)
        else:
            assert (split - everything).norm() / everything.norm() < 1e-3


@pytest.mark.parametrize("batch", [1, 3])
def test_pieces_compute_what_layer_by_layer_computes(batch: int) -> None:
    """Networks on the GPU, copied there, and on the CPU; with graphs, and without."""
    requests = [
        hmt.Request(input=TOKENS[n:], max_new_tokens=60, ignore_eos=True) for n in range(batch)
    ]
    answers = []
    for executor in ("overlapped", "plain"):
        with hmt.Engine(
            host_memory="256MiB",
            context=1024,
            gpu_memory=machine_taken() + (10 << 20),
            quantization="w4a8:32",
            executor=executor,
        ) as engine:
            model = engine.load_model(MODELS["dense"])
            plan = model.plan
            away = [b for b in plan.device.computes if plan.homes[b] is not Tier.DEVICE]
            assert away and any(
                b.kind is BlockKind.FFN and b not in plan.device.computes for b in plan.homes
            )
            for _ in range(2):
                answers.append([one.token_ids for one in model.infer_batch(requests)])
            if executor == "overlapped":
                captured = model._core.runner.executor.graphs
                assert isinstance(captured, GraphRunner) and captured.host_ffn and captured.works
                assert all(one.recorded for one in captured.graphs[False].values())
                phase = model.summary().generation
                assert phase.link_s > 0 and phase.link_bytes > 0
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("quantization", ["w4a16:32", "w4a8:32", "nvfp4a16", "w8a16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_experts_are_cached_brought_and_asked_for(quantization: str, batch: int) -> None:
    """Captured steps that ask the CPU, against the same tokens on the CPU alone."""
    prompts = [TOKENS[n : n + 30] for n in range(batch)]
    requests = [hmt.Request(input=ids, max_new_tokens=40, ignore_eos=True) for ids in prompts]
    options: dict[str, object] = {"host_memory": "256MiB", "dtype": "float32", "context": 512}
    options["quantization"] = quantization
    size = 9 << 20 if quantization != "w8a16" else 13 << 20
    with hmt.Engine(gpu_memory=machine_taken() + size, max_batch=4, **options) as engine:
        model = engine.load_model(MODELS["moe"])
        assert model.plan.device.expert_slots and model.plan.device.staging_slots
        answers = [one.token_ids for one in model.infer_batch(requests)]
        captured = model._core.runner.executor.graphs
        assert captured is not None and captured.works
        assert captured.served.experts > 0
        found, brought, left, cut = model._core.memory.on_device.weights.moe_backends.counts()
        assert found and brought and left >= captured.served.experts and 0 <= cut < left
    with hmt.Engine(**options) as engine:
        model = engine.load_model(MODELS["moe"])
        for ids, chosen in zip(prompts, answers, strict=True):
            rows = range(len(ids) - 1, len(ids) + 39)
            forced = model.logits([*ids, *chosen[:-1]], rows)
            pairs = zip(forced, chosen, strict=True)
            gaps = [float(row.max() - row[token]) for row, token in pairs]
            assert max(gaps) < (0.05 if quantization != "w4a8:32" else 1.0)


def test_a_head_on_the_cpu_leaves_steps_captured() -> None:
    requests = [hmt.Request(input=TOKENS, max_new_tokens=30, ignore_eos=True)]
    options: dict[str, object] = {"host_memory": "256MiB", "dtype": "float32", "context": 512}
    options["quantization"] = "w8a16"
    with hmt.Engine(gpu_memory=machine_taken() + (9 << 20), max_batch=4, **options) as engine:
        model = engine.load_model(MODELS["moe"])
        heads = {home for b, home in model.plan.homes.items() if b.kind is BlockKind.HEAD}
        assert heads == {Tier.HOST} and model.plan.device.staging_slots
        [answer] = model.infer_batch(requests)
        captured = model._core.runner.executor.graphs
        assert captured is not None and captured.works and captured.served.experts > 0
    with hmt.Engine(**options) as engine:
        model = engine.load_model(MODELS["moe"])
        rows = range(len(TOKENS) - 1, len(TOKENS) + 29)
        forced = model.logits([*TOKENS, *answer.token_ids[:-1]], rows)
        pairs = zip(forced, answer.token_ids, strict=True)
        assert max(float(row.max() - row[token]) for row, token in pairs) < 0.05


def test_decoding_is_captured_and_follows_growing_contexts() -> None:
    # Without draft tokens, whose steps are captured as well.
    with hmt.Engine(
        host_memory="256MiB", context=2048, gpu_memory=machine_taken() + (1 << 30), speculate="off"
    ) as engine:
        model = engine.load_model(MODELS["dense"])
        captured = model._core.runner.executor.graphs
        request = hmt.Request(input=TOKENS, max_new_tokens=1200, ignore_eos=True)
        answer = model.infer(request).token_ids
        assert captured.works and len(captured.graphs[False]) == 2, "one for 1024, one for 2048"
        forced = model.logits([*TOKENS, *answer[:-1]], range(len(TOKENS) - 1, 1279))
        wrong = [i for i, token in enumerate(answer) if token != int(forced[i].argmax())]
        gaps = [float(forced[i].max() - forced[i][answer[i]]) for i in wrong]
        assert max(gaps, default=0) < 0.5, "only near ties differ from the prompt's kernels"
        # Two at a time are computed by other kernels: only near ties may differ.
        requests = [
            hmt.Request(input=TOKENS[n:], max_new_tokens=40, ignore_eos=True) for n in (0, 3)
        ]
        for n, both in zip((0, 3), model.infer_batch(requests), strict=True):
            tokens, chosen = TOKENS[n:], both.token_ids
            rows = range(len(tokens) - 1, len(tokens) + 39)
            forced = model.logits([*tokens, *chosen[:-1]], rows)
            gaps = [
                float(row.max() - row[token]) for row, token in zip(forced, chosen, strict=True)
            ]
            assert max(gaps) < 0.5


def test_what_is_computed_while_loading_is_there_for_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = hmt.Request(input=TOKENS, max_new_tokens=8, ignore_eos=True)
    options = {"host_memory": "256MiB", "context": 256, "gpu_memory": machine_taken() + (1 << 30)}
    answers = []
    for slow in (lambda where: False, warmup.is_slow_at_first):
        monkeypatch.setattr(engine_core, "is_slow_at_first", slow)
        with hmt.Engine(**options) as engine:
            model = engine.load_model(MODELS["dense"])
            captured = model._core.runner.executor.graphs
            assert bool(captured.graphs[False]) == (slow is warmup.is_slow_at_first)
            assert model.summary().prompt.tokens == model.summary().generation.tokens == 0
            answers.append(model.infer(request).token_ids)
    assert answers[0] == answers[1]
