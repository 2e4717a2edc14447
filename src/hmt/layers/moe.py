"""Mixture of experts: choosing experts for each token, and computing only those."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hmt.contracts.blocks import BlockId, BlockKind, ParamSpec, Role
from hmt.contracts.sharding import RankShare
from hmt.contracts.store import Priority, Weights
from hmt.kernels import fused_ops, ops
from hmt.layers.ffn import GatedFFN
from hmt.layers.linear import Params, project
from hmt.layers.norm import RMSNorm


@dataclass(slots=True)
class Routing:
    """Which experts each token goes to.

    experts   int64 [tokens, top_k]
    scales    f32 [tokens, top_k]: what the experts' outputs are multiplied with
    ending    of the work that a backend has begun: see `MoeBackend`
    """

    experts: Tensor
    scales: Tensor
    ending: Callable[..., Tensor] | None = None
    _blocks: list[BlockId] = field(default_factory=list)

    def blocks(self, layer: int, share: RankShare | None = None) -> list[BlockId]:
        """The chosen experts of `layer`, the routing's own, each once, in ascending order.

        share   of the rank whose experts are wanted alone
        """
        if not self._blocks:
            # For the 8 experts of one token, `unique` takes five times as long.
            chosen = {expert for token in self.experts.tolist() for expert in token}
            if share is not None and (own := share.experts) is not None:
                chosen.intersection_update(range(own.first, own.end))
            self._blocks = [BlockId(layer, BlockKind.EXPERT, expert) for expert in sorted(chosen)]
        return self._blocks


class Router(Protocol):
    """Chooses `top_k` of `experts` for each token."""

    @property
    def experts(self) -> int:
        """How many there are."""
        ...

    @property
    def top_k(self) -> int:
        """How many a token goes to."""
        ...

    def __call__(self, x: Tensor, params: Params) -> Routing:
        """Experts for x [tokens, hidden_size]."""
        ...


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The top_k of a softmax over all experts (Mixtral, arXiv 2401.04088; Qwen3-MoE).

    renormalise   make the chosen probabilities of a token add up to 1
    bias          of the logits (gpt-oss)
    """

    hidden_size: int
    experts: int
    top_k: int
    renormalise: bool
    bias: bool = False

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """The router's weight, `at`.weight in the checkpoint, and its bias if it has one."""
        bias = ParamSpec("router_bias", (self.experts,), (f"{at}.bias",), Role.VECTOR)
        weight = _router_param(self.experts, self.hidden_size, at)
        return (weight, bias) if self.bias else (weight,)

    def __call__(self, x: Tensor, params: Params) -> Routing:
        """Experts for x [tokens, hidden_size]; logits in x.dtype, probabilities in f32."""
        logits = project(x, params, "router")
        return Routing(*ops.softmax_topk(logits, self.top_k, renormalise=self.renormalise))


@dataclass(frozen=True, slots=True)
class ScaledSoftmaxRouter:
    """Gemma 4: as a SoftmaxRouter, with a norm and scales of its own, and one for each expert.

    eps   of the norm, which has no weight
    """

    hidden_size: int
    experts: int
    top_k: int
    eps: float

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """The router's weight and scales, `at` + proj, scale and per_expert_scale."""
        return (
            _router_param(self.experts, self.hidden_size, f"{at}proj"),
            ParamSpec("router_scale", (self.hidden_size,), (f"{at}scale",), Role.VECTOR),
            ParamSpec("expert_scale", (self.experts,), (f"{at}per_expert_scale",), Role.VECTOR),
        )

    def __call__(self, x: Tensor, params: Params) -> Routing:
        """Experts for x [tokens, hidden_size], not normed; probabilities in f32."""
        ones = torch.ones(self.hidden_size, dtype=x.dtype, device=x.device)
        scaled = ops.rms_norm(x, ones, self.eps) * params["router_scale"].data.to(x.dtype)
        logits = ops.linear(scaled * self.hidden_size**-0.5, params["router"])
        chosen, scales = ops.softmax_topk(logits, self.top_k, renormalise=True)
        return Routing(chosen, scales * params["expert_scale"].data.float()[chosen])


