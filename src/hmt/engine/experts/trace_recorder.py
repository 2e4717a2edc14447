"""Recording what routers choose, and what could have been predicted, while a model runs."""

from collections.abc import Sequence
from pathlib import Path

import torch
from typing_extensions import override

from hmt.base.errors import ConfigError
from hmt.contracts.blocks import BlockKind, BlockSize
from hmt.contracts.model import ModelSpec
from hmt.engine.experts.observers import StepObserver
from hmt.engine.experts.predictor import RouterPredictor, expert_count, expert_layers
from hmt.engine.experts.trace import TraceHeader, TraceWriter


def open_trace(path: Path, model: str, spec: ModelSpec, blocks: Sequence[BlockSize]) -> TraceWriter:
    """A trace of the model called `model`, in the file `path`.

    Raises ConfigError where it cannot be written, or the model has no experts.
    """
    sizes: dict[int, list[int]] = {layer: [] for layer in expert_layers(spec)}
    if not sizes:
        raise ConfigError(
            f"{model} has no experts to trace ({spec.architecture} is dense): leave out "
            "--expert-trace"
        )
    for block in blocks:
        if block.id.kind is BlockKind.EXPERT:
            sizes[block.id.layer].append(block.read_bytes)
    return TraceWriter(path, TraceHeader(model, expert_count(spec), spec.experts_per_token, sizes))


class ExpertRecorder(StepObserver):
    """Implements StepObserver: writes a trace and what the next router would have said earlier."""

    def __init__(self, trace: TraceWriter, predictor: RouterPredictor) -> None:
        self._trace = trace
        self._predictor = predictor
        self._guess: dict[int, list[list[int]] | None] = {}

    @override
    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        self._trace.routed(layer, experts, scales, self._guess.pop(layer, None))
        following = self._predictor.following[layer]
        self._guess[following] = self._predictor.of_following(layer, hidden)

    @override
    def layer_ended(self, index: int, hidden: torch.Tensor) -> None:
        guess = self._predictor.of_first(index, hidden)
        if guess is not None:
            self._guess[self._predictor.first] = guess
