"""Memory of a device that computes beside the CPU: arenas, copies to it, and their order."""

from hmt.memory.device.interface import Copy, Device, Mark
from hmt.memory.device.opening import open_device
from hmt.memory.device.pool import DeviceBuffer, DevicePool
from hmt.memory.device.pretended import PretendedDevice

__all__ = ["Copy", "Device", "DeviceBuffer", "DevicePool", "Mark", "PretendedDevice", "open_device"]
