"""Choosing experts through the compiled extension.

Experts equal those of `hmt.kernels.reference`; scales differ in their last bits.  (Where a bias
takes part, sums that differ in their last bit only may come in the other order.)
"""

from types import ModuleType

import torch
from torch import Tensor

from hmt.kernels.cpu.abi import DTYPES


def can_route(logits: Tensor, k: int, groups: int, kept_groups: int) -> bool:
    """Whether `route` takes these."""
    if logits.dim() != 2 or logits.dtype not in DTYPES or logits.stride(1) != 1:
        return False
    experts = logits.shape[1]
    return (
        0 < kept_groups <= groups
        and experts % groups == 0
        and 0 < k <= experts // groups * kept_groups
    )


def route(
    native: ModuleType,
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(experts int64 [tokens, k], scales f32 [tokens, k]) for logits [tokens, experts].

    By softmax without a bias; with one (f32 [experts], contiguous) by the biased sigmoid.
    """
    tokens, count = logits.shape
    experts = torch.empty((tokens, k), dtype=torch.int64)
    scales = torch.empty((tokens, k))
    native.route(
        logits.data_ptr(),
        DTYPES[logits.dtype],
        tokens,
        count,
        logits.stride(0),
        k,
        bias is not None,
        0 if bias is None else bias.data_ptr(),
        groups,
        kept_groups,
        renormalise,
        scale,
        experts.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return experts, scales
