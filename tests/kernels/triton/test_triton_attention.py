"""Triton's attention to keys and values in plain tensors, against its definition in float64."""

import math

import pytest
import torch
from test_triton_paged_attention import DTYPES, NEAR, exact

attention = pytest.importorskip("hmt.kernels.triton.attention.paged")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(70, 0, 70, 4, 2, 32, 32), (40, 90, 130, 4, 1, 48, 32), (33, 64, 64, 2, 2, 24, 40)]
)
def test_it_is_its_definition(device, dtype, shape):
    queries, start, context, q_heads, heads, key_dim, value_dim = shape
    random = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(*size, generator=random).to(dtype)
        for size in (
            (queries, q_heads, key_dim),
            (context, heads, key_dim),
            (context, heads, value_dim),
        )
    )
    sinks = torch.linspace(-2, 4, q_heads)
    for options in ({}, {"window": 37}, {"softcap": 2.0}, {"sinks": sinks}):
        options = {"start": start, "scale": key_dim**-0.5, **options}
        expected, logs = exact(query, key, value, **options)
        given = {name: x.to(device) if name == "sinks" else x for name, x in options.items()}
        both = (key.to(device), value.to(device))
        # f32 queries with keys of 16 bits: results are f32.
        for rows in (query, query.float()):
            out, lse = attention.attention(rows.to(device), *both, **given)
            assert out.dtype == rows.dtype and lse.dtype == torch.float32
            near = NEAR[dtype]
            torch.testing.assert_close(out.cpu().double(), expected, atol=near, rtol=near)
            torch.testing.assert_close(lse.cpu().double(), logs, atol=3e-4, rtol=3e-5)


def test_rows_that_see_nothing(device):
    query, none = torch.randn(3, 2, 16, device=device), torch.zeros(0, 2, 16, device=device)
    out, lse = attention.attention(query, none, none, start=0, scale=1.0)
    assert out.eq(0).all() and lse.eq(-math.inf).all()
    out, lse = attention.attention(query[:0], none, none, start=0, scale=1.0)
    assert out.shape == (0, 2, 16) and lse.shape == (0, 2)


def test_a_negative_scale(device):
    query, key, value = (torch.randn(20, 2, 16) for _ in range(3))
    expected, _ = exact(query, key, value, start=0, scale=-0.5)
    found, _ = attention.attention(
        *(x.to(device) for x in (query, key, value)), start=0, scale=-0.5
    )
    torch.testing.assert_close(found.cpu().double(), expected, atol=2e-5, rtol=2e-5)
