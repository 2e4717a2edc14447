"""Mamba and Falcon-Mamba: state spaces in all layers (arXiv 2312.00752, 2410.05355)."""

import torch

from hmt.layers import Mamba, RMSNorm
from hmt.models.config import Config, require
from hmt.models.hybrid import convolution_taps
from hmt.models.state_space.alone import StateSpaceDecoder


class MambaLM(StateSpaceDecoder):
    """Falcon-Mamba norms what steps, keys and queries are made of, without weights."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        recurrent = Mamba(
            config.hidden_size,
            config.intermediate_size,  # Falcon-Mamba's `expand` is another number
            config.state_size,
            int(config.time_step_rank),
            norm,
            convolution_taps(config, "conv_kernel"),
            eps=getattr(config, "mixer_rms_eps", None),
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
        )
        super().__init__(config, dtype, norm, recurrent)
