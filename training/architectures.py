"""The shapes of the two reference models, and the MTP module that the MoE model carries."""

from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3TopkRouter,
)

CONTEXT = 131072


def build(kind: str, vocabulary: int) -> PreTrainedModel:
    """A fresh model in BF16: "dense" (Llama, 7.3 M parameters) or "moe" (DeepSeek-V3, 17 M)."""
    shared: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 7,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 4e6},
        "rms_norm_eps": 1e-6,
    }
    if kind == "dense":
        dense = LlamaConfig(
            num_hidden_layers=8,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
            **shared,
        )
        return LlamaForCausalLM(dense).to(torch.bfloat16)
    moe = DeepseekV3Config(
        num_hidden_layers=5,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=32,
        n_shared_experts=1,
        moe_intermediate_size=128,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **shared,
    )
    model = DeepseekV3ForCausalLM(moe).to(torch.bfloat16)
    for router in routers(model):
        router.e_score_correction_bias = router.e_score_correction_bias.float()
    return model


def routers(model: nn.Module) -> list[DeepseekV3TopkRouter]:
    """The routers of an MoE model, in layer order; none for a dense model."""
    return [module for module in model.modules() if isinstance(module, DeepseekV3TopkRouter)]


class MultiTokenPrediction(nn.Module):
    """One decoder layer that predicts the token after next (DeepSeek-V3 report, section 2.2).

    It starts as a copy of the trunk's last layer, and uses the trunk's embedding and head.
    """

    def __init__(self, trunk: DeepseekV3ForCausalLM) -> None:
        super().__init__()
        config = trunk.config
        width, last = config.hidden_size, config.num_hidden_layers - 1
        self.layer = DeepseekV3DecoderLayer(config, last)
        self.layer.load_state_dict(trunk.model.layers[last].state_dict())
        self.enorm = DeepseekV3RMSNorm(width, config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(width, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.norm = DeepseekV3RMSNorm(width, config.rms_norm_eps)
        nn.init.normal_(self.eh_proj.weight, std=0.02)
        self.to(trunk.device, torch.bfloat16)
        bias = trunk.model.layers[last].mlp.gate.e_score_correction_bias
        self.layer.mlp.gate.e_score_correction_bias = bias.clone()

    def forward(
        self, trunk: DeepseekV3ForCausalLM, hidden: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """States [batch, length - 1, width], of which number t predicts token t + 2.

        `hidden` [batch, length, width] is the trunk's output for `ids` [batch, length].
        """
        following = trunk.model.embed_tokens(ids[:, 1:])
        joined = torch.cat([self.enorm(following), self.hnorm(hidden[:, :-1])], -1)
        x = self.eh_proj(joined)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rope = trunk.model.rotary_emb(x, positions)
        return self.norm(
            self.layer(x, attention_mask=None, position_ids=positions, position_embeddings=rope)
        )
