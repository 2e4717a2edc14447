"""Mixtures of residual streams through the compiled extension: twenty iterations are one call."""

from types import ModuleType

import torch
from torch import Tensor


def stream_mixes(
    native: ModuleType,
    products: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    streams: int,
    iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.stream_mixes` by the extension; exponentials differ in their last bits."""
    tokens = len(products)
    products, base, scale = (part.contiguous() for part in (products, base, scale))
    read, spread = torch.empty(2, tokens, streams)
    mixed = torch.empty(tokens, streams, streams)
    native.mix_streams(
        products.data_ptr(), base.data_ptr(), scale.data_ptr(), tokens, streams, iterations, eps,
        read.data_ptr(), spread.data_ptr(), mixed.data_ptr(),
    )  # fmt: skip
    return read, spread, mixed
