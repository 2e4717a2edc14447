"""Keys and values at several levels in decoding steps that a device captures.

The device attends to the pages that are near, and the CPU beside it to all others, where they lie:
a layer's queries go down, and outputs with their log-sum-exp come up.  For that each layer has two
host calls between the device graphs of a capture.  In the graph between the two, which runs while
the CPU attends, the device also fetches some of the CPU's pages.  Where tokens choose what they
attend to, the CPU chooses among its own pages once a layer's queries have come; then none are
fetched.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from typing_extensions import override

from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, RecurrentState
from hmt.kernels import graph_ops, ops
from hmt.kvcache.offload.attention_merge import LseMerge
from hmt.kvcache.offload.base import LayerStates, OffloadedKVBase
from hmt.kvcache.offload.host_attention import Query, attend_into
from hmt.kvcache.offload.page_fetch import PageFetch
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.offload.tiered_cache import PagesOfStep, TieredKV
from hmt.kvcache.page_store import KeptLayer
from hmt.kvcache.page_table import Ints
from hmt.memory.device import Device, Event, SegmentRecorder


@dataclass(slots=True)
class _HostQuery:
    """What a layer asks for, and what stays of its answer.

    query     [tokens, q_heads, key_dim] in pinned host memory, from `arrived` on
    lse       f32 [tokens, q_heads] on the device: of the near pages, then of all
    options   what scores are made with
    """

    query: torch.Tensor
    lse: torch.Tensor
    options: dict[str, Any]
    arrived: Event | None = None


@dataclass(frozen=True, slots=True)
class _Runs:
    """A step's runs in tensors that stay where they are; of rings by window."""

    sliding_windows: dict[int, ops.AttentionMetadata] = field(default_factory=dict)


