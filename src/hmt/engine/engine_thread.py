"""The engine's own thread: everything that touches a loaded model's memory happens there.

Callers only wait.  So no lock is needed around a step, and a KeyboardInterrupt, which Python raises
in the main thread between any two instructions, never leaves a lock held or a slot half given up.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from hmt.base.errors import ClosedError

T = TypeVar("T")


class EngineThread:
    """Runs what is posted, in order, and steps in between for as long as there are any."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._advance: Callable[[], bool] = lambda: False
        self._wait_s: Callable[[], float | None] = lambda: None
        self._stopped = False
        self._gate = threading.Lock()  # between posting and stopping
        self._thread = threading.Thread(target=self._run, name="hmt-engine", daemon=True)
        self._thread.start()

    def run_steps(
        self, advance: Callable[[], bool], wait_s: Callable[[], float | None] = lambda: None
    ) -> None:
        """From now on call `advance` between posts while it returns True; it must not raise.

        Once it has returned False it is called again after the seconds that `wait_s` says then,
        unless something is posted before; None: only then.
        """
        self._advance, self._wait_s = advance, wait_s

    def post(self, work: Callable[[], None]) -> None:
        """Have `work` done soon; it must not raise.  Raises ClosedError once stopped."""
        with self._gate:
            if self._stopped:
                raise ClosedError("the model has been closed; load it again")
            self._inbox.put(work)

    def call(self, work: Callable[[], T]) -> T:
        """Have `work` done and wait for its result, or its exception."""
        return self.begin(work).result()

    def begin(self, work: Callable[[], T]) -> "Future[T]":
        """Have `work` done; the future holds its result, or its exception."""
        future: Future[T] = Future()
        self.post(_into(future, work))
        return future

    def stop(self, last: Callable[[], None] = lambda: None) -> None:
        """Do what was posted so far, then `last`, and end the thread.  Does nothing when stopped.

        Raises what `last` raises.
        """
        with self._gate:
            if self._stopped:
                return
            self._stopped = True
            ended: Future[None] = Future()
            self._inbox.put(_into(ended, last))
        self._thread.join()
        ended.result()

    def _run(self) -> None:
        busy = False
        while True:
            try:
                work = self._inbox.get(block=not busy, timeout=None if busy else self._wait_s())
            except queue.Empty:
                busy = self._advance()
                continue
            work()
            busy = True
            if self._stopped and self._inbox.empty():
                return


def _into(future: "Future[T]", work: Callable[[], T]) -> Callable[[], None]:
    """`work`, with its result or exception going into `future`."""

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    return run
