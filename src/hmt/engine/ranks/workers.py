"""The first rank's side: starts the other ranks, sends them every step, and hears of their end.

Steps go over a pair of connected sockets that a worker inherits: no port is opened for them, so no
stranger can send any, and frames are JSON.  Ranks find each other by a file in a folder that only
this user can read.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hmt.base import errors
from hmt.base.errors import HMTError, MachineError, RankError
from hmt.contracts.sharding import Collective
from hmt.contracts.step import SchedulerOutput
from hmt.distributed import RankGroup
from hmt.engine.config import EngineConfig
from hmt.engine.ranks.torchrun import Launch, LaunchedRank
from hmt.engine.run_summary import RankAccount
from hmt.kernels.backend_registry import backend_on
from hmt.memory.device import Device
from hmt.sandbox.frames import receive, send

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hmt.engine.ranks.worker import main; main(int(sys.argv[2]))"
)
_ROOT: Final = str(Path(__file__).parents[3])
_LAST_WORDS_S: Final = 2.0  # after a sum fails, until a worker's own reason has come
_GOODBYE_S: Final = 10.0  # for a worker that was told to end
# Options that all ranks have; what differs by rank is passed beside them.
_SAME: Final = (
    "activations", "check_weights", "disk_chunk_bytes", "disk_depth", "disk_reader", "dtype",
    "executor", "expert_cache_policy", "expert_prefetch", "gpu_memory_bytes", "gpus",
    "host_memory_bytes", "kv_quant", "max_batch", "mmproj", "prefetch_distance", "quantization",
    "spill_dir", "threads", "verify_reads",
)  # fmt: skip


class RankWorkers:
    """The other ranks of a model.  `send` is for the engine's thread.

    group   the first rank's
    """

    def __init__(self, group: RankGroup, orders: list[dict[str, Any]]) -> None:
        """Start a process for each of `orders`.  Raises MachineError where the system refuses."""
        self.group = group
        self._folder = Path(tempfile.mkdtemp(prefix="hmt-ranks-"))  # mode 0700
        self._changed = threading.Condition()
        self._ready: dict[int, bool] = {}  # by rank: whether it can begin steps early
        self._failure: HMTError | None = None
        self._closing = False
        self._processes: list[subprocess.Popen[bytes] | LaunchedRank] = []
        self._links: list[socket.socket] = []
        try:
            launch = Launch.of_this_process()
            came = [] if launch is None else launch.wait_for_others()
            for order in orders:
                link, process = came.pop() if came else _started(order["rank"])
                self._begin(link, process, order | {"folder": str(self._folder)})
        except BaseException:
            self.close()
            raise

    def _begin(
        self,
        link: socket.socket,
        process: "subprocess.Popen[bytes] | LaunchedRank",
        order: dict[str, Any],
    ) -> None:
        """Tell a process what it is to do, and hear what it says."""
        self._processes.append(process)
        self._links.append(link)
        send(link, order)
        hears = threading.Thread(
            target=self._hear, args=(order["rank"], link, process), name="hmt-rank", daemon=True
        )
        hears.start()

    @property
    def failure(self) -> str:
        """Why no step can be computed any more; "" while steps can."""
        return "" if self._failure is None else str(self._failure)

    @property
    def accounts(self) -> tuple[RankAccount, ...]:
        """Of each worker."""
        failure = self.failure
        return tuple(
            RankAccount(rank, process.pid, process.poll() is None, failure)
            for rank, process in enumerate(self._processes, 1)
        )

    def connect(self, devices: Sequence[Device]) -> None:
        """Wait until all ranks have loaded their part, and let them meet.

        devices   that compute here; none: the CPU does.  Raises what kept a rank from loading.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or len(self._ready) == len(self._links))
            if self._failure is not None:
                raise self._failure
        for link in self._links:
            send(link, {"do": "connect"})
        self.group.connect(self._folder, on_gpu=on_gpu(devices))
        if all(self._ready.values()):
            self.group.announce = lambda: self._tell("next")

    def send(self, output: SchedulerOutput, *, begun: bool = False) -> None:
        """Let the workers compute a step, too.  Raises RankError once one of them has ended.

        begun   it is the one that was announced
        """
        self._tell("begun" if begun else "step", output.to_json().encode())

    def _tell(self, what: str, blob: bytes = b"") -> None:
        self.check()
        try:
            for link in self._links:
                send(link, {"do": what}, blob)
        except OSError as error:
            raise self.ended(error) from error

    def check(self) -> None:
        """Raise RankError once a worker has ended."""
        if self._failure is not None:
            raise RankError(str(self._failure))

    def ended(self, error: BaseException) -> HMTError:
        """Why a step that all compute has failed, for its requests; no other step can follow it.

        Ranks wait for one another, so what fails in one ends it for all.
        """
        if isinstance(error, RankError | OSError):
            with self._changed:  # the worker that ended says why, if it can
                self._changed.wait_for(lambda: self._failure is not None, _LAST_WORDS_S)
        self._fail(RankError(f"the first rank failed: {error}"))
        assert self._failure is not None
        return self._failure

    def _hear(
        self, rank: int, link: socket.socket, process: "subprocess.Popen[bytes] | LaunchedRank"
    ) -> None:
        """What a worker says, until it ends."""
        try:
            while True:
                message, _ = receive(link)
                if message["state"] == "ready":
                    with self._changed:
                        self._ready[rank] = message["follows"]
                        self._changed.notify_all()
                else:
                    self._fail(_as_error(rank, message))
        except (EOFError, OSError, ValueError, KeyError):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)
        if not self._closing:
            how = f"(exit status {process.returncode})" if process.returncode is not None else ""
            self._fail(
                RankError(
                    f"rank {rank}, process {process.pid}, has ended {how}: the other ranks cannot "
                    "go on without it; load the model again"
                )
            )

    def _fail(self, error: HMTError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        self.group.abort(str(self._failure))

    def close(self) -> None:
        """End the workers.  Does nothing twice."""
        self._closing = True
        for link in self._links:
            with contextlib.suppress(OSError):
                send(link, {"do": "end"})
        for process in self._processes:
            try:
                process.wait(_GOODBYE_S if self._failure is None else _LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.group.close("the model was closed")
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        self._links.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def on_gpu(devices: Sequence[Device]) -> bool:
    """Whether ranks that compute on `devices` meet on GPUs, and not in host memory."""
    return any(not backend_on(device.where).on_host for device in devices)


def _started(rank: int) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """A new process, and a socket to it.  Raises MachineError."""
    ours, theirs = socket.socketpair()
    try:
        return ours, start_process(theirs)
    except OSError as error:
        ours.close()
        raise MachineError(f"rank {rank} cannot be started: {error}") from error


def start_process(link: socket.socket) -> "subprocess.Popen[bytes]":
    """A worker that has `link`, which is closed here.  Raises OSError."""
    path = [_ROOT, *(entry for entry in sys.path if entry and entry != _ROOT)]
    with link:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(path), str(link.fileno())],
            pass_fds=[link.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )


def start_workers(
    path: Path,
    config: EngineConfig,
    collective: Collective,
    *,
    kv_tokens: int,
    max_prefill_tokens: int,
) -> RankWorkers:
    """Start the other ranks of the model in `path`.

    config   of all ranks together
    kv_tokens, max_prefill_tokens   that the first rank's plan has
    """
    assert isinstance(collective, RankGroup)
    sizes = {"kv_tokens": kv_tokens, "max_prefill_tokens": max_prefill_tokens}
    return RankWorkers(collective, orders_of(path, config, **sizes))


def orders_of(
    path: Path, config: EngineConfig, *, kv_tokens: int, max_prefill_tokens: int
) -> list[dict[str, Any]]:
    """What each worker is told, as JSON has it: see `start_workers`."""
    orders = []
    for rank in range(1, config.ranks):
        own = config.of_rank(rank)
        options = {name: _plain(getattr(own, name)) for name in _SAME}
        options |= {"context": kv_tokens, "max_prefill_tokens": max_prefill_tokens}
        shape = {"tp": config.tp, "ep": config.ep, "pp": config.pp}
        orders.append({"rank": rank, "path": str(path), "options": options, "shape": shape})
    return orders


def spoken(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an EngineConfig that JSON carried, as `EngineConfig.resolve` wants them."""
    given = {name.removesuffix("_bytes"): value for name, value in options.items()}
    return {name: value for name, value in given.items() if value is not None}


def _plain(value: Any) -> Any:
    """An option as JSON has it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) if any(isinstance(v, str) for v in value) else list(value)
    return value if isinstance(value, bool | int | float | None) else str(value)


def _as_error(rank: int, message: Mapping[str, Any]) -> HMTError:
    """What a worker raised, of the same class."""
    kind = getattr(errors, str(message.get("kind")), RankError)
    known = isinstance(kind, type) and issubclass(kind, HMTError)
    return (kind if known else RankError)(f"rank {rank}: {message.get('said')}")
