"""A.X-K2: DeepSeek-V3.2 with gates behind norms, and of what attention finds."""

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.contracts.blocks import ParamSpec
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache
from hmt.kernels import ops
from hmt.layers import GatedRMSNorm, Params, RMSNorm, Selection, project
from hmt.models.config import Config, norm, require
from hmt.models.deepseek.sparse import DeepSeekV32


class AXK2(DeepSeekV32):
    """Queries and gates of values are one product, of compressed queries normed and as they are.

    The published code chooses among groups of experts otherwise than DeepSeek-V3; here there are
    none.
    """

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "n_group", None, 1)
        config.n_group = config.topk_group = 1
        self.gated_norm = GatedRMSNorm(norm(config), config.gated_norm_rank)
        super().__init__(config, dtype)

    @override
    def norm_params(self, at: str) -> tuple[ParamSpec, ...]:
        return self.gated_norm.params(at)

    @override
    def attention_params(self, index: int, at: str) -> tuple[ParamSpec, ...]:
        latent = self.attention
        assert latent.q_rank is not None
        width = latent.heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
        shape = (width, 2 * latent.q_rank)
        params = super().attention_params(index, at)
        return tuple(
            replace(param, shape=shape) if param.name == "q_b_proj" else param for param in params
        )

    @override
    def router_inputs(
        self, hidden: Tensor, x: Tensor | None, params: Params
    ) -> tuple[Tensor, Tensor]:
        if x is not None:
            hidden += x
        normed = self.gated_norm(hidden, params)
        return normed, ops.linear(normed.float(), params["router"])

    @override
    def _attend(
        self,
        hidden: Tensor,
        index: int,
        keys: int,
        step: Step,
        params: Params,
        kv: KVCache,
        selection: Selection | None,
    ) -> tuple[Tensor, Selection]:
        latent, x = self.attention, self.gated_norm(hidden, params)
        plain = project(x, params, "q_a_proj")
        assert latent.q_rank is not None
        query_norm = RMSNorm(latent.q_rank, latent.norm_eps)
        compressed = query_norm(plain, params["q_a_norm"])
        both = project(torch.cat((compressed, plain), dim=-1), params, "q_b_proj")
        widths = latent.nope_dim + latent.rope_dim, latent.value_dim
        query, gate = both.unflatten(-1, (latent.heads, -1)).split(widths, dim=-1)
        queries = latent.turned(query, step)
        out, selection = self._selecting.attend(
            x, compressed, queries, index, keys, step, params, kv, selection
        )
        return project(ops.sigmoid_gated(out, gate.flatten(1)), params, "o_proj"), selection
