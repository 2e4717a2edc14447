"""Routed experts in one call: against layers called one after the other, and against torch."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from encoded import random_weight
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension

NATIVE = extension.load()
ISAS = NATIVE.isas() if NATIVE is not None else ["none"]
FLOAT, INT8 = Activations.FLOAT, Activations.INT8_TOKEN
KINDS = [
    (Encoding.BF16, FLOAT),
    (Encoding.FP8_BLOCK, FLOAT),
    (Encoding.INT4_GROUP, FLOAT),
    (Encoding.INT8_CHANNEL, INT8),
    (Encoding.INT4_GROUP, INT8),
    (Encoding.NVFP4, INT8),
    (Encoding.Q8_0, Activations.INT8_BLOCK),
    (Encoding.Q5_1, Activations.INT8_BLOCK),
    (Encoding.INT4_GROUP, Activations.INT8_GROUP),
    (Encoding.Q5_0, Activations.INT8_GROUP),
]
Params = Mapping[str, WeightTensor]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if NATIVE is None:
        pytest.skip("the extension was not built, or HMT_KERNELS=reference")
    before = NATIVE.isa()
    NATIVE.set_isa(request.param)
    yield request.param
    NATIVE.set_isa(before)


@pytest.fixture
def pool() -> Iterator[None]:
    """Whatever a test does to threads is undone."""
    before, threads = torch.get_num_threads(), None if NATIVE is None else NATIVE.threads()
    yield
    torch.set_num_threads(before)
    if NATIVE is not None:
        NATIVE.set_threads(threads)


def use_threads(count: int) -> None:
    torch.set_num_threads(count)
    if NATIVE is not None:
        NATIVE.set_threads(count)


def floats(data: torch.Tensor) -> WeightTensor:
    encoding = Encoding.F32 if data.dtype is torch.float32 else Encoding.BF16
    return WeightTensor(encoding, tuple(data.shape), data)


def make_experts(
    numbers: list[int],
    hidden: int,
    width: int,
    encoding: Encoding,
    activations: Activations = FLOAT,
    *,
    bias: bool = False,
    seed: int = 0,
) -> list[tuple[int, Params]]:
    """Experts whose outputs are neither tiny nor huge."""
    random = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys(("gate_proj", "up_proj"), (width, hidden))
    shapes["down_proj"] = (hidden, width)
    experts = []
    for number in numbers:
        params = {}
        for index, (name, shape) in enumerate(shapes.items()):
            w = random_weight(
                encoding, *shape, activations=activations, seed=seed + 10 * number + index
            )
            if w.scales is not None and w.scales.dtype.itemsize > 1:
                w.scales.mul_(0.01)
            elif encoding is Encoding.BF16:
                w.data.mul_(0.2)
            params[name] = w
            if bias:
                data = torch.randn(shape[0], generator=random)
                params[f"{name}_bias"] = floats(data if index % 2 else data.bfloat16())
        experts.append((number, params))
    return experts


def route(tokens: int, top_k: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen, scales) [tokens, top_k], in random order."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=random).topk(top_k).indices
    return chosen, torch.rand(tokens, top_k, generator=random) + 0.1


def one_by_one(
    x: torch.Tensor,
    experts: list[tuple[int, Params]],
    chosen: torch.Tensor,
    scales: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """Every layer of every expert by itself."""
    total = torch.zeros(x.shape)
    for number, params in experts:
        tokens, places = torch.where(chosen == number)
        if not len(tokens):
            continue
        rows = x[tokens]

        def project(values: torch.Tensor, name: str, params: Params = params) -> torch.Tensor:
            bias = params.get(f"{name}_bias")
            return ops.linear(values, params[name], None if bias is None else bias.data)

        product = ops.gated(project(rows, "gate_proj"), project(rows, "up_proj"), activation)
        total[tokens] += project(product, "down_proj").float() * scales[tokens, places, None]
    return total.to(x.dtype)


@pytest.mark.parametrize(("encoding", "activations"), KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_layers_one_after_the_other_to_the_bit(isa, encoding, activations, dtype):
    sizes = [(1, 64, 160, 4), (3, 64, 32, 1), (17, 96, 64, 2), (40, 64, 96, 3)]
    for seed, (tokens, hidden, width, top_k) in enumerate(sizes):
        experts = make_experts([0, 1, 4, 5], hidden, width, encoding, activations, seed=seed)
        x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)
        chosen, scales = route(tokens, top_k, 6, seed)
        found = ops.experts(x, experts, chosen, scales, "silu")
        assert found.dtype is dtype
        assert found.isfinite().all() and found.abs().sum() > 0
        assert torch.equal(found, one_by_one(x, experts, chosen, scales))


@pytest.mark.parametrize("encoding", [Encoding.Q4_K, Encoding.Q3_K])
def test_more_tokens_of_an_expert_than_are_multiplied_at_a_time(isa, encoding):
    """256 at most; the other expert has a few, and neither a multiple of 16."""
    experts = make_experts([0, 1], 256, 256, encoding, Activations.INT8_BLOCK)
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(5))
    chosen = (torch.arange(300) % 11 == 0).long()[:, None]  # 28 of 300
    scales = torch.rand(300, 1, generator=torch.Generator().manual_seed(6))
    found = ops.experts(x, experts, chosen, scales, "silu")
    assert found.isfinite().all() and found.abs().sum() > 0
    assert torch.equal(found, one_by_one(x, experts, chosen, scales))


@pytest.mark.parametrize("encoding", [Encoding.BF16, Encoding.INT8_CHANNEL])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "clamped_swish", "clamped_silu"])
def test_odd_sizes_with_biases(isa, encoding, activation):
    activations = FLOAT if encoding is Encoding.BF16 else INT8
    for tokens, hidden, width in [(1, 33, 7), (5, 17, 50), (40, 71, 129)]:
        experts = make_experts([0, 2, 3], hidden, width, encoding, activations, bias=True)
        x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
        chosen, scales = route(tokens, 2, 4, tokens)
        found = ops.experts(x, experts, chosen, scales, activation)
        assert torch.equal(found, one_by_one(x, experts, chosen, scales, activation))


@pytest.mark.parametrize(("encoding", "activations"), KINDS)
def test_experts_without_a_gate_of_their_own(isa, encoding, activations):
    """What goes up is the gate, too: relu(u) u is the square of relu(u), as Nemotron 3 has it."""
    whole = make_experts([0, 1, 2, 3], 64, 32, encoding, activations)
    given = [(n, {k: w for k, w in one.items() if k != "gate_proj"}) for n, one in whole]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    chosen, scales = route(9, 2, 4, 3)
    found = ops.experts(x, given, chosen, scales, "relu")
    total = torch.zeros(x.shape)
    for number, params in given:
        tokens, places = torch.where(chosen == number)
        squared = ops.linear(x[tokens], params["up_proj"]).relu().square()
        total[tokens] += ops.linear(squared, params["down_proj"]) * scales[tokens, places, None]
    assert torch.equal(found, total) and found.abs().sum() > 0
    close = reference.experts(x, given, chosen, scales, "relu")
    bound = 1e-5 if activations is FLOAT else 0.01
    assert ((found - close).abs() <= bound * close.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize(("encoding", "activations"), KINDS)
def test_is_close_to_the_reference(isa, encoding, activations):
    experts = make_experts([0, 1, 2, 3], 64, 32, encoding, activations)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    chosen, scales = route(9, 2, 4, 3)
    wanted = reference.experts(x, experts, chosen, scales, "silu")
    found = ops.experts(x, experts, chosen, scales, "silu")
    # A last place of the activation may move the product to the next of its 127 steps.
    bound = 1e-5 if activations is FLOAT else 0.01
    assert ((found - wanted).abs() <= bound * wanted.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("backend", [ops, reference], ids=["ops", "reference"])
@pytest.mark.parametrize(("encoding", "activations"), KINDS)
@given(data=st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
def test_experts_may_be_spread_over_calls(backend, encoding, activations, data):
    tokens, count = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 7))
    top_k = data.draw(st.integers(1, count))
    experts = make_experts(list(range(count)), 64, 32, encoding, activations)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    chosen, scales = route(tokens, top_k, count, data.draw(st.integers(0, 1000)))
    whole = backend.experts(x, experts, chosen, scales, "silu")
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    total = None
    for begin, end in zip([0, *cuts], [*cuts, count], strict=True):
        total = backend.experts(
            x, experts[begin:end], chosen, scales, "silu", total, last=end == count
        )
        if end == count:
            break
        assert total.dtype is torch.float32
    assert torch.equal(total, whole)


@pytest.mark.parametrize(("encoding", "activations"), KINDS)
def test_threads_do_not_matter(isa, pool, encoding, activations):
    experts = make_experts(list(range(6)), 64, 96, encoding, activations)
    for tokens in (1, 30):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
        chosen, scales = route(tokens, 3, 6, 7)
        results = []
        for threads in (1, 2, 5):
            use_threads(threads)
            results.append(ops.experts(x, experts, chosen, scales, "silu"))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("encoding", [Encoding.INT8_CHANNEL, Encoding.INT4_GROUP])
def test_a_token_does_not_depend_on_the_others(isa, encoding):
    experts = make_experts(list(range(5)), 64, 96, encoding, INT8)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(8)).bfloat16()
    chosen, scales = route(50, 2, 5, 8)
    alone = [
        ops.experts(x[t, None], experts, chosen[t, None], scales[t, None], "silu")
        for t in range(50)
    ]
    assert torch.equal(ops.experts(x, experts, chosen, scales, "silu"), torch.cat(alone))


@pytest.mark.parametrize("tokens", [1, 16, 333])
def test_all_tokens_to_one_expert(tokens):
    experts = make_experts([0, 1, 2], 64, 48, Encoding.INT8_CHANNEL, INT8)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    chosen = torch.full((tokens, 1), 1)
    scales = torch.full((tokens, 1), 0.5)
    wanted = one_by_one(x, experts, chosen, scales)
    assert torch.equal(ops.experts(x, experts, chosen, scales, "silu"), wanted)


def test_more_tokens_than_one_batch_holds(pool):
    experts = make_experts(list(range(8)), 128, 96, Encoding.BF16)
    x = torch.randn(1100, 128, generator=torch.Generator().manual_seed(10)).bfloat16()
    chosen, scales = route(1100, 7, 8, 10)
    wanted = one_by_one(x, experts, chosen, scales)
    for threads in (1, 2):
        use_threads(threads)
        assert torch.equal(ops.experts(x, experts, chosen, scales, "silu"), wanted)


def test_rows_of_a_larger_matrix():
    experts = make_experts([0, 1], 64, 32, Encoding.INT8_CHANNEL, INT8)
    wide = torch.randn(6, 100, generator=torch.Generator().manual_seed(11)).bfloat16()
    chosen, scales = route(6, 2, 2, 11)
    x = wide[:, 20:84]
    found = ops.experts(x, experts, chosen, scales, "silu")
    assert torch.equal(found, ops.experts(x.contiguous(), experts, chosen, scales, "silu"))
    turned = x.contiguous().T.contiguous().T
    assert torch.equal(found, ops.experts(turned, experts, chosen, scales, "silu"))


@pytest.mark.parametrize("backend", [ops, reference], ids=["ops", "reference"])
def test_experts_that_are_not_given_count_for_nothing(backend):
    experts = make_experts([1, 3], 64, 32, Encoding.BF16)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(12)).bfloat16()
    chosen = torch.tensor([[0, 2], [5, 1], [3, 1], [9, 4]])
    scales = torch.ones(4, 2)
    out = backend.experts(x, experts, chosen, scales, "silu")
    assert not out[[0, 3]].any() and out[1].any() and out[2].any()
    start = torch.randn(4, 64)
    total = backend.experts(x, experts, chosen, scales, "silu", start.clone(), last=False)
    assert torch.equal(total[[0, 3]], start[[0, 3]])
    assert not torch.equal(total[[1, 2]], start[[1, 2]])
    nothing = backend.experts(x, [], chosen, scales, "silu", start.clone())
    assert torch.equal(nothing, start.bfloat16())
    assert not backend.experts(x, [], chosen, scales, "silu").any()


@pytest.mark.parametrize("backend", [ops, reference], ids=["ops", "reference"])
def test_no_tokens(backend):
    experts = make_experts([0], 64, 32, Encoding.BF16)
    nobody = torch.empty(0, 2, dtype=torch.int64)
    out = backend.experts(torch.empty(0, 64), experts, nobody, torch.empty(0, 2), "silu")
    assert out.shape == (0, 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_spreads_to_its_token_only(isa, bad):
    experts = make_experts([0, 1], 64, 32, Encoding.INT4_GROUP, INT8)
    x = torch.ones(3, 64).bfloat16()
    x[1, 5] = bad
    chosen, scales = route(3, 2, 2, 13)
    out = ops.experts(x, experts, chosen, scales, "silu")
    assert not out[1].isfinite().any() and out[[0, 2]].isfinite().all()


def test_a_weight_without_a_kernel_takes_the_slow_way():
    experts = make_experts([0, 1], 64, 32, Encoding.BF16)
    up = experts[1][1]["up_proj"]
    turned = up.data.T.contiguous().T  # not row-major
    experts[1] = (1, {**experts[1][1], "up_proj": floats(turned)})
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(14)).bfloat16()
    chosen, scales = route(3, 2, 2, 14)
    wanted = reference.experts(x, experts, chosen, scales, "silu")
    found = ops.experts(x, experts, chosen, scales, "silu")
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
