"""Launches of the kernel for one token, and which weights it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels.reference.sublayers import NormOptions
from hmt.kernels.triton.gemm.dequantize import offset_kind
from hmt.kernels.triton.pdl import dependent

_STEP_BLOCKS = 8  # of 32 inputs, that a warp takes at once
_ROWS = 32  # of a program

# Steps that are copied ahead, by warps, where each multiprocessor has one program at most; one less
# where it has more.  Measured in whole layers of an 8B model on an H200 (a layer of 46.7 us before
# products were of int8): where programs took half of shared memory more, it took 4 us longer, as
# those of the next kernel began later, and with a step less of the 14336 inputs 3.8 us longer.
_SLOTS = {2: 4, 4: 4, 8: 3}
_MULTIPROCESSORS = 132
_MOST_INPUTS = 16384  # of more, programs leave no room for others
_GATED_SLOTS = 2
# Codes of e2m1 take long, so that more programs are worth more than steps ahead: 19.3 us for 28672
# rows of 4096 inputs in NVFP4, with 8 warps 21.3.
_E2M1_SLOTS = 2
# Fewer rows leave a multiprocessor one program, whose inputs take long to prepare: 6 us for 4096 in
# NVFP4, where `few_tokens` takes 4.6, with 14336 inputs 13 and 10.  With tokens of int8 that is not
# as fast.
_E2M1_ROWS = 8192
_ENCODINGS = (Encoding.INT4_GROUP, Encoding.NVFP4, Encoding.MXFP4)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the input: its weight, and its options."""

    weight: Tensor
    options: NormOptions


@dataclass(frozen=True, slots=True)
class Turn:
    """Rotary positions of a token: cos and sin [head_dim] as for `rope`."""

    cos: Tensor
    sin: Tensor


def takes_one_token(x: Tensor, weights: Sequence[WeightTensor], *, gated: bool = False) -> bool:
    """Whether `multiply_one` takes x [tokens, in] and up to three weights of one kind."""
    if len(x) != 1 or x.dtype is not torch.bfloat16 or not x.is_cuda or x.stride(1) != 1:
        return False
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    return all(_takes(w, gated) for w in weights)


def _takes(w: WeightTensor, gated: bool) -> bool:
    if w.encoding not in _ENCODINGS or offset_kind(w):
        return False
    warps = _warps(w.shape[1], gated or w.encoding is not Encoding.INT4_GROUP)
    whole = warps > 0 and w.shape[0] % _ROWS == 0
    if w.encoding is Encoding.INT4_GROUP:
        whole = whole and w.group_size % 32 == 0
    elif w.activations is Activations.FLOAT:
        whole = whole and w.shape[0] * (2 if gated else 1) >= _E2M1_ROWS
    if not whole or _STEP_BLOCKS * warps % max(1, w.group_size // 32):
        return False
    assert w.scales is not None
    return w.data.data_ptr() % 16 == 0 and w.scales.data_ptr() % 16 == 0


def _warps(columns: int, small: bool) -> int:
    """Warps of a program that all have as many steps, which are not few; 0 for none."""
    for warps in (4, 2) if small else (8, 4, 2):
        of_step = 32 * _STEP_BLOCKS * warps
        # With a single step Triton 3.6 stops with an assertion.
        if columns % of_step == 0 and of_step < columns <= _MOST_INPUTS:
            return warps
    return 0


def multiply_one(
    out: Tensor,
    x: Tensor,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    *,
    more: Tensor | None = None,
    norm: Norm | None = None,
    activation: str = "",
    turn: Turn | None = None,
    add: bool = False,
) -> None:
    """x [1, in] times weights, side by side, to out [1, rows of all].

    norm         x is normed first, and before that `more` [1, in] is added to it
    activation   of the product with the first weight of two; it is multiplied with the other then
    turn         heads of the first two weights are rotated
    add          products are added to what out holds, and before that `more` [1, rows] is
    """
    # What this is written in changes more often than Triton: others shall not load it.
    from hmt.kernels.triton.gemm.gemv_w4 import gemv_w4

    w = weights[0]
    given: list[WeightTensor | None] = [*weights, None, None][:3]
    rows = w.shape[0] if activation else sum(one.shape[0] for one in weights)
    e2m1 = w.encoding is not Encoding.INT4_GROUP
    sizes = sizes_of(w.shape[1], rows, gated=bool(activation), e2m1=e2m1)
    options = NormOptions(0.0) if norm is None else norm.options
    constants: dict[str, Any] = dependent(x.device)
    gemv_w4[(rows // _ROWS,)](
        out,
        x,
        more,
        None if norm is None else norm.weight,
        *(None if one is None else one.data.view(torch.int32) for one in given),
        *(None if one is None else one.scales for one in given),
        *(None if one is None else one.factor for one in given),
        *[*biases, None, None][:3],
        None if turn is None else turn.cos,
        None if turn is None else turn.sin,
        *(0 if one is None else one.shape[0] for one in given[:2]),
        options.eps,
        options.offset,
        COUNT=1 if activation else len(weights),
        GROUP_BLOCKS=w.group_size // 32,
        **sizes,
        APART=1 if turn is None else turn.cos.shape[-1] // 32,
        NORM=norm is not None,
        GEMMA=options.offset != 0,
        ACTIVATION=activation,
        TURN=turn is not None,
        ADD=add,
        CODES=w.activations is Activations.INT8_TOKEN,
        E2M1=e2m1,
        num_warps=sizes["WARPS"],
        **constants,
    )


def sizes_of(columns: int, rows: int, *, gated: bool = False, e2m1: bool = False) -> dict[str, int]:
    """Block sizes.  Sums are made by inputs alone, so parts of a matrix have the results of all."""
    warps = _warps(columns, gated or e2m1)
    steps = columns // (32 * _STEP_BLOCKS * warps)
    many = rows > _ROWS * _MULTIPROCESSORS
    slots = _E2M1_SLOTS if e2m1 and many else _SLOTS[warps] - many
    return {
        "WARPS": warps,
        "STEPS": steps,
        "PADDED": triton.next_power_of_2(steps),
        "SLOTS": min(steps, _GATED_SLOTS if gated else slots),
    }
