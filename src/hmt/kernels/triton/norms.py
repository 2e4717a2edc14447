"""RMS norms on the GPU, each in one launch: alone, after an addition, with codes of the result."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.base.units import MIB
from hmt.contracts.encoding import WeightTensor
from hmt.kernels import reference
from hmt.kernels.triton.dependent import (
    ask_cache_for_share,
    dependent,
    inputs_are_there,
    next_may_begin,
)
from hmt.kernels.triton.scalars import rounded, token_codes

_CODE_PAD = 64  # rows of codes are padded to a multiple of so many
_ASKERS = 64  # programs
_ASKED_BYTES = 24 * MIB  # of codes, which have to stay in the cache until they are used
_MOST_TOKENS = 8  # the products of more are not as fast as the memory
_LARGEST_WIDTH = 32768  # a row is held in registers; wider ones take the reference


@triton.jit
def _norm_kernel(
    x, residual, weight, out, codes, scales, sums,
    rows, heads, x_row, x_head, residual_row, out_row, out_head,
    eps, offset,
    codes_0, codes_1, codes_2, codes_3, scales_0, scales_1, scales_2, scales_3,
    code_bytes_0, code_bytes_1, code_bytes_2, code_bytes_3,
    scale_bytes_0, scale_bytes_1, scale_bytes_2, scale_bytes_3,
    ASK: tl.constexpr, ASKERS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
    ADD: tl.constexpr, GEMMA: tl.constexpr, QUANTIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of `rows`; row r lies at (r // heads) * x_row + (r % heads) * x_head.

    The last ASKERS programs ask the cache for ASK weights, and have no rows.
    """
    next_may_begin(DEPENDENT)
    if ASK > 0:
        asker = tl.program_id(0) - tl.num_programs(0) + ASKERS
        if asker >= 0:
            _ask(codes_0, code_bytes_0, scales_0, scale_bytes_0, asker, ASKERS, DEPENDENT)
            if ASK > 1:
                _ask(codes_1, code_bytes_1, scales_1, scale_bytes_1, asker, ASKERS, DEPENDENT)
            if ASK > 2:
                _ask(codes_2, code_bytes_2, scales_2, scale_bytes_2, asker, ASKERS, DEPENDENT)
            if ASK > 3:
                _ask(codes_3, code_bytes_3, scales_3, scale_bytes_3, asker, ASKERS, DEPENDENT)
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
    if QUANTIZE:
        wide = tl.where(inside, normed.to(tl.float32), 0.0)
        code, scale = token_codes(wide, 1)
        padded = (row < rows) & (column < STRIDE)
        tl.store(codes + row * STRIDE + column, code, mask=padded)
        tl.store(scales + row, scale, mask=row < rows)
        sixteen = tl.sum(tl.reshape(code.to(tl.int32), (ROWS, COLUMNS // 16, 16)), axis=2)
        part = tl.arange(0, COLUMNS // 16)[None, :]
        kept = (row < rows) & (part < STRIDE // 16)
        tl.store(sums + row * (STRIDE // 16) + part, sixteen, mask=kept)


@triton.jit
def _ask(
    codes, code_bytes, scales, scale_bytes, part, PARTS: tl.constexpr, DEPENDENT: tl.constexpr
):
    ask_cache_for_share(codes, code_bytes, part, PARTS, DEPENDENT)
    ask_cache_for_share(scales, scale_bytes, part, PARTS, DEPENDENT)


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


def norm_and_ask(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    offset: float,
    following: Sequence[WeightTensor],
) -> Tensor:
    """`rms_norm` of x, or `add_rms_norm` with a residual; the cache fetches up to four weights.

    The memory would rest while the norm waits for the kernel ahead of it.
    """
    able = x.shape[-1] <= _LARGEST_WIDTH if residual is None else _can_add(residual, x)
    if not able or not following or not dependent(x.device)["DEPENDENT"] or len(x) > _MOST_TOKENS:
        if residual is None:
            return rms_norm(x, weight, eps, offset=offset)
        return add_rms_norm(residual, x, weight, eps, offset=offset)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_rows_of(x), weight, eps, offset, out, residual, following=following[:4])
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
    _launch(x, weight, eps, offset, out, residual, (codes, scales, sums))
    return out, codes, scales, sums


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out: Tensor,
    residual: Tensor | None = None,
    codes: tuple[Tensor, Tensor, Tensor] | None = None,
    following: Sequence[WeightTensor] = (),
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
    askers = _ASKERS if following else 0
    _norm_kernel[(triton.cdiv(rows, together) + askers,)](
        x, x if residual is None else residual, weight.contiguous(), out,
        *((out, out, out) if codes is None else codes),
        rows, heads, x_row, x_head, 0 if residual is None else residual.stride(0),
        out_row, out_head, eps, offset, *_asked(following), ASK=len(following), ASKERS=askers,
        WIDTH=width, COLUMNS=columns, ROWS=together,
        STRIDE=16 if codes is None else codes[0].shape[1],
        ADD=residual is not None, GEMMA=offset != 0, QUANTIZE=codes is not None,
        num_warps=_warps(columns * together), **dependent(x.device),
    )  # fmt: skip


def _asked(following: Sequence[WeightTensor]) -> list[Tensor | int | None]:
    """Codes and scales of four weights, and how many bytes of them the cache is asked for."""
    parts: list[list[Tensor | int | None]] = [[None] * 4, [None] * 4, [0] * 4, [0] * 4]
    left = _ASKED_BYTES
    for index, w in enumerate(following):
        scales = w.data if w.scales is None else w.scales
        parts[0][index], parts[1][index] = w.data, scales
        known = min(1.0, left / max(1, w.data.nbytes))
        parts[2][index] = int(w.data.nbytes * known)
        parts[3][index] = 0 if w.scales is None else int(scales.nbytes * known)
        left = max(0, left - w.data.nbytes)
    return [one for part in parts for one in part]


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Numbers from one token to the next, from one head to the next, and heads per token."""
    if x.dim() == 3:
        return x.stride(0), x.stride(1), x.shape[1]
    return (x.stride(0) if x.dim() == 2 else 0), 0, 1


def _warps(numbers: int) -> int:
    """So that a thread holds 8 to 16 numbers of a row, of up to 32 warps."""
    return max(1, min(32, numbers // 512)) if numbers < 16384 else 32
