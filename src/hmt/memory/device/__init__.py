"""Memory of a device that computes beside the CPU: arenas, copies to it, and their order."""

from hmt.memory.device.factory import (
    current_device,
    gpu_is_usable,
    host_buffer,
    open_device,
    sent,
    wait_for_stream,
)
from hmt.memory.device.fake import FakeDevice
from hmt.memory.device.interface import (
    CapturedStep,
    CopyEvent,
    Device,
    Event,
    InlineRecorder,
    SegmentKind,
    SegmentRecorder,
)
from hmt.memory.device.link import Link, link_rate, rates_at_once
from hmt.memory.device.pool import DeviceBuffer, DevicePool
