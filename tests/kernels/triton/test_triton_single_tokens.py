"""Steps of several tokens in which each has the bits of a step of its own."""

from functools import partial

import pytest
import torch
from test_triton_paged_attention import Scene
from triton_weights import random_blocks, random_weight

from hmt.contracts.encoding import BLOCK_SHAPES, Activations, Encoding, WeightTensor
from hmt.kernels import reference
from hmt.kernels.reference import (
    AttentionInputs,
    FeedForward,
    NormOptions,
    PagedSegment,
    PageEncoding,
    PageLayout,
)
from hmt.kernels.reference.kv_pages import by_token
from hmt.kernels.triton import fused_layers
from hmt.kernels.triton.attention import metadata, paged
from hmt.kernels.triton.attention.mla_layer import head_products
from hmt.kernels.triton.device_math import interpreted
from hmt.kernels.triton.gemm import dispatch
from hmt.kernels.triton.moe import experts
from hmt.kernels.triton.single_tokens import single_tokens

BLOCKS = [Encoding.Q4_K, Encoding.Q6_K, Encoding.Q8_0]
KINDS = [
    (Encoding.F16, {}),
    *([] if interpreted() else [(Encoding.BF16, {})]),
    (Encoding.F32, {}),
    (Encoding.FP8_BLOCK, {"tile": (32, 64)}),
    (Encoding.INT4_GROUP, {}),
    (Encoding.INT4_GROUP, {"offsets": "minima"}),
    (Encoding.INT4_GROUP, {"activations": Activations.INT8_TOKEN}),
    (Encoding.NVFP4, {}),
    (Encoding.INT8_CHANNEL, {}),
    (Encoding.INT8_CHANNEL, {"activations": Activations.INT8_TOKEN}),
    *((kind, {"activations": Activations.INT8_BLOCK}) for kind in BLOCKS if kind in BLOCK_SHAPES),
]
# Triton's interpreter multiplies bf16 wrongly.
DTYPE = torch.float16 if interpreted() else torch.bfloat16
WIDTH, INNER, TOKENS = (256, 256, 2) if interpreted() else (4096, 8192, 16)


def tensor(*sizes: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(*sizes, generator=random) * 0.02).to(device, DTYPE)


