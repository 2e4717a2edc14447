"""Operations of layers that a GPU computes in fewer launches, beside those of `ops`.

And products of heads, for which a CPU has a kernel while there are few tokens.
"""

from torch import Tensor

from hmt.kernels import reference
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
add_latent_attention = by_device_of("hidden", reference.add_latent_attention)
router_inputs = by_device_of("hidden", reference.router_inputs)
linear_gated = by_device_of("x", reference.linear_gated)
linear_many_float = by_device_of("x", reference.linear_many_float)


def has_fused_attention(hidden: Tensor) -> bool:
    """Whether `add_latent_attention` has a kernel where hidden states are."""
    return backend_of(hidden).has("add_latent_attention")
