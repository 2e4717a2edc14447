"""Parts of a layer in one call: to the bit what the operations give one by one."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from encoded import random_weight

from hmt.contracts.encoding import Activations, Encoding, WeightTensor
from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension
from hmt.kernels.ops import AttentionInputs, FeedForward, NormOptions
from hmt.kernels.reference import AttentionMetadata, PagedSegment, PageEncoding, PageLayout, Pages

NATIVE = extension.load()
ISAS = NATIVE.isas() if NATIVE is not None else ["reference"]
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
HEADS, KV_HEADS, DIM, HIDDEN, WIDTH = 4, 2, 24, 96, 160


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    if NATIVE is None:
        yield
        return
    before = NATIVE.isa()
    NATIVE.set_isa(request.param)
    yield
    NATIVE.set_isa(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before, pool = torch.get_num_threads(), None if NATIVE is None else NATIVE.threads()
    torch.set_num_threads(request.param)
    if NATIVE is not None:
        NATIVE.set_threads(request.param)
    yield
    torch.set_num_threads(before)
    if NATIVE is not None:
        NATIVE.set_threads(pool)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vector(width: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> WeightTensor:
    encoding = Encoding.F32 if dtype is torch.float32 else Encoding.BF16
    return WeightTensor(encoding, (width,), random(width, seed=seed, dtype=dtype))


def linears(shapes: dict[str, tuple[int, int]], kinds, *, bias: bool) -> dict[str, WeightTensor]:
    params = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        encoding, activations = kinds[seed % len(kinds)]
        params[name] = random_weight(encoding, *shape, activations=activations, seed=seed)
        if bias:
            params[f"{name}_bias"] = vector(shape[0], 50 + seed)
    return params


def attention_params(kinds, *, bias: bool = False) -> dict[str, WeightTensor]:
    kv = (KV_HEADS * DIM, HIDDEN)
    shapes = {"q_proj": (HEADS * DIM, HIDDEN), "k_proj": kv, "v_proj": kv}
    norms = {"norm": vector(HIDDEN, 91), "q_norm": vector(DIM, 92), "k_norm": vector(DIM, 93)}
    return linears(shapes, kinds, bias=bias) | norms


def ffn_params(kinds, *, bias: bool = False, width: int = WIDTH) -> dict[str, WeightTensor]:
    shapes = dict.fromkeys(("gate_proj", "up_proj"), (width, HIDDEN))
    shapes["down_proj"] = (HIDDEN, width)
    norms = {"norm": vector(HIDDEN, 94, torch.float32), "post_norm": vector(HIDDEN, 95)}
    return linears(shapes, kinds, bias=bias) | norms


def angles(tokens: int, turned: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = random(tokens, turned // 2, seed=5)
    both = torch.cat((half, half), dim=1)
    return both.cos(), both.sin()


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, not a number where that is."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    bits = torch.int32 if found.dtype is torch.float32 else torch.int16
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), ~number)
    assert torch.equal(
        found.contiguous().view(bits)[number], expected.contiguous().view(bits)[number]
    )


def check_inputs(kinds, dtype, tokens: int, *, offset=0.0, head_norm=True, turned=DIM, bias=False):
    params = attention_params(kinds, bias=bias)
    norm = NormOptions(1e-5, offset)
    layer = AttentionInputs(HEADS, KV_HEADS, DIM, norm, norm if head_norm else None)
    hidden = random(tokens, HIDDEN, seed=tokens, dtype=dtype)
    before = hidden.clone()
    found = ops.attention_inputs(hidden, params, layer, *angles(tokens, turned))
    same(found, reference.attention_inputs(hidden, params, layer, *angles(tokens, turned), ops))
    same(hidden, before)


def check_ffn(kinds, dtype, tokens: int, *, offset=0.0, post=True, bias=False, width=WIDTH):
    params = ffn_params(kinds, bias=bias, width=width)
    norm = NormOptions(1e-5, offset)
    layer = FeedForward("silu", norm, norm if post else None)
    for x in (None, random(tokens, HIDDEN, seed=7, dtype=dtype)):
        hidden = random(tokens, HIDDEN, seed=tokens, dtype=dtype)
        expected, given = hidden.clone(), None if x is None else x.clone()
        reference.feed_forward(expected, given, params, layer, ops)
        ops.feed_forward(hidden, x, params, layer)
        same(hidden, expected)
        assert x is None or torch.equal(x, given)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_encoding(kind, dtype, isa, threads):
    for tokens in (1, 3, 17):
        check_inputs([kind], dtype, tokens)
        check_ffn([kind], dtype, tokens)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_every_option(bias, norms, offset, isa):
    mixed = [(Encoding.INT4_GROUP, INT8), (Encoding.BF16, FLOAT), (Encoding.INT8_CHANNEL, INT8)]
    for kinds in (mixed, mixed[:1]):
        check_inputs(kinds, torch.bfloat16, 5, offset=offset, head_norm=norms, bias=bias)
        check_inputs(kinds, torch.float16, 2, offset=offset, head_norm=norms, turned=16, bias=bias)
        check_ffn(kinds, torch.bfloat16, 5, offset=offset, post=norms, bias=bias)


def test_many_tokens_take_memory_of_their_own(isa, threads):
    kinds = [(Encoding.INT4_GROUP, INT8)]
    check_inputs(kinds, torch.bfloat16, 1500)
    check_ffn(kinds, torch.bfloat16, 400)


@pytest.mark.skipif(NATIVE is None, reason="memory of the extension")
def test_what_is_too_much_to_keep_is_given_back():
    """35 MB between gate and down, in f32; 32 MiB are the most that a thread keeps."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    params = ffn_params([(Encoding.INT4_GROUP, INT8)], width=4096)
    before = resident()
    layer = FeedForward("silu", NormOptions(1e-5))
    hidden = random(700, HIDDEN, seed=1)
    expected = hidden.clone()
    ops.feed_forward(hidden, None, params, layer)
    assert resident() - before < 24 << 20
    reference.feed_forward(expected, None, params, layer, ops)
    same(hidden, expected)


