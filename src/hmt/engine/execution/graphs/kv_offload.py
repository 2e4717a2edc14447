"""Decoding steps over keys and values at several levels: captured in pieces.

While all of a step's pages are near, it is one launch, or what its weights need.  From then on the
CPU attends to the others in each layer, beside the device; see `hmt.kvcache.offload.graph_cache`.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor
from typing_extensions import override

from hmt.contracts.model import Model
from hmt.contracts.step import Step
from hmt.contracts.store import Weights
from hmt.engine.execution.graphs.full import CapturedGraph, GraphDecoding, GraphKey
from hmt.engine.execution.graphs.piecewise import PiecewiseGraphDecoding
from hmt.kernels import graph_ops
from hmt.kernels.ops import AttentionMetadata
from hmt.kvcache import GraphKVCache, TieredKV
from hmt.memory.device import Device, GraphBreak
from hmt.weights import DeviceWeights


class KVOffloadGraphDecoding(PiecewiseGraphDecoding):
    """Computes logits of steps of one token per run, of keys and values at several levels."""

    def __init__(
        self,
        model: Model,
        weights: DeviceWeights,
        kv: TieredKV,
        device: Device,
        *,
        weights_piecewise: bool,
    ) -> None:
        """Weights are where the two other kinds of captured decoding want them.

        weights_piecewise  as `PiecewiseGraphDecoding` does; else all layers and the head are on
                           `device`
        """
        self._graph_cache = GraphKVCache(kv, device)
        super().__init__(model, weights, self._graph_cache, device)
        self._piecewise = weights_piecewise
        self._offloaded = False
        self._kinds: dict[bool, OrderedDict[GraphKey, CapturedGraph]] = {
            apart: OrderedDict() for apart in (False, True)
        }

    @override
    def __call__(self, step: Step) -> Tensor | None:
        logits = super().__call__(step)
        if logits is not None:
            self._graph_cache.ended()
        return logits

    def _ready(self, step: Step) -> CapturedGraph | None:
        if not self._takes(step):
            return None
        self._offloaded = self._graph_cache.begin(step)
        self._captured = self._kinds[self._offloaded]
        return super()._ready(step)

    def _send(self, captured: CapturedGraph, step: Step) -> None:
        super()._send(captured, step)
        if captured.runs is None:
            self._graph_cache.hold(captured.step, None)

    def _fixed_runs(self, tokens: int, context: int) -> AttentionMetadata | None:
        return graph_ops.fixed_runs(
            self._device.where, tokens, min(context, self._graph_cache.device_tokens)
        )

    def _capture(self, captured: CapturedGraph, step: Step) -> bool:
        if not self._offloaded:
            return super()._capture(captured, step)
        with self._graph_cache.cutting(lambda work: work()):  # when kernels are compiled
            return super()._capture(captured, step)

    def _record(self, captured: CapturedGraph) -> Callable[[], Tensor]:
        if self._piecewise or self._offloaded:
            return super()._record(captured)
        return GraphDecoding._record(self, captured)

    def _cut_weights(self, cut: GraphBreak) -> Weights:
        return super()._cut_weights(cut) if self._piecewise else self._weights

    def _cutting(self, cut: GraphBreak) -> AbstractContextManager[None]:
        return self._graph_cache.cutting(cut) if self._offloaded else super()._cutting(cut)
