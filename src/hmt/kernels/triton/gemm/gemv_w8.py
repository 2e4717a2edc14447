"""Products of one token with int8 weights in rows, without tensor cores.

One token fills an eighth of what tensor cores multiply, and to bring codes to their operands takes
as many instructions as the memory leaves time for.  Here bytes are multiplied with bytes as they
lie, four in an instruction: the token comes as two bytes of each number, with a power of two for
each 16 (`expert_inputs`), which is 32 times as fine as bf16 has the largest of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels.triton.activations import prepare
from hmt.kernels.triton.device_math import interpreted, rounded
from hmt.kernels.triton.pdl import dependent, inputs_are_there, next_may_begin
from hmt.kernels.triton.weight_codes import dot4

_WORDS = 128  # of four codes: a warp's loads of 16 bytes
_ROWS = 32  # of a program
_PLANES = 2
_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# Kernels have many parameters; one on each line, functions would be too long to read.
# fmt: off
@triton.jit
def one_token_rows(
    out, digits, units, codes, scales, bias, rows, words,
    CHUNK_ROWS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, ADD: tl.constexpr,
    KIND: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One token times codes [rows, 4 * words].

    digits       int32 [2, words]: four high bytes, four low bytes of the token's numbers
    units        f32 [words / 4]: what 16 of these numbers are to be multiplied with
    KIND         the token's dtype, to which results are rounded
    CHUNK_ROWS   0; or rows of each of several weights (the last may have fewer), whose addresses
                 are in `codes`, int64, those of scales in `scales`
    """
    next_may_begin(DEPENDENT)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    if CHUNK_ROWS > 0:
        which = first // CHUNK_ROWS
        its_codes = tl.load(codes + which).to(tl.pointer_type(tl.int32))
        its_scales = tl.load(scales + which).to(tl.pointer_type(tl.float32))
        before = which * CHUNK_ROWS
    else:
        its_codes, its_scales, before = codes, scales, 0
    its_codes = tl.multiple_of(its_codes, 16)
    own = tl.minimum(row, rows - 1) - before
    word = tl.arange(0, WORDS)[None, :]
    at = its_codes + own.to(tl.int64)[:, None] * words + word
    now = tl.load(at)
    by = tl.load(its_scales + own)
    inputs_are_there(DEPENDENT)
    nothing = tl.zeros((ROWS, WORDS), tl.int32)
    sixteen = tl.arange(0, WORDS // 4)[None, :]
    total = tl.zeros((ROWS, WORDS // 4), tl.float32)
    for start in range(0, words, WORDS):
        following = tl.load(at + start + WORDS, mask=word + (start + WORDS) < words, other=0)
        high = tl.load(digits + start + word)
        low = tl.load(digits + words + start + word)
        unit = tl.load(units + start // 4 + sixteen)
        sums = dot4(now, low, dot4(now, high, nothing, ASM) << 8, ASM)
        sums = tl.sum(tl.reshape(sums, (ROWS, WORDS // 4, 4)), 2)
        total += sums.to(tl.float32) * unit
        now = following
    result = tl.sum(total, 1) * by
    inside = row < rows
    if bias is not None:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        result = rounded(result, KIND)
        result += tl.load(out + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, rounded(result, KIND).to(out.dtype.element_ty), mask=inside)
# fmt: on


def takes_one_row(x: Tensor, w: WeightTensor) -> bool:
    """Whether `multiply_one_row` takes x [tokens, in] and w, or parts of a matrix like w."""
    plain = w.encoding is Encoding.INT8_CHANNEL and w.activations is Activations.FLOAT
    if not plain or len(x) != 1 or x.dtype not in _KINDS or x.stride(1) != 1:
        return False
    return w.shape[1] % (4 * _WORDS) == 0 and w.data.data_ptr() % 16 == 0


def multiply_one_row(
    out: Tensor,
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    rows: int,
    *,
    chunk_rows: int = 0,
    add: bool = False,
) -> None:
    """x [1, in] times int8 codes [rows, in] with scales f32 [rows], to out [1, rows] or f32.

    With `chunk_rows`, a multiple of 32, codes and scales are addresses, int64, of parts of so many
    rows.  With `add`, products are rounded and added to what `out` holds.
    """
    vectors, _, _ = prepare(x, _PLANES)
    assert chunk_rows % _ROWS == 0
    one_token_rows[(triton.cdiv(rows, _ROWS),)](
        out, vectors.numbers.view(torch.int32), vectors.scales,
        codes if chunk_rows else codes.view(torch.int32), scales, bias, rows, x.shape[1] // 4,
        CHUNK_ROWS=chunk_rows, ROWS=_ROWS, WORDS=_WORDS, ADD=add, KIND=_KINDS[x.dtype],
        ASM=not interpreted(), num_warps=8, **dependent(x.device),
    )  # fmt: skip
