"""What adapters add to products, beside float64, and that rows do not know of one another."""

import pytest
import torch
from adapted_weights import DTYPES, adapted_weight, exact

from hmt.kernels.backend_registry import Backend

NUMBERS = (0, 2, 1, 1, 0, 5, 3, 2, 4, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 24), (1030, 300), (7, 1)])
def test_rows_get_what_their_adapters_add(
    kernels: Backend, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    w = adapted_weight(NUMBERS, outputs, inputs)
    whole = torch.randn(len(NUMBERS), outputs + 9).to(dtype)
    x = torch.randn(len(NUMBERS), 2 * inputs).to(dtype)[:, :inputs]
    out, before = whole[:, 4 : outputs + 4], whole.clone()
    wanted = exact(out, x, w)
    kernels.add_low_rank(out, x, w)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(
        out.double(), wanted, atol=float(wanted.abs().max()) * rounding, rtol=rounding
    )
    without = torch.tensor([number in (0, 5) for number in NUMBERS])
    assert torch.equal(out[without], before[without, 4 : outputs + 4])
    assert torch.equal(whole[:, :4], before[:, :4])
    assert torch.equal(whole[:, outputs + 4 :], before[:, outputs + 4 :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(kernels: Backend, dtype: torch.dtype) -> None:
    if kernels.name == "plain torch":
        pytest.skip("torch adds up in an order that depends on the number of rows")
    x, out = torch.randn(len(NUMBERS), 530).to(dtype), torch.randn(len(NUMBERS), 700).to(dtype)
    together = out.clone()
    kernels.add_low_rank(together, x, adapted_weight(NUMBERS, 700, 530))
    for row, number in enumerate(NUMBERS):
        alone = out[row : row + 1].clone()
        kernels.add_low_rank(alone, x[row : row + 1], adapted_weight((number,), 700, 530))
        assert torch.equal(alone[0], together[row])
