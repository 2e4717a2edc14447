"""Dividing, bringing and asking, against the reference and a plain model of a cache."""

from dataclasses import fields

import pytest
import torch

from hmt.kernels import reference
from hmt.kernels.reference.expert_cache import Cuts, ExpertShares, ExpertSlots
from hmt.kernels.triton.moe import expert_cache, host_mailbox
from hmt.kernels.triton.moe.host_mailbox import Mailbox

ASKED = ((1, 4), (5, 3), (3, 8))  # tokens, and experts of each
EXPERTS, NBYTES = 24, 288


def make(slots: int, staging: int, device: torch.device) -> tuple[ExpertSlots, torch.Tensor]:
    """A cache and the memory that it is of: origins, then slots, then staging."""
    memory = torch.zeros(EXPERTS + slots + staging, NBYTES, dtype=torch.uint8, device=device)
    memory[:EXPERTS] = torch.arange(1, EXPERTS + 1, dtype=torch.uint8, device=device)[:, None]
    at = torch.tensor([row.data_ptr() for row in memory], dtype=torch.int64, device=device)
    origins, addresses, stages = at.split((EXPERTS, slots, staging))

    def full(value: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    cache = ExpertSlots(
        full(0, EXPERTS, torch.int64),
        addresses.clone(),
        full(-1, slots, torch.int64),
        full(0, EXPERTS, torch.float32),
        stages.clone(),
        origins.clone(),
        full(0, 4, torch.int64),
    )
    return cache, memory


def copied(cache: ExpertSlots) -> ExpertSlots:
    return ExpertSlots(*(getattr(cache, field.name).clone() for field in fields(cache)))


# The interpreter takes a second a step for the largest.
PLACES = [
    *(((slots, staging), asked) for slots, staging in ((0, 1), (1, 0), (5, 3)) for asked in ASKED),
    *(((16, 8), asked) for asked in ASKED[::2]),
    ((24, 24), ASKED[-1]),
]


@pytest.mark.parametrize(  # each place and each number of tokens with and without
    "places, asked, cut", [(*case, number % 2 == 0) for number, case in enumerate(PLACES)]
)
def test_experts_are_divided_as_the_reference_divides_them(
    device: torch.device, places: tuple[int, int], asked: tuple[int, int], cut: bool
) -> None:
    (slots, staging), (tokens, top) = places, asked
    # Words of an expert: of rows, of columns that come again every 16 words, and of neither.
    regions = torch.tensor([[0, 32, 32], [36, 32, 16]], dtype=torch.int32, device=device)
    cuts = Cuts(4, 32, regions) if cut else None
    generator = torch.Generator().manual_seed(7 * slots + tokens)
    cache, memory = make(slots, staging, device)
    for step in range(12 if device.type == "cuda" else 4):
        likely = torch.rand(tokens, EXPERTS, generator=generator) ** (1 + step % 3)
        chosen = likely.argsort(dim=1, descending=True)[:, :top].contiguous().to(device)
        share = torch.tensor([(0.0, 0.3, 0.6, 1.0)[step % 4]], device=device)
        wanted_cache = copied(cache)
        wanted = reference.divide_experts(wanted_cache, chosen, share, cuts)
        found = expert_cache.divide_experts(cache, chosen, share, cuts)
        for one in fields(found):
            assert torch.equal(getattr(found, one.name), getattr(wanted, one.name)), one.name
        for one in fields(cache):
            assert torch.equal(getattr(cache, one.name), getattr(wanted_cache, one.name)), one.name
        memory[EXPERTS + slots :] = 0  # of staging, to see what comes
        expert_cache.fetch_experts(cache, found, NBYTES, cuts)
        check_invariants(cache, found, chosen, memory)
        assert cut or int(found.cut[0]) < 0


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_wanted_again_comes_though_the_share_is_less(
    device: torch.device, cut: bool
) -> None:
    cuts = Cuts(4, 32, torch.zeros(0, 3, dtype=torch.int32, device=device)) if cut else None
    for divide in (reference.divide_experts, expert_cache.divide_experts):
        for share, comes in ((0.4, True), (0.0, False)):
            cache, _ = make(2, 2, device)
            portion = torch.tensor([share], device=device)

            def ask(*experts: int) -> int:
                chosen = torch.tensor([experts], device=device)
                return int(divide(cache, chosen, portion, cuts).sources[0])  # noqa: B023

            # An empty place is taken at once, and one that is held only by who is wanted more.
            assert ask(0) == (0 if comes else -1) and ask(1) == (1 if comes else -1)
            ask(0, 1)
            whole = cache.counts.tolist()[1]
            ask(2)
            assert cache.counts.tolist()[1] == whole, "one use is no reason"
            for _ in range(3):
                ask(2)
            assert (2 in cache.holders.tolist()) == comes
            assert cache.counts.tolist()[1] == whole + comes


def check_invariants(
    cache: ExpertSlots, shares: ExpertShares, chosen: torch.Tensor, memory: torch.Tensor
) -> None:
    """Every address holds the expert that it is said to hold, and every pair is computed once."""
    rows = {row.data_ptr(): row for row in memory}
    halved, kept = shares.cut.tolist()
    for table in (cache.table, shares.here):
        for expert, address in enumerate(table.tolist()):
            needed = table is cache.table or expert in chosen
            if address and needed and expert == halved:
                assert table is shares.here
                check_cut(rows[address], expert + 1, kept // 32)
            elif address and needed:
                assert (rows[address] == expert + 1).all(), expert
    held = [holder for holder in cache.holders.tolist() if holder >= 0]
    assert len(set(held)) == len(held)
    assert sorted(held) == cache.table.nonzero().flatten().tolist()
    on_device = (shares.here[chosen] != 0) & (chosen != halved)
    assert torch.equal(on_device, shares.on_host < 0)
    assert torch.equal(shares.on_host[~on_device], chosen[~on_device])
    assert int(shares.left) == len(set(chosen[~on_device].tolist()))


def check_cut(memory: torch.Tensor, filled: int, pieces: int) -> None:
    """All of an expert that has no pieces, and `pieces` of four of what has."""
    words = (memory.view(-1, 4) == filled).all(1)
    assert 0 < pieces < 4
    wanted = [word // 8 < pieces for word in range(32)] + [True] * 4
    wanted += [word % 16 // 4 < pieces for word in range(32)] + [True] * 4
    assert words.tolist() == wanted
    assert (memory.view(-1, 4)[~words] == 0).all(), "nothing more is copied"


# Triton's interpreter cuts bfloat16 off instead of rounding it.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, hidden", [(1, 7168), (3, 40)])
def test_questions_and_answers_pass_through_a_mailbox(
    device: torch.device, dtype: torch.dtype, tokens: int, hidden: int
) -> None:
    def boxed(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -7, dtype=dtype, pin_memory=device.type == "cuda")

    box = Mailbox(
        boxed(8, hidden, dtype=dtype),
        boxed(8, 2, dtype=torch.int64),
        boxed(8, 2, dtype=torch.float32),
        boxed(2, dtype=torch.int32),
        boxed(8, hidden, dtype=torch.float32),
        boxed(1, dtype=torch.int32),
        boxed(1, dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32, device=device),
        torch.full((1,), -7, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    x = torch.randn(tokens, hidden).to(dtype).to(device)
    scales = torch.rand(tokens, 2, device=device)
    on_host = torch.arange(2 * tokens, device=device).view(tokens, 2)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    left = torch.tensor([2 * tokens], dtype=torch.int32, device=device)
    cut = torch.tensor([3, 128], dtype=torch.int32, device=device)
    shares = ExpertShares(nothing, nothing, nothing, on_host, left, cut)
    host_mailbox.ask(box, x, shares, scales)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(box.asked) == 5
    assert torch.equal(box.x[:tokens], x.cpu()) and (box.x[tokens:] == -7).all()
    assert torch.equal(box.chosen[:tokens], on_host.cpu())
    assert torch.equal(box.scales[:tokens], scales.cpu())
    assert box.cut.tolist() == [3, 128]
    answer = torch.randn(tokens, hidden)
    box.total[:tokens] = answer
    box.answered[0] = 5
    mine = torch.randn(tokens, hidden, device=device)
    taken = host_mailbox.take(box, mine, shares)
    assert torch.equal(taken, (mine + answer.to(device)).to(dtype))
    assert int(box.first) == 1, "it was there"
    box.first[0] = -1
    states, shared = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in "ab")
    expected = states + (taken + shared)
    added = host_mailbox.take(box, mine, shares, (states, shared))
    if dtype is torch.float32:
        torch.testing.assert_close(added, expected)
    else:
        assert torch.equal(added, expected)
    left[0], box.answered[0] = 0, -1  # nobody waits where nothing was asked
    box.first[0] = -1
    assert torch.equal(host_mailbox.take(box, mine, shares), mine.to(dtype))
    assert int(box.first) == -1
