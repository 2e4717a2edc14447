"""What an indexer selects, on the GPU: two launches, of fixed shapes, that wait for nothing.

Scores are products of tensor cores, so that their bits are not the reference's; those of a token do
not depend on what else is computed.  Of equal scores the first positions are selected.  A program
selects for one token, in five passes over its scores: four find the least score that is selected,
eight bits at a time, and the last writes positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import reference
from hmt.kernels.reference.kv_pages import PageEncoding, Pages
from hmt.kernels.triton.device_math import interpreted, rank

_POSITIONS = 128  # that one program scores
_LOOKED_AT = 2048  # scores that a program selects from at once
_MOST_SCORES = 1 << 24  # that exist at once, of several tokens
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NONE = tl.constexpr(-(1 << 31))


@triton.jit(do_not_specialize=["start"])
def _score_kernel(
    query, weights, keys, scales, table, starts, scores,
    start, scale, page_stride, scale_stride, token_stride, head_stride, row_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_LANES: tl.constexpr, DIM_LANES: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, POSITIONS: tl.constexpr,
    PAGED: tl.constexpr, SCALED: tl.constexpr, DEVICE_START: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Axis 0: tokens; axis 1: blocks of positions.  Writes nothing behind what a token sees."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * POSITIONS
    if DEVICE_START:
        start = tl.load(starts)
    seen = (start + token + 1) // GROUP
    if first < seen:
        position = first + tl.arange(0, POSITIONS)
        exists = position < seen
        head, number = tl.arange(0, HEAD_LANES), tl.arange(0, DIM_LANES)
        row = query + token * token_stride + head[:, None] * head_stride + number[None, :]
        there = (head < HEADS)[:, None] & (number < DIM)[None, :]
        asked = tl.load(row, mask=there, other=0.0)
        page = (position // PAGE).to(tl.int64)
        if PAGED:
            page = tl.load(table + page, mask=exists, other=0)
        slot = position % PAGE
        at = keys + (page * page_stride + slot * DIM)[:, None] + number[None, :]
        there = exists[:, None] & (number < DIM)[None, :]
        if WIDE:
            asked = asked.to(tl.float32)
        key = tl.load(at, mask=there, other=0.0).to(asked.dtype)
        product = tl.dot(asked, tl.trans(key), input_precision="ieee")
        if SCALED:
            product *= tl.load(scales + page * scale_stride + slot, mask=exists, other=0.0)[None, :]
        product = product * scale
        product = tl.where(product < 0, 0.0, product)  # NaN stays
        weight = tl.load(weights + token * HEADS + head, mask=head < HEADS, other=0.0)
        tl.store(scores + token * row_stride + position, tl.sum(product * weight[:, None], axis=0),
                 mask=exists)  # fmt: skip


@triton.jit
def _keys_at(scores, first, seen, LANES: tl.constexpr):
    """Ranks of scores [first, first + LANES), as unsigned bits, and which of them exist."""
    index = first + tl.arange(0, LANES)
    exists = index < seen
    value = tl.load(scores + index, mask=exists, other=0.0)
    return (rank(value) ^ _NONE).to(tl.uint32, bitcast=True), exists, index


@triton.jit(do_not_specialize=["start"])
def _select_kernel(
    scores, chosen, starts, start, row_stride,
    TOP_K: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, DEVICE_START: tl.constexpr,
):  # fmt: skip
    """Axis 0: tokens."""
    token = tl.program_id(0).to(tl.int64)
    if DEVICE_START:
        start = tl.load(starts)
    seen = (start + token + 1) // GROUP
    scores += token * row_stride
    chosen += token * TOP_K
    digits = tl.arange(0, 256)
    wanted = tl.minimum(seen, TOP_K).to(tl.int32)  # among the scores that begin as `least`
    least = tl.zeros((), tl.uint32)
    for step in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, seen, LANES):
            key, exists, _ = _keys_at(scores, first, seen, LANES)
            if step > 0:
                exists = exists & ((key >> (32 - 8 * step)) == (least >> (32 - 8 * step)))
            digit = ((key >> (24 - 8 * step)) & 255).to(tl.int32)
            counts += tl.histogram(tl.where(exists, digit, 0), 256)
            others = LANES - tl.sum(exists.to(tl.int32), axis=0)
            counts -= tl.where(digits == 0, others, 0)  # counted as the digit 0
        up_to = tl.cumsum(counts, axis=0)
        above = tl.sum(counts, axis=0) - up_to
        here = (above < wanted) & (above + counts >= wanted)
        chosen_digit = tl.sum(tl.where(here, digits, 0), axis=0)
        wanted -= tl.sum(tl.where(here, above, 0), axis=0)
        least = least | (chosen_digit.to(tl.uint32) << (24 - 8 * step))
    taken = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for first in range(0, seen, LANES):
        key, exists, index = _keys_at(scores, first, seen, LANES)
        same = (exists & (key == least)).to(tl.int32)
        place = equal + tl.cumsum(same, axis=0)  # from 1 on
        takes = (exists & (key > least)) | ((same != 0) & (place <= wanted))
        number = takes.to(tl.int32)
        at = taken + tl.cumsum(number, axis=0) - 1
        tl.store(chosen + at, index.to(tl.int64), mask=takes)
        taken += tl.sum(number, axis=0)
        equal += tl.sum(same, axis=0)


def index_topk(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    *,
    start: int | Tensor,
    top_k: int,
    scale: float,
    positions: int = 1,
) -> Tensor:
    """`reference.index_topk`.

    start   or int64 [1] where layers compute, for steps that are captured; keys are then those of
            the longest context, and what a token does not fill of its row of positions is -1
    """
    if query.dtype not in _DTYPES or keys.dtype != query.dtype:
        assert isinstance(start, int)
        return reference.index_topk(
            query, weights, keys, start=start, top_k=top_k, scale=scale, positions=positions
        )
    keys = keys.contiguous()
    stride = PAGE_TOKENS * keys.shape[1]
    where = keys, stride, None, None, len(keys)
    return _best(query, weights, *where, start, top_k=top_k, scale=scale, group=positions)


def paged_index_topk(
    query: Tensor,
    weights: Tensor,
    pages: Pages,
    layer: int,
    table: Tensor,
    *,
    start: int | Tensor,
    top_k: int,
    scale: float,
) -> Tensor:
    """`reference.paged_index_topk`; `start` as in `index_topk`, `table` of the longest context."""
    layout = pages.layout
    known = layout.rows and layout.heads == 1 and layout.latent
    if query.dtype not in _DTYPES or not known or layout.encoding is PageEncoding.INT4:
        assert isinstance(start, int)
        return reference.paged_index_topk(
            query, weights, pages, layer, table, start=start, top_k=top_k, scale=scale
        )
    keys, _, scales, _ = pages.parts(layer)
    context = len(table) * PAGE_TOKENS
    if isinstance(start, int):
        context = start + len(query)
    scaled = scales if layout.encoding.has_scales else None
    where = keys, keys.stride(0), scaled, table, context
    return _best(query, weights, *where, start, top_k=top_k, scale=scale, group=1)


def _best(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    stride: int,
    scales: Tensor | None,
    table: Tensor | None,
    context: int,
    start: int | Tensor,
    *,
    top_k: int,
    scale: float,
    group: int,
) -> Tensor:
    """What both do: `stride` numbers from page to page; scores of up to `context` positions."""
    tokens, heads, dim = query.shape
    context = -(-context // _POSITIONS) * _POSITIONS  # so that strides are compiled as multiples
    query = query if query.stride(2) == 1 else query.contiguous()
    weights = weights.float().contiguous()
    chosen = torch.full((tokens, top_k), -1, dtype=torch.int64, device=query.device)
    on_device = isinstance(start, Tensor)
    together = max(1, min(tokens, _MOST_SCORES // max(context, 1)))
    scores = torch.empty(together, context, dtype=torch.float32, device=query.device)
    for first in range(0, tokens, together):
        part = slice(first, min(first + together, tokens))
        count = part.stop - part.start
        starts, begin = chosen, 0
        if isinstance(start, Tensor):
            starts = start + first
        else:
            begin = start + first
        _score_kernel[(count, triton.cdiv(context, _POSITIONS))](
            query[part], weights[part], keys, keys if scales is None else scales,
            keys if table is None else table, starts, scores, begin, scale, stride,
            0 if scales is None else scales.stride(0), query.stride(0), query.stride(1),
            scores.stride(0), HEADS=heads, DIM=dim,
            HEAD_LANES=max(16, triton.next_power_of_2(heads)),
            DIM_LANES=max(16, triton.next_power_of_2(dim)), GROUP=group, PAGE=PAGE_TOKENS,
            POSITIONS=_POSITIONS, PAGED=table is not None, SCALED=scales is not None,
            DEVICE_START=on_device,
            WIDE=interpreted(),  # which multiplies the bits of bf16 as whole numbers
            num_warps=4,
        )  # fmt: skip
        _select_kernel[(count,)](
            scores, chosen[part], starts, begin, scores.stride(0), TOP_K=top_k, GROUP=group,
            LANES=_LOOKED_AT, DEVICE_START=on_device, num_warps=8,
        )  # fmt: skip
    return chosen
