"""Launches of the kernels for experts that several tokens share."""

from typing import Any

import torch
import triton
from torch import Tensor

from hmt.contracts.encoding import Activations, Encoding
from hmt.kernels.triton.expert_sorting import combine, sort_pairs
from hmt.kernels.triton.expert_table import ExpertMatrix, ExpertTable
from hmt.kernels.triton.matrix_forms import matrix_form
from hmt.kernels.triton.several_launch import is_hopper

_MOST_TOKENS = 64
_WARPS, _BLOCKS, _PART, _STAGES = 4, 4, 2, 4


def takes_experts(x: Tensor, table: ExpertTable) -> bool:
    """Whether `experts_by_several` takes x [tokens, in] and these experts."""
    if not 0 < len(x) <= _MOST_TOKENS or x.dtype is not torch.bfloat16 or not is_hopper(x.device):
        return False
    return all(_takes(matrix) for matrix in (table.gate, table.down))


def _takes(matrix: ExpertMatrix) -> bool:
    group = matrix.group_size // 32
    return (
        matrix.encoding is Encoding.INT4_GROUP
        and matrix.activations is Activations.FLOAT
        and matrix.scale_dtype is torch.bfloat16
        and not matrix.extra
        and group > 0
        and group & (group - 1) == 0
        and matrix.shape[0] % 16 == 0
    )


def experts_by_several(
    x: Tensor,
    table: ExpertTable,
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None,
    last: bool,
) -> Tensor:
    """See `experts.experts_by_table`."""
    from hmt.kernels.triton.expert_several import expert_down, expert_gate_up

    tokens, top = chosen.shape
    width, hidden = table.gate.shape
    out = total
    if last or out is None:
        out = torch.empty(tokens, hidden, dtype=x.dtype if last else torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    order, begins, counts = sort_pairs(chosen, table.experts)
    h = torch.empty(tokens * top, width, dtype=x.dtype, device=x.device)
    y = torch.empty(tokens * top, hidden, dtype=x.dtype, device=x.device)
    together = tokens_together(tokens, top, table.experts)
    parts = triton.cdiv(tokens, together)
    where = table.addresses, table.part_stride
    sorted_ = order, begins, counts
    expert_gate_up[(triton.cdiv(width, 16 * _WARPS), table.experts * parts)](
        h, x, *where, *sorted_, width, hidden // 32, x.stride(0),
        *table.gate.offsets[:2], *table.up.offsets[:2],
        TOP=top, PARTS=parts, ACTIVATION=activation, TOKENS=together,
        **_constants(table.gate),
    )  # fmt: skip
    expert_down[(triton.cdiv(hidden, 32 * _WARPS), table.experts * parts)](
        y, h, *where, *sorted_, hidden, width // 32, width, *table.down.offsets[:2],
        PARTS=parts, TOKENS=together, **_constants(table.down),
    )  # fmt: skip
    combine(y, table, chosen, scales, total, out, last=last)
    return out


def tokens_together(tokens: int, top: int, experts: int) -> int:
    """Tokens of a program: about as many as the busier experts have."""
    expected = 2 * tokens * top // experts
    return min(max(8, triton.next_power_of_2(min(tokens, expected + 1))), 64)


def _constants(matrix: ExpertMatrix) -> dict[str, Any]:
    from hmt.kernels.triton.several import code_layout

    return {
        "KIND": matrix_form(matrix).constants["SCALE"],
        "GROUP": matrix.group_size // 32,
        "BLOCKS": _BLOCKS,
        "PART": _PART,
        "STAGES": _STAGES,
        "WARPS": _WARPS,
        "EVEN": matrix.shape[1] // 32 % _BLOCKS == 0,
        "CODES": code_layout(_BLOCKS, _WARPS),
        "CODE_PART": code_layout(_PART, _WARPS),
        "num_warps": _WARPS,
    }
