"""Convolution over time and the gated delta rule: float64, transformers, and any division."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from hmt.contracts.store import StateRun
from hmt.kernels.backend_registry import Backend
from hmt.kernels.cpu import extension
from hmt.kernels.reference import DeltaHeads

# key heads, heads, key_dim, value_dim; decays by channel, their bound, the largest rate
SIZES = [(1, 1, 5, 3), (2, 6, 8, 70), (3, 3, 16, 64), (2, 4, 130, 128), (1, 2, 33, 17)]
SIZES += [(3, 3, 16, 64, True), (2, 4, 37, 70, True, -5.0), (1, 2, 8, 5, False, 0.0, 2.0)]
NAN = float("nan")


native = extension.load()


def inputs(sizes: tuple[Any, ...], tokens: int, dtype: torch.dtype) -> tuple[DeltaHeads, list[Any]]:
    """Heads, and qkv, decay, rate, decay_scale, decay_bias."""
    heads = DeltaHeads(*sizes)
    generator = torch.Generator().manual_seed(sum(sizes[:4]) + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    numbers = [normal(tokens, heads.width), 3 * normal(tokens, heads.decays_width)]
    numbers += [2 * normal(tokens, heads.heads)]
    numbers = [one.to(dtype) for one in numbers]
    return heads, [*numbers, normal(heads.heads), normal(heads.decays_width)]


def exact(heads: DeltaHeads, numbers: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as its paper writes it, in float64: results [tokens, heads, value_dim] and state."""
    qkv, decay, rate, scale, bias = (one.double() for one in numbers)
    sizes = [heads.keys_width, heads.keys_width, heads.values_width]
    dims = (heads.key_dim, heads.key_dim, heads.value_dim)
    parts = zip(qkv.split(sizes, 1), dims, strict=True)
    query, key, value = (part.unflatten(1, (-1, dim)) for part, dim in parts)
    state, out = state.double().clone(), torch.empty_like(value)
    for t in range(len(qkv)):
        for h in range(heads.heads):
            k, q = (x[t, h * heads.key_heads // heads.heads] for x in (key, query))
            k, q = k / (k @ k + 1e-6).sqrt(), q / (q @ q + 1e-6).sqrt() / heads.key_dim**0.5
            raw = (decay[t] + bias).unflatten(0, (heads.heads, -1))[h]
            g = torch.exp(-scale[h].exp() * functional.softplus(raw))
            if heads.bound:
                g = torch.exp(heads.bound * torch.sigmoid(scale[h].exp() * raw))
            b = heads.most_rate * rate[t, h].sigmoid()
            eye = torch.eye(heads.key_dim, dtype=torch.float64)
            left = (eye - b * torch.outer(k, k)) @ torch.diag(g.expand(heads.key_dim))
            state[h] = left @ state[h] + b * torch.outer(k, value[t, h])
            out[t, h] = q @ state[h]
    return out, state


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_delta_rule_is_that_of_float64(
    kernels: Backend, sizes: tuple[Any, ...], dtype: torch.dtype
) -> None:
    heads, numbers = inputs(sizes, 20, dtype)
    shape = (heads.heads, heads.key_dim, heads.value_dim)
    before = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    states = before.clone()
    states[0] = NAN
    runs = [StateRun(2, 0, 7, False), StateRun(0, 7, 13, True)]
    found = kernels.gated_delta_rule(*numbers, states, runs, heads)
    assert found.dtype is dtype
    assert torch.equal(states[1], before[1]), "no run has this slot"
    near = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for run, first in ((runs[0], before[2]), (runs[1], torch.zeros(shape))):
        wanted, state = exact(heads, [one[run.tokens] for one in numbers[:3]] + numbers[3:], first)
        scale = float(wanted.abs().max())
        assert float((found[run.tokens].double() - wanted).abs().max()) <= near * scale + 1e-7
        assert float((states[run.slot].double() - state).abs().max()) <= 1e-5


def test_delta_rule_is_that_of_transformers(kernels: Backend) -> None:
    heads, numbers = inputs((2, 4, 16, 24), 150, torch.float32)
    qkv, decay, rate, scale, bias = numbers
    sizes = [heads.keys_width, heads.keys_width, heads.values_width]
    query, key, value = (part.unflatten(1, (n, -1))[None] for part, n in zip(
        qkv.split(sizes, 1), (2, 2, 4), strict=True))  # fmt: skip
    g = -scale.exp() * functional.softplus(decay + bias)
    wanted, last = torch_chunk_gated_delta_rule(
        query, key, value, g=g[None], beta=rate.sigmoid()[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    states = torch.zeros(1, 4, 16, 24)
    found = kernels.gated_delta_rule(*numbers, states, [StateRun(0, 0, 150, True)], heads)
    torch.testing.assert_close(found, wanted[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(states, last, atol=1e-5, rtol=0)


def test_decays_by_channel_are_those_of_transformers(kernels: Backend) -> None:
    heads, numbers = inputs((3, 3, 16, 24, True), 150, torch.float32)
    qkv, decay, rate, scale, bias = numbers
    sizes = [heads.keys_width, heads.keys_width, heads.values_width]
    query, key, value = (part.unflatten(1, (3, -1))[None] for part in qkv.split(sizes, 1))
    g = -scale.exp()[:, None] * functional.softplus(decay + bias).unflatten(1, (3, -1))
    wanted, last = chunk_kimi_delta_attention(
        query, key, value, g=g[None], beta=rate.sigmoid()[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    states = torch.zeros(1, 3, 16, 24)
    found = kernels.gated_delta_rule(*numbers, states, [StateRun(0, 0, 150, True)], heads)
    torch.testing.assert_close(found, wanted[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(states, last, atol=1e-5, rtol=0)


def test_slow_decays_keep_their_digits(kernels: Backend) -> None:
    """Of 1 + exp(x), f32 has only a few of the digits of exp(x)."""
    for by_channel in (False, True):
        heads, numbers = inputs((1, 1, 16, 4, by_channel), 12, torch.float32)
        numbers[1][:], numbers[2][:], numbers[3][:], numbers[4][:] = -9.0, -30.0, 5.0, 0.0
        states = torch.ones(1, 1, 16, 4)
        kernels.gated_delta_rule(*numbers, states, [StateRun(0, 0, 12, False)], heads)
        _, wanted = exact(heads, numbers, torch.ones(1, 16, 4))
        torch.testing.assert_close(states[0].double(), wanted, atol=8e-6, rtol=0)


@pytest.mark.parametrize("width", [2, 3, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convolution_is_torchs(kernels: Backend, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    for channels in (1, 16, 67, 200):
        x = torch.randn(30, channels, generator=generator).to(dtype)
        weight = torch.randn(channels, width, generator=generator).to(dtype)
        tails = torch.full((2, width - 1, channels), NAN)
        runs = [StateRun(1, 0, 12, True), StateRun(0, 12, 18, True)]
        gated = channels != 67
        bias = torch.randn(channels, generator=generator).to(dtype) if width % 2 else None
        found = kernels.causal_conv(x, weight, tails, runs, bias=bias, gated=gated)
        for run in runs:
            padded = functional.pad(x[run.tokens].double().T, (width - 1, 0))
            added = None if bias is None else bias.double()
            taps = weight.double()[:, None]
            wide = functional.conv1d(padded, taps, added, groups=channels)
            wanted = (functional.silu(wide) if gated else wide).T
            near = 2e-6 if dtype is torch.float32 else 8e-3
            assert float((found[run.tokens].double() - wanted).abs().max()) <= near * 8
            assert torch.equal(tails[run.slot], padded.T[-(width - 1) :].float())


def in_parts(compute: Callable[[slice, bool], Tensor], tokens: int, rng: random.Random) -> Tensor:
    """A sequence's tokens in steps of random sizes."""
    parts, at = [], 0
    while at < tokens:
        size = min(rng.choice([1, 1, 2, 5, 16, 17]), tokens - at)
        parts.append(compute(slice(at, at + size), at == 0))
        at += size
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_division_changes_a_bit(kernels: Backend, sizes: tuple[Any, ...]) -> None:
    """Nor do other sequences in the same step, nor threads."""
    tokens = 60
    heads, numbers = inputs(sizes, tokens, torch.float32)
    weight = torch.randn(heads.width, 4, generator=torch.Generator().manual_seed(2))
    shape = (heads.heads, heads.key_dim, heads.value_dim)

    def both(state: Tensor, tail: Tensor, part: slice, runs: list[StateRun]) -> Tensor:
        own = [one[part] for one in numbers[:3]]
        own[0] = kernels.causal_conv(own[0], weight, tail, runs)
        return kernels.gated_delta_rule(*own, *numbers[3:], state, runs, heads)

    def alone(part: slice, begins: bool) -> Tensor:
        return both(state, tail, part, [StateRun(0, 0, part.stop - part.start, begins)])

    found, threads = [], torch.get_num_threads()
    for seed in range(3):
        state, tail = torch.full((1, *shape), NAN), torch.full((1, 3, heads.width), NAN)
        torch.set_num_threads(1 + seed % 2)
        found.append((in_parts(alone, tokens, random.Random(seed)), state, tail))
    torch.set_num_threads(threads)
    for result, state, tail in found[1:]:
        assert torch.equal(result, found[0][0])
        assert torch.equal(state, found[0][1]) and torch.equal(tail, found[0][2])
    # The first 23 tokens, then the others, each beside a sequence of the others.
    states, tails = torch.full((2, *shape), NAN), torch.full((2, 3, heads.width), NAN)
    whole = slice(0, tokens)
    first = both(states, tails, whole, [StateRun(1, 0, 23, True), StateRun(0, 23, 37, True)])
    second = [StateRun(0, 0, 23, True), StateRun(1, 23, 37, False)]
    second_result = both(states, tails, whole, second)
    assert torch.equal(first[:23], second_result[:23])
    assert torch.equal(torch.cat((first[:23], second_result[23:])), found[0][0])
    assert torch.equal(states[1], found[0][1][0]) and torch.equal(tails[1], found[0][2][0])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_drafts_leave_the_state_before_them(kernels: Backend, sizes: tuple[Any, ...]) -> None:
    """For any number of them: results are those of all tokens, the state is that of the others."""
    heads, numbers = inputs(sizes, 9, torch.float32)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(heads.width, 4, generator=generator)
    shape = (2, heads.heads, heads.key_dim, heads.value_dim)
    states = torch.randn(shape, generator=generator), torch.randn(2, 3, heads.width)

    def compute(known: list[Tensor], run: StateRun) -> Tensor:
        own = [one[: run.length] for one in numbers[:3]]
        own[0] = kernels.causal_conv(own[0], weight, known[1], [run])
        return kernels.gated_delta_rule(*own, *numbers[3:], known[0], [run], heads)

    for drafts in range(10):
        for begins in (False, True):
            known = [torch.full_like(one, NAN) if begins else one for one in states]
            all_of, first, found = ([one.clone() for one in known] for _ in range(3))
            wanted = compute(all_of, StateRun(1, 0, 9, begins))
            if drafts < 9:
                compute(first, StateRun(1, 0, 9 - drafts, begins))
            assert torch.equal(compute(found, StateRun(1, 0, 9, begins, drafts)), wanted)
            for one, other in zip(found, first, strict=True):
                assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), drafts
