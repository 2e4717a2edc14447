"""The gated delta rule, token by token, with the state in registers.

A program has some columns of one head's matrix and goes through the tokens of one run in their
order, so no division of a prompt and no other sequence changes a bit.  What it waits for is a chain
from each token to the next, which is kept short: both products with the state are of the state
before the token,

    q S' = g (q S) + (q k) b (v - g (k S)),

lengths of queries and keys are factors of what was multiplied, and what the next token needs that
is not the state is read and computed meanwhile.  Where each row of the state has its own g, it is a
factor of the rows' queries and keys instead.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels import reference
from hmt.kernels.reference import DeltaHeads
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin
from hmt.kernels.triton.recurrent.state_runs import device_state_runs, state_run

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EPS = tl.constexpr(1e-6)
# Of a program of one warp.  With 16 columns of 128 an H200 takes 3.7 us for a token of 32 heads, 11
# and 88 for 8 and 64 sequences, and 1.53 ms for 2048 tokens; with 8 columns 3.9, 15, 118 and 1.57;
# with 32 registers are spilled, and prompts take 2.4 ms.
_STATE_NUMBERS = 2048


@triton.jit
def softplus(x):
    """log(1 + exp(x)) with a relative error of some 2^-23, also where it is small."""
    power = tl.exp(-tl.abs(x))
    # log(1 + y) = 2 artanh(y / (2 + y)); y / (2 + y) is at most 1/3.
    s = power / (2.0 + power)
    square = s * s
    series = 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _numbers(
    qkv, decay, rate, token, width, heads, keys, key_at, value_at, head,
    key, value, KEYS: tl.constexpr, VALUES: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """A token's query, key and value, its decay or decays and its rate, as they come."""
    row = qkv + token * width
    q = tl.load(row + key_at + key, mask=key < KEYS, other=0.0)
    k = tl.load(row + keys + key_at + key, mask=key < KEYS, other=0.0)
    v = tl.load(row + 2 * keys + value_at + value, mask=value < VALUES, other=0.0)
    if BY_CHANNEL:
        d = tl.load(decay + (token * heads + head) * KEYS + key, mask=key < KEYS, other=0.0)
    else:
        d = tl.load(decay + token * heads + head)
    return q, k, v, d, tl.load(rate + token * heads + head)


@triton.jit
def _gates(
    q, k, decay, rate, scale, bias, KEYS: tl.constexpr, BOUND: tl.constexpr, MOST: tl.constexpr
):
    """Query and key in f32 with the factors that make their lengths 1, q k, g and b."""
    q, k = q.to(tl.float32), k.to(tl.float32)
    by_q = tl.rsqrt(tl.sum(q * q, 0) + _EPS) * (KEYS**-0.5)
    by_k = tl.rsqrt(tl.sum(k * k, 0) + _EPS)
    product = tl.sum(q * k, 0) * by_q * by_k
    if BOUND == 0.0:
        stays = tl.exp(-scale * softplus(decay.to(tl.float32) + bias))
    else:
        stays = tl.exp(BOUND / (1.0 + tl.exp(-scale * (decay.to(tl.float32) + bias))))
    learns = MOST / (1.0 + tl.exp(-rate.to(tl.float32)))
    return q, k, by_q, by_k, product, stays, learns


