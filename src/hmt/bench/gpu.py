"""Decoding and prompts with a GPU: a model that fits on it, and models that do not.

Models are tiled packs: of full size in memory, and small on the drive.  Speeds are compared with
what the machine's own measured rates allow.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hmt.base.units import GIB
from hmt.bench.environment import describe
from hmt.bench.random_model import Shape
from hmt.bench.tiled_pack import write_tiled_pack
from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Tier
from hmt.contracts.request import Request
from hmt.engine import Engine, LoadedModel
from hmt.engine.machine import machine_for

SHAPES = {
    # Llama-3-8B, Llama-3-70B, and Qwen3-30B-A3B.
    "8b": Shape(32, 4096, 14336, 32, 8, vocab_size=128256),
    "70b": Shape(80, 8192, 28672, 64, 8, vocab_size=128256),
    "30b-moe": Shape(
        48, 2048, 768, 32, 4, 128, vocab_size=151936, experts=128, experts_per_token=8
    ),
}
_PROMPT_TOKENS = 16
_READ_BYTES = 4 * GIB


def device_read_rate() -> float:
    """Bytes per second at which the GPU reads its memory, at its best."""
    memory = torch.ones(_READ_BYTES // 2, dtype=torch.bfloat16, device="cuda").view(-1, 8192)
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


def run(
    folder: Path,
    shape: str,
    gpu_memory: Sequence[str],
    *,
    quantization: str = "w4a16:32",
    host_memory: str = "100GiB",
    batches: Sequence[int] = (1, 32),
    tokens: int = 64,
    prompt: int = 2048,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure `shape` with each budget; the content of a benchmark file."""
    pack = folder / shape / "pack"
    if not pack.exists():
        write_tiled_pack(folder / shape, SHAPES[shape], quantization, progress=progress)
    machine = machine_for(pack)
    rate = device_read_rate()
    results = []
    for memory in gpu_memory:
        progress(f"{shape} in {memory}")
        begin = time.perf_counter()
        with Engine(
            gpu_memory=memory,
            host_memory=host_memory,
            context=max(batches) * 256 + 2 * prompt,
            max_batch=max(batches),
            prefill_chunk=prompt,
            check_weights=False,
            verify_reads="never",
        ) as engine:
            model = engine.load_model(pack)
            loaded_s = time.perf_counter() - begin
            assert engine._device is not None
            found = measure(model, batches, tokens, prompt, rate)
            used = engine._device.used_bytes()
            link = model.prepared.machine.link_rate
        results.append({"gpu_used_bytes": used, "load_s": loaded_s, "link_rate": link, **found})
    return {
        "benchmark": "gpu",
        "machine": describe(machine),
        "shape": {"name": shape, **asdict(SHAPES[shape])},
        "quantization": quantization,
        "gpu": torch.cuda.get_device_name(0),
        "device_read_rate": rate,
        "results": [
            {"gpu_memory": memory, **one} for memory, one in zip(gpu_memory, results, strict=True)
        ],
    }


def measure(
    model: LoadedModel, batches: Sequence[int], tokens: int, prompt: int, device_rate: float
) -> dict[str, Any]:
    """Speeds of a loaded model, and what its plan lets the machine read for a token."""
    plan, layouts = model.plan, model.prepared.layouts
    machine = model.prepared.machine
    read = {"device": 0, "copied": 0, "host": 0}
    for block, home in plan.homes.items():
        if block.kind is BlockKind.EMBEDDING:
            continue  # a row per token
        where = (
            "device"
            if home is Tier.DEVICE
            else "copied"
            if block in plan.device.computes
            else "host"
        )
        read[where] += layouts[block].parameter_bytes
    away_s = 0.0
    if read["copied"] or read["host"]:
        away_s = (read["copied"] + read["host"]) / (machine.link_rate + machine.ram_read_rate)
    allowed = 1 / (read["device"] / device_rate + away_s)
    speeds = {batch: decode_rate(model, batch, tokens) for batch in batches}
    return {
        "read_bytes": read,
        "tokens_per_s": speeds,
        "allowed_tokens_per_s": allowed,
        "share": speeds[batches[0]] / batches[0] / allowed,
        "prompt_tokens_per_s": prompt_rate(model, prompt) if prompt else None,
    }


def decode_rate(model: LoadedModel, batch: int, tokens: int, runs: int = 3) -> float:
    """Tokens per second of `batch` sequences that decode `tokens` each; the median of some runs."""
    rates = []
    for _ in range(runs + 1):
        prompts = [[16 + 7 * n + i for i in range(_PROMPT_TOKENS)] for n in range(batch)]
        requests = [
            Request(input=ids, max_new_tokens=tokens + 1, ignore_eos=True) for ids in prompts
        ]
        streams = model.stream_batch(requests)
        for stream in streams:
            next(stream)
        for stream in streams:
            next(stream)  # the first step captures
        begin = time.perf_counter()
        for _ in range(tokens - 1):
            for stream in streams:
                next(stream)
        rates.append(batch * (tokens - 1) / (time.perf_counter() - begin))
        for stream in streams:
            stream.close()
    return median(rates[1:])


def prompt_rate(model: LoadedModel, tokens: int, runs: int = 3) -> float:
    """Tokens per second of a prompt; the median of some runs."""
    rates = []
    for number in range(runs + 1):
        ids = [16 + (number + 31 * i) % 1000 for i in range(tokens)]
        begin = time.perf_counter()
        model.infer(Request(input=ids, max_new_tokens=1))
        rates.append(tokens / (time.perf_counter() - begin))
    return median(rates[1:])
