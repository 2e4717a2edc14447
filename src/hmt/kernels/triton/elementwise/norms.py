"""RMS norms on the GPU, each in one launch: alone, after an addition, with codes of the result."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import ACTIVATION_BLOCK
from hmt.kernels import reference
from hmt.kernels.triton.device_math import rounded, store_block_codes, token_codes
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin

_CODE_PAD = 64  # rows of codes are padded to a multiple of so many
_LARGEST_WIDTH = 32768  # a row is held in registers; wider ones take the reference


# One variant for all numbers of tokens: a second, for multiples of 16, took 0.3 to 3 s to compile.
@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x, residual, weight, out, codes, scales, sums,
    rows, heads, x_row, x_head, residual_row, out_row, out_head,
    eps, offset,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
    ADD: tl.constexpr, GEMMA: tl.constexpr, QUANTIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of `rows`; row r lies at (r // heads) * x_row + (r % heads) * x_head.

    QUANTIZE   "tokens": codes with a scale per row; "blocks": as `block_tokens`, STRIDE blocks; or
               "", no codes
    """
    next_may_begin(DEPENDENT)
    kind: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < WIDTH)
    at = row // heads * x_row + row % heads * x_head + column
    by = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    inputs_are_there(DEPENDENT)
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = residual + row * residual_row + column
        sum_kind: tl.constexpr = residual.dtype.element_ty
        values = rounded(tl.load(total, mask=inside, other=0.0).to(tl.float32) + values, sum_kind)
        tl.store(total, values.to(sum_kind), mask=inside)
    mean = tl.sum(values * values, axis=1, keep_dims=True) / WIDTH
    normed = values * tl.rsqrt(mean + eps)
    if GEMMA:
        normed = normed * (offset + by.to(tl.float32))
    else:
        result: tl.constexpr = residual.dtype.element_ty if ADD else kind
        normed = rounded(normed, result) * rounded(by.to(tl.float32), result)
    normed = normed.to(out.dtype.element_ty)
    to = row // heads * out_row + row % heads * out_head + column
    tl.store(out + to, normed, mask=inside)
    if QUANTIZE == "tokens":
        wide = tl.where(inside, normed.to(tl.float32), 0.0)
        code, scale = token_codes(wide, 1)
        padded = (row < rows) & (column < STRIDE)
        tl.store(codes + row * STRIDE + column, code, mask=padded)
        tl.store(scales + row, scale, mask=row < rows)
        sixteen = tl.sum(tl.reshape(code.to(tl.int32), (ROWS, COLUMNS // 16, 16)), axis=2)
        part = tl.arange(0, COLUMNS // 16)[None, :]
        kept = (row < rows) & (part < STRIDE // 16)
        tl.store(sums + row * (STRIDE // 16) + part, sixteen, mask=kept)
    if QUANTIZE == "blocks":
        BLOCKS: tl.constexpr = COLUMNS // 256
        wide = tl.where(inside, normed.to(tl.float32), 0.0)
        number = tl.arange(0, ROWS * BLOCKS)[:, None]
        its = tl.program_id(0).to(tl.int64) * ROWS + number // BLOCKS
        block = number % BLOCKS
        there = (its < rows) & (block < STRIDE)
        wide = tl.reshape(wide, (ROWS * BLOCKS, 256))
        store_block_codes(wide, its, block, there, STRIDE, codes, scales, sums)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """See `reference.rms_norm`: x [..., width] normed, in x.dtype."""
    x = _rows_of(x)
    if x.shape[-1] > _LARGEST_WIDTH:
        return reference.rms_norm(x, weight, eps, offset=offset)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, eps, offset, out)
    return out


def rms_norm_inplace(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
    """See `reference.rms_norm_inplace`: changes x [tokens, width] or [tokens, heads, dim]."""
    if x.stride(-1) != 1 or x.dim() > 3 or x.shape[-1] > _LARGEST_WIDTH:
        return reference.rms_norm_inplace(x, weight, eps, offset=offset)
    _launch(x, weight, eps, offset, x)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> Tensor:
    """See `reference.add_rms_norm`: changes `residual`, returns its norm."""
    if not _can_add(residual, x):
        return reference.add_rms_norm(residual, x, weight, eps, offset=offset)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    _launch(_rows_of(x), weight, eps, offset, out, residual)
    return out


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.rms_norm_quantize`: the norm, its codes, scales and sums of codes."""
    if x.shape[-1] > _LARGEST_WIDTH:
        return reference.rms_norm_quantize(x, weight, eps, offset=offset)
    return _quantized(_rows_of(x), weight, eps, offset, None)


def add_rms_norm_quantize(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.add_rms_norm_quantize`: changes `residual`."""
    if not _can_add(residual, x):
        return reference.add_rms_norm_quantize(residual, x, weight, eps, offset=offset)
    return _quantized(_rows_of(x), weight, eps, offset, residual)


def rms_norm_blocks(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The norm of x [tokens, width], and the numbers, scales and sums of its `block_tokens`.

    residual   is changed: what is normed is x added to it.
    None for widths that are no multiple of 256 or too large, and for rows that lie oddly.
    """
    tokens, width = x.shape
    fits = width % ACTIVATION_BLOCK == 0 and 0 < width <= _LARGEST_WIDTH and x.stride(1) == 1
    if not fits or (residual is not None and not _can_add(residual, x)):
        return None
    blocks = width // ACTIVATION_BLOCK
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    numbers = torch.empty(tokens, 64, blocks, 4, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, blocks, dtype=torch.float32, device=x.device)
    sums = torch.empty(tokens, 16, blocks, dtype=torch.int32, device=x.device)
    _launch(x, weight, eps, offset, out, residual, (numbers, scales, sums), "blocks", blocks)
    return out, numbers, scales, sums


def _rows_of(x: Tensor) -> Tensor:
    """x itself where its rows are contiguous and at most two strides lead to them."""
    return x if x.stride(-1) == 1 and x.dim() <= 3 else x.contiguous()


def _can_add(residual: Tensor, x: Tensor) -> bool:
    plain = residual.dim() == 2 and residual.stride(-1) == 1 and residual.shape == x.shape
    return plain and residual.dtype == x.dtype and x.shape[-1] <= _LARGEST_WIDTH


def _quantized(
    x: Tensor, weight: Tensor, eps: float, offset: float, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, width = x.shape
    stride = -(-width // _CODE_PAD) * _CODE_PAD
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    codes = torch.empty(tokens, stride, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    sums = torch.empty(tokens, stride // 16, dtype=torch.int32, device=x.device)
    _launch(x, weight, eps, offset, out, residual, (codes, scales, sums), "tokens", stride)
    return out, codes, scales, sums


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out: Tensor,
    residual: Tensor | None = None,
    codes: tuple[Tensor, Tensor, Tensor] | None = None,
    quantize: str = "",
    stride: int = 16,
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    if rows == 0:
        return
    x_row, x_head, heads = _strides(x)
    out_row, out_head, _ = _strides(out)
    columns = max(16, triton.next_power_of_2(width))
    if codes is not None:
        columns = max(_CODE_PAD, columns)
    together = max(1, min(16, 512 // columns))  # heads of 128: four to a program
    _norm_kernel[(triton.cdiv(rows, together),)](
        x, x if residual is None else residual, weight.contiguous(), out,
        *((out, out, out) if codes is None else codes),
        rows, heads, x_row, x_head, 0 if residual is None else residual.stride(0),
        out_row, out_head, eps, offset,
        WIDTH=width, COLUMNS=columns, ROWS=together,
        STRIDE=stride, ADD=residual is not None, GEMMA=offset != 0, QUANTIZE=quantize,
        num_warps=_warps(columns * together), **dependent(x.device),
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Numbers from one token to the next, from one head to the next, and heads per token."""
    if x.dim() == 3:
        return x.stride(0), x.stride(1), x.shape[1]
    return (x.stride(0) if x.dim() == 2 else 0), 0, 1


def _warps(numbers: int) -> int:
    """So that a thread holds 8 to 16 numbers of a row, of up to 32 warps."""
    return max(1, min(32, numbers // 512)) if numbers < 16384 else 32
