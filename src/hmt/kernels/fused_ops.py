"""Operations of layers that a GPU computes in fewer launches, beside those of `ops`.

And products of heads, for which a CPU has a kernel while there are few tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels import ops, reference
from hmt.kernels.cpu import elementwise, extension
from hmt.kernels.reference import LatentLayer, NormOptions
from hmt.kernels.reference.kv_pages import AttentionMetadata, Pages

__all__ = [
    "LatentLayer",
    "add_latent_attention",
    "has_fused_kernels",
    "head_products",
    "linear_gated",
    "linear_many_float",
    "router_inputs",
]

# With more tokens torch's products pay for the threads of its own that it wakes.
_FEW_TOKENS = 16


def head_products(x: Tensor, matrices: Tensor) -> Tensor:
    """Each head's numbers times its matrix: x [tokens, heads, in] to [tokens, heads, out].

    matrices [heads, in, out], of any strides; all in x.dtype, summed in f32.

    torch has threads beside those of the extension: with both on two cores, and anything else
    there, a product of microseconds waited milliseconds for a thread that had no core.
    """
    native = extension.load() if x.is_cpu and len(x) <= _FEW_TOKENS else None
    if native is not None:
        found = elementwise.head_products(native, x, matrices)
        if found is not None:
            return found
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)


def has_fused_kernels(hidden: Tensor) -> bool:
    """Whether hidden states are where there are kernels for that."""
    return hidden.is_cuda and ops.gpu_kernels() is not reference


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
    nothing done, where there is no kernel, or not for these runs.
    """
    added: bool = has_fused_kernels(hidden) and ops.gpu_kernels().add_latent_attention(
        hidden, params, layer, norm, angles, pages, number, runs
    )
    return added


def router_inputs(
    hidden: Tensor, x: Tensor | None, norm: Tensor, options: NormOptions, router: WeightTensor
) -> tuple[Tensor, Tensor]:
    """See `reference.router_inputs`: hidden += x; its norm, and f32 logits [tokens, experts]."""
    if has_fused_kernels(hidden):
        found: tuple[Tensor, Tensor] = ops.gpu_kernels().router_inputs(
            hidden, x, norm, options, router
        )
        return found
    return reference.router_inputs(hidden, x, norm, options, router, ops)


def linear_gated(
    x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, str], activation: str
) -> Tensor:
    """`gated_pair` of `linear_many(x, params, names)`: [tokens, width] in x.dtype."""
    if has_fused_kernels(x):
        out: Tensor = ops.gpu_kernels().linear_gated(x, params, names, activation)
        return out
    return ops.gated_pair(ops.linear_many(x, params, names), activation)


def linear_many_float(
    x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, ...]
) -> Tensor:
    """`ops.linear_many` of weights without biases, rounded as it is, in f32."""
    if has_fused_kernels(x):
        out: Tensor = ops.gpu_kernels().linear_many_float(x, params, names)
        return out
    return ops.linear_many(x, params, names).float()
