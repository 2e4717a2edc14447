"""Layers with recurrent state: a short convolution over time, and the gated delta rule.

Both go through a sequence token by token, or as if they did, so that no result depends on how a
prompt is divided into steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels.reference.elementwise import sigmoid

_EPS = 1e-6  # of the norm of queries and keys, as in transformers and in fla


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """A delta rule's heads; each key head serves heads / key_heads consecutive heads.

    by_channel   each number of a key has a decay of its own (KDA, arXiv 2510.26692)
    bound        of a decay's logarithm, below 0; 0: there is none
    most_rate    that a learning rate can be; above 1, states can change their sign
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    by_channel: bool = False
    bound: float = 0.0
    most_rate: float = 1.0

    @property
    def keys_width(self) -> int:
        """Numbers of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        """Numbers of a token's values."""
        return self.heads * self.value_dim

    @property
    def width(self) -> int:
        """Numbers of a token's queries, keys and values, which lie in this order."""
        return 2 * self.keys_width + self.values_width

    @property
    def decays_width(self) -> int:
        """Numbers of a token's decays."""
        return self.heads * self.key_dim if self.by_channel else self.heads


class StateRuns(tuple[StateRun, ...]):
    """The runs of a step, made once for all layers.

    device   what kernels for GPUs made of them
    """

    device: Any = None


def fixed_state_runs(where: torch.device, count: int) -> StateRuns | None:
    """Up to `count` runs of one token each, in tensors that stay on a device.

    None: plain torch reads runs from Python's own objects.
    """
    return None


def causal_conv(
    x: Tensor,
    weight: Tensor,
    tails: Tensor,
    runs: Sequence[StateRun],
    *,
    bias: Tensor | None = None,
    gated: bool = True,
) -> Tensor:
    """A causal convolution of each channel over time: [tokens, channels] in x.dtype.

    x        [tokens, channels]
    weight   [channels, width]; its last number belongs to the token itself
    tails    f32 [slots, width - 1, channels]: what came before, oldest first; changes
    bias     [channels], added to each sum; None: 0
    gated    its silu is the result
    Computed in f32, the bias first, then the oldest product.
    """
    taps, before = weight.float().T.contiguous(), weight.shape[1] - 1
    out = torch.empty_like(x)
    constant = torch.zeros(1, device=x.device) if bias is None else bias.float()
    for run in runs:
        tail = tails[run.slot]
        known = torch.zeros_like(tail) if run.begins else tail
        rows = torch.cat((known, x[run.tokens].float()))  # [width - 1 + length, channels]
        total = constant
        for tap in range(before + 1):
            total = total + rows[tap : tap + run.length] * taps[tap]
        out[run.tokens] = (total * sigmoid(total) if gated else total).to(x.dtype)
        if run.stays:
            tail.copy_(rows[run.stays : run.stays + before])
    return out


def gated_delta_rule(
    qkv: Tensor,
    decay: Tensor,
    rate: Tensor,
    decay_scale: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    runs: Sequence[StateRun],
    heads: DeltaHeads,
) -> Tensor:
    """The gated delta rule (arXiv 2412.06464): [tokens, heads, value_dim] in qkv.dtype.

    For each token a head's state S [key_dim, value_dim] becomes S g + k (v - k S g) b, and q S is
    the result; queries and keys have length 1, queries divided by the root of key_dim besides.

    qkv          [tokens, heads.width]: queries, keys, values
    decay        [tokens, heads.decays_width]; g is exp(-exp(decay_scale) softplus(decay +
                 decay_bias)), or exp(bound sigmoid(exp(decay_scale) (decay + decay_bias))).  Each
                 row of S has its own where heads.by_channel
    rate         [tokens, heads]; b is heads.most_rate times its sigmoid
    decay_scale  [heads]
    decay_bias   [heads.decays_width]
    states       f32 [slots, heads, key_dim, value_dim]; change
    Computed in f32, token by token.
    """
    wide = qkv.float()
    sizes = (heads.keys_width, heads.keys_width, heads.values_width)
    query, key, value = wide.split(sizes, dim=1)
    query = _unit(query.unflatten(1, (heads.key_heads, -1))) * heads.key_dim**-0.5
    key = _unit(key.unflatten(1, (heads.key_heads, -1)))
    shared = heads.heads // heads.key_heads
    query, key = query.repeat_interleave(shared, 1), key.repeat_interleave(shared, 1)
    value = value.unflatten(1, (heads.heads, -1))
    stays = _stays(decay, decay_scale, decay_bias, heads)
    learns = sigmoid(rate) * heads.most_rate
    out = torch.empty_like(value)
    for run in runs:
        state = states[run.slot].clone()
        if run.begins:
            state.zero_()
        for at in range(run.offset, run.offset + run.length):
            k = key[at][:, :, None]
            state *= stays[at][:, :, None]
            missing = (value[at] - (state * k).sum(1)) * learns[at][:, None]
            state += k * missing[:, None]
            out[at] = (state * query[at][:, :, None]).sum(1)
            if at + 1 == run.offset + run.stays:
                states[run.slot] = state
    return out.to(qkv.dtype)


def _stays(decay: Tensor, scale: Tensor, bias: Tensor, heads: DeltaHeads) -> Tensor:
    """What is left of a state after each token: f32 [tokens, heads, key_dim or 1]."""
    scale = scale.float().exp()[:, None]
    raw = (decay.float() + bias.float()).unflatten(1, (heads.heads, -1))
    if heads.bound:
        return (heads.bound * sigmoid(scale * raw)).exp()
    return (-scale * softplus(raw)).exp()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), of functions that round a number alike wherever it stands: see `sigmoid`."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _unit(x: Tensor) -> Tensor:
    """x [..., dim] with length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
