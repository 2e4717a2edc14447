"""Devices by name, and what torch calls work and memory beside them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hmt.memory.device.fake import FakeDevice
from hmt.memory.device.interface import Device


def open_device(name: str) -> Device:
    """The device called `name`: "fake", a GPU's number, or torch's own name of one.

    Raises MachineError where there is none, or torch cannot use it.
    """
    if name == "fake":
        return FakeDevice()
    if name.isdecimal():
        name = f"cuda:{name}"
    from hmt.memory.device.cuda import CudaDevice  # torch's CUDA parts load slowly

    return CudaDevice(name)


def gpu_is_usable() -> bool:
    """Whether torch can use a GPU of this machine."""
    return torch.cuda.is_available()


def host_buffer(shape: Sequence[int], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    """Host memory for copies to and from the device `where`: pinned, unless that is the host."""
    return torch.empty(shape, dtype=dtype, pin_memory=where.type != "cpu")


def sent(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """A tensor of host memory on the device `where`, as its current stream comes to it.

    Through pinned memory, so that the CPU does not wait: from other memory the driver copies when
    the stream gets there, and a queue behind another device's is long.
    """
    if where.type == "cpu":
        return tensor
    staged = host_buffer(tensor.shape, tensor.dtype, where)
    return staged.copy_(tensor).to(where, non_blocking=True)


def current_device(where: torch.device) -> AbstractContextManager[None]:
    """In the body, kernels are launched on the device `where`, on its current stream."""
    if where.type == "cpu":
        return nullcontext()
    device: AbstractContextManager[None] = torch.get_device_module(where).device(where)
    return device


def wait_for_stream(where: torch.device) -> None:
    """Wait for all that the calling thread's current stream of the device `where` has to do."""
    if where.type != "cpu":
        torch.get_device_module(where).current_stream(where).synchronize()
