"""Falcon-H1: attention and Mamba-2 side by side in every layer (arXiv 2507.22448)."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import Params, ResidualFFN
from hmt.models.config import Config, attention, gated_ffn, norm, rotary
from hmt.models.decoder import Decoder, attention_block, ffn_block
from hmt.models.state_space.sizes import mamba2


class FalconH1(Decoder):
    """Every product has a factor of its own in the configuration.

    Those of queries, keys and values are taken together into attention's scale and result.
    """

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.norm = norm(config)
        _check_factors(config)
        bias, before = config.attention_bias, config.attention_in_multiplier
        usual = attention(config, rotary(config), bias=bias, output_bias=bias)
        scale = usual.scale * config.key_multiplier * before**2
        self.attention = replace(usual, scale=scale)
        self.attention_factor = float(config.attention_out_multiplier * before)
        self.recurrent_factor = float(config.ssm_out_multiplier)
        inner = config.mamba_d_ssm
        if inner is None:
            inner = int(config.mamba_expand * config.hidden_size)
        factors = tuple(config.ssm_in_multiplier * factor for factor in config.ssm_multipliers)
        self.recurrent = mamba2(
            config,
            self.norm,
            inner,
            eps=config.rms_norm_eps if config.mamba_rms_norm else None,
            norm_first=config.mamba_norm_before_gate,
            output_bias=config.projectors_bias,
            factors=factors,
        )
        ffn = gated_ffn(config, bias=config.mlp_bias)
        gate, down = map(float, config.mlp_multipliers)
        self.ffn = ResidualFFN(ffn, self.norm, factors=(gate, down))
        layers = config.num_hidden_layers
        both = self.attention.activation_width + self.recurrent.activation_width
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            norm_name="model.final_layernorm.weight",
            kv=[self.attention.kv] * layers,
            state=[self.recurrent.state] * layers,
            activation_width=max(both, self.ffn.activation_width),
            embedding_factor=float(config.embedding_multiplier),
            logit_factor=float(config.lm_head_multiplier),
        )

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention.params(f"{at}self_attn."),
            *self.recurrent.params(f"{at}mamba."),
        )
        norm = self.norm.param("norm", f"{at}pre_ff_layernorm.weight")
        yield ffn_block(index, norm, *self.ffn.ffn.params(f"{at}feed_forward."))

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = self._mixed(index, hidden, step, params, kv)
        with weights.lease(BlockId(index, BlockKind.FFN)) as params:
            return self.ffn(hidden, x, params)

    def _mixed(self, index: int, hidden: Tensor, step: Step, params: Params, kv: KVCache) -> Tensor:
        """What both give for the norm of hidden [tokens, hidden_size], same shape."""
        attended = self.attention(hidden, index, step, params, kv)
        recurrent = self.recurrent(hidden, index, step, params, kv)
        return recurrent * self.recurrent_factor + attended * self.attention_factor


def _check_factors(config: Config) -> None:
    """Raise CheckpointError for factors that are missing, or that a bias keeps apart."""
    for name, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
        given = getattr(config, name)
        if len(given) != count:
            raise CheckpointError(f"{name} has {len(given)} numbers; it must have {count}")
    for name, bias in (
        ("attention_in_multiplier", "attention_bias"),
        ("ssm_in_multiplier", "mamba_proj_bias"),
    ):
        if getattr(config, name) != 1 and getattr(config, bias):
            raise CheckpointError(
                f"{name} is {getattr(config, name)} and {bias} is set; HMT computes this family "
                "with one of both only"
            )
