"""The operations that layers are made of, each on the fastest kernel that this machine has.

Shapes, dtypes and rounding are those of `hmt.kernels.reference`, where each operation is
described.  `hmt.kernels.cpu.linear` says where the compiled kernels round differently.
"""

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import reference
from hmt.kernels.backend import gpu_kernels
from hmt.kernels.cpu import attention as cpu_attention
from hmt.kernels.cpu import elementwise, extension, routing, sampling, sublayers
from hmt.kernels.cpu import experts as cpu_experts
from hmt.kernels.cpu import linear as cpu_linear
from hmt.kernels.cpu.stack import Stack, StackAttention, StackExperts, StackFFN, StackLayer
from hmt.kernels.cpu.stack import stack as make_stack
from hmt.kernels.reference import (
    ATTENTION_WORKSPACE_BYTES,
    AttentionInputs,
    Expert,
    FeedForward,
    LogitStats,
    NormOptions,
    attention_output,
    merge_attention,
)
from hmt.kernels.reference.kv_pages import (
    AttentionMetadata,
    PagedSegment,
    PageEncoding,
    PageLayout,
    Pages,
    read_pages,
)

__all__ = [
    "ATTENTION_WORKSPACE_BYTES",
    "AttentionInputs",
    "AttentionMetadata",
    "Expert",
    "FeedForward",
    "LogitStats",
    "NormOptions",
    "PageEncoding",
    "PageLayout",
    "PagedSegment",
    "Pages",
    "Stack",
    "StackAttention",
    "StackExperts",
    "StackFFN",
    "StackLayer",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "append_attend_pages",
    "append_pages",
    "attend_part",
    "attention",
    "attention_inputs",
    "attention_output",
    "biased_sigmoid_topk",
    "dequantize",
    "draw",
    "experts",
    "feed_forward",
    "gated",
    "gated_pair",
    "grouped_softmax_topk",
    "kernel_seconds",
    "largest",
    "linear",
    "linear_into",
    "linear_many",
    "logit_stats",
    "merge_attention",
    "page_masses",
    "paged_attention",
    "paged_attention_output",
    "quantize_activations",
    "read_pages",
    "rms_norm",
    "rms_norm_inplace",
    "rms_norm_quantize",
    "rope",
    "rope_inplace",
    "softmax_topk",
    "stack",
]


