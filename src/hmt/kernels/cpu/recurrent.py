"""Layers with recurrent state through the compiled extension.

Sums are those of `hmt.kernels.reference` in another order, and products are not rounded before they
are added; neither depends on how many tokens or sequences are computed together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels import reference
from hmt.kernels.cpu.abi import DTYPES
from hmt.kernels.reference import DeltaHeads

_MOST_TAPS = 64  # kWidest in csrc/recurrent


def causal_conv(
    native: ModuleType,
    x: Tensor,
    weight: Tensor,
    tails: Tensor,
    runs: Sequence[StateRun],
    *,
    gated: bool = True,
) -> Tensor:
    """`reference.causal_conv` by the extension."""
    if x.dtype not in DTYPES or x.stride(1) != 1 or weight.shape[1] > _MOST_TAPS:
        return reference.causal_conv(x, weight, tails, runs, gated=gated)
    channels, width = weight.shape
    assert x.shape[1] == channels and tails.shape[1:] == (width - 1, channels)
    taps, out = weight.float().contiguous(), torch.empty(x.shape, dtype=x.dtype)
    with _advancing(tails, runs):
        native.causal_conv(
            x.data_ptr(),
            DTYPES[x.dtype],
            channels,
            width,
            x.stride(0),
            taps.data_ptr(),
            tails.data_ptr(),
            _slot_stride(tails),
            out.data_ptr(),
            gated,
            _numbers(runs),
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
    assert decay.shape == rate.shape == (tokens, heads.heads)
    assert states.shape[1:] == (heads.heads, heads.key_dim, heads.value_dim)
    out = torch.empty(tokens, heads.heads, heads.value_dim, dtype=dtype)
    work = torch.empty(tokens, 2 * heads.keys_width + 2 * heads.heads)
    with _advancing(states, runs):
        native.gated_delta_rule(
            qkv.data_ptr(),
            DTYPES[dtype],
            tokens,
            heads.key_heads,
            heads.heads,
            heads.key_dim,
            heads.value_dim,
            decay.data_ptr(),
            rate.data_ptr(),
            scale.data_ptr(),
            bias.data_ptr(),
            states.data_ptr(),
            _slot_stride(states),
            out.data_ptr(),
            work.data_ptr(),
            _numbers(runs),
            torch.get_num_threads(),
        )
    return out


@contextmanager
def _advancing(states: Tensor, runs: Sequence[StateRun]) -> Iterator[None]:
    """The body changes `states` in place; afterwards those of runs that do not advance are back."""
    slots = [run.slot for run in runs if not run.advances]
    before = states[slots] if slots else None
    yield
    if before is not None:
        states[slots] = before


def _slot_stride(states: Tensor) -> int:
    """Numbers between two slots, each of which is contiguous and in f32."""
    assert states.dtype is torch.float32 and states[0].is_contiguous()
    return states.stride(0)


def _numbers(runs: Sequence[StateRun]) -> list[int]:
    """Four numbers for each run."""
    return [n for run in runs for n in (run.slot, run.offset, run.length, int(run.begins))]
