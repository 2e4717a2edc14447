"""A layer's pages on the disk: in groups, the usual ones, then those of little attention."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hmt.base.units import round_up
from hmt.contracts.kv import GROUP_PAGES
from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.kernels import ops
from hmt.kvcache.codecs import LayerCodec
from hmt.kvcache.page_layout import kinds_of, layout_of
from hmt.kvcache.page_store import recode
from hmt.kvcache.page_table import Ints

_STRIDE = 256  # pages that are read as they lie begin at its multiples
_BLOCK = 4096  # groups of a layer do at its multiples

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LowAttentionPages:
    """How pages of low attention are kept.

    codecs     of single pages, for each layer
    encoding   what they are decoded to
    below      A2CR's score, below which a page is one of them when it is written
    """

    codecs: Mapping[int, LayerCodec]
    encoding: ops.PageEncoding
    below: float


@dataclass(frozen=True, slots=True)
class PageFormat:
    """One way to keep pages of a layer.

    layout   as they are attended to
    codec    what they are on the disk; None: that
    """

    layout: ops.PageLayout
    codec: LayerCodec | None = None

    def nbytes(self, pages: int) -> int:
        """Of so many; of codecs whose pages share something, whole groups."""
        if self.codec is None:
            return pages * stride_of(self.layout)
        assert pages % self.codec.pages == 0, "pages of a unit go together"
        return pages // self.codec.pages * self.codec.unit_bytes

    def write(self, memory: torch.Tensor, source: ops.Pages, at: int, chosen: torch.Tensor) -> None:
        """Fill `memory` with pages `chosen` of layer `at` of `source`; with a codec, and zeros."""
        if self.codec is None:
            if len(chosen):
                pages = pages_in(memory, self.layout)
                recode(pages, 0, torch.arange(len(chosen)), source, at, chosen)
            return
        end = 0
        if len(chosen):
            key, value = ops.read_pages(source, at, chosen, PAGE_TOKENS * len(chosen))
            coded = self.codec.encode(key, value).flatten()
            end = len(coded)
            memory[:end] = coded.to(memory.device)
        memory[end:] = 0  # pages that are not there are decoded, too

    def decode(self, pages: ops.Pages, units: torch.Tensor) -> None:
        """Let `pages` hold what units [units, unit_bytes] of the disk do."""
        assert self.codec is not None
        key, value = self.codec.decode(units, pages.layout.encoding.dtype)
        table = torch.arange(len(units) * self.codec.pages)
        runs = ops.AttentionMetadata([ops.PagedSegment(0, len(key), 0, table)])
        ops.append_pages(pages, 0, runs, key, None if pages.layout.latent else value)


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """A layer's part of a group: its usual pages, then those of low attention, without gaps."""

    usual: PageFormat
    low: PageFormat | None = None

    @property
    def forms(self) -> tuple[PageFormat, ...]:
        """Both, or the one there is."""
        return (self.usual,) if self.low is None else (self.usual, self.low)

    @property
    def decodes(self) -> bool:
        """Whether some pages have to be decoded when they are read."""
        return any(form.codec is not None for form in self.forms)

    def nbytes(self, low: int = 0) -> int:
        """On the disk, when `low` of the pages are of low attention."""
        nbytes = self.usual.nbytes(GROUP_PAGES - low)
        if low:
            assert self.low is not None
            nbytes += self.low.nbytes(low)
        return round_up(nbytes, _BLOCK)

    def write(
        self, extent: torch.Tensor, source: ops.Pages, at: int, chosen: torch.Tensor, low: Mask
    ) -> None:
        """Fill `extent` with a group's pages `chosen`, those where `low` says so as such."""
        count = int(low.sum())
        usual = self.usual.nbytes(GROUP_PAGES - count)
        which = torch.from_numpy(low).to(chosen.device)
        self.usual.write(extent[:usual], source, at, chosen[~which])
        if self.low is not None and count:
            end = usual + self.low.nbytes(count)
            self.low.write(extent[usual:end], source, at, chosen[which])

    def units(self, memory: torch.Tensor, low: Ints, *, of_low: bool) -> torch.Tensor:
        """Units [units, unit_bytes] of one form, of groups one after the other.

        memory   [groups, bytes]
        low      by group, how many pages are of low attention
        """
        form = self.low if of_low else self.usual
        assert form is not None and form.codec is not None
        width = form.codec.unit_bytes
        if not of_low and not low.any():
            return memory[:, : form.nbytes(GROUP_PAGES)].reshape(-1, width)
        parts = []
        for row, count in zip(memory, low.tolist(), strict=True):
            begin, pages = 0, GROUP_PAGES - count
            if of_low:
                begin, pages = self.usual.nbytes(pages), count
            parts.append(row[begin : begin + form.nbytes(pages)].view(-1, width))
        return torch.cat(parts)


def group_formats(
    layers: Mapping[int, KVLayer],
    encoding: ops.PageEncoding,
    codecs: Mapping[int, LayerCodec] | None,
    low: LowAttentionPages | None,
) -> dict[int, GroupFormat]:
    """For each of `layers`; see DiskPages."""

    def form(index: int, encoding: ops.PageEncoding, codec: LayerCodec | None) -> PageFormat:
        return PageFormat(layout_of(layers[index], encoding, torch.device("cpu")), codec)

    found = {}
    for index in layers:
        usual = form(index, encoding, codecs[index] if codecs else None)
        smaller = None
        if low is not None:
            smaller = form(index, low.encoding, low.codecs[index])
        found[index] = GroupFormat(usual, smaller)
    return found


def disk_bytes(
    layers: Mapping[int, KVLayer],
    encoding: ops.PageEncoding,
    codecs: Mapping[int, LayerCodec] | None = None,
    low: LowAttentionPages | None = None,
) -> tuple[int, int, int]:
    """Most bytes of a group of pages: of all layers, of one layer, and of all layers of a kind.

    That of one layer may be that of a group that was decoded.
    """
    forms = group_formats(layers, encoding, codecs, low)
    whole, widest, kind = 0, 0, 0
    for _, members in kinds_of(layers):
        form = forms[members[0]]
        each = form.nbytes()
        decoded = max(GROUP_PAGES * stride_of(one.layout) for one in form.forms)
        whole += each * len(members)
        widest, kind = max(widest, each, decoded), max(kind, each * len(members))
    return whole, widest, kind


def stride_of(layout: ops.PageLayout) -> int:
    """From one page of a layer to the next, where kernels like them to begin."""
    return round_up(layout.page_bytes, _STRIDE)


def pages_in(memory: torch.Tensor, layout: ops.PageLayout) -> ops.Pages:
    """Pages of one layer, each of which begins at a multiple of the stride."""
    rows = memory.view(-1, stride_of(layout))[:, : layout.page_bytes]
    return ops.Pages(layout, rows[:, None])
