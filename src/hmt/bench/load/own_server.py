"""A server of our own for a benchmark, and what it takes of the machine."""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hmt.base.errors import HMTError

_ADDRESS = re.compile(r" is served at (http://\S+)")
_START_S, _STOP_S = 1800.0, 60.0  # a large model is read, perhaps converted
_SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class OwnServer:
    """`hmt serve` as a process, which listens at `url`."""

    url: str
    pid: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raise HMTError with what it wrote where it has ended."""
        status = self.process.poll()
        if status is not None:
            text = self.log.read_text("utf-8", "replace")
            raise HMTError(f"hmt serve ended with status {status}: {text.strip()[-2000:]}")


@contextmanager
def own_server(model: Path, options: Sequence[str] = ()) -> Iterator[OwnServer]:
    """Serve a model on a free port of this machine until the block ends.

    options   further ones of hmt serve

    Raises HMTError with what it wrote where it does not start.
    """
    command = [sys.executable, "-m", "hmt", "serve", "--port", "0", *options, "--", str(model)]
    with tempfile.TemporaryDirectory(prefix="hmt-serve-") as folder:
        log = Path(folder) / "stderr"  # a pipe would fill, with nobody to read it
        with log.open("w") as wrote, _ends_in_order():
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=wrote)
            try:
                yield OwnServer(_wait(process, log), process.pid, process, log)
            finally:
                process.terminate()  # does nothing where it has ended
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """SIGTERM raises, so that the server does not outlive us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def told(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address, as soon as it answers there."""
    end = time.monotonic() + _START_S
    while True:
        ended = process.poll() is not None
        text = log.read_text("utf-8", "replace")
        if found := _ADDRESS.search(text):
            return found[1]
        if ended or time.monotonic() > end:
            raise HMTError(f"hmt serve did not start: {' '.join(text.split())[-500:]}")
        time.sleep(_SAMPLE_S)


class Watch:
    """What a process and its children took while they were watched.

    rss_bytes   the most that was seen; pages that several share count once for each
    cpu_cores   processors kept busy on average, of this machine's
    own_cores   the same of this process, the load itself: what it takes, a server cannot have
    """

    def __init__(self) -> None:
        self.rss_bytes: int | None = None
        self.cpu_cores: float | None = None
        self.own_cores = 0.0


@asynccontextmanager
async def watched(pid: int | None) -> AsyncIterator[Watch]:
    """Watch a process, or only the load itself where the server is not ours."""
    found, begin = Watch(), time.perf_counter()
    own, cpu = time.process_time(), _cpu_s(pid)
    sampler = asyncio.create_task(_sample(pid, found))
    try:
        yield found
    finally:
        sampler.cancel()
        with suppress(asyncio.CancelledError):
            await sampler
        wall = time.perf_counter() - begin
        found.own_cores = (time.process_time() - own) / wall
        after = _cpu_s(pid)
        if cpu is not None and after is not None:
            found.cpu_cores = (after - cpu) / wall


async def _sample(pid: int | None, found: Watch) -> None:
    while pid is not None:
        with suppress(psutil.Error):
            rss = sum(one.memory_info().rss for one in _family(pid))
            found.rss_bytes = max(rss, found.rss_bytes or 0)
        await asyncio.sleep(_SAMPLE_S)


def _cpu_s(pid: int | None) -> float | None:
    if pid is None:
        return None
    with suppress(psutil.Error):
        return sum(one.cpu_times().user + one.cpu_times().system for one in _family(pid))
    return None


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]
