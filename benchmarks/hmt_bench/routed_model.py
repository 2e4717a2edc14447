"""A mixture of experts with random weights whose routers follow a trace, in any engine.

Random routers choose nearly evenly, and no cache helps.  Here each token carries its own routing:

- The first `steps` numbers of the residual stream are a place for one token each.  The embedding of
  token `FIRST_TOKEN + t` has one large number there, at t; nothing that layers add reaches these
  places, because the rows of `o_proj` and `down_proj` that write to them are zero.
- Column t of a layer's router has large numbers at the experts of step t of the trace, in that
  layer, and zeros elsewhere, so the token is routed there in every layer, whatever the rest does.
- The output layer sees the same number and makes token t + 1 the likeliest, after the last one the
  first, so greedy decoding walks through the trace by itself, again and again.

Nothing of this is known to the engine that runs it, so others can be compared on the same file.  A
router that is asked a layer early answers rightly here, always: measure guesses on another model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hmt.base.errors import ConfigError
from hmt.engine.experts.trace import Routed
from hmt.profiling.random_model import Noise, Shape, normal_noise, write_random_model

FIRST_TOKEN = 16  # behind the special tokens
_EMBEDDED = 32.0  # so large that the norm of a layer's input leaves it the largest
_CHOSEN = (1.0, 0.04)  # of a router: for the first expert, and less for each one after it
_FOLLOWS = 8.0

# Step, layer of the model: its experts, the likeliest first.
_Choices = Mapping[tuple[int, int], list[int]]


def write_routed_model(
    folder: Path,
    shape: Shape,
    trace: Sequence[Routed],
    *,
    noise: Noise = normal_noise,
    seed: int = 0,
) -> int:
    """`write_random_model` of `shape`, routed like `trace`; returns its bytes.

    The trace has steps of one token with `shape.experts_per_token` experts in at least
    `shape.layers` layers, of which the first count.  Decode greedily from token FIRST_TOKEN to
    follow it from its first step.  Raises ConfigError for a trace that does not fit.
    """
    choices = _choices(shape, trace)
    steps = 1 + max(step for step, _ in choices)

    def edit(name: str, matrix: torch.Tensor) -> None:
        cycle = range(FIRST_TOKEN, FIRST_TOKEN + steps)
        if name == "model.embed_tokens.weight":
            matrix[:, :steps] = 0
            matrix[cycle, range(steps)] = _EMBEDDED
        elif name == "lm_head.weight":
            matrix[:, :steps] = 0
            matrix[[*cycle[1:], FIRST_TOKEN], range(steps)] = _FOLLOWS
        elif name.endswith("mlp.gate.weight"):
            matrix.zero_()
            layer = int(name.split(".")[2])
            best, less = _CHOSEN
            for step in range(steps):
                for rank, expert in enumerate(choices[step, layer]):
                    matrix[expert, step] = best - less * rank
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            matrix[:steps] = 0

    return write_random_model(folder, shape, noise=noise, seed=seed, edit=edit)


def _choices(shape: Shape, trace: Sequence[Routed]) -> _Choices:
    layers = sorted({record.layer for record in trace})[: shape.layers]
    first = min((record.step for record in trace), default=0)
    choices = {
        (record.step - first, layers.index(record.layer)): record.experts[0]
        for record in trace
        if record.layer in layers
    }
    steps = len({step for step, _ in choices})
    most = shape.hidden_size // 2
    chosen = shape.experts_per_token
    sound = (
        all(len(record.experts) == 1 for record in trace)
        and all(len(set(own)) == chosen and max(own) < shape.experts for own in choices.values())
        and len(choices) == steps * shape.layers
    )
    if not sound or not 0 < steps <= most:
        raise ConfigError(
            f"a trace of {steps} steps in {len(layers)} layers cannot route a model of "
            f"{shape.layers} layers with {shape.experts} experts, {chosen} per token: it needs "
            f"whole steps of one token, {most} of them at most (half of the hidden size)"
        )
    return choices
