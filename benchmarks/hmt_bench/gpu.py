"""Decoding and prompts with a GPU: a model that fits on it, and models that do not.

Models are tiled packs: of full size in memory, and small on the disk.  Speeds are compared with
what the machine's own measured rates allow, and with what others make of the same shape, turn by
turn.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from hmt.base.errors import HMTError, MachineError
from hmt.base.units import parse_bytes, round_up
from hmt.bench.environment import describe
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.request import Request
from hmt.engine import Engine, LoadedModel, Phase
from hmt.hardware.machine import machine_for
from hmt.memory.device import open_device
from hmt.profiling.random_model import Shape
from hmt.weights import BlockLayout
from hmt_bench.aliased_pack import write_tiled_pack
from hmt_bench.gpu_rates import Rates, measure_rates

SHAPES = {
    # Llama-3-8B, Llama-3-70B, Qwen3-30B-A3B, and one to try the benchmark with.
    "8b": Shape(32, 4096, 14336, 32, 8, vocab_size=128256),
    "70b": Shape(80, 8192, 28672, 64, 8, vocab_size=128256),
    "30b-moe": Shape(
        48, 2048, 768, 32, 4, 128, vocab_size=151936, experts=128, experts_per_token=8
    ),
    "small": Shape(8, 256, 512, 8, 4, vocab_size=512),
}
_PROMPT_TOKENS = 16
_PEER_LAYERS = 3  # of a model that does not fit


class Peer(Protocol):
    """Another engine with a model of the same shape.

    most_tokens   to decode in a run, where it takes long
    """

    name: str
    note: str
    most_tokens: int

    def decode_rate(self, batch: int, tokens: int) -> float:
        """Tokens per second of `batch` sequences that decode `tokens` each."""
        ...

    def prompt_rate(self, tokens: int) -> float:
        """Tokens per second of a prompt."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


PeerMaker = Callable[[Shape, int, bool], Peer]


def open_peer(shape: Shape, gpu_bytes: int, fits: bool) -> Peer:
    """Compiled torch for a model that `fits`, else accelerate's offloading.

    Raises MachineError where there is none for this shape.
    """
    if shape.experts:
        raise MachineError("no peer computes a mixture of experts here")
    if fits:
        from hmt_bench.torch_llama import TorchLlama, random_weights

        return TorchLlama(shape, random_weights(shape, torch.device("cuda"), torch.bfloat16))
    from hmt_bench.offloaded_peer import OffloadedPeer

    return OffloadedPeer(shape, gpu_bytes, layers=min(_PEER_LAYERS, shape.layers))


def llama_cpp(program: Path, folder: Path) -> PeerMaker:
    """Makes a peer of llama.cpp's benchmark `program`, whose models are kept in `folder`."""

    def open_llama_cpp(shape: Shape, gpu_bytes: int, fits: bool) -> Peer:
        from hmt_bench.llama_bench import LlamaBench

        return LlamaBench(program, folder, shape, gpu_bytes)

    return open_llama_cpp


@dataclass(frozen=True, slots=True)
class Task:
    """What is timed: `runs` times `tokens` of each of `batches`, and a prompt (0: none)."""

    batches: Sequence[int] = (1, 32)
    tokens: int = 64
    prompt: int = 2048
    runs: int = 3

    @property
    def context(self) -> int:
        """Positions that the largest part of it takes."""
        each = round_up(_PROMPT_TOKENS + self.tokens + 1, PAGE_TOKENS)
        return max(max(self.batches) * each, round_up(self.prompt + 1, PAGE_TOKENS))


