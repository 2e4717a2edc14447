"""Writing keys and values to pages of plain rows on the GPU.

A program takes the tokens of one page and one head.
"""

import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import reference
from hmt.kernels.reference.kv_pages import AttentionMetadata, PageEncoding, Pages
from hmt.kernels.triton.attention.kv_tiles import BF16, F32, FP8, INT8
from hmt.kernels.triton.attention.metadata import DeviceRuns, device_runs
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin


def append_pages(
    pages: Pages, layer: int, runs: AttentionMetadata, key: Tensor, value: Tensor | None
) -> None:
    """See `reference.append_pages`: key [tokens, heads, key_dim], value [tokens, heads, value_dim].

    Writes the same bytes.  Nothing is allocated where rows lie with their numbers side by side.
    """
    if not pages.layout.rows:  # no kernel: on GPUs pages are of plain rows
        reference.append_pages(pages, layer, runs, key, value)
        return
    for held in device_runs(runs, key.device):
        append_held(pages, layer, held, key, value)


def append_held(
    pages: Pages, layer: int, held: DeviceRuns, key: Tensor, value: Tensor | None
) -> None:
    """`append_pages` of some of the runs of a step, to pages of plain rows."""
    layout = pages.layout
    key = key if key.stride(2) == 1 else key.contiguous()
    assert key.shape[1:] == (layout.heads, layout.key_dim)
    values = key if layout.latent or value is None else value
    values = values if values.stride(2) == 1 else values.contiguous()
    assert layout.latent or values.shape[1:] == (layout.heads, layout.value_dim)
    memory = page_numbers(pages)
    touched = (held.tokens + PAGE_TOKENS - 2) // PAGE_TOKENS + 1
    append_kernel[(touched, layout.heads, held.count)](
        key,
        values,
        memory,
        held.spans,
        held.tables,
        *key.stride()[:2],
        *values.stride()[:2],
        memory.stride(0),
        layer_numbers(pages, layer),
        held.tables.stride(0),
        held.count,
        ENCODING=int(layout.encoding),
        HEADS=layout.heads,
        KEY_DIM=layout.key_dim,
        VALUE_DIM=0 if layout.latent else layout.value_dim,
        num_warps=4,
        **dependent(key.device),
    )


def page_numbers(pages: Pages) -> Tensor:
    """The memory of pages as numbers of their encoding, [pages, numbers]; FP8's as bytes.

    (Triton's interpreter cannot load some of FP8's and zeros for the others.)
    """
    if pages.device is None:
        memory, encoding = pages.memory, pages.layout.encoding
        if encoding is not PageEncoding.FP8:
            memory = memory.view(encoding.dtype)
        numbers = memory  # [pages, layers, numbers]
        pages.device = numbers.flatten(1)
        assert pages.device.data_ptr() == memory.data_ptr()
    numbers = pages.device
    return numbers


def layer_numbers(pages: Pages, layer: int) -> int:
    """Numbers of a page before those of `layer`."""
    layout = pages.layout
    return layer * (layout.page_bytes // layout.encoding.dtype.itemsize)


@triton.jit
def coded(numbers, scale):
    """INT8 codes of f32 rows, in int32, as `reference.encode_rows`."""
    some = tl.div_rn(numbers, tl.where(scale == 0, 1.0, scale)[:, None] + tl.zeros_like(numbers))
    # Adding and taking away 1.5 * 2^23 rounds half to even, as torch.
    some = (some + 12582912.0) - 12582912.0
    some = tl.minimum(tl.maximum(some, -127.0), 127.0)
    return tl.where((scale == 0)[:, None], 0.0, some).to(tl.int8)


@triton.jit
def e4m3_codes(numbers):
    """FP8 codes of f32 numbers, in uint8, as `reference.narrowed`: by hand, in integers."""
    bits = numbers.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    most = tl.minimum(size, 0x43E00000)  # 448
    code = ((most + 0x7FFFF + ((most >> 20) & 1)) >> 20) - 960
    # Below 2^-6 in steps of 2^-9, which are the last bits of a number as large as 2^14.
    small = (most.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(most < 0x3C800000, small, code)
    return (tl.where(size > 0x7F800000, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def rounded(numbers):
    """f32 numbers as bf16, half to even: by hand, as Triton's interpreter truncates."""
    some = numbers.to(tl.int32, bitcast=True)
    some = (some + 0x7FFF + ((some >> 16) & 1)) >> 16
    some = tl.where(numbers == numbers, some, 0x7FC0)
    return some.to(tl.int16).to(tl.bfloat16, bitcast=True)


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def write_rows(
    at, scales, rows, slot, valid, DIM: tl.constexpr, ENCODING: tl.constexpr,
):
    """Write rows to slots of a head's rows of a page that begin `at`."""
    PADDED: tl.constexpr = triton.next_power_of_2(DIM)
    dim = tl.arange(0, PADDED)[None, :]
    mask = valid[:, None] & (dim < DIM)
    found = tl.load(rows + dim, mask, 0.0)
    KIND: tl.constexpr = at.dtype.element_ty
    if ENCODING == INT8:
        numbers = found.to(tl.float32)
        scale = tl.max(tl.abs(numbers), 1)
        scale = tl.div_rn(scale, tl.full((16,), 127.0, tl.float32))
        tl.store(scales.to(tl.pointer_type(tl.float32)) + slot, scale, valid)
        kept = coded(numbers, scale)
    elif ENCODING == FP8:
        kept = e4m3_codes(found.to(tl.float32))
    elif found.dtype == KIND:
        kept = found
    elif ENCODING == F32:
        kept = found.to(tl.float32)
    elif ENCODING == BF16:
        kept = rounded(found.to(tl.float32))
    else:
        kept = found.to(tl.float32).to(tl.float16)
    tl.store(at + slot[:, None] * DIM + dim, kept, mask)


@triton.jit(do_not_specialize=["table_width", "runs"])
def append_kernel(
    key, value, memory, spans, tables, key_stride, key_head_stride, value_stride,
    value_head_stride, page_stride, layer_offset, table_width, runs,
    ENCODING: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The tokens of one page: program (page of the run, head, run)."""
    next_may_begin(DEPENDENT)
    run, head = tl.program_id(2), tl.program_id(1)
    offset, length = tl.load(spans + run), tl.load(spans + runs + run)
    start = tl.load(spans + 2 * runs + run)
    number = start // 16 + tl.program_id(0)
    inputs_are_there(DEPENDENT)
    if (number * 16 >= start + length) | (length == 0):
        return
    slot = tl.arange(0, 16)
    position = number * 16 + slot
    valid = (position >= start) & (position < start + length)
    token = (tl.where(valid, position - start, 0) + offset).to(tl.int64)[:, None]
    page = tl.load(tables + run.to(tl.int64) * table_width + number).to(tl.int64)
    base = memory + page * page_stride + layer_offset
    scales = base + HEADS * 16 * (KEY_DIM + VALUE_DIM)
    if ENCODING == INT8:
        scales += head * 64  # f32 numbers of 16 tokens
    rows = key + token * key_stride + head * key_head_stride
    write_rows(base + head * 16 * KEY_DIM, scales, rows, slot, valid, KEY_DIM, ENCODING)
    if VALUE_DIM:
        rows = value + token * value_stride + head * value_head_stride
        at = base + HEADS * 16 * KEY_DIM + head * 16 * VALUE_DIM
        write_rows(at, scales + HEADS * 64, rows, slot, valid, VALUE_DIM, ENCODING)