@dataclass(frozen=True, slots=True)
class GroupedSoftmaxRouter:
    """DeepSeek-V2: softmax, from the `kept_groups` groups with the best expert (arXiv 2405.04434).

    groups   experts are split into this many equal groups; with 1 all experts compete ("greedy")
    scale    what probabilities are multiplied with
    """

    hidden_size: int
    experts: int
    top_k: int
    groups: int
    kept_groups: int
    scale: float

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """The router's weight, `at`.weight in the checkpoint."""
        return (_router_param(self.experts, self.hidden_size, at),)

    def __call__(self, x: Tensor, params: Params) -> Routing:
        """Experts for x [tokens, hidden_size]; computed in f32."""
        return self.choose(ops.linear(x.float(), params["router"]), params)

    def choose(self, logits: Tensor, params: Params) -> Routing:
        """Experts by f32 logits [tokens, experts]."""
        chosen = ops.grouped_softmax_topk(
            logits,
            self.top_k,
            groups=self.groups,
            kept_groups=self.kept_groups,
            scale=self.scale,
        )
        return Routing(*chosen)


@dataclass(frozen=True, slots=True)
class BiasedSigmoidRouter:
    """DeepSeek-V3: sigmoid affinities, balanced by a bias (arXiv 2412.19437, section 2.1.2).

    The bias takes part in the choice only.  Groups are ranked by the sum of their two best.
    """

    hidden_size: int
    experts: int
    top_k: int
    groups: int
    kept_groups: int
    renormalise: bool
    scale: float

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """The router's weight and bias, `at`.weight and `at`.e_score_correction_bias."""
        bias = f"{at}.e_score_correction_bias"
        return (
            _router_param(self.experts, self.hidden_size, at),
            ParamSpec("router_bias", (self.experts,), (bias,), Role.VECTOR),
        )

    def __call__(self, x: Tensor, params: Params) -> Routing:
        """Experts for x [tokens, hidden_size]; computed in f32."""
        return self.choose(ops.linear(x.float(), params["router"]), params)

    def choose(self, logits: Tensor, params: Params) -> Routing:
        """Experts by f32 logits [tokens, experts]."""
        chosen = ops.biased_sigmoid_topk(
            logits,
            params["router_bias"].data,
            self.top_k,
            groups=self.groups,
            kept_groups=self.kept_groups,
            renormalise=self.renormalise,
            scale=self.scale,
        )
        return Routing(*chosen)


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """LFM2-MoE: the top_k of sigmoids, in the choice of which a bias may take part.

    renormalise   make the chosen scales of a token add up to `scale`
    """

    hidden_size: int
    experts: int
    top_k: int
    biased: bool
    renormalise: bool
    scale: float

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """The router's weight, `at`gate.weight, and its bias, `at`expert_bias."""
        shape = (self.experts, self.hidden_size)
        weight = ParamSpec("router", shape, (f"{at}gate.weight",), Role.VECTOR)
        bias = ParamSpec("router_bias", shape[:1], (f"{at}expert_bias",), Role.VECTOR)
        return (weight, bias) if self.biased else (weight,)

    def __call__(self, x: Tensor, params: Params) -> Routing:
        """Experts for x [tokens, hidden_size]; probabilities in f32."""
        likely = ops.sigmoid(ops.linear(x, params["router"]))
        wanted = likely + params["router_bias"].data.float() if self.biased else likely
        chosen = wanted.topk(self.top_k, dim=-1).indices
        scales = likely.gather(1, chosen)
        if self.renormalise:
            scales = scales / (scales.sum(-1, keepdim=True) + 1e-6)
        return Routing(chosen, scales * self.scale)


