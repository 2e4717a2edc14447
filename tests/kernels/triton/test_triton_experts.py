"""Routed experts of Triton: against the reference, wherever their weights lie."""

from dataclasses import replace

import pytest
import torch

from hmt.contracts.encoding import Activations, Encoding, Packing, WeightTensor
from hmt.kernels import reference
from hmt.quant import Format, empty_weight, pack_codes, pack_groups

experts_module = pytest.importorskip("hmt.kernels.triton.moe.moe_dispatch")
expert_pairs = pytest.importorskip("hmt.kernels.triton.moe.moe_gemv")
experts, experts_by_table = experts_module.experts, experts_module.experts_by_table
scattered_experts = experts_module.scattered_experts

# The interpreter computes with numpy, which warns where a GPU makes infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOAT, INT8 = Activations.FLOAT, Activations.INT8_TOKEN
KINDS = [
    (Encoding.INT4_GROUP, FLOAT, "", 32),
    (Encoding.INT4_GROUP, FLOAT, "zeros", 16),
    (Encoding.INT4_GROUP, FLOAT, "minima", 64),
    (Encoding.INT4_GROUP, INT8, "", 32),
    (Encoding.INT4_GROUP, INT8, "zeros", 64),
    (Encoding.INT4_GROUP, INT8, "minima", 16),
    (Encoding.NVFP4, FLOAT, "", 16),
    (Encoding.NVFP4, INT8, "", 16),
    (Encoding.MXFP4, FLOAT, "", 32),
    (Encoding.MXFP4, INT8, "", 32),
    (Encoding.INT8_CHANNEL, FLOAT, "", 0),
    (Encoding.INT8_CHANNEL, INT8, "", 0),
    (Encoding.INT8_GROUP, FLOAT, "", 32),
    (Encoding.INT8_GROUP, INT8, "", 32),
    (Encoding.FP8_BLOCK, FLOAT, "", 0),
    (Encoding.F32, FLOAT, "", 0),
    (Encoding.F16, FLOAT, "", 0),
    (Encoding.BF16, FLOAT, "", 0),
]
FEW, MANY = 2, 9  # tokens by themselves, tokens sorted by expert


@pytest.mark.parametrize("together", [8, 32])
def test_tiles_of_sorted_pairs(together):
    from hmt.kernels.triton.moe.permute import tiles_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = make_table_of(5, device)
    table.addresses[:] = torch.tensor([16, 16, 0, 16, 16])
    counts = torch.tensor([9, 0, 50, 8, 33], dtype=torch.int32, device=device)
    tiles = tiles_of(counts, table, 100, together).tolist()
    expected = [
        [expert, first]
        for expert, count in ((0, 9), (3, 8), (4, 33))
        for first in range(0, count, together)
    ]
    assert tiles[: len(expected)] == expected
    assert all(expert == -1 for expert, _ in tiles[len(expected) :])


