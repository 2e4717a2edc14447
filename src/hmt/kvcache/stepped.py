"""Keys and values at several levels in decoding steps that a device captures.

The device attends to the pages that are near, and the CPU beside it to all others, where they lie:
a layer's queries go down, and outputs with their log-sum-exp come up.  For that a capture is cut
twice in each layer.  What the device does while the CPU attends is a piece of its own, in which it
also fetches some of the CPU's pages.  Where tokens choose what they attend to, the CPU chooses
among its own pages once a layer's queries have come; then none are fetched.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hmt.contracts.step import Run, Step
from hmt.kernels import captures, ops
from hmt.kvcache.apart import ApartKV
from hmt.kvcache.book import Numbers
from hmt.kvcache.far import Query, attend_into
from hmt.kvcache.fetched import FetchedPages
from hmt.kvcache.merging import Merged
from hmt.kvcache.rings import Rings
from hmt.kvcache.store import Kept
from hmt.kvcache.tiered import TieredKV, Where
from hmt.memory.device import Cut, Device, Mark


@dataclass(slots=True)
class _Asked:
    """What a layer asks for, and what stays of its answer.

    query     [tokens, q_heads, key_dim] in pinned host memory, from `arrived` on
    lse       f32 [tokens, q_heads] on the device: of the near pages, then of all
    options   what scores are made with
    """

    query: torch.Tensor
    lse: torch.Tensor
    options: dict[str, Any]
    arrived: Mark | None = None


@dataclass(frozen=True, slots=True)
class _Runs:
    """A step's runs in tensors that stay where they are; of rings by window."""

    rings: dict[int, ops.PagedRuns] = field(default_factory=dict)


