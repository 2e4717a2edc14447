"""Hyper-connections against the modules of transformers that have them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.layers import HyperConnection, HyperHead, Params

HIDDEN, TOKENS = 12, 41
pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def shapes(draw: st.DrawFn) -> SimpleNamespace:
    """What transformers' modules read from a configuration."""
    return SimpleNamespace(
        hidden_size=HIDDEN,
        hc_mult=draw(st.integers(1, 5)),
        hc_sinkhorn_iters=draw(st.integers(1, 20)),
        hc_eps=draw(st.sampled_from([1e-6, 1e-3])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        seed=draw(st.integers(0, 2**31)),
        # Of logits: with large ones, iterations begin far from a doubly stochastic matrix.
        std=draw(st.sampled_from([0.1, 1.0])),
    )


def randomised(shape: SimpleNamespace, theirs: torch.nn.Module, prefix: str) -> Params:
    generator = torch.Generator().manual_seed(shape.seed)
    params = {}
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * shape.std)
            own = f"own_{name.removeprefix(prefix)}"
            params[own] = WeightTensor(Encoding.F32, tuple(tensor.shape), tensor.data)
    return params


def streams_of(shape: SimpleNamespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape.seed + 1)
    return torch.randn(TOKENS, shape.hc_mult, HIDDEN, generator=generator)


def sizes(shape: SimpleNamespace) -> dict[str, Any]:
    given = {"hidden_size": HIDDEN, "streams": shape.hc_mult, "name": "own_"}
    return given | {"norm_eps": shape.rms_norm_eps, "eps": shape.hc_eps}


@pytest.mark.parametrize("kind", [DeepseekV4HyperConnection, Glm5NextTextHyperConnection])
@given(shape=shapes())
@settings(max_examples=20, deadline=None)
def test_a_sublayer_reads_and_writes_what_transformers_does(
    kind: type[torch.nn.Module], shape: SimpleNamespace
) -> None:
    theirs = kind(shape)
    params, streams = randomised(shape, theirs, ""), streams_of(shape)
    own = HyperConnection(iterations=shape.hc_sinkhorn_iters, **sizes(shape))
    for param in own.params("at."):
        assert param.shape == params[param.name].shape
    with torch.inference_mode():
        post, comb, collapsed = theirs(streams[None])
        out = collapsed.tanh()
        wanted = post[..., None] * out[..., None, :] + comb.transpose(-1, -2) @ streams[None]
    x, mix = own.read(streams.flatten(1), params)
    torch.testing.assert_close(x, collapsed[0])
    found = own.write(streams.flatten(1), x.tanh(), mix)
    torch.testing.assert_close(found, wanted[0].flatten(1))
    assert (mix.mixed >= 0).all() and (mix.mixed.sum(1) <= 1 + 1e-5).all()


@given(shape=shapes())
@settings(max_examples=20, deadline=None)
def test_all_streams_become_what_the_head_multiplies(shape: SimpleNamespace) -> None:
    theirs = DeepseekV4HyperHead(shape)
    params, streams = randomised(shape, theirs, "hc_"), streams_of(shape)
    own = HyperHead(**sizes(shape))
    assert {p.name: p.shape for p in own.params("")} == {n: w.shape for n, w in params.items()}
    with torch.inference_mode():
        wanted = theirs(streams[None])[0]
    torch.testing.assert_close(own(streams.flatten(1), params), wanted)


@given(shape=shapes(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=20, deadline=None)
def test_a_token_has_the_same_bits_however_many_others_there_are(
    shape: SimpleNamespace, dtype: torch.dtype
) -> None:
    params = randomised(shape, DeepseekV4HyperConnection(shape), "")
    own = HyperConnection(iterations=shape.hc_sinkhorn_iters, **sizes(shape))
    streams = streams_of(shape).flatten(1).to(dtype)

    def computed(rows: torch.Tensor) -> torch.Tensor:
        x, mix = own.read(rows, params)
        assert x.dtype is dtype
        return torch.cat((x, own.write(rows, x, mix)), dim=1)

    whole = computed(streams)
    for count in (1, 3, 8, 20):
        parts = torch.cat([computed(part) for part in streams.split(count)])
        assert torch.equal(parts, whole)
