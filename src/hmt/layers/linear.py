"""Linear layers by name: what they need, and applying them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.encoding import WeightTensor
from hmt.kernels import ops

# The compiled kernels put more f32 tokens into the lanes of a register, and add in another order.
_ALIKE_TOKENS = 12

Params = Mapping[str, WeightTensor]  # a leased block's parameters, by local name


def linear_params(
    name: str, outputs: int, inputs: int, at: str, *, bias: bool = False
) -> tuple[ParamSpec, ...]:
    """Parameters of a linear layer: `at`.weight [outputs, inputs] and, if it has one, its bias."""
    weight = ParamSpec(name, (outputs, inputs), (f"{at}.weight",))
    if not bias:
        return (weight,)
    return (weight, ParamSpec(f"{name}_bias", (outputs,), (f"{at}.bias",), Role.VECTOR))


def project(x: Tensor, params: Params, name: str) -> Tensor:
    """Linear layer `name` of a block, with its bias if any: [tokens, in] to [tokens, out]."""
    bias = params.get(f"{name}_bias")
    return ops.linear(x, params[name], None if bias is None else bias.data)


def linear_alike(x: Tensor, weight: WeightTensor) -> Tensor:
    """`ops.linear` of x f32 [tokens, in], so that no token's bits depend on how many there are.

    For narrow matrices whose results are not rounded to 16 bits, which would hide the difference.
    """
    if len(x) <= _ALIKE_TOKENS:
        return ops.linear(x, weight)
    return torch.cat([ops.linear(part, weight) for part in x.split(_ALIKE_TOKENS)])