def make_table_of(count, device="cpu"):
    matrix = experts_module.ExpertMatrix(Encoding.BF16, (64, 64))
    return experts_module.ExpertTable(
        torch.zeros(count, dtype=torch.int64, device=device), *[matrix] * 3
    )


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Results that nobody writes are NaN; MANY tokens are sorted, however few experts there are."""
    few = experts_module._are_few
    monkeypatch.setattr(experts_module, "_are_few", lambda *case: case[1] <= FEW)
    assert few(make_table_of(256), 1, 8) and not few(make_table_of(256), 256, 8)
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() and out.dim() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def make_weight(kind, rows, columns, seed):
    """Numbers of about 1 / sqrt(columns)."""
    encoding, activations, extra, group = kind
    random = torch.Generator().manual_seed(seed)
    shape, size = (rows, columns), 0.7 * columns**-0.5

    def spread(*sizes):
        return (torch.rand(sizes, generator=random) + 0.2) * size

    if encoding.is_float:
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[encoding]
        data = (torch.randn(shape, generator=random) * size).to(dtype)
        return WeightTensor(encoding, shape, data)
    if encoding is Encoding.FP8_BLOCK:
        data = (torch.randn(shape, generator=random) * 50).to(torch.float8_e4m3fn)
        tiles = spread(-(-rows // 32), -(-columns // 48)) / 50
        return WeightTensor(encoding, shape, data, tiles, tile=(32, 48))
    if not group:
        codes = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
        return WeightTensor(encoding, shape, codes, spread(rows) / 64, activations=activations)
    if encoding is Encoding.INT8_GROUP:
        codes = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
        scales = spread(rows, columns // group) / 64
        return WeightTensor(encoding, shape, codes, scales, group, activations=activations)
    w = empty_weight(Format(encoding, group, activations=activations), shape)
    w.data.copy_(pack_codes(torch.randint(0, 16, shape, generator=random, dtype=torch.uint8)))
    groups = (rows, columns // group)
    if encoding is Encoding.MXFP4:
        powers = torch.randint(121, 124, groups, generator=random, dtype=torch.uint8)
        w.scales.copy_(pack_groups(powers))
    elif encoding is Encoding.NVFP4:
        w.scales.copy_(pack_groups(torch.rand(groups, generator=random) * 400))
        w.factor.fill_(size / 200 * (1 + seed % 3))
    else:
        signs = torch.randn(groups, generator=random).sign()
        w.scales.copy_(pack_groups(spread(*groups) / 4 * signs))
    if extra == "zeros":
        codes = torch.randint(0, 16, groups, generator=random, dtype=torch.uint8)
        return replace(w, zeros=pack_groups(codes))
    if extra == "minima":
        return replace(w, minima=pack_groups(spread(*groups).to(w.scales.dtype) * -1))
    return w


def make_experts(kind, numbers, hidden, width, *, device, seed=0):
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
    shapes["down_proj"] = (hidden, width)
    return [
        (
            number,
            {
                name: to(make_weight(kind, *shape, seed + 10 * number + i), device)
                for i, (name, shape) in enumerate(shapes.items())
            },
        )
        for number in numbers
    ]


def to(w, device):
    parts = {name: getattr(w, name) for name in ("data", "scales", "zeros", "minima", "factor")}
    return replace(w, **{n: None if p is None else p.to(device) for n, p in parts.items()})


def inputs(tokens, hidden, top, count, *, device, dtype=torch.float16, seed=0):
    """(x, chosen, scales)."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=random).to(dtype)
    chosen = torch.rand(tokens, count, generator=random).topk(top).indices
    return x.to(device), chosen.to(device), torch.rand(tokens, top, generator=random).to(device)


def near(found, wanted, kind, dtype):
    assert found.isfinite().all()
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    exact = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    # A last place of the activation may move an int8 code to its neighbour.  A code's step is 1/127
    # of the largest value, some 0.025 of the root mean square; one code in ten moved: 0.008.
    assert error < (max(exact, 8e-3) if kind[1] is INT8 else exact)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: "-".join(map(str, k)))
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_every_encoding(device, kind, tokens):
    dtypes = [torch.float16 if tokens == FEW else torch.float32]
    if device.type == "cuda":
        dtypes = [torch.float16, torch.float32, torch.bfloat16]
    given = make_experts(kind, [0, 2, 3], 64, max(32, kind[3]), device=device)
    for dtype in dtypes:
        x, chosen, scales = inputs(tokens, 64, 2, 4, device=device, dtype=dtype)
        wanted = reference.experts(x.float(), given, chosen, scales, "silu")
        found = experts(x, given, chosen, scales, "silu")
        assert found.dtype is dtype
        near(found, wanted, kind, dtype)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_parts_may_lie_as_a_checkpoint_has_them(device, tokens):
    """Its tensors begin where the header ends: at any multiple of 8."""
    x, chosen, scales = inputs(tokens, 64, 2, 3, device=device)
    for kind in KINDS[8:]:
        given = make_experts(kind, [0, 1, 2], 64, 32, device=device)
        moved = [(index, {n: shifted(w, 8) for n, w in params.items()}) for index, params in given]
        table = experts_module.make_table(moved, 3, torch.device(device))
        if given[0][1]["down_proj"].encoding.packing is Packing.PANELS:
            assert table is None  # HMT itself writes those
            continue
        found = experts_by_table(x, table, chosen, scales, "silu")
        near(found, experts(x, given, chosen, scales, "silu"), kind, x.dtype)


