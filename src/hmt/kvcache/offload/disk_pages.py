"""Pages on the disk: written by groups, read layer by layer ahead of attention over them."""

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hmt.base.errors import DiskReadError, HMTError, MachineError, os_reason
from hmt.base.units import format_bytes
from hmt.contracts.kv import DISK_BUFFERS, GROUP_PAGES
from hmt.contracts.model import KVKind, KVLayer
from hmt.contracts.store import Priority
from hmt.kernels import ops
from hmt.kernels.backend_registry import backend_on
from hmt.kvcache.codecs import LayerCodec
from hmt.kvcache.offload.disk_layout import (
    GroupFormat,
    LowAttentionPages,
    Mask,
    disk_bytes,
    group_formats,
    pages_in,
    stride_of,
)
from hmt.kvcache.page_layout import kinds_of
from hmt.kvcache.page_store import PageStore, Pool
from hmt.kvcache.page_table import GroupedPageSlots, Ints
from hmt.memory import DiskRead, ReadQueue


@dataclass(frozen=True, slots=True)
class _PageExtent:
    """Where a layer's pages are in the file: those of its kind's group g from begin + g * step."""

    form: GroupFormat
    slot: int  # among the layers of its kind
    begin: int
    step: int
    group_bytes: int  # the most


class DiskPages:
    """Pages of some layers in a file of its own, which lives as long as this does.

    The file is as large from the start as it can become, so that a full disk is found then.
    """

    def __init__(
        self,
        folder: Path,
        layers: Mapping[int, KVLayer],
        groups: int,
        encoding: ops.PageEncoding,
        pool: Pool[Any],
        queue: ReadQueue,
        *,
        chunk_bytes: int,
        codecs: Mapping[int, LayerCodec] | None = None,
        low: LowAttentionPages | None = None,
    ) -> None:
        """Room for `groups` times 16 pages.

        They are kept in `encoding`; or by `codecs`, one for each layer, and decoded to `encoding`
        when they are read.  Those of low attention are kept as `low` says, which takes no more.

        `pool` gives `DISK_BUFFERS` buffers of `chunk_bytes`, at least one group of one layer each,
        and one for a group of all layers of a kind.  Raises MachineError where there is no such
        room on the disk, BudgetError where there is none in the pool.
        """
        self.slots = GroupedPageSlots(groups, GROUP_PAGES)
        self.low = low
        self._queue = queue
        self._pool = pool
        self._places: dict[int, _PageExtent] = {}
        self._members: list[list[int]] = []
        # By place: whether a page is of low attention, and its number among those like it.
        self._is_low = np.zeros(groups * GROUP_PAGES, dtype=bool)
        self._rank = np.arange(groups * GROUP_PAGES) % GROUP_PAGES
        end, forms = 0, group_formats(layers, encoding, codecs, low)
        for _, members in kinds_of(layers):
            each = forms[members[0]].nbytes()
            step = len(members) * each
            for at, index in enumerate(members):
                assert forms[index].nbytes(GROUP_PAGES * (low is not None)) <= each
                self._places[index] = _PageExtent(forms[index], at, end, step, each)
            self._members.append(members)
            end += groups * step
        _, widest, group = disk_bytes(layers, encoding, codecs, low)
        self.nbytes = end
        self._file, self._path = _own_file(folder, end)
        self._bounce = pool.allocate(group)
        self._buffers = [pool.allocate(max(chunk_bytes, widest)) for _ in range(DISK_BUFFERS)]
        decodes = any(form.decodes for form in forms.values())
        self._decoded = self._buffers.pop() if decodes else None  # read through one buffer less
        # Each token selects other pages in each layer, which are not known ahead.
        selects = any(layer.kind is KVKind.INDEX for layer in layers.values())
        self._ahead = _ReadAhead(self, sorted(layers), beyond=not selects)
        self._writer = _writer()

    def write(
        self, slots: Ints, source: PageStore, theirs: Ints, low: Mask | None = None
    ) -> "Future[None]":
        """Begin to write pages `theirs` of `source` to `slots`, which are those of new groups.

        They are encoded and written by a thread, one call after the other.  Until that has ended
        they must not change, nor slots be read or used for others.  Pages of a device are written
        at once, on the caller's queue there, behind what has made them.

        low   which of them are of low attention

        The result raises DiskReadError when the disk fails.
        """
        self._ahead.reset()
        self._note_forms(slots, low)
        if backend_on(source.device).on_host:
            return self._writer.submit(self._write, slots, source, theirs)
        self._writer.submit(int).result()  # nothing passes through the memory for that
        ended: Future[None] = Future()
        try:
            ended.set_result(self._write(slots, source, theirs))
        except DiskReadError as error:
            ended.set_exception(error)
        return ended

    @torch.inference_mode()
    def _write(self, slots: Ints, source: PageStore, theirs: Ints) -> None:
        numbers = torch.from_numpy(theirs).to(source.device)
        for first in range(0, len(slots), GROUP_PAGES):
            group = int(slots[first]) // GROUP_PAGES
            chosen = numbers[first : first + GROUP_PAGES]
            for kind, members in enumerate(self._members):
                self._write_group(group, members, source.kinds[kind][0], chosen)

    def _note_forms(self, slots: Ints, low: Mask | None) -> None:
        """Places that are not filled count as usual ones, behind all others."""
        groups = np.unique(slots // GROUP_PAGES)
        places = (groups[:, None] * GROUP_PAGES + np.arange(GROUP_PAGES)).ravel()
        self._is_low[places] = False
        if low is not None:
            self._is_low[slots] = low
        is_low = self._is_low[places].reshape(-1, GROUP_PAGES)
        ranks = np.where(is_low, is_low.cumsum(1), (~is_low).cumsum(1)) - 1
        self._rank[places] = ranks.ravel()

    def _low_in(self, groups: Ints) -> Ints:
        """How many pages of each group are of low attention."""
        count: Ints = self._is_low.reshape(-1, GROUP_PAGES)[groups].sum(1)
        return count

    def _write_group(
        self, group: int, members: list[int], source: ops.Pages, chosen: torch.Tensor
    ) -> None:
        place, begin = self._places[members[0]], group * GROUP_PAGES
        low = self._is_low[begin : begin + len(chosen)]
        each = place.form.nbytes(int(low.sum()))
        memory = self._bounce.tensor[: len(members) * each]
        for at, extent in enumerate(memory.split(each)):
            self._places[members[at]].form.write(extent, source, at, chosen, low)
        view, offset = memory.numpy().data, place.begin + group * place.step
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise DiskReadError(
                f"KV pages could not be written to the disk: {os_reason(error)}; "
                "name another folder with --kv-offload-dir"
            ) from error

    def chunks(
        self, layer: int, tables: Sequence[Ints]
    ) -> Iterator[tuple[ops.Pages, list[tuple[Ints, torch.Tensor]]]]:
        """The pages of `layer` at places `tables`, some at a time, in memory.

        Yields pages of one layer, and for each table which of its entries are there, and where
        (int64).  Layers are best asked for in order, for what comes next is read meanwhile.  Pages
        stay until the next ones are asked for.  Raises DiskReadError when the disk fails.
        """
        groups = np.unique(np.concatenate(tables) // GROUP_PAGES)
        place = self._places[layer]
        for chosen, buffer in self._ahead.read(layer, groups):
            memory = buffer[: len(chosen) * place.group_bytes].view(len(chosen), -1)
            for is_low, form in enumerate(place.form.forms):
                if form.codec is None:
                    firsts = GROUP_PAGES * np.arange(len(chosen))
                    found = self._entries(tables, chosen, firsts, low=bool(is_low))
                    if any(len(entries) for entries, _ in found):
                        yield pages_in(memory.flatten(), form.layout), found
                else:
                    yield from self._decoded_chunks(place, memory, tables, chosen, bool(is_low))

    def _decoded_chunks(
        self,
        place: _PageExtent,
        memory: torch.Tensor,
        tables: Sequence[Ints],
        chosen: Ints,
        low: bool,
    ) -> Iterator[tuple[ops.Pages, list[tuple[Ints, torch.Tensor]]]]:
        """Pages of one form of groups `chosen`, which lie in `memory` [groups, bytes]."""
        assert self._decoded is not None
        room, form = self._decoded.tensor, place.form.forms[low]
        some = room.nbytes // (GROUP_PAGES * stride_of(form.layout))  # groups
        for first in range(0, len(chosen), some):
            part, rows = chosen[first : first + some], memory[first : first + some]
            counts = self._low_in(part)
            each = counts if low else GROUP_PAGES - counts
            firsts = np.cumsum(each) - each
            found = self._entries(tables, part, firsts, low=low)
            if any(len(entries) for entries, _ in found):
                units = place.form.units(rows, counts, of_low=low)
                pages = pages_in(room[: each.sum() * stride_of(form.layout)], form.layout)
                form.decode(pages, units)
                yield pages, found

    def _entries(
        self, tables: Sequence[Ints], groups: Ints, firsts: Ints, *, low: bool
    ) -> list[tuple[Ints, torch.Tensor]]:
        """Which entries of each table are in `groups` and of low attention, or not, and where.

        firsts   by group: where its first page of these is
        """
        found = []
        for table in tables:
            there = np.isin(table // GROUP_PAGES, groups) & (self._is_low[table] == low)
            entries = np.flatnonzero(there)
            slots = table[entries]
            at = firsts[np.searchsorted(groups, slots // GROUP_PAGES)] + self._rank[slots]
            found.append((entries, torch.from_numpy(at)))
        return found

    def read_bytes(self, layer: int, tables: Sequence[Ints]) -> int:
        """What `pieces` reads for these."""
        groups, form = np.unique(np.concatenate(tables) // GROUP_PAGES), self._places[layer].form
        counts, times = np.unique(self._low_in(groups), return_counts=True)
        return sum(
            n * form.nbytes(low) for low, n in zip(counts.tolist(), times.tolist(), strict=True)
        )

    def close(self) -> None:
        """Delete the file, and give memory back to the pool."""
        self._writer.shutdown()
        self._ahead.reset()
        for buffer in (self._bounce, self._decoded, *self._buffers):
            if buffer is not None:
                self._pool.free(buffer)
        os.close(self._file)

    def _reads(self, layer: int, groups: Ints, memory: memoryview) -> list[DiskRead]:
        place, reads = self._places[layer], []
        for at, (group, low) in enumerate(zip(groups, self._low_in(groups), strict=True)):
            nbytes = place.form.nbytes(int(low))
            offset = place.begin + int(group) * place.step + place.slot * nbytes
            begin = at * place.group_bytes
            reads.append(
                DiskRead(self._path, offset, memory[begin : begin + nbytes], offset + nbytes)
            )
        return reads

    def _per_chunk(self, layer: int) -> int:
        nbytes: int = self._buffers[0].tensor.nbytes
        return nbytes // self._places[layer].group_bytes


class _ReadAhead:
    """Reads pieces in the order of layers, over and over, as long as pieces are taken.

    beyond   whether what comes behind the last piece of a layer is read ahead, too
    """

    def __init__(self, disk_pages: DiskPages, layers: list[int], *, beyond: bool) -> None:
        self._disk_pages = disk_pages
        self._beyond = beyond
        self._layers = layers
        self._groups: Ints = np.zeros(0, dtype=np.int64)
        self._waiting: list[tuple[int, int, _Reading]] = []  # (layer, first group, ..), in order
        self._next = 0  # buffer

    def read(self, layer: int, groups: Ints) -> Iterator[tuple[Ints, torch.Tensor]]:
        """Groups of `layer` piece by piece, with the memory that holds them."""
        if not np.array_equal(groups, self._groups) or (
            self._waiting and self._waiting[0][:2] != (layer, 0)
        ):
            self.reset()
            self._groups = groups
        at = (layer, 0)
        while True:
            # One buffer is in use by whoever takes pieces.
            while len(self._waiting) < len(self._disk_pages._buffers) - 1:
                begin = self._after(*self._waiting[-1][:2]) if self._waiting else at
                if not self._beyond and self._waiting and begin[1] == 0:
                    break
                self._waiting.append((*begin, self._begin(*begin)))
            found, first, reading = self._waiting.pop(0)
            assert (found, first) == at
            chosen = groups[first : first + self._disk_pages._per_chunk(layer)]
            yield chosen, reading.wait()
            at = self._after(layer, first)
            if at[1] == 0:
                return

    def reset(self) -> None:
        """Forget what was read ahead."""
        for _, _, reading in self._waiting:
            reading.forget()
        self._waiting.clear()
        self._groups = np.zeros(0, dtype=np.int64)

    def _after(self, layer: int, first: int) -> tuple[int, int]:
        first += self._disk_pages._per_chunk(layer)
        if first < len(self._groups):
            return layer, first
        return self._layers[(self._layers.index(layer) + 1) % len(self._layers)], 0

    def _begin(self, layer: int, first: int) -> "_Reading":
        disk_pages = self._disk_pages
        memory = disk_pages._buffers[self._next].tensor
        self._next = (self._next + 1) % len(disk_pages._buffers)
        groups = self._groups[first : first + disk_pages._per_chunk(layer)]
        return _Reading(
            disk_pages._queue, disk_pages._reads(layer, groups, memory.numpy().data), memory
        )


class _Reading:
    """A piece on its way."""

    def __init__(self, queue: ReadQueue, reads: list[DiskRead], memory: torch.Tensor) -> None:
        self._memory = memory
        self._ended = threading.Event()
        self._error: HMTError | None = None
        self._queue = queue
        # Sure, not needed: weights that a step waits for go first.
        self._ticket = queue.submit(reads, Priority.PREFETCH, self._done, owner="kv", light=True)

    def wait(self) -> torch.Tensor:
        """The memory, once it is filled.  Raises DiskReadError."""
        if not self._ended.is_set():
            self._queue.promote(self._ticket, Priority.DEMAND)
            self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._memory

    def forget(self) -> None:
        """Nobody wants it any more; returns when its memory can be used."""
        self._queue.cancel(self._ticket)
        self._ended.wait()

    def _done(self, error: HMTError | None) -> None:
        self._error = error
        self._ended.set()


def _writer() -> ThreadPoolExecutor:
    """A thread that computes alone: beside a step, a team of torch's would take all cores."""
    threads = torch.get_num_threads()
    made = ThreadPoolExecutor(1, "hmt-kv", torch.set_num_threads, (1,))
    made.submit(int).result()
    # The setting is kept per thread and, as the default of new threads, once for all.
    torch.set_num_threads(threads)
    return made


def _own_file(folder: Path, nbytes: int) -> tuple[int, Path]:
    """A file without a name of `nbytes` that the disk has room for."""
    try:
        file, name = tempfile.mkstemp(prefix="hmt-kv-", dir=folder)
    except OSError as error:
        raise MachineError(
            f"cannot write in {folder}: {os_reason(error)}; name a folder that exists and is yours "
            "with --kv-offload-dir"
        ) from error
    os.unlink(name)  # it vanishes with the process, however that ends
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        os.close(file)
        raise MachineError(
            f"{folder} has no room for {format_bytes(nbytes)} of keys and values: "
            f"{os_reason(error)}; lower --kv-offload-disk-memory"
        ) from error
    path = Path(f"/proc/{os.getpid()}/fd/{file}")
    try:
        # Past the page cache, where a second copy would take the memory that is being made room in.
        direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:  # tmpfs and some network mounts
        return file, path
    os.close(file)
    return direct, Path(f"/proc/{os.getpid()}/fd/{direct}")
