"""Manifold-constrained hyper-connections: residual streams that a small product mixes per token."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.kernels import ops
from hmt.layers.linear import Params


class StreamMix(NamedTuple):
    """What a sublayer's output is written into the streams with, by token; f32.

    spread   [tokens, streams]: what the output is multiplied with for each stream
    mixed    [tokens, streams, streams]: [:, j, k] is how much of stream j goes on in stream k
    """

    spread: Tensor
    mixed: Tensor


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """Reads a sublayer's input from several residual streams, and writes its output into all.

    Manifold-constrained hyper-connections (mHC, arXiv 2512.24880), as DeepSeek-V4 and GLM-5.3 have
    them.  All numbers of a token's streams, divided by their root mean square, make the weights of
    its mixtures: sigmoids for what is read and written, and a matrix for what goes on, which is
    brought near a doubly stochastic one by Sinkhorn and Knopp's iterations.

    streams      that lie one after the other in a row
    iterations   of columns and rows
    norm_eps     of the root mean square
    eps          added to weights that are read by, and to sums that are divided by
    name         that its parameters' local names begin with
    """

    hidden_size: int
    streams: int
    iterations: int
    norm_eps: float
    eps: float
    name: str

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: streams in f32, normed, mixed, and a product; the weights."""
        return 2 * (4 * self.streams * self.hidden_size + 4 * self._weights)

    @property
    def _weights(self) -> int:
        return self.streams * (self.streams + 2)

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + fn, base and scale in the checkpoint."""
        shape = self._weights, self.streams * self.hidden_size
        # VECTOR: its few numbers weigh whole streams, and it is small.
        return (
            ParamSpec(f"{self.name}fn", shape, (f"{at}fn",), Role.VECTOR),
            ParamSpec(f"{self.name}base", shape[:1], (f"{at}base",), Role.VECTOR),
            ParamSpec(f"{self.name}scale", (3,), (f"{at}scale",), Role.VECTOR),
        )

    def read(self, streams: Tensor, params: Params) -> tuple[Tensor, StreamMix]:
        """A sublayer's input [tokens, hidden_size] in streams.dtype, and what `write` needs.

        streams [tokens, streams * hidden_size]
        """
        count, own = self.streams, self.name
        products = _products(streams, params, f"{own}fn", self.norm_eps)
        weights, spread, mixed = ops.stream_mixes(
            products,
            params[f"{own}base"].data.float(),
            params[f"{own}scale"].data.float(),
            streams=count,
            iterations=self.iterations,
            eps=self.eps,
        )
        return ops.read_streams(streams, weights), StreamMix(spread, mixed)

    def write(self, streams: Tensor, out: Tensor, mix: StreamMix) -> Tensor:
        """The streams, mixed, and a sublayer's output [tokens, hidden_size] added to each.

        Computed in f32 and rounded once: [tokens, streams * hidden_size] in streams.dtype.
        """
        return ops.write_streams(streams, out, mix.spread, mix.mixed)


@dataclass(frozen=True, slots=True)
class HyperHead:
    """The sum of all streams, by weights that are made as those of a HyperConnection's input."""

    hidden_size: int
    streams: int
    norm_eps: float
    eps: float
    name: str

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + hc_fn, hc_base and hc_scale in the checkpoint."""
        shape = self.streams, self.streams * self.hidden_size
        return (
            ParamSpec(f"{self.name}fn", shape, (f"{at}hc_fn",), Role.VECTOR),
            ParamSpec(f"{self.name}base", shape[:1], (f"{at}hc_base",), Role.VECTOR),
            ParamSpec(f"{self.name}scale", (1,), (f"{at}hc_scale",), Role.VECTOR),
        )

    def __call__(self, streams: Tensor, params: Params) -> Tensor:
        """streams [tokens, streams * hidden_size] to [tokens, hidden_size], in streams.dtype."""
        own = self.name
        products = _products(streams, params, f"{own}fn", self.norm_eps)
        wanted = products * params[f"{own}scale"].data.float() + params[f"{own}base"].data.float()
        return ops.read_streams(streams, ops.sigmoid(wanted) + self.eps)


def _products(streams: Tensor, params: Params, name: str, eps: float) -> Tensor:
    """Matrix `name` times a token's streams, divided by their root mean square: f32."""
    rows = streams.float()
    ones = torch.ones(rows.shape[1], device=rows.device)
    return ops.linear(ops.rms_norm(rows, ones, eps), params[name])
