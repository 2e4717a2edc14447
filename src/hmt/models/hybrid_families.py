"""Architectures with recurrent state that run, beside those in the registry."""

from collections.abc import Callable, Mapping

import torch

from hmt.contracts.model import Model
from hmt.models.bailing_hybrid import BailingHybrid
from hmt.models.config import Config
from hmt.models.kimi_linear import KimiLinear
from hmt.models.lfm2 import Lfm2, Lfm2Moe
from hmt.models.qwen3_5 import Qwen35, Qwen35Moe
from hmt.models.qwen3_next import Qwen3Next

# `architectures` entry of config.json -> (model_type of transformers, family)
Families = Mapping[str, tuple[str, Callable[[Config, torch.dtype], Model]]]

HYBRIDS: Families = {
    "BailingHybridForCausalLM": ("bailing_hybrid", BailingHybrid),
    "KimiLinearForCausalLM": ("kimi_linear", KimiLinear),
    "Lfm2ForCausalLM": ("lfm2", Lfm2),
    "Lfm2MoeForCausalLM": ("lfm2_moe", Lfm2Moe),
    "Qwen3NextForCausalLM": ("qwen3_next", Qwen3Next),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", Qwen35),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", Qwen35Moe),
}
