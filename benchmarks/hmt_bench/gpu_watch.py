"""The most GPU memory that the driver has seen this process use, by what it was doing."""

import threading
from types import TracebackType
from typing import Self

from hmt.memory.device import Device

# What torch has taken stays taken until it is trimmed; what comes and goes sooner is the driver's.
_EVERY_S = 0.2


class GpuWatch:
    """Asks the driver now and then, on a thread of its own, while it is open."""

    def __init__(self, device: Device, doing: str) -> None:
        """`doing`: what comes first."""
        self.most_bytes: dict[str, int] = {}
        self._device = device
        self._doing = doing
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._look_again, name="gpu-watch", daemon=True)

    def next(self, doing: str) -> None:
        """Something else begins."""
        self._look()
        with self._lock:
            self._doing = doing

    def _look(self) -> None:
        with self._lock:
            used, before = self._device.used_bytes(), self.most_bytes.get(self._doing, 0)
            self.most_bytes[self._doing] = max(used, before)

    def _look_again(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
