"""What the device's store counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class DeviceCounters:
    """Sums since the load, of copies from host memory to the device for steps.

    link_s     time in which the link was at it; of those that have arrived
    waited_s   time in which the CPU waited for the device before it computed
    """

    copied_bytes: int = 0
    link_s: float = 0.0
    waited_s: float = 0.0
