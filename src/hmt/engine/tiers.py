"""Decoding steps over keys and values at several levels: captured in pieces.

While all of a step's pages are near, it is one launch, or what its weights need.  From then on the
CPU attends to the others in each layer, beside the device; see `hmt.kvcache.stepped`.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from hmt.contracts.model import Model
from hmt.contracts.step import Step
from hmt.contracts.store import Weights
from hmt.engine.captured import Captured, CapturedDecoding, CapturedKey
from hmt.engine.pieces import DecodingInPieces
from hmt.kernels import captures
from hmt.kernels.ops import PagedRuns
from hmt.kvcache import SteppedKV, TieredKV
from hmt.memory.device import Cut, Device
from hmt.weights import DeviceWeights


class TieredDecoding(DecodingInPieces):
    """Computes logits of steps of one token per run, of keys and values at several levels."""

    def __init__(
        self,
        model: Model,
        weights: DeviceWeights,
        kv: TieredKV,
        device: Device,
        *,
        weights_in_pieces: bool,
    ) -> None:
        """Weights are where the two other kinds of captured decoding want them.

        weights_in_pieces   as `DecodingInPieces` does; else all layers and the head are on `device`
        """
        self._stepped = SteppedKV(kv, device)
        super().__init__(model, weights, self._stepped, device)
        self._in_pieces = weights_in_pieces
        self._apart = False
        self._kinds: dict[bool, OrderedDict[CapturedKey, Captured]] = {
            apart: OrderedDict() for apart in (False, True)
        }

    def __call__(self, step: Step) -> Tensor | None:
        """See CapturedDecoding."""
        logits = super().__call__(step)
        if logits is not None:
            self._stepped.ended()
        return logits

    def _ready(self, step: Step) -> Captured | None:
        if not self._takes(step):
            return None
        self._apart = self._stepped.begin(step)
        self._captured = self._kinds[self._apart]
        return super()._ready(step)

    def _send(self, captured: Captured, step: Step) -> None:
        super()._send(captured, step)
        if captured.runs is None:
            self._stepped.hold(captured.step, None)

    def _fixed_runs(self, tokens: int, context: int) -> PagedRuns | None:
        return captures.fixed_runs(
            self._device.where, tokens, min(context, self._stepped.near_tokens)
        )

    def _capture(self, captured: Captured, step: Step) -> bool:
        if not self._apart:
            return super()._capture(captured, step)
        with self._stepped.cutting(lambda work: work()):  # when kernels are compiled
            return super()._capture(captured, step)

    def _record(self, captured: Captured) -> Callable[[], Tensor]:
        if self._in_pieces or self._apart:
            return super()._record(captured)
        return CapturedDecoding._record(self, captured)

    def _cut_weights(self, cut: Cut) -> Weights:
        return super()._cut_weights(cut) if self._in_pieces else self._weights

    def _cutting(self, cut: Cut) -> AbstractContextManager[None]:
        return self._stepped.cutting(cut) if self._apart else super()._cutting(cut)
