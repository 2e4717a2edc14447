"""State spaces, token by token, with the state in registers.

A program has some columns of one head's state and goes through the tokens of one run in their
order, so no division of a prompt and no other sequence changes a bit.  From a token to the next
there is only one fused product; what is read of the state is added up meanwhile.
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
_STATE_NUMBERS = 2048  # of a program of one warp: 64 registers of each thread
_STEPS = 256  # numbers of a program that makes time steps


@triton.jit
def _steps_kernel(
    raw, bias, decay_scale, step, decay, shortest, longest, heads, count,
    SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Time steps and decays of SIZE tokens and heads."""
    next_may_begin(DEPENDENT)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    added = tl.load(bias + at % heads, mask=inside, other=0.0).to(tl.float32)
    scale = tl.exp(tl.load(decay_scale + at % heads, mask=inside, other=0.0).to(tl.float32))
    inputs_are_there(DEPENDENT)
    length = softplus(tl.load(raw + at, mask=inside, other=0.0).to(tl.float32) + added)
    length = tl.minimum(tl.maximum(length, shortest), longest)
    tl.store(step + at, length, mask=inside)
    tl.store(decay + at, tl.exp(-scale * length), mask=inside)


@triton.jit
def _numbers(
    x, keys, queries, decay, step, token, x_stride, key_stride, query_stride, heads, head,
    x_at, key_at, column, row, COLUMNS_LEFT: tl.constexpr, ROWS_LEFT: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """A token's x, key and query, as they come, its decay and its step."""
    value = tl.load(x + token * x_stride + x_at + column, mask=column < COLUMNS_LEFT, other=0.0)
    k = tl.load(keys + token * key_stride + key_at + row, mask=row < ROWS_LEFT, other=0.0)
    q = tl.load(queries + token * query_stride + key_at + row, mask=row < ROWS_LEFT, other=0.0)
    stays = tl.load(decay + token * heads + head)
    takes = stays
    if STEPS:
        takes = tl.load(step + token * heads + head)
    return value, k, q, stays, takes


@triton.jit
def _scan_kernel(
    x, keys, queries, decay, step, skip, states, out, table,
    x_stride, key_stride, query_stride, heads, shared, slot_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDED_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STEPS: tl.constexpr, SKIPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """WIDTH columns of the state of one head, for all tokens of one run."""
    next_may_begin(DEPENDENT)
    head = tl.program_id(1)
    row = tl.arange(0, PADDED_ROWS)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    past = 0.0
    if SKIPS:
        past = tl.load(skip + head).to(tl.float32)
    inputs_are_there(DEPENDENT)
    slot, offset, length, begins, stay = state_run(table, tl.program_id(2))
    if length > 0:
        inside = (column < COLUMNS)[None, :]
        own = states + slot * slot_stride + head * (ROWS * COLUMNS)
        own += row[:, None] * COLUMNS + column[None, :]
        state = tl.load(own, mask=(row < ROWS * (1 - begins))[:, None] & inside, other=0.0)
        x_at, key_at = head * COLUMNS, head // shared * ROWS
        last = offset + length - 1
        value, k, q, stays, takes = _numbers(
            x, keys, queries, decay, step, offset, x_stride, key_stride, query_stride, heads, head,
            x_at, key_at, column, row, COLUMNS, ROWS, STEPS,
        )  # fmt: skip
        for number in range(length):
            token = offset + number
            # The next token is read while this one is computed.
            next_value, next_k, next_q, next_stays, next_takes = _numbers(
                x, keys, queries, decay, step, tl.minimum(token + 1, last), x_stride, key_stride,
                query_stride, heads, head, x_at, key_at, column, row, COLUMNS, ROWS, STEPS,
            )  # fmt: skip
            wide = value.to(tl.float32)
            added = wide
            if STEPS:
                added = wide * takes
            state = state * stays + k.to(tl.float32)[:, None] * added[None, :]
            result = tl.sum(state * q.to(tl.float32)[:, None], 0)
            if SKIPS:
                result += wide * past
            to = out + (token * heads + head) * COLUMNS + column
            tl.store(to, result.to(out.dtype.element_ty), mask=column < COLUMNS)
            if number + 1 == stay:  # what comes behind may be taken back
                tl.store(own, state, mask=(row < ROWS)[:, None] & inside)
            value, k, q, stays, takes = next_value, next_k, next_q, next_stays, next_takes


def time_steps(
    raw: Tensor, bias: Tensor, decay_scale: Tensor, shortest: float, longest: float
) -> tuple[Tensor, Tensor]:
    """See `reference.time_steps`: f32 [tokens, heads] each."""
    if raw.dtype not in _DTYPES:
        return reference.time_steps(raw, bias, decay_scale, shortest, longest)
    tokens, heads = raw.shape
    assert bias.shape == decay_scale.shape == (heads,)
    made = torch.empty(2, tokens, heads, dtype=torch.float32, device=raw.device)
    step, decay = made.unbind()
    if count := tokens * heads:
        _steps_kernel[(triton.cdiv(count, _STEPS),)](
            raw.contiguous(), bias.contiguous(), decay_scale.contiguous(), step, decay,
            shortest, longest, heads, count,
            SIZE=_STEPS, num_warps=2, **dependent(raw.device),
        )  # fmt: skip
    return step, decay


def state_space_scan(
    x: Tensor,
    keys: Tensor,
    queries: Tensor,
    decay: Tensor,
    step: Tensor | None,
    skip: Tensor | None,
    states: Tensor,
    runs: Sequence[StateRun],
) -> Tensor:
    """See `reference.state_space_scan`: [tokens, heads, head_dim]; changes states."""
    if not {x.dtype, keys.dtype, queries.dtype} <= set(_DTYPES):
        return reference.state_space_scan(x, keys, queries, decay, step, skip, states, runs)
    (tokens, heads, head_dim), (_, groups, state_dim) = x.shape, keys.shape
    assert keys.shape == queries.shape == (tokens, groups, state_dim) and heads % groups == 0
    assert decay.shape == (tokens, heads) and (step is None or step.shape == decay.shape)
    assert skip is None or skip.shape == (heads,)
    assert states.shape[1:] == (heads, state_dim, head_dim)
    assert states.dtype is torch.float32 and states[0].is_contiguous()
    x, keys, queries = _rows(x), _rows(keys), _rows(queries)
    decay = decay.float().contiguous()
    out = torch.empty(tokens, heads, head_dim, dtype=x.dtype, device=x.device)
    held = device_state_runs(runs, x.device)
    if not held.count or not held.tokens:
        return out
    rows, width = scan_tile(state_dim, head_dim)
    _scan_kernel[(triton.cdiv(head_dim, width), heads, held.count)](
        x, keys, queries, decay,
        decay if step is None else step.float().contiguous(),
        decay if skip is None else skip.contiguous(),
        states, out, held.table,
        x.stride(0), keys.stride(0), queries.stride(0), heads, heads // groups, states.stride(0),
        ROWS=state_dim, COLUMNS=head_dim, PADDED_ROWS=rows, WIDTH=width,
        STEPS=step is not None, SKIPS=skip is not None, num_warps=1, **dependent(x.device),
    )  # fmt: skip
    return out


def scan_tile(state_dim: int, head_dim: int) -> tuple[int, int]:
    """Rows and columns of a program's part of a state: by the model alone, as its bits are."""
    rows = max(16, triton.next_power_of_2(state_dim))
    return rows, min(triton.next_power_of_2(head_dim), max(1, _STATE_NUMBERS // rows))


def _rows(x: Tensor) -> Tensor:
    """x [tokens, heads, dim], copied unless a token's numbers are contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
