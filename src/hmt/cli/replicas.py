"""`hmt serve --dp N`: N servers of a model as child processes, and what each of them is told.

A replica listens at a socket in a folder that only this user can read, so no port is opened for it.
It is told what to serve through its stdin, and ends when that ends: so it does not outlive this
process.  What it says comes through its stdout as lines of JSON.
"""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Self

from hmt.base import errors
from hmt.base.errors import ConfigError, HMTError, MachineError
from hmt.base.log import logger
from hmt.base.units import parse_bytes
from hmt.cli.options import EngineOptions
from hmt.server.router import Replica

_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from hmt.cli.replica import main; main()"
)
_ROOT: Final = str(Path(__file__).parents[2])
_KILLED_S: Final = 20.0  # beside the time that answers have: for files, and steps under way


def divided(engine: EngineOptions, count: int) -> list[EngineOptions]:
    """Options of each of `count` replicas: its part of the memory, the cores and the GPUs.

    A number of threads that was given is that of each process, as with ranks.
    Raises ConfigError.
    """
    from hmt.engine import EngineConfig
    from hmt.kernels.cpu.threads import usable_threads

    alone = replace(engine, gpus=None, gpu_memory=None)
    config = EngineConfig.resolve(**alone.arguments())
    for name in ("trace", "expert_trace"):
        if getattr(config, name) is not None:
            raise ConfigError(f"{name} is of one process, and --dp {count} starts several")
    each = config.ranks
    gpus, sizes = _parts(engine.gpus), _parts(engine.gpu_memory)
    on_gpu = bool(gpus) or any(map(parse_bytes, sizes))
    if on_gpu and len(gpus) != count * each:
        raise ConfigError(
            f"--dp {count} needs {count * each} GPUs, {each} for each replica, and {len(gpus)} "
            f"were named: --gpus {','.join(map(str, range(count * each)))}"
        )
    found = []
    for number in range(count):
        own = slice(number * each, (number + 1) * each)
        folder = config.prefix_cache_dir
        found.append(
            replace(
                engine,
                host_memory=str(config.host_memory_bytes // count),
                threads=config.threads or max(1, usable_threads() // (count * each)),
                gpus=",".join(gpus[own]) or None,
                gpu_memory=",".join(sizes if len(sizes) == 1 else sizes[own]) or None,
                prefix_cache_dir=None if folder is None else folder / f"replica-{number}",
            )
        )
    return found


def _parts(given: str | None) -> list[str]:
    return [] if given is None else [part.strip() for part in given.split(",")]


class Replicas:
    """Child processes that serve a model; use it in a `with` block.

    replicas   as the router has them, in the order of their numbers
    """

    def __init__(self, orders: Sequence[Mapping[str, Any]], shutdown_s: float) -> None:
        """Start a process for each of `orders`, which JSON must be able to carry.

        shutdown_s   that they have for answers under way, once they are to end

        Raises MachineError where the system starts none.
        """
        self._shutdown_s = shutdown_s
        self._folder = Path(tempfile.mkdtemp(prefix="hmt-replicas-"))  # mode 0700
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._failure: HMTError | None = None
        self._closing = False
        self._orders: list[dict[str, Any]] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._hearing: list[threading.Thread] = []
        self.replicas: list[Replica] = []
        try:
            for number, order in enumerate(orders):
                path = self._folder / str(number)
                self.replicas.append(Replica.at(number, path))
                self._orders.append({**order, "number": number, "path": str(path)})
                self._start(number)
        except BaseException:
            self.close()
            raise

    def _start(self, number: int) -> None:
        path = [_ROOT, *(entry for entry in sys.path if entry and entry != _ROOT)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for us
            )
            assert process.stdin is not None
            self._processes[number] = process
            told = f"{json.dumps(path)}\n{json.dumps(self._orders[number])}\n"
            process.stdin.write(told.encode())
            process.stdin.flush()
        except OSError as error:
            raise MachineError(f"replica {number} cannot be started: {error}") from error
        hears = threading.Thread(
            target=self._hear, args=(number, process), name="hmt-replica", daemon=True
        )
        hears.start()
        self._hearing.append(hears)

    def wait(self) -> None:
        """Wait until all of them answer.  Raises what kept one from loading its model."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or len(self._ready) == len(self._processes)
            )
            if self._failure is not None:
                raise self._failure

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes."""
        return [process.pid for process in self._processes.values()]

    def _hear(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        """What a replica says, until it ends."""
        assert process.stdout is not None and process.stdin is not None
        said: HMTError | None = None
        with process.stdout as told:
            for line in told:
                message = json.loads(line)
                if message["state"] == "ready":
                    self.replicas[number].failure = ""
                    with self._changed:
                        self._ready.add(number)
                        self._changed.notify_all()
                else:
                    said = _as_error(number, message)
        status = process.wait()
        with suppress(OSError):
            process.stdin.close()
        if self._closing:
            return
        why = f"replica {number}, process {process.pid}, has ended (exit status {status})"
        self.replicas[number].failure = why
        with self._changed:
            had_begun = number in self._ready
            self._failure = self._failure or said or MachineError(why)
            self._changed.notify_all()
        if had_begun:
            logger.warning("%s: it is started again, and the others go on meanwhile", why)
            self._start_again(number)
        else:
            logger.warning("%s: the others go on without it", said or why)

    def _start_again(self, number: int) -> None:
        """Start another process in the place of one that has ended."""
        with self._changed:
            self._ready.discard(number)
            if self._closing:
                return
            try:
                self._start(number)
            except MachineError as error:
                logger.warning("%s", error)

    def close(self) -> None:
        """End them: answers under way have their time.  Does nothing twice."""
        with self._changed:
            self._closing = True
        for process in self._processes.values():
            with suppress(OSError):
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(self._shutdown_s + _KILLED_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for hears in self._hearing:
            hears.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def order_of(
    model: Path, engine: EngineOptions, server: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, Any]:
    """What a replica is told, as JSON has it.

    server   fields of ServerOptions
    keys     that clients must send, as their hashes
    """
    given = {"engine": asdict(engine), "server": dict(server), "keys": list(keys)}
    plain: dict[str, Any] = json.loads(json.dumps(given | {"model": model}, default=str))
    return plain


def _as_error(number: int, message: Mapping[str, Any]) -> HMTError:
    """What a replica raised, of the same class."""
    kind = getattr(errors, str(message.get("kind")), MachineError)
    known = isinstance(kind, type) and issubclass(kind, HMTError)
    return (kind if known else MachineError)(f"replica {number}: {message.get('said')}")
