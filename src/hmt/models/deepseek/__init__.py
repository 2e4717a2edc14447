"""DeepSeek-V2 to V4, what GLM-4.5 has of them, and families that attend to a selection."""

from hmt.models.deepseek.axk2 import AXK2
from hmt.models.deepseek.dense import (
    DeepSeekV2,
    DeepSeekV3,
    LatentDecoder,
    latent_scale,
    prediction_layers,
)
from hmt.models.deepseek.glm4_moe import Glm4Moe
from hmt.models.deepseek.sparse import DeepSeekV32, GlmMoeDsa, selecting
from hmt.models.deepseek.v4 import DeepSeekV4
