"""Small checkpoints with random weights, a method that wants statistics, what is in a folder."""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hmt.profiling.random_model import Shape, write_random_model
from hmt.quant.methods.interface import Needs, QuantizedWeight, Statistics, Target
from hmt.quantizing import QuantizeOptions, methods
from hmt.quantizing.methods import open_method

DENSE = Shape(layers=3, hidden_size=64, intermediate_size=96, heads=4, kv_heads=2)
MOE = Shape(
    layers=5, hidden_size=64, intermediate_size=48, heads=4, kv_heads=2, experts=4,
    experts_per_token=2,
)  # fmt: skip


def checkpoint(folder: Path, shape: Shape = DENSE) -> Path:
    write_random_model(folder, shape, shard_bytes=1 << 18)
    return folder


def options(**fields: object) -> QuantizeOptions:
    """For a few short sequences."""
    given = {"sequences": 6, "length": 48, "host_memory_bytes": 1 << 26} | fields
    return QuantizeOptions(**given)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, str]:
    """Checksums of all files by name."""
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


class Observing:
    """Rounds to nearest, with scales that depend a little on all statistics of the inputs."""

    needs = Needs.HESSIAN | Needs.MEAN_ABS | Needs.SAMPLES

    def quantize(self, weight: Tensor, inputs: Statistics, target: Target) -> QuantizedWeight:
        made = open_method("rtn").quantize(weight, inputs, target)
        if not inputs.tokens:
            return made
        assert inputs.hessian is not None and inputs.mean_abs is not None
        assert inputs.samples is not None and len(inputs.samples) <= inputs.tokens
        seen = inputs.hessian.diagonal().mean() + inputs.mean_abs.mean() + inputs.samples.mean()
        return replace(made, scales=made.scales * (1 + 0.1 * torch.tanh(seen)))


class use_observing:
    """Lets `method="observing"` be known, at once and until a context ends."""

    def __init__(self) -> None:
        self._before = methods.open_method
        methods.open_method = lambda name: (
            Observing() if name == "observing" else self._before(name)
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        methods.open_method = self._before
