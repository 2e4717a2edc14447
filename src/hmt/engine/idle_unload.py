"""What images need leaves memory when none has come for a while."""

from typing import Final

from hmt.engine.config import EngineConfig
from hmt.engine.images import ImageStore
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepare import Prepared

_LEAST_S: Final = 0.01  # between looks while the decoder is asked for an image's size


class IdleUnload:
    """Frees the slots of a tower, and returns their memory to the system.

    The next image loads it again.  For the engine's thread only, between steps, when nobody has a
    lease.
    """

    def __init__(self, prepared: Prepared, memory: Memory, images: ImageStore, after_s: float):
        """`after_s` without a request that has images."""
        self._blocks = [block.id for block in prepared.demand.vision]
        self._weights, self._images, self._after_s = memory.weights, images, after_s
        self._slots = [pool for pool in memory.pools if pool.account.purpose == "slots"]

    def wait_s(self) -> float:
        """Seconds until `unload` may have something to do.

        As images come on callers' threads, which do not wake the engine's, it looks each time.
        """
        idle_s = self._images.idle_s()
        return self._after_s if idle_s is None else max(_LEAST_S, self._after_s - idle_s)

    def unload(self) -> None:
        """Do so if the time has come."""
        if not self._images.rest(self._after_s):
            return
        for block in self._blocks:
            self._weights.forget(block)
        for pool in self._slots:
            pool.trim()


def open_idle_unload(prepared: Prepared, config: EngineConfig, memory: Memory) -> IdleUnload | None:
    """None for a model that sees no images, and where the tower may stay."""
    if memory.images is None or config.idle_unload_s is None:
        return None
    return IdleUnload(prepared, memory, memory.images, config.idle_unload_s)
