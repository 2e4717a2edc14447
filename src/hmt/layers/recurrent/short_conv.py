"""A short convolution over time between two gates, in the place of attention (LFM2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import LayerState, StateTensor
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, StateRun
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class ShortConv:
    """out(c * conv(b * x)), where b, c and x are projected from a token (arXiv 2511.23404).

    norm   of hidden states, before they are projected
    taps   tokens that the convolution sees, the token itself included
    """

    hidden_size: int
    norm: RMSNorm
    taps: int

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence."""
        shape = self.taps - 1, self.hidden_size
        return (StateTensor("conv", shape, inputs=self.hidden_size),)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual, input, b, c, x and their product, convolved, gated."""
        return 8 * self.hidden_size

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm, called `at` + in_proj and so on in the checkpoint."""
        hidden = self.hidden_size
        return (
            *linear_params("in_proj", 3 * hidden, hidden, f"{at}in_proj"),
            ParamSpec("conv", (hidden, 1, self.taps), (f"{at}conv.weight",), Role.VECTOR),
            *linear_params("out_proj", hidden, hidden, f"{at}out_proj"),
        )

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """The layer's result for the norm of hidden [tokens, hidden_size], same shape.

        Advances the layer's state in `kv`.  The norm's weight is `norm` of `params`.
        """
        before, after, x = project(self.norm(hidden, params["norm"]), params, "in_proj").chunk(3, 1)
        state = kv.state(layer, step)
        weight, tails = params["conv"].data.squeeze(1), state.tensors["conv"]

        def update(inputs: Sequence[Tensor], runs: Sequence[StateRun]) -> Tensor:
            return ops.causal_conv(inputs[0], weight, tails, runs, gated=False)

        x = state.advance((before * x,), update)
        return project(after * x, params, "out_proj")