@triton.jit
def _delta_kernel(
    qkv, decay, rate, decay_scale, decay_bias, states, out, table,
    width, heads, shared, keys, slot_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BOUND: tl.constexpr, MOST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of the matrix of one head, for all tokens of one run."""
    next_may_begin(DEPENDENT)
    head = tl.program_id(1)
    key = tl.arange(0, KEY_ROWS)
    value = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    scale = tl.exp(tl.load(decay_scale + head).to(tl.float32))
    if BY_CHANNEL:
        bias = tl.load(decay_bias + head * KEYS + key, mask=key < KEYS, other=0.0).to(tl.float32)
    else:
        bias = tl.load(decay_bias + head).to(tl.float32)
    inputs_are_there(DEPENDENT)
    slot, offset, length, begins, stay = state_run(table, tl.program_id(2))
    if length > 0:
        column = (value < VALUES)[None, :]
        own = states + slot * slot_stride + head * (KEYS * VALUES)
        own += key[:, None] * VALUES + value[None, :]
        state = tl.load(own, mask=(key < KEYS * (1 - begins))[:, None] & column, other=0.0)
        key_at, value_at = head // shared * KEYS, head * VALUES
        q, k, v, d, r = _numbers(
            qkv, decay, rate, offset, width, heads, keys, key_at, value_at, head,
            key, value, KEYS, VALUES, BY_CHANNEL,
        )  # fmt: skip
        q, k, by_q, by_k, product, stays, learns = _gates(
            q, k, d, r, scale, bias, KEYS, BOUND, MOST
        )
        last = offset + length - 1
        next_q, next_k, next_v, next_d, next_r = _numbers(
            qkv, decay, rate, tl.minimum(offset + 1, last), width, heads, keys, key_at, value_at,
            head, key, value, KEYS, VALUES, BY_CHANNEL,
        )  # fmt: skip
        for number in range(length):
            token = offset + number
            # Two tokens ahead: what is read takes as long to come as a token takes.
            then_q, then_k, then_v, then_d, then_r = _numbers(
                qkv, decay, rate, tl.minimum(token + 2, last), width, heads, keys, key_at,
                value_at, head, key, value, KEYS, VALUES, BY_CHANNEL,
            )  # fmt: skip
            if BY_CHANNEL:
                known = tl.sum(state * (stays * k)[:, None], 0) * by_k
                seen = tl.sum(state * (stays * q)[:, None], 0) * by_q
                left = state * stays[:, None]
            else:
                known = tl.sum(state * k[:, None], 0) * (stays * by_k)
                seen = tl.sum(state * q[:, None], 0) * (stays * by_q)
                left = state * stays
            missing = learns * (v.to(tl.float32) - known)
            state = left + k[:, None] * (by_k * missing)[None, :]
            result = (seen + product * missing).to(out.dtype.element_ty)
            to = out + (token * heads + head) * VALUES + value
            tl.store(to, result, mask=value < VALUES)
            if number + 1 == stay:  # what comes behind may be taken back
                tl.store(own, state, mask=(key < KEYS)[:, None] & column)
            q, k, by_q, by_k, product, stays, learns = _gates(
                next_q, next_k, next_d, next_r, scale, bias, KEYS, BOUND, MOST
            )
            v = next_v
            next_q, next_k, next_v, next_d, next_r = then_q, then_k, then_v, then_d, then_r


def gated_delta_rule(
    qkv: Tensor,
    decay: Tensor,
    rate: Tensor,
    decay_scale: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    runs: Sequence[StateRun],
    heads: DeltaHeads,
) -> Tensor:
    """See `reference.gated_delta_rule`: [tokens, heads, value_dim]; changes states."""
    if qkv.dtype not in _DTYPES:
        return reference.gated_delta_rule(
            qkv, decay, rate, decay_scale, decay_bias, states, runs, heads
        )
    tokens, count = len(qkv), heads.heads
    assert qkv.shape[1] == heads.width and rate.shape == (tokens, count)
    assert decay.shape == (tokens, heads.decays_width) and decay_bias.shape == decay.shape[1:]
    assert states.shape[1:] == (count, heads.key_dim, heads.value_dim)
    assert states.dtype is torch.float32 and states[0].is_contiguous()
    qkv, decay, rate = qkv.contiguous(), decay.contiguous(), rate.contiguous()
    out = torch.empty(tokens, count, heads.value_dim, dtype=qkv.dtype, device=qkv.device)
    held = device_state_runs(runs, qkv.device)
    if not held.count or not held.tokens:
        return out
    rows, columns = delta_tile(heads)
    _delta_kernel[(triton.cdiv(heads.value_dim, columns), count, held.count)](
        qkv, decay, rate, decay_scale, decay_bias, states, out, held.table,
        heads.width, count, count // heads.key_heads, heads.keys_width, states.stride(0),
        KEYS=heads.key_dim, VALUES=heads.value_dim, KEY_ROWS=rows, COLUMNS=columns,
        BY_CHANNEL=heads.by_channel, BOUND=heads.bound, MOST=heads.most_rate,
        num_warps=1, **dependent(qkv.device),
    )  # fmt: skip
    return out


def delta_tile(heads: DeltaHeads) -> tuple[int, int]:
    """Rows and columns of a program's part of a matrix: by the model alone, as its bits are."""
    rows = max(16, triton.next_power_of_2(heads.key_dim))
    columns = triton.next_power_of_2(heads.value_dim)
    return rows, min(columns, max(1, _STATE_NUMBERS // rows))
