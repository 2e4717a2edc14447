"""Executors: walking a model's layers for one step.

`PlainExecutor` is the truth: it reads each block when it needs it.  `OverlappedExecutor` computes
the same with the same kernels in the same order, and only asks for blocks earlier.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Protocol

import torch

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.model import Model, ResidentLayers
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, LeasedGroup, Priority, Weights


class Executor(Protocol):
    """Runs steps."""

    def run(self, step: Step) -> torch.Tensor:
        """Logits f32 [rows, vocab] of the step's logit rows.  Appends the step's tokens to the KV.

        Raises DiskReadError or NumericsError of a block that could not be loaded; the KV of the
        step's sequences is then incomplete.
        """
        ...


class _OnDemand:
    """Weights that ignore what is asked for ahead of time."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def lease(self, block: BlockId) -> AbstractContextManager[Mapping[str, WeightTensor]]:
        return self._weights.lease(block)

    def lease_each(
        self, blocks: Sequence[BlockId]
    ) -> AbstractContextManager[Iterator[LeasedGroup]]:
        return self._weights.lease_each(blocks)

    def standing(self, blocks: Sequence[BlockId]) -> None:
        return None

    def count(self, nbytes: int) -> None:
        pass

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        pass

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        self._weights.routed(layer, hidden, experts, scales)

    def rows(self, block: BlockId, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self._weights.rows(block, name, ids)


class PlainExecutor:
    """One block after the other, nothing ahead of time."""

    def __init__(self, model: Model, weights: Weights, kv: KVCache) -> None:
        self._model = model
        self._weights = _OnDemand(weights)
        self._kv = kv

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """See Executor."""
        hidden = self._model.embed(step, self._weights)
        for index in range(self._model.spec.layers):
            hidden = self._model.layer(index, hidden, step, self._weights, self._kv)
        if not len(step.logit_rows):
            return torch.empty(0, self._model.spec.vocab_size)
        return self._model.head(hidden[step.logit_rows], self._weights)


class OverlappedExecutor:
    """Requests the dense blocks of the next layers while it computes the current one.

    Layers that have nothing to wait for are computed together where the model can.  The distance
    counts layers that have something to read; the order wraps around, so while the
    head computes, the first layers of the next token are on their way.
    """

    def __init__(self, model: Model, weights: Weights, kv: KVCache, plan: Plan) -> None:
        self._model = model
        self._weights = weights
        self._kv = kv
        self._ahead = _blocks_ahead(model, plan)
        self._together = _layers_together(model, weights, kv, self._ahead[:-1])

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """See Executor."""
        self._request(0)
        hidden = self._model.embed(step, self._weights)
        for layers, resident in self._together:
            if resident is not None and resident(hidden, step):
                continue
            for index in layers:
                self._request(index)
                hidden = self._model.layer(index, hidden, step, self._weights, self._kv)
        if not len(step.logit_rows):
            return torch.empty(0, self._model.spec.vocab_size)
        self._request(-1)
        return self._model.head(hidden[step.logit_rows], self._weights)

    def _request(self, stage: int) -> None:
        if self._ahead[stage]:
            self._weights.request(self._ahead[stage], Priority.SURE)


def _layers_together(
    model: Model, weights: Weights, kv: KVCache, ahead: Sequence[list[BlockId]]
) -> list[tuple[range, ResidentLayers | None]]:
    """Consecutive layers without anything to request, and how they are computed in one call."""
    spans = []
    for waits, group in groupby(range(len(ahead)), key=lambda index: bool(ahead[index])):
        indices = list(group)
        layers = range(indices[0], indices[-1] + 1)
        spans.append((layers, None if waits else model.resident_layers(layers, weights, kv)))
    return spans


def _blocks_ahead(model: Model, plan: Plan) -> list[list[BlockId]]:
    """For each layer, and last for the head: streamed blocks to request when it begins."""
    spec = model.spec
    stages = [list(model.layer_blocks(index)) for index in range(spec.layers)]
    stages.append([block.id for block in spec.blocks if block.id.kind is BlockKind.HEAD])
    streamed = [[b for b in stage if plan.homes[b] is Tier.DISK] for stage in stages]
    ahead = []
    for stage in range(len(streamed)):
        wanted = list(streamed[stage])
        following = [streamed[(stage + n) % len(streamed)] for n in range(1, len(streamed))]
        for blocks in [blocks for blocks in following if blocks][: plan.prefetch_distance]:
            wanted += blocks
        ahead.append(wanted)
    return ahead
