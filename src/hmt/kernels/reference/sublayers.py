"""Parts of a decoder layer as one operation each: attention's inputs, attention, and the FFN.

Each is a chain of other operations, rounded where those round, so kernels may compute it in any
number of calls.  `kernels` says whose operations are chained, those of this package by default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import StateRun
from hmt.kernels.reference import elementwise, matmul
from hmt.kernels.reference.attention import paged_attention_output
from hmt.kernels.reference.kv_pages import AttentionMetadata, Pages, append_pages
from hmt.kernels.reference.recurrent import DeltaHeads

QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class NormOptions:
    """What a root mean square norm has besides its weight."""

    eps: float
    offset: float = 0.0


# Compared by identity, so that kernels can keep what they made for one.
@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """Sizes and norms of `attention_inputs`; one for each kind of layer, kept.

    head_norm   of each head of queries and keys, before they are rotated; None for none
    """

    heads: int
    kv_heads: int
    head_dim: int
    norm: NormOptions
    head_norm: NormOptions | None = None


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """Activation and norms of `feed_forward`; one for each kind of layer, kept.

    activation    as for `gated`
    norm          of what comes in; None for none
    post_norm     of the result, before it is added; None for none
    gate_factor   what the gate is multiplied with before its activation
    factor        what the result is multiplied with
    """

    activation: str
    norm: NormOptions | None
    post_norm: NormOptions | None = None
    gate_factor: float = 1.0
    factor: float = 1.0

    @property
    def is_usual(self) -> bool:
        """What comes in is normed, and nothing is multiplied with a factor."""
        return self.norm is not None and self.gate_factor == self.factor == 1


@dataclass(frozen=True, slots=True, eq=False)
class LatentLayer:
    """Sizes and norms of latent attention; one for each model, kept.  See `layers.LatentAttention`.

    inner_norm   of the query's compression and of the latent
    names        of the projections of hidden states: the query's, and `kv_a_proj`
    """

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool
    inner_norm: NormOptions
    names: tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaChain:
    """What a delta rule's layer computes, one for each model, kept: see csrc/sublayers/mixers.h.

    inputs         projections of the norm of hidden states; their products lie side by side
    qkv            which numbers of that row are Q, K and V: (first, count) of each span, in this
                   order; likewise gate, rate and decay
    through_gate   another projection behind that of gates; None for none
    through_decay  the same of decays
    activation     of gates, with which the normed results are multiplied: "silu" or "sigmoid"
    tiled          see layers.GatedDeltaNet

    Uses `norm`, `conv`, `decay_scale`, `decay_bias` and `out_norm` of parameters, besides.
    """

    heads: DeltaHeads
    norm: NormOptions
    inputs: tuple[str, ...]
    qkv: Spans
    gate: Spans
    rate: Spans
    decay: Spans
    out_norm: NormOptions
    activation: str
    output: str
    through_gate: str | None = None
    through_decay: str | None = None
    tiled: bool = False

    @property
    def spans(self) -> tuple[Spans, Spans, Spans, Spans]:
        """Those of Q, K and V, of gates, of rates and of decays."""
        return self.qkv, self.gate, self.rate, self.decay


class _Reference:
    """The operations that these are chains of."""

    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    rms_norm_inplace = staticmethod(elementwise.rms_norm_inplace)
    rope_inplace = staticmethod(elementwise.rope_inplace)
    gated = staticmethod(elementwise.gated)
    gated_pair = staticmethod(elementwise.gated_pair)
    linear = staticmethod(matmul.linear)
    linear_many = staticmethod(matmul.linear_many)
    append_pages = staticmethod(append_pages)
    paged_attention_output = staticmethod(paged_attention_output)


def attention_inputs(
    hidden: Tensor,
    params: Mapping[str, WeightTensor],
    layer: AttentionInputs,
    cos: Tensor,
    sin: Tensor,
    kernels: Any = _Reference,
) -> Tensor:
    """Queries, keys and values of hidden [tokens, width]: [tokens, heads + 2 * kv_heads, head_dim].

    rope(head_norm(linear(norm(hidden)))), where values are only projected.  Uses `norm`, `q_proj`,
    `k_proj`, `v_proj` with their biases, and `q_norm`, `k_norm` of `params`.  cos, sin: as for
    `rope`.  Result in hidden's dtype.
    """
    x = kernels.rms_norm(hidden, params["norm"].data, layer.norm.eps, offset=layer.norm.offset)
    heads = kernels.linear_many(x, params, QUERY_KEY_VALUE).unflatten(1, (-1, layer.head_dim))
    query, key = heads[:, : layer.heads], heads[:, layer.heads : layer.heads + layer.kv_heads]
    if layer.head_norm is not None:
        eps, offset = layer.head_norm.eps, layer.head_norm.offset
        kernels.rms_norm_inplace(query, params["q_norm"].data, eps, offset=offset)
        kernels.rms_norm_inplace(key, params["k_norm"].data, eps, offset=offset)
    kernels.rope_inplace(query, key, cos, sin)
    return heads


def router_inputs(
    hidden: Tensor,
    x: Tensor | None,
    norm: Tensor,
    options: NormOptions,
    router: WeightTensor,
    kernels: Any = _Reference,
) -> tuple[Tensor, Tensor]:
    """hidden += x; the norm of hidden [tokens, width], and its products with the router in f32.

    `hidden` changes, `x` may be None.  The norm is in hidden's dtype; logits are [tokens, experts].
    """
    if x is None:
        normed = kernels.rms_norm(hidden, norm, options.eps, offset=options.offset)
    else:
        normed = kernels.add_rms_norm(hidden, x, norm, options.eps, offset=options.offset)
    return normed, kernels.linear(normed.float(), router)


def linear_gated(
    x: Tensor,
    params: Mapping[str, WeightTensor],
    names: tuple[str, str],
    activation: str,
    kernels: Any = _Reference,
) -> Tensor:
    """`gated_pair` of `linear_many(x, params, names)`: [tokens, width] in x.dtype."""
    out: Tensor = kernels.gated_pair(kernels.linear_many(x, params, names), activation)
    return out


def linear_many_float(
    x: Tensor,
    params: Mapping[str, WeightTensor],
    names: tuple[str, ...],
    kernels: Any = _Reference,
) -> Tensor:
    """`linear_many` of weights without biases, rounded as it is, in f32."""
    out: Tensor = kernels.linear_many(x, params, names).float()
    return out


def add_latent_attention(
    hidden: Tensor,
    params: Mapping[str, WeightTensor],
    layer: LatentLayer,
    norm: NormOptions,
    angles: tuple[Tensor, Tensor],
    pages: Pages,
    number: int,
    runs: AttentionMetadata,
) -> bool:
    """Add to hidden [tokens, width] the latent attention to its norm, with all projections.

    Appends to layer `number` of `pages`; angles are cos and sin [tokens, rope_dim].  False, and
    nothing done, where there is no kernel, or not for these runs: plain torch has none.
    """
    return False


def delta_layer(
    hidden: Tensor,
    params: Mapping[str, WeightTensor],
    chain: DeltaChain,
    states: Mapping[str, Tensor],
    runs: Sequence[StateRun],
) -> Tensor | None:
    """What a delta rule's layer gives for the norm of hidden [tokens, width], same shape and dtype.

    states   `matrix` and `conv`, which change, as for `gated_delta_rule` and `causal_conv`; and
             `journal`, [slots, drafts, numbers], of queries, keys and values before the
             convolution, then decays, then rates: of the tokens that runs have pending, in the
             order of these.  It has drafts of the runs afterwards
    runs     may have tokens pending
    None, and nothing done, where there is no kernel, or not for so many tokens: plain torch has
    none.
    """
    return None


def append_attend_pages(
    pages: Pages,
    layer: int,
    runs: AttentionMetadata,
    heads: Tensor,
    kernels: Any = _Reference,
    **options: Any,
) -> Tensor:
    """`append_pages` of keys and values, then `paged_attention_output` of queries with `options`.

    heads [tokens, q_heads + 2 * kv_heads, dim] are queries, keys and values, as `attention_inputs`
    returns them.  Keys are as wide as values.  Returns [tokens, q_heads * dim].
    """
    kv_heads = pages.layout.heads
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    kernels.append_pages(pages, layer, runs, key, value)
    out: Tensor = kernels.paged_attention_output(pages, layer, runs, query, **options)
    return out.flatten(1)


def feed_forward(
    hidden: Tensor,
    x: Tensor | None,
    params: Mapping[str, WeightTensor],
    layer: FeedForward,
    kernels: Any = _Reference,
) -> None:
    """hidden += x; hidden += post_norm(down(activation(gate(n)) * up(n))), n = norm(hidden).

    hidden and x are [tokens, width] of one dtype, to which each sum is rounded; `hidden` changes,
    `x` may be None.  Uses `norm`, `gate_proj`, `up_proj`, `down_proj` with their biases, and
    `post_norm` of `params`; without `gate_proj` that is `up_proj`, too.  Factors: see FeedForward.
    """
    if (norm := layer.norm) is None:
        normed = hidden if x is None else hidden.add_(x)
    elif x is None:
        normed = kernels.rms_norm(hidden, params["norm"].data, norm.eps, offset=norm.offset)
    else:
        by = params["norm"].data
        normed = kernels.add_rms_norm(hidden, x, by, norm.eps, offset=norm.offset)
    if "gate_proj" in params:
        pair = kernels.linear_many(normed, params, GATE_UP)
        if layer.gate_factor != 1:
            pair[:, : params["gate_proj"].shape[0]] *= layer.gate_factor
        inner = kernels.gated_pair(pair, layer.activation)
    else:
        up = kernels.linear(normed, params["up_proj"], _bias(params, "up_proj"))
        inner = kernels.gated(up, up, layer.activation)
    out = kernels.linear(inner, params["down_proj"], _bias(params, "down_proj"))
    if layer.factor != 1:
        out = out * layer.factor
    if layer.post_norm is not None:
        out = kernels.rms_norm(
            out, params["post_norm"].data, layer.post_norm.eps, offset=layer.post_norm.offset
        )
    hidden += out


def _bias(params: Mapping[str, WeightTensor], name: str) -> Tensor | None:
    bias = params.get(f"{name}_bias")
    return None if bias is None else bias.data
