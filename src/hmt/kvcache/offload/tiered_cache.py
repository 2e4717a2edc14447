"""A paged KV cache over several memories: device pages in full, others in fewer bits or on disk.

Attention goes to where the pages are, and its parts merge exactly.  Which pages move away is the
policy's to say; none is ever lost.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hmt.contracts.kv import KVAccount, PinnedPages, min_device_pages
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Segment, Step
from hmt.kernels import ops
from hmt.kernels.backend_registry import backend_of, backend_on
from hmt.kvcache.allocator import SCORED_EVERY, KVAllocator, pages_of
from hmt.kvcache.eviction import PageEvictionPolicy
from hmt.kvcache.offload.attention_merge import LseMerge
from hmt.kvcache.offload.base import KeyRanges, LayerStates, OffloadedKVBase
from hmt.kvcache.offload.disk_pages import DiskPages
from hmt.kvcache.offload.host_attention import MANY_TOKENS, PageChunks, Query, attend_on_host
from hmt.kvcache.offload.page_migration import PageMigration
from hmt.kvcache.offload.sliding_window import SlidingWindowPages
from hmt.kvcache.offload.sparse_selection import Selection
from hmt.kvcache.offload.tier_stores import TierStores, to_tensor
from hmt.kvcache.page_store import KeptLayer, PagesByKind, PageStore
from hmt.kvcache.page_table import Ints, PageTier
from hmt.memory.device import Device

_PINNED = PinnedPages()
_NONE = np.zeros(0, dtype=np.int64)
_NOTHING: Mapping[int, Ints] = {}
_NO_RANGES: KeyRanges = {}


@dataclass(frozen=True, slots=True)
class PagesOfStep:
    """A step's runs by tier; on the disk with places instead of tables."""

    device: ops.AttentionMetadata
    host: ops.AttentionMetadata | None = None
    disk: tuple[tuple[Segment, Ints], ...] = ()

    @property
    def is_offloaded(self) -> bool:
        """Whether some of the pages lie elsewhere."""
        return self.host is not None or bool(self.disk)


