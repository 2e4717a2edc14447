"""Which experts each token goes to, and which layers; of equal experts the lower index."""

import torch
from torch import Tensor


def depth_scores(hidden: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """What a router of layers says of each token: x / rms(x) . weight + bias, in f32.

    hidden [tokens, width], weight [width], bias [] or [1].  Returns f32 [tokens].
    """
    x = hidden.float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).sum(-1) + bias.float()


def softmax_topk(logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The k likeliest of a softmax over logits [tokens, experts], best first.

    Returns experts int64 [tokens, k] and their probabilities f32 [tokens, k], divided by their sum
    if `renormalise`.  Experts are ranked by logit, so that two whose probabilities round to the
    same number keep their order; NaN ranks above everything.
    """
    logits = logits.float()
    experts = _first_largest(logits, k)
    scales = logits.softmax(-1).gather(-1, experts)
    return experts, scales / scales.sum(-1, keepdim=True) if renormalise else scales


def grouped_softmax_topk(
    logits: Tensor, k: int, *, groups: int, kept_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`softmax_topk` among the `kept_groups` groups with the best expert (arXiv 2405.04434).

    Experts lie in `groups` equal groups.  Probabilities are those among all experts, times `scale`.
    """
    logits = logits.float()
    best = logits.unflatten(-1, (groups, -1)).amax(-1)  # [tokens, groups]
    experts = _first_largest(_only_best_groups(logits, best, kept_groups), k)
    return experts, logits.softmax(-1).gather(-1, experts) * scale


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
    """The k experts with the largest sigmoid plus bias [experts] (arXiv 2412.19437, 2.1.2).

    Of the `kept_groups` groups with the largest sum of their two best.  Returns experts int64
    [tokens, k] and the sigmoids f32 [tokens, k] without the bias; divided by their sum if
    `renormalise`; times `scale`.
    """
    scores = logits.float().sigmoid()
    biased = scores + bias.float()
    grouped = biased.unflatten(-1, (groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)  # [tokens, groups]
    experts = _first_largest(_only_best_groups(biased, best, kept_groups), k)
    scales = scores.gather(-1, experts)
    if renormalise:
        scales = scales / (scales.sum(-1, keepdim=True) + 1e-20)
    return experts, scales * scale


def _only_best_groups(values: Tensor, best: Tensor, kept: int) -> Tensor:
    """values [tokens, experts], -infinity outside the `kept` groups with the largest `best`."""
    allowed = torch.zeros_like(best, dtype=torch.bool)
    allowed = allowed.scatter_(-1, _first_largest(best, kept), True)
    width = values.shape[-1] // best.shape[-1]
    return values.masked_fill(~allowed.repeat_interleave(width, dim=-1), -torch.inf)


def _first_largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last dimension, equal ones by index."""
    return values.sort(stable=True, dim=-1, descending=True).indices[..., :count]