def run(
    folder: Path,
    shape: str,
    gpu_memory: Sequence[str],
    task: Task,
    *,
    quantization: str = "w4a16:32",
    host_memory: str = "100GiB",
    gpu: str = "0",
    tp: int = 1,
    peer: PeerMaker | None = open_peer,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure `shape` with each budget; the content of a benchmark file.

    The pack is made in `folder` unless it is there.  `peer` None leaves the others out.  Raises
    MachineError without a GPU, and what loading raises.
    """
    device = open_device(gpu.split(",")[0])
    progress("measuring memories and the link")
    rates = measure_rates(device, quantization)
    pack = pack_of(folder, shape, quantization, progress)
    options: dict[str, Any] = {"host_memory": host_memory, "gpus": gpu, "tp": tp}
    results = [
        _with_budget(pack, SHAPES[shape], memory, task, rates, options, peer, progress)
        for memory in gpu_memory
    ]
    return {
        "benchmark": "gpu",
        "machine": describe(machine_for(folder)),
        "gpu": device.name,
        "shape": {"name": shape, **asdict(SHAPES[shape])},
        "quantization": quantization,
        "rates": asdict(rates),
        "task": asdict(task),
        "results": results,
    }


def pack_of(
    folder: Path, shape: str, quantization: str, progress: Callable[[str], None] = lambda what: None
) -> Path:
    """Where the pack of `shape` is in `folder`; made unless it is there."""
    parent = folder / f"{shape}-{quantization.replace(':', '-')}"
    if not (parent / "pack").exists():
        write_tiled_pack(parent, SHAPES[shape], quantization, written_layers=1, progress=progress)
    return parent / "pack"


def _with_budget(
    pack: Path,
    shape: Shape,
    memory: str,
    task: Task,
    rates: Rates,
    options: Mapping[str, Any],
    peer: PeerMaker | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The result of one budget."""

    def tell(what: str) -> None:
        progress(f"{memory} of the GPU: {what}")

    with ExitStack() as stack:
        tell("loading")
        begin = time.perf_counter()
        engine = Engine(
            gpu_memory=memory,
            **options,
            context=task.context,
            max_batch=max(task.batches),
            max_prefill_tokens=task.prompt or None,
            check_weights=False,
            verify_reads="never",
            disk_reader="buffered",  # the pack is small: only its first layers come from the disk
        )
        model = stack.enter_context(engine).load_model(pack)
        loaded_s = time.perf_counter() - begin
        for batch in task.batches:
            decode_rate(model, batch, 4)  # captures
        if task.prompt:
            prompt_rate(model, task.prompt)
        used = sum(device.used_bytes() for device in engine.devices)  # before a peer takes its own
        plan, layouts = model.plan, model.prepared.layouts
        read = read_bytes(plan, layouts, shape)
        rival: Peer | None = None
        told: dict[str, str] = {}
        if peer is not None:
            tell("making a peer")
            try:
                rival = peer(shape, parse_bytes(memory), not (read["copied"] or read["host"]))
                stack.callback(rival.close)
                told = {"name": rival.name, "note": rival.note}
            except (HMTError, RuntimeError) as error:
                told = {"failure": str(error)[:300]}
        timed = [measure(model, rival, batch, task, tell) for batch in task.batches]
        if task.prompt:
            timed.append(measure(model, rival, 0, task, tell))
    cases = [
        case(one, task, read_bytes(plan, layouts, shape, max(1, one.batch)), rates) for one in timed
    ]
    return {
        "gpu_memory": memory,
        "gpu_used_bytes": used,
        "load_s": loaded_s,
        "read_bytes": read,
        **({"peer": told} if told else {}),
        "cases": [asdict(one) for one in cases],
    }


@dataclass(frozen=True, slots=True)
class Timed:
    """Tokens per second of each run, HMT's and a peer's, and what HMT counted meanwhile.

    batch   sequences that decode; 0: a prompt
    """

    batch: int
    own: list[float]
    peer: list[float]
    phases: list[Phase]
    peer_failure: str = ""


def measure(
    model: LoadedModel,
    peer: Peer | None,
    batch: int,
    task: Task,
    progress: Callable[[str], None] = lambda what: None,
) -> Timed:
    """Time a loaded model and its peer by turns, after a run of each that does not count."""
    timed = Timed(batch, [], [], [])
    name = _name(batch, task)
    for number in range(task.runs + 1):
        progress(f"{name}, run {number} of {task.runs}")
        rate, phase = (
            decode_rate(model, batch, task.tokens) if batch else prompt_rate(model, task.prompt)
        )
        timed.own.append(rate)
        timed.phases.append(phase)
        if peer is not None and not timed.peer_failure:
            count = min(task.tokens, peer.most_tokens)
            try:
                rate = peer.decode_rate(batch, count) if batch else peer.prompt_rate(task.prompt)
                timed.peer.append(rate)
            except RuntimeError as error:
                timed = replace(timed, peer=[], peer_failure=str(error)[:300])
    return replace(timed, own=timed.own[1:], peer=timed.peer[1:], phases=timed.phases[1:])


@dataclass(frozen=True, slots=True)
class Case:
    """Medians of one batch that decodes, or of a prompt (batch 0).

    allowed_tokens_per_s   by what a step has to read, at the rates of this machine: on the GPU, and
                           from host memory by CPU and link together
    share                  of it; both None for a prompt, which is bound by arithmetic or the link
    away_share             of what the reading from host memory alone would allow
    link_busy, cpu_busy    shares of the time in which the link copied, and CPU kernels computed
    link_share             bytes copied, of what the link alone can copy in the time
    ratio                  to the peer; None where none ran
    """

    name: str
    batch: int
    tokens_per_s: float
    runs: tuple[float, ...]
    allowed_tokens_per_s: float | None
    share: float | None
    away_share: float | None
    link_busy: float
    link_share: float
    cpu_busy: float
    peer_tokens_per_s: float | None
    peer_runs: tuple[float, ...]
    peer_failure: str
    ratio: float | None


def case(timed: Timed, task: Task, read: Mapping[str, int], rates: Rates) -> Case:
    """What follows from the runs, the bytes that a step reads, and the machine's rates."""
    own = median(timed.own)
    peer = median(timed.peer) if timed.peer else None
    away_s = (read["copied"] + read["host"]) / (rates.shared_link + rates.shared_cpu)
    step_s = away_s + read["device"] / rates.device
    steps = own / timed.batch if timed.batch else 0.0
    seconds = sum(phase.seconds for phase in timed.phases) or 1.0
    copied = sum(phase.link_bytes for phase in timed.phases)
    return Case(
        name=_name(timed.batch, task),
        batch=timed.batch,
        tokens_per_s=own,
        runs=tuple(timed.own),
        allowed_tokens_per_s=timed.batch / step_s if timed.batch else None,
        share=steps * step_s if timed.batch else None,
        away_share=steps * away_s if timed.batch and away_s else None,
        link_busy=sum(phase.link_s for phase in timed.phases) / seconds,
        link_share=copied / seconds / rates.link,
        cpu_busy=sum(phase.kernel_s for phase in timed.phases) / seconds,
        peer_tokens_per_s=peer,
        peer_runs=tuple(timed.peer),
        peer_failure=timed.peer_failure,
        ratio=own / peer if peer else None,
    )


def read_bytes(
    plan: Plan, layouts: Mapping[BlockId, BlockLayout], shape: Shape, tokens: int = 1
) -> dict[str, int]:
    """Parameter bytes that a step of `tokens` reads: on the device, copied there, and by the CPU.

    Of experts, those that so many tokens choose between them where all are as likely, and of these
    what the device's cache then holds.
    """
    read = dict.fromkeys(("device", "copied", "host"), 0.0)
    used = cached = 0.0
    if shape.experts:
        used = 1 - (1 - shape.experts_per_token / shape.experts) ** tokens
        cached = plan.device.expert_slots / shape.experts
    for block, home in plan.homes.items():
        if block.kind is BlockKind.EMBEDDING:
            continue  # a row per token
        nbytes = float(layouts[block].parameter_bytes)
        here = float(home is Tier.DEVICE)
        if block.kind is BlockKind.EXPERT:
            nbytes *= used
            here = max(here, cached)
        read["device"] += here * nbytes
        read["copied" if block in plan.device.computes else "host"] += (1 - here) * nbytes
    return {where: round(nbytes) for where, nbytes in read.items()}


def decode_rate(model: LoadedModel, batch: int, tokens: int) -> tuple[float, Phase]:
    """Tokens per second of `batch` sequences that decode `tokens` each, and their account."""
    prompts = [[16 + 7 * n + i for i in range(_PROMPT_TOKENS)] for n in range(batch)]
    requests = [Request(input=ids, max_new_tokens=tokens + 1, ignore_eos=True) for ids in prompts]
    streams = model.stream_batch(requests)
    try:
        for _ in "ab":  # the prompt's, and of a step that may have to capture
            for stream in streams:
                next(stream)
        model.reset_summary()
        begin = time.perf_counter()
        for _ in range(tokens - 1):
            for stream in streams:
                next(stream)
        seconds = time.perf_counter() - begin
        return batch * (tokens - 1) / seconds, model.summary().generation
    finally:
        for stream in streams:
            stream.close()


def prompt_rate(model: LoadedModel, tokens: int) -> tuple[float, Phase]:
    """Tokens per second of a prompt, and its account."""
    ids = [16 + (time.perf_counter_ns() + 31 * i) % 400 for i in range(tokens)]
    model.reset_summary()
    begin = time.perf_counter()
    model.infer(Request(input=ids, max_new_tokens=1))
    return tokens / (time.perf_counter() - begin), model.summary().prompt


def _name(batch: int, task: Task) -> str:
    if not batch:
        return f"prompt of {task.prompt}"
    return f"{batch} sequence{'s' if batch > 1 else ''}, {task.tokens} tokens"