def test_numbers_that_are_none(isa):
    params, layer = ffn_params(KINDS[:1]), FeedForward("gelu_tanh", NormOptions(1e-6))
    hidden = random(4, HIDDEN, seed=1, dtype=torch.bfloat16)
    hidden[0, 3], hidden[1, 5], hidden[2] = float("nan"), float("inf"), 0
    expected = hidden.clone()
    reference.feed_forward(expected, None, params, layer, ops)
    ops.feed_forward(hidden, None, params, layer)
    same(hidden, expected)
    assert hidden[2:].isfinite().all()


def test_near_plain_torch(isa):
    """Kernels that round elsewhere stay near the reference made of reference kernels."""
    params = ffn_params([(Encoding.F32, FLOAT)])
    layer = FeedForward("silu", NormOptions(1e-5))
    hidden, x = (random(9, HIDDEN, seed=seed) for seed in (1, 2))
    expected = hidden.clone()
    reference.feed_forward(expected, x, params, layer)
    ops.feed_forward(hidden, x, params, layer)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-3)


def test_what_has_no_kernel_is_computed_all_the_same():
    params = {name: w for name, w in ffn_params([(Encoding.F32, FLOAT)]).items()}
    layer = FeedForward("silu", NormOptions(1e-5))
    hidden = random(3, 2 * HIDDEN, seed=1)[:, ::2]  # not contiguous
    expected = hidden.clone()
    reference.feed_forward(expected, None, params, layer)
    ops.feed_forward(hidden, None, params, layer)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-3)


def test_a_block_is_described_anew_for_another_layer():
    params = ffn_params(KINDS[:1])
    results = []
    for activation in ("silu", "gelu", "silu"):
        hidden = random(2, HIDDEN, seed=1, dtype=torch.bfloat16)
        ops.feed_forward(hidden, None, params, FeedForward(activation, NormOptions(1e-5)))
        results.append(hidden)
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


@pytest.mark.parametrize("encoding", [PageEncoding.BF16, PageEncoding.INT8])
@pytest.mark.parametrize("contiguous", [True, False])
def test_append_and_attend(encoding, contiguous, isa, threads):
    layout = PageLayout(encoding, KV_HEADS, DIM, DIM)
    heads = random(7, HEADS + 2 * KV_HEADS, DIM, seed=3, dtype=torch.bfloat16)
    if not contiguous:
        heads = heads.transpose(0, 1).contiguous().transpose(0, 1)
    runs = AttentionMetadata(
        [PagedSegment(0, 5, 0, torch.tensor([2])), PagedSegment(5, 2, 0, torch.tensor([0]))]
    )
    stores = [Pages(layout, torch.zeros(3, 2, layout.page_bytes, dtype=torch.uint8)) for _ in "ab"]
    options = {"scale": 0.2, "window": 4, "softcap": 30.0, "sinks": torch.ones(HEADS)}
    found = ops.append_attend_pages(stores[0], 1, runs, heads, **options)
    query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    ops.append_pages(stores[1], 1, runs, key, value)
    expected = ops.paged_attention_output(stores[1], 1, runs, query, **options)
    same(found, expected.flatten(1))
    assert torch.equal(stores[0].memory, stores[1].memory)
