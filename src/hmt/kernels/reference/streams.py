"""Weights by which a token's residual streams are read, written and mixed (hyper-connections)."""

import torch
from torch import Tensor

from hmt.kernels.reference.elementwise import sigmoid


def stream_mixes(
    products: Tensor, base: Tensor, scale: Tensor, *, streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What mHC makes of a token's products (arXiv 2512.24880): f32, sums in a fixed order.

    products     f32 [tokens, streams * (streams + 2)]: for reading, for writing, for the mixture
    base         f32 of as many, added to products times scale, f32 [3], one for each of the three
    iterations   of Sinkhorn and Knopp: columns, then rows and columns again
    eps          added to weights that are read by, and to sums that are divided by
    Returns weights of streams that are read [tokens, streams], what an output is multiplied with
    for each [tokens, streams], and [tokens, streams, streams], whose [:, j, k] is how much of
    stream j goes on in stream k; its columns add up to about 1.
    """
    sizes = (streams, streams, streams * streams)
    parts = zip(products.split(sizes, dim=1), base.split(sizes), scale, strict=True)
    read, spread, wanted = (part * factor + own for part, own, factor in parts)
    # Streams first: sums are then of whole tensors, in an order that is always the same.
    mixed = wanted.unflatten(1, (streams, streams)).permute(1, 2, 0)
    mixed = torch.exp((mixed - mixed.amax(1, keepdim=True)).contiguous())
    mixed = mixed / _sum(mixed, 1) + eps
    mixed = mixed / (_sum(mixed, 0) + eps)
    for _ in range(iterations - 1):
        mixed = mixed / (_sum(mixed, 1) + eps)
        mixed = mixed / (_sum(mixed, 0) + eps)
    return sigmoid(read) + eps, 2 * sigmoid(spread), mixed.permute(2, 0, 1)


def read_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """The sum of streams times weights, one after the other, rounded once.

    streams [tokens, count * width]; weights f32 [tokens, count].  Returns [tokens, width] in
    streams.dtype.
    """
    parts = zip(streams.chunk(weights.shape[1], dim=1), weights.split(1, dim=1), strict=True)
    total = torch.zeros((), device=streams.device)
    for stream, weight in parts:
        total = total + weight * stream.float()
    return total.to(streams.dtype)


def write_streams(streams: Tensor, x: Tensor, spread: Tensor, mixed: Tensor) -> Tensor:
    """Streams that are mixed, and x times a weight added to each: the shape and dtype of streams.

    streams [tokens, count * width]; x [tokens, width]; spread and mixed as `stream_mixes` gives
    them.  Computed in f32, first x and then one stream after the other, and rounded once.
    """
    total = spread[..., None] * x.float()[:, None]
    for number, stream in enumerate(streams.chunk(spread.shape[1], dim=1)):
        total = total + mixed[:, number, :, None] * stream.float()[:, None]
    return total.flatten(1).to(streams.dtype)


def _sum(numbers: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, which stays, one number after the other."""
    first, *others = numbers.unbind(dim)
    for other in others:
        first = first + other
    return first.unsqueeze(dim)
