"""Triton's convolution over time and delta rule: float64, any division, runs on the device."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hmt.contracts.store import StateRun
from hmt.kernels import reference
from hmt.kernels.reference import DeltaHeads

kernels = pytest.importorskip("hmt.kernels.triton.operations")

# The interpreter rounds to bfloat16 by cutting off.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
NEAR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAN = float("nan")
# key heads, heads, key_dim, value_dim; decays by channel, their bound, the largest rate
SIZES: list[tuple[Any, ...]] = [(1, 1, 5, 3), (2, 4, 16, 8), (1, 2, 33, 17)]
SIZES += [(2, 2, 12, 9, True), (1, 2, 16, 5, True, -5.0), (1, 1, 8, 5, False, 0.0, 2.0)]
if torch.cuda.is_available():
    SIZES += [
        (32, 32, 128, 128, True),
        (16, 32, 128, 128),
        (2, 4, 130, 128),
        (2, 6, 256, 70),
        (3, 3, 600, 5),
    ]


def inputs(
    sizes: tuple[Any, ...], tokens: int, dtype: torch.dtype
) -> tuple[DeltaHeads, list[Tensor]]:
    """Heads, and qkv, decay, rate, decay_scale, decay_bias: decays from hardly any to all."""
    heads = DeltaHeads(*sizes)
    generator = torch.Generator().manual_seed(sum(sizes[:4]) + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    decay = 6 * normal(tokens, heads.decays_width)
    numbers = [normal(tokens, heads.width), decay, 2 * normal(tokens, heads.heads)]
    numbers = [one.to(dtype) for one in numbers]
    return heads, [*numbers, normal(heads.heads), normal(heads.decays_width)]


def exact(heads: DeltaHeads, numbers: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as its paper writes it, in float64: results [tokens, heads, value_dim] and state."""
    qkv, decay, rate, scale, bias = (one.double() for one in numbers)
    sizes = [heads.keys_width, heads.keys_width, heads.values_width]
    query, key, value = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(
            qkv.split(sizes, 1), (heads.key_dim, heads.key_dim, heads.value_dim), strict=True
        )
    )
    shared = heads.heads // heads.key_heads
    key, query = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared, 1)
        for x in (key, query)
    )
    raw = (decay + bias).unflatten(1, (heads.heads, -1))
    stays = torch.exp(-scale.exp()[:, None] * functional.softplus(raw))
    if heads.bound:
        stays = torch.exp(heads.bound * torch.sigmoid(scale.exp()[:, None] * raw))
    learns = heads.most_rate * rate.sigmoid()
    state, out = state.double().clone(), torch.empty_like(value)
    for t in range(len(qkv)):
        state = state * stays[t][:, :, None]
        known = torch.einsum("hkv,hk->hv", state, key[t])
        missing = learns[t][:, None] * (value[t] - known)
        state = state + torch.einsum("hk,hv->hkv", key[t], missing)
        out[t] = torch.einsum("hkv,hk->hv", state, query[t]) / heads.key_dim**0.5
    return out, state


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta_rule_is_that_of_float64(
    device: torch.device, sizes: tuple[Any, ...], dtype: torch.dtype
) -> None:
    heads, numbers = inputs(sizes, 9, dtype)
    shape = (heads.heads, heads.key_dim, heads.value_dim)
    before = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    before[0] = NAN
    states = before.clone().to(device)
    runs = [StateRun(2, 0, 3, False), StateRun(0, 3, 6, True)]
    found = kernels.gated_delta_rule(*(x.to(device) for x in numbers), states, runs, heads).cpu()
    assert found.dtype is dtype
    states = states.cpu()
    assert torch.equal(states[1], before[1]), "no run has this slot"
    for run, first in ((runs[0], before[2]), (runs[1], torch.zeros(shape))):
        wanted, state = exact(heads, [x[run.tokens] for x in numbers[:3]] + numbers[3:], first)
        most = float(wanted.abs().max())
        assert float((found[run.tokens].double() - wanted).abs().max()) <= NEAR[dtype] * most + 1e-7
        assert float((states[run.slot].double() - state).abs().max()) <= 1e-5


