"""Launches of the kernels for several tokens, with block sizes by shape."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels.triton.adding import add_parts
from hmt.kernels.triton.dependent import dependent

_COLUMNS = 512  # of sums, in a program of `add_parts`


@cache
def _is_hopper(where: torch.device) -> bool:
    return where.type == "cuda" and torch.cuda.get_device_capability(where)[0] == 9


def takes_panels(x: Tensor, w: WeightTensor) -> bool:
    """True where `multiply_panels` multiplies x with w."""
    group = w.group_size // 32
    return (
        _is_hopper(x.device)
        and x.dtype is torch.bfloat16
        and w.encoding is Encoding.INT4_GROUP
        and w.activations is Activations.FLOAT
        and w.zeros is None
        and w.minima is None
        and w.scales is not None
        and w.scales.dtype is torch.bfloat16
        and group > 0
        and group & (group - 1) == 0
        and all(part.data_ptr() % 16 == 0 for part in (w.data, w.scales))
    )


def panel_sizes(tokens: int, rows: int, blocks: int, gated: bool) -> dict[str, Any]:
    return {"WARPS": 8, "BLOCKS": 4, "PART": 4, "STAGES": 4, "SPLIT": 1, "maxnreg": 128}


def multiply_panels(
    out: Tensor,
    x: Tensor,
    weights: Sequence[WeightTensor],
    biases: Sequence[Tensor | None],
    *,
    alone: bool = False,
    add: bool = False,
    activation: str = "",
) -> None:
    """As `few_launch.multiply_panels`, or with an activation as `multiply_gated`."""
    # What this is written in changes more often than Triton: others shall not load it.
    from hmt.kernels.triton.several import code_layout, several_tokens

    w = weights[0]
    rows = [one.shape[0] for one in weights]
    blocks = w.shape[1] // 32
    sizes = panel_sizes(len(x), max(rows) if alone else sum(rows), blocks, activation != "")
    warps, split = sizes["WARPS"], sizes["SPLIT"]
    tokens = min(max(8, triton.next_power_of_2(len(x))), 64)
    if activation:
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
        *(None if one is None else one.data for one in given),
        *(None if one is None else one.scales for one in given),
        *known,
        *(0 if one is None else one.shape[0] for one in given),
        len(x),
        blocks,
        x.stride(0),
        out.stride(0),
        COUNT=1 if activation else len(weights),
        GROUP=w.group_size // 32,
        TOKENS=tokens,
        EVEN=blocks % sizes["BLOCKS"] == 0,
        ACTIVATION=activation,
        ADD=add,
        CODES=code_layout(sizes["BLOCKS"], warps),
        CODE_PART=code_layout(sizes["PART"], warps),
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
    return (
        _is_hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.int8)
        and w.encoding is Encoding.INT8_CHANNEL
        and w.shape[1] % 16 == 0
        and w.data.data_ptr() % 16 == 0
        and w.data.numel() < 1 << 33
    )


def row_sizes(tokens: int, rows: int, columns: int, chunk: int) -> dict[str, Any]:
    return {"WARPS": 8, "STAGES": 3, "SPLIT": 1, "maxnreg": 128}


def multiply_rows(
    out: Tensor,
    x: Tensor,
    token_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    shape: tuple[int, int],
    *,
    chunk_rows: int = 0,
    add: bool = False,
) -> None:
    """x times int8 rows, or weights whose addresses are in codes and scales, int64."""
    from hmt.kernels.triton.several_rows import several_tokens_rows, word_layout

    rows, columns = shape
    sizes = row_sizes(len(x), rows, columns, chunk_rows)
    warps, split = sizes["WARPS"], sizes["SPLIT"]
    tokens = min(max(8, triton.next_power_of_2(len(x))), 64)
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
        CHUNK_ROWS=chunk_rows,
        TOKENS=tokens,
        ADD=add,
        WORDS=word_layout(warps),
        **sizes,
        num_warps=warps,
        **dependent(x.device),
    )
    if split > 1:
        _add(out, target, (bias, None, None), (rows,), add=add)
