"""Attention within images and windows of them, all of a size at once.

transformers' own code calls attention for each window.  Of an image of 1024 x 1024 pixels
Qwen2.5-VL has 100 in each of 28 layers, and a GPU computes one sooner than the CPU asks for it.
It also reads in each layer where windows begin, for which the CPU waits for the GPU.
"""

import inspect
from collections import defaultdict
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface

# By this part of a name transformers knows attention that takes where sequences begin.
_NAME: Final = "hmt_windows_like_flash"
_groups = WeakIdKeyDictionary()  # by where windows begin, which a tower's layers share


def use(model: nn.Module, text: nn.Module) -> None:
    """Let attention of `model` that takes where sequences begin be `attend`, but for `text`'s."""
    AttentionInterface.register(_NAME, attend)
    others = set(text.modules())
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        takes = inspect.signature(module.forward).parameters
        if module not in others and "cu_seqlens" in takes and config is not None:
            config._attn_implementation = _NAME


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: [1, heads, tokens, dim] to [1, tokens, heads, dim].

    key, value      may have fewer heads, each for several of the queries'
    cu_seq_lens_q   int32 [windows + 1]: where windows begin; tokens of one see each other
    """
    heads, tokens, dim = query.shape[1:]
    if key.shape[1] < heads:  # EXAONE 4.5
        key, value = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (key, value))
    groups = _groups.get(cu_seq_lens_q)
    if groups is None:
        groups = _groups[cu_seq_lens_q] = _by_length(cu_seq_lens_q)
    if len(groups) == 1 and len(groups[0]) == 1:
        out = functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        return out.transpose(1, 2), None
    out = query.new_empty(tokens, heads, dim)
    for places in groups:
        count, length = places.shape
        flat = places.flatten()
        q, k, v = (
            one[0, :, flat].view(heads, count, length, dim).transpose(0, 1)
            for one in (query, key, value)
        )
        found = functional.scaled_dot_product_attention(q, k, v, scale=scaling)
        out[flat] = found.transpose(1, 2).reshape(-1, heads, dim)
    return out[None], None


def _by_length(begins: Tensor) -> list[Tensor]:
    """For each length that windows have, their tokens: int64 [windows, length]."""
    found = defaultdict[int, list[int]](list)
    bounds = begins.tolist()
    for begin, end in pairwise(bounds):
        if end > begin:
            found[end - begin].append(begin)
    return [
        torch.tensor(firsts, device=begins.device)[:, None]
        + torch.arange(length, device=begins.device)
        for length, firsts in found.items()
    ]
