"""What weights take a GPU, as layers multiply with them: by encoding and the number of tokens.

A layer's products follow each other in few launches, each with its norm, its gate, or its sum, and
matrices of one shape are not read as fast as those of another.  So layers are timed, and not one
matrix: one as wide as those of models with 8 billion parameters, and a narrow one.  What the
narrow one takes, the wide one takes besides its weights.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from hmt.base.units import round_up
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.engine.product_rates import ProductRates
from hmt.kernels import ops
from hmt.memory import PAGE_BYTES
from hmt.quant import Format, component_bytes, view_weight

# Hidden states, queries, keys and values each, and what is between gate and down.
WIDE, NARROW = (4096, 4096, 1024, 14336), (512, 512, 256, 1024)
HEAD_DIM = 128
_MOST_LAYERS = 8
_ALIGNMENT = 64
_LEAST_SHARE = 0.5  # of the wide layer's time is its weights', whatever chance says
_EPSILON = 1e-6

Layer = dict[str, WeightTensor]


def layer_rates(
    memory: Tensor,
    forms: Sequence[Format],
    tokens: Sequence[int],
    seconds: float,
    timed: Callable[[Callable[[int], object], int, float], float],
    *,
    wide: tuple[int, int, int, int] | None = None,
) -> ProductRates:
    """Rates of layers' products with weights in `memory`, uint8, of any bytes.

    timed(call, count, seconds)   seconds of one of `count` calls in turn
    wide                          sizes of the wide layer; None: WIDE
    """
    wide = wide or WIDE
    found, each_s = ProductRates(), seconds / (1 + len(tokens)) / 2
    for form in forms:
        large, small = (layers_in(memory, form, sizes) for sizes in (wide, NARROW))
        nbytes, numbers = ((f(large[0]) - f(small[0])) for f in (_bytes, _numbers))
        for count in (1, *tokens):
            wide_s, narrow_s = (
                timed(_calls(layers, sizes, count, memory.device), len(layers), each_s)
                for layers, sizes in ((large, wide), (small, NARROW))
            )
            taken_s = max(wide_s - narrow_s, _LEAST_SHARE * wide_s)
            if count == 1:
                found.bytes_per_s[form.kernel] = nbytes / taken_s
            else:
                name = form.kernel if count == max(tokens) else f"{form.kernel}@{count}"
                found.operations_per_s[name] = 2 * count * numbers / taken_s
    return found


def layers_in(memory: Tensor, form: Format, sizes: tuple[int, int, int, int]) -> list[Layer]:
    """As many layers as fit, but no more than are needed for none to be in a cache."""
    shapes = _shapes(sizes)
    norm_bytes = round_up(2 * sizes[0], _ALIGNMENT)
    parts = {name: component_bytes(form, shape) for name, shape in shapes.items()}
    each = 2 * norm_bytes + sum(round_up(n, _ALIGNMENT) for part in parts.values() for n in part)
    step = round_up(each, PAGE_BYTES)
    layers = []
    for begin in range(0, memory.nbytes - step + 1, step)[:_MOST_LAYERS]:
        at, layer = begin, {}
        for name, shape in shapes.items():
            ends = list(accumulate(round_up(n, _ALIGNMENT) for n in parts[name]))
            starts = [at, *(at + end for end in ends)]
            buffers = [memory[s : s + n] for s, n in zip(starts, parts[name], strict=False)]
            layer[name] = view_weight(form, shape, *buffers)
            at = starts[-1]
        by = memory[at : at + 2 * sizes[0]].view(torch.bfloat16)
        layer["norm"] = WeightTensor(Encoding.BF16, (sizes[0],), data=by)
        layers.append(layer)
    return layers


def _shapes(sizes: tuple[int, int, int, int]) -> dict[str, tuple[int, int]]:
    hidden, query, kv, between = sizes
    return {
        "q_proj": (query, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (between, hidden),
        "up_proj": (between, hidden),
        "down_proj": (hidden, between),
    }


def _bytes(layer: Layer) -> int:
    return sum(weight.nbytes for name, weight in layer.items() if name != "norm")


def _numbers(layer: Layer) -> int:
    return sum(prod(weight.shape) for name, weight in layer.items() if name != "norm")


def _calls(
    layers: list[Layer], sizes: tuple[int, int, int, int], tokens: int, where: torch.device
) -> Callable[[int], object]:
    """What computes a layer but for its attention."""
    hidden, query, kv, _ = sizes
    norm = ops.NormOptions(_EPSILON)
    inputs = ops.AttentionInputs(query // HEAD_DIM, kv // HEAD_DIM, HEAD_DIM, norm)
    network = ops.FeedForward("silu", norm)
    states = torch.ones(tokens, hidden, dtype=torch.bfloat16, device=where)
    cos, sin = (torch.ones(tokens, HEAD_DIM, device=where) for _ in "ab")

    def compute(number: int) -> object:
        params = layers[number]
        heads = ops.attention_inputs(states, params, inputs, cos, sin)
        x = ops.linear(heads.flatten(1)[:, :query], params["o_proj"])
        ops.feed_forward(states, x, params, network)
        return states

    return compute
