"""What runs before attention, and the FFN, through the compiled extension in one call each.

Results are those of the extension's kernels one by one, to the bit.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels.cpu.abi import ACTIVATIONS, DTYPES
from hmt.kernels.cpu.linear import projections
from hmt.kernels.reference.sublayers import (
    GATE_UP,
    QUERY_KEY_VALUE,
    AttentionInputs,
    FeedForward,
    NormOptions,
)
from hmt.kernels.weight_cache import WeightCache

# A layer, and the extension's own description of its block, kept with the block's norm.
_SUBLAYERS: WeightCache[tuple[Any, Any]] = WeightCache()

Params = Mapping[str, WeightTensor]


def attention_inputs(
    native: ModuleType,
    hidden: Tensor,
    params: Params,
    layer: AttentionInputs,
    cos: Tensor,
    sin: Tensor,
) -> Tensor | None:
    """`reference.attention_inputs`; None where the extension has no kernel for a part of it."""
    made = native_attention_inputs(native, params, layer)
    if made is None or hidden.dtype not in DTYPES or not hidden.is_contiguous():
        return None
    tokens, width = hidden.shape
    turned = cos.shape[1]
    if not (
        cos.dtype is sin.dtype is torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.shape == sin.shape == (tokens, turned)
        and turned <= layer.head_dim
    ):
        return None
    heads = torch.empty(
        (tokens, layer.heads + 2 * layer.kv_heads, layer.head_dim), dtype=hidden.dtype
    )
    native.attention_inputs(
        made,
        hidden.data_ptr(),
        DTYPES[hidden.dtype],
        tokens,
        width,
        cos.data_ptr(),
        sin.data_ptr(),
        turned,
        heads.data_ptr(),
        torch.get_num_threads(),
    )
    return heads


def feed_forward(
    native: ModuleType, hidden: Tensor, x: Tensor | None, params: Params, layer: FeedForward
) -> bool:
    """`reference.feed_forward`; False, and nothing done, where a part of it has no kernel."""
    made = native_feed_forward(native, params, layer)
    dtype = hidden.dtype
    if made is None or dtype not in DTYPES or not hidden.is_contiguous():
        return False
    if x is not None and not (x.dtype is dtype and x.shape == hidden.shape and x.is_contiguous()):
        return False
    tokens = hidden.shape[0]
    native.feed_forward(
        made,
        DTYPES[dtype],
        tokens,
        hidden.data_ptr(),
        0 if x is None else x.data_ptr(),
        torch.get_num_threads(),
    )
    return True


def native_attention_inputs(native: ModuleType, params: Params, layer: AttentionInputs) -> Any:
    """The extension's own description, made once; None where it has no kernel for a part of it."""
    return _made(native, params, layer, describe_attention_inputs)


def native_feed_forward(native: ModuleType, params: Params, layer: FeedForward) -> Any:
    """The extension's own description, made once; None where it has no kernel for a part of it."""
    return _made(native, params, layer, _describe_feed_forward)


def _made(native: ModuleType, params: Params, layer: Any, describe: Callable[..., Any]) -> Any:
    """What `describe` makes of a block, kept with its norm; it borrows the memory of `params`."""
    known = _SUBLAYERS.get(params["norm"])
    if known is None or known[0] is not layer:
        known = _SUBLAYERS[params["norm"]] = (layer, describe(native, params, layer))
    return known[1]


def describe_attention_inputs(
    native: ModuleType, params: Params, layer: AttentionInputs, *, gated: bool = False
) -> Any:
    """As `native_attention_inputs`, made anew; `gated`: queries are followed by their gates."""
    inputs, rows = projections(native, params, QUERY_KEY_VALUE)
    norms = (
        native_norm(params, "norm", layer.norm),
        native_norm(params, "q_norm", layer.head_norm),
        native_norm(params, "k_norm", layer.head_norm),
    )
    if not inputs or None in norms:
        return None
    queries = 2 * layer.heads if gated else layer.heads
    assert rows == (queries + 2 * layer.kv_heads) * layer.head_dim
    sizes = layer.heads, layer.kv_heads, layer.head_dim
    return native.AttentionInputs(inputs, *sizes, *norms, gated)


def _describe_feed_forward(native: ModuleType, params: Params, layer: FeedForward) -> Any:
    gate_up, _ = projections(native, params, GATE_UP)
    down, _ = projections(native, params, ("down_proj",))
    norms = (
        native_norm(params, "norm", layer.norm),
        native_norm(params, "post_norm", layer.post_norm),
    )
    if not gate_up or not down or None in norms or layer.activation not in ACTIVATIONS:
        return None
    return native.FeedForward(gate_up, ACTIVATIONS[layer.activation], down, *norms)


def native_norm(
    params: Params, name: str, options: NormOptions | None
) -> tuple[int, int, float, float] | tuple[()] | None:
    """A norm as the extension wants it, () where there is none; None where it has no kernel."""
    if options is None:
        return ()
    weight = params[name].data
    if weight.dtype not in DTYPES or not weight.is_contiguous():
        return None
    return weight.data_ptr(), DTYPES[weight.dtype], options.eps, options.offset
