"""A recorded trace, for a model with more experts and layers than the one that it came from."""

from collections.abc import Sequence
from pathlib import Path

from hmt.base.errors import ConfigError
from hmt.engine.experts.trace import Routed, TraceFile
from hmt.profiling.random_model import Shape

_Steps = list[dict[int, list[int]]]  # by step: by layer the experts of a token, the likeliest first


def widened_trace(files: Sequence[Path], shape: Shape) -> list[Routed]:
    """Steps of one token for all layers of `shape`, put together from recorded ones.

    A layer's experts are those of several recorded layers side by side, and each of these gives
    its likeliest ones: 128 experts, 8 of them chosen, are four layers of 32 that give two each.  So
    experts stay popular as long, and come together as often, as they did in the recording.  Layers
    take turns with the files, and where a file comes again it begins at another step.

    All files have the same experts, and steps of one token.  Raises ConfigError where they cannot
    be put together, or are no traces.
    """
    texts = [_steps(file) for file in files]
    recorded = TraceFile(files[0]).header
    pieces, rest = divmod(shape.experts, recorded.experts)
    each, uneven = divmod(shape.experts_per_token, pieces or 1)
    if rest or uneven or not 0 < each <= recorded.top_k:
        raise ConfigError(
            f"{files[0]} has {recorded.experts} experts, {recorded.top_k} per token: "
            f"{shape.experts} with {shape.experts_per_token} per token cannot be put together "
            "from them"
        )
    steps = min(map(len, texts), default=0)
    again = -(-shape.layers // len(texts))
    trace = []
    for step in range(steps):
        for layer in range(shape.layers):
            text = texts[layer % len(texts)]
            routed = text[(step + layer // len(texts) * steps // again) % steps]
            chosen = [
                piece * recorded.experts + expert
                for rank in range(each)
                for piece in range(pieces)
                for expert in [_cyclic(routed, layer + piece)[rank]]
            ]
            scales = [1 / len(chosen)] * len(chosen)
            trace.append(Routed(step, layer, [chosen], [scales]))
    return trace


def _cyclic(routed: dict[int, list[int]], number: int) -> list[int]:
    layers = sorted(routed)
    return routed[layers[number % len(layers)]]


def _steps(file: Path) -> _Steps:
    steps: dict[int, dict[int, list[int]]] = {}
    for record in TraceFile(file):
        if len(record.experts) != 1:
            raise ConfigError(f"{file}: step {record.step} has {len(record.experts)} tokens, not 1")
        ranked = sorted(zip(record.scales[0], record.experts[0], strict=True), reverse=True)
        steps.setdefault(record.step, {})[record.layer] = [expert for _, expert in ranked]
    layers = max(map(len, steps.values()), default=0)
    return [routed for _, routed in sorted(steps.items()) if len(routed) == layers]
