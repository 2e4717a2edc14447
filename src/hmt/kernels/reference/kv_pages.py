"""Pages of 16 tokens of keys and values: how they lie, and how they are written and read.

`csrc/attention/pages.h` describes the layout in words, which is what compiled kernels go by.
Kernels for GPUs take plain rows, which are copied to shared memory, and read there by tensor cores,
as they are.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS

_INT4_GROUP = 32


class PageEncoding(enum.IntEnum):
    """How numbers of keys and values are kept.

    INT8   one f32 scale for each token and head: scale = max|x| / 127, code = round(x / scale)
    INT4   a bf16 scale for each 32 numbers of a row: scale = bf16(-e / 8), where e is the number
           furthest from 0 (the negative one in a tie); codes -8 .. 7, kept as code + 8
    FP8    E4M3 without scales, rounded half to even; what is beyond 448 becomes 448.  A scale would
           only move the range, whose 2^-9 .. 448 was wide enough for the reference models
    """

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    INT4 = 4
    FP8 = 5

    @staticmethod
    def of(dtype: torch.dtype) -> "PageEncoding":
        """The encoding that keeps numbers of `dtype` as they are."""
        return _OF_DTYPE[dtype]

    @property
    def bits(self) -> int:
        """Of one number, without its scale."""
        return (32, 16, 16, 8, 4, 8)[self]

    @property
    def dtype(self) -> torch.dtype:
        """Of numbers, or of the bytes that hold codes."""
        return _DTYPES[self]

    @property
    def has_scales(self) -> bool:
        """Whether numbers are codes times a scale."""
        return self in (PageEncoding.INT8, PageEncoding.INT4)


_OF_DTYPE = {
    torch.float32: PageEncoding.F32,
    torch.bfloat16: PageEncoding.BF16,
    torch.float16: PageEncoding.F16,
}
_DTYPES = (*_OF_DTYPE, torch.int8, torch.uint8, torch.float8_e4m3fn)
_MOST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One layer's extent in a page, with u = 32 / bits numbers in each word of four bytes.

    keys     [heads, key_dim / u, 16, u]: words of 16 tokens side by side
    values   [heads, 16 / u, value_dim, u]: words hold u tokens; none where `latent`
    scales   of keys, then of values: INT8 f32 [heads, 16], INT4 bf16 [heads, groups, 16]

    latent   the value of a token is the first value_dim numbers of its key
    rows     keys are [heads, 16, key_dim] and values [heads, 16, value_dim] instead, all else being
             the same; not in INT4
    """

    encoding: PageEncoding
    heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    rows: bool = False

    def __post_init__(self) -> None:
        if self.rows and self.encoding is PageEncoding.INT4:
            raise ValueError("pages of plain rows hold no INT4")
        if not self.rows and self.key_dim % self.per_word:
            raise ValueError(f"keys of {self.key_dim} numbers do not fill words of {self.per_word}")

    @property
    def per_word(self) -> int:
        """Numbers in four bytes."""
        return 32 // self.encoding.bits

    @property
    def page_bytes(self) -> int:
        """Of one page of one layer."""
        return sum(self._part_bytes)

    @property
    def _part_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of keys, values, scales of keys, scales of values."""
        rows = PAGE_TOKENS * self.heads
        dims = (self.key_dim, 0 if self.latent else self.value_dim)
        key, value = (rows * dim * self.encoding.bits // 8 for dim in dims)
        key_scales, value_scales = (rows * self._scale_bytes(dim) for dim in dims)
        return key, value, key_scales, value_scales

    def _scale_bytes(self, dim: int) -> int:
        """Of one token and head."""
        if self.encoding is PageEncoding.INT8:
            return 4 if dim else 0
        return -(-dim // _INT4_GROUP) * 2 if self.encoding is PageEncoding.INT4 else 0


class Pages:
    """The pages of all layers of one kind, in memory that someone else keeps.

    memory  uint8 [pages, layers, layout.page_bytes], each page contiguous
    native  what the compiled kernels made of it
    device  what kernels for GPUs made of it
    """

    def __init__(self, layout: PageLayout, memory: Tensor) -> None:
        assert memory.dtype == torch.uint8 and memory.shape[2] == layout.page_bytes
        assert memory[0].is_contiguous()
        self.layout = layout
        self.memory = memory
        self.native: Any = None
        self.device: Any = None

    def parts(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of keys, values, and their scales, as PageLayout shows them.

        keys [pages, heads, key_dim / u, 16, u]; values [pages, heads, 16 / u, value_dim, u]; in
        INT4 the last dimension is 4 bytes, byte i with number i in its low half and i + 4 in its
        high one.  In plain rows [pages, heads, 16, dim].  Empty where there are none.
        """
        layout, encoding = self.layout, self.layout.encoding
        per_word = layout.per_word
        extents = self.memory[:, layer].split(layout._part_bytes, dim=1)
        in_word = 4 if encoding is PageEncoding.INT4 else per_word
        keys, values = (extent.view(encoding.dtype) for extent in extents[:2])
        key_tail: tuple[int, ...] = (-1, PAGE_TOKENS, in_word)
        value_tail: tuple[int, ...] = (PAGE_TOKENS // per_word, layout.value_dim, in_word)
        if layout.rows:
            key_tail, value_tail = (PAGE_TOKENS, layout.key_dim), (PAGE_TOKENS, layout.value_dim)
        keys = keys.unflatten(1, (layout.heads, *key_tail))
        if not layout.latent:
            values = values.unflatten(1, (layout.heads, *value_tail))
        scale_type = torch.bfloat16 if encoding is PageEncoding.INT4 else torch.float32
        scales = [extent.view(scale_type) for extent in extents[2:]]
        key_scales, value_scales = (
            scale.unflatten(1, (layout.heads, -1, PAGE_TOKENS)) if scale.shape[1] else scale
            for scale in scales
        )
        return keys, values, key_scales, value_scales


class PagedSegment(NamedTuple):
    """Consecutive tokens of one sequence.

    offset   index of the first token in the arrays of the step
    length   number of tokens
    start    position of the first token
    table    int64 [pages]: position p lies in page table[p // 16]
    seen     the first positions, of which the tokens see no more; None: all up to their own.  For
             parts of a context that lie elsewhere than the tokens themselves.
    """

    offset: int
    length: int
    start: int
    table: Tensor
    seen: int | None = None

    @property
    def context(self) -> int:
        """Positions that its last token sees."""
        end = self.start + self.length
        return end if self.seen is None else min(end, self.seen)


def by_token(runs: Sequence[PagedSegment]) -> list[PagedSegment]:
    """The same tokens as runs of one token each, in their order.  Of runs without `seen`."""
    return [
        PagedSegment(run.offset + number, 1, run.start + number, run.table)
        for run in runs
        for number in range(run.length)
    ]


class AttentionMetadata:
    """The runs of a step, no two of one sequence.  Made once for all layers."""

    def __init__(self, runs: Sequence[PagedSegment]) -> None:
        self.runs = tuple(runs)
        self.native: Any = None  # what the compiled kernels made of it
        self.device: Any = None  # what kernels for GPUs made of it


def append_pages(
    pages: Pages, layer: int, runs: AttentionMetadata, key: Tensor, value: Tensor | None
) -> None:
    """Write the tokens of `runs`: key [tokens, heads, key_dim], value [tokens, heads, value_dim].

    value   None for latent layers
    """
    keys, values, key_scales, value_scales = pages.parts(layer)
    for offset, length, start, table, _ in runs.runs:
        positions = torch.arange(start, start + length, device=table.device)
        where = table[positions // PAGE_TOKENS], positions % PAGE_TOKENS
        tokens = slice(offset, offset + length)
        if pages.layout.rows:
            _write_rows(pages.layout, keys, key_scales, where, key[tokens])
            if value is not None and not pages.layout.latent:
                _write_rows(pages.layout, values, value_scales, where, value[tokens])
            continue
        _write_keys(pages.layout, keys, key_scales, where, key[tokens])
        if not pages.layout.latent:
            assert value is not None
            _write_values(pages.layout, values, value_scales, where, value[tokens])


def read_pages(pages: Pages, layer: int, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Copies of the first `tokens` rows of pages `table`: key and value [tokens, heads, dim].

    In the encoding's own dtype; f32 for codes and FP8.
    """
    layout = pages.layout
    keys, values, key_scales, value_scales = pages.parts(layer)
    found = _numbers(layout, keys[table])  # [pages, heads, words, 16, u]
    if layout.rows:
        key = found.transpose(1, 2).flatten(0, 1)[:tokens]
    else:
        key = found.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:tokens]
    key = _scaled(layout, key, key_scales, table)
    if layout.latent:
        return key, key[..., : layout.value_dim]
    found = _numbers(layout, values[table])  # [pages, heads, words, value_dim, u]
    if layout.rows:
        value = found.transpose(1, 2).flatten(0, 1)[:tokens]
    else:
        value = found.permute(0, 2, 4, 1, 3).flatten(0, 2)[:tokens]
    return key, _scaled(layout, value, value_scales, table)


def read_rows(pages: Pages, layer: int, numbers: Tensor, slots: Tensor) -> Tensor:
    """Copies of the keys of single tokens: [rows, heads, key_dim], as `read_pages` gives them.

    numbers   int64 [rows], of pages
    slots     int64 [rows], 0 .. 15, in these
    """
    layout = pages.layout
    keys, _, scales, _ = pages.parts(layer)
    if layout.rows:
        rows = _numbers(layout, keys[numbers, :, slots])
    else:
        # A word at a time: by its numbers 2063 rows of 512 in bf16 took 5.7 ms instead of 0.4.
        words = keys.view(torch.int32).squeeze(4).permute(0, 3, 1, 2)[numbers, slots]
        codes = words.view(keys.dtype).unflatten(2, (-1, keys.shape[4]))
        rows = _numbers(layout, codes).flatten(2)
    if not layout.encoding.has_scales:
        return rows
    by_row = scales[numbers, :, :, slots].float()
    if layout.encoding is PageEncoding.INT4:
        by_row = by_row.repeat_interleave(_INT4_GROUP, dim=-1)[..., : rows.shape[-1]]
    return rows * by_row


def read_value_rows(pages: Pages, layer: int, numbers: Tensor, slots: Tensor) -> Tensor:
    """The same of values, where these are stored beside keys: [rows, heads, value_dim]."""
    layout = pages.layout
    _, values, _, scales = pages.parts(layer)
    word, place = slots // layout.per_word, slots % layout.per_word
    if layout.rows:
        rows = _numbers(layout, values[numbers, :, slots])
    elif layout.encoding is PageEncoding.INT4:  # two tokens share a byte: see _write_values
        pairs = values[numbers, :, word, :, place % 4]
        rows = torch.where((place < 4)[:, None, None], pairs & 15, pairs >> 4).float() - 8
    else:
        rows = _numbers(layout, values[numbers, :, word, :, place])
    if not layout.encoding.has_scales:
        return rows
    by_row = scales[numbers, :, :, slots].float()
    if layout.encoding is PageEncoding.INT4:
        by_row = by_row.repeat_interleave(_INT4_GROUP, dim=-1)[..., : rows.shape[-1]]
    return rows * by_row


def encode_rows(encoding: PageEncoding, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of rows [..., dim] and their scales [..., groups]; int8, those of INT4 0 .. 15."""
    numbers = rows.float()
    if encoding is PageEncoding.INT8:
        scales = divided(numbers.abs().amax(-1, keepdim=True), 127)
        divisors = scales.masked_fill(scales == 0, 1)
        codes = (numbers / divisors).round().clamp(-127, 127)
        return codes.masked_fill(scales == 0, 0).to(torch.int8), scales
    dim = rows.shape[-1]
    padded = torch.nn.functional.pad(numbers, (0, -dim % _INT4_GROUP))
    groups = padded.unflatten(-1, (-1, _INT4_GROUP))
    # Whatever a partial group is filled with counts as 0, which changes neither.
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (torch.where(-low >= high, low, high) / -8 + 0.0).bfloat16()  # + 0: never -0
    divisors = scales.float().masked_fill(scales == 0, 1)[..., None]
    codes = (groups / divisors).round().clamp(-8, 7).masked_fill((scales == 0)[..., None], 0)
    return (codes.flatten(-2)[..., :dim] + 8).to(torch.int8), scales


def narrowed(rows: Tensor, encoding: PageEncoding) -> Tensor:
    """Rows as numbers of an encoding without scales."""
    if encoding is PageEncoding.FP8:
        rows = rows.float().clamp(-_MOST_FP8, _MOST_FP8)
    return rows.to(encoding.dtype)


def divided(numbers: Tensor, divisor: float) -> Tensor:
    """Quotients, rounded once: by a plain number torch multiplies with its inverse on a GPU."""
    return numbers / torch.full((), divisor, dtype=numbers.dtype, device=numbers.device)


def _write_rows(
    layout: PageLayout, held: Tensor, scales: Tensor, where: tuple[Tensor, Tensor], rows: Tensor
) -> None:
    numbers, slots = where
    if layout.encoding is PageEncoding.INT8:
        rows, row_scales = encode_rows(layout.encoding, rows)
        scales[numbers, :, :, slots] = row_scales
        held[numbers, :, slots] = rows
        return
    held[numbers, :, slots] = narrowed(rows, layout.encoding)


def _write_keys(
    layout: PageLayout, keys: Tensor, scales: Tensor, where: tuple[Tensor, Tensor], rows: Tensor
) -> None:
    numbers, slots = where
    if not layout.encoding.has_scales:
        words = narrowed(rows, layout.encoding).unflatten(-1, (-1, layout.per_word))
        keys[numbers, :, :, slots] = words
        return
    codes, row_scales = encode_rows(layout.encoding, rows)  # [tokens, heads, dim], [.., groups]
    scales[numbers, :, :, slots] = row_scales
    words = codes.unflatten(-1, (-1, layout.per_word))
    if layout.encoding is PageEncoding.INT4:
        words = words.to(torch.uint8)
        words = words[..., :4] | words[..., 4:] << 4
    keys[numbers, :, :, slots] = words


def _write_values(
    layout: PageLayout, values: Tensor, scales: Tensor, where: tuple[Tensor, Tensor], rows: Tensor
) -> None:
    numbers, slots = where
    word, place = slots // layout.per_word, slots % layout.per_word
    if not layout.encoding.has_scales:
        values[numbers, :, word, :, place] = narrowed(rows, layout.encoding)
        return
    codes, row_scales = encode_rows(layout.encoding, rows)
    scales[numbers, :, :, slots] = row_scales
    if layout.encoding is PageEncoding.INT8:
        values[numbers, :, word, :, place] = codes
        return
    # Two tokens share a byte: first those in its low half, then those in its high one.
    for shift, chosen in ((0, place < 4), (4, place >= 4)):
        at = (numbers[chosen], slice(None), word[chosen], slice(None), place[chosen] % 4)
        others = values[at] & (0xF0 if shift == 0 else 0x0F)
        values[at] = others | codes[chosen].to(torch.uint8) << shift


def _numbers(layout: PageLayout, words: Tensor) -> Tensor:
    """What words hold, before scales."""
    if layout.encoding is PageEncoding.INT4:
        return torch.cat((words & 15, words >> 4), dim=-1).float() - 8
    return words.float() if layout.encoding.bits == 8 else words


def _scaled(layout: PageLayout, rows: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """rows [tokens, heads, dim] times scales [pages, heads, groups, 16] of pages `table`."""
    if not layout.encoding.has_scales:
        return rows
    by_token = scales[table].float().permute(0, 3, 1, 2).flatten(0, 1)[: len(rows)]
    if layout.encoding is PageEncoding.INT4:
        by_token = by_token.repeat_interleave(_INT4_GROUP, dim=-1)[..., : rows.shape[-1]]
    return rows * by_token
