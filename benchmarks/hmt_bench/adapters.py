"""What low-rank adapters cost: decoding without any, with one, and with another for each request.

All three interleaved in one process, over one model, so that what else the machine does meets all.
"""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

import hmt
from hmt.contracts.blocks import BlockKind, Role
from hmt.contracts.model import ModelSpec
from hmt.engine import LoadedModel

_KINDS = (BlockKind.ATTENTION, BlockKind.FFN)
_PROMPT_TOKENS = 16


def write_adapter(spec: ModelSpec, folder: Path, rank: int, seed: int) -> None:
    """A random adapter of all projections of attention and of dense networks, as peft writes it."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for block in spec.blocks:
        for param in block.params:
            if block.id.kind not in _KINDS or param.role is not Role.LINEAR or param.rows:
                continue
            at = f"base_model.model.{param.sources[0].removesuffix('.weight')}"
            out, inputs = param.shape
            for name, shape in (("A", (rank, inputs)), ("B", (out, rank))):
                numbers = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{at}.lora_{name}.weight"] = numbers.to(torch.bfloat16)
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def run(
    path: Path,
    *,
    adapters: int = 16,
    rank: int = 16,
    tokens: int = 32,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda what: None,
    **options: Any,
) -> dict[str, Any]:
    """Tokens per second of as many requests as `adapters`, in each way; medians over `rounds`."""
    with TemporaryDirectory() as folder:
        with hmt.Engine(**options) as engine:
            spec = engine.load_model(path).prepared.model.spec
        for number in range(adapters):
            progress(f"writing adapter {number + 1} of {adapters}")
            write_adapter(spec, Path(folder, str(number)), rank, number)
        named = [f"{number}={folder}/{number}" for number in range(adapters)]
        with hmt.Engine(adapters=named, max_batch=adapters, speculate="off", **options) as engine:
            model = engine.load_model(path)
            ways = {
                "none": [""] * adapters,
                "one": ["0"] * adapters,
                "each its own": [str(number) for number in range(adapters)],
            }
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for round_number in range(-1, rounds):
                for name, chosen in ways.items():
                    progress(f"round {round_number + 1} of {rounds}: {name}")
                    rate = _rate(model, chosen, tokens, round_number)
                    if round_number >= 0:  # the first reads weights and adapters
                        taken[name].append(rate)
            bytes_each = model.adapters.store.describe("0").nbytes
    speeds = {name: median(rates) for name, rates in taken.items()}
    return {
        "benchmark": "adapters",
        "model": path.name,
        "adapters": adapters,
        "rank": rank,
        "adapter_bytes": bytes_each,
        "tokens_per_s": taken,
        "ratios": {name: speed / speeds["none"] for name, speed in speeds.items()},
    }


def _rate(model: LoadedModel, adapters: list[str], tokens: int, seed: int) -> float:
    """Decoded tokens per second of one batch, prompts left out."""
    chance = random.Random(seed)
    requests = [
        hmt.Request(
            [chance.randrange(16, 400) for _ in range(_PROMPT_TOKENS)], tokens, ignore_eos=True,
            adapter=adapter,
        )
        for adapter in adapters
    ]  # fmt: skip
    streams = model.stream_batch(requests)
    for stream in streams:  # all have their first token: what is left is decoded together
        next(iter(stream))
    begin, count = time.perf_counter(), 0
    for stream in streams:
        count += sum(1 for _ in stream)
    return count / (time.perf_counter() - begin)
