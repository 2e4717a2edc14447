"""An expert of which the link brings a part, and the device computes no more."""

import math
from dataclasses import replace

import pytest
import torch
from test_triton_experts import KINDS, inputs, make_experts, near

from hmt.kernels import host_experts, reference
from hmt.kernels.reference import Cuts, ExpertSlots
from hmt.kernels.triton.moe import expert_cache
from hmt.kernels.triton.moe.moe_dispatch import block_table, experts_by_table

# The interpreter computes with numpy, which warns where a GPU makes infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HIDDEN, WIDTH, COUNT = 64, 256, 3
PARTS = ("data", "scales", "zeros", "minima", "factor")


def laid_out(given, device):
    """Experts in one piece of memory each, parts at multiples of 64 and something between them."""
    sizes = [
        sum(-(-getattr(w, part).nbytes // 64) * 64 + 64 for part in PARTS if has(w, part))
        for w in given[0][1].values()
    ]
    memory = torch.full((len(given), sum(sizes)), 7, dtype=torch.uint8, device=device)
    found = []
    for row, (index, params) in zip(memory, given, strict=True):
        at, its = 0, {}
        for name, w in params.items():
            parts = {}
            for part in PARTS:
                if has(w, part):
                    source = getattr(w, part)
                    room = row[at : at + source.nbytes].view(source.dtype).view(source.shape)
                    parts[part] = room.copy_(source)
                    at += -(-source.nbytes // 64) * 64 + 64
            its[name] = replace(w, **parts)
        found.append((index, its))
    return memory, found


def has(w, part):
    return getattr(w, part) is not None


def first_of(params, count):
    """An expert's first inner numbers by themselves."""
    cut = {}
    for name, w in params.items():
        along = 1 if name == "down_proj" else 0
        parts = {}
        for part in PARTS[:-1]:
            if has(w, part):
                whole = getattr(w, part)
                size = whole.shape[along] * count // WIDTH
                parts[part] = whole.narrow(along, 0, size).contiguous()
        shape = list(w.shape)
        shape[along] = count
        cut[name] = replace(w, shape=tuple(shape), **parts)
    return cut


@pytest.mark.parametrize("kind", [KINDS[n] for n in (1, 5, 6, 8)], ids=str)
def test_what_is_brought_is_what_the_device_needs(device, kind):
    memory, given = laid_out(make_experts(kind, range(COUNT), HIDDEN, WIDTH, device=device), device)
    cuts = host_experts._cuts_of(given[0][1], memory[0].data_ptr())
    assert isinstance(cuts, Cuts) and (cuts.pieces, cuts.rows) == (2, 128)
    # Scales of another layout may be no numbers, and zeros are multiplied with them.
    assert host_experts._cuts_of(given[0][1], memory[0].data_ptr(), others=True) is None
    slots = torch.zeros(2, memory.shape[1], dtype=torch.uint8, device=device)
    origins = torch.tensor([row.data_ptr() for row in memory], device=device)
    places = [row.data_ptr() for row in slots]
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    cache = ExpertSlots(
        torch.zeros(COUNT, dtype=torch.int64, device=device), nothing, nothing,
        torch.zeros(COUNT, device=device), torch.tensor(places, device=device), origins,
        torch.zeros(4, dtype=torch.int64, device=device),
    )  # fmt: skip
    x, chosen, scales = inputs(1, HIDDEN, 3, COUNT, device=device)
    share = torch.tensor([0.5], device=device)  # of three experts one and a half
    shares = expert_cache.divide_experts(cache, chosen, share, cuts)
    whole, halved = shares.sources.tolist()
    assert shares.cut.tolist() == [halved, 128] and whole >= 0
    assert cache.counts.tolist() == [0, 1, 2, 1], "of two that are left, one piece is brought"
    expert_cache.fetch_experts(cache, shares, memory.shape[1], cuts)
    assert torch.equal(slots[0], memory[whole])
    kept = (slots[1] == memory[halved]).double().mean().item()
    assert 0.4 < kept < 0.75, "about a half is brought"
    table = block_table(shares.here, given[0][1], memory[0].data_ptr())
    found = experts_by_table(x, table, chosen, scales, "silu", cut=shares.cut)
    there = [given[whole], (halved, first_of(given[halved][1], 128))]
    expected = reference.experts(x.float(), sorted(there), chosen, scales, "silu")
    near(found, expected, kind, x.dtype)
    assert math.isfinite(found.double().sum().item())


def test_experts_that_are_not_cut(device):
    for kind, width in ((KINDS[10], 256), (KINDS[15], 256), (KINDS[0], 128), (KINDS[0], 192)):
        given = make_experts(kind, [0], HIDDEN, width, device=device)
        assert host_experts._cuts_of(given[0][1], 0) is None
