"""Layers of the usual kind, and many of them computed at once where all their blocks stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hmt.contracts.adapter import StepAdapters
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, ResidentBlock, StateRun, Weights
from hmt.kernels import ops
from hmt.layers.attention import Attention
from hmt.layers.ffn import GatedFFN, ResidualFFN
from hmt.layers.gated import GatedAttention
from hmt.layers.moe import SoftmaxRouter
from hmt.layers.norm import RMSNorm
from hmt.layers.recurrent import DeltaAttention, GatedDeltaNet
from hmt.layers.rope import Rotary

_MOST_TOKENS = 64  # of a step; with more, what Python takes is a small part


@dataclass(frozen=True, slots=True)
class Experts:
    """The second half of a sparse layer: x = norm(hidden += x); hidden += the chosen experts.

    shared        an expert that all tokens share, whose result is added to theirs; None for none
    shared_gated  the sigmoid of what `shared_gate` gives is multiplied with its result
    """

    norm: RMSNorm
    router: SoftmaxRouter
    expert: GatedFFN
    shared: GatedFFN | None = None
    shared_gated: bool = False


@dataclass(frozen=True, slots=True)
class FusableLayer:
    """What a family's `layer` computes, where it is a mixer and then an FFN or experts.

    mixer       attention, or what has recurrent state
    post_norm   of what attention adds; None for none
    """

    mixer: Attention | GatedAttention | GatedDeltaNet | DeltaAttention
    second: ResidualFFN | Experts
    post_norm: RMSNorm | None = None

    @property
    def attention(self) -> Attention | None:
        """The mixer's attention; None where it is recurrent."""
        if isinstance(self.mixer, GatedAttention):
            return self.mixer.attention
        return self.mixer if isinstance(self.mixer, Attention) else None


class FusedLayers:
    """Consecutive layers in one call, for steps of few tokens.

    Results are those of the layers one after the other, to the bit.
    """

    def __init__(
        self,
        stack: ops.Stack,
        layers: Sequence[FusableLayer],
        weights: Weights,
        kv: KVCache,
        always_bytes: int,
        expert_bytes: int,
        first: int,
    ) -> None:
        """See `build`.  always_bytes, expert_bytes: read in every step, and for each expert."""
        self._stack = stack
        self._layers = range(first, first + len(layers))
        self._halves = [half for n, layer in enumerate(layers, first) for half in _halves(n, layer)]
        sparse = [n for n, layer in enumerate(layers, first) if isinstance(layer.second, Experts)]
        self._uses = dict(zip(sparse, stack.uses, strict=True))
        self._rotaries = _rotaries(layers)
        recurrent = (n for n, layer in enumerate(layers, first) if layer.attention is None)
        self._recurrent = next(recurrent, None)
        self._weights = weights
        self._kv = kv
        self._always_bytes = always_bytes
        self._expert_bytes = expert_bytes

    @classmethod
    def build(
        cls, first: int, layers: Sequence[FusableLayer], weights: Weights, kv: KVCache
    ) -> "FusedLayers | None":
        """Layers first, first + 1, ...; None where some block may move, or has no kernel."""
        rotaries = _rotaries(layers)
        described = []
        always_bytes = expert_bytes = 0
        for index, layer in enumerate(layers, first):
            found = _Blocks.find(index, layer, weights)
            mixer = None if found is None else _describe_mixer(index, layer, found, kv, rotaries)
            if found is None or mixer is None:
                return None
            always_bytes += found.always_bytes
            expert_bytes = found.expert_bytes or expert_bytes
            described.append((mixer, _describe_second(layer.second, found)))
        stack = ops.stack(described)
        if stack is None:
            return None
        return cls(stack, layers, weights, kv, always_bytes, expert_bytes, first)

    @property
    def expert_uses(self) -> dict[int, list[int]]:
        """See contracts.model.FusedLayers."""
        return {layer: uses.tolist() for layer, uses in self._uses.items()}

    def __call__(self, hidden: Tensor, step: Step, adapters: StepAdapters | None = None) -> bool:
        """Change hidden [tokens, hidden_size] as the layers do, and append to the KV.

        False, and nothing done, for a step of many tokens, one that copies states on its way, or
        one with adapters of routed experts.
        """
        if len(hidden) > _MOST_TOKENS or not hidden.is_contiguous():
            return False
        added = None
        if adapters is not None:
            added = self._added(adapters)
            if added is None or len(hidden) != len(adapters.rows):
                return False
        states: Sequence[StateRun] = ()
        if self._recurrent is not None:
            state = self._kv.state(self._recurrent, step)
            if state.copies:
                return False
            states = state.runs
        angles = [rotary.cos_sin(step) for rotary in self._rotaries]
        experts = self._stack.run(hidden, self._kv.kernel_metadata(step), angles, states, added)
        self._weights.count(self._always_bytes + experts * self._expert_bytes)
        return True

    def _added(self, adapters: StepAdapters) -> Any:
        """What `adapters` add, for kernels; None where these add none to some of it."""
        if self not in adapters.described:
            inside = {block for block in adapters.parts if block.layer in self._layers}
            made = None
            if inside.issubset(self._halves):
                parts = [adapters.parts.get(half, {}) for half in self._halves]
                made = self._stack.adapters(adapters.rows, parts)
            adapters.described[self] = made
        return adapters.described[self]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A layer's blocks in memory."""

    attention: ResidentBlock
    second: ResidentBlock
    experts: Sequence[ResidentBlock]

    @property
    def always_bytes(self) -> int:
        return self.attention.nbytes + self.second.nbytes

    @property
    def expert_bytes(self) -> int:
        return self.experts[0].nbytes if self.experts else 0

    @classmethod
    def find(cls, index: int, layer: FusableLayer, weights: Weights) -> "_Blocks | None":
        blocks = list(_halves(index, layer))
        if isinstance(layer.second, Experts):
            numbers = range(layer.second.router.experts)
            blocks += [BlockId(index, BlockKind.EXPERT, expert) for expert in numbers]
        found = weights.resident(blocks)
        return None if found is None else cls(found[0], found[1], found[2:])


