"""What one token needs around latent attention, against the chain of operations it stands for."""

import pytest
import torch
from triton_weights import random_weight

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import reference
from hmt.kernels.reference import LatentLayer, NormOptions
from hmt.kernels.reference.kv_pages import (
    AttentionMetadata,
    PagedSegment,
    PageEncoding,
    PageLayout,
    Pages,
)
from hmt.kernels.triton.attention import mla_layer
from hmt.kernels.triton.attention.metadata import device_runs
from hmt.kernels.triton.attention.mla_fused import absorb, takes_expansion, values_of
from hmt.kernels.triton.attention.tuning import Plan
from hmt.kernels.triton.device_math import interpreted
from hmt.kernels.triton.moe import router_norm

# Triton's interpreter rounds bf16 wrongly.
KIND = torch.float16 if interpreted() else torch.bfloat16
EPS = 1e-6


def make_layer(heads=3, rank=128, nope=32, rope=16, value=64, interleaved=True) -> LatentLayer:
    return LatentLayer(
        heads, rank, nope, rope, value, 0.1, interleaved, NormOptions(EPS), ("q_proj", "kv_a_proj")
    )


def random_tensor(*sizes: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(device).to(KIND)


def plain(values: torch.Tensor) -> WeightTensor:
    return WeightTensor(Encoding.BF16, tuple(values.shape), values)


def expansion(layer: LatentLayer, device: torch.device, **options: object) -> WeightTensor:
    rows = layer.heads * (layer.nope_dim + layer.value_dim)
    options = {"spread": False, **options}
    return random_weight(Encoding.INT4_GROUP, rows, layer.kv_rank, device=device, **options)


def exact(w: WeightTensor, layer: LatentLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """To keys and to values, f64 [heads, .., kv_rank]."""
    numbers = reference.dequantize(w, torch.float32).double().unflatten(0, (layer.heads, -1))
    return numbers[:, : layer.nope_dim], numbers[:, layer.nope_dim :]


def make_pages(layer: LatentLayer, device: torch.device, count: int = 8, layers: int = 2) -> Pages:
    encoding = PageEncoding.of(KIND)
    layout = PageLayout(encoding, 1, layer.kv_rank + layer.rope_dim, layer.kv_rank, True, rows=True)
    memory = torch.zeros(count, layers, layout.page_bytes, dtype=torch.uint8, device=device)
    return Pages(layout, memory)


def runs_at(starts: list[int], device: torch.device) -> AttentionMetadata:
    tables = [torch.arange(4, device=device).flip(0) + 4 * row for row in range(len(starts))]
    return AttentionMetadata(
        tuple(PagedSegment(row, 1, start, tables[row]) for row, start in enumerate(starts))
    )


def angles_of(layer: LatentLayer, tokens: int, device: torch.device):
    angle = torch.rand(tokens, layer.rope_dim // 2, generator=torch.Generator().manual_seed(5))
    angle = angle.repeat(1, 2).to(device) * 6
    return angle.cos(), angle.sin()


def assert_close(found: torch.Tensor, expected: torch.Tensor, part: float = 2**-7) -> None:
    size = expected.abs().max().item()
    torch.testing.assert_close(found.double(), expected.double(), rtol=2 * part, atol=size * part)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tokens", "group", "scale_dtype"), [
    (1, 32, torch.bfloat16), (3, 64, torch.float32),
])  # fmt: skip
def test_absorbed_queries_and_new_rows(device, tokens, group, scale_dtype, interleaved):
    layer = make_layer(rank=4 * group, interleaved=interleaved)
    w = expansion(layer, device, group=group, scale_dtype=scale_dtype)
    assert takes_expansion(w, layer, tokens)
    width = layer.nope_dim + layer.rope_dim
    projected = random_tensor(tokens, layer.heads * width + layer.kv_rank + layer.rope_dim,
                              device=device)  # fmt: skip
    query, row = projected[:, : layer.heads * width], projected[:, layer.heads * width :]
    norm, angles = (
        random_tensor(layer.kv_rank, device=device, seed=3),
        angles_of(layer, tokens, device),
    )
    pages, runs = make_pages(layer, device, 4 * tokens), runs_at([17, 0, 63][:tokens], device)
    expected_pages = make_pages(layer, device, 4 * tokens)
    (held,) = device_runs(runs, device)
    found = absorb(query, row, w, norm, EPS, angles, pages, 1, held, layer)

    heads = query.unflatten(1, (layer.heads, width))
    nope, turning = heads.split((layer.nope_dim, layer.rope_dim), dim=-1)
    turned = reference.rope(turning, *angles, interleaved=interleaved)
    absorbed = torch.einsum("thn,hnr->thr", nope.double(), exact(w, layer)[0])
    assert_close(found[..., : layer.kv_rank], absorbed)
    assert torch.equal(found[..., layer.kv_rank :], turned)

    latent = reference.rms_norm(row[:, : layer.kv_rank].contiguous(), norm, EPS)
    shared = reference.rope(row[:, None, layer.kv_rank :], *angles, interleaved=interleaved)
    key = torch.cat((latent[:, None], shared), dim=-1)
    reference.append_pages(expected_pages, 1, runs, key, None)
    both = (p.memory.view(KIND).double() for p in (pages, expected_pages))
    torch.testing.assert_close(*both, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 2])
