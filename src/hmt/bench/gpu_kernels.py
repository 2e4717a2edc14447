"""Kernels of a GPU by themselves: their share of what its memory and its arithmetic can do.

Calls are captured into a CUDA graph, as the engine captures its steps, and each call of a graph
computes on memory of its own, so that no weight is found in the caches.  Kernels are compiled
before, by as many processes as there are cores, into Triton's cache on the disk.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hmt.base.units import GIB
from hmt.bench.competitors import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Competitor,
    copy_of_weight,
    formats,
    linear_competitors,
    random_weight,
)
from hmt.bench.environment import describe
from hmt.bench.kernels import result_of
from hmt.contracts.encoding import Activations
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.store import StateRun
from hmt.hardware.machine import machine_for
from hmt.kernels import ops
from hmt.kernels.cpu.threads import usable_threads
from hmt.kernels.reference import (
    AttentionMetadata,
    DeltaHeads,
    PagedSegment,
    PageEncoding,
    PageLayout,
    Pages,
    StateRuns,
)
from hmt.kernels.triton.moe.moe_dispatch import experts_by_table
from hmt.kernels.triton.moe.weight_table import make_table

SHAPES = ((4096, 4096), (28672, 4096), (57344, 8192))  # o of 8B; gate and up of 8B and of 70B
TOKENS = (1, 32, 2048)
CONTEXTS = ((1, 32768), (1, 131072), (32, 4096))  # sequences, positions
EXPERT_TOKENS = (1, 16, 4096)

_MEMORY_BYTES = 512 << 20  # of all copies; the L2 of an H200 holds 50 MiB
_SAMPLE_S = 0.02
_PEAK_SIZE = 8192
_LATENT = (128, 576, 512)  # query heads, numbers of a row, of them values: DeepSeek-V3's
_EXPERT = (2048, 7168)  # DeepSeek-V3's
_EXPERTS, _TOP = 64, 8
_ROUTINGS = 8
_EXPERT_FORMATS = ("w4a16:32", "w4a8:32", "nvfp4a16", "nvfp4a8")
_ROWS = (1, 2048)  # of what comes between products
_GROUPS, _KEPT = 8, 4  # of DeepSeek-V3's router
_BETWEEN = (
    "add, norm",
    "add, norm, round",
    "rope",
    "swiglu",
    "top 8 of 256, in groups",
    "top 8 of 256",
)
_DELTA_HEADS = DeltaHeads(16, 32, 128, 128)  # Qwen3-Next's
_TAPS = 4
_RECURRENT = ("convolution over time", "delta rule")
_SEQUENCES = ((1, 2048), (1, 1), (8, 1), (64, 1))  # and tokens of each, for recurrent state
_PAGES = (PageEncoding.BF16, PageEncoding.INT8, PageEncoding.FP8)
_LATENT_PAGES = (PageEncoding.BF16, PageEncoding.FP8)
_PROCESS_BYTES = 4 * GIB  # that one which compiles may take of a GPU: 1.6 are 64 experts

Group = tuple[str, int, list[Competitor]]
Pairs = Sequence[tuple[int, int]]


def run(
    gpu: str = "0",
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    contexts: Sequence[tuple[int, int]] = CONTEXTS,
    names: set[str] | None = None,
    runs: int = 5,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure every kernel on a CUDA device, or those called `names`; a benchmark file's content.

    Shares are of the best rates that torch's own products reach on the same card: matrix by vector
    for memory, 8192 x 8192 x 8192 for arithmetic.
    """
    where = torch.device(f"cuda:{gpu}" if gpu.isdecimal() else gpu)
    torch.cuda.set_device(where)
    progress("compiling")
    _compile_all(where, (shapes, tokens, contexts), names)
    read_rate, peaks = device_read_rate(), _peaks()
    results, eager = [], []
    with where:
        for what, count, contenders in _groups(shapes, tokens, contexts, names):
            progress(f"{what}, {count}")
            for contender in contenders:
                times, captured = _measure(contender, runs)
                results.append(result_of(what, count, contender, times, read_rate, peaks))
                if not captured:
                    eager.append(f"{what}, {count}: {contender.name}")
            del contenders
            torch.cuda.empty_cache()
    return {
        "benchmark": "gpu-kernels",
        "machine": describe(machine_for(Path.cwd())),
        "gpu": torch.cuda.get_device_name(where),
        "read_rate": read_rate,
        "peaks": peaks,
        "not_captured": eager,
        "results": [asdict(result) for result in results],
    }


