"""State spaces: float64, transformers, and any division of a sequence."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from state_space_inputs import inputs
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax import modeling_minimax

from hmt.contracts.store import StateRun
from hmt.kernels.backend_registry import Backend
from hmt.kernels.cpu import extension

# groups, heads, state_dim, head_dim
SIZES = [(1, 1, 5, 3), (2, 6, 8, 70), (3, 3, 300, 64), (2, 4, 130, 128), (1, 2, 33, 17)]
NAN = float("nan")

native = extension.load()


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


def shape_of(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    return sizes[1:]  # type: ignore[return-value]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plain", [False, True], ids=["steps", "no steps"])
def test_scan_is_that_of_float64(
    kernels: Backend, sizes: tuple[int, ...], dtype: torch.dtype, plain: bool
) -> None:
    numbers: list[Any] = inputs(sizes, 20, dtype)
    if plain:
        numbers[4:] = [None, None]
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(3, *shape_of(sizes), generator=generator)
    states = before.clone()
    states[0] = NAN
    runs = [StateRun(2, 0, 7, False), StateRun(0, 7, 13, True)]
    found = kernels.state_space_scan(*numbers, states, runs)
    assert found.dtype is dtype
    assert torch.equal(states[1], before[1]), "no run has this slot"
    near = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for run, first in ((runs[0], before[2]), (runs[1], torch.zeros(shape_of(sizes)))):
        own = [one[run.tokens] if one is not None else None for one in numbers[:5]]
        wanted, state = exact([*own, numbers[5]], first)
        scale = float(wanted.abs().max())
        assert float((found[run.tokens].double() - wanted).abs().max()) <= near * scale + 1e-7
        assert float((states[run.slot].double() - state).abs().max()) <= 2e-5


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 1.7)], ids=str)
def test_steps_and_scan_are_those_of_transformers(
    kernels: Backend, limits: tuple[float, float]
) -> None:
    """A Mamba-2 from a projection to what it gates."""
    x, keys, queries, _, raw, skip = inputs((2, 4, 16, 24), 150, torch.float32)
    raw, bias, scale = 3 * raw - 3, torch.randn(4), torch.randn(4)
    wanted, last = modeling_mamba2.mamba2_chunk_scan(
        x[None], raw[None], -scale.exp(), keys[None], queries[None], chunk_size=16, D=skip,
        dt_bias=bias, dt_softplus=True, dt_limit=limits, return_final_states=True,
    )  # fmt: skip
    step, decay = kernels.time_steps(raw, bias, scale, *limits)
    states = torch.full((1, 4, 16, 24), NAN)
    runs = [StateRun(0, 0, 150, True)]
    found = kernels.state_space_scan(x, keys, queries, decay, step, skip, states, runs)
    torch.testing.assert_close(found, wanted[0].view_as(x), atol=1e-4, rtol=0)
    torch.testing.assert_close(states, last.transpose(2, 3), atol=2e-5, rtol=0)


def test_time_steps_are_those_of_float64(kernels: Backend) -> None:
    """Also where a step is so small that f32 has no digits of 1 + exp(x)."""
    for heads in (1, 16, 37):
        raw = torch.linspace(-40, 40, 9 * heads).view(9, heads)
        bias, scale = torch.randn(heads), torch.randn(heads)
        for low, high in ((0.0, float("inf")), (1e-3, 5.0)):
            step, decay = kernels.time_steps(raw, bias, scale, low, high)
            wanted = functional.softplus(raw.double() + bias, threshold=100).clamp(low, high)
            torch.testing.assert_close(step.double(), wanted, atol=0, rtol=2e-6)
            left = torch.exp(-scale.double().exp() * wanted)
            torch.testing.assert_close(decay.double(), left, atol=2e-6, rtol=0)


def test_lightning_attention_is_a_state_space(kernels: Backend) -> None:
    """Its decay is one number per head, and a token is taken as it is."""
    config = modeling_minimax.MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=16, num_hidden_layers=2, block_size=8,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    layer = modeling_minimax.MiniMaxLightningAttention(config, 0).eval()
    hidden = torch.randn(1, 50, 32)
    seen = []
    layer.norm.register_forward_hook(lambda module, given, result: seen.append(given[0]))
    with torch.inference_mode():
        layer(hidden, position_embeddings=None, attention_mask=None)
        qkv = functional.silu(layer.qkv_proj(hidden))[0].unflatten(1, (4, -1))
    query, key, value = qkv.split(16, dim=2)
    decay = torch.exp(-layer.slope_rate.view(4)).expand(50, 4)
    states, runs = torch.zeros(1, 4, 16, 16), [StateRun(0, 0, 50, True)]
    found = kernels.state_space_scan(value, key, query, decay, None, None, states, runs)
    torch.testing.assert_close(found.flatten(1), seen[0][0], atol=1e-5, rtol=1e-5)


def in_parts(tokens: int, rng: random.Random) -> Iterator[slice]:
    """A sequence's tokens in steps of random sizes."""
    at = 0
    while at < tokens:
        size = min(rng.choice([1, 1, 2, 5, 16, 17]), tokens - at)
        yield slice(at, at + size)
        at += size


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_division_changes_a_bit(kernels: Backend, sizes: tuple[int, ...]) -> None:
    """Nor do other sequences in the same step, nor threads."""
    tokens = 60
    x, keys, queries, _, raw, skip = inputs(sizes, tokens, torch.float32)
    bias, scale = torch.randn(2, sizes[1]).unbind()

    def compute(part: slice, states: Tensor, runs: list[StateRun]) -> Tensor:
        step, decay = kernels.time_steps(raw[part], bias, scale, 0.0, 9.0)
        given = x[part], keys[part], queries[part], decay, step, skip
        return kernels.state_space_scan(*given, states, runs)

    found, threads = [], torch.get_num_threads()
    for seed in range(3):
        state = torch.full((1, *shape_of(sizes)), NAN)
        torch.set_num_threads(1 + seed % 2)
        results = [
            compute(part, state, [StateRun(0, 0, part.stop - part.start, part.start == 0)])
            for part in in_parts(tokens, random.Random(seed))
        ]
        found.append((torch.cat(results), state))
    torch.set_num_threads(threads)
    assert all(all(map(torch.equal, pair, found[0])) for pair in found[1:])
    # The first 23 tokens, then the others, each beside a sequence of the others.
    states, whole = torch.full((2, *shape_of(sizes)), NAN), slice(0, tokens)
    first = compute(whole, states, [StateRun(1, 0, 23, True), StateRun(0, 23, 37, True)])
    runs = [StateRun(0, 0, 23, True), StateRun(1, 23, 37, False)]
    second = compute(whole, states, runs)
    assert torch.equal(first[:23], second[:23])
    assert torch.equal(torch.cat((first[:23], second[23:])), found[0][0])
    assert torch.equal(states[1], found[0][1][0])


