"""Launches of the kernels for experts whose weights are read once for tiles of tokens."""

from typing import Any

import torch
import triton
from torch import Tensor

from hmt.contracts.encoding import Encoding
from hmt.kernels.triton.activations import prepare
from hmt.kernels.triton.elementwise.rope_gate import ACTIVATIONS
from hmt.kernels.triton.gemm.wgmma_launch import is_hopper
from hmt.kernels.triton.moe.matrix_format import matrix_form
from hmt.kernels.triton.moe.permute import SortedPairs, combine, tiles_of
from hmt.kernels.triton.moe.weight_table import PARTS, ExpertMatrix, ExpertTable

_MOST_TOGETHER = 128


def takes_experts(x: Tensor, table: ExpertTable, activation: str) -> bool:
    """Whether `experts_by_several` takes x [tokens, in] and these experts."""
    if x.dtype is not torch.bfloat16 or not is_hopper(x.device) or activation not in ACTIVATIONS:
        return False
    return all(_takes(matrix) for matrix in (table.gate, table.down))


def _takes(matrix: ExpertMatrix) -> bool:
    group = matrix.group_size // 32
    plain = matrix.scale_dtype is torch.bfloat16 and group > 0 and group & (group - 1) == 0
    known = plain if matrix.encoding is Encoding.INT4_GROUP else matrix.encoding in _E2M1
    whole = matrix.shape[0] % 16 == 0 and not matrix.extra
    whole = whole and matrix.bias_dtype is None
    return known and whole


_E2M1 = (Encoding.NVFP4, Encoding.MXFP4)


def experts_by_several(
    x: Tensor,
    table: ExpertTable,
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    sorted_pairs: SortedPairs,
    total: Tensor | None,
    out: Tensor,
    last: bool,
) -> None:
    """The sum of x's experts to `out`, as `expert_sorting.combine` makes it."""
    from hmt.kernels.triton.moe.grouped_wgmma import expert_down, expert_gate_up

    tokens, top = chosen.shape
    pairs = tokens * top
    width, hidden = table.gate.shape
    x, x_scales = _inputs(x, table.gate)
    order, begins, counts = sorted_pairs
    together = tokens_together(tokens, top, table.experts)
    tiles = tiles_of(counts, table, pairs, together)
    h = torch.empty(pairs, width, dtype=torch.bfloat16, device=x.device)
    y = torch.empty(pairs, hidden, dtype=torch.bfloat16, device=x.device)
    where = table.addresses, table.part_stride, tiles, order, begins, counts
    sizes = sizes_of(together)
    warps = sizes["WARPS"]
    expert_gate_up[(triton.cdiv(width, 16 * warps), len(tiles))](
        h, x, x_scales, *where, width, hidden // 32, x.stride(0),
        *_offsets(table.gate), *_offsets(table.up),
        TOP=top, EACH=len(PARTS), ACTIVATION=activation, TOKENS=together,
        **_constants(table.gate, sizes), **sizes, num_warps=warps,
    )  # fmt: skip
    inputs, h_scales = _inputs(h, table.down)
    expert_down[(triton.cdiv(hidden, 32 * warps), len(tiles))](
        y, inputs, h_scales, *where, hidden, width // 32, width, *_offsets(table.down),
        EACH=len(PARTS), TOKENS=together, **_constants(table.down, sizes), **sizes,
        num_warps=warps,
    )  # fmt: skip
    combine(y, table, chosen, scales, total, out, last=last)


def _inputs(x: Tensor, matrix: ExpertMatrix) -> tuple[Tensor, Tensor | None]:
    """Rows of x as they are, or in codes of int8 with their scales."""
    if not matrix.takes_codes:
        return x if x.stride(1) == 1 else x.contiguous(), None
    vectors = prepare(x, 1)[0]
    return vectors.numbers.view(x.shape), vectors.scales


def tokens_together(tokens: int, top: int, experts: int) -> int:
    """Tokens of a program: about as many as the busier experts have."""
    expected = 2 * tokens * top // experts
    wanted: int = triton.next_power_of_2(min(tokens, expected + 1))
    return min(max(8, wanted), _MOST_TOGETHER)


def sizes_of(together: int) -> dict[str, int]:
    """Block sizes of programs of so many tokens."""
    if together > 64:
        return {"WARPS": 4, "BLOCKS": 2, "PART": 2, "STAGES": 4}
    # 16 tokens of 64 experts: 388 us, with 4 blocks and 4 stages 430.
    return {"WARPS": 4, "BLOCKS": 8, "PART": 2, "STAGES": 3}


def _offsets(matrix: ExpertMatrix) -> tuple[int, int, int]:
    data, scales, _, factor = matrix.offsets[:4]
    return data, scales, factor


def _constants(matrix: ExpertMatrix, sizes: dict[str, int]) -> dict[str, Any]:
    from hmt.kernels.triton.gemm.wgmma_w4 import code_layout, scale_layout

    warps, blocks, group = sizes["WARPS"], sizes["BLOCKS"], matrix.group_size // 32
    return {
        "KIND": matrix_form(matrix).constants["SCALE"],
        "GROUP": group,
        "EVEN": matrix.shape[1] // 32 % blocks == 0,
        "CODES": code_layout(blocks, warps),
        "CODE_PART": code_layout(sizes["PART"], warps),
        "SCALES": scale_layout(blocks, warps, group),
        "E2M1": matrix.encoding is not Encoding.INT4_GROUP,
    }