def shifted(w, nbytes):
    """The same, so far behind a multiple of 16."""

    def moved(part):
        if part is None:
            return None
        room = torch.zeros(part.nbytes + 64, dtype=torch.uint8, device=part.device)
        room = room[-room.data_ptr() % 16 + nbytes :][: part.nbytes]
        return room.view(part.dtype).view(part.shape).copy_(part)

    return replace(w, data=moved(w.data), scales=moved(w.scales))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[7], KINDS[11], KINDS[14]], ids=str)
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("activation", ["gelu_tanh"])
def test_odd_sizes(device, monkeypatch, kind, tokens, activation):
    hidden, width = (51, 37)
    if kind[0].packing == "panels":  # in more than one step, and the last not full
        hidden, width = (96, 96)
        monkeypatch.setattr(expert_pairs, "gate_up_blocks", lambda *_: (2, 2, 4, 1))
        monkeypatch.setattr(expert_pairs, "down_blocks", lambda *_: (2, 2, 4, 2))
    given = make_experts(kind, [0, 1, 2], hidden, width, device=device)
    x, chosen, scales = inputs(tokens, hidden, 2, 3, device=device, dtype=torch.float32)
    wanted = reference.experts(x, given, chosen, scales, activation)
    near(experts(x, given, chosen, scales, activation), wanted, kind, torch.float32)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[7], KINDS[11], KINDS[14]], ids=str)
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_experts_without_a_gate_of_their_own(device, kind, tokens):
    """Whose gate is what goes up: relu(u) u is the square of relu(u)."""
    whole = make_experts(kind, [0, 1, 2], 64, max(32, kind[3]), device=device)
    given = [(n, {k: w for k, w in one.items() if k != "gate_proj"}) for n, one in whole]
    x, chosen, scales = inputs(tokens, 64, 2, 3, device=device)
    wanted = torch.zeros(tokens, 64, device=device)
    for number, params in given:
        rows, places = torch.where(chosen == number)
        squared = reference.linear(x[rows].float(), params["up_proj"]).relu().square()
        out = reference.linear(squared, params["down_proj"])
        wanted[rows] += out * scales[rows, places, None]
    near(experts(x, given, chosen, scales, "relu"), wanted, kind, x.dtype)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_absent_experts_and_totals(device, tokens):
    kind = KINDS[0]
    given = make_experts(kind, [1, 3], 64, 32, device=device)
    x, chosen, scales = inputs(tokens, 64, 2, 5, device=device)
    chosen[0] = torch.tensor([0, 4])
    out = experts(x, given, chosen, scales, "silu")
    assert not out[0].any() and out[1:].any()
    start = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)).to(device)
    total = start.clone()
    found = experts(x, given, chosen, scales, "silu", total, last=False)
    assert found is total and torch.equal(total[0], start[0])
    wanted = reference.experts(x, given, chosen, scales, "silu", start.clone(), last=False)
    near(found, wanted, kind, torch.float16)
    total = start.clone()
    found = experts(x, given, chosen, scales, "silu", total)
    assert found.dtype is torch.float16 and torch.equal(found, total.half())
    alone = experts(x, given, chosen, scales, "silu", last=False)
    assert alone.dtype is torch.float32
    nothing = experts(x, [], chosen, scales, "silu", start.clone())
    assert torch.equal(nothing, start.half())
    assert experts(x[:0], given, chosen[:0], scales[:0], "silu").shape == (0, 64)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[7]], ids=str)
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_calls_that_share_the_experts_add_up(device, kind, tokens):
    given = make_experts(kind, [0, 1, 2, 3], 64, 32, device=device)
    x, chosen, scales = inputs(tokens, 64, 2, 4, device=device)
    whole = experts(x, given, chosen, scales, "silu")
    total = experts(x, given[:2], chosen, scales, "silu", last=False)
    assert torch.equal(experts(x, given[2:], chosen, scales, "silu", total), whole)


