"""Launches of the kernels for several tokens, with block sizes by shape."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels.triton.gemm.skinny_launch import chunk_addresses
from hmt.kernels.triton.gemm.splitk_reduce import add_parts
from hmt.kernels.triton.pdl import dependent
from hmt.kernels.triton.single_tokens import are_single

# With fewer tokens a multiprocessor takes in few words of x for a word of weights, and `few_tokens`
# needs no shared memory and no second launch.
_FEWEST = 5

# On an H200 with 32 tokens.  A program fills most of a multiprocessor's registers and of its shared
# memory, so there is one each, and inputs are split among programs where rows are few.  4096 rows
# of 4096 inputs: 10 us in tiles of 128 rows and 4 parts, 13 in tiles of 256 and 8 parts.
_PROGRAMS = 132
_MOST_PARTS = 8
_FEW_ROWS, _FEW_BLOCKS = 4352, 256
_MANY_CODES = 1 << 28  # of int4 with tokens of int8, of FP8 with 8 tokens
_ENCODINGS = (Encoding.INT4_GROUP, Encoding.NVFP4, Encoding.MXFP4)
_STEP, _TILE_ROWS = 128, 128  # inputs of a step, and rows that have a scale for a tile's of e4m3
_COLUMNS = 512  # of sums, in a program of `add_parts`


def _several(x: Tensor) -> bool:
    return not are_single() and len(x) >= _FEWEST and is_hopper(x.device)


def _width(x: Tensor) -> int:
    """Tokens of a program."""
    width: int = triton.next_power_of_2(len(x))
    return min(max(8, width), 64)


@cache
def is_hopper(where: torch.device) -> bool:
    """Whether tensors there are multiplied by the kernels for several tokens."""
    return where.type == "cuda" and torch.cuda.get_device_capability(where)[0] == 9


def takes_panels(x: Tensor, w: WeightTensor) -> bool:
    """True where `multiply_panels` multiplies x, bf16 or int8 codes, with w."""
    kind = torch.int8 if w.activations is Activations.INT8_TOKEN else torch.bfloat16
    return (
        _several(x)
        and x.dtype is kind
        and w.encoding in _ENCODINGS
        and w.zeros is None
        and w.minima is None
        and w.scales is not None
        and (w.encoding is not Encoding.INT4_GROUP or _has_plain_groups(w))
        and all(part.data_ptr() % 16 == 0 for part in (w.data, w.scales))
        and not (kind is torch.int8 and _few_are_faster(len(x), w))
    )


def _few_are_faster(tokens: int, w: WeightTensor) -> bool:
    """Of int8 tokens: where `few_tokens`, in which sums are of integers, takes less time.

    int4 is multiplied twice here, to be exact.  In us, `few_tokens` and these: 16 tokens and 28672
    rows of 4096 inputs 34 and 40, 4096 rows 12 and 10; 32 tokens 59 and 47, 22 and 16; with 57344
    rows of 8192 inputs 167 and 175, 64 tokens 288 and 272.  MXFP4 and 5 tokens 35 and 36, 7 and 11.
    """
    if w.encoding is Encoding.NVFP4:
        return False
    most = 8
    if w.encoding is Encoding.INT4_GROUP and w.shape[0] > _FEW_ROWS:
        most = 32 if w.shape[0] * w.shape[1] > _MANY_CODES else 16
    return tokens <= most


def _has_plain_groups(w: WeightTensor) -> bool:
    """Of int4: scales as most checkpoints have them."""
    assert w.scales is not None
    group = w.group_size // 32
    return w.scales.dtype is torch.bfloat16 and group > 0 and group & (group - 1) == 0


def panel_sizes(
    tokens: int, rows: int, blocks: int, *, gated: bool, e2m1: bool = False, exact: bool = False
) -> dict[str, Any]:
    """Block sizes of `several_tokens`."""
    few_rows = rows <= _FEW_ROWS and blocks <= _FEW_BLOCKS
    warps = 4 if few_rows and not gated else 8
    steps = triton.cdiv(blocks, 8)
    tiles = triton.cdiv(rows, 32 * warps)
    most = 1 if gated else max(1, min(_PROGRAMS // tiles, _MOST_PARTS, steps))
    # Of the longest program, and of adding what they make.
    split = min(range(1, most + 1), key=lambda count: triton.cdiv(steps, count) + count / 4)
    wide = tokens > 32  # sums take so many registers that smaller steps are longer ones
    stages, part = 4 if wide else 3, 2
    if gated and not wide and tokens > 16:
        part = 4
    twice = e2m1 or exact  # of the instructions that others take
    if (twice or not gated) and not wide and tiles > _PROGRAMS // 2 and warps == 8:
        # With 28672 rows of 4096 inputs 24.2 us for 8 tokens where it was 28.6, 28.7 for 16 where
        # it was 31.8, 34.3 for 32 where it was 36.6; NVFP4 41.2 for 32 where it was 48.2.
        # And with a gate 38.4 where it was 44.
        if twice:
            warps, part = 4, 4
        elif tokens <= 16:
            warps, stages = 4, 4
        else:
            part = 4
    return {
        "WARPS": warps,
        "BLOCKS": 4 if wide else 8,
        "PART": part,
        "STAGES": stages,
        "SPLIT": split,
    }


def multiply_panels(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    *,
    alone: bool = False,
    add: bool = False,
    activation: str = "",
) -> None:
    """As `few_launch.multiply_panels`, or with an activation as `multiply_gated`.

    Weights are rounded to bf16 with tokens of bf16, and with codes of tokens exact.
    """
    # What this is written in changes more often than Triton: others shall not load it.
    from hmt.kernels.triton.gemm.wgmma_w4 import code_layout, scale_layout, several_tokens

    w = weights[0]
    rows = [one.shape[0] for one in weights]
    blocks = w.shape[1] // 32
    gated = activation != ""
    e2m1 = w.encoding is not Encoding.INT4_GROUP
    all_rows = max(rows) if alone else sum(rows)
    exact = x.dtype is torch.int8
    sizes = panel_sizes(len(x), all_rows, blocks, gated=gated, e2m1=e2m1, exact=exact)
    warps, split = sizes["WARPS"], sizes["SPLIT"]
    tokens = _width(x)
    if gated:
        tiles = triton.cdiv(rows[0], 16 * warps)
    else:
        tiles = sum(triton.cdiv(n, 32 * warps) for n in rows)
    target = out
    if split > 1:
        target = torch.empty(split, len(x), sum(rows), dtype=torch.float32, device=x.device)
    given: list[WeightTensor | None] = [*weights, None, None][:3]
    known = [*biases, None, None][:3]
    several_tokens[(tiles, split, triton.cdiv(len(x), tokens))](
        target,
        x,
        token_scales,
        *(None if one is None else one.data for one in given),
        *(None if one is None else one.scales for one in given),
        *(None if one is None else one.factor for one in given),
        *known,
        *(0 if one is None else one.shape[0] for one in given),
        len(x),
        blocks,
        x.stride(0),
        out.stride(0),
        COUNT=1 if gated else len(weights),
        GROUP=w.group_size // 32,
        TOKENS=tokens,
        EVEN=blocks % sizes["BLOCKS"] == 0,
        ACTIVATION=activation,
        ADD=add and split == 1,
        CODES=code_layout(sizes["BLOCKS"], warps),
        CODE_PART=code_layout(sizes["PART"], warps),
        SCALES=scale_layout(sizes["BLOCKS"], warps, w.group_size // 32),
        E2M1=e2m1,
        **sizes,
        num_warps=warps,
        **dependent(x.device),
    )
    if split > 1:
        _add(out, target, known, rows, add=add)


def _add(
    out: Tensor, parts: Tensor, biases: Sequence[Tensor | None], rows: Sequence[int], *, add: bool
) -> None:
    split, tokens, all_rows = parts.shape
    add_parts[(triton.cdiv(all_rows, _COLUMNS), tokens)](
        out,
        parts,
        *biases,
        *[*rows, 0][:2],
        all_rows,
        tokens,
        out.stride(0),
        SPLIT=split,
        COLUMNS=_COLUMNS,
        ADD=add,
        num_warps=4,
        **dependent(out.device),
    )


def takes_rows(x: Tensor, w: WeightTensor) -> bool:
    """True where `multiply_rows` multiplies x, bf16 or int8 codes, with w."""
    vector = 16 // w.data.element_size()
    return (
        _several(x)
        and (x.dtype is torch.bfloat16 or (x.dtype is torch.int8 and _row_form(w) == "int8"))
        and _row_form(w) in ("int8", "e4m3", "f16")
        and w.shape[1] % vector == 0
        and w.data.data_ptr() % 16 == 0
        and w.data.nbytes < 1 << 33
        and not (len(x) <= 8 and _row_form(w) == "e4m3" and _fp8_is_for_few(w))
    )


def _fp8_is_for_few(w: WeightTensor) -> bool:
    """Where 8 tokens take less time in `few_tokens_rows`: 28672 rows of 4096 40 us, here 44."""
    return w.shape[0] > _FEW_ROWS and w.data.numel() <= _MANY_CODES


def _row_form(w: WeightTensor) -> str:
    """What rows are of, as FORM of `several_tokens_rows`."""
    if w.encoding is Encoding.FP8_BLOCK:
        rows = w.tile[0] % _TILE_ROWS == 0 or w.tile[0] >= w.shape[0]
        columns = w.tile[1] % _STEP == 0 or w.tile[1] >= w.shape[1]
        return "e4m3" if rows and columns else ""
    return {Encoding.INT8_CHANNEL: "int8", Encoding.F16: "f16"}.get(w.encoding, "")


def takes_chunks(x: Tensor, weights: Sequence[WeightTensor]) -> bool:
    """True where `multiply_chunks` multiplies x with weights that `few_launch.are_chunks`."""
    return len(weights) > 1 and takes_rows(x, weights[0])


def row_sizes(
    tokens: int, rows: int, columns: int, *, chunk: bool, form: str = "int8"
) -> dict[str, Any]:
    """Block sizes of `several_tokens_rows`; the sums of a chunk are not split."""
    warps = 4 if tokens <= 32 or form != "int8" else 8
    steps = triton.cdiv(columns, _STEP)
    tiles = triton.cdiv(rows, 32 * warps)
    most = 1 if chunk else max(1, min(_PROGRAMS // tiles, _MOST_PARTS, steps))
    split = min(range(1, most + 1), key=lambda count: triton.cdiv(steps, count) + count / 2)
    # Others spill, and two programs find room all the same: FP8 45 us where it was 59.
    most_registers = 168 if warps == 4 and form == "int8" else None
    # Steps of f16 fill shared memory: with 64 tokens and three stages 102 us, with two 73.
    stages = 2 if form == "f16" else 3
    return {"WARPS": warps, "STAGES": stages, "SPLIT": split, "maxnreg": most_registers}


def multiply_rows(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    w: WeightTensor,
    bias: Tensor | None,
    *,
    chunk: bool = False,
    add: bool = False,
) -> None:
    """As `few_launch.multiply_rows`, of weights of which `takes_rows`."""
    form, shape = _row_form(w), (w.shape[0], w.shape[1])
    sizes = row_sizes(len(x), *shape, chunk=chunk, form=form)
    tile = (0, 0)
    if form == "e4m3":
        tile = (w.tile[0] if w.tile[0] < shape[0] else 0, w.tile[1] if w.tile[1] < shape[1] else 0)
    _launch_rows(
        out, x, token_scales, w.data, w.scales, bias, shape, sizes, FORM=form, TILE=tile, ADD=add
    )


def multiply_chunks(
    out: Tensor, x: Tensor, token_scales: Tensor | None, weights: Sequence[WeightTensor]
) -> None:
    """As `few_launch.multiply_chunks`."""
    w = weights[0]
    codes, scales = chunk_addresses(weights)
    sizes = row_sizes(len(x), w.shape[0], w.shape[1], chunk=True)
    if w.shape[0] % (32 * sizes["WARPS"]):
        sizes["WARPS"] = 4  # no program works on two
    shape = sum(one.shape[0] for one in weights), w.shape[1]
    _launch_rows(
        out, x, token_scales, codes, scales, None, shape, sizes, CHUNK_ROWS=w.shape[0]
    )  # fmt: skip


def _launch_rows(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, int],
    sizes: dict[str, Any],
    *,
    FORM: str = "int8",
    TILE: tuple[int, int] = (0, 0),
    CHUNK_ROWS: int = 0,
    ADD: bool = False,
) -> None:
    from hmt.kernels.triton.gemm.wgmma_w8 import several_tokens_rows, word_layout

    rows, columns = shape
    warps, split = sizes["WARPS"], sizes["SPLIT"]
    tokens = _width(x)
    target = out
    if split > 1:
        target = torch.empty(split, len(x), rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, 32 * warps), split, triton.cdiv(len(x), tokens))
    several_tokens_rows[grid](
        target,
        x,
        token_scales,
        codes,
        scales,
        bias,
        rows,
        columns,
        len(x),
        x.stride(0),
        out.stride(0),
        triton.cdiv(columns, TILE[1]) if TILE[1] else 1,
        CHUNK_ROWS=CHUNK_ROWS,
        FORM=FORM,
        TILE_ROWS=TILE[0],
        TILE_STEPS=TILE[1] // _STEP,
        TOKENS=tokens,
        ADD=ADD and split == 1,
        WORDS=word_layout(warps),
        **sizes,
        num_warps=warps,
        **dependent(x.device),
    )
    if split > 1:
        _add(out, target, (bias, None, None), (rows,), add=ADD)
