"""Families with linear attention in some layers: delta rules, and lightning attention."""

from hmt.models.linear_attention.bailing_hybrid import BailingHybrid
from hmt.models.linear_attention.glm5_next import Glm5Next
from hmt.models.linear_attention.kimi_linear import KimiLinear
from hmt.models.linear_attention.minimax import MiniMax
from hmt.models.linear_attention.olmo_hybrid import OlmoHybrid
from hmt.models.linear_attention.qwen3_5 import Qwen35, Qwen35Moe
from hmt.models.linear_attention.qwen3_next import Qwen3Next
from hmt.models.linear_attention.qwen4_exp import Qwen4Exp