def test_slow_decays_keep_their_digits(device: torch.device) -> None:
    """Of 1 + exp(x), f32 has only a few of the digits of exp(x)."""
    heads, numbers = inputs((1, 1, 16, 4), 12, torch.float32)
    numbers[1][:], numbers[2][:], numbers[3][:], numbers[4][:] = -9.0, -30.0, 5.0, 0.0
    states = torch.ones(1, 1, 16, 4, device=device)
    kernels.gated_delta_rule(
        *(x.to(device) for x in numbers), states, [StateRun(0, 0, 12, False)], heads
    )
    _, wanted = exact(heads, numbers, torch.ones(1, 16, 4))
    small = torch.log(1 + torch.exp(torch.tensor(-9.0)))
    cut = torch.exp(-torch.exp(torch.tensor(5.0)) * small) ** 12
    assert abs(float(cut) - float(wanted[0, 0, 0])) > 2e-5, "what this is about"
    torch.testing.assert_close(states[0].cpu().double(), wanted, atol=8e-6, rtol=0)


@pytest.mark.parametrize("width", [2, 4, 9, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution_is_torchs(device: torch.device, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    for channels, gated in ((67, False), (300, True))[: 1 if width == 64 else 2]:
        x = torch.randn(30, 3 * channels, generator=generator).to(dtype)[:, channels : 2 * channels]
        weight = torch.randn(channels, width, generator=generator).to(dtype)
        tails = torch.full((2, width - 1, channels), NAN, device=device)
        runs = [StateRun(1, 0, 12, True), StateRun(0, 12, 18, True)]
        bias = torch.randn(channels, generator=generator).to(dtype) if width > 2 else None
        added = None if bias is None else bias.to(device)
        found = kernels.causal_conv(
            x.to(device), weight.to(device), tails, runs, bias=added, gated=gated
        ).cpu()
        for run in runs:
            padded = functional.pad(x[run.tokens].double().T, (width - 1, 0))
            added = None if bias is None else bias.double()
            taps = weight.double()[:, None]
            wide = functional.conv1d(padded, taps, added, groups=channels)
            wanted = (functional.silu(wide) if gated else wide).T
            most = float(wanted.abs().max())
            error = float((found[run.tokens].double() - wanted).abs().max())
            assert error <= 2 * NEAR[dtype] * most + 1e-7
            assert torch.equal(tails[run.slot].cpu(), padded.T[-(width - 1) :].float())


def in_parts(compute: Callable[[slice, bool], Tensor], tokens: int, rng: random.Random) -> Tensor:
    """A sequence's tokens in steps of random sizes."""
    parts, at = [], 0
    while at < tokens:
        size = min(rng.choice([1, 1, 2, 5, 17]), tokens - at)
        parts.append(compute(slice(at, at + size), at == 0))
        at += size
    return torch.cat(parts)


@pytest.mark.parametrize(("width", "sizes"), list(enumerate(SIZES[1:], 4)), ids=str)
def test_no_division_changes_a_bit(
    device: torch.device, width: int, sizes: tuple[Any, ...]
) -> None:
    """Nor do other sequences in the same step."""
    tokens = 12 if device.type == "cpu" else 300
    heads, numbers = inputs(sizes, tokens, torch.float32)
    numbers = [x.to(device) for x in numbers]
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(heads.width, width, generator=generator).to(device)
    shape = (heads.heads, heads.key_dim, heads.value_dim)

    def empty(slots: int) -> tuple[Tensor, Tensor]:
        state = torch.full((slots, *shape), NAN, device=device)
        return state, torch.full((slots, width - 1, heads.width), NAN, device=device)

    def both(state: Tensor, tail: Tensor, part: slice, runs: list[StateRun]) -> Tensor:
        own = [x[part] for x in numbers[:3]]
        own[0] = kernels.causal_conv(own[0], weight, tail, runs)
        return kernels.gated_delta_rule(*own, *numbers[3:], state, runs, heads)

    found = []
    for seed in range(2):
        state, tail = empty(1)

        def alone(part: slice, begins: bool, state: Tensor = state, tail: Tensor = tail) -> Tensor:
            return both(state, tail, part, [StateRun(0, 0, part.stop - part.start, begins)])

        found.append((in_parts(alone, tokens, random.Random(seed)), state, tail))
    assert all(map(torch.equal, found[0], found[1]))
    # The first seven tokens, then the others, each beside a sequence of the others.
    (states, tails), rest = empty(2), tokens - 7
    whole = slice(0, tokens)
    first = both(states, tails, whole, [StateRun(1, 0, 7, True), StateRun(0, 7, rest, True)])
    second = both(states, tails, whole, [StateRun(0, 0, 7, True), StateRun(1, 7, rest, False)])
    assert torch.equal(first[:7], second[:7])
    assert torch.equal(torch.cat((first[:7], second[7:])), found[0][0])
    assert torch.equal(states[1], found[0][1][0]) and torch.equal(tails[1], found[0][2][0])


def test_drafts_leave_the_state_before_them(device: torch.device) -> None:
    heads, numbers = inputs((2, 4, 16, 8), 5, torch.float32)
    numbers = [x.to(device) for x in numbers]
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(heads.width, 4, generator=generator).to(device)
    states = torch.randn(2, 4, 16, 8, generator=generator).to(device)
    tails = torch.randn(2, 3, heads.width, generator=generator).to(device)

    def compute(known: list[Tensor], run: StateRun) -> Tensor:
        own = [one[: run.length] for one in numbers[:3]]
        own[0] = kernels.causal_conv(own[0], weight, known[1], [run])
        found: Tensor = kernels.gated_delta_rule(*own, *numbers[3:], known[0], [run], heads)
        return found

    for drafts in (0, 1, 4, 5):
        all_of, first, found = ([one.clone() for one in (states, tails)] for _ in range(3))
        wanted = compute(all_of, StateRun(1, 0, 5, False))
        if drafts < 5:
            compute(first, StateRun(1, 0, 5 - drafts, False))
        assert torch.equal(compute(found, StateRun(1, 0, 5, False, drafts)), wanted)
        assert all(map(torch.equal, found, first))


def test_runs_in_the_devices_memory_are_those_of_the_step(device: torch.device) -> None:
    """One tensor for steps with other slots, fewer runs, and runs that leave their state alone."""
    heads, numbers = inputs((1, 2, 16, 8), 3, torch.float32)
    numbers = [x.to(device) for x in numbers]
    weight = torch.randn(heads.width, 3, generator=torch.Generator().manual_seed(2)).to(device)
    fixed = kernels.fixed_state_runs(device, 3)
    address = fixed.device.table.data_ptr()

    def stores() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        states = torch.randn(4, 2, 16, 8, generator=generator).to(device)
        return states, torch.randn(4, 2, heads.width, generator=generator).to(device)

    def compute(where: tuple[Tensor, Tensor], runs: object) -> tuple[Tensor, Tensor]:
        x = kernels.causal_conv(numbers[0], weight, where[1], runs)
        out = kernels.gated_delta_rule(x, *numbers[1:], where[0], runs, heads)
        return x, out

    steps = [
        [StateRun(3, 0, 1, False), StateRun(0, 1, 1, True), StateRun(2, 2, 1, False)],
        [StateRun(1, 0, 1, True), StateRun(3, 1, 1, False)],
        [StateRun(1, 0, 1, False)],
    ]
    own, given = stores(), stores()
    for runs in steps:
        before = [x.clone() for x in given]
        aside = [replace(run, drafts=run.length) for run in runs]
        kernels.update_state_runs(fixed, aside)
        seen = compute(given, fixed)
        assert all(map(torch.equal, given, before))
        kernels.update_state_runs(fixed, runs)
        found, wanted = compute(given, fixed), compute(own, runs)
        tokens = len(runs)
        for one in (seen, found):
            assert torch.equal(one[0][:tokens], wanted[0][:tokens])
            assert torch.equal(one[1][:tokens], wanted[1][:tokens])
        assert all(map(torch.equal, given, own))
    assert fixed.device.table.data_ptr() == address


def test_the_reference_and_the_kernels_leave_alone_what_does_not_advance() -> None:
    heads, numbers = inputs((1, 2, 16, 8), 5, torch.float32)
    states = torch.randn(2, 2, 16, 8, generator=torch.Generator().manual_seed(1))
    runs = [StateRun(1, 0, 3, False, drafts=3), StateRun(0, 3, 2, True)]
    before = states.clone()
    found = reference.gated_delta_rule(*numbers, states, runs, heads)
    assert torch.equal(states[1], before[1]) and not torch.equal(states[0], before[0])
    runs[0] = replace(runs[0], drafts=0)
    assert torch.equal(reference.gated_delta_rule(*numbers, before, runs, heads), found)
