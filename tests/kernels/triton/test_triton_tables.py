"""Rows of tables that lie in host memory."""

import pytest
import torch

from hmt.kernels.triton.tables import rows_at


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 1024, 2500])
def test_rows_are_read_where_they_lie(device: torch.device, dtype: torch.dtype, width: int) -> None:
    table = torch.randn(37, width).to(dtype)
    if device.type == "cuda":
        table = table.pin_memory()
    ids = torch.tensor([36, 0, 5, 5, 17], device=device)
    found = rows_at(table.data_ptr(), width, dtype, ids)
    assert found.device.type == device.type
    assert torch.equal(found.cpu(), table[ids.cpu()])
    assert rows_at(table.data_ptr(), width, dtype, ids[:0]).shape == (0, width)
