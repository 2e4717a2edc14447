"""GLM-5.3-Flash: delta attention, latent attention to pooled positions, several residual streams.

Most layers are Kimi's; the others select what they attend to, as DeepSeek-V3.2 does, among pools of
positions.  Between layers there are residual streams: see `HyperConnection`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, Weights
from hmt.kernels import ops
from hmt.layers import (
    DeltaAttention,
    HyperConnection,
    Indexer,
    KeyPool,
    NoRotary,
    Params,
    Selection,
    SparseLatentAttention,
    request_experts,
    routed_experts,
)
from hmt.models.config import Config, latent_attention, layer_kinds, require
from hmt.models.deepseek import selecting
from hmt.models.hybrid import renamed
from hmt.models.linear_attention.kimi_linear import LatentHybrid, low_rank_delta

# As they are published, and as transformers' modules call them.
_NAMES = {
    ".self_attn.f_": ".self_attn.forget_gate.f_",
    ".self_attn.dt_bias": ".self_attn.forget_gate.dt_bias",
    ".self_attn.A_log": ".self_attn.forget_gate.A_log",
    ".hc_attn_": ".attn_hc.",
    ".hc_ffn_": ".ffn_hc.",
}


class Glm5Next(LatentHybrid):
    """Latent attention without positions, of which each token sees `index_topk` and a few more."""

    staged = False

    _attending = "indexed_attention"

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        require(config, "qk_rope_head_dim", 0)
        # Without them a token of a broken pool would not see itself.
        require(config, "index_kpool_always_select_tail", True)
        still = NoRotary(0, config.max_position_embeddings)
        own = {"norm_eps": config.rms_norm_eps, "expands": False}
        attention = latent_attention(config, still, config.qk_nope_head_dim**-0.5, **own)
        self._indexes = _indexing_layers(config, self._attending)
        self._mixer_streams = _streams(config, "mixer_")
        self._network_streams = _streams(config, "network_")
        self._pool = _pool(config)
        indexer = Indexer(
            config.hidden_size,
            config.q_lora_rank,
            config.index_n_heads,
            config.index_head_dim,
            0,
            config.index_topk,
            still,
            interleaved=False,
            pool=self._pool,
        )
        self._selecting = SparseLatentAttention(attention, indexer)
        layers = config.num_hidden_layers
        super().__init__(
            config,
            dtype,
            attention,
            _delta_attention(config),
            ignored=(rf"(^|\.)layers\.{layers}\.",),  # predicts several tokens
        )
        spec = selecting(self.spec, self._selecting, self._indexes)
        pool, states = self._pool.state, zip(spec.state, self._indexes, strict=True)
        self.spec = replace(
            spec,
            activation_width=spec.activation_width + self._mixer_streams.activation_width,
            state=tuple(pool if indexes else state for state, indexes in states),
        )
        # Of the last step's last layer with an indexer, for a layer without one behind it.
        self._last: tuple[tuple[Segment, ...], Selection] = ((), ())

    @override
    def attention_params(self, index: int, at: str) -> tuple[ParamSpec, ...]:
        own = self._selecting.indexer.params(f"{at}indexer.") if self._indexes[index] else ()
        return (*self.attention.params(at), *own)

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        at = f"model.layers.{index}."
        mixer = renamed(self._mixer_streams.params(f"{at}hc_attn_"), _NAMES, also=True)
        network = renamed(self._network_streams.params(f"{at}hc_ffn_"), _NAMES, also=True)
        before = self.norm.param("network_norm", f"{at}post_attention_layernorm.weight")
        for block in self.blocks_of(index, _NAMES, ("gate_proj", "up_proj", "down_proj")):
            params = block.params
            if block.id.kind is BlockKind.ATTENTION:
                params = (*mixer, *params)
                if not self.sparse[index]:
                    params = (*params, *network, before)
            elif block.id.kind is BlockKind.FFN:
                # The CPU may compute with it, where streams are on a device.
                params = tuple(param for param in params if param.name != "norm")
            elif block.id.kind is BlockKind.ROUTER:
                params = (*network, *params)
            yield replace(block, params=params)

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        return super().embed(step, weights).repeat(1, self._mixer_streams.streams)

    @override
    def final_norm(self, hidden: Tensor, params: Params) -> Tensor:
        count = self._mixer_streams.streams
        alike = torch.full((len(hidden), count), 1 / count, device=hidden.device)
        return super().final_norm(ops.read_streams(hidden, alike), params)

    @override
    def mix(self, index: int, hidden: Tensor, step: Step, params: Params, kv: KVCache) -> Tensor:
        if not self.attends[index]:
            return self.recurrent(hidden, index, step, params, kv)
        selection = None
        if not self._indexes[index]:
            runs, selection = self._last
            assert runs is step.segments, "layers of a step are computed in order"
        x = self.norm(hidden, params["norm"])
        keys = self.spec.index_layer(index)
        x, selection = self._selecting(x, index, keys, step, params, kv, selection)
        self._last = step.segments, selection
        return x

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        network = self._network_streams
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x, mix = self._mixer_streams.read(hidden, params)
            x = self.mix(index, x, step, params, kv)
            hidden = self._mixer_streams.write(hidden, x, mix)
            if not self.sparse[index]:
                x, mix = network.read(hidden, params)
                x = self.norm(x, params["network_norm"])
        if not self.sparse[index]:
            with weights.lease(BlockId(index, BlockKind.FFN)) as params:
                return network.write(hidden, self.ffn.ffn.where_it_lies(x, params), mix)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x, mix = network.read(hidden, params)
            x, logits = self.router_inputs(x, None, params)
            routing = self.router.choose(logits, params)
            # On their way while the shared ones compute.
            request_experts(x, routing, hidden, index, self.expert, weights)
            shared = self.shared(x, params)
        x = routed_experts(x, routing, index, self.expert, weights) + shared
        return network.write(hidden, x, mix)

    @override
    def expected_experts(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x, _ = self._network_streams.read(hidden, params)
            _, logits = self.router_inputs(x, None, params)
            return self.router.choose(logits, params).experts


def _streams(config: Config, name: str) -> HyperConnection:
    return HyperConnection(
        config.hidden_size,
        config.hc_mult,
        config.hc_sinkhorn_iters,
        config.rms_norm_eps,
        config.hc_eps,
        name,
    )


def _pool(config: Config) -> KeyPool:
    """Raises CheckpointError where keys cannot lie in whole pages, divided among their rows."""
    pool = KeyPool(config.hidden_size, config.index_head_dim, config.index_kpool)
    if max(pool.size, PAGE_TOKENS) % min(pool.size, PAGE_TOKENS) or pool.dim % pool.rows.rows:
        raise CheckpointError(
            f"index_kpool is {pool.size}, of keys of index_head_dim {pool.dim}; HMT keeps a key in "
            f"rows of {PAGE_TOKENS} positions, so the one must divide {PAGE_TOKENS} or be a "
            "multiple of it, and the other be a multiple of the lesser of both"
        )
    return pool


def _delta_attention(config: Config) -> DeltaAttention:
    """Kimi's, of which decays may have a bound.  Raises CheckpointError."""
    bound = config.linear_lower_bound
    if bound is not None and not bound < 0:
        raise CheckpointError(f"linear_lower_bound is {bound}; it must be below 0")
    return low_rank_delta(config, bound=float(bound or 0))


def _indexing_layers(config: Config, attending: str) -> list[bool]:
    """Which layers have an indexer.  Raises CheckpointError where one has nothing to share."""
    kinds = layer_kinds(config, attending, "linear_attention")
    modes = layer_kinds(config, "full", "shared", name="indexer_types")
    indexes = [
        kind == attending and mode == "full" for kind, mode in zip(kinds, modes, strict=True)
    ]
    for index, kind in enumerate(kinds):
        if kind == attending and not indexes[index] and (index == 0 or not indexes[index - 1]):
            raise CheckpointError(
                f"layer {index} shares what an indexer selected, but the layer before it has none"
            )
    return indexes
