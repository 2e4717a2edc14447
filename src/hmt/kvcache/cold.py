"""Pages on the drive: written by groups, read layer by layer ahead of attention over them."""

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hmt.base.errors import DiskReadError, HMTError, MachineError
from hmt.base.units import format_bytes, round_up
from hmt.contracts.kv import COLD_BUFFERS, GROUP_PAGES
from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.contracts.store import Priority
from hmt.kernels import ops
from hmt.kvcache.book import GroupedSlots, Numbers
from hmt.kvcache.codecs import LayerCodec
from hmt.kvcache.pages import kinds_of, layout_of
from hmt.kvcache.store import PageStore, Pool, recode
from hmt.memory import DiskRead, TransferQueue

_STRIDE = 256  # pages begin at its multiples, so that groups begin at those of 4096
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer's pages are in the file: group g begins at begin + g * step."""

    layout: ops.PageLayout
    slot: int  # among the layers of its kind
    kind: int
    begin: int
    step: int
    group_bytes: int
    codec: LayerCodec | None  # what they are in the file, if not as `layout` says


def cold_bytes(
    layers: Mapping[int, KVLayer],
    encoding: ops.PageEncoding,
    codecs: Mapping[int, LayerCodec] | None = None,
) -> tuple[int, int, int]:
    """Bytes of a group of pages: of all layers, the largest of one layer, and of one kind.

    With `codecs`, the largest of one layer may be that of a group that was decoded.
    """
    whole, widest, kind = 0, 0, 0
    for layer, members in kinds_of(layers):
        layout = layout_of(layer, encoding, torch.device("cpu"))
        each = _group_bytes(layout, codecs[members[0]] if codecs else None)
        whole += each * len(members)
        widest, kind = max(widest, each, _group_bytes(layout)), max(kind, each * len(members))
    return whole, widest, kind


def _group_bytes(layout: ops.PageLayout, codec: LayerCodec | None = None) -> int:
    """Of one layer.  Pages that are read as they are begin where kernels like them to."""
    if codec is not None:
        return round_up(codec.group_bytes, _BLOCK)
    return GROUP_PAGES * _stride(layout)


def _stride(layout: ops.PageLayout) -> int:
    return round_up(layout.page_bytes, _STRIDE)


