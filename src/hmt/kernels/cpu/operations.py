"""Every operation that the compiled extension has a kernel for, on tensors in host memory.

Signatures are those of `hmt.kernels.reference`; where the extension has no kernel for a dtype, an
encoding or a layout, plain torch computes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.contracts.model import PAGE_TOKENS
from hmt.kernels import reference
from hmt.kernels.cpu import (
    attention,
    delta_layer,
    elementwise,
    experts,
    index_selection,
    linear,
    low_rank,
    recurrent,
    routing,
    sampling,
    stack,
    streams,
    sublayers,
)
from hmt.kernels.reference import AttentionInputs, Expert, FeedForward
from hmt.kernels.reference.kv_pages import AttentionMetadata, Pages

# With more tokens torch's products pay for the threads of its own that it wakes.
_FEW_TOKENS = 16


class CompiledOperations:
    """The operations, bound to an extension."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native
        self.add_low_rank = partial(low_rank.add_low_rank, native)
        self.add_rms_norm = partial(elementwise.add_rms_norm, native)
        self.add_rms_norm_quantize = partial(elementwise.add_rms_norm_quantize, native)
        self.attend_part = partial(attention.attend_into, native)
        self.causal_conv = partial(recurrent.causal_conv, native)
        self.delta_layer = partial(delta_layer.delta_layer, native)
        self.dequantize = partial(linear.dequantize, native)
        self.draw = partial(sampling.draw, native)
        self.gated = partial(elementwise.gated, native)
        self.gated_delta_rule = partial(recurrent.gated_delta_rule, native)
        self.gated_pair = partial(elementwise.gated_pair, native)
        self.index_topk = partial(index_selection.index_topk, native)
        self.kernel_seconds = native.kernel_seconds
        self.largest = partial(sampling.largest, native)
        self.linear = partial(linear.linear, native)
        self.linear_many = partial(linear.linear_many, native)
        self.logit_stats = partial(sampling.logit_stats, native)
        self.paged_attention_output = partial(attention.paged_attention, native)
        self.paged_index_topk = partial(index_selection.paged_index_topk, native)
        self.quantize_activations = partial(linear.quantize_activations, native)
        self.rms_norm = partial(elementwise.rms_norm, native)
        self.rms_norm_inplace = partial(elementwise.rms_norm_inplace, native)
        self.rms_norm_quantize = partial(elementwise.rms_norm_quantize, native)
        self.rope = partial(elementwise.rope, native)
        self.rope_inplace = partial(elementwise.rope_inplace, native)
        self.selected_attention = partial(reference.selected_attention, attend=self.attention)
        self.selective_scan = partial(recurrent.selective_scan, native)
        self.stack = partial(stack.stack, native)
        self.stream_mixes = partial(streams.stream_mixes, native)
        self.read_streams = partial(streams.read_streams, native)
        self.write_streams = partial(streams.write_streams, native)
        self.sigmoid_gated = partial(elementwise.sigmoid_gated, native)
        self.state_space_scan = partial(recurrent.state_space_scan, native)
        self.time_steps = partial(recurrent.time_steps, native)

    def append_pages(
        self,
        pages: Pages,
        layer: int,
        runs: AttentionMetadata,
        key: Tensor,
        value: Tensor | None,
    ) -> None:
        """`reference.append_pages`."""
        if pages.layout.rows:
            reference.append_pages(pages, layer, runs, key, value)
            return
        attention.append_pages(self._native, pages, layer, runs, key, value)

    def linear_into(self, out: Tensor, x: Tensor, w: WeightTensor) -> None:
        """`reference.linear_into`."""
        if not linear.linear_into(self._native, out, x, w):
            reference.linear_into(out, x, w, self)

    def head_products(self, x: Tensor, matrices: Tensor) -> Tensor:
        """`reference.head_products`.

        torch has threads beside those of the extension: with both on two cores, and anything else
        there, a product of microseconds waited milliseconds for a thread that had no core.
        """
        if len(x) <= _FEW_TOKENS:
            products = elementwise.head_products(self._native, x, matrices)
            if products is not None:
                return products
        return reference.head_products(x, matrices)

    def experts(
        self,
        x: Tensor,
        given: Sequence[Expert],
        chosen: Tensor,
        scales: Tensor,
        activation: str,
        total: Tensor | None = None,
        *,
        last: bool = True,
    ) -> Tensor:
        """`reference.experts`."""
        out = experts.experts(self._native, x, given, chosen, scales, activation, total, last=last)
        if out is not None:
            return out
        return reference.experts(
            x, given, chosen, scales, activation, total, last=last, kernels=self
        )

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """`reference.attention`; queries and weights may be rounded to the type of keys."""
        if not attention.takes(key, value):
            return reference.attention(query, key, value, **options)
        return attention.attention(self._native, query, key, value, **options)

    def paged_attention(
        self, pages: Pages, layer: int, runs: AttentionMetadata, query: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """`reference.paged_attention`; sinks f32 [q_heads], contiguous."""
        lse = torch.empty(query.shape[:2])
        out = attention.paged_attention(self._native, pages, layer, runs, query, **options, lse=lse)
        return out, lse

    def page_masses(
        self,
        pages: Pages,
        layer: int,
        runs: AttentionMetadata,
        query: Tensor,
        lse: Tensor,
        **options: Any,
    ) -> list[Tensor]:
        """`reference.page_masses`."""
        whole = all(run.context % PAGE_TOKENS == 0 for run in runs.runs)
        if not whole or query.dtype not in attention.DTYPES:
            return reference.page_masses(pages, layer, runs, query, lse, **options)
        return attention.page_masses(self._native, pages, layer, runs, query, lse, **options)

    def append_attend_pages(
        self,
        pages: Pages,
        layer: int,
        runs: AttentionMetadata,
        heads: Tensor,
        **options: Any,
    ) -> Tensor:
        """`reference.append_attend_pages`."""
        if heads.dtype not in attention.DTYPES or not heads.is_contiguous():
            return reference.append_attend_pages(pages, layer, runs, heads, self, **options)
        return attention.append_attend_pages(self._native, pages, layer, runs, heads, **options)

    def attention_inputs(
        self,
        hidden: Tensor,
        params: Mapping[str, WeightTensor],
        layer: AttentionInputs,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """`reference.attention_inputs`."""
        heads = sublayers.attention_inputs(self._native, hidden, params, layer, cos, sin)
        if heads is not None:
            return heads
        return reference.attention_inputs(hidden, params, layer, cos, sin, self)

    def feed_forward(
        self,
        hidden: Tensor,
        x: Tensor | None,
        params: Mapping[str, WeightTensor],
        layer: FeedForward,
    ) -> None:
        """`reference.feed_forward`: changes hidden."""
        if not sublayers.feed_forward(self._native, hidden, x, params, layer):
            reference.feed_forward(hidden, x, params, layer, self)

    def softmax_topk(self, logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
        """`reference.softmax_topk`."""
        if not routing.can_route(logits, k, 1, 1):
            return reference.softmax_topk(logits, k, renormalise=renormalise)
        return routing.route(self._native, logits, None, k, 1, 1, renormalise, 1.0)

    def grouped_softmax_topk(
        self, logits: Tensor, k: int, *, groups: int, kept_groups: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`reference.grouped_softmax_topk`."""
        if not routing.can_route(logits, k, groups, kept_groups):
            return reference.grouped_softmax_topk(
                logits, k, groups=groups, kept_groups=kept_groups, scale=scale
            )
        return routing.route(self._native, logits, None, k, groups, kept_groups, False, scale)

    def biased_sigmoid_topk(
        self,
        logits: Tensor,
        bias: Tensor,
        k: int,
        *,
        groups: int,
        kept_groups: int,
        renormalise: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """`reference.biased_sigmoid_topk`."""
        if not routing.can_route(logits, k, groups, kept_groups):
            return reference.biased_sigmoid_topk(
                logits, bias, k, groups=groups, kept_groups=kept_groups,
                renormalise=renormalise, scale=scale,
            )  # fmt: skip
        bias = bias.float().contiguous()
        return routing.route(self._native, logits, bias, k, groups, kept_groups, renormalise, scale)
