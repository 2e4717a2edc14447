"""The parent's side of a limited child process."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import MachineError
from hmt.base.units import format_bytes
from hmt.sandbox.frames import receive, send

# An address space also counts what is only reserved; and a fresh worker copies some pages.
_HEADROOM_BYTES: Final = 16 << 20
# Wall-clock time beside the limit of processor time: for a child that waits instead of computing,
# and on a machine whose processors are all taken.
_PATIENCE_S: Final = 60.0
_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hmt.sandbox.child import main; main(int(sys.argv[2]))"
)
# What a child sees of the environment: no keys, no proxies.
_ENVIRONMENT: Final = ("PATH", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "LD_LIBRARY_PATH")
_THREADS: Final = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_ROOT: Final = str(Path(__file__).parents[2])


class Refused(Exception):
    """The child refuses a request, or cannot prepare.  `kind`, `more`: see Refusal."""

    def __init__(self, kind: str, said: str, more: dict[str, Any]) -> None:
        super().__init__(said)
        self.kind = kind
        self.more = more


class Ended(Exception):
    """A request ended its worker.  Its text says by which limit, as the end of a sentence.

    killed   by no limit of ours: from outside, mostly where the machine has no memory left
    """

    def __init__(self, why: str, *, killed: bool = False) -> None:
        super().__init__(why)
        self.killed = killed


class Lost(Exception):
    """The worker had ended before it came to this request: ask another one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one child: bytes of memory beyond what it has when it begins, and processor time."""

    memory_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's answer."""

    message: dict[str, Any]
    blob: bytes


class Sandbox:
    """A child process that prepares once, and forks workers which have what it prepared.

    Started when it is first needed, and once more when it has been killed.  Safe for use by several
    threads.
    """

    def __init__(
        self,
        role: str,
        settings: dict[str, Any],
        blob: Callable[[], bytes] = bytes,
        *,
        prepare: Limits,
        worker: Limits,
    ) -> None:
        """`role`: "module:class" of a Role, which is made of `settings` and `blob()`.

        worker   limits of a worker; its processor time is that of one request
        """
        self._role, self._settings, self._blob = role, settings, blob
        self._prepare, self.limits = prepare, worker
        self._lock = threading.RLock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._failure: Exception | None = None  # why it cannot prepare: the same for every call
        _open.add(self)

    def fork(self) -> "Worker":
        """A new worker.

        Raises Refused or Ended where the child cannot prepare, Lost after `close`, MachineError
        where the system gives no process or socket.
        """
        with self._lock:
            for again in (True, False):
                ours, theirs = _pair()
                try:
                    self._wait_until_ready()
                    memory_bytes = self.limits.memory_bytes + _HEADROOM_BYTES
                    ask = {"op": "fork", "memory_bytes": memory_bytes}
                    answer = self._ask(ask, theirs.fileno())
                    theirs.close()
                    return Worker(self, ours, answer["pid"])
                except BaseException as error:
                    ours.close()
                    theirs.close()
                    if not isinstance(error, (EOFError, OSError)):
                        raise
                    if not again or self._closed:
                        raise Lost from None
                    self._stop()  # it was killed from outside
            raise AssertionError

    def end(self, pid: int) -> int | None:
        """End a worker; its exit status, or None where the child has ended as well."""
        with self._lock:
            try:
                return int(self._ask({"op": "end", "pid": pid})["status"])
            except (EOFError, OSError):
                return None

    def close(self) -> None:
        """Kill the child and its workers.  Requests that they had end with Ended or Lost."""
        self._closed = True
        # Without the lock: the thread that has it may be waiting for the child.
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self._closed:
            raise Lost
        ours, theirs = _pair()
        names = [name for name in _ENVIRONMENT if name in os.environ]
        path = [_ROOT, *(entry for entry in sys.path if entry and entry != _ROOT)]
        with theirs:
            arguments = [json.dumps(path), str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BOOT, *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # where a panic would write what a stranger chose
                    env={name: os.environ[name] for name in names} | _THREADS,
                    start_new_session=True,  # Ctrl-C is for us
                )
            except OSError as error:
                ours.close()
                raise MachineError(
                    f"a limited child process cannot be started ({error}): chat templates and "
                    "grammars need one"
                ) from error
        self._control, self._ready = ours, False
        message = {"role": self._role, "settings": self._settings}
        limits = {"memory_bytes": self._prepare.memory_bytes, "cpu_s": self._prepare.cpu_s}
        with contextlib.suppress(OSError):  # it ended: `_wait_until_ready` will see
            send(ours, message | limits, self._blob())

    def _wait_until_ready(self) -> None:
        """Raises Refused or Ended where it cannot prepare; EOFError or OSError."""
        if self._failure is not None:
            raise self._failure
        if self._process is None:
            self._start()
        if self._ready:
            return
        assert self._control is not None and self._process is not None
        self._control.settimeout(self._prepare.cpu_s + _PATIENCE_S)
        try:
            answer, _ = receive(self._control)
            self._control.settimeout(None)
        except (EOFError, OSError):
            killed = self._closed
            self._process.kill()
            status = self._process.wait()
            self._stop()
            if killed or status == -signal.SIGKILL:  # by us, or from outside
                raise
            self._failure = Ended(_reason(status, self._prepare))
            raise self._failure from None
        if "refused" in answer:
            self._stop()
            self._failure = _refused(answer, self._prepare)
            raise self._failure
        self._ready = True

    def _ask(self, message: dict[str, Any], *files: int) -> dict[str, Any]:
        if self._control is None:
            raise EOFError
        send(self._control, message, files=files)
        return receive(self._control)[0]

    def _stop(self) -> None:
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


