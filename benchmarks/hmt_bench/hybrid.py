"""A mixture of experts of which a GPU holds all but the experts, and a cache of those.

The model is a tiled pack; keys and values of earlier positions are random numbers, so that a long
context costs no prompt.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hmt.base.units import round_up
from hmt.bench.environment import describe
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import SegmentRequest, Step
from hmt.engine import Engine, LoadedModel
from hmt.hardware.machine import machine_for
from hmt.memory.device import open_device
from hmt_bench.aliased_pack import write_tiled_deepseek
from hmt_bench.gpu import prompt_rate
from hmt_bench.gpu_rates import Rates, measure_rates
from hmt_bench.gpu_watch import GpuWatch
from hmt_bench.random_deepseek import DeepSeekShape
from hmt_bench.skew import recorded_frequencies, router_biases

_WARM_STEPS = 8

# To try the benchmark with.
SMALL = DeepSeekShape(
    hidden_size=128, intermediate_size=96, moe_intermediate_size=64, heads=4, experts=32,
    experts_per_token=4, groups=4, kept_groups=2, q_rank=64, kv_rank=32, nope_dim=16, rope_dim=16,
    value_dim=16, vocab_size=None,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HybridStep:
    """Medians over steps of one decoding batch.

    step_s        all of it
    computed_s    in which the CPU computed experts, and
    waited_s      in which it waited for questions
    found, brought, left   experts, over all layers: in the cache, over the link, for the CPU
    expert_bytes  of one
    link_share    of the missing ones, as learned by the last step; None where nothing is learned
    """

    batch: int
    context: int
    step_s: float
    computed_s: float
    waited_s: float
    found: float
    brought: float
    left: float
    expert_bytes: int
    link_share: float | None = None

    def allowed_s(self, link_rate: float, cpu_rate: float) -> float:
        """What the experts that were missing take, if link and CPU share them perfectly."""
        missing = (self.brought + self.left) * self.expert_bytes
        return missing / (link_rate + cpu_rate)

    def as_row(self) -> str:
        """A line of a table."""
        brought, left = (n * self.expert_bytes / 1e9 for n in (self.brought, self.left))
        cpu = left / self.computed_s if self.computed_s else 0.0
        return (
            f"batch {self.batch:3} context {self.context:7} {self.batch / self.step_s:8.2f} tok/s "
            f"step {self.step_s * 1e3:8.2f} ms, CPU {self.computed_s * 1e3:8.2f} ms "
            f"({cpu:5.1f} GB/s), waits {self.waited_s * 1e3:7.2f} ms, experts: found "
            f"{self.found:6.1f}, brought {self.brought:6.1f} ({brought:5.2f} GB), "
            f"left {self.left:6.1f}" + (f", link {self.link_share:.0%}" if self.link_share else "")
        )


def fill_context(model: LoadedModel) -> None:
    """Random numbers for keys and values of all positions."""
    core: Any = model._core
    kv = core.memory.kv

    def fill() -> None:
        layers = range(model.prepared.model.spec.layers)
        kinds = [kv.kernel_pages(layer)[0] for layer in layers]
        for pages in {id(pages): pages for pages in kinds}.values():
            memory = pages.memory
            for page in memory.split(1024):
                page.view(model.prepared.model.dtype).normal_(0, 0.5)

    model._loop.call(fill)


def decode_steps(model: LoadedModel, batch: int, context: int, steps: int) -> HybridStep:
    """Decode `batch` sequences from `context` positions on."""
    return model._loop.call(lambda: _decode_steps(model, batch, context, steps))


def _decode_steps(model: LoadedModel, batch: int, context: int, steps: int) -> HybridStep:
    core: Any = model._core
    kv, teams = core.memory.kv, core.memory.on_device.weights.moe_backends
    captured = core.runner.executor.graphs
    if captured is not None:
        captured._runs_ahead = False  # tokens are not the likeliest ones
    total = context + steps + _WARM_STEPS + 1
    sequences = [kv.allocator.open(total) for _ in range(batch)]
    tokens = [17 + 13 * n for n in range(batch)]
    times: list[tuple[float, float, float]] = []
    counts = (0, 0, 0, 0.0)
    try:
        for number in range(_WARM_STEPS + steps):
            if number == _WARM_STEPS:
                counts = teams.counts() or counts
            parts = [
                SegmentRequest(sequence, context + number, [token], 1, total)
                for sequence, token in zip(sequences, tokens, strict=True)
            ]
            served = captured.served if captured is not None else None
            begin = time.perf_counter()
            logits = core.runner.executor.run(Step.build(parts))
            elapsed = time.perf_counter() - begin
            # Random weights end in loops; other tokens keep the routing alive.
            tokens = [(int(row.argmax()) + 31 * number) % len(row) for row in logits]
            computed = waited = 0.0
            if captured is not None and served is not None:
                computed = captured.served.computed_s - served.computed_s
                waited = captured.served.waited_s - served.waited_s
            times.append((elapsed, computed, waited))
        found, brought, left, cut = (
            (now - then) / steps for now, then in zip(teams.counts() or counts, counts, strict=True)
        )
    finally:
        for sequence in sequences:
            kv.allocator.close(sequence)
    step_s, computed_s, waited_s = (
        median(column) for column in zip(*times[_WARM_STEPS:], strict=True)
    )
    channel = None if captured is None else captured._channel
    share = None if channel is None else channel.link_share
    learned = None if share is None else share.learned(batch)
    return HybridStep(
        batch, context, step_s, computed_s, waited_s, found, brought + cut, left - cut,
        teams.nbytes, learned,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """What is timed.

    batches    decoding sequences, at the first of `contexts`
    contexts   positions before the tokens that are decoded, of one sequence
    steps      of each
    prompt     tokens of a prompt; 0: none
    chunk      of prompts, tokens that are computed at once: all experts come over the link for each
    """

    batches: Sequence[int] = (1, 4, 16)
    contexts: Sequence[int] = (1024, 131072)
    steps: int = 16
    prompt: int = 4096
    chunk: int = 4096

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Batches and contexts, the first ones of each first."""
        first = self.contexts[0]
        longer = [(1, context) for context in self.contexts[1:]]
        return [(self.batches[0], first), *longer, *((batch, first) for batch in self.batches[1:])]

    @property
    def positions(self) -> int:
        """That the largest case takes."""
        more = round_up(_WARM_STEPS + self.steps + 1, PAGE_TOKENS) + PAGE_TOKENS
        cases = [*self.cases, (1, round_up(self.prompt, PAGE_TOKENS))]
        return max(batch * (context + more) for batch, context in cases)