def _halves(index: int, layer: FusableLayer) -> tuple[BlockId, BlockId]:
    """Blocks of a layer's mixer, and of what follows it."""
    sparse = isinstance(layer.second, Experts)
    second = BlockKind.ROUTER if sparse else BlockKind.FFN
    return BlockId(index, BlockKind.ATTENTION), BlockId(index, second)


def _rotaries(layers: Sequence[FusableLayer]) -> list[Rotary]:
    """All that turn heads, each once."""
    attentions = (layer.attention for layer in layers)
    return list(dict.fromkeys(own.rotary for own in attentions if own is not None))


def _describe_mixer(
    index: int, layer: FusableLayer, found: _Blocks, kv: KVCache, rotaries: Sequence[Rotary]
) -> ops.StackMixer | None:
    """None where the layer's pages or its state may move, or kernels have no such layer."""
    mixer, params = layer.mixer, found.attention.params
    if isinstance(mixer, GatedDeltaNet | DeltaAttention):
        chain, states = mixer.chain, kv.kernel_state(index)
        if chain is None or states is None:
            return None
        return ops.StackDelta(chain, params, states)
    attention, place = layer.attention, kv.kernel_pages(index)
    if attention is None or place is None:
        return None
    pages, number, window = place
    return ops.StackAttention(
        attention.inputs,
        params,
        rotaries.index(attention.rotary),
        pages,
        number,
        attention.scale,
        window,
        attention.softcap,
        None if layer.post_norm is None else layer.post_norm.options,
        attention.sinks_of(params),
        gated=isinstance(mixer, GatedAttention),
    )


def _describe_second(
    second: ResidualFFN | Experts, found: _Blocks
) -> ops.StackFFN | ops.StackExperts:
    if isinstance(second, ResidualFFN):
        return ops.StackFFN(second.layer, found.second.params)
    router = second.router
    experts = [expert.params for expert in found.experts]
    return ops.StackExperts(
        second.norm.options,
        router.top_k,
        router.renormalise,
        second.expert.activation,
        found.second.params,
        experts,
        None if second.shared is None else second.shared.activation,
        second.shared_gated,
    )