def linear(x: Tensor, w: WeightTensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear`: x [tokens, in] -> [tokens, out] in x.dtype."""
    native = _native_for(x)
    if native is None:
        return _portable(x).linear(x, w, bias)
    return cpu_linear.linear(native, x, w, bias)


def linear_into(out: Tensor, x: Tensor, w: WeightTensor) -> None:
    """`linear` written to out [tokens, out] of x.dtype, perhaps columns of a larger tensor."""
    native = _native_for(x)
    if x.is_cuda and (kernels := gpu_kernels()) is not reference:
        kernels.linear_into(out, x, w)
    elif native is None or not cpu_linear.linear_into(native, out, x, w):
        out.copy_(linear(x, w))


def linear_many(x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, ...]) -> Tensor:
    """See `reference.linear_many`: x [tokens, in] -> [tokens, sum of all out] in x.dtype."""
    native = _native_for(x)
    if native is None:
        return _portable(x).linear_many(x, params, names)
    return cpu_linear.linear_many(native, x, params, names)


def dequantize(w: WeightTensor, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
    """See `reference.dequantize`: [rows, in] in `dtype`."""
    native = _native_for(w.data)
    if native is None:
        return _portable(w.data).dequantize(w, dtype, rows)
    return cpu_linear.dequantize(native, w, dtype, rows)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_activations`: (int8 [tokens, in], f32 [tokens])."""
    native = _native_for(x)
    if native is None:
        return _portable(x).quantize_activations(x)
    return cpu_linear.quantize_activations(native, x)


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

    Computed where the experts are.  `total`, and what is not the `last` result, are there, too.
    """
    if given and x.device != (where := given[0][1]["down_proj"].data.device):
        moved, its_experts, its_scales = (t.to(where) for t in (x, chosen, scales))
        there = experts(moved, given, its_experts, its_scales, activation, total, last=last)
        return there.to(x.device) if last else there
    native = _native_for(x)
    if native is None:
        return _portable(x).experts(x, given, chosen, scales, activation, total, last=last)
    out = cpu_experts.experts(native, x, given, chosen, scales, activation, total, last=last)
    if out is not None:
        return out
    return reference.experts(
        x, given, chosen, scales, activation, total, last=last, linear=linear, gated=gated
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """See `reference.rms_norm`: x [..., width] normed, in x.dtype."""
    native = _native_for(x)
    if native is None:
        return _portable(x).rms_norm(x, weight, eps, offset=offset)
    return elementwise.rms_norm(native, x, weight, eps, offset)


def rms_norm_inplace(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
    """See `reference.rms_norm_inplace`: changes x [tokens, width] or [tokens, heads, dim]."""
    native = _native_for(x)
    if native is None:
        return _portable(x).rms_norm_inplace(x, weight, eps, offset=offset)
    return elementwise.rms_norm_inplace(native, x, weight, eps, offset)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> Tensor:
    """See `reference.add_rms_norm`: changes `residual`, returns its norm."""
    native = _native_for(x)
    if native is None:
        return _portable(x).add_rms_norm(residual, x, weight, eps, offset=offset)
    return elementwise.add_rms_norm(native, residual, x, weight, eps, offset)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.rms_norm_quantize`: the norm, its codes, scales and sums of codes."""
    native = _native_for(x)
    if native is None:
        return _portable(x).rms_norm_quantize(x, weight, eps, offset=offset)
    return elementwise.rms_norm_quantize(native, x, weight, eps, offset)


def add_rms_norm_quantize(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.add_rms_norm_quantize`: changes `residual`."""
    native = _native_for(x)
    if native is None:
        return _portable(x).add_rms_norm_quantize(residual, x, weight, eps, offset=offset)
    return elementwise.rms_norm_quantize(native, x, weight, eps, offset, residual)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """See `reference.rope`: x [tokens, heads, dim] turned, in x.dtype."""
    native = _native_for(x)
    if native is None:
        return _portable(x).rope(x, cos, sin, interleaved=interleaved)
    return elementwise.rope(native, x, cos, sin, interleaved)


def rope_inplace(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> None:
    """See `reference.rope_inplace`: changes q and k, both [tokens, heads, dim]."""
    native = _native_for(q)
    if native is None:
        return _portable(q).rope_inplace(q, k, cos, sin, interleaved=interleaved)
    return elementwise.rope_inplace(native, q, k, cos, sin, interleaved)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See `reference.gated`: activation(gate) * up, in their dtype."""
    native = _native_for(gate)
    if native is None:
        return _portable(gate).gated(gate, up, activation)
    return elementwise.gated(native, gate, up, activation)


def gated_pair(gate_up: Tensor, activation: str) -> Tensor:
    """See `reference.gated_pair`: gate_up [tokens, 2 * width] to [tokens, width]."""
    native = _native_for(gate_up)
    if native is None:
        return _portable(gate_up).gated_pair(gate_up, activation)
    return elementwise.gated_pair(native, gate_up, activation)


def kernel_seconds() -> float:
    """Time that the calling thread has spent inside compiled kernels since it began."""
    native = extension.load()
    return 0.0 if native is None else native.kernel_seconds()


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """See `reference.attention`; queries and weights may be rounded to the type of keys."""
    native = _native_for(query) if cpu_attention.takes(key, value) else None
    if native is None:
        return _portable(query).attention(query, key, value, **options)
    return cpu_attention.attention(native, query, key, value, **options)


def append_pages(
    pages: Pages, layer: int, runs: AttentionMetadata, key: Tensor, value: Tensor | None
) -> None:
    """See `reference.append_pages`: writes key and value [tokens, heads, dim] to their pages."""
    native = _native_for(pages.memory)
    if native is None:
        _portable(pages.memory).append_pages(pages, layer, runs, key, value)
    else:
        cpu_attention.append_pages(native, pages, layer, runs, key, value)


def paged_attention(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.paged_attention`: out [tokens, q_heads, value_dim] and lse [tokens, q_heads].

    sinks   f32 [q_heads], contiguous
    """
    native = _native_for(query)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if native is None:
        return _portable(query).paged_attention(pages, layer, runs, query, **options)
    lse = torch.empty(query.shape[:2], device=query.device)
    out = cpu_attention.paged_attention(native, pages, layer, runs, query, **options, lse=lse)
    return out, lse


def attend_part(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    **how: Any,
) -> None:
    """See `reference.attend_part`: writes f32 out [tokens, q_heads, value_dim] and lse, in part.

    `how`: scale, window, softcap and sinks, f32 [q_heads] and contiguous.
    """
    native = _native_for(query)
    if native is not None:
        cpu_attention.attend_into(native, pages, layer, runs, query, out, lse, **how)
        return
    whole = all(run.seen is None for run in runs.runs)
    kernels = _portable(query) if whole else reference
    kernels.attend_part(pages, layer, runs, query, out, lse, **how)


def page_masses(
    pages: Pages, layer: int, runs: AttentionMetadata, query: Tensor, lse: Tensor, **how: Any
) -> list[Tensor]:
    """See `reference.page_masses`: f32 [pages] of each run; `how` is scale and softcap."""
    native = _native_for(query)
    whole = all(run.context % PAGE_TOKENS == 0 for run in runs.runs)
    if native is None or not whole or query.dtype not in cpu_attention.DTYPES:
        return reference.page_masses(pages, layer, runs, query, lse, **how)
    return cpu_attention.page_masses(native, pages, layer, runs, query, lse, **how)


def paged_attention_output(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    query: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` without the log-sum-exp."""
    native = _native_for(query)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    if native is None:
        return _portable(query).paged_attention_output(pages, layer, runs, query, **options)
    return cpu_attention.paged_attention(native, pages, layer, runs, query, **options)


def append_attend_pages(
    pages: Pages, layer: int, runs: AttentionMetadata, heads: Tensor, **options: Any
) -> Tensor:
    """See `reference.append_attend_pages`: [tokens, q_heads * dim]."""
    native = _native_for(heads)
    if native is not None and heads.dtype in cpu_attention.DTYPES and heads.is_contiguous():
        return cpu_attention.append_attend_pages(native, pages, layer, runs, heads, **options)
    if heads.is_cuda and (kernels := gpu_kernels()) is not reference:
        out: Tensor = kernels.append_attend_pages(pages, layer, runs, heads, **options)
        return out
    return reference.append_attend_pages(pages, layer, runs, heads, _THIS, **options)


def attention_inputs(
    hidden: Tensor,
    params: Mapping[str, WeightTensor],
    layer: AttentionInputs,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """See `reference.attention_inputs`: [tokens, heads + 2 * kv_heads, head_dim]."""
    native = _native_for(hidden)
    if native is not None:
        heads = sublayers.attention_inputs(native, hidden, params, layer, cos, sin)
        if heads is not None:
            return heads
    if hidden.is_cuda and (kernels := gpu_kernels()) is not reference:
        found: Tensor = kernels.attention_inputs(hidden, params, layer, cos, sin)
        return found
    return reference.attention_inputs(hidden, params, layer, cos, sin, _THIS)


def feed_forward(
    hidden: Tensor, x: Tensor | None, params: Mapping[str, WeightTensor], layer: FeedForward
) -> None:
    """See `reference.feed_forward`: changes hidden [tokens, width].  Computed where params are."""
    if hidden.device != (where := params["down_proj"].data.device):
        moved = hidden.to(where)
        feed_forward(moved, None if x is None else x.to(where), params, layer)
        hidden.copy_(moved)
        return
    native = _native_for(hidden)
    if hidden.is_cuda and (kernels := gpu_kernels()) is not reference:
        kernels.feed_forward(hidden, x, params, layer)
    elif native is None or not sublayers.feed_forward(native, hidden, x, params, layer):
        reference.feed_forward(hidden, x, params, layer, _THIS)


def stack(layers: Sequence[StackLayer]) -> Stack | None:
    """Layers computed in one call; None where there is no kernel for that."""
    native = extension.load()
    return None if native is None else make_stack(native, layers)


def softmax_topk(logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See `reference.softmax_topk`: experts and scales [tokens, k]."""
    native = _native_for(logits)
    if native is None or not routing.can_route(logits, k, 1, 1):
        return _portable(logits).softmax_topk(logits, k, renormalise=renormalise)
    return routing.route(native, logits, None, k, 1, 1, renormalise, 1.0)


def grouped_softmax_topk(
    logits: Tensor, k: int, *, groups: int, kept_groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See `reference.grouped_softmax_topk`: experts and scales [tokens, k]."""
    native = _native_for(logits)
    if native is None or not routing.can_route(logits, k, groups, kept_groups):
        return _portable(logits).grouped_softmax_topk(
            logits, k, groups=groups, kept_groups=kept_groups, scale=scale
        )
    return routing.route(native, logits, None, k, groups, kept_groups, False, scale)


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
    """See `reference.biased_sigmoid_topk`: experts and scales [tokens, k]."""
    native = _native_for(logits)
    if native is None or not routing.can_route(logits, k, groups, kept_groups):
        return _portable(logits).biased_sigmoid_topk(
            logits,
            bias,
            k,
            groups=groups,
            kept_groups=kept_groups,
            renormalise=renormalise,
            scale=scale,
        )
    bias = bias.float().contiguous()
    return routing.route(native, logits, bias, k, groups, kept_groups, renormalise, scale)


def logit_stats(logits: Tensor) -> LogitStats:
    """See `reference.survey`: what one look at logits [vocab] tells."""
    native = _native_for(logits)
    return (
        _portable(logits).logit_stats(logits)
        if native is None
        else sampling.logit_stats(native, logits)
    )


def draw(
    scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """See `reference.draw`: a token by scores [vocab]."""
    native = _native_for(scores)
    if native is None:
        return _portable(scores).draw(scores, temperature, top_k, top_p, min_p, uniform)
    return sampling.draw(native, scores, temperature, top_k, top_p, min_p, uniform)


def largest(scores: Tensor, count: int) -> Tensor:
    """See `reference.largest`: ids of the largest scores [vocab]."""
    native = _native_for(scores)
    if native is None:
        return _portable(scores).largest(scores, count)
    return sampling.largest(native, scores, count)


_THIS: Any = sys.modules[__name__]  # what chains of operations are made of


def _portable(tensor: Tensor) -> Any:
    """Operations for tensors that the compiled kernels do not take."""
    return gpu_kernels() if tensor.is_cuda else reference


def _native_for(tensor: Tensor) -> ModuleType | None:
    return extension.load() if tensor.is_cpu else None
