"""Which experts each token goes to, one launch for all tokens; a warp looks at one token.

It is launched plainly, and ends a layer's chain of dependent launches: on an H200 eight layers of
Qwen3-30B-A3B's shape took 0.37 instead of 0.40 ms for one user, and as long as before for more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hmt.kernels.triton.device_math import key_index, keys

_NO_KEY = tl.constexpr(-(1 << 63))  # below every key


@triton.jit
def _keep_groups(key, value, exists, KEPT: tl.constexpr, TWO: tl.constexpr, GROUPS: tl.constexpr):
    """Values [groups, width], -infinity outside the KEPT groups with the largest best."""
    first = tl.max(key, axis=1, keep_dims=True)
    # The sum of one number and zeros: of the number itself, also where others are NaN.
    best = tl.sum(tl.where(key == first, value, 0.0), axis=1, keep_dims=True)
    if TWO:
        others = tl.where(key == first, _NO_KEY, key)
        second = tl.max(others, axis=1, keep_dims=True)
        best += tl.sum(tl.where(others == second, value, 0.0), axis=1, keep_dims=True)
    group = tl.arange(0, GROUPS)[:, None]
    group_exists = tl.max(exists.to(tl.int32), axis=1, keep_dims=True) > 0
    group_key = tl.where(group_exists, keys(best, group), _NO_KEY)
    kept = tl.zeros_like(group_key) > 0
    for _ in range(KEPT):
        top = tl.max(group_key, axis=0, keep_dims=True)
        kept = kept | (group_key == top)
        group_key = tl.where(group_key == top, _NO_KEY, group_key)
    return tl.where(kept, value, float("-inf"))


@triton.jit
def _route_kernel(
    logits, bias, experts, scales, logits_row, factor,
    K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr,
    GROUP_LANES: tl.constexpr, LANES: tl.constexpr, K_LANES: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Axis 0: tokens.  Experts lie in GROUPS groups of WIDTH."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUP_LANES)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    exists = (group < GROUPS) & (lane < WIDTH)
    index = group * WIDTH + lane
    row = logits + token * logits_row
    score = tl.load(row + index, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
        value = score + tl.load(bias + index, mask=exists, other=0.0).to(tl.float32)
    else:
        value = score
    key = tl.where(exists, keys(value, index), _NO_KEY)
    if KEPT < GROUPS:
        value = _keep_groups(key, value, exists, KEPT, SIGMOID and WIDTH > 1, GROUP_LANES)
        key = tl.where(exists, keys(value, index), _NO_KEY)
    if not SIGMOID:
        # NaN reaches every probability through the sum; the maximum may drop it.
        top = tl.max(tl.max(score, axis=1), axis=0)
        power = tl.where(exists, tl.exp(score - top), 0.0)
        score = power / tl.sum(tl.sum(power, axis=1), axis=0)
    place = tl.arange(0, K_LANES)
    found = tl.zeros((K_LANES,), tl.float32)
    chosen = tl.zeros((K_LANES,), tl.int64)
    for at in range(K):  # unrolled it would take longer to fetch
        best = tl.max(tl.max(key, axis=1), axis=0)
        picked = tl.sum(tl.sum(tl.where(key == best, score, 0.0), axis=1), axis=0)
        found = tl.where(place == at, picked, found)
        chosen = tl.where(place == at, key_index(best), chosen)
        key = tl.where(key == best, _NO_KEY, key)
    if RENORMALISE:
        total = tl.sum(found, axis=0)
        if SIGMOID:
            total += 1e-20
        found = tl.div_rn(found, total + tl.zeros_like(found))
    tl.store(experts + token * K + place, chosen, mask=place < K)
    tl.store(scales + token * K + place, found * factor, mask=place < K)


def softmax_topk(logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See `reference.softmax_topk`: experts int64 and scales f32 [tokens, k]."""
    return _route(logits, None, k, 1, 1, renormalise, 1.0)


def grouped_softmax_topk(
    logits: Tensor, k: int, *, groups: int, kept_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See `reference.grouped_softmax_topk`: experts int64 and scales f32 [tokens, k]."""
    return _route(logits, None, k, groups, kept_groups, False, scale)


def biased_sigmoid_topk(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `reference.biased_sigmoid_topk`: experts int64 and scales f32 [tokens, k]."""
    return _route(logits, bias.contiguous(), k, groups, kept_groups, renormalise, scale)


def _route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    kept: int,
    renormalise: bool,
    factor: float,
) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    experts = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    scales = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return experts, scales
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    width = count // groups
    _route_kernel[(tokens,)](
        logits, logits if bias is None else bias, experts, scales, logits.stride(0), factor,
        K=k, GROUPS=groups, KEPT=kept, WIDTH=width,
        GROUP_LANES=triton.next_power_of_2(groups), LANES=triton.next_power_of_2(width),
        K_LANES=triton.next_power_of_2(k), SIGMOID=bias is not None, RENORMALISE=renormalise,
        num_warps=1,
    )  # fmt: skip
    return experts, scales
