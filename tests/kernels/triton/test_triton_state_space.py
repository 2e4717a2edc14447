"""Triton's state spaces: float64, any division, runs on the device."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from state_space_inputs import inputs
from torch import Tensor
from torch.nn import functional

from hmt.contracts.store import StateRun

kernels = pytest.importorskip("hmt.kernels.triton.operations")

# The interpreter rounds to bfloat16 by cutting off.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
NEAR = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
NAN = float("nan")
# groups, heads, state_dim, head_dim
SIZES = [(1, 1, 5, 3), (2, 4, 16, 8), (1, 2, 33, 17)]
if torch.cuda.is_available():
    SIZES += [(1, 48, 128, 64), (8, 128, 256, 64), (2, 6, 300, 70), (3, 3, 600, 5)]


def on(device: torch.device, numbers: list[Any]) -> list[Any]:
    """The numbers there; parts of one tensor stay parts of one."""
    whole = torch.cat([part.flatten(1) for part in numbers[:3]], 1).to(device)
    parts = whole.split([part.flatten(1).shape[1] for part in numbers[:3]], 1)
    moved = [part.unflatten(1, one.shape[1:]) for part, one in zip(parts, numbers[:3], strict=True)]
    return [*moved, *(None if one is None else one.to(device) for one in numbers[3:])]


def exact(numbers: list[Any], state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as it is written, in float64: results [tokens, heads, head_dim] and state."""
    x, keys, queries, decay, step, skip = (None if one is None else one.double() for one in numbers)
    shared = x.shape[1] // keys.shape[1]
    keys, queries = (part.repeat_interleave(shared, 1) for part in (keys, queries))
    taken = x if step is None else x * step[:, :, None]
    state, out = state.double(), torch.zeros_like(x) if skip is None else x * skip[:, None]
    for t in range(len(x)):
        state = decay[t][:, None, None] * state + keys[t][:, :, None] * taken[t][:, None]
        out[t] += torch.einsum("hkv,hk->hv", state, queries[t])
    return out, state


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["steps", "no steps"])
def test_scan_is_that_of_float64(
    device: torch.device, sizes: tuple[int, ...], dtype: torch.dtype, plain: bool
) -> None:
    numbers = inputs(sizes, 9, dtype)
    if plain:
        numbers[4:] = [None, None]
    shape = sizes[1:]
    before = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    before[0] = NAN
    states = before.clone().to(device)
    runs = [StateRun(2, 0, 3, False), StateRun(0, 3, 6, True)]
    found = kernels.state_space_scan(*on(device, numbers), states, runs).cpu()
    assert found.dtype is dtype
    states = states.cpu()
    assert torch.equal(states[1], before[1]), "no run has this slot"
    for run, first in ((runs[0], before[2]), (runs[1], torch.zeros(shape))):
        own = [one[run.tokens] if one is not None else None for one in numbers[:5]]
        wanted, state = exact([*own, numbers[5]], first)
        most = float(wanted.abs().max())
        assert float((found[run.tokens].double() - wanted).abs().max()) <= NEAR[dtype] * most + 1e-7
        assert float((states[run.slot].double() - state).abs().max()) <= 2e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_time_steps_are_those_of_float64(device: torch.device, dtype: torch.dtype) -> None:
    """Also where a step is so small that f32 has no digits of 1 + exp(x)."""
    for heads in (1, 37):
        raw = torch.linspace(-40, 40, 9 * heads).view(9, heads).to(dtype)
        bias, scale = torch.randn(heads), torch.randn(heads)
        for low, high in ((0.0, float("inf")), (1e-3, 5.0)):
            given = (one.to(device) for one in (raw, bias, scale))
            step, decay = (one.cpu() for one in kernels.time_steps(*given, low, high))
            wanted = functional.softplus(raw.double() + bias, threshold=100).clamp(low, high)
            torch.testing.assert_close(step.double(), wanted, atol=0, rtol=4e-6)
            left = torch.exp(-scale.double().exp() * wanted)
            torch.testing.assert_close(decay.double(), left, atol=3e-6, rtol=0)


@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_no_division_changes_a_bit(device: torch.device, sizes: tuple[int, ...]) -> None:
    """Nor do other sequences in the same step."""
    tokens = 12 if device.type == "cpu" else 300
    x, keys, queries, _, raw, skip = on(device, inputs(sizes, tokens, torch.float32))
    bias, scale = torch.randn(2, sizes[1], device=device).unbind()

    def compute(part: slice, states: Tensor, runs: list[StateRun]) -> Tensor:
        step, decay = kernels.time_steps(raw[part], bias, scale, 0.0, 9.0)
        given = x[part], keys[part], queries[part], decay, step, skip
        found: Tensor = kernels.state_space_scan(*given, states, runs)
        return found

    def empty(slots: int) -> Tensor:
        return torch.full((slots, *sizes[1:]), NAN, device=device)

    found = []
    for seed in range(2):
        state, rng, parts, at = empty(1), random.Random(seed), [], 0
        while at < tokens:
            size = min(rng.choice([1, 1, 2, 5, 17]), tokens - at)
            parts.append(compute(slice(at, at + size), state, [StateRun(0, 0, size, at == 0)]))
            at += size
        found.append((torch.cat(parts), state))
    assert all(map(torch.equal, found[0], found[1]))
    # The first seven tokens, then the others, each beside a sequence of the others.
    states, rest, whole = empty(2), tokens - 7, slice(0, tokens)
    first = compute(whole, states, [StateRun(1, 0, 7, True), StateRun(0, 7, rest, True)])
    second = compute(whole, states, [StateRun(0, 0, 7, True), StateRun(1, 7, rest, False)])
    assert torch.equal(first[:7], second[:7])
    assert torch.equal(torch.cat((first[:7], second[7:])), found[0][0])
    assert torch.equal(states[1], found[0][1][0])


