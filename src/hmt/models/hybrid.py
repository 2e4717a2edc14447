"""What hybrids share: attention in some layers, and a mixer with recurrent state in the others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec
from hmt.contracts.model import KVLayer, LayerState
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, Weights
from hmt.layers import (
    Attention,
    DeltaAttention,
    GatedAttention,
    GatedDeltaNet,
    GatedFFN,
    Mamba,
    Mamba2,
    Params,
    PostNormAttention,
    ResidualFFN,
    RMSNorm,
    Router,
    ShortConv,
    add_routed_experts,
    request_experts,
    routed_experts,
)
from hmt.models.config import Config
from hmt.models.decoder import Decoder, attention_block

_MOST_TAPS = 64  # that the kernels hold; published models have 3 or 4


class Hybrid(Decoder):
    """A decoder whose layers attend or are recurrent; behind that a dense network or experts.

    attends   which layers attend
    sparse    which layers have experts
    """

    norm: RMSNorm
    attention: Attention | GatedAttention | PostNormAttention
    recurrent: DeltaAttention | GatedDeltaNet | Mamba | Mamba2 | ShortConv
    ffn: ResidualFFN
    router: Router
    expert: GatedFFN
    attends: list[bool]
    sparse: list[bool]

    def network(self, index: int) -> ResidualFFN:
        """The dense network of layer `index`."""
        return self.ffn

    def mixer_block(self, index: int, recurrent: str) -> BlockSpec:
        """Attention or what is recurrent, with the norm before it, as most checkpoints name them.

        recurrent   what they call layer `index`'s mixer where it does not attend
        """
        at = f"model.layers.{index}."
        if self.attends[index]:
            mixer = self.attention.params(f"{at}self_attn.")
        else:
            mixer = self.recurrent.params(f"{at}{recurrent}.")
        norm = self.norm.param("norm", f"{at}input_layernorm.weight")
        return attention_block(index, norm, *mixer)

    def shared_expert(self, x: Tensor, params: Params) -> Tensor | None:
        """What an expert that all tokens share gives for x [tokens, hidden_size]; None without."""
        return None

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        mixer = self.attention if self.attends[index] else self.recurrent
        with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
            x = mixer(hidden, index, step, params, kv)
        if not self.sparse[index]:
            with weights.lease(BlockId(index, BlockKind.FFN)) as params:
                return self.network(index)(hidden, x, params)
        with weights.lease(BlockId(index, BlockKind.ROUTER)) as params:
            x = self.norm.add(hidden, x, params["norm"])
            routing = self.router(x, params)
            # On their way while the shared one computes.
            request_experts(x, routing, hidden, index, self.expert, weights)
            shared = self.shared_expert(x, params)
        if shared is None:
            return hidden + routed_experts(x, routing, index, self.expert, weights)
        return add_routed_experts(hidden, shared, x, routing, index, self.expert, weights)


def caches_by_layer(attends: Sequence[bool], kv: KVLayer, state: LayerState) -> dict[str, Any]:
    """Decoder's `kv` and `state`: one where a layer `attends`, the other where it does not."""
    return {
        "kv": [kv if attending else None for attending in attends],
        "state": [() if attending else state for attending in attends],
    }


def convolution_taps(config: Config, name: str) -> int:
    """Field `name`: positions that a convolution over time sees.  Raises CheckpointError."""
    taps = getattr(config, name)
    if not 2 <= taps <= _MOST_TAPS:
        raise CheckpointError(f"{name} is {taps}; it must be from 2 to {_MOST_TAPS}")
    return int(taps)


def renamed(
    params: Iterable[ParamSpec], names: Mapping[str, str], *, also: bool = False
) -> tuple[ParamSpec, ...]:
    """Parameters whose names in checkpoints have other parts, by the usual ones; or `also` have."""
    found = []
    for param in params:
        sources = []
        for source in param.sources:
            for usual, own in names.items():
                source = source.replace(usual, own)
            sources.append(source)
        if also:
            sources = list(dict.fromkeys((*param.sources, *sources)))
        found.append(replace(param, sources=tuple(sources)))
    return tuple(found)
