"""Routed experts on the GPU, through a table of where their weights lie."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hmt.contracts.encoding import Encoding
from hmt.kernels import reference
from hmt.kernels.reference.experts import Expert
from hmt.kernels.triton.elementwise.rope_gate import ACTIVATIONS
from hmt.kernels.triton.moe.grouped_gemm import experts_by_tiles
from hmt.kernels.triton.moe.grouped_wgmma_launch import takes_experts
from hmt.kernels.triton.moe.moe_gemv import experts_by_pairs
from hmt.kernels.triton.moe.unpacked_experts import unpacked_groups
from hmt.kernels.triton.moe.weight_table import ExpertMatrix, ExpertTable, block_table, make_table
from hmt.kernels.triton.single_tokens import are_single

# Up to so many pairs of a token and an expert for each expert that is chosen, pairs by themselves
# were faster on an H200 than tiles of sorted tokens.
_PAIRS_PER_EXPERT_SEVERAL = 1.1  # with 1.2 they take 252 us, 217 by `experts_by_several`
_PAIRS_PER_EXPERT_SEVERAL_CODES = 1.4  # 1.2: 231 us and 300, of NVFP4 270 and 272; 1.5: 453, 430
_PAIRS_PER_EXPERT = 2.6
_PAIRS_PER_EXPERT_E2M1 = 3.2
_PAIRS_PER_EXPERT_CODES = 4.0
_PAIRS_PER_EXPERT_E2M1_CODES = 8.0
# Unpacking moves eight times the bytes of experts in blocks.
_PAIRS_OF_BLOCKS = 6.0

__all__ = [
    "ExpertMatrix",
    "ExpertTable",
    "block_table",
    "experts",
    "experts_by_table",
    "scattered_experts",
]


def experts_by_table(
    x: Tensor,
    table: ExpertTable,
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None = None,
    last: bool = True,
    cut: Tensor | None = None,
    among: range | None = None,
) -> Tensor:
    """`reference.experts` of all experts that have an address, for x [tokens, in].

    A token's experts are added in ascending order after `total`, which is changed; those without
    an address count for nothing.  No work of the host depends on the routing, so the call can be
    captured, and the table changed between replays.

    cut     see `ExpertShares`; for one token
    among   experts outside of it have no address
    """
    chosen, scales = chosen.contiguous(), scales.contiguous()
    if table.gate.in_blocks or table.down.in_blocks:
        return _experts_in_blocks(x, table, chosen, scales, activation, total, last, cut, among)
    several = takes_experts(x, table, activation)
    tokens, top = chosen.shape
    if cut is not None or are_single() or _are_few(table, tokens, top, several):
        return experts_by_pairs(x, table, chosen, scales, activation, total, last, cut)
    return experts_by_tiles(x, [(table, last)], chosen, scales, activation, total)


def _experts_in_blocks(
    x: Tensor,
    table: ExpertTable,
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None,
    last: bool,
    cut: Tensor | None,
    among: range | None,
) -> Tensor:
    """`experts_by_table` where gate and up, or down, or all are in ggml's blocks."""
    tokens, top = chosen.shape
    few = tokens * top <= _PAIRS_OF_BLOCKS * _distinct(table, tokens, top)
    if cut is not None or few or are_single():
        return experts_by_pairs(x, table, chosen, scales, activation, total, last, cut)
    groups = (
        (some, last and are_last) for some, are_last in unpacked_groups(table, x.dtype, among)
    )
    return experts_by_tiles(x, groups, chosen, scales, activation, total)


def experts(
    x: Tensor,
    given: Sequence[Expert],
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None = None,
    *,
    last: bool = True,
) -> Tensor:
    """See `reference.experts`: the sum of scaled outputs, [tokens, out].

    Copies addresses to the device, so it cannot be captured: for that, keep a table.
    """
    count = max((index for index, _ in given), default=-1) + 1
    table = make_table(given, count, x.device) if activation in _ACTIVATIONS else None
    if table is None or x.shape[0] == 0 or x.dtype not in _DTYPES:
        # No experts or tokens, or matrices that differ or are not aligned.
        return reference.experts(x, given, chosen, scales, activation, total, last=last)
    return experts_by_table(x, table, chosen, scales.float(), activation, total, last)


def scattered_experts(given: Sequence[Expert], where: torch.device) -> Callable[..., Tensor]:
    """See `reference.scattered_experts`; their table is made once."""
    table = make_table(given, len(given), where)
    if table is None:
        raise ValueError("experts differ by more than where they lie")

    def compute(x: Tensor, chosen: Tensor, scales: Tensor, activation: str) -> Tensor:
        return experts_by_table(x, table, chosen, scales, activation)

    return compute


_ACTIVATIONS = (*ACTIVATIONS, "clamped_swish", "clamped_silu")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _are_few(table: ExpertTable, tokens: int, top: int, several: bool = False) -> bool:
    """True where tokens share too few experts for tiles, if all experts are as likely."""
    e2m1 = table.gate.encoding in (Encoding.NVFP4, Encoding.MXFP4)
    if several:
        codes = table.gate.takes_codes
        most = _PAIRS_PER_EXPERT_SEVERAL_CODES if codes else _PAIRS_PER_EXPERT_SEVERAL
    elif table.gate.takes_codes:
        most = _PAIRS_PER_EXPERT_E2M1_CODES if e2m1 else _PAIRS_PER_EXPERT_CODES
    else:
        most = _PAIRS_PER_EXPERT_E2M1 if e2m1 else _PAIRS_PER_EXPERT
    return tokens * top <= most * _distinct(table, tokens, top)


def _distinct(table: ExpertTable, tokens: int, top: int) -> float:
    """How many experts tokens choose, if all are as likely."""
    return table.experts * (1 - (1 - min(1, top / table.experts)) ** tokens)
