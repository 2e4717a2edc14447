"""Mamba-2: state spaces in all layers, and nothing else (arXiv 2405.21060)."""

import torch

from hmt.layers import RMSNorm
from hmt.models.config import Config, require
from hmt.models.hybrid import convolution_taps
from hmt.models.state_space.alone import StateSpaceDecoder
from hmt.models.state_space.sizes import checked, time_step_limit


class Mamba2LM(StateSpaceDecoder):
    """Its heads have one decay each."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "hidden_act", "silu")
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        norm = RMSNorm(hidden, eps)
        fields = {
            "heads": config.num_heads,
            "head_dim": config.head_dim,
            "groups": config.n_groups,
            "state_dim": config.state_size,
            "conv": convolution_taps(config, "conv_kernel"),
            "steps": time_step_limit(config),
            "eps": eps,
            "bias": config.use_bias,
            "output_bias": config.use_bias,
            "conv_bias": config.use_conv_bias,
        }
        recurrent = checked(config, norm, int(config.expand * hidden), fields)
        super().__init__(config, dtype, norm, recurrent)
