"""Devices by name."""

from hmt.memory.device.fake import FakeDevice
from hmt.memory.device.interface import Device


def open_device(name: str) -> Device:
    """The device called `name`: "fake", or a CUDA device such as "cuda:0".

    Raises MachineError where there is none, or torch cannot use it.
    """
    if name == "fake":
        return FakeDevice()
    from hmt.memory.device.cuda import CudaDevice  # torch's CUDA parts load slowly

    return CudaDevice(name)