def test_values(device, tokens):
    layer = make_layer()
    w = expansion(layer, device)
    mixed = random_tensor(tokens, layer.heads, layer.kv_rank, device=device)
    (held,) = device_runs(runs_at([3] * tokens, device), device)
    plan = Plan(16, 16, 4, 1, one_sweep=True)
    found = values_of((plan, mixed, None, None), w, held, layer)
    expected = torch.einsum("thr,hvr->thv", mixed.double(), exact(w, layer)[1])
    assert_close(found.unflatten(1, (layer.heads, -1)), expected)


@pytest.mark.parametrize("starts", [[700, 190], [5000]])
def test_parts_of_a_context_as_one(device, starts):
    layer, tokens = make_layer(), len(starts)
    w = expansion(layer, device)
    (held,) = device_runs(runs_at([start % 64 for start in starts], device), device)
    held.spans[2] = torch.tensor(starts)
    plan = Plan(16, 16, 4, 1, one_sweep=True, split=True, few=40, parts=40, least=128, launched=40)
    parts = torch.randn(tokens, 40, 16, layer.kv_rank, generator=torch.Generator().manual_seed(1))
    logs = torch.randn(tokens, 40, 16, generator=torch.Generator().manual_seed(2)) * 3
    expected = torch.zeros(tokens, layer.heads, layer.value_dim, dtype=torch.float64)
    for run, start in enumerate(starts):
        count = -(-(start + 1) // 128)
        parts[run, count:], logs[run, count:] = torch.nan, torch.nan
        weight = (logs[run, :count, : layer.heads, None].double() * 0.6931471805599453).softmax(0)
        mixed = (parts[run, :count, : layer.heads].double() * weight).sum(0)
        expected[run] = torch.einsum("hr,hvr->hv", mixed, exact(w, layer)[1].cpu())
    nothing = torch.full((tokens, layer.heads, layer.kv_rank), torch.nan, dtype=KIND)
    given = (plan, nothing.to(device), parts.to(device), logs.to(device))
    found = values_of(given, w, held, layer).unflatten(1, (layer.heads, -1))
    assert_close(found.cpu(), expected)


def test_expansions_without_a_kernel(device):
    layer = make_layer()
    assert not takes_expansion(expansion(layer, device, offsets="zeros"), layer, 1)
    assert not takes_expansion(expansion(layer, device), layer, 17)
    assert not takes_expansion(expansion(layer, device), make_layer(rank=96), 1)


@pytest.mark.parametrize("activations", [Activations.FLOAT, Activations.INT8_TOKEN])
@pytest.mark.parametrize("compressed", [False, True])
def test_the_whole_of_it(device, activations, compressed):
    hidden_size, tokens, layer = 64, 2, make_layer()
    if compressed:
        layer = LatentLayer(
            3, 128, 32, 16, 64, 0.1, True, NormOptions(EPS), ("q_a_proj", "kv_a_proj")
        )
    wide = layer.heads * (layer.nope_dim + layer.rope_dim)
    shapes = {"kv_a_proj": (144, hidden_size), "o_proj": (hidden_size, layer.heads * 64)}
    if compressed:
        shapes |= {"q_a_proj": (64, hidden_size), "q_b_proj": (wide, 64)}
    else:
        shapes |= {"q_proj": (wide, hidden_size)}
    params = {
        name: random_weight(
            Encoding.INT4_GROUP, *shape, device=device, spread=False, activations=activations,
            seed=shape[0],
        )
        for name, shape in shapes.items()
    }  # fmt: skip
    params["kv_b_proj"] = expansion(layer, device)
    for name, size in (("norm", hidden_size), ("q_a_norm", 64), ("kv_a_norm", layer.kv_rank)):
        params[name] = plain(random_tensor(size, device=device, seed=size))
    hidden, starts = random_tensor(tokens, hidden_size, device=device), [5, 40]
    angles, pages, runs = angles_of(layer, tokens, device), make_pages(layer, device), None
    runs = runs_at(starts, device)
    pages.memory.view(KIND).normal_(0, 0.5)
    other = Pages(pages.layout, pages.memory.clone())
    expected = hidden + by_parts(hidden, params, layer, angles, other, runs_at(starts, device))
    norm = NormOptions(EPS)
    assert mla_layer.add_latent_attention(hidden, params, layer, norm, angles, pages, 1, runs)
    assert_close(hidden, expected, 2**-5)
    assert_close(pages.memory.view(KIND), other.memory.view(KIND), 2**-5)


def by_parts(hidden, params, layer, angles, pages, runs):
    """The attention by operations of the reference."""
    x = reference.rms_norm(hidden, params["norm"].data, EPS)
    query, row = (reference.linear(x, params[name]) for name in layer.names)
    if "q_b_proj" in params:
        query = reference.rms_norm(query, params["q_a_norm"].data, EPS)
        query = reference.linear(query, params["q_b_proj"])
    nope, turning = query.unflatten(1, (layer.heads, -1)).split((32, 16), dim=-1)
    latent = reference.rms_norm(row[:, :128].contiguous(), params["kv_a_norm"].data, EPS)
    shared = reference.rope(row[:, None, 128:], *angles, interleaved=True)
    reference.append_pages(pages, 1, runs, torch.cat((latent[:, None], shared), dim=-1), None)
    to_key, to_value = (part.float() for part in exact(params["kv_b_proj"], layer))
    absorbed = torch.einsum("thn,hnr->thr", nope.float(), to_key).to(KIND)
    turned = reference.rope(turning, *angles, interleaved=True)
    asked = torch.cat((absorbed, turned), dim=-1)
    mixed = reference.paged_attention_output(pages, 1, runs, asked, scale=layer.scale)
    values = torch.einsum("thr,hvr->thv", mixed.float(), to_value).to(KIND)
    return reference.linear(values.flatten(1), params["o_proj"])


def test_longer_runs_are_left_to_others(device):
    layer, pages = make_layer(), make_pages(make_layer(), device)
    runs = AttentionMetadata((PagedSegment(0, 2, 0, torch.arange(4, device=device)),))
    params = {"kv_b_proj": expansion(layer, device)}
    hidden = random_tensor(2, 64, device=device)
    angles, norm = angles_of(layer, 2, device), NormOptions(EPS)
    assert not mla_layer.add_latent_attention(hidden, params, layer, norm, angles, pages, 1, runs)


@pytest.mark.parametrize(("tokens", "width", "experts"), [(1, 96, 7), (3, 256, 16), (9, 64, 8)])
@pytest.mark.parametrize("added", [False, True])
def test_router_inputs(device, tokens, width, experts, added):
    hidden = random_tensor(tokens, width, device=device)
    x = random_tensor(tokens, width, device=device, seed=2) if added else None
    norm = random_tensor(width, device=device, seed=3)
    router = WeightTensor(
        Encoding.F32, (experts, width), random_tensor(experts, width, device=device).float()
    )
    expected_hidden = hidden.clone()
    options = NormOptions(EPS)
    expected = reference.router_inputs(expected_hidden, x, norm, options, router)
    found = router_norm.router_inputs(hidden, x, norm, options, router)
    assert torch.equal(hidden, expected_hidden)
    assert found[1].dtype is torch.float32
    assert_close(found[0], expected[0], 2**-9)
    assert_close(found[1], expected[1], 2**-9)
