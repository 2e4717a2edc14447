"""How much the scheduler has to do, and how much room there is for it."""

from dataclasses import dataclass

from hmt.engine.scheduling.batch_limit import MemoryPressure


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that wait and that run, and positions of the KV cache: all, and unreserved.

    pressure      how scarce these are, and `used` the share that is in use
    most          requests that may run at once for now
    parked        times that one gave way to others and its KV pages stayed, where there is a lower
                  tier in that
    dropped       times that they did not, and are computed again
    batches       steps by how many requests had tokens in them
    """

    waiting: int
    running: int
    capacity_tokens: int
    free_tokens: int
    pressure: MemoryPressure
    used: float
    most: int
    parked: int
    dropped: int
    batches: dict[int, int]