def test_what_does_not_advance_stays(kernels: Backend) -> None:
    numbers = inputs((1, 2, 16, 8), 5, torch.float32)
    states = torch.randn(2, 2, 16, 8)
    before = states.clone()
    runs = [StateRun(1, 0, 3, False, drafts=3), StateRun(0, 3, 2, True)]
    found = kernels.state_space_scan(*numbers, states, runs)
    assert torch.equal(states[1], before[1]) and not torch.equal(states[0], before[0])
    runs[0] = StateRun(1, 0, 3, False)
    assert torch.equal(kernels.state_space_scan(*numbers, before, runs), found)


def drafts_leave_the_state_before_them(
    compute: Callable[[Tensor, list[StateRun]], Tensor], states: Tensor
) -> None:
    """For any number of drafts, of 9 tokens: results are those of all, the state that before."""
    for drafts in range(10):
        for begins in (False, True):
            known = torch.full_like(states, NAN) if begins else states
            all_of, first, found = known.clone(), known.clone(), known.clone()
            wanted = compute(all_of, [StateRun(1, 0, 9, begins)])
            if drafts < 9:
                compute(first, [StateRun(1, 0, 9 - drafts, begins)])
            result = compute(found, [StateRun(1, 0, 9, begins, drafts)])
            assert torch.equal(result, wanted), drafts
            assert torch.equal(found.nan_to_num(7.0), first.nan_to_num(7.0)), drafts


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scans_of_drafts(kernels: Backend, sizes: tuple[int, ...]) -> None:
    numbers = inputs(sizes, 9, torch.float32)
    drafts_leave_the_state_before_them(
        lambda states, runs: kernels.state_space_scan(*numbers, states, runs),
        torch.randn(2, *shape_of(sizes)),
    )


