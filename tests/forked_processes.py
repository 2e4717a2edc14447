"""Python processes of tests that have imported HMT and torch when they begin, which takes 5 s.

`quick_processes`, a fixture, starts one process that imports what they all need.  Where a test, or
HMT itself, then starts `python -m MODULE` or `python -c CODE` by `subprocess`, that one forks, and
the new process runs the program with its own arguments, environment, folder and streams.  It is a
child of the test's process like any other: one that began anew differs by what happens before its
first line alone.  Tests of that, of closed streams or of Python's options start real ones.
"""

import ctypes
import gc
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_IMPORTED = ("hmt.engine", "hmt.server.app", "hmt.cli.main", "hmt.text", "uvicorn", "psutil")
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The process that forks, and a socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def start(self, request: dict[str, Any], streams: list[int]) -> int:
        """The number of a process that runs the program, a child of this one."""
        told = json.dumps(request | {"parent": os.getpid()}).encode()
        with self._lock, _parent_of_orphans():
            socket.send_fds(self._socket, [len(told).to_bytes(8, "little")], streams)
            self._socket.sendall(told)
            return int.from_bytes(_received(self._socket, 8), "little")

    def close(self) -> None:
        """It ends when its socket is closed."""
        self._socket.close()
        self._process.wait()


@contextmanager
def _parent_of_orphans() -> Iterator[None]:
    """This process becomes the parent of those below it whose own one ends."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def processes_forked_by(server: ForkServer) -> Iterator[None]:
    """Within the block `subprocess` has them started by `server`, where nothing else is asked."""
    anew = subprocess.Popen._execute_child

    def fork(self: Any, *given: Any) -> None:
        (args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, stdin, to_stdin,
         from_stdout, stdout, from_stderr, stderr, _, gid, gids, uid, umask, session,
         group) = given  # fmt: skip
        words = [] if isinstance(args, str | bytes | os.PathLike) else list(map(os.fsdecode, args))
        others = (executable, preexec_fn, gid, gids, uid)
        if (
            words[:1] != [sys.executable]
            or words[1:2] not in (["-c"], ["-m"])
            or any(one is not None for one in others)
            or (shell or pass_fds or umask != -1 or group != -1)
        ):
            anew(self, *given)
            return
        request = {
            "words": words[1:],
            "folder": os.fsdecode(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "session": session,
        }
        streams = [stdin, stdout, stderr]
        streams = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        self.pid = server.start(request, streams)
        self._child_created = True
        self._close_pipe_fds(stdin, to_stdin, from_stdout, stdout, from_stderr, stderr)

    subprocess.Popen._execute_child = fork
    try:
        yield
    finally:
        subprocess.Popen._execute_child = anew


def _received(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise EOFError("the process that forks has ended")
        found += part
    return found


def _requests(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """In a new process: what it shall run, and its streams.  The first one stays and forks."""
    while True:
        begin, streams, _, _ = socket.recv_fds(connection, 8, 3)
        if not begin:
            os._exit(0)
        begin += _received(connection, 8 - len(begin))
        request = json.loads(_received(connection, int.from_bytes(begin, "little")))
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)  # the other one's parent is now who asked
            end = time.monotonic() + 60
            while os.getppid() != request["parent"]:
                time.sleep(0.0005)
                if time.monotonic() > end:
                    os._exit(1)  # it has ended
            connection.sendall(os.getpid().to_bytes(8, "little"))
            connection.close()
            return request, streams
        os.waitpid(between, 0)
        for fd in streams:
            os.close(fd)


def _open_streams(streams: list[int], buffered: bool) -> None:
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        stream = io.TextIOWrapper(
            buffer, errors=errors, line_buffering=number == 2, write_through=not buffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(request: dict[str, Any], streams: list[int]) -> None:
    """As Python does with its arguments."""
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _open_streams(streams, not os.environ.get("PYTHONUNBUFFERED"))
    option, program, *arguments = request["words"]
    sys.argv[:] = [option, *arguments]
    sys.path[0] = "" if option == "-c" else request["folder"]
    if option == "-m":
        sys.modules.pop(program, None)  # it is the main module now
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), main.__dict__)


def main() -> None:
    """Import, fork for each request, and run it in the new process."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _IMPORTED:
            __import__(name)
    gc.collect()
    gc.freeze()
    _run(*_requests(connection))


if __name__ == "__main__":
    main()
