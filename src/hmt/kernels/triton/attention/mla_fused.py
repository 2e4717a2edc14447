"""What latent attention computes around the attention itself, for one token of each run.

`kv_b_proj` is multiplied with as it lies, in panels of 4 bits: made numbers of first, its 33 MB
would be written and read for every token.  Queries are turned, and the token's row is normed,
turned and put into its page, beside the products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.kernels.reference.kv_pages import Pages
from hmt.kernels.reference.sublayers import LatentLayer
from hmt.kernels.triton.attention.append import layer_numbers, page_numbers
from hmt.kernels.triton.attention.combine import count_parts
from hmt.kernels.triton.attention.metadata import DeviceRuns
from hmt.kernels.triton.attention.tuning import Plan
from hmt.kernels.triton.device_math import rounded
from hmt.kernels.triton.gemm.dequantize import offset_kind
from hmt.kernels.triton.pdl import ask_cache_for_rows, dependent, inputs_are_there, next_may_begin

_MOST_TOKENS = 16  # each reads all of the weight, if only from the cache
_KEY_PARTS = 4  # programs that share a head's absorbed query
_VALUE_PARTS = 2  # and its values
_MERGED = 16  # parts of a context that are read at once


def takes_expansion(w: WeightTensor, layer: LatentLayer, tokens: int) -> bool:
    """Whether `absorb` and `values_of` multiply with w, `kv_b_proj`, for so many tokens."""
    plain = w.encoding is Encoding.INT4_GROUP and not offset_kind(w) and w.group_size % 32 == 0
    powers = (layer.kv_rank, layer.nope_dim, layer.value_dim, layer.rope_dim)
    whole = all(n & (n - 1) == 0 for n in powers) and layer.kv_rank >= w.group_size * _KEY_PARTS
    panels = layer.nope_dim >= 16 and layer.value_dim >= 16 * _VALUE_PARTS
    return plain and whole and panels and 0 < tokens <= _MOST_TOKENS


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def _weight_tile(
    codes, scales, first_panel, first_block, blocks, PANELS: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
):
    """Words [PANELS, BLOCKS, j of 4, 16] of codes, and their scales."""
    panel = (first_panel + tl.arange(0, PANELS)).to(tl.int64)[:, None, None, None]
    block = first_block + tl.arange(0, BLOCKS)[None, :, None, None]
    place = tl.arange(0, 4)[None, None, :, None] * 16 + tl.arange(0, 16)[None, None, None, :]
    words = tl.load(codes + (panel * blocks + block) * 64 + place)
    # One for each word, so that they lie where the words do and nothing moves between threads.
    groups = blocks // GROUP_BLOCKS
    number = (panel * groups + block // GROUP_BLOCKS) * 16 + place % 16
    numbers = tl.load(scales + number)
    return words, numbers.to(tl.float32)


@triton.jit
def _codes(words, NIBBLE: tl.constexpr):
    """Of one of eight inputs, less 8.  Made of bits: conversions take the card four times as long.

    Input `NIBBLE % 2 * 16 + NIBBLE // 2` of those that begin with 4 j.
    """
    bits = ((words >> (4 * NIBBLE)) & 15) | 0x4B000000  # 2^23 and the code
    return bits.to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _absorbed(
    query, codes, scales, first, first_block, blocks, PANELS: tl.constexpr, BLOCKS: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """The products of a head's query with rows from panel `first` on: f32 [BLOCKS * 32].

    In a loop, and with one sum over threads at its end: unrolled it was 94 KB of instructions, and
    to fetch them took 90 us.
    """
    TWO: tl.constexpr = 2 if PANELS > 1 else 1
    now, scale = _weight_tile(codes, scales, first, first_block, blocks, TWO, BLOCKS, GROUP_BLOCKS)
    panel = first.to(tl.int64)
    groups = blocks // GROUP_BLOCKS
    WIDE: tl.constexpr = scales.dtype.element_ty.primitive_bitwidth // 8
    code_rows = codes + (panel * blocks + first_block) * 64
    ask_cache_for_rows(code_rows, blocks * 256, PANELS, BLOCKS * 256, DEPENDENT)
    scale_rows = scales + (panel * groups + first_block // GROUP_BLOCKS) * 16
    size = BLOCKS // GROUP_BLOCKS * 16 * WIDE
    ask_cache_for_rows(scale_rows, groups * 16 * WIDE, PANELS, size, DEPENDENT)
    inputs_are_there(DEPENDENT)
    row = tl.arange(0, TWO)[:, None, None, None] * 16 + tl.arange(0, 16)[None, None, None, :]
    row = tl.broadcast_to(row, (TWO, BLOCKS, 4, 16))
    s0 = tl.zeros((TWO, BLOCKS, 4, 16), tl.float32)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    for at in range(0, PANELS, TWO):
        following, next_scale = _weight_tile(
            codes, scales, first + tl.minimum(at + TWO, PANELS - TWO), first_block, blocks, TWO,
            BLOCKS, GROUP_BLOCKS,
        )
        own = tl.load(query + at * 16 + row).to(tl.float32) * scale
        s0 += _codes(now, 0) * own
        s1 += _codes(now, 1) * own
        s2 += _codes(now, 2) * own
        s3 += _codes(now, 3) * own
        s4 += _codes(now, 4) * own
        s5 += _codes(now, 5) * own
        s6 += _codes(now, 6) * own
        s7 += _codes(now, 7) * own
        now, scale = following, next_scale
    # [block, j, half, i >= 2, odd i]; nibble 2 i + half
    even = tl.join(tl.join(_over_rows(s0), _over_rows(s1)), tl.join(_over_rows(s4), _over_rows(s5)))
    odd = tl.join(tl.join(_over_rows(s2), _over_rows(s3)), tl.join(_over_rows(s6), _over_rows(s7)))
    found = tl.permute(tl.join(even, odd), (0, 2, 1, 3, 4))
    return tl.reshape(found, (BLOCKS * 32,))


@triton.jit
def _over_rows(sums):
    return tl.sum(tl.sum(sums, 3), 0)


@triton.jit
def _turned(x, cos, sin, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr):
    """Both halves of the HALF pairs of numbers at x, rotated."""
    pair = tl.arange(0, HALF)
    by_cos = rounded(tl.load(cos + pair).to(tl.float32), KIND)
    by_sin = rounded(tl.load(sin + pair).to(tl.float32), KIND)
    if INTERLEAVED:
        first = tl.load(x + 2 * pair).to(tl.float32)
        second = tl.load(x + 2 * pair + 1).to(tl.float32)
    else:
        first = tl.load(x + pair).to(tl.float32)
        second = tl.load(x + HALF + pair).to(tl.float32)
    one = rounded(first * by_cos, KIND) - rounded(second * by_sin, KIND)
    two = rounded(second * by_cos, KIND) + rounded(first * by_sin, KIND)
    return one.to(KIND), two.to(KIND)


@triton.jit
def _append(
    row, memory, spans, tables, norm, cos, sin, page_stride, layer_offset, table_width, runs, eps,
    RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Norm and turn the row of a run's only token, and put it into its page."""
    KIND: tl.constexpr = row.dtype.element_ty
    run = tl.program_id(1)
    column = tl.arange(0, RANK)
    values = tl.load(row + column).to(tl.float32)
    by = tl.load(norm + column).to(tl.float32)
    mean = tl.sum(values * values, 0) / RANK
    values = rounded(values * tl.rsqrt(mean + eps), KIND) * rounded(by, KIND)
    length, start = tl.load(spans + runs + run), tl.load(spans + 2 * runs + run)
    if length > 0:
        page = tl.load(tables + run.to(tl.int64) * table_width + start // 16).to(tl.int64)
        at = memory + page * page_stride + layer_offset + start % 16 * (RANK + ROPE)
        tl.store(at + column, values.to(KIND))
        one, two = _turned(row + RANK, cos, sin, ROPE // 2, INTERLEAVED, KIND)
        tl.store(at + RANK + tl.arange(0, ROPE // 2), one)
        tl.store(at + RANK + ROPE // 2 + tl.arange(0, ROPE // 2), two)


@triton.jit(do_not_specialize=["table_width", "runs"])
def absorb_kernel(
    query, row, out, codes, scales, norm, cos, sin, memory, spans, tables, query_stride, row_stride,
    angle_stride, page_stride, layer_offset, table_width, runs, eps,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr,
    VALUE: tl.constexpr, PARTS: tl.constexpr, GROUP_BLOCKS: tl.constexpr,
    INTERLEAVED: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (part + PARTS * head, run); the last one appends the run's row.

    query [runs, heads * (NOPE + ROPE)], row [runs, RANK + ROPE]; out [runs, heads, RANK + ROPE].
    The token of run i is the i-th of the step.
    """
    next_may_begin(DEPENDENT)
    KIND: tl.constexpr = query.dtype.element_ty
    PANELS: tl.constexpr = NOPE // 16
    BLOCKS: tl.constexpr = RANK // 32 // PARTS
    token = tl.program_id(1).to(tl.int64)
    cos += token * angle_stride
    sin += token * angle_stride
    if tl.program_id(0) == HEADS * PARTS:
        inputs_are_there(DEPENDENT)
        _append(
            row + token * row_stride, memory, spans, tables, norm, cos, sin, page_stride,
            layer_offset, table_width, runs, eps, RANK, ROPE, INTERLEAVED,
        )
    else:
        head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
        query += token * query_stride + head * (NOPE + ROPE)
        out += (token * HEADS + head) * (RANK + ROPE)
        first = head * ((NOPE + VALUE) // 16)
        total = _absorbed(
            query, codes, scales, first, part * BLOCKS, RANK // 32, PANELS, BLOCKS, GROUP_BLOCKS,
            DEPENDENT,
        )
        tl.store(out + part * (BLOCKS * 32) + tl.arange(0, BLOCKS * 32), total.to(KIND))
        if part == 0:
            one, two = _turned(query + NOPE, cos, sin, ROPE // 2, INTERLEAVED, KIND)
            tl.store(out + RANK + tl.arange(0, ROPE // 2), one)
            tl.store(out + RANK + ROPE // 2 + tl.arange(0, ROPE // 2), two)


@triton.jit
def _merged(parts, logs, slot, local, count, RANK: tl.constexpr, ROWS: tl.constexpr,
            AT_ONCE: tl.constexpr):
    """The parts of a row as one, f32 [RANK], added in their order; see `merging`."""
    column = tl.arange(0, RANK)
    top = slot.to(tl.float32) * 0 + float("-inf")
    for first in range(0, count, AT_ONCE):
        near = first + tl.arange(0, AT_ONCE)
        log = tl.load(logs + (slot + near) * ROWS + local, near < count, float("-inf"))
        top = tl.maximum(top, tl.max(log, 0))
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = finite * 0
    mixed = tl.zeros((RANK,), tl.float32)
    for first in range(0, count, AT_ONCE):
        near = first + tl.arange(0, AT_ONCE)
        at = (slot + near) * ROWS + local
        log = tl.load(logs + at, near < count, float("-inf"))
        some = tl.load(parts + at[:, None] * RANK + column, (near < count)[:, None], 0.0)
        weight = tl.exp2(log - finite)
        total += tl.sum(weight, 0)
        mixed += tl.sum(some * weight[:, None], 0)
    return mixed / tl.where(total == 0, 1.0, total)


@triton.jit
def _by_nibble(numbers, BLOCKS: tl.constexpr):
    """Numbers of blocks of 32 as those that go with each nibble of words: eight [BLOCKS, 4]."""
    some = tl.permute(tl.reshape(numbers, (BLOCKS, 2, 4, 2, 2)), (0, 2, 3, 4, 1))
    low, high = tl.split(some)  # halves of a block; [BLOCKS, j, i >= 2, odd i]
    low_even, low_odd = tl.split(low)
    high_even, high_odd = tl.split(high)
    l0, l2 = tl.split(low_even)
    l1, l3 = tl.split(low_odd)
    h0, h2 = tl.split(high_even)
    h1, h3 = tl.split(high_odd)
    return l0, h0, l1, h1, l2, h2, l3, h3


@triton.jit(do_not_specialize=["runs", "launched", "few", "parts"])
def values_kernel(
    mixed, parts_out, parts_lse, out, codes, scales, spans, runs, launched, few, parts,
    HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, VALUE: tl.constexpr,
    PARTS: tl.constexpr, GROUP_BLOCKS: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Program (part + PARTS * head, run): mixed [.., heads, RANK], or its parts, to values.

    With SPLIT contexts of more than one part are in `parts_out`, as `attend_kernel` leaves them.
    """
    next_may_begin(DEPENDENT)
    PANELS: tl.constexpr = VALUE // 16 // PARTS
    BLOCKS: tl.constexpr = RANK // 32
    KIND: tl.constexpr = out.dtype.element_ty
    head, run = tl.program_id(0) // PARTS, tl.program_id(1)
    part = tl.program_id(0) % PARTS * PANELS
    first = head * ((NOPE + VALUE) // 16) + NOPE // 16 + part
    words, scale = _weight_tile(codes, scales, first, 0, BLOCKS, PANELS, BLOCKS, GROUP_BLOCKS)
    token = run.to(tl.int64) * HEADS + head
    count = 1
    if SPLIT:
        length, start = tl.load(spans + runs + run), tl.load(spans + 2 * runs + run)
        count = count_parts(
            start, length, few, parts, 0, False, LEAST, MOST, 1, HEADS, ROWS, TILE, False
        )[2]
    inputs_are_there(DEPENDENT)
    if count == 1:
        numbers = tl.load(mixed + token * RANK + tl.arange(0, RANK)).to(tl.float32)
    else:
        slot = (run * tl.cdiv(HEADS, ROWS) + head // ROWS).to(tl.int64) * launched
        numbers = _merged(parts_out, parts_lse, slot, head % ROWS, count, RANK, ROWS, AT_ONCE)
        numbers = rounded(numbers, KIND)
    values = _by_nibble(numbers, BLOCKS)
    total = tl.zeros((PANELS, BLOCKS, 4, 16), tl.float32)
    for nibble in tl.static_range(8):
        total += _codes(words, nibble) * values[nibble][None, :, :, None]
    total = tl.sum(tl.sum(total * scale, 2), 1)  # [PANELS, 16]
    row = (part + tl.arange(0, PANELS)[:, None]) * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + token * VALUE + row, total.to(KIND))
# fmt: on


def absorb(
    query: Tensor,
    row: Tensor,
    w: WeightTensor,
    norm: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    pages: Pages,
    number: int,
    held: DeviceRuns,
    layer: LatentLayer,
) -> Tensor:
    """Queries for latent keys, [tokens, heads, kv_rank + rope_dim]; appends the tokens' keys.

    query [tokens, heads * (nope_dim + rope_dim)] and row [tokens, kv_rank + rope_dim] are as
    projected; norm and eps are of the row's latent; angles are cos and sin [tokens, rope_dim].
    Each run of `held` has one token, or none, and they come in their order.
    """
    tokens, (cos, sin) = len(query), angles
    out = query.new_empty(tokens, layer.heads, layer.kv_rank + layer.rope_dim)
    memory = page_numbers(pages)
    assert w.scales is not None and held.count == tokens and cos.stride() == sin.stride()
    absorb_kernel[(layer.heads * _KEY_PARTS + 1, tokens)](
        query, row, out, w.data.view(torch.int32), w.scales, norm, cos, sin,
        memory, held.spans, held.tables, query.stride(0), row.stride(0), cos.stride(0),
        memory.stride(0), layer_numbers(pages, number), held.tables.stride(0), held.count, eps,
        HEADS=layer.heads, NOPE=layer.nope_dim, ROPE=layer.rope_dim, RANK=layer.kv_rank,
        VALUE=layer.value_dim, PARTS=_KEY_PARTS, GROUP_BLOCKS=w.group_size // 32,
        INTERLEAVED=layer.interleaved, num_warps=4,
        enable_fp_fusion=False,  # products of a rotation are rounded before they are added
        **dependent(query.device),
    )  # fmt: skip
    return out


def values_of(
    attended: tuple[Plan, Tensor, Tensor | None, Tensor | None],
    w: WeightTensor,
    held: DeviceRuns,
    layer: LatentLayer,
) -> Tensor:
    """Values [tokens, heads * value_dim] of what `attend_held` found: latents, or parts of them."""
    plan, mixed, parts, logs = attended
    out = mixed.new_empty(len(mixed), layer.heads * layer.value_dim)
    split = plan.split and plan.launched > 1
    assert w.scales is not None and mixed.is_contiguous()
    values_kernel[(layer.heads * _VALUE_PARTS, len(mixed))](
        mixed, parts if split else mixed, logs if split else mixed, out,
        w.data.view(torch.int32), w.scales, held.spans, held.count, plan.launched, plan.few,
        plan.parts,
        HEADS=layer.heads, NOPE=layer.nope_dim, RANK=layer.kv_rank, VALUE=layer.value_dim,
        PARTS=_VALUE_PARTS, GROUP_BLOCKS=w.group_size // 32, SPLIT=split, LEAST=plan.least,
        MOST=plan.most, ROWS=plan.rows, TILE=plan.tile, AT_ONCE=_MERGED, num_warps=8,
        **dependent(mixed.device),
    )  # fmt: skip
    return out
