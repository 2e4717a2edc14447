"""Devices by name."""

from hmt.memory.device.interface import Device
from hmt.memory.device.pretended import PretendedDevice


def open_device(name: str) -> Device:
    """The device called `name`: "pretended", or a CUDA device such as "cuda:0".

    Raises MachineError where there is none, or torch cannot use it.
    """
    if name == "pretended":
        return PretendedDevice()
    from hmt.memory.device.cuda import CudaDevice  # torch's CUDA parts load slowly

    return CudaDevice(name)
