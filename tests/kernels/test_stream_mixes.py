"""Mixtures of residual streams: compiled code beside plain torch, and properties of the matrix."""

import pytest
import torch

from hmt.kernels import ops, reference
from hmt.kernels.cpu import extension


def inputs(tokens: int, streams: int, scale: float) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(streams)
    width = streams * (streams + 2)
    products = torch.randn(tokens, width, generator=generator) * scale
    return products, torch.randn(width, generator=generator), torch.tensor([0.7, 1.3, -0.4])


@pytest.mark.parametrize("streams", [1, 2, 4, 7, 64])
@pytest.mark.parametrize(("iterations", "scale"), [(1, 1.0), (20, 1.0), (20, 40.0)])
def test_compiled_weights_are_those_of_plain_torch(
    streams: int, iterations: int, scale: float
) -> None:
    given = inputs(9, streams, scale)
    options = {"streams": streams, "iterations": iterations, "eps": 1e-6}
    wanted = reference.stream_mixes(*(part.double() for part in given), **options)
    for compute in (reference.stream_mixes, ops.stream_mixes):
        found = compute(*given, **options)
        for got, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, right.to(got), atol=2e-5, rtol=1e-4)
    # A doubly stochastic matrix is where the iterations lead; columns were divided last.
    mixed = found[2]
    assert (mixed >= 0).all() and (mixed.sum(1) <= 1 + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "streams", "width"), [(1, 4, 64), (5, 3, 37), (70, 2, 520)])
def test_streams_are_read_and_written_to_the_bit(
    dtype: torch.dtype, tokens: int, streams: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(tokens, streams * width, generator=generator).to(dtype)
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    rows[0, 0], x[0, 1] = float("inf"), float("nan")
    read, spread, mixed = reference.stream_mixes(
        *inputs(tokens, streams, 1.0), streams=streams, iterations=3, eps=1e-6
    )
    for operation, given in (
        ("read_streams", (rows, read)),
        ("write_streams", (rows, x, spread, mixed)),
    ):
        wanted = getattr(reference, operation)(*given)
        found = getattr(ops, operation)(*given)
        assert found.dtype is dtype
        torch.testing.assert_close(found, wanted, atol=0, rtol=0, equal_nan=True)
    apart = rows.double().unflatten(1, (streams, width))[1:]
    near = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    exact = (apart * read.double()[1:, :, None]).sum(1)
    torch.testing.assert_close(ops.read_streams(rows, read)[1:].double(), exact, atol=near, rtol=0)
    exact = mixed.double()[1:].transpose(1, 2) @ apart
    exact += spread.double()[1:, :, None] * x.double()[1:, None]
    found = ops.write_streams(rows, x, spread, mixed)[1:].double()
    torch.testing.assert_close(found, exact.flatten(1), atol=near, rtol=0)


@pytest.mark.skipif(extension.load() is None, reason="needs the compiled extension")
def test_a_token_has_the_same_bits_wherever_it_stands() -> None:
    products, base, scale = inputs(37, 4, 3.0)
    options = {"streams": 4, "iterations": 20, "eps": 1e-6}
    whole = ops.stream_mixes(products, base, scale, **options)
    for token in range(37):
        alone = ops.stream_mixes(products[token : token + 1], base, scale, **options)
        for one, all_of_them in zip(alone, whole, strict=True):
            assert torch.equal(one[0], all_of_them[token])
    broken = products.clone()
    broken[5, 3] = float("nan")
    read, spread, mixed = ops.stream_mixes(broken, base, scale, **options)
    rows = [n for n in range(37) if n != 5]
    for found, right in zip((read, spread, mixed), whole, strict=True):
        assert torch.equal(found[rows], right[rows])