def test_experts_whose_parts_lie_anywhere(device):
    given = make_experts(KINDS[0], [0, 1, 2, 3], 64, 32, device=device)
    x, chosen, scales = inputs(FEW, 64, 2, 4, device=device)
    compute = scattered_experts(given, device)
    found = compute(x, chosen, scales, "silu")
    assert found.dtype is x.dtype
    assert torch.equal(found, experts(x, given, chosen, scales, "silu"))
    given[1][1]["up_proj_bias"] = make_bias(torch.ones(32, device=device))
    with pytest.raises(ValueError, match="differ"):
        scattered_experts(given, device)


def test_a_token_does_not_depend_on_the_others(device):
    given = make_experts(KINDS[0], [0, 1, 2, 3], 64, 32, device=device)
    x, chosen, scales = inputs(MANY, 64, 3, 4, device=device)
    whole = experts(x, given, chosen, scales, "silu")
    some = [6, 1, 4, 0, 8]
    found = experts(x[some], given, chosen[some], scales[some], "silu")
    assert torch.equal(found, whole[some])
    turned = experts(x, given, chosen.flip(1), scales.flip(1), "silu")
    assert torch.equal(turned, whole)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_a_table_of_blocks_may_change(device, tokens):
    kind, first = KINDS[6], 4096
    given = make_experts(kind, [0, 1, 2], 64, 32, device=device)
    arena = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    size = 0
    for _, params in given:  # laid out one part after the other, each at a multiple of 64
        size = 0
        for w in params.values():
            for part in (w.data, w.scales, w.factor):
                size += -(-part.nbytes // 64) * 64
    blocks = arena[-arena.data_ptr() % 64 + first :][: 4 * size].view(4, size)
    for block, (_, params) in zip(blocks, given, strict=False):
        at = 0
        for name, w in params.items():
            parts = {}
            for part in ("data", "scales", "factor"):
                source = getattr(w, part)
                room = block[at : at + source.nbytes]
                parts[part] = room.view(source.dtype).view(source.shape).copy_(source)
                at += -(-source.nbytes // 64) * 64
            params[name] = replace(w, **parts)
    base = blocks.data_ptr()
    addresses = torch.zeros(5, dtype=torch.int64, device=device)
    table = experts_module.block_table(addresses, given[0][1], base)
    x, chosen, scales = inputs(tokens, 64, 2, 5, device=device)
    assert not experts_by_table(x, table, chosen, scales, "silu").any()
    for places in ({0: 0, 1: 1, 2: 2}, {4: 2, 1: 0}):
        addresses.zero_()
        for expert, block in places.items():
            addresses[expert] = base + block * size
        there = sorted((expert, given[block][1]) for expert, block in places.items())
        found = experts_by_table(x, table, chosen, scales, "silu")
        near(found, reference.experts(x.float(), there, chosen, scales, "silu"), kind, x.dtype)
        assert torch.equal(found, experts(x, there, chosen, scales, "silu"))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[17]], ids=str)
@pytest.mark.parametrize(("tokens", "bad"), [(FEW, float("nan")), (MANY, float("inf"))])
def test_not_a_number_spreads_to_its_token_only(device, kind, tokens, bad):
    given = make_experts(kind, [0, 1], 64, 32, device=device)
    x, chosen, scales = inputs(tokens, 64, 2, 2, device=device, dtype=torch.float32)
    x[1, 5] = bad
    out = experts(x, given, chosen, scales, "silu")
    rest = [token for token in range(tokens) if token != 1]
    assert not out[1].isfinite().all() and out[rest].isfinite().all()


