"""Operations of layers that a GPU computes in fewer launches, beside those of `ops`.

And products of heads, for which a CPU has a kernel while there are few tokens.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hmt.contracts.adapter import AdaptedParams
from hmt.contracts.encoding import WeightTensor
from hmt.kernels import reference
from hmt.kernels.adapted import adapted
from hmt.kernels.backend_registry import backend_of
from hmt.kernels.ops import by_device_of
from hmt.kernels.reference import LatentLayer

__all__ = [
    "LatentLayer",
    "add_latent_attention",
    "has_fused_attention",
    "head_products",
    "linear_gated",
    "linear_many_float",
    "router_inputs",
]

head_products = by_device_of("x", reference.head_products)
_add_latent_attention = by_device_of("hidden", reference.add_latent_attention)
router_inputs = by_device_of("hidden", reference.router_inputs)
linear_many_float = by_device_of("x", reference.linear_many_float)


def has_fused_attention(hidden: Tensor) -> bool:
    """Whether `add_latent_attention` has a kernel where hidden states are."""
    return backend_of(hidden).has("add_latent_attention")


def add_latent_attention(
    hidden: Tensor, params: Mapping[str, WeightTensor], *args: Any, **kwargs: Any
) -> bool:
    """`reference.add_latent_attention`; False, too, where weights have adapters."""
    if isinstance(params, AdaptedParams):
        return False
    return _add_latent_attention(hidden, params, *args, **kwargs)


def linear_gated(
    x: Tensor, params: Mapping[str, WeightTensor], names: tuple[str, str], activation: str
) -> Tensor:
    """`reference.linear_gated`, with adapters where weights have any."""
    backend = backend_of(x)
    if isinstance(params, AdaptedParams):
        return reference.linear_gated(x, params, names, activation, adapted(backend))
    out: Tensor = backend.linear_gated(x, params, names, activation)
    return out