class ColdPages:
    """Pages of some layers in a file of its own, which lives as long as this does.

    The file is as large from the start as it can become, so that a full drive is found then.
    """

    def __init__(
        self,
        folder: Path,
        layers: Mapping[int, KVLayer],
        groups: int,
        encoding: ops.PageEncoding,
        pool: Pool[Any],
        queue: TransferQueue,
        *,
        piece_bytes: int,
        codecs: Mapping[int, LayerCodec] | None = None,
    ) -> None:
        """Room for `groups` times 16 pages.

        They are kept in `encoding`; or by `codecs`, one for each layer, and decoded to `encoding`
        when they are read.

        `pool` gives `COLD_BUFFERS` buffers of `piece_bytes`, at least one group of one layer each,
        and one for a group of all layers of a kind.  Raises MachineError where there is no such
        room on the drive, BudgetError where there is none in the pool.
        """
        self.slots = GroupedSlots(groups, GROUP_PAGES)
        self._queue = queue
        self._pool = pool
        self._places: dict[int, _Place] = {}
        self._members: list[list[int]] = []
        end = 0
        for kind, (layer, members) in enumerate(kinds_of(layers)):
            layout = layout_of(layer, encoding, torch.device("cpu"))
            each = _group_bytes(layout, codecs[members[0]] if codecs else None)
            step = len(members) * each
            for at, index in enumerate(members):
                codec = codecs[index] if codecs else None
                begin = end + at * each
                self._places[index] = _Place(layout, at, kind, begin, step, each, codec)
            self._members.append(members)
            end += groups * step
        _, widest, group = cold_bytes(layers, encoding, codecs)
        self.nbytes = end
        self._file, self._path = _own_file(folder, end)
        self._bounce = pool.allocate(group)
        self._buffers = [pool.allocate(max(piece_bytes, widest)) for _ in range(COLD_BUFFERS)]
        self._decoded = self._buffers.pop() if codecs else None  # read through one buffer less
        self._ahead = _Ahead(self, sorted(layers))

    def take(self, slots: Numbers, source: PageStore, theirs: torch.Tensor) -> None:
        """Write pages `theirs` of `source` to `slots`, which are those of whole new groups.

        Raises DiskReadError when the drive fails.
        """
        self._ahead.reset()
        for first in range(0, len(slots), GROUP_PAGES):
            group = int(slots[first]) // GROUP_PAGES
            chosen = theirs[first : first + GROUP_PAGES]
            for kind, members in enumerate(self._members):
                self._write_group(group, members, source.kinds[kind][0], chosen)

    def _write_group(
        self, group: int, members: list[int], source: ops.Pages, chosen: torch.Tensor
    ) -> None:
        numbers = torch.arange(len(chosen))
        place = self._places[members[0]]
        memory = self._bounce.tensor[: place.step]
        for at, extent in enumerate(memory.split(place.group_bytes)):
            if codec := self._places[members[at]].codec:
                _encode(extent, codec, source, at, chosen)
            else:
                recode(_pages(extent, place.layout), 0, numbers, source, at, chosen)
        view, offset = memory.numpy().data, place.begin + group * place.step
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise DiskReadError(
                f"keys and values could not be written to the drive: {error.strerror}; "
                "name another folder with --kv-disk"
            ) from error

    def pieces(
        self, layer: int, tables: Sequence[Numbers]
    ) -> Iterator[tuple[ops.Pages, list[tuple[Numbers, torch.Tensor]]]]:
        """The pages of `layer` at places `tables`, some at a time, in memory.

        Yields pages of one layer, and for each table which of its entries are there, and where
        (int64).  Layers are best asked for in order, for what comes next is read meanwhile.  Pages
        stay until the next ones are asked for.  Raises DiskReadError when the drive fails.
        """
        groups = np.unique(np.concatenate(tables) // GROUP_PAGES)
        place = self._places[layer]
        for chosen, buffer in self._ahead.read(layer, groups):
            memory = buffer[: len(chosen) * place.group_bytes]
            if place.codec is None:
                yield _pages(memory, place.layout), _entries(tables, chosen)
                continue
            assert self._decoded is not None
            room = self._decoded.tensor
            some = room.nbytes // _group_bytes(place.layout)  # groups
            for first in range(0, len(chosen), some):
                part = chosen[first : first + some]
                coded = memory.view(-1, place.group_bytes)[first : first + some]
                pages = _pages(room[: len(part) * _group_bytes(place.layout)], place.layout)
                _decode(pages, place.codec, coded)
                yield pages, _entries(tables, part)

    def read_bytes(self, layer: int, tables: Sequence[Numbers]) -> int:
        """What `pieces` reads for these."""
        groups = np.unique(np.concatenate(tables) // GROUP_PAGES)
        return len(groups) * self._places[layer].group_bytes

    def close(self) -> None:
        """Delete the file, and give memory back to the pool."""
        self._ahead.reset()
        for buffer in (self._bounce, self._decoded, *self._buffers):
            if buffer is not None:
                self._pool.free(buffer)
        os.close(self._file)

    def _reads(self, layer: int, groups: Numbers, memory: memoryview) -> list[DiskRead]:
        place, reads = self._places[layer], []
        for at, group in enumerate(groups.tolist()):
            offset = place.begin + group * place.step
            view = memory[at * place.group_bytes : (at + 1) * place.group_bytes]
            reads.append(DiskRead(self._path, offset, view, offset + place.group_bytes))
        return reads

    def _per_piece(self, layer: int) -> int:
        nbytes: int = self._buffers[0].tensor.nbytes
        return nbytes // self._places[layer].group_bytes


class _Ahead:
    """Reads pieces in the order of layers, over and over, while somebody takes them."""

    def __init__(self, cold: ColdPages, layers: list[int]) -> None:
        self._cold = cold
        self._layers = layers
        self._groups: Numbers = np.zeros(0, dtype=np.int64)
        self._waiting: list[tuple[int, int, _Reading]] = []  # (layer, first group, ..), in order
        self._next = 0  # buffer

    def read(self, layer: int, groups: Numbers) -> Iterator[tuple[Numbers, torch.Tensor]]:
        """Groups of `layer` piece by piece, with the memory that holds them."""
        if not np.array_equal(groups, self._groups) or (
            self._waiting and self._waiting[0][:2] != (layer, 0)
        ):
            self.reset()
            self._groups = groups
        at = (layer, 0)
        while True:
            # One buffer is in use by whoever takes pieces.
            while len(self._waiting) < len(self._cold._buffers) - 1:
                begin = self._after(*self._waiting[-1][:2]) if self._waiting else at
                self._waiting.append((*begin, self._begin(*begin)))
            found, first, reading = self._waiting.pop(0)
            assert (found, first) == at
            chosen = groups[first : first + self._cold._per_piece(layer)]
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
        first += self._cold._per_piece(layer)
        if first < len(self._groups):
            return layer, first
        return self._layers[(self._layers.index(layer) + 1) % len(self._layers)], 0

    def _begin(self, layer: int, first: int) -> "_Reading":
        cold = self._cold
        memory = cold._buffers[self._next].tensor
        self._next = (self._next + 1) % len(cold._buffers)
        groups = self._groups[first : first + cold._per_piece(layer)]
        return _Reading(cold._queue, cold._reads(layer, groups, memory.numpy().data), memory)


class _Reading:
    """A piece on its way."""

    def __init__(self, queue: TransferQueue, reads: list[DiskRead], memory: torch.Tensor) -> None:
        self._memory = memory
        self._ended = threading.Event()
        self._error: HMTError | None = None
        self._queue = queue
        # Sure, not needed: weights that a step waits for go first.
        self._ticket = queue.submit(reads, Priority.SURE, self._done, owner="kv", light=True)

    def wait(self) -> torch.Tensor:
        """The memory, once it is filled.  Raises DiskReadError."""
        if not self._ended.is_set():
            self._queue.promote(self._ticket, Priority.NEED)
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


def _pages(memory: torch.Tensor, layout: ops.PageLayout) -> ops.Pages:
    """Pages of one layer, each of which begins at a multiple of _STRIDE."""
    rows = memory.view(-1, _stride(layout))[:, : layout.page_bytes]
    return ops.Pages(layout, rows[:, None])


def _entries(tables: Sequence[Numbers], groups: Numbers) -> list[tuple[Numbers, torch.Tensor]]:
    """Which entries of each table are in `groups`, and their pages among those of the groups."""
    found = []
    for table in tables:
        entries = np.flatnonzero(np.isin(table // GROUP_PAGES, groups))
        slots = table[entries]
        at = np.searchsorted(groups, slots // GROUP_PAGES)
        found.append((entries, torch.from_numpy(at * GROUP_PAGES + slots % GROUP_PAGES)))
    return found


def _encode(
    extent: torch.Tensor, codec: LayerCodec, source: ops.Pages, at: int, chosen: torch.Tensor
) -> None:
    """Fill the bytes of a layer's group with pages `chosen` of layer `at` of `source`."""
    key, value = ops.read_pages(source, at, chosen, PAGE_TOKENS * len(chosen))
    coded = codec.encode(key, value).flatten()
    extent[: len(coded)] = coded.to(extent.device)
    extent[len(coded) :] = 0  # pages that are not there are decoded, too


def _decode(pages: ops.Pages, codec: LayerCodec, groups: torch.Tensor) -> None:
    """Write what groups [groups, bytes] hold to `pages`, as many."""
    coded = groups[:, : codec.group_bytes].reshape(-1, codec.unit_bytes)
    key, value = codec.decode(coded, pages.layout.encoding.dtype)
    table = torch.arange(len(groups) * GROUP_PAGES)
    runs = ops.PagedRuns([ops.PagedRun(0, len(key), 0, table)])
    ops.append_pages(pages, 0, runs, key, None if pages.layout.latent else value)


def _own_file(folder: Path, nbytes: int) -> tuple[int, Path]:
    """A file without a name of `nbytes` that the drive has room for."""
    try:
        file, name = tempfile.mkstemp(prefix="hmt-kv-", dir=folder)
    except OSError as error:
        raise MachineError(
            f"cannot write in {folder}: {error.strerror}; name a folder that exists and is yours "
            "with --kv-disk"
        ) from error
    os.unlink(name)  # it vanishes with the process, however that ends
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        os.close(file)
        raise MachineError(
            f"{folder} has no room for {format_bytes(nbytes)} of keys and values: "
            f"{error.strerror}; lower --kv-disk-memory"
        ) from error
    path = Path(f"/proc/{os.getpid()}/fd/{file}")
    try:
        # Past the page cache, where a second copy would take the memory that is being made room in.
        direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:  # tmpfs and some network mounts
        return file, path
    os.close(file)
    return direct, Path(f"/proc/{os.getpid()}/fd/{direct}")
