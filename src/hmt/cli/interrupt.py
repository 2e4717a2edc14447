"""Ctrl-C while an answer is written."""

import signal
from types import FrameType, TracebackType
from typing import Self


class StopKey:
    """Takes SIGINT for as long as the context lasts; for the main thread only.

    A press sets `pressed` while `patient`, so that a computation can end at a clean place.  A
    second press, or one while nothing looks at `pressed`, raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.patient = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed or not self.patient:
            raise KeyboardInterrupt
        self.pressed = True
