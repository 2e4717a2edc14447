"""A causal convolution of each channel over time, of several sequences in one launch.

A result is a chain of fused products, the oldest first, whatever tile it is computed in: neither
the division of a prompt nor other sequences change a bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels import reference
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin
from hmt.kernels.triton.recurrent.state_runs import device_state_runs, state_run

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOKENS, _CHANNELS = 16, 128  # of a tile
_SINGLE_CHANNELS = 256  # of a program, where runs have one token each


@triton.jit
def _row(x, tails, at, inside, x_stride, channels, channel, begins, WIDTH: tl.constexpr):
    """Rows `at` of a run's tokens, or, where that is negative, of those before it; f32."""
    new = tl.load(x + at * x_stride + channel, mask=inside & (at >= 0), other=0.0).to(tl.float32)
    before = inside & (at < 0) & (channel < channels * (1 - begins))
    old = tl.load(tails + (at + (WIDTH - 1)) * channels + channel, mask=before, other=0.0)
    return tl.where(at >= 0, new, old)


@triton.jit
def _finished(total, GATED: tl.constexpr):
    """The result of a sum."""
    if GATED:
        total = total * (1.0 / (1.0 + tl.exp(-total)))
    return total


@triton.jit
def _conv_kernel(
    x, weight, bias, tails, out, table, x_stride, channels, slot_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr,
    BIASED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile of TOKENS tokens and CHANNELS channels of one run."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    slot, offset, length, begins, _ = state_run(table, tl.program_id(2))
    first = tl.program_id(1) * TOKENS
    if first < length:
        token = first + tl.arange(0, TOKENS)[:, None]
        channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        inside = (token < length) & (channel < channels)
        x += offset * x_stride
        tails += slot * slot_stride
        total = tl.zeros((TOKENS, CHANNELS), tl.float32)
        if BIASED:
            total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
        for tap in range(WIDTH):
            row = _row(
                x, tails, token - (WIDTH - 1) + tap, inside, x_stride, channels, channel, begins,
                WIDTH,
            )  # fmt: skip
            factor = tl.load(weight + channel * WIDTH + tap, mask=channel < channels, other=0.0)
            total = tl.fma(row, factor.to(tl.float32) + tl.zeros_like(row), total)
        to = out + (offset + token) * channels + channel
        tl.store(to, _finished(total, GATED).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tail_kernel(
    x, tails, table, x_stride, channels, slot_stride,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What stays of a run's tokens, of CHANNELS channels."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    slot, offset, length, begins, stay = state_run(table, tl.program_id(1))
    if (length > 0) & (stay > 0):
        channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < channels
        x += offset * x_stride
        tails += slot * slot_stride
        # Each row comes from a later one, and a thread has its channels of all rows.
        for row in range(WIDTH - 1):
            at = stay - (WIDTH - 1) + row + tl.zeros((CHANNELS,), tl.int32)
            kept = _row(x, tails, at, inside, x_stride, channels, channel, begins, WIDTH)
            tl.store(tails + row * channels + channel, kept, mask=inside)


@triton.jit
def _single_kernel(
    x, weight, bias, tails, out, table, x_stride, channels, slot_stride,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The only token of a run, and what stays of it, of CHANNELS channels."""
    next_may_begin(DEPENDENT)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    inputs_are_there(DEPENDENT)
    slot, offset, length, begins, stay = state_run(table, tl.program_id(1))
    if length > 0:
        tails += slot * slot_stride
        kept = channel < channels * stay  # 0 or 1
        own = tl.load(x + offset * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros((CHANNELS,), tl.float32)
        if BIASED:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        for tap in range(WIDTH):
            row = own
            if tap < WIDTH - 1:
                old = tails + tap * channels + channel
                row = tl.load(old, mask=channel < channels * (1 - begins), other=0.0)
                if tap > 0:
                    # The row was read before it is written: by the same thread.
                    to = tails + (tap - 1) * channels + channel
                    tl.store(to, row, mask=kept)
            else:
                to = tails + (WIDTH - 2) * channels + channel
                tl.store(to, own, mask=kept)
            factor = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
            total = tl.fma(row, factor.to(tl.float32), total)
        to = out + offset * channels + channel
        tl.store(to, _finished(total, GATED).to(out.dtype.element_ty), mask=inside)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    tails: Tensor,
    runs: Sequence[StateRun],
    *,
    bias: Tensor | None = None,
    gated: bool = True,
) -> Tensor:
    """See `reference.causal_conv`: [tokens, channels] in x.dtype; changes tails."""
    if x.dtype not in _DTYPES:
        return reference.causal_conv(x, weight, tails, runs, bias=bias, gated=gated)
    channels, width = weight.shape
    assert x.shape[1] == channels and tails.shape[1:] == (width - 1, channels)
    assert bias is None or bias.shape == (channels,)
    assert tails.dtype is torch.float32 and tails[0].is_contiguous()
    x, weight = x if x.stride(1) == 1 else x.contiguous(), weight.contiguous()
    biased, bias = bias is not None, weight if bias is None else bias.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    held, pdl = device_state_runs(runs, x.device), dependent(x.device)
    if not held.count or not held.tokens or not channels:
        return out
    sizes = x.stride(0), channels, tails.stride(0)
    if held.tokens == 1:
        blocks = triton.cdiv(channels, _SINGLE_CHANNELS)
        _single_kernel[(blocks, held.count)](
            x, weight, bias, tails, out, held.table, *sizes,
            WIDTH=width, CHANNELS=_SINGLE_CHANNELS, GATED=gated, BIASED=biased, num_warps=2,
            **pdl,
        )  # fmt: skip
        return out
    blocks, tiles = triton.cdiv(channels, _CHANNELS), triton.cdiv(held.tokens, _TOKENS)
    _conv_kernel[(blocks, tiles, held.count)](
        x, weight, bias, tails, out, held.table, *sizes,
        WIDTH=width, TOKENS=_TOKENS, CHANNELS=_CHANNELS, GATED=gated, BIASED=biased,
        num_warps=4, **pdl,
    )  # fmt: skip
    blocks = triton.cdiv(channels, _SINGLE_CHANNELS)
    _tail_kernel[(blocks, held.count)](
        x, tails, held.table, *sizes,
        WIDTH=width, CHANNELS=_SINGLE_CHANNELS, num_warps=2, **pdl,
    )  # fmt: skip
    return out
