"""Decoding after long contexts, with keys and values all near and at several levels.

The model is a tiled pack; keys and values of earlier positions are random numbers, so that a long
context costs no prompt.  Others decode after as many positions with weights of the same shape.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

import torch

from hmt.base.errors import HMTError
from hmt.base.units import round_up
from hmt.bench.ceilings import ReadRate, computing_with
from hmt.bench.environment import describe
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import SegmentRequest, Step
from hmt.engine import Engine, LoadedModel
from hmt.hardware.machine import machine_for
from hmt.kernels.cpu.threads import usable_threads
from hmt.kvcache import TieredKV
from hmt.memory.device import open_device
from hmt.profiling.random_model import Shape
from hmt_bench.gpu import SHAPES, pack_of
from hmt_bench.larger_models import LAYER_SETS, write_large_pack

_WARM_STEPS = 4
_SHORT = 512  # positions, of steps that show what all but attention takes


@dataclass(frozen=True, slots=True)
class Task:
    """What is timed: the last `steps` tokens of each of `contexts` positions, one by one."""

    contexts: Sequence[int] = (32768, 131072)
    steps: int = 24

    @property
    def positions(self) -> int:
        """That the longest case takes."""
        return round_up(max(self.contexts), PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Way:
    """Where keys and values lie.

    near  memory for those that stay where layers compute; None: for all of them
    host  how the others are kept in host memory
    """

    near: str | None = None
    host: str = "exact"

    @property
    def name(self) -> str:
        """For tables."""
        return "all near" if self.near is None else f"{self.near} near, host {self.host}"


@dataclass(frozen=True, slots=True)
class KVStep:
    """Means over steps, in seconds and bytes: once in a while a step does more than others.

    step_s        all of it
    median_s      the median of that
    attended_s    in which the CPU attended to pages in host memory, and
    waited_s      in which it waited for a layer's query, while the device computed
    host_bytes    what it read for that
    fetched_bytes what the device read in host memory meanwhile
    moved_bytes  written back to host memory, a step's share
    device_pages, host_pages   where the text's pages are
    """

    context: int
    step_s: float
    median_s: float
    attended_s: float = 0.0
    waited_s: float = 0.0
    host_bytes: float = 0.0
    fetched_bytes: float = 0.0
    moved_bytes: float = 0.0
    device_pages: int = 0
    host_pages: int = 0

    def as_row(self, ram_rate: float, short_s: float) -> dict[str, Any]:
        """With what follows from it; `short_s`: a step after a short context."""
        rate = self.host_bytes / self.attended_s if self.attended_s else None
        link = self.fetched_bytes / self.attended_s if self.attended_s else None
        return asdict(self) | {
            "tokens_per_s": 1 / self.step_s,
            "rest_s": self.step_s - self.attended_s - self.waited_s,
            "short_step_s": short_s,
            "attended_rate": rate,
            "link_rate": link,
            "read_share": (rate + link) / ram_rate if rate and link is not None else None,
            "ram_share": rate / ram_rate if rate else None,
        }


class Peer(Protocol):
    """Another engine with a model of the same shape."""

    name: str
    note: str

    def decode(self, context: int, steps: int) -> list[float]:
        """Seconds of each of `steps` tokens after `context` positions."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


PeerMaker = Callable[[Shape, int], Sequence[Callable[[], Peer]]]