@dataclass(frozen=True, slots=True)
class SoftplusRouter:
    """DeepSeek-V4: the top_k of square roots of softplus, scales that add up to `scale`.

    A bias takes part in the choice only.  By a table, what is chosen is the token's alone, and
    only the scales depend on hidden states.

    by_token   by a table of each token's experts, instead of the bias
    """

    hidden_size: int
    experts: int
    top_k: int
    scale: float
    vocab_size: int
    by_token: bool = False

    def params(self, at: str) -> tuple[ParamSpec, ...]:
        """The router's weight, `at`.weight, and `at`.bias, or the table, `at`.tid2eid."""
        weight = _router_param(self.experts, self.hidden_size, at)
        if self.by_token:
            shape = self.vocab_size, self.top_k
            return (weight, ParamSpec("expert_ids", shape, (f"{at}.tid2eid",), Role.VECTOR))
        return (weight, ParamSpec("router_bias", (self.experts,), (f"{at}.bias",), Role.VECTOR))

    def __call__(self, x: Tensor, params: Params, token_ids: Tensor | None = None) -> Routing:
        """Experts for x [tokens, hidden_size]; computed in f32.

        token_ids   int64 [tokens], where the table chooses; None: a guess, by scores alone
        """
        logits = ops.linear(x.float(), params["router"]).contiguous()
        # torch's own softplus may compute the end of a tensor by other code: see `ops.sigmoid`.
        likely = torch.where(logits > 20, logits, torch.log1p(torch.exp(logits))).sqrt()
        if token_ids is not None and self.by_token:
            table = params["expert_ids"].data
            chosen = table[token_ids.to(table.device)].to(device=x.device, dtype=torch.int64)
        else:
            bias = params.get("router_bias")
            wanted = likely if bias is None else likely + bias.data.float()
            order = wanted.sort(stable=True, dim=-1, descending=True).indices
            chosen = order[:, : self.top_k].contiguous()
        scales = likely.gather(1, chosen)
        first, *others = scales.unbind(1)
        for other in others:  # in this order, whatever the number of tokens
            first = first + other
        return Routing(chosen, scales / (first[:, None] + 1e-20) * self.scale)


def request_experts(
    x: Tensor, routing: Routing, hidden: Tensor, layer: int, expert: GatedFFN, weights: Weights
) -> None:
    """Ask for all chosen experts at once, as soon as they are known, or let a backend begin.

    hidden [tokens, hidden_size] is what the router saw, before its norm, and x after it.
    """
    backend = None if expert.share is not None else weights.moe_backend(layer)
    if backend is not None:
        routing.ending = backend.begin(x, routing.experts, routing.scales, expert.activation)
        return
    weights.request(routing.blocks(layer, expert.share), Priority.DEMAND)
    weights.routed(layer, hidden, routing.experts, routing.scales)


def routed_experts(
    x: Tensor, routing: Routing, layer: int, expert: GatedFFN, weights: Weights
) -> Tensor:
    """The chosen experts' outputs for x [tokens, hidden_size], scaled and added up; in x.dtype.

    Leases only chosen experts, always in ascending order, as many at a time as are there: the sum,
    kept in f32, does not depend on which expert arrived first.  A backend adds up what each of its
    places has computed.  With a share, those of the other ranks are in the sum, too.
    """
    assert not expert.prefix
    if routing.ending is not None:
        return routing.ending()
    blocks = routing.blocks(layer, expert.share)
    total = None
    done = 0
    with weights.lease_each(blocks) as groups:
        for group in groups:
            done += len(group)
            total = ops.experts(
                x,
                [(block.index, params) for block, params in group],
                routing.experts,
                routing.scales,
                expert.activation,
                total,
                last=done == len(blocks),
            )
    found = torch.zeros_like(x) if total is None else total
    return found if expert.share is None else expert.share.collective.add(found)


def add_routed_experts(
    hidden: Tensor,
    shared: Tensor,
    x: Tensor,
    routing: Routing,
    layer: int,
    expert: GatedFFN,
    weights: Weights,
) -> Tensor:
    """hidden + (routed_experts(x, ...) + shared), all [tokens, hidden_size] in x.dtype."""
    if routing.ending is not None:
        return routing.ending((hidden, shared))
    return hidden + (routed_experts(x, routing, layer, expert, weights) + shared)


def router_inputs(
    hidden: Tensor, x: Tensor | None, norm: RMSNorm, params: Params
) -> tuple[Tensor, Tensor]:
    """hidden += x, in place; its norm, and f32 logits [tokens, experts] of `router`.

    hidden and x [tokens, hidden_size]; the norm's weight is `norm` of `params`.
    """
    return fused_ops.router_inputs(hidden, x, params["norm"].data, norm.options, params["router"])


def _router_param(experts: int, hidden_size: int, at: str) -> ParamSpec:
    # VECTOR: rounding the router changes which experts are chosen, and it is small.
    return ParamSpec("router", (experts, hidden_size), (f"{at}.weight",), Role.VECTOR)
