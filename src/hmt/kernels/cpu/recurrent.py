"""Layers with recurrent state through the compiled extension.

Sums are those of `hmt.kernels.reference` in another order, and products are not rounded before they
are added; neither depends on how many tokens or sequences are computed together.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels import reference
from hmt.kernels.cpu.abi import DTYPES
from hmt.kernels.reference import DeltaHeads

MOST_TAPS = 64  # kWidest in csrc/recurrent
_MOST_STATES = 256  # kRows there: numbers of a channel's state


def causal_conv(
    native: ModuleType,
    x: Tensor,
    weight: Tensor,
    tails: Tensor,
    runs: Sequence[StateRun],
    *,
    bias: Tensor | None = None,
    gated: bool = True,
) -> Tensor:
    """`reference.causal_conv` by the extension."""
    if x.dtype not in DTYPES or x.stride(1) != 1 or weight.shape[1] > MOST_TAPS:
        return reference.causal_conv(x, weight, tails, runs, bias=bias, gated=gated)
    channels, width = weight.shape
    assert x.shape[1] == channels and tails.shape[1:] == (width - 1, channels)
    taps, out = weight.float().contiguous(), torch.empty(x.shape, dtype=x.dtype)
    bias = None if bias is None else bias.float().contiguous()
    assert bias is None or bias.shape == (channels,)
    native.causal_conv(
        x.data_ptr(),
        DTYPES[x.dtype],
        channels,
        width,
        x.stride(0),
        taps.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        tails.data_ptr(),
        slot_stride(tails),
        out.data_ptr(),
        gated,
        run_numbers(runs),
        torch.get_num_threads(),
    )
    return out


def gated_delta_rule(
    native: ModuleType,
    qkv: Tensor,
    decay: Tensor,
    rate: Tensor,
    decay_scale: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    runs: Sequence[StateRun],
    heads: DeltaHeads,
) -> Tensor:
    """`reference.gated_delta_rule` by the extension."""
    if qkv.dtype not in DTYPES:
        return reference.gated_delta_rule(
            qkv, decay, rate, decay_scale, decay_bias, states, runs, heads
        )
    tokens, dtype = len(qkv), qkv.dtype
    qkv, decay, rate = (t.to(dtype).contiguous() for t in (qkv, decay, rate))
    scale, bias = decay_scale.float().contiguous(), decay_bias.float().contiguous()
    assert qkv.shape[1] == heads.width
    assert rate.shape == (tokens, heads.heads)
    assert decay.shape == (tokens, heads.decays_width) and bias.shape == decay.shape[1:]
    assert states.shape[1:] == (heads.heads, heads.key_dim, heads.value_dim)
    out = torch.empty(tokens, heads.heads, heads.value_dim, dtype=dtype)
    work = torch.empty(tokens, 2 * heads.keys_width + heads.decays_width + heads.heads)
    native.gated_delta_rule(
        qkv.data_ptr(),
        DTYPES[dtype],
        tokens,
        (heads.key_heads, heads.heads, heads.key_dim, heads.value_dim),
        heads.by_channel,
        heads.bound,
        heads.most_rate,
        decay.data_ptr(),
        rate.data_ptr(),
        scale.data_ptr(),
        bias.data_ptr(),
        states.data_ptr(),
        slot_stride(states),
        out.data_ptr(),
        work.data_ptr(),
        run_numbers(runs),
        torch.get_num_threads(),
    )
    return out


def time_steps(
    native: ModuleType,
    raw: Tensor,
    bias: Tensor,
    decay_scale: Tensor,
    shortest: float,
    longest: float,
) -> tuple[Tensor, Tensor]:
    """`reference.time_steps` by the extension."""
    if raw.dtype not in DTYPES:
        return reference.time_steps(raw, bias, decay_scale, shortest, longest)
    tokens, heads = raw.shape
    raw, bias, scale = raw.contiguous(), bias.float().contiguous(), decay_scale.float().contiguous()
    assert bias.shape == scale.shape == (heads,)
    step, decay = torch.empty(2, tokens, heads).unbind()
    native.time_steps(
        raw.data_ptr(),
        DTYPES[raw.dtype],
        tokens,
        heads,
        bias.data_ptr(),
        scale.data_ptr(),
        shortest,
        longest,
        step.data_ptr(),
        decay.data_ptr(),
        torch.get_num_threads(),
    )
    return step, decay


def state_space_scan(
    native: ModuleType,
    x: Tensor,
    keys: Tensor,
    queries: Tensor,
    decay: Tensor,
    step: Tensor | None,
    skip: Tensor | None,
    states: Tensor,
    runs: Sequence[StateRun],
) -> Tensor:
    """`reference.state_space_scan` by the extension."""
    if x.dtype not in DTYPES:
        return reference.state_space_scan(x, keys, queries, decay, step, skip, states, runs)
    (tokens, heads, head_dim), (_, groups, state_dim) = x.shape, keys.shape
    x, keys, queries = (_rows(part.to(x.dtype)) for part in (x, keys, queries))
    decay = decay.float().contiguous()
    step = None if step is None else step.float().contiguous()
    skip = None if skip is None else skip.float().contiguous()
    assert keys.shape == queries.shape == (tokens, groups, state_dim) and heads % groups == 0
    assert decay.shape == (tokens, heads) and (step is None or step.shape == decay.shape)
    assert skip is None or skip.shape == (heads,)
    assert states.shape[1:] == (heads, state_dim, head_dim)
    out = torch.empty(tokens, heads, head_dim, dtype=x.dtype)
    native.state_space_scan(
        DTYPES[x.dtype],
        (groups, heads, state_dim, head_dim),
        x.data_ptr(),
        x.stride(0),
        keys.data_ptr(),
        keys.stride(0),
        queries.data_ptr(),
        queries.stride(0),
        decay.data_ptr(),
        0 if step is None else step.data_ptr(),
        0 if skip is None else skip.data_ptr(),
        states.data_ptr(),
        slot_stride(states),
        out.data_ptr(),
        run_numbers(runs),
        torch.get_num_threads(),
    )
    return out


def selective_scan(
    native: ModuleType,
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
    """`reference.selective_scan` by the extension."""
    (tokens, channels), state_dim, dtype = x.shape, decay_scale.shape[1], x.dtype
    if dtype not in DTYPES or state_dim > _MOST_STATES:
        return reference.selective_scan(
            x, raw, bias, decay_scale, keys, queries, skip, states, runs
        )
    given = [t.to(dtype) for t in (x, raw, keys, queries)]
    x, raw, keys, queries = (t if t.stride(1) == 1 else t.contiguous() for t in given)
    constants = [t.float().contiguous() for t in (bias, decay_scale, skip)]
    assert raw.shape == x.shape and keys.shape == queries.shape == (tokens, state_dim)
    assert decay_scale.shape[0] == len(bias) == len(skip) == channels
    assert states.shape[1:] == (state_dim, channels)
    out = torch.empty(tokens, channels, dtype=dtype)
    native.selective_scan(
        DTYPES[dtype],
        (channels, state_dim),
        [(t.data_ptr(), t.stride(0)) for t in (x, raw, keys, queries)],
        [t.data_ptr() for t in constants],
        states.data_ptr(),
        slot_stride(states),
        out.data_ptr(),
        run_numbers(runs),
        torch.get_num_threads(),
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """x [tokens, heads, dim], copied unless a token's numbers are contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def slot_stride(states: Tensor) -> int:
    """Numbers between two slots, each of which is contiguous and in f32."""
    assert states.dtype is torch.float32 and states[0].is_contiguous()
    return states.stride(0)


def run_numbers(runs: Sequence[StateRun]) -> list[int]:
    """Six numbers for each run."""
    return [
        number
        for run in runs
        for number in (
            *(run.slot, run.offset, run.length, int(run.begins), run.drafts, run.pending),
        )
    ]
