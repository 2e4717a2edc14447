"""Layers of the usual kind, and many of them computed at once where all their blocks stay."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.step import Step
from hmt.contracts.store import KVCache, ResidentBlock, Weights
from hmt.kernels import ops
from hmt.layers.attention import Attention
from hmt.layers.ffn import GatedFFN, ResidualFFN
from hmt.layers.moe import SoftmaxRouter
from hmt.layers.norm import RMSNorm
from hmt.layers.rope import Rotary

_MOST_TOKENS = 64  # of a step; with more, what Python takes is a small part


@dataclass(frozen=True, slots=True)
class Experts:
    """The second half of a sparse layer: x = norm(hidden += x); hidden += the chosen experts."""

    norm: RMSNorm
    router: SoftmaxRouter
    expert: GatedFFN


@dataclass(frozen=True, slots=True)
class FusableLayer:
    """What a family's `layer` computes, where it is attention and then an FFN or experts.

    post_norm   of what attention adds; None for none
    """

    attention: Attention
    second: ResidualFFN | Experts
    post_norm: RMSNorm | None = None


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
        sparse = [n for n, layer in enumerate(layers, first) if isinstance(layer.second, Experts)]
        self._uses = dict(zip(sparse, stack.uses, strict=True))
        self._rotaries = _rotaries(layers)
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
            place = kv.kernel_pages(index)
            if found is None or place is None:
                return None
            always_bytes += found.always_bytes
            expert_bytes = found.expert_bytes or expert_bytes
            described.append(_describe(layer, found, place, rotaries.index(layer.attention.rotary)))
        stack = ops.stack(described)
        if stack is None:
            return None
        return cls(stack, layers, weights, kv, always_bytes, expert_bytes, first)

    @property
    def expert_uses(self) -> dict[int, list[int]]:
        """See contracts.model.FusedLayers."""
        return {layer: uses.tolist() for layer, uses in self._uses.items()}

    def __call__(self, hidden: Tensor, step: Step) -> bool:
        """Change hidden [tokens, hidden_size] as the layers do, and append to the KV.

        False, and nothing done, for a step of many tokens.
        """
        if len(hidden) > _MOST_TOKENS or not hidden.is_contiguous():
            return False
        angles = [rotary.cos_sin(step) for rotary in self._rotaries]
        experts = self._stack.run(hidden, self._kv.kernel_metadata(step), angles)
        self._weights.count(self._always_bytes + experts * self._expert_bytes)
        return True


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
        sparse = isinstance(layer.second, Experts)
        blocks = [
            BlockId(index, BlockKind.ATTENTION),
            BlockId(index, BlockKind.ROUTER if sparse else BlockKind.FFN),
        ]
        if isinstance(layer.second, Experts):
            numbers = range(layer.second.router.experts)
            blocks += [BlockId(index, BlockKind.EXPERT, expert) for expert in numbers]
        found = weights.resident(blocks)
        return None if found is None else cls(found[0], found[1], found[2:])


def _rotaries(layers: Sequence[FusableLayer]) -> list[Rotary]:
    """All that turn heads, each once."""
    return list(dict.fromkeys(layer.attention.rotary for layer in layers))


def _describe(
    layer: FusableLayer, found: _Blocks, place: tuple[ops.Pages, int, int], angles: int
) -> ops.StackLayer:
    pages, number, window = place
    attention, post_norm = layer.attention, layer.post_norm
    described = ops.StackAttention(
        attention.inputs,
        found.attention.params,
        angles,
        pages,
        number,
        attention.scale,
        window,
        attention.softcap,
        None if post_norm is None else post_norm.options,
        attention.sinks_of(found.attention.params),
    )
    second = layer.second
    if isinstance(second, ResidualFFN):
        return described, ops.StackFFN(second.layer, found.second.params)
    router = second.router
    experts = [expert.params for expert in found.experts]
    return described, ops.StackExperts(
        second.norm.options,
        router.top_k,
        router.renormalise,
        second.expert.activation,
        found.second.params,
        experts,
    )
