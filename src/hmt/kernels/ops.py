"""The operations that layers are made of, each on the backend that computes its tensors.

Shapes, dtypes and rounding are those of `hmt.kernels.reference`, where each operation is
described.  `hmt.kernels.cpu.linear` says where the compiled kernels round differently, and
`hmt.kernels.backend_registry` which backend computes where.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hmt.contracts.adapter import AdaptedParams, AdaptedWeight
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import StateRun
from hmt.kernels import reference
from hmt.kernels.adapted import adapted, adapts
from hmt.kernels.backend_registry import backend_of, host_backend
from hmt.kernels.cpu.stack import (
    Stack,
    StackAttention,
    StackDelta,
    StackExperts,
    StackFFN,
    StackLayer,
    StackMixer,
)
from hmt.kernels.reference import (
    ATTENTION_WORKSPACE_BYTES,
    AttentionInputs,
    DeltaChain,
    DeltaHeads,
    Expert,
    FeedForward,
    LogitStats,
    NormOptions,
    Spans,
    StateRuns,
    attention_output,
    block_attention,
    merge_attention,
)
from hmt.kernels.reference.kv_pages import (
    AttentionMetadata,
    PagedSegment,
    PageEncoding,
    PageLayout,
    Pages,
    by_token,
    read_pages,
    read_rows,
    read_value_rows,
)

_Operation = TypeVar("_Operation", bound=Callable[..., Any])


def by_device_of(tensor: str, operation: _Operation) -> _Operation:
    """The reference's `operation`, computed by the backend of its argument `tensor`."""
    name = operation.__name__
    place = list(inspect.signature(operation).parameters).index(tensor)

    @wraps(operation)
    def compute(*args: Any, **kwargs: Any) -> Any:
        computed = args[place] if place < len(args) else kwargs[tensor]
        return getattr(backend_of(computed), name)(*args, **kwargs)

    return cast(_Operation, compute)


quantize_activations = by_device_of("x", reference.quantize_activations)

rms_norm = by_device_of("x", reference.rms_norm)
rms_norm_inplace = by_device_of("x", reference.rms_norm_inplace)
rms_norm_quantize = by_device_of("x", reference.rms_norm_quantize)
add_rms_norm = by_device_of("residual", reference.add_rms_norm)
add_rms_norm_quantize = by_device_of("residual", reference.add_rms_norm_quantize)
rope = by_device_of("x", reference.rope)
rope_inplace = by_device_of("q", reference.rope_inplace)
gated = by_device_of("gate", reference.gated)
sigmoid = by_device_of("x", reference.sigmoid)
sigmoid_gated = by_device_of("x", reference.sigmoid_gated)
gated_pair = by_device_of("gate_up", reference.gated_pair)

attention = by_device_of("query", reference.attention)
paged_attention = by_device_of("query", reference.paged_attention)
paged_attention_output = by_device_of("query", reference.paged_attention_output)
attend_part = by_device_of("query", reference.attend_part)
index_topk = by_device_of("query", reference.index_topk)
paged_index_topk = by_device_of("query", reference.paged_index_topk)
selected_attention = by_device_of("query", reference.selected_attention)
page_masses = by_device_of("query", reference.page_masses)
append_attend_pages = by_device_of("heads", reference.append_attend_pages)

stream_mixes = by_device_of("products", reference.stream_mixes)
read_streams = by_device_of("streams", reference.read_streams)
write_streams = by_device_of("streams", reference.write_streams)

causal_conv = by_device_of("x", reference.causal_conv)
_delta_layer = by_device_of("hidden", reference.delta_layer)
gated_delta_rule = by_device_of("qkv", reference.gated_delta_rule)
selective_scan = by_device_of("x", reference.selective_scan)
state_space_scan = by_device_of("x", reference.state_space_scan)
time_steps = by_device_of("raw", reference.time_steps)

depth_scores = by_device_of("hidden", reference.depth_scores)
softmax_topk = by_device_of("logits", reference.softmax_topk)
grouped_softmax_topk = by_device_of("logits", reference.grouped_softmax_topk)
biased_sigmoid_topk = by_device_of("logits", reference.biased_sigmoid_topk)

logit_stats = by_device_of("logits", reference.logit_stats)
draw = by_device_of("scores", reference.draw)
largest = by_device_of("scores", reference.largest)


