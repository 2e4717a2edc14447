"""What some policies weigh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hmt.contracts.blocks import BlockId


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What some policies weigh.

    block_bytes   bytes that leave the disk when a block is read again
    read_rate     of the disk, bytes per second
    latency_s     that a read takes apart from its bytes
    pressure      share of the slots that is in use now
    """

    block_bytes: Mapping[BlockId, int] = field(default_factory=dict)
    read_rate: float = 2e9
    latency_s: float = 1e-4
    pressure: Callable[[], float] = lambda: 1.0