# channels, state_dim
CHANNELS = [(1, 1), (16, 16), (67, 5), (200, 16), (19, 64)]


def selective(sizes: tuple[int, int], tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """x, raw, bias, decay_scale, keys, queries and skip; rows are parts of longer ones."""
    channels, state_dim = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = normal(tokens, 3 * channels + 2 * state_dim + 3).to(dtype)
    x, raw = rows[:, :channels], 2 * rows[:, channels + 1 : 2 * channels + 1]
    keys, queries = rows[:, -2 * state_dim - 1 : -1].split(state_dim, 1)
    return [x, raw, normal(channels), normal(channels, state_dim), keys, queries, normal(channels)]


@pytest.mark.parametrize("sizes", CHANNELS, ids=str)
def test_selective_scans_of_drafts(kernels: Backend, sizes: tuple[int, int]) -> None:
    numbers = selective(sizes, 9, torch.float32)
    drafts_leave_the_state_before_them(
        lambda states, runs: kernels.selective_scan(*numbers, states, runs),
        torch.randn(2, sizes[1], sizes[0]),
    )


@pytest.mark.parametrize("sizes", CHANNELS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selective_scan_is_that_of_transformers(
    kernels: Backend, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Its own scan goes token by token, in float64."""
    numbers = selective(sizes, 20, dtype)
    before = torch.randn(3, sizes[1], sizes[0], generator=torch.Generator().manual_seed(1))
    before[0] = NAN
    states = before.clone()
    runs = [StateRun(2, 0, 7, False), StateRun(0, 7, 13, True)]
    found = kernels.selective_scan(*numbers, states, runs)
    assert found.dtype is dtype
    assert torch.equal(states[1], before[1]), "no run has this slot"
    near = 2e-6 if dtype is torch.float32 else 4e-3
    for run in runs:
        x, raw, bias, scale, keys, queries, skip = (
            one[run.tokens].double() if len(one) == 20 and n in (0, 1, 4, 5) else one.double()
            for n, one in enumerate(numbers)
        )
        state = torch.zeros(sizes, dtype=torch.float64)
        if not run.begins:
            state = before[run.slot].T.double().clone()
        wanted = []
        for at in range(run.length):
            wanted.append(
                modeling_mamba.mamba_selective_state_update(
                    state[None], x[None, at], raw[None, at], -scale.exp(), keys[None, at],
                    queries[None, at], skip, dt_bias=bias, dt_softplus=True,
                )[0]
            )  # fmt: skip
        every = torch.stack(wanted)
        most = float(every.abs().max())
        assert float((found[run.tokens].double() - every).abs().max()) <= near * most + 1e-7
        torch.testing.assert_close(states[run.slot].T.double(), state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", CHANNELS, ids=str)
def test_no_division_of_a_selective_scan_changes_a_bit(
    kernels: Backend, sizes: tuple[int, int]
) -> None:
    tokens = 50
    numbers = selective(sizes, tokens, torch.float32)

    def compute(part: slice, states: Tensor, runs: list[StateRun]) -> Tensor:
        given = [one[part] if n in (0, 1, 4, 5) else one for n, one in enumerate(numbers)]
        return kernels.selective_scan(*given, states, runs)

    found, threads = [], torch.get_num_threads()
    for seed in range(3):
        state = torch.full((1, sizes[1], sizes[0]), NAN)
        torch.set_num_threads(1 + seed % 2)
        results = [
            compute(part, state, [StateRun(0, 0, part.stop - part.start, part.start == 0)])
            for part in in_parts(tokens, random.Random(seed))
        ]
        found.append((torch.cat(results), state))
    torch.set_num_threads(threads)
    assert all(all(map(torch.equal, pair, found[0])) for pair in found[1:])
    states, whole = torch.full((2, sizes[1], sizes[0]), NAN), slice(0, tokens)
    first = compute(whole, states, [StateRun(1, 0, 23, True), StateRun(0, 23, 27, True)])
    aside = [StateRun(0, 0, 23, True), StateRun(1, 23, 27, False, drafts=27)]
    before = states.clone()
    seen = compute(whole, states, aside)
    assert torch.equal(states[1], before[1])
    aside[1] = StateRun(1, 23, 27, False)
    assert torch.equal(compute(whole, states, aside), seen)
    assert torch.equal(torch.cat((first[:23], seen[23:])), found[0][0])
    assert torch.equal(states[1], found[0][1][0])