def test_numbers_of_very_different_sizes(device):
    given = make_experts(KINDS[0], [0], 64, 32, device=device)
    x, chosen, scales = inputs(1, 64, 1, 1, device=device, dtype=torch.float32)
    for size in (1e-30, 1e34, 0.0):
        x[0, :32] *= size
        wanted = reference.experts(x, given, chosen, scales, "silu")
        near(experts(x, given, chosen, scales, "silu"), wanted, KINDS[0], torch.float32)


def test_rows_of_a_larger_matrix_and_a_bias_of_one_matrix(device):
    given = make_experts(KINDS[0], [0, 1], 64, 32, device=device)
    for tokens in (FEW, MANY):
        x, chosen, scales = inputs(tokens, 100, 2, 2, device=device)
        found = experts(x[:, 20:84], given, chosen, scales, "silu")
        plain = experts(x[:, 20:84].contiguous(), given, chosen, scales, "silu")
        assert torch.equal(found, plain)
    bias = make_bias(torch.ones(32, device=device))
    given = [(n, {**params, "up_proj_bias": bias}) for n, params in given]  # which no kernel has
    x = x[:, :64]
    wanted = reference.experts(x, given, chosen, scales, "silu")
    assert torch.equal(experts(x, given, chosen, scales, "silu"), wanted)


def make_bias(numbers):
    kind = Encoding.BF16 if numbers.dtype is torch.bfloat16 else Encoding.F32
    return WeightTensor(kind, tuple(numbers.shape), numbers)


def with_biases(given, dtype):
    """gpt-oss' experts: gates and what goes through them pass the limits of its activation."""
    for number, params in given:
        random = torch.Generator().manual_seed(number)
        for name in list(params):
            sizes = torch.randn(params[name].shape[0], generator=random) * 5
            bias = sizes.to(dtype).to(params[name].data.device)
            params[f"{name}_bias"] = make_bias(bias)
    return given


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_the_activation_of_deepseek_v4(device, tokens):
    """Gates of at most 10, and what goes through them in -10 to 10: inputs go far beyond."""
    kind = KINDS[3]
    given = make_experts(kind, [0, 1, 3], 64, 32, device=device)
    x, chosen, scales = inputs(tokens, 64, 2, 4, device=device, dtype=torch.float32)
    x = 40 * x
    wanted = reference.experts(x, given, chosen, scales, "clamped_silu")
    assert (reference.experts(x, given, chosen, scales, "silu") - wanted).abs().max() > 1
    near(experts(x, given, chosen, scales, "clamped_silu"), wanted, kind, torch.float32)


@pytest.mark.parametrize("kind", [KINDS[n] for n in (3, 8, 17)], ids=str)
@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_biases_and_the_activation_of_gpt_oss(device, kind, tokens):
    """Where parts lie anywhere, and at offsets from one address."""
    hidden, width = (64, 32) if kind[0].packing is Packing.PANELS else (51, 37)
    dtypes = {FEW: (torch.float16, torch.float32), MANY: (torch.float32, torch.bfloat16)}
    x_dtype, bias_dtype = dtypes[tokens]
    given = make_experts(kind, [0, 1, 3], hidden, width, device=device)
    given = with_biases(given, bias_dtype)
    x, chosen, scales = inputs(tokens, hidden, 2, 4, device=device, dtype=x_dtype)
    wanted = reference.experts(x.float(), given, chosen, scales, "clamped_swish")
    found = experts(x, given, chosen, scales, "clamped_swish")
    near(found, wanted, kind, x_dtype)
    first = given[0][1]["gate_proj"].data.data_ptr()
    one = experts_module.block_table(
        torch.tensor([0, first, 0, 0], device=device), given[0][1], first
    )
    wanted = reference.experts(
        x.float(), [(1, given[0][1])], chosen, scales, "clamped_swish", last=False
    )
    if one.gate.aligned == 16:  # parts were allocated one by one
        total = experts_by_table(x, one, chosen, scales, "clamped_swish", last=False)
        near(total, wanted, kind, x_dtype)
    x[0, 1] = float("nan")
    out = experts(x, given, chosen, scales, "clamped_swish")
    assert not out[0].isfinite().any() and out[1:].isfinite().all()
