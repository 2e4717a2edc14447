"""Writing keys and values to pages on the GPU, rotated on the way where that is wanted.

A program takes the tokens of one page and one head, so that words are written side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import reference
from hmt.kernels.reference.pages import PagedRuns, PageEncoding, Pages
from hmt.kernels.triton.runs import device_runs
from hmt.kernels.triton.tiles import BF16, F16, F32, INT8


def append_pages(
    pages: Pages, layer: int, runs: PagedRuns, key: Tensor, value: Tensor | None
) -> None:
    """See `reference.append_pages`: key [tokens, heads, key_dim], value [tokens, heads, value_dim].

    Writes the same bytes.  Nothing is allocated where rows lie with their numbers side by side.
    """
    if pages.layout.encoding is PageEncoding.INT4:  # no kernel: two tokens share a byte
        reference.append_pages(pages, layer, runs, key, value)
        return
    _launch(pages, layer, runs, None, key, value, None, None, first=0, interleaved=False)


def rope_append(
    pages: Pages,
    layer: int,
    runs: PagedRuns,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    first: int = 0,
) -> None:
    """`rope_inplace` of queries, and `append_pages` of rotated keys and of values, in one kernel.

    query   [tokens, q_heads, dim] is changed: the first `rot` numbers of each head are rotated;
            may be a part of a larger tensor, with its numbers side by side
    key     [tokens, heads, key_dim] stays: what is written to pages is its rotation, of numbers
            first .. first + rot (the last ones of latent keys)
    value   [tokens, heads, value_dim], None for latent layers
    cos     with sin [tokens, rot], as for `reference.rope`; all are of one dtype, to which products
            and sums are rounded as there
    """
    half = cos.shape[1] // 2
    words = pages.layout.per_word
    if pages.layout.encoding is PageEncoding.INT4 or half % words or first % words:
        # Halves that begin inside of a word, and INT4, have no kernel.
        turning, rest = key[..., first:], key[..., :first]
        query.copy_(reference.rope(query, cos, sin, interleaved=interleaved))
        turned = reference.rope(turning, cos, sin, interleaved=interleaved)
        append_pages(pages, layer, runs, torch.cat((rest, turned), dim=-1), value)
        return
    assert query.stride(2) == 1 and query.dtype == key.dtype
    cos, sin = cos.to(key.dtype), sin.to(key.dtype)
    _launch(pages, layer, runs, query, key, value, cos, sin, first=first, interleaved=interleaved)


def page_words(pages: Pages) -> Tensor:
    """The memory of pages as int32 words, [pages, words]."""
    if pages.device is None:
        memory = pages.memory
        words = memory.view(torch.int32)  # [pages, layers, words]
        pages.device = words.flatten(1)
        assert pages.device.data_ptr() == memory.data_ptr()
    words = pages.device
    return words


def _launch(
    pages: Pages,
    layer: int,
    runs: PagedRuns,
    query: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    first: int,
    interleaved: bool,
) -> None:
    layout = pages.layout
    key = key if key.stride(2) == 1 else key.contiguous()
    assert key.shape[1:] == (layout.heads, layout.key_dim)
    values = key if layout.latent or value is None else value
    values = values if values.stride(2) == 1 else values.contiguous()
    assert layout.latent or values.shape[1:] == (layout.heads, layout.value_dim)
    queries = key if query is None else query
    half = 0 if cos is None else cos.shape[1] // 2
    first = first if half else layout.key_dim
    last = layout.key_dim - first - 2 * half
    assert last >= 0
    angles = (key, key) if cos is None or sin is None else (cos, sin)
    words = page_words(pages)
    for held in device_runs(runs, key.device):
        touched = (held.tokens + PAGE_TOKENS - 2) // PAGE_TOKENS + 1
        heads = layout.heads + (0 if query is None else query.shape[1])
        append_kernel[(touched, heads, held.count)](
            queries,
            key,
            values,
            *angles,
            words,
            held.spans,
            held.tables,
            *queries.stride()[:2],
            *key.stride()[:2],
            *values.stride()[:2],
            angles[0].stride(0),
            angles[1].stride(0),
            words.stride(0),
            layer * (layout.page_bytes // 4),
            held.tables.stride(0),
            held.count,
            ENCODING=int(layout.encoding),
            HEADS=layout.heads,
            KEY_DIM=layout.key_dim,
            VALUE_DIM=0 if layout.latent else layout.value_dim,
            PER_WORD=layout.per_word,
            FIRST=first,
            HALF=half,
            LAST=last,
            INTERLEAVED=interleaved,
            num_warps=4,
            enable_fp_fusion=False,  # products are rounded before they are added
        )


@triton.jit
def magnitude(numbers):
    """max|x| of each row."""
    return tl.max(tl.abs(numbers), 1)


@triton.jit
def coded(numbers, scale):
    """INT8 codes of f32 rows, in int32, as `reference.encode_rows`."""
    some = tl.div_rn(numbers, tl.where(scale == 0, 1.0, scale)[:, None] + tl.zeros_like(numbers))
    # Adding and taking away 1.5 * 2^23 rounds half to even, as torch.
    some = (some + 12582912.0) - 12582912.0
    some = tl.minimum(tl.maximum(some, -127.0), 127.0)
    return tl.where((scale == 0)[:, None], 0.0, some).to(tl.int32)


@triton.jit
def rounded(numbers, DTYPE: tl.constexpr):
    """f32 numbers rounded to DTYPE, half to even, as f32."""
    if tl.bfloat16 == DTYPE:
        # By hand, as Triton's interpreter truncates.
        some = numbers.to(tl.int32, bitcast=True)
        some = (some + 0x7FFF + ((some >> 16) & 1)) & -65536
        found = tl.where(numbers == numbers, some.to(tl.float32, bitcast=True), numbers)
    else:
        found = numbers.to(DTYPE).to(tl.float32)
    return found


@triton.jit
def bits(numbers, ENCODING: tl.constexpr):
    """Numbers as they are kept, each in the low bits of an int32."""
    if ENCODING == F32:
        found = numbers.to(tl.float32).to(tl.int32, bitcast=True)
    elif ENCODING == BF16:
        found = (rounded(numbers, tl.bfloat16).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    elif ENCODING == F16:
        found = numbers.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        found = numbers & 0xFF
    return found


@triton.jit
def packed(numbers, ENCODING: tl.constexpr):
    """Numbers [16, n] as words [16, n / u] of consecutive ones."""
    found = bits(numbers, ENCODING)
    COUNT: tl.constexpr = numbers.shape[1]
    if ENCODING == INT8:
        even, odd = tl.split(found.reshape(16, COUNT // 4, 2, 2))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        found = first | (second << 8) | (third << 16) | (fourth << 24)
    elif ENCODING != F32:
        low, high = tl.split(found.reshape(16, COUNT // 2, 2))
        found = low | (high << 16)
    return found


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def write_keys(
    at, slot, valid, numbers, scale, FIRST: tl.constexpr, COUNT: tl.constexpr,
    PER_WORD: tl.constexpr, ENCODING: tl.constexpr,
):
    """Write numbers FIRST .. FIRST + COUNT of keys [16, padded] to words that begin `at`."""
    some = numbers
    if ENCODING == INT8:
        some = coded(numbers, scale)
    words = packed(some, ENCODING)
    word = tl.arange(0, words.shape[1])
    where = at + (FIRST // PER_WORD + word)[None, :] * 16 + slot[:, None]
    tl.store(where, words, valid[:, None] & (word < COUNT // PER_WORD)[None, :])


@triton.jit
def write_values(
    at, scales, slot, valid, numbers, DIM: tl.constexpr, PER_WORD: tl.constexpr,
    ENCODING: tl.constexpr,
):
    """Write values f32 [16, padded] to words that begin `at`, and their scales.

    Tokens of one word may come in different steps, so each writes its own part of it.
    """
    if ENCODING == INT8:
        scale = tl.div_rn(magnitude(numbers), tl.full((16,), 127.0, tl.float32))
        tl.store(scales, scale.to(tl.int32, bitcast=True), valid)
        found = bits(coded(numbers, scale), ENCODING)
    else:
        found = bits(numbers, ENCODING)
    dim = tl.arange(0, numbers.shape[1])[None, :]
    mask = valid[:, None] & (dim < DIM)
    index = ((slot // PER_WORD)[:, None] * DIM + dim) * PER_WORD + (slot % PER_WORD)[:, None]
    if PER_WORD == 1:
        tl.store(at + index, found, mask)
    elif PER_WORD == 2:
        tl.store(at.to(tl.pointer_type(tl.int16)) + index, found.to(tl.int16), mask)
    else:
        tl.store(at.to(tl.pointer_type(tl.int8)) + index, found.to(tl.int8), mask)


@triton.jit
def turned(first, second, cos, sin, DTYPE: tl.constexpr):
    """A pair rotated, each product and sum rounded to DTYPE."""
    left = rounded(first * cos, DTYPE) - rounded(second * sin, DTYPE)
    right = rounded(second * cos, DTYPE) + rounded(first * sin, DTYPE)
    return rounded(left, DTYPE), rounded(right, DTYPE)


@triton.jit
def turned_rows(
    rows, angles, token, valid, FIRST: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Pairs FIRST .. FIRST + 2 * HALF of rows, rotated: two of f32 [16, PADDED]."""
    cos, sin, cos_stride, sin_stride = angles
    pair = tl.arange(0, PADDED)[None, :]
    mask = valid[:, None] & (pair < HALF)
    if INTERLEAVED:
        left, right = FIRST + 2 * pair, FIRST + 2 * pair + 1
    else:
        left, right = FIRST + pair, FIRST + HALF + pair
    first = tl.load(rows + left, mask, 0.0).to(tl.float32)
    second = tl.load(rows + right, mask, 0.0).to(tl.float32)
    across = token[:, None].to(tl.int64)
    angle_cos = tl.load(cos + across * cos_stride + pair, mask, 0.0).to(tl.float32)
    angle_sin = tl.load(sin + across * sin_stride + pair, mask, 0.0).to(tl.float32)
    return turned(first, second, angle_cos, angle_sin, rows.dtype.element_ty)


