"""Routers against transformers' modules, and the sum over routed experts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.contracts.store import LeasedGroup, Priority
from hmt.layers import (
    BiasedSigmoidRouter,
    GatedFFN,
    GroupedSoftmaxRouter,
    Routing,
    SoftmaxRouter,
    request_experts,
    routed_experts,
)

HIDDEN, TOKENS = 16, 9


@st.composite
def shapes(draw: st.DrawFn) -> SimpleNamespace:
    """What transformers' routers read from a configuration."""
    groups = draw(st.integers(1, 5))
    group = draw(st.integers(2, 6))
    kept = draw(st.integers(1, groups))
    return SimpleNamespace(
        hidden_size=HIDDEN,
        num_experts=groups * group,
        num_local_experts=groups * group,
        num_experts_per_tok=draw(st.integers(1, kept * group)),
        n_group=groups,
        topk_group=kept,
        topk_method="group_limited_greedy",
        routed_scaling_factor=draw(st.floats(0.5, 16.0)),
        norm_topk_prob=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def check_router(shape: SimpleNamespace, router: Any, reference: torch.nn.Module) -> None:
    """Same experts with the same scales, in any order."""
    generator = torch.Generator().manual_seed(shape.seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    params = {}
    with torch.no_grad():
        for name, tensor in (*reference.named_parameters(), *reference.named_buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
            local = "router" if name == "weight" else "router_bias"
            params[local] = WeightTensor(Encoding.F32, tuple(tensor.shape), tensor)
        assert {param.name for param in router.params("gate")} == params.keys()
        _, scales, experts = reference(x)
    routing = router(x, params)
    got = torch.zeros(TOKENS, shape.num_experts).scatter(1, routing.experts, routing.scales)
    wanted = torch.zeros(TOKENS, shape.num_experts).scatter(1, experts, scales)
    torch.testing.assert_close(got, wanted)
    chosen = [experts.unique().numel() for experts in routing.experts]
    assert chosen == [shape.num_experts_per_tok] * TOKENS


@given(shapes())
@settings(max_examples=40, deadline=None)
def test_softmax_router(shape: SimpleNamespace) -> None:
    sizes = (HIDDEN, shape.num_experts, shape.num_experts_per_tok)
    check_router(shape, SoftmaxRouter(*sizes, renormalise=True), MixtralTopKRouter(shape))
    router = SoftmaxRouter(*sizes, renormalise=shape.norm_topk_prob)
    check_router(shape, router, Qwen3MoeTopKRouter(shape))


@given(shapes())
@settings(max_examples=40, deadline=None)
def test_grouped_softmax_router(shape: SimpleNamespace) -> None:
    sizes = (HIDDEN, shape.num_experts, shape.num_experts_per_tok)
    scale = shape.routed_scaling_factor
    router = GroupedSoftmaxRouter(*sizes, shape.n_group, shape.topk_group, scale)
    check_router(shape, router, DeepseekV2TopkRouter(shape))
    shape.topk_method = "greedy"
    router = GroupedSoftmaxRouter(*sizes, groups=1, kept_groups=1, scale=scale)
    check_router(shape, router, DeepseekV2TopkRouter(shape))


@given(shapes())
@settings(max_examples=40, deadline=None)
def test_biased_sigmoid_router(shape: SimpleNamespace) -> None:
    router = BiasedSigmoidRouter(
        HIDDEN,
        shape.num_experts,
        shape.num_experts_per_tok,
        shape.n_group,
        shape.topk_group,
        shape.norm_topk_prob,
        shape.routed_scaling_factor,
    )
    check_router(shape, router, DeepseekV3TopkRouter(shape))


class Leased(dict[str, WeightTensor]):
    """Parameters that may be used only while they are leased."""

    def __init__(
        self, params: Mapping[str, WeightTensor], block: BlockId, experts: "Experts"
    ) -> None:
        super().__init__(params)
        self.block, self.experts = block, experts

    def __getitem__(self, name: str) -> WeightTensor:
        assert self.block in self.experts.open
        return super().__getitem__(name)


class Experts:
    """Weights that hold the experts of layer 3 and note what happens to them."""

    def __init__(self, ffn: GatedFFN, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = {}
        for expert in range(count):
            block = BlockId(3, BlockKind.EXPERT, expert)
            self.params[block] = {
                param.name: WeightTensor(
                    Encoding.F32, param.shape, torch.randn(param.shape, generator=generator)
                )
                for param in ffn.params("expert.")
            }
        self.groups = torch.Generator().manual_seed(seed)
        self.leased: list[BlockId] = []
        self.open: list[BlockId] = []
        self.requests: list[tuple[list[BlockId], Priority]] = []
        self.heard: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def lease_each(self, blocks: Sequence[BlockId]) -> Iterator[Iterator[LeasedGroup]]:
        """In groups of random sizes."""
        assert not self.open
        yield self._in_groups(list(blocks))
        self.open = []

    def _in_groups(self, blocks: list[BlockId]) -> Iterator[LeasedGroup]:
        while blocks:
            size = int(torch.randint(1, 4, (), generator=self.groups))
            self.open, blocks = blocks[:size], blocks[size:]
            self.leased += self.open
            yield [(block, Leased(self.params[block], block, self)) for block in self.open]

    def lease(self, block: BlockId) -> AbstractContextManager[Mapping[str, WeightTensor]]:
        raise NotImplementedError

    def request(self, blocks: Sequence[BlockId], priority: Priority) -> None:
        self.requests.append((list(blocks), priority))

    def moe_backend(self, layer: int) -> None:
        return None

    def routed(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor
    ) -> None:
        assert self.requests, "reads come before anything that takes time"
        self.heard.append((layer, hidden, experts, scales))

    def rows(self, block: BlockId, name: str, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 12), top_k=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_routed_experts_add_up(dtype: torch.dtype, seed: int, tokens: int, top_k: int) -> None:
    ffn = GatedFFN(HIDDEN, 24, "silu")
    experts = Experts(ffn, 6, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    scores = torch.rand(tokens, 6, generator=generator)
    scales, chosen = scores.topk(top_k)

    hidden = x.clone()
    request_experts(x, Routing(chosen, scales), hidden, 3, ffn, experts)
    got = routed_experts(x, Routing(chosen, scales), 3, ffn, experts)

    needed = sorted(BlockId(3, BlockKind.EXPERT, e) for e in chosen.unique().tolist())
    assert experts.leased == needed
    assert not experts.open
    assert experts.requests == [(needed, Priority.DEMAND)]
    ((layer, *heard),) = experts.heard
    assert layer == 3
    assert all(a is b for a, b in zip(heard, (hidden, chosen, scales), strict=True))
    assert got.dtype is dtype
    wanted = torch.stack(
        [
            sum(
                ffn(x[t, None], experts.params[BlockId(3, BlockKind.EXPERT, e)])[0].double() * s
                for e, s in zip(chosen[t].tolist(), scales[t].tolist(), strict=True)
            )
            for t in range(tokens)
        ]
    )
    torch.testing.assert_close(
        got, wanted.to(dtype), rtol=1e-4 if dtype is torch.float32 else 0.05, atol=1e-2
    )
    # The sum depends neither on the order in which a token's experts are listed nor on groups.
    back = Routing(chosen.flip(-1), scales.flip(-1))
    assert torch.equal(got, routed_experts(x, back, 3, ffn, experts))
