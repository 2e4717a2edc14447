"""Numbers that pass between host memory and the device."""

import pytest
import torch

from hmt.kernels.triton.transfer.pinned_copy import move


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 24), (3, 1000), (0, 8)])
def test_numbers_come_as_they_were(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    on_device = [torch.randn(shape).to(dtype).to(device) for _ in "ab"]
    pinned = device.type == "cuda"
    host = [torch.full(shape, torch.nan, dtype=dtype, pin_memory=pinned) for _ in "abc"]
    move([(on_device[0], host[0]), (on_device[1], host[1])])
    back = torch.full_like(on_device[0], torch.nan)
    move([(host[1], back)])
    if pinned:
        torch.cuda.synchronize()
    assert torch.equal(host[0], on_device[0].cpu()) and torch.equal(host[1], on_device[1].cpu())
    assert torch.equal(back, on_device[1])
    assert host[2].isnan().all()
