"""Ranks that torchrun has started, in place of processes that the first rank would start itself.

`torchrun --nproc-per-node 2 -m hmt serve MODEL`: the first one runs the command.  The others come
to a socket in a folder of this user's and are told there what to do, as processes that the first
one starts are told over a socket that they inherit.  All of them are on one machine.
"""

import os
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, Self

from hmt.base.errors import ConfigError, MachineError

_COMING_S: Final = 120.0  # for the others to have imported what they need
_RETRY_S: Final = 0.1
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group: see unix(7)


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun says of a process: its number, how many there are, and where they meet."""

    rank: int
    ranks: int
    folder: Path

    @classmethod
    def of_this_process(cls) -> Self | None:
        """None: torchrun did not start it, or it alone.  Raises ConfigError for two machines."""
        told = os.environ
        if "TORCHELASTIC_RUN_ID" not in told or told["WORLD_SIZE"] == "1":
            return None
        if told["WORLD_SIZE"] != told["LOCAL_WORLD_SIZE"]:
            raise ConfigError(
                f"torchrun started {told['WORLD_SIZE']} processes, {told['LOCAL_WORLD_SIZE']} of "
                "them on this machine: all have to be on one, so give --nnodes 1"
            )
        name = f"hmt-ranks-{os.getuid()}-{told['MASTER_PORT']}"
        folder = Path(tempfile.gettempdir()) / name
        return cls(int(told["RANK"]), int(told["WORLD_SIZE"]), folder)

    def check(self, ranks: int) -> None:
        """Raise ConfigError where another number of processes is to compute the model."""
        if ranks != self.ranks:
            raise ConfigError(
                f"torchrun started {self.ranks} processes, and {ranks} were asked for: give "
                f"--nproc-per-node {ranks}, or --tp, --ep and --pp for {self.ranks}"
            )

    @property
    def _socket(self) -> str:
        return str(self.folder / "first")

    def join(self, work: Callable[[int], NoReturn]) -> NoReturn:
        """Compute what the first process says, until that ends.

        `work` does, with the descriptor of a socket to it: see hmt.engine.ranks.worker.main.
        """
        link, parent = socket.socket(socket.AF_UNIX), os.getppid()
        while os.getppid() == parent:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                self._check_folder()
                link.connect(self._socket)
                for number in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all at once
                    signal.signal(number, signal.SIG_IGN)
                work(link.detach())
            time.sleep(_RETRY_S)
        raise SystemExit(1)  # torchrun has ended

    def _check_folder(self) -> None:
        """Raise MachineError where others than this user could have put something there."""
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise MachineError(
                f"{self.folder} is not a folder that this user alone can use: remove it, or set "
                "TMPDIR to another place"
            )

    def wait_for_others(self) -> "list[tuple[socket.socket, LaunchedRank]]":
        """A socket to each of the other processes.  Raises MachineError where they do not come."""
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        self._check_folder()
        came: list[tuple[socket.socket, LaunchedRank]] = []
        Path(self._socket).unlink(missing_ok=True)  # of a run that has ended
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(_COMING_S)
            listener.bind(self._socket)
            listener.listen(self.ranks)
            try:
                while len(came) < self.ranks - 1:
                    link, _ = listener.accept()
                    came.append((link, LaunchedRank(link)))
            except TimeoutError as error:
                for link, _ in came:
                    link.close()
                raise MachineError(
                    f"torchrun started {self.ranks} processes, and {len(came)} of the others came "
                    f"within {_COMING_S:.0f} s: only one model can be loaded so"
                ) from error
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
        return came


class LaunchedRank:
    """As much of a `subprocess.Popen` as there is of a process that is another one's child."""

    returncode: int | None = None  # its parent alone is told

    def __init__(self, link: socket.socket) -> None:
        peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(peer)[0]
        self._descriptor = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """None while it runs, as Popen; else 0, whatever it ended with."""
        return 0 if self._ended(0.0) else None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end.  Raises subprocess.TimeoutExpired."""
        if not self._ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"rank in process {self.pid}", timeout)

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _ended(self, seconds: float | None) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        return bool(ready)

    def __del__(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)