class Worker:
    """A forked child that answers requests one after the other.  For several threads."""

    def __init__(self, sandbox: Sandbox, link: socket.socket, pid: int) -> None:
        self._sandbox, self._link, self._pid = sandbox, link, pid
        self._limits = sandbox.limits
        self._lock = threading.Lock()
        self._asked: deque[Future[Reply]] = deque()
        self._given_up = ""  # why we have ended it
        self.used_bytes = 0
        self.ended = False
        threading.Thread(target=self._listen, name="hmt-sandbox", daemon=True).start()

    def begin(
        self, message: dict[str, Any], blob: bytes = b"", *, cpu_s: float | None = None
    ) -> "Future[Reply]":
        """Ask.  The future holds a Reply, or Refused, Ended or Lost.

        cpu_s   the most processor time; the sandbox's limit when None
        Raises TypeError, ValueError or RecursionError where JSON cannot say `message`.
        """
        future: Future[Reply] = Future()
        with self._lock:
            if self.ended:
                future.set_exception(Lost())
                return future
            self._asked.append(future)
            try:
                cpu_s = self._limits.cpu_s if cpu_s is None else cpu_s
                send(self._link, message | {"cpu_s": cpu_s}, blob)
            except OSError:
                pass  # it has ended: `_listen` tells
            except BaseException:
                self._asked.pop()
                raise
        return future

    def call(
        self, message: dict[str, Any], blob: bytes = b"", *, cpu_s: float | None = None
    ) -> Reply:
        """Ask and wait.  Raises as `begin` and what its future holds."""
        return self.wait(self.begin(message, blob, cpu_s=cpu_s))

    def wait(self, future: "Future[Reply]") -> Reply:
        """What `begin` has promised.  Raises what the future holds."""
        try:
            return future.result(_PATIENCE_S)
        except WaitedTooLong:
            self.end(f"it did not answer for {_PATIENCE_S:.0f} s")
            return future.result()

    def end(self, why: str = "") -> None:
        """Kill it; the oldest request ends with Ended(why), or Lost without, later ones with Lost.

        Does nothing twice.
        """
        with self._lock:
            if self.ended:
                return
            self.ended, self.used_bytes, self._given_up = True, 0, why
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # wakes `_listen`, which does the rest

    def _listen(self) -> None:
        try:
            while True:
                message, blob = receive(self._link)
                with self._lock:
                    future = self._asked.popleft()
                    self.used_bytes = 0 if self.ended else int(message.get("bytes", 0))
                if "refused" in message:
                    future.set_exception(_refused(message, self._limits))
                else:
                    future.set_result(Reply(message, blob))
        except (EOFError, OSError, ValueError, IndexError):
            pass
        status = self._sandbox.end(self._pid)
        with self._lock:
            self.ended, self.used_bytes = True, 0
            asked = list(self._asked)
            self._link.close()
        why = self._given_up or ("" if status is None else _reason(status, self._limits))
        killed = status == -signal.SIGKILL and not self._given_up
        errors = [Ended(why, killed=killed) if why else Lost()] if asked else []
        for future, error in zip(asked, errors + [Lost()] * len(asked), strict=False):
            future.set_exception(error)


def end_all() -> None:
    """Kill every child, so that no thread waits for one: the process is about to end."""
    for sandbox in list(_open):
        sandbox.close()


_open: "weakref.WeakSet[Sandbox]" = weakref.WeakSet()
atexit.register(end_all)


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise MachineError(
            f"no socket can be made for a limited child process ({error}): allow more open files "
            "(ulimit -n)"
        ) from error


def _refused(answer: dict[str, Any], limits: Limits) -> Exception:
    if answer["refused"] == "memory":
        return Ended(_too_large(limits))
    return Refused(answer["refused"], answer["said"], answer["more"])


def _too_large(limits: Limits) -> str:
    return f"it needs more than {format_bytes(limits.memory_bytes)} of memory"


def _reason(status: int, limits: Limits) -> str:
    if status == -signal.SIGPROF:
        return f"it takes more than {limits.cpu_s:g} s of processor time"
    if status == -signal.SIGABRT:  # of Rust, whose allocations must not fail
        return _too_large(limits)
    if status in (-signal.SIGSEGV, -signal.SIGBUS):
        return "it nests too deeply for a stack of the usual size"
    if status < 0:
        return f"its process was ended by signal {-status}"
    return f"its process ended with status {status}"
