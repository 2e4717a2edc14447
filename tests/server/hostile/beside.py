"""What is watched during an attack: /health, memory, and a client that behaves well."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from target import CHAT, Failure, Target, require

MIB = 1 << 20
HEALTH_S = 1.0
SPARE_BYTES = 300 * MIB
_SERVED_S = 45.0  # in which the client that behaves must be served once
_QUESTION = "What is 12 + 30?"

# Answers like /health does, and does nothing else: what it takes is the machine's own delay.
_CONTROL = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *arguments): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
print(server.server_port, flush=True)
server.serve_forever()
"""


def resident_bytes(pid: int) -> int:
    """Memory that a process holds; 0 where it is gone.

    Pages of its libraries are not counted: how many of them are mapped is the system's choice, and
    varies by 60 MiB between machines.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    own = ("RssAnon:", "RssShmem:")
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(own))


def starved_s(pid: int | None) -> float:
    """Seconds that the threads of a process were ready and had no processor, until now."""
    total = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat") if pid is not None else ():
        try:
            total += int(file.read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            continue  # the thread has ended
    return total / 1e9


def _health(target: Target) -> int:
    """The status of GET /health; -1 without an answer."""
    try:
        return target.get("/health", key=None, timeout_s=30).status
    except Failure:
        return -1


class Guardian:
    """Watches one server through many attacks."""

    def __init__(self, target: Target, most_bytes: int | None = None) -> None:
        """`most_bytes` of memory; None: what it has at first, and SPARE_BYTES."""
        self.target = target
        self._truth = self._answer(60)
        if most_bytes is None and target.pid is not None:
            most_bytes = resident_bytes(target.pid) + SPARE_BYTES
        self._most_bytes = most_bytes
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CONTROL], stdout=subprocess.PIPE, text=True
        )
        port = self._process.stdout.readline().strip() if self._process.stdout else ""
        self._control = Target(f"http://127.0.0.1:{port}", model="none")

    def close(self) -> None:
        """End what was started to watch."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answer(self, seconds: float) -> str:
        """The greedy answer to a known question, asked again while the server is full."""
        end, key = time.monotonic() + seconds, 1 if self.target.keys else 0
        while True:
            told = self.target.post(
                CHAT, self.target.chat(_QUESTION, max_tokens=24), key=key, timeout_s=seconds
            )
            if told.status == 200:
                return str(told.json["choices"][0]["message"]["content"])
            require(told.status in (0, 429, 503), f"another client got {told.status}: {told.text}")
            require(time.monotonic() < end, f"another client was not served: {told.text[:200]}")
            time.sleep(0.3)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For as long as the context lasts.  Raises Failure at its end."""
        seen = _Seen()
        threads = [
            threading.Thread(target=self._watch_health, args=(seen,)),
            threading.Thread(target=self._watch_client, args=(seen,)),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            seen.over.set()
            for thread in threads:
                thread.join()
        require(not seen.failures, "; ".join(seen.failures[:3]))
        require(
            seen.late_s <= HEALTH_S,
            f"/health took {seen.worst_s:.2f} s, {seen.late_s:.2f} s of them the server's own",
        )
        if self._most_bytes is not None:
            require(
                seen.most_bytes <= self._most_bytes,
                f"memory rose to {seen.most_bytes // MIB} MiB; {self._most_bytes // MIB} may be",
            )

    def _watch_health(self, seen: "_Seen") -> None:
        while not seen.over.is_set():
            starved, begin = starved_s(self.target.pid), time.monotonic()
            status = _health(self.target)
            took = time.monotonic() - begin
            starved = starved_s(self.target.pid) - starved
            begin = time.monotonic()
            _health(self._control)
            machine = max(starved, time.monotonic() - begin)
            seen.worst_s, seen.late_s = max(seen.worst_s, took), max(seen.late_s, took - machine)
            # 0: the connection was refused, or gave way to another one.
            if status not in (0, 200, 503):
                seen.failures.append(f"/health answered {status}")
            if self.target.pid is not None:
                now = resident_bytes(self.target.pid)
                seen.most_bytes = max(seen.most_bytes, now)
                if not now:
                    seen.failures.append("the process is gone")
                    return
            seen.over.wait(0.05)

    def _watch_client(self, seen: "_Seen") -> None:
        while True:
            try:
                answer = self._answer(_SERVED_S)
                if answer != self._truth:
                    seen.failures.append(f"another client got {answer!r}, not {self._truth!r}")
            except Failure as error:
                seen.failures.append(str(error))
                return
            if seen.over.wait(0.5):
                return


@dataclass
class _Seen:
    worst_s: float = 0.0
    late_s: float = 0.0  # less what the machine took: of a busy one the server has but a share
    most_bytes: int = 0
    failures: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
