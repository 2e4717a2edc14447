"""Consecutive decoder layers in one call of the extension, where all they read stays in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hmt.contracts.adapter import AdapterRows, LowRank
from hmt.contracts.encoding import WeightTensor
from hmt.contracts.store import StateRun
from hmt.kernels.cpu.abi import ACTIVATIONS, DTYPES
from hmt.kernels.cpu.attention import native_pages, native_runs
from hmt.kernels.cpu.delta_layer import describe_delta, native_states
from hmt.kernels.cpu.experts import native_expert
from hmt.kernels.cpu.linear import projections
from hmt.kernels.cpu.low_rank import describe_low_ranks
from hmt.kernels.cpu.recurrent import run_numbers
from hmt.kernels.cpu.sublayers import describe_attention_inputs, native_feed_forward, native_norm
from hmt.kernels.reference.kv_pages import AttentionMetadata, Pages
from hmt.kernels.reference.sublayers import (
    GATE_UP,
    QUERY_KEY_VALUE,
    AttentionInputs,
    DeltaChain,
    FeedForward,
    NormOptions,
)

Params = Mapping[str, WeightTensor]


@dataclass(frozen=True, slots=True)
class StackAttention:
    """Attention of one layer: its parameters, and where its keys and values lie.

    Uses `o_proj` of `params` besides what `attention_inputs` uses, and `post_norm` where there is
    one.

    gated    each head's query in `q_proj` is followed by a gate, with whose sigmoid results are
             multiplied
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
    gated: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of parameters that are multiplied with, as in csrc/sublayers/stack.h."""
        return (*QUERY_KEY_VALUE, "o_proj")


@dataclass(frozen=True, slots=True)
class StackDelta:
    """A delta rule's layer, its parameters, and its state: `matrix` and `conv` of `states`."""

    chain: DeltaChain
    params: Params
    states: Mapping[str, Tensor]

    @property
    def projections(self) -> tuple[str, ...]:
        """As StackAttention's."""
        behind = (self.chain.through_gate, self.chain.through_decay)
        names = (name for name in behind if name is not None)
        return (*self.chain.inputs, *names, self.chain.output)


@dataclass(frozen=True, slots=True)
class StackFFN:
    """A dense layer's second half."""

    layer: FeedForward
    params: Params

    @property
    def projections(self) -> tuple[str, ...]:
        """As StackAttention's."""
        return (*GATE_UP, "down_proj")


@dataclass(frozen=True, slots=True)
class StackExperts:
    """A sparse layer's second half: the top_k of a softmax over `router`'s logits.

    Uses `norm` and `router` of `params`; experts are numbered by their place in `experts`.

    shared        activation of an expert that all tokens share, whose projections are
                  shared_gate_proj and so on; None for none
    shared_gated  the sigmoid of what `shared_gate` gives is multiplied with its result
    """

    norm: NormOptions
    top_k: int
    renormalise: bool
    activation: str
    params: Params
    experts: Sequence[Params]
    shared: str | None = None
    shared_gated: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the normed hidden states are multiplied with."""
        if self.shared is None:
            return ("router",)
        gate = ("shared_gate",) if self.shared_gated else ()
        return ("router", *gate, "shared_gate_proj", "shared_up_proj")

    @property
    def projections(self) -> tuple[str, ...]:
        """As StackAttention's."""
        return self.inputs if self.shared is None else (*self.inputs, "shared_down_proj")


StackMixer = StackAttention | StackDelta
StackLayer = tuple[StackMixer, StackFFN | StackExperts]

