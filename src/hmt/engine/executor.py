"""Executors: walking a model's layers for one step.

`PlainExecutor` is the truth: it reads each block when it needs it.  `OverlappedExecutor` computes
the same with the same kernels in the same order, and only asks for blocks earlier.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from hmt.base.trace import Tracer
from hmt.contracts.blocks import BlockId
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.model import Model
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, LeasedGroup, Priority, Weights
from hmt.engine.prefetch import ReadAhead


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


class _Stages:
    """Tells a tracer when layers and head were computed, waits of theirs included."""

    def __init__(self, model: Model, tracer: Tracer | None) -> None:
        layers = model.spec.layers
        self._names = (*(f"layer {index}" for index in range(layers)), "head")
        self._all = f"layers 0-{layers - 1}"
        self._tracer = tracer or Tracer(capacity=0)
        self._since_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._since_s = time.perf_counter()

    def ended(self, stage: int | None) -> None:
        """A layer has been computed, or with their number the head; None: all layers together."""
        now = time.perf_counter()
        what = self._all if stage is None else self._names[stage]
        self._tracer.record("compute", "host", 0, self._since_s, now, what)
        self._since_s = now


class PlainExecutor:
    """One block after the other, nothing ahead of time."""

    def __init__(
        self, model: Model, weights: Weights, kv: KVCache, tracer: Tracer | None = None
    ) -> None:
        self._model = model
        self._weights = _OnDemand(weights)
        self._kv = kv
        self._stages = _Stages(model, tracer)

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """See Executor."""
        self._stages.begin()
        hidden = self._model.embed(step, self._weights)
        for index in range(self._model.spec.layers):
            hidden = self._model.layer(index, hidden, step, self._weights, self._kv)
            self._stages.ended(index)
        if not len(step.logit_rows):
            return torch.empty(0, self._model.spec.vocab_size)
        logits = self._model.head(hidden[step.logit_rows], self._weights)
        self._stages.ended(self._model.spec.layers)
        return logits


class OverlappedExecutor:
    """Requests the dense blocks of the next layers while it computes the current one.

    How many layers, `ahead` says; the order wraps around, so while the head computes, the first
    layers of the next token are on their way.  Where nothing has to be read, all layers are
    computed together if the model can.
    """

    def __init__(
        self,
        model: Model,
        weights: Weights,
        kv: KVCache,
        ahead: ReadAhead,
        tracer: Tracer | None = None,
    ) -> None:
        self._model = model
        self._weights = weights
        self._kv = kv
        self._ahead = ahead
        self._stages = _Stages(model, tracer)
        self._together = model.resident_layers(range(model.spec.layers), weights, kv)

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """See Executor."""
        ahead, layers = self._ahead, self._model.spec.layers
        ahead.step_begins(len(step.token_ids))
        self._stages.begin()
        self._request(0)
        hidden = self._model.embed(step, self._weights)
        if self._together is not None and self._together(hidden, step):
            self._stages.ended(None)
        else:
            for index in range(layers):
                self._request(index)
                hidden = self._model.layer(index, hidden, step, self._weights, self._kv)
                ahead.stage_ends(index)
                self._stages.ended(index)
        logits, rows = torch.empty(0, self._model.spec.vocab_size), len(step.logit_rows)
        if rows:
            self._request(layers)
            # Rows ascend and differ: as many as there are tokens are all of them.
            wanted = hidden if rows == len(hidden) else hidden[step.logit_rows]
            logits = self._model.head(wanted, self._weights)
            self._stages.ended(layers)
        ahead.stage_ends(layers)
        ahead.step_ends()
        return logits

    def _request(self, stage: int) -> None:
        if blocks := self._ahead.blocks(stage):
            self._weights.request(blocks, Priority.SURE)
