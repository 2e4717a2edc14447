"""What the device's store counts, and where its blocks live for the host's store."""

from collections.abc import Mapping
from dataclasses import dataclass

from hmt.contracts.blocks import BlockId
from hmt.contracts.plan import Plan, Tier


@dataclass(slots=True)
class DeviceCounters:
    """Sums since the load, of copies from host memory to the device for steps.

    link_s     time in which the link was at it; of those that have arrived
    waited_s   time in which the CPU waited for the device before it computed
    """

    copied_bytes: int = 0
    link_s: float = 0.0
    waited_s: float = 0.0


def host_homes(plan: Plan) -> Mapping[BlockId, Tier]:
    """Homes as the host's store sees them: what lives on the device passes through it once."""
    return {block: Tier.DISK if home is Tier.DEVICE else home for block, home in plan.homes.items()}