class TieredKV(OffloadedKVBase):
    """KVCache and KVStorage whose pages lie in up to three tiers.

    A sequence's pages are made as it grows, where layers compute, and move away when others need
    the room: least worth first, but never its first pages nor its last.  Layers with a sliding
    window keep separate rings, which never move.

    allocator        of the sequences
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
        state: LayerStates = None,
        ranges: KeyRanges = _NO_RANGES,
    ) -> None:
        """Takes over the memories, and releases them in the end.

        device_store  pages of all layers without a window: `min_device_pages` of one sequence at
                      least
        chunk         tokens that a step may append, all but one of each sequence
        selection     what decoding tokens attend to; None: everything
        device        where layers compute, if not on the CPU
        state         of layers of the same place, which never moves
        ranges        of keys, by layer: of some without a window whose scores are `relative`
        """
        assert device_store.count >= min_device_pages(chunk, 1, stay)
        self._windows = tuple(sliding_windows)
        self._stores = TierStores(device_store, host_store, disk_pages, device)
        self._places = PageMigration(self._stores, policy, clock)
        self._state = state
        self._ranges = {layer: keys.to(self.where) for layer, keys in ranges.items()}
        slots = [rings.slots for rings in sliding_windows]
        slots += [] if state is None else [state.slots]
        self.allocator = KVAllocator(self._places, slots, pinned=stay, chunk=chunk)
        self.allocator.attach(self)
        self._selection = None if selection is None else selection(self._places)
        self._stay = stay
        self._windows_by_layer = {
            index: rings for rings in sliding_windows for index in rings.layers
        }
        self.sliding_windows = {
            kept.window: made for made in sliding_windows for kept in made.layers.values()
        }
        self._order = sorted(i for i, kept in device_store.layers.items() if kept.attended)
        self._beside_device = device is not None
        self._every = SCORED_EVERY
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
        if self._state is not None:
            self._state.release()

    @property
    def account(self) -> KVAccount:
        """What has happened since the cache was made."""
        return self.allocator.account

    def held(self) -> dict[str, int]:
        """Pages that are taken now, by level."""
        return self._places.held()

    def copy_page(self, page: Ints, to: Ints) -> None:
        """Implements KVStorage."""
        self._stores.copy_page(self._places.page_table, page, to)

    def copy_slots(self, sequence: int, to: int) -> None:
        """Implements KVStorage: rings of sliding windows, and recurrent state."""
        for rings in self._windows:
            rings.copy(sequence, to)
        if self._state is not None:
            self._state.copy(sequence, to)

    def rollback(self, sequence: int, tokens: int) -> None:
        """Implements KVStorage: pages are written again."""
        if self._state is not None:
            self._state.rollback(sequence, tokens)

    def pages_made(self, ids: Ints) -> None:
        """Implements KVStorage."""
        if self._selection is not None:
            self._selection.forget(ids)

    def copy_out(self, ids: Ints, kinds: PagesByKind) -> None:
        """Fill pages 0 and on of `kinds`, in host memory, with pages `ids`, wherever they lie.

        Raises DiskReadError.
        """
        self._stores.copy_out(self._places.page_table, ids, kinds)

    def copy_in(self, ids: Ints, kinds: PagesByKind) -> None:
        """Let pages `ids`, which were just made, hold pages 0 and on of `kinds`."""
        self._stores.copy_in(self._places.page_table, ids, kinds)

    def append(self, layer: int, step: Step, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See KVCache."""
        if layer not in self._windows_by_layer and self._appended is not step:
            self._begin(step)
        super().append(layer, step, key, value)

    def device_segments(self, layer: int, step: Step) -> ops.AttentionMetadata:
        """See OffloadedKVBase."""
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
        kept, where = self._stores.device.layers[layer], self._where_is(step)
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

    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache."""
        if rings := self._windows_by_layer.get(layer):
            kept, table = rings.layers[layer], rings.table(run.sequence, run.context)
            return ops.read_pages(kept.pages, kept.slot, table, run.context)
        device_store = self._stores.device
        layout = device_store.layers[layer].pages.layout
        ids = self.allocator.pages(run.sequence)[: pages_of(run.context)]
        shape = len(ids), PAGE_TOKENS, layout.heads
        dtype, device = _read_type(layout), device_store.device
        key = torch.empty(*shape, layout.key_dim, dtype=dtype, device=device)
        value = key[..., : layout.value_dim]
        if not layout.latent:
            value = torch.empty(*shape, layout.value_dim, dtype=dtype, device=device)
        for pages, slot, table, at in self._stores.lying(self._places.page_table, layer, ids):
            rows = ops.read_pages(pages, slot, table, PAGE_TOKENS * len(table))
            key[at] = rows[0].unflatten(0, (-1, PAGE_TOKENS)).to(key)
            if not layout.latent:
                value[at] = rows[1].unflatten(0, (-1, PAGE_TOKENS)).to(value)
        rows = key.flatten(0, 1)[: run.context], value.flatten(0, 1)[: run.context]
        return self._as_given(layer, *rows)

    def gather(
        self, layer: int, run: Segment, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVCache.  Pages that some position is in count as attended to."""
        if rings := self._windows_by_layer.get(layer):
            return rings.gather(layer, run, positions)
        device_store = self._stores.device
        layout = device_store.layers[layer].pages.layout
        at = positions.cpu().numpy()
        numbers, which, counts = np.unique(
            at // PAGE_TOKENS, return_inverse=True, return_counts=True
        )
        every = self.allocator.pages(run.sequence)
        ids = every[numbers]
        shape = len(at), layout.heads
        dtype, device = _read_type(layout), device_store.device
        key = torch.empty(*shape, layout.key_dim, dtype=dtype, device=device)
        value = key[..., : layout.value_dim]
        if not layout.latent:
            value = torch.empty(*shape, layout.value_dim, dtype=dtype, device=device)
        slots = torch.from_numpy(at % PAGE_TOKENS)
        for pages, slot, table, entries in self._stores.lying(self._places.page_table, layer, ids):
            lying = torch.full((len(ids),), -1)
            lying[entries] = table.cpu()
            pages_of_rows = lying[torch.from_numpy(which)]
            chosen = torch.nonzero(pages_of_rows >= 0).flatten()
            where = pages.memory.device
            rows = pages_of_rows[chosen].to(where), slots[chosen].to(where)
            chosen = chosen.to(device)
            key[chosen] = ops.read_rows(pages, slot, *rows).to(key)
            if not layout.latent:
                value[chosen] = ops.read_value_rows(pages, slot, *rows).to(value)
        if layer == self.weighed_layer and len(at):
            equal = len(at) / pages_of(run.context)  # positions, if each page had as many
            attention = counts.astype(np.float64) / equal
            self._places.policy.weighed(ids, attention, self._places.clock())
        return self._as_given(layer, key, value)

    def _as_given(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of what was read of a layer without a window."""
        if layer not in self._ranges:
            return key, value
        key = self._ranges[layer].restored(key)
        layout = self.kept(layer).pages.layout
        return key, key[..., : layout.value_dim] if layout.latent else value

    @property
    def ranges(self) -> KeyRanges:
        """Of keys, by layer, where layers compute."""
        return self._ranges

    @property
    def where(self) -> torch.device:
        """Where layers compute."""
        return self._stores.device.device

    @property
    def device_tokens(self) -> int:
        """Positions that can be where layers compute at once."""
        return self._stores.device.count * PAGE_TOKENS

    @property
    def selects(self) -> bool:
        """Whether decoding tokens attend to some of the pages only."""
        return self._selection is not None

    def kept(self, layer: int) -> KeptLayer:
        """Where a layer's device pages are, or those of its window."""
        rings = self._windows_by_layer.get(layer)
        return (rings.layers if rings else self._stores.device.layers)[layer]

    def staging(self, layer: int) -> tuple[ops.Pages, ops.Pages, int] | None:
        """Where a layer's pages of host memory can be fetched to, they, and the layer in them.

        None where a device has no kernel for that, or no room.
        """
        device_store, host_store = self._stores.device, self._stores.host
        if host_store is None or layer not in device_store.staged:
            return None
        if not backend_on(device_store.device).on_host and not self._stores.crosses:
            return None
        kept = host_store.layers[layer]
        return device_store.staged[layer], kept.pages, kept.slot

    @property
    def crosses(self) -> bool:
        """Whether kernels of a device read and write the pages of host memory."""
        return self._stores.crosses

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
        if self.allocator.steps % self._every or not self._order:
            return None
        return self._order[self.allocator.steps // self._every % len(self._order)]

    def chosen(
        self, layer: int, step: Step, asked: Query
    ) -> tuple[PagesOfStep, Mapping[int, Ints]]:
        """Where the pages are that a step attends to in `layer`; by sequence, those it leaves out.

        Beside a device its pages are never left out: it attends to them before it is known what
        its tokens ask for, so that a step can be captured.
        """
        hidden = self._hidden(layer, step, asked)
        return self._places_of(step, hidden), hidden

    def _hidden(self, layer: int, step: Step, asked: Query) -> dict[int, Ints]:
        assert self._selection is not None
        hidden = {}
        for run in step.segments:
            ids = self.allocator.pages(run.sequence)[: pages_of(run.context)]
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
            ids = self.allocator.pages(run.sequence)[: run.context // PAGE_TOKENS]
            ids = np.setdiff1d(ids, hidden.get(run.sequence, _NONE))
            attention = np.zeros(len(ids))
            for pages, slot, table, at in self._stores.lying(self._places.page_table, layer, ids):
                query = (asked.there if backend_of(pages.memory).on_host else asked.here)[row]
                some = ops.AttentionMetadata(
                    [ops.PagedSegment(0, 1, PAGE_TOKENS * len(table) - 1, table)]
                )
                logs = lse[row].to(query.device)
                [masses] = ops.page_masses(pages, slot, some, query, logs, **options)
                attention[at] = masses.cpu()
            self._places.policy.weighed(ids, attention * len(ids), self._places.clock())

    def offloaded(self, layer: int, where: PagesOfStep) -> PageChunks:
        """Pages of a step's runs that lie elsewhere."""
        host_store, disk_pages = self._stores.host, self._stores.disk
        if where.host is not None and host_store is not None:
            kept = host_store.layers[layer]
            count = sum(len(run.table) for run in where.host.runs)
            self.account.host_bytes += count * kept.pages.layout.page_bytes
            yield kept.pages, kept.slot, where.host
        if where.disk and disk_pages is not None:
            tables = [slots for _, slots in where.disk]
            self.account.disk_bytes += disk_pages.read_bytes(layer, tables)
            for pages, found in disk_pages.chunks(layer, tables):
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
        # In a long prompt pages leave after a step or two, and by then it has to be known which are
        # of little attention.  Beside so many tokens the look costs nothing.
        prompt = self._places.keeps_low and max(run.length for run in step.segments) >= PAGE_TOKENS
        self._every = 1 if prompt else SCORED_EVERY
        self.allocator.begin_step(step.segments)

    def _places_of(self, step: Step, hidden: Mapping[int, Ints]) -> PagesOfStep:
        """A step's runs over all pages but the `hidden` ones, by sequence."""
        on_device, on_host, on_disk = [], [], []
        page_table = self._places.page_table
        for run in step.segments:
            every = self.allocator.pages(run.sequence)[: pages_of(run.context)]
            ids = every
            if len(left := hidden.get(run.sequence, _NONE)):
                ids = every[~np.isin(every, left)]
            levels, slots = page_table.level_of(ids), page_table.slots_of(ids)
            here = levels == PageTier.DEVICE
            # What is elsewhere comes before the run's own tokens: without it they stand earlier.
            start = run.start - PAGE_TOKENS * int(len(every) - here.sum())
            # To a device they go with all that kernels are told of runs.
            on_device.append(
                ops.PagedSegment(run.offset, run.length, start, to_tensor(slots[here]))
            )
            if len(there := slots[levels == PageTier.HOST]):
                on_host.append(_over(run, to_tensor(there)))
            if len(there := slots[levels == PageTier.DISK]):
                on_disk.append((run, there))
        return PagesOfStep(
            ops.AttentionMetadata(on_device),
            ops.AttentionMetadata(on_host) if on_host else None,
            tuple(on_disk),
        )


def _read_type(layout: ops.PageLayout) -> torch.dtype:
    """That of rows that are read, as in `ops.read_pages`."""
    dtype = layout.encoding.dtype
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32


def _over(run: Segment, table: torch.Tensor) -> ops.PagedSegment:
    """A run's tokens over whole pages of its past, all of which they see."""
    seen = PAGE_TOKENS * len(table)
    return ops.PagedSegment(run.offset, run.length, seen, table, seen)