def weights(
    kind: Encoding, options: dict, device: torch.device, sizes: dict[str, tuple[int, int]]
) -> dict[str, WeightTensor]:
    made = {}
    for seed, (name, size) in enumerate(sizes.items()):
        make = random_blocks if kind in BLOCK_SHAPES else partial(random_weight, spread=False)
        made[name] = make(kind, *size, device=device, seed=seed, **options)
    return made


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_products(device, kind, options):
    given = weights(kind, options, device, {"a": (32, WIDTH), "b": (32, WIDTH), "c": (32, WIDTH)})
    x, total = tensor(TOKENS, WIDTH, device=device), tensor(TOKENS, 32, device=device, seed=2)

    def all_of(x: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        added = total.clone()
        dispatch.linear_add(added, x, given["a"])
        return [
            added,
            dispatch.linear(x, given["a"]),
            dispatch.linear_many(x, given, ("a", "b", "c")),
            dispatch.linear_many_float(x, given, ("a", "b", "c")),
            dispatch.linear_gated(x, given, ("a", "b"), "silu"),
        ]

    rows = [all_of(*pair) for pair in zip(x.split(1), total.split(1), strict=True)]
    with single_tokens():
        found = all_of(x, total)
    for together, alone in zip(found, zip(*rows, strict=True), strict=True):
        assert torch.equal(together, torch.cat(alone))


# One format of each kind of kernel: test_products has all.
LAYERS = [(Encoding.F16, {}), (Encoding.INT4_GROUP, {}), KINDS[8], (Encoding.Q6_K, KINDS[-1][1])]


@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(*one, marks=[] if one in LAYERS else [pytest.mark.whole]) for one in KINDS],
)
def test_layers(device, kind, options):
    # The interpreter takes 7 s where 2 do: blocks alone need 256.
    inner = 64 if interpreted() and kind not in BLOCK_SHAPES else INNER
    sizes = {"gate_proj": (inner, WIDTH), "up_proj": (inner, WIDTH), "down_proj": (WIDTH, inner)}
    sizes |= {"q_proj": (64, WIDTH), "k_proj": (32, WIDTH), "v_proj": (32, WIDTH)}
    params = weights(kind, options, device, sizes)
    norm = tensor(WIDTH, device=device, seed=9) * 0.05  # products of Q6_K's scales stay within f16
    encoding = Encoding.F16 if DTYPE is torch.float16 else Encoding.BF16
    params["norm"] = WeightTensor(encoding, (WIDTH,), norm)
    ffn = FeedForward("silu", NormOptions(1e-5))
    attention = AttentionInputs(2, 1, 32, NormOptions(1e-5))
    hidden, x = tensor(TOKENS, WIDTH, device=device), tensor(TOKENS, WIDTH, device=device, seed=2)
    angles = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(3)).to(device)

    def both(at: slice) -> tuple[torch.Tensor, torch.Tensor]:
        changed = hidden[at].clone()
        fused_layers.feed_forward(changed, x[at].clone(), params, ffn)
        cos, sin = angles[:, at]
        return changed, fused_layers.attention_inputs(hidden[at], params, attention, cos, sin)

    rows = [both(slice(n, n + 1)) for n in range(TOKENS)]
    with single_tokens():
        found = both(slice(None))
    for together, alone in zip(found, zip(*rows, strict=True), strict=True):
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("kind", [Encoding.INT4_GROUP, Encoding.F16])
def test_experts(device, kind):
    count, top, size = 4, 2, (64, 128) if interpreted() else (512, 1024)
    shapes = {"gate_proj": size, "up_proj": size, "down_proj": size[::-1]}
    given = [(n, weights(kind, {}, device, shapes)) for n in range(count)]
    x = tensor(TOKENS, size[1], device=device)
    random = torch.Generator().manual_seed(4)
    chosen = torch.stack([torch.randperm(count, generator=random)[:top] for _ in range(TOKENS)])
    chosen, scales = chosen.to(device), torch.rand(TOKENS, top, generator=random).to(device)
    rows = [
        experts(x[n : n + 1], given, chosen[n : n + 1], scales[n : n + 1], "silu")
        for n in range(TOKENS)
    ]
    with single_tokens():
        assert torch.equal(experts(x, given, chosen, scales, "silu"), torch.cat(rows))


def test_products_of_heads(device):
    x, matrices = (tensor(*s, device=device) for s in ((TOKENS, 4, 32), (4, 32, 48)))
    rows = [reference.head_products(row, matrices) for row in x.split(1)]
    with single_tokens():
        assert torch.equal(head_products(x, matrices), torch.cat(rows))


@pytest.mark.parametrize("encoding", [PageEncoding.F16, PageEncoding.INT8])
@pytest.mark.parametrize("window", [0, 24])
def test_neighbouring_tokens_attend_as_they_do_one_after_the_other(device, encoding, window):
    """And append: what a token writes its neighbours see."""
    layout = PageLayout(encoding, 2, 64, 64, rows=True)
    start, tokens, heads = 197, 5, 8
    scenes = [
        Scene(device, layout, [(start, tokens), (30, 1)], torch.float16, seed=2) for _ in range(2)
    ]
    rows = torch.randn(tokens + 1, heads + 4, 64, generator=torch.Generator().manual_seed(5))
    given = rows.to(device, torch.float16)
    options = {"scale": 0.125, "window": window}
    one, other = scenes
    wanted = []
    for n in range(tokens):  # the second sequence's token comes again and again
        runs = metadata.fixed_runs(device, 2, 1, 1024)
        alone = PagedSegment(0, 1, start + n, one.runs[0].table)
        metadata.update_runs(runs, [alone, PagedSegment(1, 1, 30, one.runs[1].table)])
        step = given[[n, tokens]]
        wanted.append(paged.append_attend_pages(one.on_device, 1, runs, step, **options))
    runs = metadata.fixed_runs(device, tokens + 1, 1, 1024, sequences=2)
    metadata.update_runs(runs, by_token(other.runs))
    found = paged.append_attend_pages(other.on_device, 1, runs, given, **options)
    assert torch.equal(found[:tokens], torch.stack([step[0] for step in wanted]))
    assert torch.equal(found[tokens], wanted[0][1])
    assert torch.equal(one.on_device.memory, other.on_device.memory)
