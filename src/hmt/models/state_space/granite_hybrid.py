"""Granite 4: Mamba-2 or attention in each layer, then a network, or experts beside it."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockSpec, ParamSpec
from hmt.contracts.model import LayerState
from hmt.layers import (
    GatedFFN,
    Mamba2,
    NoRotary,
    Params,
    ResidualFFN,
    RMSNorm,
    SoftmaxRouter,
)
from hmt.models.config import (
    Config,
    activation,
    attention,
    check_experts,
    head_dim,
    layer_kinds,
    rotary,
)
from hmt.models.decoder import expert_block, ffn_block, router_block
from hmt.models.hybrid import Hybrid, caches_by_layer
from hmt.models.state_space.sizes import mamba2


class GraniteHybrid(Hybrid):
    """Any of its parts may be missing: Mamba-2, attention, rotary positions, experts.

    What a layer adds to the residual stream is multiplied with `residual_multiplier`.  Here the
    stream is divided by it instead, once, where it begins: every norm gives the same for a stream
    that is longer, with an eps that is longer, too.
    """

    recurrent: Mamba2
    router: SoftmaxRouter

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        factor = float(config.residual_multiplier)
        if not factor > 0 or not config.logits_scaling:
            raise CheckpointError(
                f"residual_multiplier is {factor} and logits_scaling {config.logits_scaling}; HMT "
                "computes this family with a positive one and one that is not 0"
            )
        hidden, turned = config.hidden_size, config.position_embedding_type == "rope"
        if turned:
            turning = rotary(config)
        else:
            config.rope_parameters = None
            turning = NoRotary(head_dim(config), config.max_position_embeddings)
        self.norm = RMSNorm(hidden, config.rms_norm_eps / factor**2)
        bias = config.attention_bias
        self.attention = attention(
            config,
            turning,
            norm=self.norm,
            scale=float(config.attention_multiplier),
            bias=bias,
            output_bias=bias,
        )
        kinds = layer_kinds(config, "full_attention", "linear_attention")
        self.attends = [kind == "full_attention" for kind in kinds]
        widths = [self.attention.activation_width]
        state: LayerState = ()
        if not all(self.attends):  # others have no sizes of state spaces
            self.recurrent = mamba2(config, self.norm, int(config.mamba_expand * hidden))
            state = self.recurrent.state
            widths.append(self.recurrent.activation_width)
        act = activation(config)
        self.shared = GatedFFN(hidden, config.shared_intermediate_size, act, prefix="shared_")
        self.ffn = ResidualFFN(GatedFFN(hidden, self.shared.width, act), self.norm)
        experts = config.num_local_experts
        self.sparse = [experts > 0] * len(kinds)
        widths.append(self.ffn.activation_width)
        if experts:
            check_experts(config, experts)
            self.router = SoftmaxRouter(hidden, experts, config.num_experts_per_tok, True)
            self.expert = GatedFFN(hidden, config.intermediate_size, act)
            widths.append(2 * hidden + self.shared.activation_width)
            widths.append(self.expert.activation_width)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            **caches_by_layer(self.attends, self.attention.kv, state),
            activation_width=max(widths),
            router=self.router if experts else None,
            embedding_factor=float(config.embedding_multiplier) / factor,
            logit_factor=1 / float(config.logits_scaling),
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield self.mixer_block(index, "mamba")
        norm = self.norm.param("norm", f"{at}post_attention_layernorm.weight")
        if not self.sparse[index]:
            yield ffn_block(index, norm, *_network(self.ffn.ffn, f"{at}shared_mlp."))
            return
        shared, at = _network(self.shared, f"{at}shared_mlp."), f"{at}block_sparse_moe."
        yield router_block(index, norm, *self.router.params(f"{at}router.layer"), *shared)
        for expert in range(self.router.experts):
            yield expert_block(index, expert, *_network(self.expert, at, expert))

    @override
    def shared_expert(self, x: Tensor, params: Params) -> Tensor:
        return self.shared(x, params)


def _network(ffn: GatedFFN, at: str, number: int = 0) -> tuple[ParamSpec, ...]:
    """Parameters of network `number` of those that lie one after the other.

    Of each the gate's rows lie before those of `up`.
    """
    first = 2 * number * ffn.width
    rows = {
        "gate_proj": (f"{at}input_linear.weight", ffn.width, ffn.hidden_size, first),
        "up_proj": (f"{at}input_linear.weight", ffn.width, ffn.hidden_size, first + ffn.width),
        "down_proj": (
            f"{at}output_linear.weight", ffn.hidden_size, ffn.width, number * ffn.hidden_size,
        ),
    }  # fmt: skip
    return tuple(
        ParamSpec(f"{ffn.prefix}{name}", (count, width), (source,), rows=(start, start + count))
        for name, (source, count, width, start) in rows.items()
    )
