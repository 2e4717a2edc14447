"""Experts in ggml's blocks on the GPU, against the reference: few tokens, and many."""

from dataclasses import replace

import pytest
import torch
from triton_weights import random_blocks, random_weight

from hmt.contracts.encoding import Activations, Encoding
from hmt.kernels import reference
from hmt.kernels.triton.moe import moe_dispatch, unpacked_experts
from hmt.kernels.triton.moe.weight_table import MATRICES, block_table, make_table

# The interpreter computes with numpy, which warns where a GPU makes infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOAT, INT8 = Activations.FLOAT, Activations.INT8_BLOCK
HIDDEN, WIDTH, COUNT, TOP = 256, 32, 4, 2
# As files have them: width is not a multiple of 256 in all of them.
RECIPES = [
    (Encoding.Q4_K, Encoding.Q8_0),
    (Encoding.IQ2_XXS, Encoding.IQ4_NL),
    (Encoding.Q2_K, Encoding.INT4_GROUP),
    (Encoding.INT4_GROUP, Encoding.Q5_1),
]


def make_experts(recipe, activations, device):
    def weight(encoding, rows, columns, seed):
        if encoding is Encoding.INT4_GROUP:
            own = Activations.INT8_TOKEN if activations is INT8 else FLOAT
            return random_weight(encoding, rows, columns, device=device, activations=own, seed=seed)
        form = {"device": device, "activations": activations, "seed": seed}
        return random_blocks(encoding, rows, columns, **form)

    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (19, WIDTH)}
    return [
        (
            index,
            {
                name: weight(recipe[name == "down_proj"], *shape, 3 * index + at)
                for at, (name, shape) in enumerate(shapes.items())
            },
        )
        for index in range(COUNT)
    ]


def on_cpu(experts):
    def moved(w):
        scales = None if w.scales is None else w.scales.cpu()
        return replace(w, data=w.data.cpu(), scales=scales)

    return [(index, {name: moved(w) for name, w in one.items()}) for index, one in experts]


def routed(tokens, device):
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=random) / 8
    order = torch.rand(tokens, COUNT, generator=random).argsort(1)[:, :TOP]
    return x.to(device), order.to(device), torch.rand(tokens, TOP, generator=random).to(device)


@pytest.mark.parametrize(("tokens", "activations"), [(2, FLOAT), (2, INT8), (9, INT8)])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe[0]}-{recipe[1]}")
def test_experts_in_blocks(device, monkeypatch, recipe, activations, tokens):
    if tokens > 2:
        monkeypatch.setattr(moe_dispatch, "_PAIRS_OF_BLOCKS", 0)
        # Of two experts at a time.
        matrix = WIDTH * HIDDEN * 4
        monkeypatch.setattr(unpacked_experts, "EXPERT_UNPACKED_BYTES", 5 * matrix)
    given = make_experts(recipe, activations, device)
    x, chosen, scales = routed(tokens, device)
    table = make_table(given, COUNT, device)
    assert table is not None
    found = moe_dispatch.experts_by_table(x, table, chosen, scales, "silu", None, last=False)
    moved = [one.cpu() for one in (chosen, scales)]
    expected = reference.experts(x.cpu(), on_cpu(given), *moved, "silu", last=False)
    error = (found.cpu() - expected).norm() / expected.norm()
    # What comes between the matrices may be rounded to the next int8, and for many is not rounded.
    assert error < (1e-5 if activations is FLOAT else 3e-3 if tokens == 2 else 3e-2)


def test_experts_that_are_elsewhere_count_for_nothing(device):
    given = make_experts(RECIPES[0], INT8, device)
    x, chosen, scales = routed(3, device)
    some = [one for one in given if one[0] in (1, 3)]
    table = make_table(some, COUNT, device)
    assert table is not None
    chosen[0] = torch.tensor([0, 2])
    total = torch.randn(3, 19).to(device)
    expected = total.cpu() + reference.experts(
        x.cpu(), on_cpu(some), chosen.cpu(), scales.cpu(), "silu", last=False
    )
    found = moe_dispatch.experts_by_table(x, table, chosen, scales, "silu", total, last=False)
    assert torch.equal(found.cpu()[0], expected[0])
    assert (found.cpu() - expected).norm() < 3e-3 * expected.norm()


