"""A paged KV cache over several memories: near pages in full, far ones in fewer bits or on disk.

Attention goes to where the pages are, and its parts merge exactly.  Which pages move away is the
policy's to say; none is ever lost.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hmt.contracts.kv import PinnedPages, min_device_pages
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.kvcache.eviction import PageEvictionPolicy
from hmt.kvcache.offload.base import OffloadedKVBase
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.offload.host_attention import MANY_TOKENS, PageChunks, Query, attend_on_host
from hmt.kvcache.offload.lse_merge import LseMerge
from hmt.kvcache.offload.page_migration import PageMigration, pages_of, to_tensor
from hmt.kvcache.offload.sequence_reservation import TieredSequences
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.offload.sparse_selection import Selection
from hmt.kvcache.page_store import KeptLayer, PageStore
from hmt.kvcache.page_table import Ints, PageTier
from hmt.memory.device import Device

_PINNED = PinnedPages()
_NONE = np.zeros(0, dtype=np.int64)
_NOTHING: Mapping[int, Ints] = {}
# Steps between looks at what tokens attend to, each in another layer.  A look reads the layer's
# keys once more: of 32 layers, 0.1% of what attention reads.
_SCORED_EVERY = 16


@dataclass(frozen=True, slots=True)
class PagesOfStep:
    """A step's runs by level; cold: with places instead of tables."""

    device: ops.AttentionMetadata
    host: ops.AttentionMetadata | None = None
    disk: tuple[tuple[Segment, Ints], ...] = ()

    @property
    def is_offloaded(self) -> bool:
        """Whether some of the pages are not near."""
        return self.host is not None or bool(self.disk)


