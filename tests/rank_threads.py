"""Ranks as threads of the test's own process, which takes seconds less than processes do.

They meet through Gloo all the same, and are sent the same frames.
"""

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hmt.engine.ranks import worker, workers
from hmt.sandbox.frames import receive, send


class ThreadRank:
    """What `start_process` returns of a process."""

    pid = 0

    def __init__(self, link: socket.socket) -> None:
        self.returncode: int | None = None
        self._link = link
        self._inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        order, _ = receive(self._link)
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        try:
            worker.work(self._link, order, self._inbox)
        except Exception as error:
            said = {"state": "failed", "kind": type(error).__name__, "said": str(error)}
            send(self._link, said)
        self._link.shutdown(socket.SHUT_RDWR)
        listener.join()
        self._link.close()
        self.returncode = 0

    def _listen(self) -> None:
        try:
            while True:
                message, blob = receive(self._link)
                self._inbox.put((message["do"], blob))
        except (EOFError, OSError):
            self._inbox.put(("end", b""))

    def end(self) -> None:
        self._inbox.put(("end", b""))

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "a rank goes on"
        return 0


class ThreadRanks:
    """All that were started."""

    def __init__(self) -> None:
        self._started: list[ThreadRank] = []

    def start(self, link: socket.socket) -> ThreadRank:
        self._started.append(ThreadRank(link))
        return self._started[-1]

    def end_all(self) -> None:
        """As if they had been killed."""
        for rank in self._started:
            rank.end()


@contextmanager
def ranks_as_threads() -> Iterator[ThreadRanks]:
    """In the body, models of several ranks have threads for them."""
    ranks = ThreadRanks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "start_process", ranks.start)
        yield ranks
