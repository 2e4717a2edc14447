"""The gated feed-forward network, dense, shared, or one expert."""

from dataclasses import dataclass

from torch import Tensor

from hmt.contracts.blocks import ParamSpec
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project, project_many


@dataclass(frozen=True, slots=True)
class GatedFFN:
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202).

    activation   "silu", "gelu" or "gelu_tanh"
    prefix       of local names, where a block holds other parameters of the same kind
    """

    hidden_size: int
    width: int
    activation: str
    bias: bool = False
    prefix: str = ""

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: input, gate, up and their product; output."""
        return 2 * self.hidden_size + 3 * self.width

    def params(
        self, at: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + `names` in the checkpoint for gate, up and down."""
        hidden, width = self.hidden_size, self.width
        gate, up, down = (at + name for name in names)
        return (
            *linear_params(f"{self.prefix}gate_proj", width, hidden, gate, bias=self.bias),
            *linear_params(f"{self.prefix}up_proj", width, hidden, up, bias=self.bias),
            *linear_params(f"{self.prefix}down_proj", hidden, width, down, bias=self.bias),
        )

    def __call__(self, x: Tensor, params: Params) -> Tensor:
        """x [tokens, hidden_size] to [tokens, hidden_size]."""
        names = (f"{self.prefix}gate_proj", f"{self.prefix}up_proj")
        hidden = ops.gated_pair(project_many(x, params, names), self.activation)
        return project(hidden, params, f"{self.prefix}down_proj")