def device_read_rate() -> float:
    """Bytes per second at which the GPU reads its memory, at its best."""
    memory = torch.ones(2 * GIB, dtype=torch.bfloat16, device="cuda").view(-1, 8192)
    vector = torch.ones(8192, dtype=torch.bfloat16, device="cuda")
    rates = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        torch.mv(memory, vector)
        end.record()
        end.synchronize()
        rates.append(memory.nbytes / (begin.elapsed_time(end) * 1e-3))
    del memory
    torch.cuda.empty_cache()
    return max(rates)


def _compile_all(
    where: torch.device, cases: tuple[Pairs, Sequence[int], Pairs], names: set[str] | None
) -> None:
    """Compile what `_groups(*cases, names)` calls; kernels of one encoding in one process."""
    chosen = _tasks(names)
    fit = torch.cuda.mem_get_info(where)[0] // _PROCESS_BYTES
    processes = max(1, min(usable_threads(), len(chosen), fit))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(partial(_compile, where, cases), chosen):
            pass


def _tasks(names: set[str] | None) -> list[set[str]]:
    """All names, or of `names`, in the parts in which they are compiled."""
    latent, pages = map(_latent_name, _LATENT_PAGES), map(_page_name, _PAGES)
    parts = [*({name} for name in (*latent, *pages, *formats())), set(_BETWEEN), set(_RECURRENT)]
    return [some for part in parts if (some := part if names is None else part & names)]


def _compile(
    where: torch.device, cases: tuple[Pairs, Sequence[int], Pairs], names: set[str]
) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(where)
    with where:
        for _, _, contenders in _groups(*cases, names, memory_bytes=0):
            for contender in contenders:
                contender.calls[0]()
            del contenders
            torch.cuda.empty_cache()
    torch.cuda.synchronize()


def _peaks() -> dict[str, float]:
    """Operations per second of torch's largest products."""
    size, found = _PEAK_SIZE, {}
    wide = torch.randn(2, size, size, device="cuda").bfloat16()
    codes = torch.randint(-127, 128, (2, size, size), dtype=torch.int8, device="cuda")
    products = {
        "bf16": partial(torch.mm, wide[0], wide[1].t()),
        "int8": partial(torch._int_mm, codes[0], codes[1].t()),
    }
    for name, product in products.items():
        times, _ = _measure(Competitor("torch", name, (product,), 0, 0, name), 5)
        found[name] = 2 * size**3 / min(times)
    return found


def _measure(contender: Competitor, runs: int) -> tuple[list[float], bool]:
    """Seconds per call in each round, and whether calls could be captured."""
    for call in contender.calls:
        call()  # compiles, and makes what kernels keep
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    captured = True
    try:
        with torch.cuda.graph(graph):
            for call in contender.calls:
                call()
        once: Callable[[], object] = graph.replay
    except RuntimeError:
        captured = False
        torch.cuda.synchronize()

        def once() -> None:
            for call in contender.calls:
                call()

    first = _seconds(once, 1)
    count = max(1, math.ceil(_SAMPLE_S / first))
    times = [_seconds(once, count) / len(contender.calls) for _ in range(runs)]
    return times, captured


