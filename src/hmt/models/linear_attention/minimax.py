"""MiniMax-01: lightning attention in most layers, attention in the others, few large experts.

arXiv 2501.08313.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import (
    LightningAttention,
    Rotary,
    SoftmaxRouter,
    lightning_decays,
    request_experts,
    routed_experts,
)
from hmt.models.config import (
    Config,
    attention,
    check_experts,
    gated_ffn,
    head_dim,
    layer_kinds,
    norm,
    require,
    rotary,
)
from hmt.models.decoder import Decoder, attention_block, expert_block, router_block
from hmt.models.hybrid import caches_by_layer

_CONSTANTS = r"\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$"


class MiniMax(Decoder):
    """Norms are on the residual stream: what goes on beside a sublayer is normed as its input is.

    The sum of both has two factors.
    """

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        require(config, "sliding_window", None)
        require(config, "postnorm", True)
        require(config, "shared_intermediate_size", 0)
        self.norm = norm(config)
        self.attention = attention(config, _rotary(config))
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        self.lightning = LightningAttention(
            config.hidden_size, heads, head_dim(config), lightning_decays(layers, heads)
        )
        kinds = layer_kinds(config, "full_attention", "linear_attention")
        self.attends = [kind == "full_attention" for kind in kinds]
        linear = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
        full = config.full_attn_alpha_factor, config.full_attn_beta_factor
        self.mixed = [full if attends else linear for attends in self.attends]
        self.added = config.mlp_alpha_factor, config.mlp_beta_factor
        check_experts(config, config.num_local_experts)
        self.router = SoftmaxRouter(
            config.hidden_size,
            config.num_local_experts,
            config.num_experts_per_tok,
            renormalise=True,
        )
        self.expert = gated_ffn(config)
        parts = (self.attention, self.lightning, self.expert)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            **caches_by_layer(self.attends, self.attention.kv, self.lightning.state),
            activation_width=3 * config.hidden_size + max(part.activation_width for part in parts),
            router=self.router,
            ignored=(_CONSTANTS,),
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        mixer = self.attention if self.attends[index] else self.lightning
        own = self.norm.param("norm", f"{at}input_layernorm.weight")
        yield attention_block(index, own, *mixer.params(f"{at}self_attn."))
        own = self.norm.param("norm", f"{at}post_attention_layernorm.weight")
        at = f"{at}block_sparse_moe."
        yield router_block(index, own, *self.router.params(f"{at}gate"))
        for expert in range(self.router.experts):
            params = self.expert.params(f"{at}experts.{expert}.", ("w1", "w3", "w2"))
            yield expert_block(index, expert, *params)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            normed = self.norm(hidden, params["norm"])
            if self.attends[index]:
                x = self.attention(hidden, index, step, params, kv)
            else:
                x = self.lightning(normed, index, step, params, kv)
        kept, taken = self.mixed[index]
        hidden = normed * kept + x * taken
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            normed = self.norm(hidden, params["norm"])
            routing = self.router(normed, params)
        request_experts(normed, routing, hidden, index, self.expert, weights)
        kept, taken = self.added
        return normed * kept + routed_experts(normed, routing, index, self.expert, weights) * taken


def _rotary(config: Config) -> Rotary:
    """Of the first `rotary_dim` numbers of a head, where a configuration has that field.

    MiniMax' own code reads it; transformers does not, and turns whole heads.
    """
    turned = getattr(config, "rotary_dim", None)
    if turned in (None, head_dim(config)):
        return rotary(config)
    if not isinstance(turned, int) or not 0 < turned < head_dim(config) or turned % 2:
        raise CheckpointError(
            f"rotary_dim is {turned!r}; it must be an even number of the {head_dim(config)} "
            "numbers of a head"
        )
    parameters = {**config.rope_parameters, "partial_rotary_factor": turned / head_dim(config)}
    return Rotary(head_dim(config), parameters, config.max_position_embeddings)
