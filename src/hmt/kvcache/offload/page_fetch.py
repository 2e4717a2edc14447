"""What a device fetches of host memory's pages, to attend to while the CPU attends to the rest.

Link and CPU read the same memory at once, and give more together than either alone.  How the pages
are shared out is learned: in each step a few more go over the link, unless it made the CPU wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import graph_ops, ops, page_copies
from hmt.kvcache.offload.tiered_cache import PagesOfStep, TieredKV
from hmt.kvcache.page_store import recode
from hmt.memory.device import Device, host_buffer

_FIRST, _MOST = 0.2, 0.5  # shares of the pages
_MORE, _LESS = 1.04, 0.95


@dataclass(slots=True)
class _Results:
    """f32 on the device: out [tokens, q_heads, value_dim] and lse [tokens, q_heads]."""

    out: torch.Tensor
    lse: torch.Tensor


class PageFetch:
    """A share of a step's pages in host memory, fetched layer by layer to room that layers share.

    share    of the pages, as learned until now
    count    pages of the step that has begun
    """

    def __init__(self, kv: TieredKV, device: Device) -> None:
        """Asks `kv` for room; there may be none, as where each layer chooses its pages."""
        self._kv = kv
        rooms = [None if kv.selects else kv.staging(layer) for layer in kv.whole_layers]
        self._room = min((0 if room is None else len(room[0].memory) for room in rooms), default=0)
        self.share, self.count = _FIRST, 0
        self._runs: list[ops.PagedSegment] = []
        self._fixed: dict[tuple[int, int], ops.AttentionMetadata] = {}
        self._held = ops.AttentionMetadata(())
        self._results: dict[tuple[int, ...], _Results] = {}
        self._waits = self._layers = 0
        self._where = device.where
        self._slots = torch.full((self._room,), -1, dtype=torch.int64)
        self._slots_there = self._slots.to(device.where) if self._room else self._slots

    @property
    def there(self) -> bool:
        """Whether there is room."""
        return self._room > 0

    def begin(self, where: PagesOfStep) -> PagesOfStep:
        """Choose what is fetched of a step; what is left to the CPU."""
        if not self._room or where.host is None:
            self.count, self._runs = 0, []
            return where
        self._learn()
        left, slots = [], []
        self._runs, self.count = [], 0
        for run in where.host.runs:
            some = min(int(self.share * len(run.table)), self._room - self.count)
            if some:
                at = torch.arange(self.count, self.count + some)
                self._runs += [
                    ops.PagedSegment(run.offset + number, 1, PAGE_TOKENS * some - 1, at)
                    for number in range(run.length)
                ]
                slots.append(run.table[:some])
                self.count += some
            if some < len(run.table):
                seen = PAGE_TOKENS * (len(run.table) - some)
                left.append(run._replace(start=seen, table=run.table[some:], seen=seen))
        self._slots = torch.full((self._room,), -1, dtype=torch.int64)
        if slots:
            self._slots[: self.count] = torch.cat(slots)
        return replace(where, host=ops.AttentionMetadata(left) if left else None)

    def hold(self, room: tuple[int, int] | None) -> None:
        """Let kernels read the runs of the step that has begun.

        room   from tensors that stay, for so many tokens, and sequences that they are of where
               these are fewer, else 0; None: from Python's own objects
        """
        if not self._room:
            return
        if room is None:
            self._held, self._slots_there = ops.AttentionMetadata(self._runs), self._slots
            return
        if room not in self._fixed:
            tokens, sequences = room
            context = PAGE_TOKENS * self._room
            made = graph_ops.fixed_runs(self._where, tokens, context, sequences)
            assert made is not None
            self._fixed[room] = made
        self._held = self._fixed[room]
        graph_ops.fill_runs(self._held, self._runs)
        # torch keeps the buffer until the copy is over.
        slots = host_buffer(self._slots.shape, self._slots.dtype, self._slots_there.device)
        self._slots_there.copy_(slots.copy_(self._slots), non_blocking=True)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        **options: Any,
    ) -> None:
        """Add attention over what is fetched to out and lse, f32 on the device."""
        staging = self._kv.staging(layer)
        assert staging is not None
        room, pages, slot = staging
        own = self._results_of(out.shape, out.device)
        own.lse.fill_(-torch.inf)
        if self._kv.crosses:
            page_copies.fetch_layer(room, pages, slot, self._slots_there)
        elif self.count:  # a fake device
            numbers = torch.arange(self.count)
            recode(room, 0, numbers, pages, slot, self._slots_there[: self.count])
        ops.attend_part(room, 0, self._held, query, own.out, own.lse, **options)
        graph_ops.combine_parts(out, lse, own.out, own.lse, out)

    def nbytes(self, layer: int) -> int:
        """What is fetched of a layer in this step."""
        staging = self._kv.staging(layer)
        return 0 if staging is None else self.count * staging[1].layout.page_bytes

    def answered(self, *, waited: bool) -> None:
        """The CPU has ended its part of a layer; whether the device had not ended its own."""
        self._layers += 1
        self._waits += waited

    def _learn(self) -> None:
        """From the layers of the last step."""
        if self._layers:
            slow = 2 * self._waits > self._layers
            self.share = min(_MOST, self.share * (_LESS if slow else _MORE))
        self._layers = self._waits = 0

    def _results_of(self, shape: Sequence[int], where: torch.device) -> _Results:
        key = tuple(shape)
        if key not in self._results:
            out = torch.zeros(key, device=where)
            self._results[key] = _Results(out, torch.zeros(key[:2], device=where))
        return self._results[key]
