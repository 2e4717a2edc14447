"""A trace of experts that nobody recorded: routing as skewed as published measurements say.

Qwen3-30B (128 experts, 8 per token) was seen to find 37% of its experts in a least-recently-used
cache of 6% of them, 74% in 19%, 89% in 38% and 96% in 64% (github.com/kekzl/imp, issue 1374); a
model with 512 experts 81% in 25% (github.com/ggml-org/llama.cpp, pull request 27861).  Each expert
of each layer has a score, the sum of three parts, and the highest go:

    what it always has         normal, deviation 0.7: some experts are popular
    what the context gives it  normal, deviation 2.05, forgotten with a time of 200 tokens: drift
    what the token gives it    Gumbel, so that without the others all choices are equally likely

The deviations were fitted to the figures above; these traces are within two points of them.
"""

from collections.abc import Sequence
from math import exp, sqrt

import numpy as np

from hmt.engine.experts.trace import Routed, TraceHeader

_ALWAYS, _CONTEXT, _MEMORY = 0.7, 2.05, 200.0


def synthetic_trace(
    steps: int,
    *,
    layers: Sequence[int] = range(8),
    experts: int = 128,
    top_k: int = 8,
    block_bytes: int = 2_359_296,
    seed: int = 0,
) -> tuple[TraceHeader, list[Routed]]:
    """Steps of one token each; the same for the same arguments.

    The default block has the bytes of an expert of Qwen3-30B at 4 bits.  Scales are the softmax of
    the chosen scores; nothing is predicted.
    """
    rng = np.random.default_rng(seed)
    shape = (len(layers), experts)
    always = _ALWAYS * rng.standard_normal(shape)
    context = rng.standard_normal(shape)
    kept = exp(-1.0 / _MEMORY)
    trace = []
    for step in range(steps):
        context = kept * context + sqrt(1.0 - kept * kept) * rng.standard_normal(shape)
        scores = always + _CONTEXT * context + rng.gumbel(size=shape)
        for layer, own in zip(layers, scores, strict=True):
            chosen = np.argsort(-own)[:top_k]
            weights = np.exp(own[chosen] - own[chosen[0]])
            scales = (weights / weights.sum()).round(3)
            trace.append(Routed(step, layer, [chosen.tolist()], [scales.tolist()]))
    sizes = {layer: (block_bytes,) * experts for layer in layers}
    return TraceHeader("synthetic", experts, top_k, sizes), trace
