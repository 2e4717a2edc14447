"""Rows of tables that lie in parts, in the GPU's memory or the host's."""

import pytest
import torch

from hmt.kernels.triton.elementwise.embedding import rows_at


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 1024, 2500])
@pytest.mark.parametrize("part_rows", [37, 10])
def test_rows_are_read_where_they_lie(
    device: torch.device, dtype: torch.dtype, width: int, part_rows: int
) -> None:
    table = torch.randn(37, width).to(dtype)
    parts = list(table.split(part_rows))
    if device.type == "cuda":
        parts = [part.pin_memory() if n % 2 else part.to(device) for n, part in enumerate(parts)]
    addresses = torch.tensor([part.data_ptr() for part in parts], device=device)
    ids = torch.tensor([36, 0, 5, 5, 17, 10, 9], device=device)
    found = rows_at(addresses, part_rows, width, dtype, ids)
    assert found.device.type == device.type
    assert torch.equal(found.cpu(), table[ids.cpu()])
    assert rows_at(addresses, part_rows, width, dtype, ids[:0]).shape == (0, width)
