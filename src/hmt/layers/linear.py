"""Linear layers by name: what they need, and applying them."""

from collections.abc import Mapping

from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.sharding import RankShare
from hmt.kernels import ops

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


def project_share(x: Tensor, params: Params, name: str, share: RankShare) -> Tensor:
    """`project` where each rank has some columns of the weight, and x [tokens, these].

    All ranks have the bias: it is added once, to the sum (Megatron-LM, arXiv 1909.08053).
    """
    total = share.collective.add(ops.linear(x, params[name], None))
    bias = params.get(f"{name}_bias")
    return total if bias is None else total + bias.data.to(total.dtype)