class TieredKV(TieredSequences, OffloadedKVBase, KVCache):
    """KVCache whose pages lie at up to three levels.

    A sequence's pages are made as it grows, hot, and move away when others need the room: least
    worth first, but never its first pages nor its last.  Layers with a sliding window keep rings of
    their own, which are always hot.

    sliding_windows  by window
    """

    def __init__(
        self,
        device_store: PageStore,
        host_store: PageStore | None,
        disk_pages: DiskPages | None,
        sliding_windows: Sequence[SlidingWindowPages],
        policy: Callable[[int], PageEvictionPolicy],
        *,
        chunk: int,
        selection: Callable[[PageMigration], Selection] | None = None,
        stay: PinnedPages = _PINNED,
        clock: Callable[[], float] = time.monotonic,
        device: Device | None = None,
    ) -> None:
        """Takes over the memories, and releases them in the end.

        device_store  pages of all layers without a window: `min_device_pages` of one sequence at
                      least
        chunk         tokens that a step may append, all but one of each sequence
        selection     what decoding tokens attend to; None: everything
        device        where layers compute, if not on the CPU
        """
        assert device_store.count >= min_device_pages(chunk, 1, stay)
        places = PageMigration(device_store, host_store, disk_pages, policy, clock, device)
        super().__init__(places, sliding_windows, selection, stay, chunk)
        self._windows_by_layer = {
            index: rings for rings in sliding_windows for index in rings.layers
        }
        self.sliding_windows = {
            kept.window: made for made in sliding_windows for kept in made.layers.values()
        }
        self._order = sorted(device_store.layers)
        self._beside_device = device is not None
        self._steps = 0
        self._every = _SCORED_EVERY
        self._appended: Step | None = None  # of the last call of append
        self._step: Step | None = None  # that `where` is of
        self._where = PagesOfStep(ops.AttentionMetadata(()))

    def release(self) -> None:
        """Give all memory back.  The cache cannot be used afterwards."""
        if self._selection is not None:
            self._selection.release()
        self._places.release()
        for rings in self._windows:
            rings.release()

    @override
    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        if layer not in self._windows_by_layer and self._appended is not step:
            self._begin(step)
        super().append(layer, step, key, value)

    @override
    def device_segments(self, layer: int, step: Step) -> ops.AttentionMetadata:
        rings = self._windows_by_layer.get(layer)
        return self._where_is(step).device if rings is None else rings.runs_of(step)

    def _attend_whole(
        self,
        layer: int,
        step: Step,
        query: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        kept, where = self._places.device.layers[layer], self._where_is(step)
        asked = Query(query)
        hidden: Mapping[int, Ints] = _NOTHING
        if self._selection is not None:
            where, hidden = self.chosen(layer, step, asked)
        weighs = layer == self.weighed_layer
        if not where.is_offloaded and not weighs:
            options["sinks"] = sinks
            return ops.paged_attention_output(kept.pages, kept.slot, where.device, query, **options)
        merged = LseMerge((*query.shape[:2], kept.pages.layout.value_dim), query.device)
        if any(run.length < MANY_TOKENS for run in step.segments):
            _ = asked.there  # before the device has something else to do
        ops.attend_part(
            kept.pages,
            kept.slot,
            where.device,
            query,
            merged.out,
            merged.lse,
            sinks=sinks,
            **options,
        )
        begin = time.perf_counter()
        attend_on_host(self.offloaded(layer, where), asked, merged, **options)
        self.account.host_s += time.perf_counter() - begin
        if weighs:
            self.weigh(layer, step, asked, merged.lse, options, hidden)
        return merged.out.to(query.dtype)

    @override
    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        if rings := self._windows_by_layer.get(layer):
            kept, table = rings.layers[layer], rings.table(run.sequence, run.context)
            return ops.read_pages(kept.pages, kept.slot, table, run.context)
        hot = self._places.device
        layout = hot.layers[layer].pages.layout
        ids = self._sequences[run.sequence].pages[: pages_of(run.context)]
        shape = len(ids), PAGE_TOKENS, layout.heads
        dtype, device = layout.encoding.dtype, hot.device
        if not dtype.is_floating_point or dtype.itemsize == 1:
            dtype = torch.float32  # as `ops.read_pages`
        key = torch.empty(*shape, layout.key_dim, dtype=dtype, device=device)
        value = key[..., : layout.value_dim]
        if not layout.latent:
            value = torch.empty(*shape, layout.value_dim, dtype=dtype, device=device)
        for pages, slot, table, at in self._places.lying(layer, ids):
            rows = ops.read_pages(pages, slot, table, PAGE_TOKENS * len(table))
            key[at] = rows[0].unflatten(0, (-1, PAGE_TOKENS)).to(key)
            if not layout.latent:
                value[at] = rows[1].unflatten(0, (-1, PAGE_TOKENS)).to(value)
        return key.flatten(0, 1)[: run.context], value.flatten(0, 1)[: run.context]

    @property
    def device_tokens(self) -> int:
        """Positions that can be near at once."""
        return self._places.device.count * PAGE_TOKENS

    @property
    def selects(self) -> bool:
        """Whether decoding tokens attend to some of the pages only."""
        return self._selection is not None

    def kept(self, layer: int) -> KeptLayer:
        """Where a layer's near pages are, or those of its window."""
        rings = self._windows_by_layer.get(layer)
        return (rings.layers if rings else self._places.device.layers)[layer]

    def staging(self, layer: int) -> tuple[ops.Pages, ops.Pages, int] | None:
        """Where a layer's pages of host memory can be fetched to, they, and the layer in them.

        None where a device has no kernel for that, or no room.
        """
        hot, warm = self._places.device, self._places.host
        if warm is None or layer not in hot.staged:
            return None
        if hot.device.type != "cpu" and not self._places.crosses:
            return None
        kept = warm.layers[layer]
        return hot.staged[layer], kept.pages, kept.slot

    @property
    def crosses(self) -> bool:
        """Whether kernels of a device read and write the pages of host memory."""
        return self._places.crosses

    @property
    def whole_layers(self) -> Sequence[int]:
        """Those without a window."""
        return self._order

    def begin(self, step: Step) -> PagesOfStep:
        """Make the pages that a step appends to, unless `append` was called; where its runs lie.

        From now on no page moves until the next step.
        """
        if self._appended is not step:
            self._begin(step)
        return self._where_is(step)

    @property
    def weighed_layer(self) -> int | None:
        """Where it is time to look at what the tokens of this step attend to."""
        if self._steps % self._every or not self._order:
            return None
        return self._order[self._steps // self._every % len(self._order)]

    def chosen(
        self, layer: int, step: Step, asked: Query
    ) -> tuple[PagesOfStep, Mapping[int, Ints]]:
        """Where the pages are that a step attends to in `layer`; by sequence, those it leaves out.

        Beside a device near pages are never left out: it attends to them before anybody knows what
        its tokens ask for, so that a step can be captured.
        """
        hidden = self._hidden(layer, step, asked)
        return self._places_of(step, hidden), hidden

    def _hidden(self, layer: int, step: Step, asked: Query) -> dict[int, Ints]:
        assert self._selection is not None
        hidden = {}
        for run in step.segments:
            ids = self._sequences[run.sequence].pages[: pages_of(run.context)]
            if run.length == 1 and len(ids) > self._stay.pages:
                query = asked.there[run.offset]
                left = self._selection.hidden(layer, ids, query, self._stay)
                if self._beside_device:
                    left = left[self._places.page_table.level_of(left) != PageTier.DEVICE]
                hidden[run.sequence] = left
        return hidden

    def weigh(
        self,
        layer: int,
        step: Step,
        asked: Query,
        lse: torch.Tensor,
        options: Mapping[str, Any],
        hidden: Mapping[int, Ints] = _NOTHING,
    ) -> None:
        """Tell the policy what each run's last token attended to; the last page always stays.

        lse       f32 [tokens, q_heads], of all that tokens see
        options   scale and softcap
        hidden    pages that were left out, by sequence
        """
        for run in step.segments:
            row = slice(run.offset + run.length - 1, run.offset + run.length)
            ids = self._sequences[run.sequence].pages[: run.context // PAGE_TOKENS]
            ids = np.setdiff1d(ids, hidden.get(run.sequence, _NONE))
            attention = np.zeros(len(ids))
            for pages, slot, table, at in self._places.lying(layer, ids):
                query = (asked.there if pages.memory.is_cpu else asked.here)[row]
                some = ops.AttentionMetadata(
                    [ops.PagedSegment(0, 1, PAGE_TOKENS * len(table) - 1, table)]
                )
                logs = lse[row].to(query.device)
                [masses] = ops.page_masses(pages, slot, some, query, logs, **options)
                attention[at] = masses.cpu()
            self._places.policy.weighed(ids, attention * len(ids), self._places.clock())

    def offloaded(self, layer: int, where: PagesOfStep) -> PageChunks:
        """Pages of a step's runs that are not near."""
        warm, cold = self._places.host, self._places.disk
        if where.host is not None and warm is not None:
            kept = warm.layers[layer]
            count = sum(len(run.table) for run in where.host.runs)
            self.account.host_bytes += count * kept.pages.layout.page_bytes
            yield kept.pages, kept.slot, where.host
        if where.disk and cold is not None:
            tables = [slots for _, slots in where.disk]
            self.account.disk_bytes += cold.read_bytes(layer, tables)
            for pages, found in cold.chunks(layer, tables):
                runs = [
                    _over(run, table)
                    for (run, _), (_, table) in zip(where.disk, found, strict=True)
                    if len(table)
                ]
                yield pages, 0, ops.AttentionMetadata(runs)

    def _where_is(self, step: Step) -> PagesOfStep:
        """A step's runs by level, or those of a part of it that has been appended."""
        if self._step is not step:
            self._where = self._places_of(step, {})
            self._step = step
        return self._where

    def _begin(self, step: Step) -> None:
        """Make the pages that a step appends to; from now on no page moves until the next one."""
        self._appended = step
        self._steps += 1
        # In a long prompt pages leave after a step or two, and by then it has to be known which are
        # of little attention.  Beside so many tokens the look costs nothing.
        prompt = self._places.keeps_low and max(run.length for run in step.segments) >= PAGE_TOKENS
        self._every = 1 if prompt else _SCORED_EVERY
        if self._steps % _SCORED_EVERY == 1:
            self._places.promote(self._stays())
        counts = {}
        for run in step.segments:
            sequence = self._sequences[run.sequence]
            sequence.tokens = run.context
            counts[run.sequence] = pages_of(run.context) - len(sequence.pages)
        self._places.write_back(self._unmade, self._stays)  # before there are empty pages
        self._grow(counts)

    def _places_of(self, step: Step, hidden: Mapping[int, Ints]) -> PagesOfStep:
        """A step's runs over all pages but the `hidden` ones, by sequence."""
        hot, warm, cold = [], [], []
        book = self._places.page_table
        for run in step.segments:
            every = self._sequences[run.sequence].pages[: pages_of(run.context)]
            ids = every
            if len(left := hidden.get(run.sequence, _NONE)):
                ids = every[~np.isin(every, left)]
            levels, slots = book.level_of(ids), book.slots_of(ids)
            near = levels == PageTier.DEVICE
            # What is elsewhere comes before the run's own tokens: without it they stand earlier.
            start = run.start - PAGE_TOKENS * int(len(every) - near.sum())
            # To a device they go with all that kernels are told of runs.
            hot.append(ops.PagedSegment(run.offset, run.length, start, to_tensor(slots[near])))
            if len(there := slots[levels == PageTier.HOST]):
                warm.append(_over(run, to_tensor(there)))
            if len(there := slots[levels == PageTier.DISK]):
                cold.append((run, there))
        return PagesOfStep(
            ops.AttentionMetadata(hot), ops.AttentionMetadata(warm) if warm else None, tuple(cold)
        )


def _over(run: Segment, table: torch.Tensor) -> ops.PagedSegment:
    """A run's tokens over whole pages of its past, all of which they see."""
    seen = PAGE_TOKENS * len(table)
    return ops.PagedSegment(run.offset, run.length, seen, table, seen)
