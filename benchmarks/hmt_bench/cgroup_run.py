"""Another program under a hard memory limit of the operating system, watched line by line."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hmt.base.errors import MachineError

_LIMITS = ("memory.limit_in_bytes", "memory.max")  # cgroup v1, v2
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
_PARENT = "hmt"
_WATCHED_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """What a program did.

    lines        of its standard output, each with the seconds since it began
    returncode   None where it was stopped because its time was over
    rss_bytes    the largest resident size of the process
    group_bytes  the largest use of its group: page cache included, which the limit also counts
    """

    lines: tuple[tuple[float, str], ...]
    returncode: int | None
    errors: str
    rss_bytes: int
    group_bytes: int


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group that holds its processes to `limit_bytes`, swap included where it counts.

    Raises MachineError where this process may not make one.
    """
    own = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = [name for _, controllers, name in own if "memory" in controllers.split(",")]
    root = Path(f"/sys/fs/cgroup/memory{v1[0]}") if v1 else Path("/sys/fs/cgroup")
    group = root / f"{_PARENT}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        _first(group, _LIMITS).write_text(str(limit_bytes))
    except (OSError, MachineError) as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise MachineError(
            f"a memory limit cannot be set with a control group in {root} ({error}): run as root, "
            "or in a container that may make memory control groups"
        ) from error
    try:
        yield group
    finally:
        for _ in range(100):  # the kernel empties it a moment after the last process has gone
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def run_in_cgroup(
    command: Sequence[str], limit_bytes: int, timeout_s: float, environment: Mapping[str, str]
) -> WatchedRun:
    """Run `command` under `limit_bytes` for at most `timeout_s`.  Raises MachineError."""
    with memory_group(limit_bytes) as group:
        # The shell enters the group and becomes the command, so that nothing of it is outside.
        enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
        begin = time.perf_counter()
        process = subprocess.Popen(
            ["sh", "-c", enter, "sh", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        errors: list[str] = []
        draining = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
        draining.start()
        over = threading.Event()

        def stop() -> None:
            over.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(timeout_s, stop)
        timer.start()
        resident = _Resident(process.pid)
        lines = tuple((time.perf_counter() - begin, line.rstrip("\n")) for line in process.stdout)
        process.wait()
        timer.cancel()
        draining.join()
        process.stdout.close()
        process.stderr.close()
        peak = int(_first(group, _PEAKS).read_text())
        code = None if over.is_set() else process.returncode
        return WatchedRun(lines, code, "".join(errors)[-2000:], resident.stop(), peak)


class _Resident:
    """Watches a process's peak; what wait4 tells begins with the peak of whoever forked it."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._peak_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        """The peak, in bytes, as last seen."""
        self._over.set()
        self._thread.join()
        return self._peak_bytes

    def _watch(self) -> None:
        while not self._over.wait(_WATCHED_EVERY_S):
            with contextlib.suppress(OSError):
                for line in self._status.read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        self._peak_bytes = int(line.split()[1]) * 1024


def forget_pages(folder: Path) -> None:
    """Drop the page cache of all files below `folder`, so that the next reader finds them cold."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _first(group: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (group / name).exists():
            return group / name
    raise MachineError(f"{group} has none of {', '.join(names)}")