def run(
    folder: Path,
    shape: DeepSeekShape,
    gpu_memory: str,
    task: Task,
    *,
    quantization: str = "w4a8:32",
    host_memory: str = "100GiB",
    gpu: str = "0",
    traces: Sequence[Path] = (),
    progress: Callable[[str], None] = lambda what: None,
    found: Callable[[dict[str, Any]], None] = lambda content: None,
) -> dict[str, Any]:
    """Measure `shape`; the content of a benchmark file.

    The pack is made in `folder` unless it is there.  Its routers choose all experts alike; with
    `traces` steps are measured once more, with experts chosen as often as there.  `found` gets
    what is known after each case.  Raises MachineError without a GPU, and what loading raises.
    """
    device = open_device(gpu)
    progress("measuring memories and the link")
    rates = measure_rates(device, quantization)
    pack = pack_of(folder, shape, quantization, progress)
    progress("loading")
    begin = time.perf_counter()
    with ExitStack() as stack:
        engine = stack.enter_context(
            Engine(
                gpu_memory=gpu_memory,
                gpus=gpu,
                host_memory=host_memory,
                context=task.positions,
                max_batch=max(task.batches),
                max_prefill_tokens=min(task.chunk, task.prompt) or None,
                check_weights=False,  # all layers lie at the same place of the disk
                verify_reads="never",
                disk_reader="buffered",
            )
        )
        assert engine._device is not None
        watch = stack.enter_context(GpuWatch(engine._device, "loading"))
        model = engine.load_model(pack)
        loaded_s = time.perf_counter() - begin
        fill_context(model)
        watch.next("between")
        share = model.plan.device
        content: dict[str, Any] = {
            "benchmark": "hybrid",
            "machine": describe(machine_for(folder)),
            "gpu": device.name,
            "shape": asdict(shape),
            "quantization": quantization,
            "rates": asdict(rates),
            "task": asdict(task),
            "gpu_memory": gpu_memory,
            "gpu_used_bytes": max(watch.most_bytes.values()),
            "gpu_most_bytes": watch.most_bytes,
            "load_s": loaded_s,
            "expert_slots": share.expert_slots,
            "staging_slots": share.staging_slots,
            "link_share": share.link_share,
            "reserved": dict(share.reserved),
            "host_reserved": dict(model.plan.reserved),
            "steps": [],
            "prompt": None,
            "sparse_layers": shape.layers - shape.dense_layers,
        }
        found(content)
        measure = _Measure(model, task, rates, watch, progress, content, found)
        measure.steps("uniform")
        if traces:
            skew(model, shape, recorded_frequencies(traces, shape))
            measure.steps("recorded")
        if task.prompt:
            measure.prompt()
    return content


