"""Consecutive decoder layers in one call of the extension, where all they read stays in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.encoding import WeightTensor
from hmt.kernels.cpu.abi import ACTIVATIONS, DTYPES
from hmt.kernels.cpu.attention import native_pages, native_runs
from hmt.kernels.cpu.experts import native_expert
from hmt.kernels.cpu.linear import projections
from hmt.kernels.cpu.sublayers import native_attention_inputs, native_feed_forward, native_norm
from hmt.kernels.reference.kv_pages import AttentionMetadata, Pages
from hmt.kernels.reference.sublayers import AttentionInputs, FeedForward, NormOptions

Params = Mapping[str, WeightTensor]


@dataclass(frozen=True, slots=True)
class StackAttention:
    """Attention of one layer: its parameters, and where its keys and values lie.

    Uses `o_proj` of `params` besides what `attention_inputs` uses, and `post_norm` where there is
    one.

    angles   which of the step's cosines and sines turn its heads
    place    its own place among the layers of `pages`
    sinks    f32 [q_heads], contiguous: see `reference.attention`; None for none
    """

    inputs: AttentionInputs
    params: Params
    angles: int
    pages: Pages
    place: int
    scale: float
    window: int
    softcap: float
    post_norm: NormOptions | None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackFFN:
    """A dense layer's second half."""

    layer: FeedForward
    params: Params


@dataclass(frozen=True, slots=True)
class StackExperts:
    """A sparse layer's second half: the top_k of a softmax over `router`'s logits.

    Uses `norm` and `router` of `params`; experts are numbered by their place in `experts`.
    """

    norm: NormOptions
    top_k: int
    renormalise: bool
    activation: str
    params: Params
    experts: Sequence[Params]


StackLayer = tuple[StackAttention, StackFFN | StackExperts]


class Stack:
    """Layers that the extension computes in one call; borrows their parameters' memory.

    uses   int64, for each layer with experts, in order: how often each one was read until now
    """

    def __init__(
        self,
        native: ModuleType,
        layers: tuple[Any, ...],
        experts: Sequence[int],
        kept: Sequence[Tensor],
    ) -> None:
        """layers: as csrc/binding/sublayers.cpp wants them; experts: of those that have some.

        kept   tensors that layers refer to, besides parameters
        """
        self._kept = kept
        self._extension = native
        self._native = native.Stack(layers)
        self._uses = torch.zeros(max(1, sum(experts)), dtype=torch.int64)
        self.uses = self._uses[: sum(experts)].split(list(experts))

    def run(
        self, hidden: Tensor, runs: AttentionMetadata, angles: Sequence[tuple[Tensor, Tensor]]
    ) -> int:
        """Change hidden [tokens, width] as the layers do.  Returns how many experts were read.

        hidden   contiguous, in a dtype that the extension has
        angles   cosines and sines as for `rope`, f32 and contiguous
        """
        tokens, width = hidden.shape
        experts: int = self._native.run(
            native_runs(self._extension, runs),
            tuple((cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in angles),
            hidden.data_ptr(),
            DTYPES[hidden.dtype],
            tokens,
            width,
            self._uses.data_ptr(),
            torch.get_num_threads(),
        )
        return experts


def stack(native: ModuleType, layers: Sequence[StackLayer]) -> Stack | None:
    """The layers' `Stack`; None where the extension has no kernel for a part of them."""
    described = [_describe(native, *layer) for layer in layers]
    if None in described:
        return None
    experts = [len(second.experts) for _, second in layers if isinstance(second, StackExperts)]
    kept = [attention.sinks for attention, _ in layers if attention.sinks is not None]
    return Stack(native, tuple(described), experts, kept)


def _describe(
    native: ModuleType, attention: StackAttention, second: StackFFN | StackExperts
) -> tuple[Any, ...] | None:
    params = attention.params
    inputs = native_attention_inputs(native, params, attention.inputs)
    output, _ = projections(native, params, ("o_proj",))
    post_norm = native_norm(params, "post_norm", attention.post_norm)
    if isinstance(second, StackFFN):
        after = native_feed_forward(native, second.params, second.layer)
    else:
        after = _describe_experts(native, second)
    if inputs is None or not output or post_norm is None or after is None:
        return None
    sinks = 0 if attention.sinks is None else attention.sinks.data_ptr()
    options = attention.scale, attention.window, attention.softcap, sinks
    return (
        inputs,
        attention.angles,
        native_pages(native, attention.pages),
        attention.place,
        options,
        native.Projections(output),
        post_norm,
        after,
    )


def _describe_experts(native: ModuleType, second: StackExperts) -> Any:
    norm = native_norm(second.params, "norm", second.norm)
    router, rows = projections(native, second.params, ("router",))
    experts = [native_expert(native, index, params) for index, params in enumerate(second.experts)]
    if not router or norm is None or None in experts or second.activation not in ACTIVATIONS:
        return None
    assert rows == len(experts)
    activation = ACTIVATIONS[second.activation]
    return native.SparseLayer(norm, router, second.top_k, second.renormalise, activation, experts)