def test_runs_in_the_devices_memory_are_those_of_the_step(device: torch.device) -> None:
    """One tensor for steps with other slots, fewer runs, and runs that leave their state alone."""
    numbers = on(device, inputs((1, 2, 16, 8), 3, torch.float32))
    fixed = kernels.fixed_state_runs(device, 3)

    def states() -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randn(4, 2, 16, 8, generator=generator).to(device)

    own, given = states(), states()
    for runs in (
        [StateRun(3, 0, 1, False), StateRun(0, 1, 1, True), StateRun(2, 2, 1, False)],
        [StateRun(1, 0, 1, True), StateRun(3, 1, 1, False)],
        [StateRun(1, 0, 1, False)],
    ):
        before = given.clone()
        kernels.update_state_runs(fixed, [replace(run, drafts=run.length) for run in runs])
        seen = kernels.state_space_scan(*numbers, given, fixed)
        assert torch.equal(given, before)
        kernels.update_state_runs(fixed, runs)
        found = kernels.state_space_scan(*numbers, given, fixed)
        wanted = kernels.state_space_scan(*numbers, own, runs)
        for one in (seen, found):
            assert torch.equal(one[: len(runs)], wanted[: len(runs)])
        assert torch.equal(given, own)


# channels, state_dim
CHANNELS = [(67, 5), (16, 16)] + [(8192, 16), (200, 64)] * torch.cuda.is_available()


def selective(
    sizes: tuple[int, int], tokens: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """x, raw, bias, decay_scale, keys, queries and skip; rows are parts of longer ones."""
    channels, state_dim = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = normal(tokens, 2 * channels + 2 * state_dim + 3).to(dtype).to(device)
    keys, queries = rows[:, -2 * state_dim - 1 : -1].split(state_dim, 1)
    constants = [normal(channels), normal(channels, state_dim), normal(channels)]
    bias, scale, skip = (one.to(device) for one in constants)
    raw = 2 * rows[:, channels + 1 : 2 * channels + 1]
    return [rows[:, :channels], raw, bias, scale, keys, queries, skip]


@pytest.mark.parametrize("sizes", CHANNELS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selective_scan_is_that_of_float64(
    device: torch.device, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    numbers = selective(sizes, 9, dtype, device)
    before = torch.randn(3, sizes[1], sizes[0], generator=torch.Generator().manual_seed(1))
    before[0] = NAN
    states = before.clone().to(device)
    runs = [StateRun(2, 0, 3, False), StateRun(0, 3, 6, True)]
    found = kernels.selective_scan(*numbers, states, runs).cpu()
    assert found.dtype is dtype
    x, raw, bias, scale, keys, queries, skip = (one.double().cpu() for one in numbers)
    step = functional.softplus(raw + bias, threshold=100)
    out = torch.empty_like(x)
    for run in runs:
        state = torch.zeros(sizes[::-1], dtype=torch.float64)
        state = state if run.begins else before[run.slot].double()
        for t in range(run.offset, run.offset + run.length):
            state = state * torch.exp(-scale.T.exp() * step[t])
            state = state + keys[t][:, None] * (step[t] * x[t])
            out[t] = queries[t] @ state + skip * x[t]
        assert float((states[run.slot].double().cpu() - state).abs().max()) <= 2e-5
    most = float(out.abs().max())
    assert float((found.double() - out).abs().max()) <= 2 * NEAR[dtype] * most + 1e-7
    assert torch.equal(states[1].cpu(), before[1]), "no run has this slot"


def test_no_division_of_a_selective_scan_changes_a_bit(device: torch.device) -> None:
    """Nor does a run that does not advance."""
    numbers = selective((67, 5), 12, torch.float32, device)

    def compute(part: slice, states: Tensor, runs: list[StateRun]) -> Tensor:
        given = [one[part] if n in (0, 1, 4, 5) else one for n, one in enumerate(numbers)]
        found: Tensor = kernels.selective_scan(*given, states, runs)
        return found

    whole = torch.full((2, 5, 67), NAN, device=device)
    wanted = compute(slice(0, 12), whole, [StateRun(1, 0, 12, True)])
    states = torch.full((2, 5, 67), NAN, device=device)
    first = compute(slice(0, 7), states, [StateRun(0, 0, 7, True)])
    before = states.clone()
    aside = compute(slice(7, 12), states, [StateRun(0, 0, 5, False, drafts=5)])
    assert torch.equal(states[0], before[0])
    part = states.clone()
    compute(slice(7, 12), part, [StateRun(0, 0, 5, False, drafts=3)])
    two = states.clone()
    compute(slice(7, 9), two, [StateRun(0, 0, 2, False)])
    assert torch.equal(part[0], two[0])
    rest = compute(slice(7, 12), states, [StateRun(0, 0, 5, False)])
    assert torch.equal(aside, rest) and torch.equal(torch.cat((first, rest)), wanted)
    assert torch.equal(states[0], whole[1])