def run(
    folder: Path,
    shape: str,
    ways: Sequence[Way],
    task: Task,
    *,
    quantization: str | None = "w4a16:32",
    gpu: str | None = "0",
    gpu_memory: str | None = None,
    host_memory: str = "64GiB",
    peers: PeerMaker | None = None,
    progress: Callable[[str], None] = lambda what: None,
    save: Callable[[dict[str, Any]], None] = lambda content: None,
) -> dict[str, Any]:
    """Measure `shape` in each way; the content of a benchmark file.

    The pack is made in `folder` unless it is there; of LAYER_SETS there are no peers.  gpu None: on
    the CPU alone.  `save` gets what there is after each way and each case of a peer, which may take
    long.  Raises MachineError where there is no such GPU, and what loading raises.
    """
    name = None
    if gpu is not None:
        name = open_device(gpu).name
    progress("measuring memory")
    with computing_with(usable_threads()):
        reading = ReadRate(1 << 30)
        for _ in range(5):
            reading.sample()
    ram_rate = reading.rate
    del reading
    encoding = quantization or "none"
    if shape in LAYER_SETS:
        sizes: Any = LAYER_SETS[shape]
        pack = write_large_pack(folder / f"{shape}-{encoding}", sizes, encoding, progress)
    else:
        sizes = SHAPES[shape]
        pack = pack_of(folder, shape, encoding, progress)
    content: dict[str, Any] = {
        "benchmark": "kv-speed",
        "machine": describe(machine_for(folder)),
        "gpu": name,
        "shape": {"name": shape, **asdict(sizes)},
        "quantization": quantization,
        "ram_rate": ram_rate,
        "task": asdict(task),
        "results": [],
        "peers": [],
    }
    memory = {"gpus": gpu} if gpu is not None else {}
    if gpu_memory is not None and gpu is not None:
        memory["gpu_memory"] = gpu_memory
    for way in ways:
        content["results"].append(
            _in_a_way(pack, way, task, ram_rate, memory, host_memory, progress)
        )
        save(content)
    for make in peers(sizes, task.positions) if peers is not None else ():
        found: dict[str, Any] = {"cases": []}
        content["peers"].append(found)
        _with_peer(found, make, task, progress, lambda: save(content))
    return content


