"""Executors: walking a model's layers for one step.

`PlainExecutor` is the truth: it reads each block when it needs it.  `OverlappedExecutor` computes
the same with the same kernels in the same order, and only asks for blocks earlier.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

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

    How many layers, `ahead` says; the order wraps around, so while the head computes, the first
    layers of the next token are on their way.  Where nothing has to be read, all layers are
    computed together if the model can.
    """

    def __init__(self, model: Model, weights: Weights, kv: KVCache, ahead: ReadAhead) -> None:
        self._model = model
        self._weights = weights
        self._kv = kv
        self._ahead = ahead
        self._together = model.resident_layers(range(model.spec.layers), weights, kv)

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """See Executor."""
        ahead, layers = self._ahead, self._model.spec.layers
        ahead.step_begins(len(step.token_ids))
        self._request(0)
        hidden = self._model.embed(step, self._weights)
        if self._together is None or not self._together(hidden, step):
            for index in range(layers):
                self._request(index)
                hidden = self._model.layer(index, hidden, step, self._weights, self._kv)
                ahead.stage_ends(index)
        logits, rows = torch.empty(0, self._model.spec.vocab_size), len(step.logit_rows)
        if rows:
            self._request(layers)
            # Rows ascend and differ: as many as there are tokens are all of them.
            wanted = hidden if rows == len(hidden) else hidden[step.logit_rows]
            logits = self._model.head(wanted, self._weights)
        ahead.stage_ends(layers)
        ahead.step_ends()
        return logits

    def _request(self, stage: int) -> None:
        if blocks := self._ahead.blocks(stage):
            self._weights.request(blocks, Priority.SURE)
