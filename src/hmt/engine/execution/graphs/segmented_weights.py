"""Leases of steps that are captured in segments: waits for copies, and calls of the CPU.

A block that is copied in every step is waited for before its use, and its slot is free for the next
copy afterwards.  A feed-forward network in host memory is the CPU's: a device graph ends with the
hidden states in pinned host memory, and the next one begins by fetching them.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import HostFeedForward
from hmt.kernels import graph_ops, ops
from hmt.memory.device import Device, SegmentRecorder
from hmt.weights import DeviceWeights

Params = Mapping[str, WeightTensor]


class HostFfnBuffers:
    """Hidden states on their way to the CPU and back, in pinned host memory."""

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
        recorder: SegmentRecorder,
        params: Params,
        hidden: Tensor,
        x: Tensor | None,
        layer: ops.FeedForward,
    ) -> None:
        """`ops.feed_forward` on the CPU, of hidden and x on the device, while that is captured."""
        pairs = [(hidden, self._hidden)]
        if x is not None:
            pairs.append((x, self._x))
        graph_ops.copy_pairs(pairs)
        nbytes = sum(weight.nbytes for weight in params.values())
        recorder.host_call(partial(self._compute, params, layer, nbytes, x is not None))
        graph_ops.copy_pairs([(self._hidden, hidden)])

    def _compute(self, params: Params, layer: ops.FeedForward, nbytes: int, added: bool) -> None:
        begin = time.perf_counter()
        self._device.record_event().wait()
        self._weights.waited(time.perf_counter() - begin)
        ops.feed_forward(self._hidden, self._x if added else None, params, layer)
        self._weights.count(nbytes)


class SegmentLeases:
    """Leases of a step that is captured; tells a recorder of waits and of the CPU's part."""

    def __init__(
        self, weights: DeviceWeights, recorder: SegmentRecorder, buffers: HostFfnBuffers
    ) -> None:
        self._weights = weights
        self._recorder = recorder
        self._buffers = buffers

    def lease(self, block: BlockId) -> AbstractContextManager[Params] | None:
        """The lease of a block that is copied, or that the CPU computes with; None for others."""
        views = self._weights.place(block)
        if views is not None:
            return self._copied(block, views)
        if block.kind is BlockKind.FFN and self._weights.is_on_host(block):
            return nullcontext(self._host_feed_forward(block))
        return None

    @contextmanager
    def _copied(self, block: BlockId, views: Params) -> Iterator[Params]:
        self._recorder.wait(partial(self._weights.arrive, block))
        yield views
        self._recorder.host_call(partial(self._weights.leave, block))

    def _host_feed_forward(self, block: BlockId) -> HostFeedForward:
        """Each replay counts what the CPU reads, so the block is not leased."""
        resident = self._weights.resident([block])
        assert resident is not None, "networks of such plans stay in host memory"
        params = resident[0].params
        return HostFeedForward(params, partial(self._buffers.feed_forward, self._recorder, params))