# What adapters add in a step to one half of a layer, by parameter and adapter.
Added = Mapping[str, Mapping[int, LowRank]]


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
        halves: Sequence[tuple[str, ...]],
    ) -> None:
        """layers: as csrc/binding/stack.cpp wants them; experts: of those that have some.

        kept    tensors that layers refer to, besides parameters
        halves  projections of each layer's mixer, and of what follows it
        """
        self._kept = kept
        self._extension = native
        self._native = native.Stack(layers)
        self._halves = halves
        self._unadapted = native.StackAdapters(())
        self._uses = torch.zeros(max(1, sum(experts)), dtype=torch.int64)
        self.uses = self._uses[: sum(experts)].split(list(experts))

    def adapters(self, rows: AdapterRows, added: Sequence[Added]) -> Any:
        """For `run`: what adapters of a step's rows add.  Borrows the memory of both.

        added   for each layer's mixer, and for what follows it

        None where some parameter is none of those that are multiplied with here.
        """
        described = []
        first = 0
        for names, changed in zip(self._halves, added, strict=True):
            if not set(names).issuperset(changed):
                return None
            described += [
                (first + names.index(name), describe_low_ranks(self._extension, rows, by_number))
                for name, by_number in changed.items()
            ]
            first += len(names)
        return self._extension.StackAdapters(tuple(described))

    def run(
        self,
        hidden: Tensor,
        runs: AttentionMetadata,
        angles: Sequence[tuple[Tensor, Tensor]],
        states: Sequence[StateRun],
        adapters: Any = None,
    ) -> int:
        """Change hidden [tokens, width] as the layers do.  Returns how many experts were read.

        hidden   contiguous, in a dtype that the extension has
        angles   cosines and sines as for `rope`, f32 and contiguous
        states   the runs of recurrent layers
        adapters of the step's rows, as `adapters` describes them; None for none
        """
        tokens, width = hidden.shape
        experts: int = self._native.run(
            native_runs(self._extension, runs),
            tuple((cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in angles),
            run_numbers(states),
            hidden.data_ptr(),
            DTYPES[hidden.dtype],
            tokens,
            width,
            self._uses.data_ptr(),
            self._unadapted if adapters is None else adapters,
            torch.get_num_threads(),
        )
        return experts


def stack(native: ModuleType, layers: Sequence[StackLayer]) -> Stack | None:
    """The layers' `Stack`; None where the extension has no kernel for a part of them."""
    kept: list[Tensor] = []
    described = []
    for mixer, second in layers:
        if isinstance(mixer, StackAttention):
            before = _describe_attention(native, mixer, kept)
        else:
            before = _describe_delta(native, mixer, kept)
        if isinstance(second, StackFFN):
            after = _describe_ffn(native, second)
        else:
            after = _describe_experts(native, second)
        if before is None or after is None:
            return None
        described.append((before, after))
    experts = [len(second.experts) for _, second in layers if isinstance(second, StackExperts)]
    halves = [half.projections for layer in layers for half in layer]
    return Stack(native, tuple(described), experts, kept, halves)


def _describe_attention(native: ModuleType, layer: StackAttention, kept: list[Tensor]) -> Any:
    params = layer.params
    inputs = describe_attention_inputs(native, params, layer.inputs, gated=layer.gated)
    output, _ = projections(native, params, ("o_proj",))
    post_norm = native_norm(params, "post_norm", layer.post_norm)
    if inputs is None or not output or post_norm is None:
        return None
    sinks = 0
    if layer.sinks is not None:
        kept.append(layer.sinks)
        sinks = layer.sinks.data_ptr()
    options = layer.scale, layer.window, layer.softcap, sinks
    pages = native_pages(native, layer.pages)
    return native.AttentionLayer(
        inputs, layer.angles, pages, layer.place, options, output, post_norm
    )


def _describe_delta(native: ModuleType, layer: StackDelta, kept: list[Tensor]) -> Any:
    made, constants = describe_delta(native, layer.params, layer.chain)
    kept += constants
    if made is None:
        return None
    return native.DeltaLayer(made, native_states(layer.chain, layer.states))


def _describe_ffn(native: ModuleType, second: StackFFN) -> Any:
    if not second.layer.is_usual or "gate_proj" not in second.params:
        return None
    return native_feed_forward(native, second.params, second.layer)


def _describe_experts(native: ModuleType, second: StackExperts) -> Any:
    params = second.params
    shared: tuple[Any, ...] = ()
    if second.shared is not None:
        down, _ = projections(native, params, ("shared_down_proj",))
        if not down or second.shared not in ACTIVATIONS:
            return None
        shared = second.shared_gated, ACTIVATIONS[second.shared], down
    norm = native_norm(params, "norm", second.norm)
    inputs, _ = projections(native, params, second.inputs)
    experts = [native_expert(native, index, params) for index, params in enumerate(second.experts)]
    if not inputs or norm is None or None in experts or second.activation not in ACTIVATIONS:
        return None
    assert params["router"].shape[0] == len(experts)
    activation = ACTIVATIONS[second.activation]
    return native.SparseLayer(
        norm, inputs, second.top_k, second.renormalise, activation, experts, shared
    )