def _seconds(once: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        once()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / count


def _groups(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    contexts: Sequence[tuple[int, int]],
    names: set[str] | None,
    memory_bytes: int = _MEMORY_BYTES,
) -> Iterator[Group]:
    """(what is computed, tokens, who computes it), one after the other, each freed for the next.

    memory_bytes   of all copies of a weight, or of keys and values, beside the first
    """
    for rows, columns in shapes:
        for count in tokens:
            copies = memory_bytes if count < 64 else 0
            found = linear_competitors(rows, columns, count, copies, names)
            yield f"[{rows}, {columns}]", count, list(found)
    for count in EXPERT_TOKENS if shapes else ():
        what = f"{_TOP} of {_EXPERTS} experts [{_EXPERT[0]}, {_EXPERT[1]}]"
        yield what, count, list(_experts(count, names))
    for sequences, context in contexts:
        yield (
            f"attention to {context}",
            sequences,
            list(_attention(sequences, context, names, memory_bytes)),
        )
        yield (
            f"latent attention to {context}",
            sequences,
            list(_latent(sequences, context, names, memory_bytes)),
        )
    for rows in _ROWS if shapes else ():
        yield "between products", rows, list(_between(rows, names))
    for sequences, count in _SEQUENCES if shapes else ():
        what = f"recurrent state of {sequences}"
        yield what, sequences * count, list(_recurrent(sequences, count, names, memory_bytes))


def _experts(tokens: int, names: set[str] | None) -> Iterator[Competitor]:
    """Experts of one layer through a table, in as many random routings as the graph has calls."""
    width, hidden = _EXPERT
    x = torch.randn(tokens, hidden).bfloat16()
    routings = [
        torch.stack([torch.randperm(_EXPERTS)[:_TOP] for _ in range(tokens)])
        for _ in range(_ROUTINGS)
    ]
    scales = torch.rand(tokens, _TOP)
    for name in _EXPERT_FORMATS:
        if names is not None and name not in names:
            continue
        form = formats()[name]
        one = {
            "gate_proj": random_weight(form, (width, hidden)),
            "up_proj": random_weight(form, (width, hidden)),
            "down_proj": random_weight(form, (hidden, width)),
        }
        given = [
            (index, {key: copy_of_weight(weight) for key, weight in one.items()})
            for index in range(_EXPERTS)
        ]
        table = make_table(given, _EXPERTS, x.device)
        assert table is not None
        distinct = [len(routing.unique()) for routing in routings]
        nbytes = sum(weight.nbytes for weight in one.values())
        # The views own the memory that the table has addresses of.
        calls = tuple(partial(_routed, given, x, table, chosen, scales) for chosen in routings)
        peak = "int8" if form.activations is Activations.INT8_TOKEN else "bf16"
        operations = 2 * tokens * _TOP * 3 * width * hidden
        yield Competitor("hmt", name, calls, round(median(distinct) * nbytes), operations, peak)


def _routed(keep: object, x: Tensor, table: Any, chosen: Tensor, scales: Tensor) -> Tensor:
    return experts_by_table(x, table, chosen, scales, "silu")


def _page_name(encoding: PageEncoding) -> str:
    return f"kv {encoding.name.lower()}"


def _latent_name(encoding: PageEncoding) -> str:
    return f"latent {encoding.name.lower()}"


def _attention(
    sequences: int, context: int, names: set[str] | None, memory_bytes: int
) -> Iterator[Competitor]:
    """One token of each sequence: 32 query heads share 8 heads of 128 numbers."""
    for encoding in _PAGES:
        if names is None or _page_name(encoding) in names:
            layout = PageLayout(encoding, KV_HEADS, HEAD_DIM, HEAD_DIM, rows=True)
            yield _paged(_page_name(encoding), layout, HEADS, sequences, context, memory_bytes)


def _latent(
    sequences: int, context: int, names: set[str] | None, memory_bytes: int
) -> Iterator[Competitor]:
    """One token of each sequence: 128 query heads share rows of 576 numbers."""
    heads, row, value = _LATENT
    for encoding in _LATENT_PAGES:
        if names is None or _latent_name(encoding) in names:
            layout = PageLayout(encoding, 1, row, value, latent=True, rows=True)
            yield _paged(_latent_name(encoding), layout, heads, sequences, context, memory_bytes)


def _paged(
    name: str,
    layout: PageLayout,
    heads: int,
    sequences: int,
    context: int,
    memory_bytes: int,
) -> Competitor:
    per_sequence = -(-context // PAGE_TOKENS)
    nbytes = sequences * per_sequence * layout.page_bytes
    layers = 1 + memory_bytes // nbytes
    memory = torch.zeros(sequences * per_sequence, layers, layout.page_bytes, dtype=torch.uint8)
    pages = Pages(layout, memory)
    tables = torch.randperm(len(memory), device="cpu").view(sequences, per_sequence)
    runs = AttentionMetadata(
        [PagedSegment(at, 1, context - 1, table) for at, table in enumerate(tables.unbind())]
    )
    # Values are copies of one token's: what a kernel reads and computes does not depend on them.
    memory.view(torch.uint8).copy_(_page(layout))
    query = torch.randn(sequences, heads, layout.key_dim).bfloat16()
    attend = partial(ops.paged_attention_output, runs=runs, query=query, scale=layout.key_dim**-0.5)
    calls = tuple(partial(attend, pages, layer) for layer in range(layers))
    operations = 2 * sequences * context * heads * (layout.key_dim + layout.value_dim)
    return Competitor("hmt", name, calls, nbytes, operations, "bf16")


def _page(layout: PageLayout) -> Tensor:
    """One page of random keys and values: uint8 [page_bytes]."""
    memory = torch.zeros(1, 1, layout.page_bytes, dtype=torch.uint8)
    keys = torch.randn(PAGE_TOKENS, layout.heads, layout.key_dim).bfloat16()
    values = torch.randn(PAGE_TOKENS, layout.heads, layout.value_dim).bfloat16()
    table = torch.zeros(1, dtype=torch.int64, device="cpu")
    runs = AttentionMetadata([PagedSegment(0, PAGE_TOKENS, 0, table)])
    ops.append_pages(Pages(layout, memory), 0, runs, keys, None if layout.latent else values)
    return memory[0, 0]


def _between(rows: int, names: set[str] | None) -> Iterator[Competitor]:
    """What comes between products, for a width of 4096, and routers of 256 experts."""
    width, experts = 4096, 256
    x, residual = (torch.randn(rows, width).bfloat16() for _ in "xr")
    weight = torch.ones(width).bfloat16()
    query = torch.randn(rows, HEADS, HEAD_DIM).bfloat16()
    key = torch.randn(rows, KV_HEADS, HEAD_DIM).bfloat16()
    cos, sin = torch.rand(2, rows, HEAD_DIM)
    both = torch.randn(rows, 2 * 14336).bfloat16()
    logits, bias = torch.randn(rows, experts), torch.zeros(experts)
    route: dict[str, Any] = {"groups": _GROUPS, "kept_groups": _KEPT}
    row_bytes = 2 * width
    ways: list[tuple[Callable[[], object], int]] = [
        (partial(ops.add_rms_norm, residual, x, weight, 1e-5), 4 * row_bytes),
        (partial(ops.add_rms_norm_quantize, residual, x, weight, 1e-5), 4 * row_bytes + width),
        (partial(ops.rope_inplace, query, key, cos, sin), 2 * (query.nbytes + key.nbytes) // rows),
        (partial(ops.gated_pair, both, "silu"), 3 * both.nbytes // 2 // rows),
        (
            partial(
                ops.biased_sigmoid_topk, logits, bias, _TOP, **route, renormalise=True, scale=2.5
            ),
            4 * experts,
        ),
        (partial(ops.softmax_topk, logits, _TOP, renormalise=True), 4 * experts),
    ]
    for name, (call, nbytes) in zip(_BETWEEN, ways, strict=True):
        if names is None or name in names:
            yield Competitor("hmt", name, (call,) * 16, rows * nbytes, 0, "-")


def _recurrent(
    sequences: int, tokens: int, names: set[str] | None, memory_bytes: int
) -> Iterator[Competitor]:
    """Convolution and delta rule of one layer, for `tokens` of each sequence.

    What they must read and write: the state once, and each token.
    """
    heads, count = _DELTA_HEADS, sequences * tokens
    runs = StateRuns(StateRun(at, at * tokens, tokens, begins=False) for at in range(sequences))
    qkv, out = torch.randn(count, heads.width).bfloat16(), count * heads.values_width * 2
    decay, rate = (torch.randn(count, heads.heads).bfloat16() for _ in "ab")
    scale, bias = torch.randn(2, heads.heads).unbind()
    weight = torch.randn(heads.width, _TAPS).bfloat16()
    tails = _TAPS - 1, heads.width
    matrix = heads.heads, heads.key_dim, heads.value_dim
    # Decay, two products with the state, and what is added to it.
    each = {_RECURRENT[0]: 2 * _TAPS * heads.width, _RECURRENT[1]: 7 * math.prod(matrix)}
    for name, shape, moved in zip(
        _RECURRENT, (tails, matrix), (2 * qkv.nbytes, qkv.nbytes + out), strict=True
    ):
        if names is not None and name not in names:
            continue
        nbytes = 2 * 4 * sequences * math.prod(shape) + moved
        calls: list[Callable[[], object]] = []
        for states in torch.zeros(1 + memory_bytes // nbytes, sequences, *shape).unbind():
            if name == _RECURRENT[0]:
                calls.append(partial(ops.causal_conv, qkv, weight, states, runs))
            else:
                rule = partial(ops.gated_delta_rule, qkv, decay, rate, scale, bias)
                calls.append(partial(rule, states, runs, heads))
        yield Competitor("hmt", name, tuple(calls), nbytes, count * each[name], "-")
