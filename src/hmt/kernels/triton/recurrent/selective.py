"""State spaces with a decay for each number, token by token, with the state in registers.

A program has the whole state of some channels and goes through the tokens of one run in their
order, so no division of a prompt and no other sequence changes a bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels import reference
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin
from hmt.kernels.triton.recurrent.delta_rule import softplus
from hmt.kernels.triton.recurrent.state_runs import device_state_runs, state_run

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a program of one warp: each has a power for every token, so few, for more programs.
_STATE_NUMBERS = 512


@triton.jit
def _numbers(
    x, raw, keys, queries, token, x_stride, raw_stride, key_stride, query_stride,
    channel, row, channels, ROWS: tl.constexpr,
):  # fmt: skip
    """A token's x, raw step, key and query, as they come."""
    value = tl.load(x + token * x_stride + channel, mask=channel < channels, other=0.0)
    step = tl.load(raw + token * raw_stride + channel, mask=channel < channels, other=0.0)
    k = tl.load(keys + token * key_stride + row, mask=row < ROWS, other=0.0)
    q = tl.load(queries + token * query_stride + row, mask=row < ROWS, other=0.0)
    return value, step, k, q


@triton.jit
def _selective_kernel(
    x, raw, bias, decay_scale, keys, queries, skip, states, out, table,
    x_stride, raw_stride, key_stride, query_stride, channels, slot_stride,
    ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The state of WIDTH channels, for all tokens of one run."""
    next_may_begin(DEPENDENT)
    row = tl.arange(0, PADDED_ROWS)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < ROWS)[:, None] & (channel < channels)[None, :]
    at_scale = decay_scale + channel[None, :] * ROWS + row[:, None]
    rate = -tl.exp(tl.load(at_scale, mask=inside, other=0.0).to(tl.float32))
    added_to = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    past = tl.load(skip + channel, mask=channel < channels, other=0.0).to(tl.float32)
    inputs_are_there(DEPENDENT)
    slot, offset, length, begins, stay = state_run(table, tl.program_id(1))
    if length > 0:
        own = states + slot * slot_stride + row[:, None] * channels + channel[None, :]
        known = (row < ROWS * (1 - begins))[:, None] & (channel < channels)[None, :]
        state = tl.load(own, mask=known, other=0.0)
        last = offset + length - 1
        value, step, k, q = _numbers(
            x, raw, keys, queries, offset, x_stride, raw_stride, key_stride, query_stride,
            channel, row, channels, ROWS,
        )  # fmt: skip
        for number in range(length):
            token = offset + number
            # The next token is read while this one is computed.
            next_value, next_step, next_k, next_q = _numbers(
                x, raw, keys, queries, tl.minimum(token + 1, last), x_stride, raw_stride,
                key_stride, query_stride, channel, row, channels, ROWS,
            )  # fmt: skip
            wide = value.to(tl.float32)
            taken = softplus(step.to(tl.float32) + added_to)
            state = state * tl.exp(rate * taken[None, :])
            state += k.to(tl.float32)[:, None] * (wide * taken)[None, :]
            result = tl.sum(state * q.to(tl.float32)[:, None], 0) + wide * past
            to = out + token * channels + channel
            tl.store(to, result.to(out.dtype.element_ty), mask=channel < channels)
            if number + 1 == stay:  # what comes behind may be taken back
                tl.store(own, state, mask=inside)
            value, step, k, q = next_value, next_step, next_k, next_q


def selective_scan(
    x: Tensor,
    raw: Tensor,
    bias: Tensor,
    decay_scale: Tensor,
    keys: Tensor,
    queries: Tensor,
    skip: Tensor,
    states: Tensor,
    runs: Sequence[StateRun],
) -> Tensor:
    """See `reference.selective_scan`: [tokens, channels]; changes states."""
    if not {x.dtype, raw.dtype, keys.dtype, queries.dtype} <= set(_DTYPES):
        return reference.selective_scan(
            x, raw, bias, decay_scale, keys, queries, skip, states, runs
        )
    (tokens, channels), state_dim = x.shape, decay_scale.shape[1]
    assert raw.shape == x.shape and keys.shape == queries.shape == (tokens, state_dim)
    assert decay_scale.shape[0] == len(bias) == len(skip) == channels
    assert states.shape[1:] == (state_dim, channels)
    assert states.dtype is torch.float32 and states[0].is_contiguous()
    x, raw, keys, queries = (
        t if t.stride(1) == 1 else t.contiguous() for t in (x, raw, keys, queries)
    )
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    held = device_state_runs(runs, x.device)
    if not held.count or not held.tokens:
        return out
    rows, width = selective_tile(state_dim, channels)
    _selective_kernel[(triton.cdiv(channels, width), held.count)](
        x, raw, bias.contiguous(), decay_scale.contiguous(), keys, queries, skip.contiguous(),
        states, out, held.table,
        x.stride(0), raw.stride(0), keys.stride(0), queries.stride(0), channels, states.stride(0),
        ROWS=state_dim, PADDED_ROWS=rows, WIDTH=width, num_warps=1, **dependent(x.device),
    )  # fmt: skip
    return out


def selective_tile(state_dim: int, channels: int) -> tuple[int, int]:
    """Rows and channels of a program's part of the state: by the model alone, as its bits are."""
    rows = max(16, triton.next_power_of_2(state_dim))
    return rows, min(triton.next_power_of_2(channels), max(1, _STATE_NUMBERS // rows))
