"""What adapters add to products on a GPU."""

import pytest
import torch
from adapted_weights import adapted_weight, exact

from hmt.kernels.triton.gemm.low_rank import add_low_rank

NUMBERS = (0, 3, 1, 5, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_get_what_their_adapters_add(device: torch.device, dtype: torch.dtype) -> None:
    """Each with the bits that it has alone."""
    types = (torch.float32, torch.float16)
    x = torch.randn(len(NUMBERS), 300).to(dtype).to(device)
    out = torch.randn(len(NUMBERS), 530).to(dtype).to(device)
    w = adapted_weight(NUMBERS, 520, 300, types)
    together = out.clone()
    wanted = exact(out[:, 5:525].cpu(), x.cpu(), w)
    add_low_rank(together[:, 5:525], x, w)
    rounding = 2e-6 if dtype is torch.float32 else 2**-11
    torch.testing.assert_close(
        together[:, 5:525].cpu().double(), wanted, atol=float(wanted.abs().max()) * rounding,
        rtol=rounding,
    )  # fmt: skip
    assert torch.equal(together[:, :5], out[:, :5]) and torch.equal(together[:, 525:], out[:, 525:])
    for row in (1, 3):
        alone = out[row : row + 1, 5:525].clone()
        add_low_rank(
            alone, x[row : row + 1], adapted_weight(NUMBERS[row : row + 1], 520, 300, types)
        )
        assert torch.equal(alone[0], together[row, 5:525])
