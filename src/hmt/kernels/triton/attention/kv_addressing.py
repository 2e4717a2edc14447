"""Where attention's keys and values are: in pages of plain rows, or in plain tensors.

New tokens of a run may be in a plain tensor while all before them are in pages.
"""

import triton
import triton.language as tl

from hmt.kernels.triton.attention.kv_tiles import INT8
from hmt.kernels.triton.pdl import ask_cache


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def token_offsets(
    place, page, position, start, SIZE: tl.constexpr, PAGED: tl.constexpr, NEW: tl.constexpr,
):
    """Numbers from the beginning of memory to the rows of tokens.

    place   numbers from page to page (in a plain tensor: from row to row), from the beginning of a
            page to this head's rows, from the beginning of memory to the first new row, and from
            one new row to the next
    NEW     tokens from `start` on are not in pages yet: numbers in 16 bytes, which all these are
            multiples of, or 0
    """
    page_stride, offset, new, new_stride = place
    if PAGED:
        at = page.to(tl.int64) * page_stride + (offset + position % 16 * SIZE)
        if NEW:
            at = tl.where(position >= start, new + (position - start) * new_stride, at)
            at = tl.multiple_of(at, NEW)
    else:
        at = position.to(tl.int64) * page_stride + offset
    return at


@triton.jit
def tile_pages(table, first, end, TILE: tl.constexpr):
    """Page numbers of tokens first .. first + TILE; those of the last one for later ones."""
    position = tl.minimum(first + tl.arange(0, TILE), end - 1)
    return tl.load(table + tl.maximum(position, 0) // 16)


@triton.jit
def places_of(
    memory, key, value, tables, strides, page_stride, layer_offset, table_width, run, head, offset,
    ENCODING: tl.constexpr, PAGED: tl.constexpr, NEW: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):
    """A head's places, and what is needed to find tokens there.

    Keys and values in memory, the run's table, what `token_offsets` takes for keys and for values,
    the like for their INT8 scales, and the head's rows in key and value.

    offset      of the run among new tokens
    VALUE_DIM   numbers of a value in pages; 0 for none
    """
    key_stride, key_head_stride, value_stride, value_head_stride = strides
    table = tables
    new_keys, new_values = key + head * key_head_stride, value + head * value_head_stride
    key_new, value_new = offset.to(tl.int64) * 0, offset.to(tl.int64) * 0
    scale_places = (memory, page_stride, offset, offset)
    if PAGED:
        keys, values = memory, memory
        table += run.to(tl.int64) * table_width
        key_row, value_row = page_stride, page_stride
        key_offset = layer_offset + head * (16 * KEY_DIM)
        value_offset = layer_offset + HEADS * (16 * KEY_DIM) + head * (16 * VALUE_DIM)
        if ENCODING == INT8:
            first = (layer_offset + HEADS * 16 * (KEY_DIM + VALUE_DIM)) // 4 + head * 16
            second = first
            if VALUE_DIM:
                second += HEADS * 16
            scales = memory.to(tl.pointer_type(tl.float32))
            scale_places = (scales, page_stride // 4, first, second)
    else:
        keys, values = key, value
        key_row, value_row = key_stride, value_stride
        key_offset, value_offset = head * key_head_stride, head * value_head_stride
    if NEW:
        SIZE: tl.constexpr = memory.dtype.element_ty.primitive_bitwidth // 8
        base = memory.to(tl.int64)
        key_new = (new_keys.to(tl.int64) - base) // SIZE + offset.to(tl.int64) * key_stride
        value_new = (new_values.to(tl.int64) - base) // SIZE + offset.to(tl.int64) * value_stride
    key_place = (key_row, key_offset, key_new, key_stride)
    value_place = (value_row, value_offset, value_new, value_stride)
    new = (new_keys, new_values)
    return keys, values, table, key_place, value_place, scale_places, new


@triton.jit
def ask_for_rows(
    at, place, table, low, end, SIZE: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Let the L2 cache fetch rows of a tile.

    A hint to that cache changes no result, whoever writes there meanwhile: all read through it.
    """
    LINE: tl.constexpr = 1024 // at.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(SIZE, LINE))
    position = tl.maximum(tl.minimum(low + tl.arange(0, TILE), end - 1), 0)
    page = tl.load(table + position // 16)
    rows = at + token_offsets(place, page, position, 0, SIZE, True, 0)
    line = tl.minimum(tl.arange(0, LINES) * LINE, SIZE - 1)
    ask_cache(rows[:, None] + line[None, :], DEPENDENT)


@triton.jit
def ask_for_part(
    places, begin, end, limit, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Let the L2 cache fetch tokens begin .. end of pages."""
    for low in range(begin, end, TILE):
        ask_for_rows(places[0], places[3], places[2], low, limit, KEY_DIM, TILE, DEPENDENT)
        if VALUE_DIM:
            ask_for_rows(places[1], places[4], places[2], low, limit, VALUE_DIM, TILE, DEPENDENT)


@triton.jit
def write_rows(
    memory, place, table, new, span, stride, SIZE: tl.constexpr, COUNT: tl.constexpr,
):
    """Rows of SIZE numbers of new tokens into their pages."""
    offset, start, end = span
    PADDED: tl.constexpr = triton.next_power_of_2(SIZE)
    index = tl.arange(0, COUNT)
    dim = tl.arange(0, PADDED)[None, :]
    position = start + index
    valid = position < end
    mask = valid[:, None] & (dim < SIZE)
    rows = tl.load(new + (offset + index).to(tl.int64)[:, None] * stride + dim, mask, 0)
    page = tl.load(table + position // 16, valid, 0)
    at = memory + token_offsets(place, page, position, 0, SIZE, True, 0)
    tl.store(at[:, None] + dim, rows, mask)


@triton.jit
def write_new(
    here, places, span, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, COUNT: tl.constexpr,
):
    """New keys and values of one head into their pages, if `here`.

    span   of the run: its offset among new tokens, its start and its end
    """
    if here:
        memory, values, table, key_place, value_place, _scales, new = places
        write_rows(memory, key_place, table, new[0], span, key_place[3], KEY_DIM, COUNT)
        if VALUE_DIM:
            write_rows(values, value_place, table, new[1], span, value_place[3], VALUE_DIM, COUNT)
