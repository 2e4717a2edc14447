"""Mixtures of residual streams through the compiled extension: twenty iterations are one call."""

from types import ModuleType

import torch
from torch import Tensor

from hmt.kernels import reference
from hmt.kernels.cpu.abi import DTYPES


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


def read_streams(native: ModuleType, streams: Tensor, weights: Tensor) -> Tensor:
    """`reference.read_streams` by the extension, to the bit."""
    if streams.dtype not in DTYPES:
        return reference.read_streams(streams, weights)
    tokens, count = weights.shape
    streams, weights = streams.contiguous(), weights.contiguous()
    width = streams.shape[1] // count
    x = torch.empty(tokens, width, dtype=streams.dtype)
    native.read_streams(
        streams.data_ptr(), DTYPES[streams.dtype], tokens, count, width, weights.data_ptr(),
        x.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return x


def write_streams(
    native: ModuleType, streams: Tensor, x: Tensor, spread: Tensor, mixed: Tensor
) -> Tensor:
    """`reference.write_streams` by the extension, to the bit."""
    if streams.dtype not in DTYPES or x.dtype is not streams.dtype:
        return reference.write_streams(streams, x, spread, mixed)
    tokens, count = spread.shape
    streams, x, spread, mixed = (part.contiguous() for part in (streams, x, spread, mixed))
    out = torch.empty_like(streams)
    native.write_streams(
        streams.data_ptr(), DTYPES[streams.dtype], tokens, count, x.shape[1], spread.data_ptr(),
        mixed.data_ptr(), x.data_ptr(), out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out
