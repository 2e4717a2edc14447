"""Pages of several layers in one memory, and copies between such memories."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from hmt.contracts.model import PAGE_TOKENS, KVKind, KVLayer
from hmt.kernels import ops, page_copies
from hmt.kvcache.page_layout import kinds_of, layout_of
from hmt.memory.device import wait_for_stream


class _Buffer(Protocol):
    """Memory: uint8, of at least the size that was asked for."""

    @property
    def tensor(self) -> torch.Tensor: ...


_B = TypeVar("_B", bound=_Buffer)

# By kind: pages, and the indices of the layers that they are of.
PagesByKind = Sequence[tuple[ops.Pages, list[int]]]


class Pool(Protocol[_B]):
    """Where it comes from: a HostPool or a DevicePool."""

    def allocate(self, nbytes: int) -> _B:
        """Memory of at least `nbytes`.  Raises BudgetError."""
        ...

    def free(self, buffer: _B) -> None:
        """Take it back."""
        ...


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """Where a layer's pages are: those of all layers of its kind, and its own place among them.

    attended   whether tokens attend to what they hold, which are no index keys
    grouped    see `KVLayer`
    """

    pages: ops.Pages
    slot: int
    window: int
    attended: bool = True
    grouped: int = 1

    def appended(self, runs: ops.AttentionMetadata) -> ops.AttentionMetadata:
        """The runs of a step as their rows are appended: from the first of a group on."""
        if self.grouped == 1:
            return runs
        found, offset = [], 0
        for run in runs.runs:
            before = run.start % self.grouped
            length = before + run.length
            found.append(ops.PagedSegment(offset, length, run.start - before, run.table))
            offset += length
        return ops.AttentionMetadata(found)


class PageStore:
    """`count` pages of some layers.  A number means the same place in the pages of every kind.

    layers   by index: where each one's pages are
    kinds    pages, with the indices of the layers that they are of
    pinned   whether a device's kernels can read and write them in host memory
    staged   by layer: pages of one layer, for what is attended to and forgotten; layers share them
    """

    def __init__(
        self,
        layers: Mapping[int, KVLayer],
        count: int,
        encoding: ops.PageEncoding,
        pool: Pool[Any],
        *,
        pinned: bool = False,
        staged: int = 0,
    ) -> None:
        """Take memory for them, and for `staged` more.  BudgetError if they do not fit."""
        self.count = count
        self.staged: dict[int, ops.Pages] = {}
        count += staged
        self.pinned = pinned
        self._pool = pool
        self.layers: dict[int, KeptLayer] = {}
        self.kinds: list[tuple[ops.Pages, list[int]]] = []
        self.device = torch.device("cpu")
        self._buffer = None
        nbytes = count * store_page_bytes(layers, encoding)
        if not nbytes:  # all layers have windows
            return
        self._buffer = pool.allocate(nbytes)
        memory = self._buffer.tensor[:nbytes]
        self.device, start = memory.device, 0
        for layer, members in kinds_of(layers):
            layout = layout_of(layer, encoding, memory.device)
            nbytes = count * len(members) * layout.page_bytes
            extents = memory[start : start + nbytes].view(count, len(members), layout.page_bytes)
            start += nbytes
            if staged:
                own = extents[self.count :].reshape(-1, 1, layout.page_bytes)
                self.staged |= dict.fromkeys(members, ops.Pages(layout, own))
            pages = ops.Pages(layout, extents[: self.count])
            self.kinds.append((pages, members))
            attended = layer.kind is not KVKind.INDEX
            self.layers |= {
                index: KeptLayer(pages, i, layer.window, attended, layer.grouped)
                for i, index in enumerate(members)
            }

    def take(self, numbers: torch.Tensor, source: "PageStore", theirs: torch.Tensor) -> None:
        """Copy pages `theirs` of `source`, which has the same layers, to `numbers`.

        Both int64, of whole pages.  Encoded anew where the encodings differ.  They are there when
        this returns.
        """
        if self.crosses_to(source):  # from host memory
            for (pages, _), (other, _) in zip(self.kinds, source.kinds, strict=True):
                page_copies.fetch_pages(pages, numbers, other, theirs)
        elif source.crosses_to(self):
            source.send(theirs, self, numbers)
        else:
            for (pages, members), (other, _) in zip(self.kinds, source.kinds, strict=True):
                if pages.layout == other.layout:
                    pages.memory[numbers] = other.memory[theirs].to(self.device)
                    continue
                for at in range(len(members)):
                    recode(pages, at, numbers, other, at, theirs)
        if self.device != source.device:
            for where in (self.device, source.device):
                wait_for_stream(where)

    def crosses_to(self, host: "PageStore") -> bool:
        """Whether `send` knows how to copy pages to host memory, and from there."""
        pairs = zip(self.kinds, host.kinds, strict=True)
        return host.pinned and all(
            page_copies.can_copy_pages(self.device, near.layout, far.layout)
            for (near, _), (far, _) in pairs
        )

    def send(self, numbers: torch.Tensor, host: "PageStore", theirs: torch.Tensor) -> None:
        """Copy pages to `theirs` of host memory, for which `crosses_to`, on the current queue."""
        for (pages, _), (other, _) in zip(self.kinds, host.kinds, strict=True):
            page_copies.send_pages(pages, numbers, other, theirs)

    def copy(self, page: int, to: int) -> None:
        """Let page `to` hold, in all layers, what `page` holds."""
        for pages, _ in self.kinds:
            pages.memory[to] = pages.memory[page]

    def release(self) -> None:
        """Give the memory back to the pool.  Nothing may be used afterwards."""
        self.layers.clear()
        self.staged.clear()
        self.kinds.clear()
        if self._buffer is not None:
            self._pool.free(self._buffer)


def store_page_bytes(layers: Mapping[int, KVLayer], encoding: ops.PageEncoding) -> int:
    """Bytes of one page of all `layers`, without what only padding takes."""
    host = torch.device("cpu")
    return sum(
        len(members) * layout_of(layer, encoding, host).page_bytes
        for layer, members in kinds_of(layers)
    )


def recode(
    pages: ops.Pages,
    at: int,
    numbers: torch.Tensor,
    source: ops.Pages,
    theirs_at: int,
    theirs: torch.Tensor,
) -> None:
    """Copy whole pages `theirs` of layer `theirs_at` of `source` to `numbers` of layer `at`.

    In the encoding of `pages`: to the bit where it is the same.
    """
    if pages.layout == source.layout:
        pages.memory[numbers, at] = source.memory[theirs, theirs_at].to(pages.memory.device)
        return
    tokens = PAGE_TOKENS * len(numbers)
    runs = ops.AttentionMetadata([ops.PagedSegment(0, tokens, 0, numbers)])
    key, value = ops.read_pages(source, theirs_at, theirs, tokens)
    key, value = key.to(pages.memory.device), value.to(pages.memory.device)
    ops.append_pages(pages, at, runs, key, None if pages.layout.latent else value)
