"""The gated feed-forward network, dense, shared, or one expert."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hmt.contracts.blocks import ParamSpec
from hmt.contracts.sharding import RankShare
from hmt.contracts.store import HostFeedForward
from hmt.kernels import fused_ops, ops
from hmt.layers.linear import Params, linear_params, project, project_share
from hmt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class GatedFFN:
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202).

    activation   "silu", "gelu", "gelu_tanh", "relu", gpt-oss' "clamped_swish", or DeepSeek-V4's
                 "clamped_silu"
    prefix       of local names, where a block holds other parameters of the same kind
    own_gate     Otherwise up is the gate as well: with "relu" that is the square of relu(up(x)).
    share        of the rank that has this width of a dense network, or that has some of the routed
                 experts; None: this process has all
    """

    hidden_size: int
    width: int
    activation: str
    bias: bool = False
    prefix: str = ""
    own_gate: bool = True
    share: RankShare | None = None

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
        own = linear_params(f"{self.prefix}gate_proj", width, hidden, gate, bias=self.bias)
        return (
            *(own if self.own_gate else ()),
            *linear_params(f"{self.prefix}up_proj", width, hidden, up, bias=self.bias),
            *linear_params(f"{self.prefix}down_proj", hidden, width, down, bias=self.bias),
        )

    def __call__(self, x: Tensor, params: Params) -> Tensor:
        """x [tokens, hidden_size] to [tokens, hidden_size]."""
        return project(self.inner(x, params), params, f"{self.prefix}down_proj")

    def inner(self, x: Tensor, params: Params) -> Tensor:
        """What `down` multiplies, of x [tokens, hidden_size]: [tokens, width]."""
        names = (f"{self.prefix}gate_proj", f"{self.prefix}up_proj")
        if self.own_gate:
            return fused_ops.linear_gated(x, params, names, self.activation)
        up = project(x, params, names[1])
        return ops.gated(up, up, self.activation)

    def where_it_lies(self, x: Tensor, params: Params) -> Tensor:
        """The same, computed on the device that has the parameters, which may be another than x's.

        As one expert that all tokens go to.
        """
        assert not self.prefix
        every = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
        scales = torch.ones(len(x), 1, device=x.device)
        return ops.experts(x, [(0, params)], every, scales, self.activation)


@dataclass(frozen=True, slots=True)
class ResidualFFN:
    """A dense layer's second half: a norm, the network, and their result added to what came in.

    pre_norm    the network's input is normed
    post_norm   the network's result is normed, before it is added (Gemma)
    factors     what the gate is multiplied with before its activation, and the network's result
    layer       what kernels need to know of all this
    """

    ffn: GatedFFN
    norm: RMSNorm
    post_norm: bool = False
    pre_norm: bool = True
    factors: tuple[float, float] = (1.0, 1.0)
    layer: ops.FeedForward = field(init=False)

    def __post_init__(self) -> None:
        assert not self.ffn.prefix
        norm = self.norm.options
        post_norm = norm if self.post_norm else None
        pre_norm = norm if self.pre_norm else None
        layer = ops.FeedForward(self.ffn.activation, pre_norm, post_norm, *self.factors)
        object.__setattr__(self, "layer", layer)

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: those of the network, and what is added."""
        return self.ffn.hidden_size + self.ffn.activation_width

    def __call__(self, hidden: Tensor, x: Tensor | None, params: Params) -> Tensor:
        """hidden += x; hidden += ffn(norm(hidden)).  Both [tokens, hidden_size]; hidden changes.

        Weights of the norms are `norm` and `post_norm` of `params`.  Returns hidden.
        """
        if self.ffn.share is not None:
            return self._add_share(hidden, x, params, self.ffn.share)
        if isinstance(params, HostFeedForward):
            params.compute(hidden, x, self.layer)
        else:
            ops.feed_forward(hidden, x, params, self.layer)
        return hidden

    def _add_share(
        self, hidden: Tensor, x: Tensor | None, params: Params, share: RankShare
    ) -> Tensor:
        """The same where each rank has a part of the network's width."""
        assert self.factors == (1.0, 1.0)
        if not self.pre_norm:
            normed = hidden if x is None else hidden.add_(x)
        elif x is None:
            normed = self.norm(hidden, params["norm"])
        else:
            normed = self.norm.add(hidden, x, params["norm"])
        out = project_share(self.ffn.inner(normed, params), params, "down_proj", share)
        hidden += self.norm(out, params["post_norm"]) if self.post_norm else out
        return hidden