def test_experts_of_one_block_of_memory_each(device, monkeypatch):
    monkeypatch.setattr(moe_dispatch, "_PAIRS_OF_BLOCKS", 1.3)
    given = make_experts(RECIPES[0], INT8, device)
    apart = make_table(given, COUNT, device)
    memory = torch.zeros(COUNT, 1 << 16, dtype=torch.uint8, device=device)
    experts = []
    for index, params in given:
        at, placed = 0, {}
        for name in MATRICES:
            parts = {}
            for part in ("data", "scales"):
                value = getattr(params[name], part)
                if value is not None:
                    room = memory[index, at : at + value.nbytes].view(value.dtype)
                    parts[part] = room.view(value.shape).copy_(value)
                    at += -(-value.nbytes // 16) * 16
            placed[name] = replace(params[name], **parts)
        experts.append(placed)
    addresses = torch.tensor([one.data_ptr() for one in memory], device=device)
    table = block_table(addresses, experts[2], int(addresses[2]))
    for tokens in (2, 9):
        x, chosen, scales = routed(tokens, device)
        found = moe_dispatch.experts_by_table(x, table, chosen, scales, "silu")
        assert apart is not None
        same = moe_dispatch.experts_by_table(x, apart, chosen, scales, "silu")
        assert torch.equal(found, same)


CUT_WIDTH = 768  # three blocks of 256


# Behind the smaller or the larger part: zeros, or scales that are NaN.  Each kind of blocks meets
# both, and so does each part.
@pytest.mark.parametrize(
    ("down", "kept", "byte"),
    [
        (Encoding.IQ2_XXS, 256, 0),
        (Encoding.Q2_K, 512, 255),
        (Encoding.IQ4_NL, 256, 255),
        (Encoding.Q8_0, 512, 0),
    ],
    ids=str,
)
def test_what_of_an_expert_is_brought_is_all_that_is_read(device, down, kept, byte):
    """Two parts, each alone in memory that holds anything else, add up to the whole expert."""
    form = {"device": device, "activations": FLOAT}
    expert = {
        "gate_proj": random_blocks(Encoding.IQ2_XXS, CUT_WIDTH, HIDDEN, seed=1, **form),
        "up_proj": random_blocks(Encoding.IQ2_XXS, CUT_WIDTH, HIDDEN, seed=2, **form),
        "down_proj": random_blocks(down, 19, CUT_WIDTH, seed=3, **form),
    }
    own = {name: first_of(w, kept, name == "down_proj") for name, w in expert.items()}
    held = {name: overwritten(w, kept, byte, name == "down_proj") for name, w in expert.items()}
    x, _, _ = routed(1, device)
    chosen = torch.zeros(1, 1, dtype=torch.int64, device=device)
    scales = torch.full((1, 1), 0.75, device=device)
    cut = torch.tensor([0, kept], dtype=torch.int32, device=device)
    table = make_table([(0, held)], 1, device)
    assert table is not None
    found = moe_dispatch.experts_by_table(x, table, chosen, scales, "silu", cut=cut)
    moved = [one.cpu() for one in (chosen, scales)]
    expected = reference.experts(x.cpu(), on_cpu([(0, own)]), *moved, "silu")
    assert (found.cpu() - expected).norm() < 1e-5 * expected.norm()


def first_of(w, count, columns):
    """The first inner numbers by themselves."""

    def part(whole):
        if whole is None:
            return None
        along = int(columns)
        return whole.narrow(along, 0, whole.shape[along] * count // CUT_WIDTH).contiguous()

    shape = (w.shape[0], count) if columns else (count, w.shape[1])
    return replace(w, shape=shape, data=part(w.data), scales=part(w.scales))


def overwritten(w, count, byte, columns):
    """The same with other bytes behind the first inner numbers."""

    def part(whole):
        if whole is None:
            return None
        copy, along = whole.clone(), int(columns)
        begin = copy.shape[along] * count // CUT_WIDTH
        behind = copy.narrow(along, begin, copy.shape[along] - begin)
        behind.copy_(torch.full_like(behind.contiguous().view(torch.uint8), byte).view(copy.dtype))
        return copy

    return replace(w, data=part(w.data), scales=part(w.scales))
