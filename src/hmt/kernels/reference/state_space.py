"""State spaces: recurrent layers whose state decays, takes a token in, and is read.

They go through a sequence token by token, as the layers of `recurrent` do, so that no result
depends on how a prompt is divided into steps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hmt.contracts.store import StateRun
from hmt.kernels.reference.recurrent import softplus


def time_steps(
    raw: Tensor, bias: Tensor, decay_scale: Tensor, shortest: float, longest: float
) -> tuple[Tensor, Tensor]:
    """Lengths of a token's time steps, and what they leave of a state: f32 [tokens, heads] each.

    A step is softplus(raw + bias), clamped to [shortest, longest]; exp(-exp(decay_scale) step) of
    the state is left (arXiv 2405.21060).

    raw                 [tokens, heads]
    bias, decay_scale   [heads]
    """
    step = softplus(raw.float() + bias.float()).clamp(shortest, longest)
    return step, (-decay_scale.float().exp() * step).exp()


def selective_scan(
    x: Tensor,
    raw: Tensor,
    bias: Tensor,
    decay_scale: Tensor,
    keys: Tensor,
    queries: Tensor,
    skip: Tensor,
    states: Tensor,
    runs: Sequence[StateRun],
) -> Tensor:
    """A state space with a decay for each number of the state: [tokens, channels] in x.dtype.

    This is Mamba's rule (arXiv 2312.00752), whose B is called key and C query here.  For each token
    the state h [state_dim] of a channel becomes exp(-exp(decay_scale) step) h + step k x, and
    q h + skip x is the result; the step is softplus(raw + bias).

    x, raw          [tokens, channels]
    bias, skip      [channels]
    decay_scale     [channels, state_dim]
    keys, queries   [tokens, state_dim]: those of all channels
    states          f32 [slots, state_dim, channels]; change
    Computed in f32, token by token.
    """
    step, wide = softplus(raw.float() + bias.float()), x.float()
    rate = -decay_scale.float().T.exp()  # [state_dim, channels]
    added, key, query = wide * step, keys.float(), queries.float()
    out = torch.empty_like(wide)
    for run in runs:
        state = states[run.slot].clone()
        if run.begins:
            state.zero_()
        for at in range(run.offset, run.offset + run.length):
            state *= (rate * step[at]).exp()
            state += key[at][:, None] * added[at]
            out[at] = (state * query[at][:, None]).sum(0)
            if at + 1 == run.offset + run.stays:
                states[run.slot] = state
    return (out + wide * skip.float()).to(x.dtype)


def state_space_scan(
    x: Tensor,
    keys: Tensor,
    queries: Tensor,
    decay: Tensor,
    step: Tensor | None,
    skip: Tensor | None,
    states: Tensor,
    runs: Sequence[StateRun],
) -> Tensor:
    """A state space with one decay per head and token: [tokens, heads, head_dim] in x.dtype.

    For each token a head's state S [state_dim, head_dim] becomes decay S + step k x, with the key
    as a column and x as a row, and q S + skip x is the result.  This is Mamba-2's rule (arXiv
    2405.21060), whose B is called key and C query here; with a constant decay and without `step`
    and `skip` it is lightning attention (arXiv 2401.04658), whose values are x.

    x               [tokens, heads, head_dim]
    keys, queries   [tokens, groups, state_dim]; each serves heads / groups consecutive heads
    decay, step     f32 [tokens, heads]; no step: 1
    skip            [heads]; None: 0
    states          f32 [slots, heads, state_dim, head_dim]; change
    Computed in f32, token by token.
    """
    heads, shared = x.shape[1], x.shape[1] // keys.shape[1]
    wide = x.float()
    added = wide if step is None else wide * step[:, :, None]
    key, query = (part.float().repeat_interleave(shared, 1) for part in (keys, queries))
    out = torch.empty_like(wide)
    for run in runs:
        state = states[run.slot].clone()
        if run.begins:
            state.zero_()
        for at in range(run.offset, run.offset + run.length):
            state *= decay[at].view(heads, 1, 1)
            state += key[at][:, :, None] * added[at][:, None]
            out[at] = (state * query[at][:, :, None]).sum(1)
            if at + 1 == run.offset + run.stays:
                states[run.slot] = state
    if skip is not None:
        out += wide * skip.float()[:, None]
    return out.to(x.dtype)
