"""Decoding steps in which the CPU computes some networks: captured in pieces.

What the device does until the CPU has its turn is one launch.  Such a piece ends with the hidden
states in pinned host memory, and the next one begins by fetching them; before it reads weights that
are copied in every step, it waits for their copy, and afterwards the next copy may begin.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.step import Step
from hmt.contracts.store import Weights
from hmt.engine.execution.graphs.full import CapturedGraph, GraphDecoding
from hmt.kernels import ops
from hmt.kernels.cpu.threads import awake_workers
from hmt.memory.device import Device, GraphBreak
from hmt.weights import DeviceWeights, WeightsView

Params = Mapping[str, WeightTensor]


def can_run_piecewise(model: Model, plan: Plan) -> bool:
    """Whether steps of `plan` leave nothing but feed-forward networks in memory to the CPU."""
    away = {(block.kind, home) for block, home in plan.homes.items() if home is not Tier.DEVICE}
    known = {
        (BlockKind.FFN, Tier.HOST),
        (BlockKind.EMBEDDING, Tier.HOST),
        (BlockKind.EMBEDDING, Tier.DISK),
    }
    return away <= known and plan.device.stages >= set(range(model.spec.layers + 1))


class PiecewiseGraphDecoding(GraphDecoding):
    """Computes logits of steps of one token per run, of a plan that `can_run_piecewise`."""

    _copies_are_idle = False  # the next step's weights are brought meanwhile

    def _may_run_ahead(self, captured: CapturedGraph, step: Step) -> bool:
        return False  # this step's tokens would wait for the CPU's part in the next one

    def _record(self, captured: CapturedGraph) -> Callable[[], Tensor]:
        shape = len(captured.step.token_ids), self._model.spec.hidden_size
        handover = _HostFfnCall(self._device, self._weights, shape, self._model.dtype)

        def compute(cut: GraphBreak) -> Tensor:
            elsewhere = ops.feed_forward_on_host(partial(handover.feed_forward, cut))
            with elsewhere, self._cutting(cut):
                return self._compute(captured, self._cut_weights(cut))

        replay = self._device.capture_segments(compute)

        def step() -> Tensor:
            with awake_workers():
                return replay()

        return step

    def _cut_weights(self, cut: GraphBreak) -> Weights:
        def lease(block: BlockId) -> AbstractContextManager[Params] | None:
            views = self._weights.place(block)
            return None if views is None else self._copied(cut, block, views)

        return WeightsView(self._weights, other_lease=lease)

    @contextmanager
    def _copied(self, cut: GraphBreak, block: BlockId, views: Params) -> Iterator[Params]:
        """A block that is copied in every step: cuts the capture before and after its use."""
        cut(partial(self._weights.arrive, block))
        yield views
        cut(partial(self._weights.leave, block))

    def _cutting(self, cut: GraphBreak) -> AbstractContextManager[None]:
        """While a step is recorded: what else the CPU has a part in."""
        return nullcontext()


class _HostFfnCall:
    """Hidden states on their way to the CPU and back."""

    def __init__(
        self,
        device: Device,
        weights: DeviceWeights,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """`shape`, `dtype`: of hidden states."""
        self._device = device
        self._weights = weights
        self._hidden, self._x = (device.pinned(shape, dtype) for _ in "ab")

    def feed_forward(
        self,
        cut: GraphBreak,
        hidden: Tensor,
        x: Tensor | None,
        params: Params,
        layer: ops.FeedForward,
    ) -> None:
        """`ops.feed_forward` on the CPU, of hidden and x on the device, while that is captured."""
        pairs = [(hidden, self._hidden)]
        if x is not None:
            pairs.append((x, self._x))
        ops.copy_pairs(pairs)
        nbytes = sum(weight.nbytes for weight in params.values())
        cut(partial(self._compute, params, layer, nbytes, x is not None))
        ops.copy_pairs([(self._hidden, hidden)])

    def _compute(self, params: Params, layer: ops.FeedForward, nbytes: int, added: bool) -> None:
        begin = time.perf_counter()
        self._device.record_event().wait()
        self._weights.waited(time.perf_counter() - begin)
        ops.feed_forward(self._hidden, self._x if added else None, params, layer)
        self._weights.count(nbytes)