def linear(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """`reference.linear`, with adapters where `w` has any."""
    backend = backend_of(x)
    out: Tensor = (adapted(backend) if isinstance(w, AdaptedWeight) else backend).linear(x, w, bias)
    return out


def linear_into(out: Tensor, x: Tensor, w: WeightTensor) -> None:
    """`reference.linear_into`, with adapters where `w` has any."""
    backend = backend_of(x)
    (adapted(backend) if isinstance(w, AdaptedWeight) else backend).linear_into(out, x, w)


def linear_many(x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, ...]) -> Tensor:
    """`reference.linear_many`, with adapters where weights have any."""
    backend = backend_of(x)
    chosen = adapted(backend) if isinstance(params, AdaptedParams) else backend
    out: Tensor = chosen.linear_many(x, params, names)
    return out


def attention_inputs(
    hidden: Tensor,
    params: Mapping[str, WeightTensor],
    layer: AttentionInputs,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """`reference.attention_inputs`, with adapters where weights have any."""
    backend = backend_of(hidden)
    if adapts(params, reference.QUERY_KEY_VALUE):
        return reference.attention_inputs(hidden, params, layer, cos, sin, adapted(backend))
    plain = params.base if isinstance(params, AdaptedParams) else params
    heads: Tensor = backend.attention_inputs(hidden, plain, layer, cos, sin)
    return heads


def delta_layer(
    hidden: Tensor,
    params: Mapping[str, WeightTensor],
    chain: DeltaChain,
    states: Mapping[str, Tensor],
    runs: Sequence[StateRun],
) -> Tensor | None:
    """`reference.delta_layer`; None, too, where weights have adapters."""
    if isinstance(params, AdaptedParams):
        return None
    return _delta_layer(hidden, params, chain, states, runs)


def dequantize(w: WeightTensor, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """`reference.dequantize` where the weight is: [rows, in] in `dtype`."""
    found: Tensor = backend_of(w.data).dequantize(w, dtype, rows)
    return found


def append_pages(
    pages: Pages, layer: int, runs: AttentionMetadata, key: Tensor, value: Tensor | None
) -> None:
    """`reference.append_pages` where the pages are."""
    backend_of(pages.memory).append_pages(pages, layer, runs, key, value)


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
    """`reference.experts`, computed where the experts are: [tokens, out].

    `total`, and what is not the `last` result, are there, too.
    """
    if given and x.device != (where := given[0][1]["down_proj"].data.device):
        moved, its_experts, its_scales = (t.to(where) for t in (x, chosen, scales))
        there = experts(moved, given, its_experts, its_scales, activation, total, last=last)
        return there.to(x.device) if last else there
    backend = backend_of(x)
    if given and isinstance(given[0][1], AdaptedParams):
        return adapted(backend).experts(x, given, chosen, scales, activation, total, last=last)
    found: Tensor = backend.experts(x, given, chosen, scales, activation, total, last=last)
    return found


def feed_forward(
    hidden: Tensor, x: Tensor | None, params: Mapping[str, WeightTensor], layer: FeedForward
) -> None:
    """`reference.feed_forward`, computed where params are: changes hidden [tokens, width]."""
    if hidden.device != (where := params["down_proj"].data.device):
        moved = hidden.to(where)
        feed_forward(moved, None if x is None else x.to(where), params, layer)
        hidden.copy_(moved)
        return
    backend = backend_of(hidden)
    if isinstance(params, AdaptedParams):
        reference.feed_forward(hidden, x, params, layer, adapted(backend))
    elif layer.is_usual and "gate_proj" in params:
        backend.feed_forward(hidden, x, params, layer)
    else:  # for which no backend has a kernel
        reference.feed_forward(hidden, x, params, layer, backend)


def kernel_seconds() -> float:
    """Time that the calling thread has spent inside compiled kernels since it began."""
    backend = host_backend()
    return backend.kernel_seconds() if backend.has("kernel_seconds") else 0.0


def stack(layers: Sequence[StackLayer]) -> Stack | None:
    """Layers in host memory, computed in one call; None where there is no kernel for that."""
    backend = host_backend()
    return backend.stack(layers) if backend.has("stack") else None
