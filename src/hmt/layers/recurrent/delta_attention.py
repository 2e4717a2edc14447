"""The delta rule with a projection and a convolution for each of queries, keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hmt.contracts.blocks import ParamSpec, Role
from hmt.contracts.model import LayerState, StateTensor
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, StateRun
from hmt.kernels import ops
from hmt.layers.linear import Params, linear_params, project
from hmt.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """Kimi Delta Attention (arXiv 2510.26692), and OLMo's gated delta nets.

    norm          of hidden states, before they are projected
    conv          tokens that the convolutions see, the token itself included
    eps           of the norm of results
    activation    of gates, with which the normed results are multiplied: "silu" or "sigmoid"
    decay         what checkpoints call the projection to decays, or the two of `decay_rank`
    decay_rank    numbers between two projections to decays; 0: there is one
    gate_rank     the same of gates
    chain         what kernels need to know to compute the layer in one call
    scale_shape   of the decays' scales in checkpoints, one for each head
    """

    hidden_size: int
    heads: ops.DeltaHeads
    norm: RMSNorm
    conv: int
    eps: float
    activation: str
    decay: str
    decay_rank: int = 0
    gate_rank: int = 0
    scale_shape: tuple[int, ...] = ()
    out_norm: RMSNorm = field(init=False)
    chain: ops.DeltaChain = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_norm", RMSNorm(self.heads.value_dim, self.eps))
        object.__setattr__(self, "chain", self._chain())

    @property
    def state(self) -> LayerState:
        """What one layer keeps of a sequence."""
        heads = self.heads
        matrix = heads.heads, heads.key_dim, heads.value_dim
        return (
            StateTensor("matrix", matrix, inputs=heads.decays_width + heads.heads),
            StateTensor("conv", (self.conv - 1, heads.width), inputs=heads.width),
        )

    @property
    def activation_width(self) -> int:
        """Numbers alive per token: residual, input, what is projected, convolved and normed, out.

        And in f32 decays, and queries and keys of all heads with copies for their lengths.
        """
        heads = self.heads
        return (
            3 * self.hidden_size
            + 3 * heads.width
            + 4 * heads.values_width
            + 2 * heads.heads * heads.key_dim
            + 4 * heads.decays_width
            + 2 * heads.heads
        )

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """Parameters but for the norm, called `at` + q_proj and so on in the checkpoint."""
        hidden, heads = self.hidden_size, self.heads
        widths = (heads.keys_width, heads.keys_width, heads.values_width)
        inputs = [
            param
            for name, width in zip("qkv", widths, strict=True)
            for param in linear_params(f"{name}_proj", width, hidden, f"{at}{name}_proj")
        ]
        # Published as q_conv1d, k_conv1d and v_conv1d: hmt.formats joins them.
        conv = ParamSpec("conv", (heads.width, 1, self.conv), (f"{at}conv1d.weight",), Role.VECTOR)
        scales, one = self.scale_shape or (heads.heads,), (heads.heads, hidden)
        return (
            *inputs,
            *self._two("decays", self.decay, self.decay_rank, heads.decays_width, at),
            *self._two("gate", "g", self.gate_rank, heads.values_width, at),
            ParamSpec("rate", one, (f"{at}b_proj.weight",), Role.VECTOR),
            conv,
            ParamSpec("decay_scale", scales, (f"{at}A_log",), Role.VECTOR),
            ParamSpec("decay_bias", (heads.decays_width,), (f"{at}dt_bias",), Role.VECTOR),
            self.out_norm.param("out_norm", f"{at}o_norm.weight"),
            *linear_params("o_proj", hidden, heads.values_width, f"{at}o_proj"),
        )

    def _two(
        self, name: str, source: str, rank: int, outputs: int, at: str
    ) -> tuple[ParamSpec, ...]:
        """A projection, or the two that it is the product of.

        Those of decays that are small stay as they are: errors of decays grow with every token.
        """
        exact = Role.VECTOR if name == "decays" else Role.LINEAR
        hidden = self.hidden_size
        if rank:
            sources = (f"{at}{source}_a_proj.weight",), (f"{at}{source}_b_proj.weight",)
            return (
                ParamSpec(f"{name}_down", (rank, hidden), sources[0], exact),
                ParamSpec(name, (outputs, rank), sources[1], exact),
            )
        role = exact if outputs == self.heads.heads else Role.LINEAR
        return (ParamSpec(name, (outputs, hidden), (f"{at}{source}_proj.weight",), role),)

    def _chain(self) -> ops.DeltaChain:
        heads = self.heads
        decays = self.decay_rank or heads.decays_width
        gates = self.gate_rank or heads.values_width
        rest = heads.width + decays
        return ops.DeltaChain(
            heads,
            self.norm.options,
            (
                *("q_proj", "k_proj", "v_proj"),
                "decays_down" if self.decay_rank else "decays",
                "gate_down" if self.gate_rank else "gate",
                "rate",
            ),
            ((0, heads.width),),
            ((rest, gates),),
            ((rest + gates, heads.heads),),
            ((heads.width, decays),),
            self.out_norm.options,
            self.activation,
            "o_proj",
            through_gate="gate" if self.gate_rank else None,
            through_decay="decays" if self.decay_rank else None,
        )

    def __call__(
        self, hidden: Tensor, layer: int, step: Step, params: Params, kv: KVCache
    ) -> Tensor:
        """The layer's result for the norm of hidden [tokens, hidden_size], same shape.

        Advances the layer's state in `kv`.  The norm's weight is `norm` of `params`.
        """
        state = kv.state(layer, step)
        if not state.copies:
            added = ops.delta_layer(hidden, params, self.chain, state.tensors, state.runs)
            if added is not None:
                return added
        x = self.norm(hidden, params["norm"])

        def update(inputs: Sequence[Tensor], runs: Sequence[StateRun]) -> Tensor:
            qkv, decays, rate = inputs
            taps = params["conv"].data.squeeze(1)
            return ops.gated_delta_rule(
                ops.causal_conv(qkv, taps, state.tensors["conv"], runs),
                decays,
                rate,
                params["decay_scale"].data.flatten(),
                params["decay_bias"].data,
                state.tensors["matrix"],
                runs,
                self.heads,
            )

        qkv = ops.linear_many(x, params, ("q_proj", "k_proj", "v_proj"))
        decays, rate = _through(x, params, "decays"), project(x, params, "rate")
        out = state.advance((qkv, decays, rate), update)
        out = self.out_norm(out, params["out_norm"]).flatten(1)
        gate = _through(x, params, "gate")
        if self.activation == "sigmoid":
            return project(ops.sigmoid_gated(out, gate), params, "o_proj")
        return project(ops.gated(gate, out, self.activation), params, "o_proj")


def _through(x: Tensor, params: Params, name: str) -> Tensor:
    """Projection `name`, through the one before it if there is one."""
    before = f"{name}_down"
    return project(project(x, params, before) if before in params else x, params, name)
