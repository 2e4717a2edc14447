"""Routers with random weights that choose experts as often as a recorded trace says."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hmt.kernels import ops
from hmt.profiling.random_model import Shape
from hmt_bench.random_deepseek import DeepSeekShape
from hmt_bench.widened_trace import widened_trace

_SAMPLES = 2048
_ROUNDS = 60
_RATE = 0.08  # of the difference of logarithms, in units of a sigmoid
_MOST = 1.0  # a sigmoid is never larger: with such a bias an expert is always chosen


def recorded_frequencies(files: Sequence[Path], shape: DeepSeekShape) -> Tensor:
    """How often each expert was chosen: [layers with experts, experts], each row adds up to top_k.

    Raises ConfigError for files that are no traces, or of which none can be put together.
    """
    layers = shape.layers - shape.dense_layers
    same = Shape(layers=layers, experts=shape.experts, experts_per_token=shape.experts_per_token)
    found = torch.zeros(layers, shape.experts)
    for routed in widened_trace(files, same):
        found[routed.layer, routed.experts[0]] += 1
    return found * shape.experts_per_token / found.sum(1, keepdim=True)


def router_biases(wanted: Tensor, shape: DeepSeekShape, deviation: float, seed: int = 0) -> Tensor:
    """Biases f32 [layers, experts] with which a DeepSeek-V3 router chooses as often as `wanted`.

    Found by trying, on random logits of that standard deviation; too frequent experts lose, as in
    the training that such biases come from (arXiv 2412.19437, section 2.1.2).
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(_SAMPLES, shape.experts, generator=generator) * deviation
    biases = torch.zeros_like(wanted)
    least = 1 / _SAMPLES
    for layer, target in enumerate(wanted):
        bias = biases[layer]
        for _ in range(_ROUNDS):
            chosen, _ = ops.biased_sigmoid_topk(
                logits,
                bias,
                shape.experts_per_token,
                groups=shape.groups,
                kept_groups=shape.kept_groups,
                renormalise=True,
                scale=1.0,
            )
            found = torch.bincount(chosen.flatten(), minlength=shape.experts) / _SAMPLES
            bias += _RATE * ((target + least).log() - (found + least).log())
            bias.clamp_(-_MOST, _MOST)
    return biases