def pack_of(
    folder: Path,
    shape: DeepSeekShape,
    quantization: str,
    progress: Callable[[str], None] = lambda what: None,
) -> Path:
    """Where the pack of `shape` is in `folder`, which is for it alone; made unless it is there."""
    if not (folder / "pack").exists():
        write_tiled_deepseek(folder, shape, quantization, progress=progress)
    return folder / "pack"


def skew(model: LoadedModel, shape: DeepSeekShape, frequencies: Tensor) -> None:
    """Let the model's routers choose experts so often: f32 [layers with experts, experts]."""
    weights: Any = model._core.runner._weights

    def change() -> None:
        with weights.lease(BlockId(shape.dense_layers, BlockKind.ROUTER)) as params:
            # Of logits, where inputs have a mean square of 1.
            deviation = float(params["router"].data.float().norm(dim=1).mean())
        biases = router_biases(frequencies, shape, deviation)
        for layer, bias in enumerate(biases, shape.dense_layers):
            with weights.lease(BlockId(layer, BlockKind.ROUTER)) as params, torch.inference_mode():
                params["router_bias"].data.copy_(bias)

    model._loop.call(change)


@dataclass(frozen=True, slots=True)
class _Measure:
    """Cases one after the other; each one's result is in `content` when it ends."""

    model: LoadedModel
    task: Task
    rates: Rates
    watch: GpuWatch
    progress: Callable[[str], None]
    content: dict[str, Any]
    found: Callable[[dict[str, Any]], None]

    def steps(self, routing: str) -> None:
        """All batches and contexts."""
        for batch, context in self.task.cases:
            self._begin(f"{batch} sequences after {context} positions, {routing} routing")
            step = decode_steps(self.model, batch, context, self.task.steps)
            self.content["steps"].append({"routing": routing} | _as_row(step, self.rates))
            self._end()

    def prompt(self) -> None:
        """The prompt."""
        self._begin(f"a prompt of {self.task.prompt}")
        self.content["prompt"] = _prompt(self.model, self.task.prompt, self.rates)
        self._end()

    def _begin(self, what: str) -> None:
        self.progress(what)
        self.watch.next(what)

    def _end(self) -> None:
        self.watch.next("between")
        self.content["gpu_used_bytes"] = max(self.watch.most_bytes.values())
        self.found(self.content)


def _as_row(step: HybridStep, rates: Rates) -> dict[str, Any]:
    """A case, with what follows from it."""
    allowed_s = step.allowed_s(rates.shared_link, rates.shared_cpu)
    return asdict(step) | {
        "tokens_per_s": step.batch / step.step_s,
        "allowed_s": allowed_s,
        "share": allowed_s / step.step_s,
        "link_s": step.brought * step.expert_bytes / rates.shared_link,
        "host_s": max(0.0, step.step_s - step.computed_s - step.waited_s),
        "cpu_rate": step.left * step.expert_bytes / step.computed_s if step.computed_s else None,
    }


def _prompt(model: LoadedModel, tokens: int, rates: Rates, runs: int = 2) -> dict[str, Any]:
    """A prompt for which all experts go over the link; the median of some."""
    prompt_rate(model, tokens)  # compiles kernels
    found = [prompt_rate(model, tokens) for _ in range(runs)]
    speeds = [rate for rate, _ in found]
    phase = found[-1][1]
    return {
        "tokens": tokens,
        "tokens_per_s": median(speeds),
        "link_busy": phase.link_s / phase.seconds if phase.seconds else 0.0,
        "link_share": phase.link_bytes / phase.seconds / rates.link if phase.seconds else 0.0,
    }