@triton.jit
def turn_query(
    rows, angles, token, valid, HALF: tl.constexpr, PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate the first pairs of rows [16, dim] where they are."""
    left, right = turned_rows(rows, angles, token, valid, 0, HALF, PADDED, INTERLEAVED)
    pair = tl.arange(0, PADDED)[None, :]
    mask = valid[:, None] & (pair < HALF)
    tl.debug_barrier()  # pairs that lie side by side are read by other threads than write there
    tl.store(rows + pair, left.to(rows.dtype.element_ty), mask)
    tl.store(rows + HALF + pair, right.to(rows.dtype.element_ty), mask)


@triton.jit
def plain_rows(rows, valid, FIRST: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Numbers FIRST .. FIRST + COUNT of rows: f32 [16, PADDED], zeros beyond."""
    dim = tl.arange(0, PADDED)[None, :]
    return tl.load(rows + FIRST + dim, valid[:, None] & (dim < COUNT), 0.0).to(tl.float32)


@triton.jit
def append_keys(
    rows, angles, at, scales, slot, token, valid, ENCODING: tl.constexpr, PER_WORD: tl.constexpr,
    FIRST: tl.constexpr, HALF: tl.constexpr, LAST: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Write 16 keys: FIRST numbers as they are, HALF pairs rotated, LAST numbers as they are."""
    FIRST_PADDED: tl.constexpr = triton.next_power_of_2(FIRST) if FIRST > 4 else 4
    HALF_PADDED: tl.constexpr = triton.next_power_of_2(HALF) if HALF > 4 else 4
    LAST_PADDED: tl.constexpr = triton.next_power_of_2(LAST) if LAST > 4 else 4
    scale = tl.zeros((16,), tl.float32)
    if FIRST:
        front = plain_rows(rows, valid, 0, FIRST, FIRST_PADDED)
        scale = tl.maximum(scale, magnitude(front))
    if HALF:
        left, right = turned_rows(
            rows, angles, token, valid, FIRST, HALF, HALF_PADDED, INTERLEAVED
        )
        scale = tl.maximum(scale, tl.maximum(magnitude(left), magnitude(right)))
    if LAST:
        back = plain_rows(rows, valid, FIRST + 2 * HALF, LAST, LAST_PADDED)
        scale = tl.maximum(scale, magnitude(back))
    scale = tl.div_rn(scale, tl.full((16,), 127.0, tl.float32))
    if FIRST:
        write_keys(at, slot, valid, front, scale, 0, FIRST, PER_WORD, ENCODING)
    if HALF:
        write_keys(at, slot, valid, left, scale, FIRST, HALF, PER_WORD, ENCODING)
        write_keys(at, slot, valid, right, scale, FIRST + HALF, HALF, PER_WORD, ENCODING)
    if LAST:
        write_keys(at, slot, valid, back, scale, FIRST + 2 * HALF, LAST, PER_WORD, ENCODING)
    if ENCODING == INT8:
        tl.store(scales, scale.to(tl.int32, bitcast=True), valid)


@triton.jit(do_not_specialize=["table_width", "runs"])
def append_kernel(
    query, key, value, cos, sin, memory, spans, tables, query_stride, query_head_stride,
    key_stride, key_head_stride, value_stride, value_head_stride, cos_stride, sin_stride,
    page_stride, layer_offset, table_width, runs,
    ENCODING: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PER_WORD: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr, LAST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The tokens of one page: program (page of the run, KV head or HEADS + query head, run)."""
    run, head = tl.program_id(2), tl.program_id(1)
    offset, length = tl.load(spans + run), tl.load(spans + runs + run)
    start = tl.load(spans + 2 * runs + run)
    number = start // 16 + tl.program_id(0)
    if (number * 16 >= start + length) | (length == 0):
        return
    slot = tl.arange(0, 16)
    position = number * 16 + slot
    valid = (position >= start) & (position < start + length)
    token = tl.where(valid, position - start, 0) + offset
    far = token.to(tl.int64)[:, None]
    angles = (cos, sin, cos_stride, sin_stride)
    if head >= HEADS:
        HALF_PADDED: tl.constexpr = triton.next_power_of_2(HALF) if HALF > 4 else 4
        rows = query + far * query_stride + (head - HEADS) * query_head_stride
        turn_query(rows, angles, token, valid, HALF, HALF_PADDED, INTERLEAVED)
        return

    page = tl.load(tables + run.to(tl.int64) * table_width + number).to(tl.int64)
    base = memory + page * page_stride + layer_offset
    KEY_WORDS: tl.constexpr = KEY_DIM // PER_WORD * 16
    VALUE_WORDS: tl.constexpr = VALUE_DIM * 16 // PER_WORD
    scales = base + HEADS * (KEY_WORDS + VALUE_WORDS) + head * 16 + slot
    rows = key + far * key_stride + head * key_head_stride
    append_keys(
        rows, angles, base + head * KEY_WORDS, scales, slot, token, valid, ENCODING, PER_WORD,
        FIRST, HALF, LAST, INTERLEAVED,
    )
    if VALUE_DIM:
        PADDED: tl.constexpr = triton.next_power_of_2(VALUE_DIM)
        rows = value + far * value_stride + head * value_head_stride
        some = plain_rows(rows, valid, 0, VALUE_DIM, PADDED)
        at = base + HEADS * KEY_WORDS + head * VALUE_WORDS
        write_values(at, scales + HEADS * 16, slot, valid, some, VALUE_DIM, PER_WORD, ENCODING)
