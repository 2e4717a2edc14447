"""Activations in the form that GEMV kernels take, and each token's experts in ascending order."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels.triton.device_math import nearest, token_codes
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin


@dataclass(frozen=True, slots=True)
class Vectors:
    """Rows of activations for `expert_dots`.

    numbers   plain: the rows; otherwise int8 [rows, planes, width], the highest digits first
    scales    planes == 1: f32 [rows]; more: f32 [rows, width / 16]; plain: `numbers` again
    planes    0 for plain rows
    """

    numbers: Tensor
    scales: Tensor
    planes: int

    def numbers_for(self, *, in_panels: bool) -> Tensor:
        """Digits four at a time for matrices in panels; numbers as they are for others."""
        return self.numbers.view(torch.int32) if in_panels else self.numbers


def empty_vectors(rows: int, width: int, planes: int, like: Tensor) -> Vectors:
    """Room for rows of activations on the device of `like`, in its dtype where plain."""
    if planes == 0:
        plain = torch.empty(rows, width, dtype=like.dtype, device=like.device)
        return Vectors(plain, plain, 0)
    numbers = torch.empty(rows, planes, width, dtype=torch.int8, device=like.device)
    shape = (rows,) if planes == 1 else (rows, width // 16)
    scales = torch.empty(shape, dtype=torch.float32, device=like.device)
    return Vectors(numbers, scales, planes)


@triton.jit
def split(values, PLANES: tl.constexpr):
    """F32 values [.., 16] as integers below 2^14 or 2^22 times a power of two: (integers, scale).

    The power is that of the largest of the 16; NaN and infinities make the scale NaN.
    """
    DIGITS: tl.constexpr = 13 if PLANES == 2 else 21
    bits = tl.abs(values).to(tl.int32, bitcast=True)
    exponent = tl.max(bits, axis=len(values.shape) - 1, keep_dims=True) >> 23
    power = tl.maximum(exponent - DIGITS, 1)
    scale = tl.where(exponent == 255, 0x7FC00000, power << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    finite = tl.where(bits < 0x7F800000, values, 0.0)
    return nearest(finite * inverse).to(tl.int32), scale


@triton.jit
def store_digits(at, plane_stride, integers, mask, PLANES: tl.constexpr):
    """Integers as PLANES signed bytes, the highest first, at int8 pointers `at` of the first."""
    rest = integers
    for place in tl.static_range(PLANES):
        digit = ((rest + 128) & 255) - 128
        tl.store(at + (PLANES - 1 - place) * plane_stride, digit.to(tl.int8), mask=mask)
        rest = (rest - digit) >> 8


@triton.jit
def _inputs_kernel(
    x, numbers, scales, chosen, weights, slots, slot_scales, width, x_row, chosen_row, weight_row,
    PLANES: tl.constexpr, COLUMNS: tl.constexpr, TOP: tl.constexpr, TOP_LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Axis 0: rows; axis 1, where PLANES > 1 or 0: COLUMNS columns."""
    next_may_begin(DEPENDENT)
    inputs_are_there(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PLANES == 1:
        column = tl.arange(0, COLUMNS)
        inside = column < width
        values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
        codes, scale = token_codes(values, 0)
        tl.store(numbers + row * width + column, codes, mask=inside)
        tl.store(scales + row + tl.arange(0, 1), scale)
    elif PLANES > 1:
        sixteen = part * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)[:, None]
        column = sixteen * 16 + tl.arange(0, 16)[None, :]
        inside = column < width
        values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
        integers, scale = split(values, PLANES)
        store_digits(numbers + row * PLANES * width + column, width, integers, inside, PLANES)
        tl.store(scales + row * (width // 16) + sixteen, scale, mask=sixteen * 16 < width)
    if TOP > 0:  # noqa: SIM102 - the one is for the compiler, the other for the card
        if part == 0:
            # An expert's place is the number of chosen ones before it.
            one = tl.arange(0, TOP_LANES)
            mine = tl.load(chosen + row * chosen_row + one, mask=one < TOP, other=1 << 40)
            weight = tl.load(weights + row * weight_row + one, mask=one < TOP, other=0.0)
            place = tl.zeros((TOP_LANES,), tl.int32)
            for at in tl.static_range(TOP):
                place += (tl.load(chosen + row * chosen_row + at) < mine).to(tl.int32)
            tl.store(slots + row * TOP + place, mine, mask=one < TOP)
            tl.store(slot_scales + row * TOP + place, weight, mask=one < TOP)


def prepare(
    x: Tensor, planes: int, chosen: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Vectors, Tensor, Tensor]:
    """x [rows, width] as Vectors, and (chosen, weights) [rows, top_k] ascending, in one launch.

    With planes 0 the vectors are x itself, contiguous.  Without `chosen`, x stands for both.
    """
    rows, width = x.shape
    x = x if x.stride(-1) == 1 and (planes or x.is_contiguous()) else x.contiguous()
    vectors = empty_vectors(rows, width, planes, x) if planes else Vectors(x, x, 0)
    slots, slot_scales, top = x, x, 0
    if chosen is not None and weights is not None:
        slots, slot_scales = torch.empty_like(chosen), torch.empty_like(weights)
        top = chosen.shape[1]
    if planes == 0 and top == 0:
        return vectors, slots, slot_scales
    columns = triton.next_power_of_2(width) if planes == 1 else 1024
    _inputs_kernel[(rows, triton.cdiv(width, columns) if planes > 1 else 1)](
        x, vectors.numbers, vectors.scales, chosen if top else x, weights if top else x,
        slots, slot_scales, width, x.stride(0),
        chosen.stride(0) if chosen is not None else 0,
        weights.stride(0) if weights is not None else 0,
        PLANES=planes, COLUMNS=max(16, columns), TOP=top,
        TOP_LANES=triton.next_power_of_2(max(top, 1)),
        num_warps=4 if columns <= 2048 else 16, **dependent(x.device),
    )  # fmt: skip
    return vectors, slots, slot_scales