class SteppedKV(ApartKV):
    """KVCache over a TieredKV for steps of one token per run, computed on a device.

    `begin` makes a step's pages and says where they are; `hold` names the tensors that kernels read
    runs from.  For one thread.
    """

    def __init__(self, kv: TieredKV, device: Device) -> None:
        self._kv = kv
        self._device = device
        self.fetched = FetchedPages(kv, device)
        self._cut: Cut | None = None
        self._where = Where(ops.PagedRuns(()))
        self._step: Step | None = None
        self._runs = ops.PagedRuns(())  # of the near pages
        self._fixed: WeakKeyDictionary[ops.PagedRuns, _Runs] = WeakKeyDictionary()
        self._ring_runs: dict[int, ops.PagedRuns] = {}
        self._asked: dict[tuple[int, int], _Asked] = {}  # by layer and tokens
        self._left_out: dict[int, Mapping[int, Numbers]] = {}  # by layer, of the last step
        self._parts: dict[tuple[int, ...], tuple[torch.Tensor, Merged]] = {}  # by shape

    @property
    def near_tokens(self) -> int:
        """Positions that can be near at once."""
        return self._kv.near_tokens

    def begin(self, step: Step) -> bool:
        """Make the pages that a step appends to; whether it sees any that are not near."""
        where = self._kv.begin(step)
        self._where = self.fetched.begin(where)
        self._step = step
        self._left_out.clear()
        return where.is_apart

    def paged_runs(self, step: Step) -> list[ops.PagedRun]:
        """Where the near pages of a step that has begun lie."""
        assert step is self._step
        return list(self._where.near.runs)

    def hold(self, step: Step, runs: ops.PagedRuns | None) -> None:
        """Use `runs`, filled with `paged_runs`, for the step that has begun; None: its own."""
        assert self._step is not None
        self.fetched.hold(len(self._step.token_ids), fixed=runs is not None)
        if runs is None:
            self._runs = self._where.near
            self._ring_runs = {w: r.runs_of(self._step) for w, r in self._kv.rings.items()}
            return
        self._runs = runs
        [held] = runs.device
        fixed = self._fixed.setdefault(runs, _Runs())
        for window, rings in self._kv.rings.items():
            given = rings.runs_of(self._step).runs
            self._ring_runs[window] = self._fill(fixed, rings, window, held.count, given)

    def _fill(
        self,
        fixed: _Runs,
        rings: Rings,
        window: int,
        count: int,
        given: tuple[ops.PagedRun, ...],
    ) -> ops.PagedRuns:
        """Runs over a ring, in tensors that are made once for a capture."""
        if window not in fixed.rings:
            context = self._kv.capacity_tokens
            made = captures.fixed_runs(rings.store.device, count, context)
            assert made is not None
            fixed.rings[window] = made
        captures.fill_runs(fixed.rings[window], given)
        return fixed.rings[window]

    @contextmanager
    def cutting(self, cut: Cut) -> Iterator[None]:
        """In the body, the CPU has its part in attention, at the places where `cut` is called."""
        before, self._cut = self._cut, cut
        try:
            yield
        finally:
            self._cut = before

    def ended(self) -> None:
        """The step has been put on the device's queue: tell the policy what tokens attend to."""
        layer = self._kv.weighed_layer
        if layer is None or self._step is None:
            return
        asked = self._asked[layer, len(self._step.token_ids)]
        self._device.mark().wait()
        query = Query(asked.query.to(asked.lse.device), asked.query)
        left = self._left_out.get(layer, {})
        self._kv.weigh(layer, self._step, query, asked.lse, asked.options, left)

    def kept(self, layer: int) -> Kept:
        """See ApartKV."""
        return self._kv.kept(layer)

    def near_runs(self, layer: int, step: Step) -> ops.PagedRuns:
        """See ApartKV: in tensors that `hold` has named."""
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
        asked = self._asked_of(layer, query, options)
        shape = *query.shape[:2], kept.pages.layout.value_dim
        out, there = self._parts_of(shape, query.device)
        ops.hand_over([(query, asked.query)])
        cut = self._cut
        if cut is not None:
            cut(partial(self._send, asked))
        ops.attend_part(
            kept.pages, kept.slot, self._runs, query, out, asked.lse, sinks=sinks, **options
        )
        if cut is None:
            return out.to(query.dtype)
        if self.fetched.there:
            self.fetched.attend(layer, query, out, asked.lse, **options)
        cut(partial(self._attend_apart, layer, asked, there))
        joined = query.new_empty(shape)
        captures.join_parts(out, asked.lse, there.out, there.lse, joined)
        return joined

    def read(self, layer: int, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        return self._kv.read(layer, run)

    def _asked_of(self, layer: int, query: torch.Tensor, options: dict[str, Any]) -> _Asked:
        key = layer, len(query)
        if key not in self._asked:
            pinned = self._device.pinned(query.shape, query.dtype)
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            self._asked[key] = _Asked(pinned, lse, options)
        return self._asked[key]

    def _parts_of(self, shape: tuple[int, ...], where: torch.device) -> tuple[torch.Tensor, Merged]:
        """f32 on the device and in pinned host memory: one layer uses them after the other."""
        if shape not in self._parts:
            out = torch.empty(shape, dtype=torch.float32, device=where)
            there = Merged(shape, torch.device("cpu"))
            there.out = self._device.pinned(shape, torch.float32)
            there.lse = self._device.pinned(shape[:2], torch.float32)
            self._parts[shape] = out, there
        return self._parts[shape]

    def _send(self, asked: _Asked) -> None:
        asked.arrived = self._device.mark()

    def _attend_apart(self, layer: int, asked: _Asked, there: Merged) -> None:
        """The CPU's part."""
        account, begin = self._kv.account, time.perf_counter()
        beside = self._device.mark()  # where the device ends what it does meanwhile
        assert asked.arrived is not None
        asked.arrived.wait()
        arrived = time.perf_counter()
        where = self._where
        if self._kv.selects:
            assert self._step is not None
            where, self._left_out[layer] = self._kv.chosen(layer, self._step, Query(asked.query))
        pieces = self._kv.elsewhere(layer, where)
        attend_into(pieces, asked.query, there, **asked.options)
        account.waited_s += arrived - begin
        account.host_s += time.perf_counter() - arrived
        if self.fetched.there:
            self.fetched.answered(waited=not beside.reached())
            account.fetched_bytes += self.fetched.nbytes(layer)
