"""Mixture of experts in plain torch: one expert after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels.reference.elementwise import gated
from hmt.kernels.reference.matmul import linear

# An expert's number, and its gate_proj, up_proj and down_proj, each with a `_bias` or without.
# Where there is no gate_proj, up_proj is the gate as well: relu(u) u is the square of relu(u).
Expert = tuple[int, Mapping[str, WeightTensor]]


def matrix_name(params: Mapping[str, WeightTensor], name: str) -> str:
    """The name of an expert's matrix `name` among its parameters."""
    return "up_proj" if name == "gate_proj" and name not in params else name


class _Reference:
    """The operations that these are made of."""

    linear = staticmethod(linear)
    gated = staticmethod(gated)


def experts(
    x: Tensor,
    given: Sequence[Expert],
    chosen: Tensor,
    scales: Tensor,
    activation: str,
    total: Tensor | None = None,
    *,
    last: bool = True,
    kernels: Any = _Reference,
) -> Tensor:
    """Outputs of the experts in `given` for x [tokens, in], scaled and added up by token.

    An expert is down(activation(gate(x)) * up(x)), each step rounded to x.dtype.  `chosen` int64
    and `scales` f32, both [tokens, top_k], say which experts a token goes to, none twice, and what
    their outputs are multiplied with; experts that are not given here count for nothing.

    The sum is kept in f32 and starts at `total` f32 [tokens, out], which is changed, or at zero.
    Returns it, in x.dtype if this is the `last` call for it.  Experts are added in the order
    given; when that is ascending, through all calls, the result does not depend on how they are
    spread over calls.
    """
    if total is None:
        width = given[0][1]["down_proj"].shape[0] if given else x.shape[1]
        total = torch.zeros(x.shape[0], width, dtype=torch.float32, device=x.device)

    def project(values: Tensor, params: Mapping[str, WeightTensor], name: str) -> Tensor:
        name = matrix_name(params, name)
        bias = params.get(f"{name}_bias")
        out: Tensor = kernels.linear(values, params[name], None if bias is None else bias.data)
        return out

    for index, params in given:
        tokens, places = torch.where(chosen == index)
        if len(tokens) == 0:
            continue
        rows = x[tokens]
        product = kernels.gated(
            project(rows, params, "gate_proj"), project(rows, params, "up_proj"), activation
        )
        out = project(product, params, "down_proj")
        total[tokens] += out.float() * scales[tokens, places, None]
    return total.to(x.dtype) if last else total


def scattered_experts(given: Sequence[Expert], where: torch.device) -> Callable[..., Tensor]:
    """What computes experts 0, 1, .. on the device `where`, of which each part lies anywhere.

    Takes x [tokens, hidden], chosen, scales and the activation, and gives [tokens, hidden] in
    x.dtype.
    Raises ValueError where no kernel computes on them.
    """

    def compute(x: Tensor, chosen: Tensor, scales: Tensor, activation: str) -> Tensor:
        return experts(x, given, chosen, scales, activation)

    return compute


def block_table(addresses: Tensor, sample: Mapping[str, WeightTensor], base: int) -> Any:
    """What kernels read experts by that lie at `addresses`, laid out as `sample` is at `base`.

    None: plain torch takes each expert's parameters.
    """
    return None
