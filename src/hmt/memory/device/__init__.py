"""Memory of a device that computes beside the CPU: arenas, copies to it, and their order."""

from hmt.memory.device.interface import Device, Mark
from hmt.memory.device.pool import DeviceBuffer, DevicePool
from hmt.memory.device.pretended import PretendedDevice

__all__ = ["Device", "DeviceBuffer", "DevicePool", "Mark", "PretendedDevice", "open_device"]


def open_device(name: str) -> Device:
    """The device called `name`: "pretended", or a CUDA device such as "cuda:0".

    Raises MachineError where there is none, or torch cannot use it.
    """
    if name == "pretended":
        return PretendedDevice()
    from hmt.memory.device.cuda import CudaDevice  # torch's CUDA parts load slowly

    return CudaDevice(name)
