"""Lightning attention: linear attention whose state decays by the same factor at each token."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec
from hmt.contracts.model import LayerState, StateTensor
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, StateRun
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """Linear attention with a constant decay for each head (arXiv 2401.04658, 2501.08313).

    decays   what is left of a layer's state after a token: f32 [layers, heads]
    eps      of the norm of results, those of all heads as one row
    """

    hidden_size: int
    heads: int
    head_dim: int
    decays: Tensor
    eps: float = 1e-6
    _kept: dict[torch.device, Tensor] = field(default_factory=dict)

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence."""
        heads, dim = self.heads, self.head_dim
        return (StateTensor("matrix", (heads, dim, dim), inputs=3 * heads * dim),)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual, input, what is projected, its activation in f32, out.

        And decays in f32.
        """
        width = self.heads * self.head_dim
        return 3 * self.hidden_size + 15 * width + 2 * self.heads

    @property
    def _norm(self) -> RMSNorm:
        return RMSNorm(self.heads * self.head_dim, self.eps)

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters, called `at` + qkv_proj and so on in the checkpoint."""
        hidden, width = self.hidden_size, self.heads * self.head_dim
        return (
            *linear_params("qkv_proj", 3 * width, hidden, f"{at}qkv_proj"),
            *linear_params("gate", width, hidden, f"{at}output_gate"),
            self._norm.param("out_norm", f"{at}norm.weight"),
            *linear_params("out_proj", hidden, width, f"{at}out_proj"),
        )

    def __call__(self, x: Tensor, layer: int, step: Step, params: Params, kv: KVCache) -> Tensor:
        """x [tokens, hidden_size] to [tokens, hidden_size].  Advances the layer's state in `kv`."""
        projected = project(x, params, "qkv_proj")
        activated = (projected.float() * ops.sigmoid(projected)).to(x.dtype)
        state = kv.state(layer, step)
        decays, matrices = self._decays_on(x.device)[layer], state.tensors["matrix"]

        def update(inputs: Sequence[Tensor], runs: Sequence[StateRun]) -> Tensor:
            heads = inputs[0].unflatten(1, (self.heads, -1))
            query, key, value = heads.split(self.head_dim, dim=2)
            decay = decays.expand(len(heads), -1)
            return ops.state_space_scan(value, key, query, decay, None, None, matrices, runs)

        out = state.advance((activated,), update)
        out = self._norm(out.flatten(1), params["out_norm"])
        return project(ops.sigmoid_gated(out, project(x, params, "gate")), params, "out_proj")

    def _decays_on(self, device: torch.device) -> Tensor:
        """Kept on each device: captured steps read them there."""
        if device not in self._kept:
            self._kept[device] = self.decays.to(device)
        return self._kept[device]


def lightning_decays(layers: int, heads: int) -> Tensor:
    """What is left of each head's state after a token: f32 [layers, heads].

    ALiBi's slopes (arXiv 2108.12409), smaller with every layer, are negative logarithms of these.
    """
    slopes = (1 / 2 ** (8 / heads)) ** (torch.arange(heads) + 1)
    factors = [1 - layer / (layers - 1 + 1e-5) + 1e-5 for layer in range(layers)]
    return torch.stack([torch.exp(-slopes * factor) for factor in factors])