class GraphKVCache(OffloadedKVBase, KVCache):
    """KVCache over a TieredKV for steps of few tokens per run, computed on a device.

    `begin` makes a step's pages and says where they are; `hold` names the tensors that kernels read
    runs from.  For one thread.
    """

    def __init__(self, kv: TieredKV, device: Device) -> None:
        self._kv = kv
        self._ranges = kv.ranges
        self._device = device
        self.fetched = PageFetch(kv, device)
        self._recorder: SegmentRecorder | None = None
        self._where = PagesOfStep(ops.AttentionMetadata(()))
        self._step: Step | None = None
        self._runs = ops.AttentionMetadata(())  # of the near pages
        self._fixed: WeakKeyDictionary[ops.AttentionMetadata, _Runs] = WeakKeyDictionary()
        self._ring_runs: dict[int, ops.AttentionMetadata] = {}
        self._host_query: dict[tuple[int, int], _HostQuery] = {}  # by layer and tokens
        self._left_out: dict[int, Mapping[int, Ints]] = {}  # by layer, of the last step
        self._parts: dict[tuple[int, ...], tuple[torch.Tensor, LseMerge]] = {}  # by shape

    @property
    @override
    def states(self) -> LayerStates:
        return self._kv.states

    @override
    def state(self, layer: int, step: Step) -> RecurrentState:
        return self._kv.state(layer, step)

    @property
    def device_tokens(self) -> int:
        """Positions that can be near at once."""
        return self._kv.device_tokens

    def begin(self, step: Step) -> bool:
        """Make the pages that a step appends to; whether it sees any that are not near."""
        where = self._kv.begin(step)
        self._where = self.fetched.begin(where)
        self._step = step
        self._left_out.clear()
        return where.is_offloaded

    def attention_metadata(self, step: Step) -> list[ops.PagedSegment]:
        """Where the near pages of a step that has begun lie."""
        assert step is self._step
        return list(self._where.device.runs)

    def hold(self, step: Step, runs: ops.AttentionMetadata | None) -> None:
        """Use `runs`, filled with `attention_metadata`, for the step that has begun, or its own."""
        assert self._step is not None
        if runs is None:
            self.fetched.hold(None)
            self._runs = self._where.device
            self._ring_runs = {
                w: r.runs_of(self._step) for w, r in self._kv.sliding_windows.items()
            }
            return
        self._runs = runs
        [held] = runs.device
        self.fetched.hold((held.count, held.sequences))
        fixed = self._fixed.setdefault(runs, _Runs())
        for window, rings in self._kv.sliding_windows.items():
            given: Sequence[ops.PagedSegment] = rings.runs_of(self._step).runs
            if held.sequences:
                given = ops.by_token(given)
            room = held.count, held.sequences
            self._ring_runs[window] = self._fill(fixed, rings, window, room, given)

    def _fill(
        self,
        fixed: _Runs,
        sliding_windows: SlidingWindowPages,
        window: int,
        room: tuple[int, int],
        given: Sequence[ops.PagedSegment],
    ) -> ops.AttentionMetadata:
        """Runs over a ring, in tensors that are made once for a capture.

        room   runs, and the sequences that they are of where these are fewer, else 0
        """
        if window not in fixed.sliding_windows:
            context = self._kv.allocator.capacity_tokens
            where, (count, sequences) = sliding_windows.store.device, room
            made = graph_ops.fixed_runs(where, count, context, sequences)
            assert made is not None
            fixed.sliding_windows[window] = made
        graph_ops.fill_runs(fixed.sliding_windows[window], given)
        return fixed.sliding_windows[window]

    @contextmanager
    def recording(self, recorder: SegmentRecorder) -> Iterator[None]:
        """In the body, the CPU has its part in attention, which `recorder` is told of."""
        before, self._recorder = self._recorder, recorder
        try:
            yield
        finally:
            self._recorder = before

    def ended(self) -> None:
        """The step has been put on the device's queue: tell the policy what tokens attend to."""
        layer = self._kv.weighed_layer
        if layer is None or self._step is None:
            return
        asked = self._host_query[layer, len(self._step.token_ids)]
        self._device.record_event().wait()
        query = Query(asked.query.to(asked.lse.device), asked.query)
        left = self._left_out.get(layer, {})
        self._kv.weigh(layer, self._step, query, asked.lse, asked.options, left)

    @override
    def kept(self, layer: int) -> KeptLayer:
        return self._kv.kept(layer)

    def device_segments(self, layer: int, step: Step) -> ops.AttentionMetadata:
        """See OffloadedKVBase: in tensors that `hold` has named."""
        window = self._kv.kept(layer).window
        return self._ring_runs[window] if window else self._runs

    def _attend_whole(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        kept = self._kv.kept(layer)
        query = query.contiguous()
        asked = self._host_query_of(layer, query, options)
        shape = *query.shape[:2], kept.pages.layout.value_dim
        out, there = self._parts_of(shape, query.device)
        graph_ops.copy_pairs([(query, asked.query)])
        recorder = self._recorder
        if recorder is not None:
            recorder.host_call(partial(self._send, asked))
        ops.attend_part(
            kept.pages, kept.slot, self._runs, query, out, asked.lse, sinks=sinks, **options
        )
        if recorder is None:
            return out.to(query.dtype)
        if self.fetched.there:
            self.fetched.attend(layer, query, out, asked.lse, **options)
        recorder.host_call(partial(self._attend_offloaded, layer, asked, there))
        joined = query.new_empty(shape)
        graph_ops.combine_parts(out, asked.lse, there.out, there.lse, joined)
        return joined

    @override
    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv.read(layer, run)

    @override
    def gather(
        self, layer: int, run: Segment, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv.gather(layer, run, positions)

    def _host_query_of(
        self, layer: int, query: torch.Tensor, options: dict[str, Any]
    ) -> _HostQuery:
        key = layer, len(query)
        if key not in self._host_query:
            pinned = self._device.pinned(query.shape, query.dtype)
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            self._host_query[key] = _HostQuery(pinned, lse, options)
        return self._host_query[key]

    def _parts_of(
        self, shape: tuple[int, ...], where: torch.device
    ) -> tuple[torch.Tensor, LseMerge]:
        """f32 on the device and in pinned host memory: one layer uses them after the other."""
        if shape not in self._parts:
            out = torch.empty(shape, dtype=torch.float32, device=where)
            there = LseMerge(shape, torch.device("cpu"))
            there.out = self._device.pinned(shape, torch.float32)
            there.lse = self._device.pinned(shape[:2], torch.float32)
            self._parts[shape] = out, there
        return self._parts[shape]

    def _send(self, asked: _HostQuery) -> None:
        asked.arrived = self._device.record_event()

    def _attend_offloaded(self, layer: int, asked: _HostQuery, there: LseMerge) -> None:
        """The CPU's part."""
        account, begin = self._kv.account, time.perf_counter()
        beside = self._device.record_event()  # where the device ends what it does meanwhile
        assert asked.arrived is not None
        asked.arrived.wait()
        arrived = time.perf_counter()
        where = self._where
        if self._kv.selects:
            assert self._step is not None
            where, self._left_out[layer] = self._kv.chosen(layer, self._step, Query(asked.query))
        pieces = self._kv.offloaded(layer, where)
        attend_into(pieces, asked.query, there, **asked.options)
        account.waited_s += arrived - begin
        account.host_s += time.perf_counter() - arrived
        if self.fetched.there:
            self.fetched.answered(waited=not beside.reached())
            account.fetched_bytes += self.fetched.nbytes(layer)
