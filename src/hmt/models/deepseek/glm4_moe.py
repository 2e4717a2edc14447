"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): DeepSeek-V3's experts behind grouped queries."""

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import ParamSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache
from hmt.layers import Params, RMSNorm
from hmt.models.config import (
    Config,
    attention,
    expert_ffn,
    gated_ffn,
    head_dim,
    norm,
    require,
    residual_ffn,
    rotary,
)
from hmt.models.deepseek.dense import (
    LatentDecoder,
    biased_router,
    prediction_layers,
    sparse_layers,
)


class Glm4Moe(LatentDecoder):
    """Half of each head turns; heads of queries and keys may be normed."""

    divides = ("heads", "width", "experts")

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "scoring_func", "sigmoid")
        self.norm = norm(config)
        self.grouped = attention(
            config,
            rotary(config),
            bias=config.attention_bias,
            head_norm=RMSNorm(head_dim(config), config.rms_norm_eps)
            if config.use_qk_norm
            else None,
        )
        self.ffn = residual_ffn(config)
        self.router = biased_router(config)
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared = gated_ffn(config, width, prefix="shared_")
        self.expert = expert_ffn(config, config.moe_intermediate_size)
        self.sparse = sparse_layers(config)
        parts = (self.grouped, self.ffn, self.shared, self.expert)
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=[self.grouped.kv] * config.num_hidden_layers,
            activation_width=max(part.activation_width for part in parts),
            router=self.router,
            ignored=prediction_layers(config),
        )

    @override
    def attention_params(self, index: int, at: str) -> tuple[ParamSpec, ...]:
        return self.grouped.params(at)

    @override
    def mix(self, index: int, hidden: Tensor, step: Step, params: Params, kv: KVCache) -> Tensor:
        return self.grouped(hidden, index, step, params, kv)
