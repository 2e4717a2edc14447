"""Latent attention with all around it, for steps of one token per run, in few launches."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels import reference
from hmt.kernels.reference.kv_pages import AttentionMetadata, Pages
from hmt.kernels.reference.sublayers import LatentLayer, NormOptions
from hmt.kernels.triton.attention.metadata import device_runs
from hmt.kernels.triton.attention.mla_fused import absorb, takes_expansion, values_of
from hmt.kernels.triton.attention.paged import attend_held, can_attend
from hmt.kernels.triton.elementwise.norms import rms_norm
from hmt.kernels.triton.gemm.dispatch import agree, linear_add, linear_many, one_by_one
from hmt.kernels.triton.gemm.gemv_w4_launch import Norm, multiply_one, takes_one_token
from hmt.kernels.triton.single_tokens import are_single


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
    """Add to hidden [tokens, width] its norm's latent attention; appends to layer `number`.

    False, and nothing done, where there is no kernel: for steps of longer runs among others.
    angles: cos and sin [tokens, rope_dim].
    """
    held = device_runs(runs, hidden.device)
    expand = params["kv_b_proj"]
    plain = pages.layout.encoding.dtype == hidden.dtype and can_attend(pages, hidden)
    single = len(held) == 1 and held[0].tokens == 1 and held[0].count == len(hidden)
    alike = angles[0].stride() == angles[1].stride() and angles[0].stride(1) == 1
    if not (plain and single and alike and takes_expansion(expand, layer, len(hidden))):
        return False
    projected = _of_norm(hidden, params, layer.names, "norm", norm)
    width = layer.kv_rank + layer.rope_dim
    query, row = projected[:, :-width], projected[:, -width:]
    if "q_b_proj" in params:
        query = _of_norm(query, params, ("q_b_proj",), "q_a_norm", layer.inner_norm)
    by, eps = params["kv_a_norm"].data, layer.inner_norm.eps
    asked = absorb(query, row, expand, by, eps, angles, pages, number, held[0], layer)
    attended = attend_held(pages, number, held[0], asked, layer.scale)
    values = values_of(attended, expand, held[0], layer)
    bias = params.get("o_proj_bias")
    linear_add(hidden, values, params["o_proj"], None if bias is None else bias.data)
    return True


def _of_norm(
    x: Tensor,
    params: Mapping[str, WeightTensor],
    names: tuple[str, ...],
    norm: str,
    options: NormOptions,
) -> Tensor:
    """The norm of x [tokens, in] times weights, side by side: [tokens, rows of all]."""
    weights = [params[name] for name in names]
    if one_by_one(x, weights):
        return torch.cat([_of_norm(row, params, names, norm, options) for row in x.split(1)])
    by = params[norm].data
    if takes_one_token(x, weights) and all(agree(weights[0], other) for other in weights[1:]):
        biases = [params.get(f"{name}_bias") for name in names]
        out = x.new_empty(1, sum(w.shape[0] for w in weights))
        given = [None if bias is None else bias.data for bias in biases]
        multiply_one(out, x, weights, given, norm=Norm(by, options))
        return out
    return linear_many(rms_norm(x, by, options.eps, offset=options.offset), params, names)


def head_products(x: Tensor, matrices: Tensor) -> Tensor:
    """See `reference.head_products`: a library's product, which adds in other orders by tokens."""
    if are_single() and len(x) > 1:
        return torch.cat([reference.head_products(row, matrices) for row in x.split(1)])
    return reference.head_products(x, matrices)