def _in_a_way(
    pack: Path,
    way: Way,
    task: Task,
    ram_rate: float,
    memory: dict[str, str],
    host_memory: str,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The result of one way; what failed, where it did."""
    progress(f"{way.name}: loading")
    options: dict[str, Any] = dict(memory)
    if way.near is not None:
        options |= {"kv_gpu_memory": way.near, "kv_quant": f"{way.host},{way.host}"}
    begin = time.perf_counter()
    try:
        with Engine(
            **options,
            host_memory=host_memory,
            context=task.positions,
            max_batch=1,
            max_prefill_tokens=256,
            check_weights=False,
            verify_reads="never",
            disk_reader="buffered",
        ) as engine:
            model = engine.load_model(pack)
            loaded_s = time.perf_counter() - begin
            short = decode_steps(model, _SHORT, task.steps)
            cases = []
            for context in task.contexts:
                progress(f"{way.name}: {context} positions")
                step = decode_steps(model, context, task.steps)
                cases.append(step.as_row(ram_rate, short.step_s))
            used = engine._device.used_bytes() if engine._device is not None else 0
            captured = model._core.runner.executor.graphs  # type: ignore[attr-defined]
    except (HMTError, RuntimeError) as error:
        return {"name": way.name, **asdict(way), "failure": str(error)[:300]}
    return {
        "name": way.name,
        **asdict(way),
        "load_s": loaded_s,
        "gpu_used_bytes": used,
        "captured": captured is not None and captured.works,
        "cases": cases,
    }


def _with_peer(
    found: dict[str, Any],
    make: Callable[[], Peer],
    task: Task,
    progress: Callable[[str], None],
    save: Callable[[], None],
) -> None:
    """Add to `found` what a peer makes of each context."""
    with ExitStack() as stack:
        progress("making a peer")
        try:
            peer = make()
            stack.callback(peer.close)
        except (HMTError, RuntimeError, ImportError, ValueError, TypeError) as error:
            found["failure"] = str(error)[:300]
            return
        found |= {"name": peer.name, "note": peer.note}
        for context in task.contexts:
            progress(f"{peer.name}: {context} positions")
            try:
                times = peer.decode(context, min(task.steps, 4))
            except (RuntimeError, ImportError, ValueError, TypeError) as error:
                found["cases"].append({"context": context, "failure": str(error)[:300]})
                continue
            step_s = median(times)
            found["cases"].append(
                {"context": context, "step_s": step_s, "tokens_per_s": 1 / step_s}
            )
            save()


def decode_steps(model: LoadedModel, context: int, steps: int) -> KVStep:
    """Decode the last tokens of `context` positions; those before hold random numbers."""
    return model._loop.call(lambda: _decode_steps(model, context, steps))


def _decode_steps(model: LoadedModel, context: int, steps: int) -> KVStep:
    core: Any = model._core
    kv = core.memory.kv
    start = (context - steps - _WARM_STEPS) // PAGE_TOKENS * PAGE_TOKENS
    sequence, token = kv.allocator.open(context), 17
    times: list[tuple[float, ...]] = []
    moved = 0
    try:
        _fill(core, sequence, start)
        for number in range(_WARM_STEPS + steps):
            part = SegmentRequest(sequence, start + number, [token], 1, context)
            before = _counted(kv)
            if number == _WARM_STEPS:
                moved = -_moved(kv)
            begin = time.perf_counter()
            logits = core.runner.executor.run(Step.build([part]))
            elapsed = time.perf_counter() - begin
            token = (int(logits[0].argmax()) + 31 * number) % logits.shape[1]
            now = _counted(kv)
            times.append((elapsed, *(b - a for a, b in zip(before, now, strict=True))))
        moved += _moved(kv)
        near, host = _pages(kv, sequence, context)
    finally:
        kv.allocator.close(sequence)
    columns = [*zip(*times[_WARM_STEPS:], strict=True)]
    step_s, *counted = (mean(column) for column in columns)
    page = 0
    if isinstance(kv, TieredKV) and kv._places.stores.host is not None:
        page = sum(pages.layout.page_bytes * len(m) for pages, m in kv._places.stores.host.kinds)
    attended_s, waited_s, read, fetched = counted
    return KVStep(
        context, step_s, median(columns[0]), attended_s, waited_s, read, fetched,
        moved * page / steps, near, host,
    )  # fmt: skip


def _fill(core: Any, sequence: int, context: int) -> None:
    """Let a sequence hold random numbers at its first positions."""
    kv = core.memory.kv
    dtype = core.runner.executor._model.dtype
    store = kv._places.stores.device if isinstance(kv, TieredKV) else kv._store
    on_device = core.memory.on_device
    with torch.inference_mode():
        for pages, _ in store.kinds:
            for some in pages.memory.split(1024):
                some.view(dtype).normal_(0, 0.5)
        if on_device is not None:
            if on_device.device.where.type == "cuda":
                torch.cuda.synchronize()
            with on_device.device.compute_stream():
                _grow(kv, sequence, context)
        else:
            _grow(kv, sequence, context)


def _grow(kv: Any, sequence: int, context: int) -> None:
    """Make a tiered sequence's pages, most of which move away on the way."""
    if not isinstance(kv, TieredKV):
        return
    held = kv.allocator.sequences[sequence]
    made = len(held.pages)
    for _ in kv.allocator.make_pages(sequence, made, context // PAGE_TOKENS - made):
        pass
    held.tokens = context


def _counted(kv: Any) -> tuple[float, ...]:
    """What the CPU has spent on attention, waited, and read, and what the device has fetched."""
    if not isinstance(kv, TieredKV):
        return 0.0, 0.0, 0.0, 0.0
    account = kv.account
    return account.host_s, account.waited_s, account.host_bytes, account.fetched_bytes


def _moved(kv: Any) -> int:
    """Pages that went to host memory."""
    return kv.account.moved.get("near to host", 0) if isinstance(kv, TieredKV) else 0


def _pages(kv: Any, sequence: int, context: int) -> tuple[int, int]:
    """Of a text, near and in host memory."""
    if not isinstance(kv, TieredKV):
        return -(-context // PAGE_TOKENS), 0
    levels = kv._places.page_table.level_of(kv.allocator.sequences[sequence].pages)
    return int((levels == 0).sum()), int((levels == 1).sum())
