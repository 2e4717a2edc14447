"""What runs in the child process: prepare once, then fork a worker whenever one is asked for.

The first process has one thread and never handles a stranger's request, so that forking it is safe
and it always answers.  Workers share with it whatever it has prepared, and the kernel enforces
limits on each of them:

    memory   RLIMIT_AS, which malloc sees: Python raises MemoryError, Rust aborts the worker
    time     a timer of processor time (ITIMER_PROF) around each request, whose signal ends the
             process, whatever C code it is in

They end with the first process (PR_SET_PDEATHSIG on Linux), and that one when HMT closes its end of
the socket, as it does by ending in whatever way.  macOS does not enforce RLIMIT_AS.
"""

import contextlib
import gc
import importlib
import os
import resource
import signal
import socket
import sys
from typing import Any, Final, Protocol

from hmt.sandbox.frames import receive, send
from hmt.sandbox.refusal import Refusal

_PR_SET_PDEATHSIG: Final = 1
_PAGE_BYTES: Final = resource.getpagesize()
_MOST_SAID: Final = 2000  # characters of an error


class Role(Protocol):
    """What a child is for.  Made in the first process, asked in workers."""

    def __init__(self, settings: dict[str, Any], blob: bytes) -> None: ...

    def handle(self, message: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        """The answer to one request.  Raises Refusal, or anything else."""
        ...


def main(descriptor: int) -> None:
    """Serve over the socket `descriptor` until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no worker writes a file
    control = socket.socket(fileno=descriptor)
    workers: set[int] = set()
    try:
        message, blob = receive(control)
        role = _prepare(control, message, blob)
        while role is not None:
            files: list[int] = []
            message, _ = receive(control, files)
            if message["op"] == "fork":
                workers.add(_fork(control, role, files[0], message["memory_bytes"]))
            else:
                workers.discard(message["pid"])
                send(control, {"status": _end(message["pid"])})
    except (EOFError, OSError):
        pass
    finally:
        for pid in workers:
            _end(pid)


def _prepare(control: socket.socket, message: dict[str, Any], blob: bytes) -> Role | None:
    name, _, kind = message["role"].partition(":")
    _limit_memory(message["memory_bytes"], hard=False)
    signal.setitimer(signal.ITIMER_PROF, message["cpu_s"])
    role: Role | None = None
    try:
        role = getattr(importlib.import_module(name), kind)(message["settings"], blob)
        answer: dict[str, Any] = {"ready": True}
    except BaseException as error:
        answer = _told(error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    del message, blob
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a worker would copy every page that it shares
    send(control, answer)
    return role


def _fork(control: socket.socket, role: Role, descriptor: int, memory_bytes: int) -> int:
    first = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            control.close()
            _end_with(first)
            gc.enable()
            _limit_memory(memory_bytes, hard=True)
            _serve(role, socket.socket(fileno=descriptor))
            status = 0
        finally:
            os._exit(status)
    os.close(descriptor)
    send(control, {"pid": pid})
    return pid


def _serve(role: Role, link: socket.socket) -> None:
    before = _resident_bytes()
    while True:
        try:
            message, blob = receive(link)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, message.pop("cpu_s"))
        answer: dict[str, Any] = {}
        data = b""
        try:
            answer, data = role.handle(message, blob)
        except BaseException as error:  # a panic of Rust's is no Exception
            answer = _told(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer["bytes"] = max(0, _resident_bytes() - before)
        send(link, answer, data)


def _told(error: BaseException) -> dict[str, Any]:
    """Of an error: what kind it is of, and its words."""
    if isinstance(error, Refusal):
        return {"refused": error.kind, "said": str(error)[:_MOST_SAID], "more": error.more}
    if isinstance(error, MemoryError):
        return {"refused": "memory", "said": "", "more": {}}
    try:
        said = str(error) or type(error).__name__
    except BaseException:
        said = type(error).__name__
    return {"refused": "error", "said": said[:_MOST_SAID], "more": {"type": type(error).__name__}}


def _limit_memory(more_bytes: int, *, hard: bool) -> None:
    """Let the address space grow by so much from now on."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * _PAGE_BYTES
    except OSError:
        return  # not Linux: the limit would not be enforced
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more_bytes
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit if hard else most))


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _end_with(first: int) -> None:
    """End when process `first` does, which has forked this one."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != first:
        os._exit(1)


def _end(pid: int) -> int:
    """End a worker if it has not ended; how it ended, as `os.waitstatus_to_exitcode`."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # one that ended has kept its status
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status)
