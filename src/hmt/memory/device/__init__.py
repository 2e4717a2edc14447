"""Memory of a device that computes beside the CPU: arenas, copies to it, and their order."""

from hmt.memory.device.interface import Copy, Cut, Device, Mark
from hmt.memory.device.link import Link, link_rate, rates_at_once
from hmt.memory.device.opening import open_device
from hmt.memory.device.pool import DeviceBuffer, DevicePool
from hmt.memory.device.pretended import PretendedDevice

__all__ = [
    "Copy",
    "Cut",
    "Device",
    "DeviceBuffer",
    "DevicePool",
    "Link",
    "Mark",
    "PretendedDevice",
    "link_rate",
    "open_device",
    "rates_at_once",
]
