"""A worker: a rank that computes the steps that the first rank sends it, until that one ends."""

import os
import queue
import socket
import sys
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from hmt.base.errors import HMTError, RankError
from hmt.base.trace import Tracer
from hmt.contracts.plan import Tier
from hmt.contracts.step import SchedulerOutput
from hmt.distributed import RankGroup
from hmt.engine.config import EngineConfig
from hmt.engine.loading.allocate import allocate
from hmt.engine.loading.device import device_budgets, open_devices
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepare import prepare
from hmt.engine.loading.prepared import Prepared
from hmt.engine.model_runner import ModelRunner
from hmt.engine.ranks.workers import on_gpu, spoken
from hmt.engine.scheduling.kv_operations import repeat_operations
from hmt.kernels.cpu.threads import set_threads
from hmt.memory import Ledger
from hmt.sandbox.frames import receive, send

_FAILED: Final = 1


def main(descriptor: int) -> NoReturn:
    """Load a part of a model and compute with it; never returns.  `descriptor`: of the socket."""
    link = socket.socket(fileno=descriptor)
    try:
        order, _ = receive(link)
        inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(link, inbox), daemon=True).start()
        work(link, order, inbox)
    except BaseException as error:
        known = isinstance(error, HMTError)
        said = str(error) if known else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # the first rank has ended
            send(link, {"state": "failed", "kind": type(error).__name__, "said": said})
        _end(_FAILED)
    _end(0)


def _listen(link: socket.socket, inbox: "queue.SimpleQueue[tuple[str, bytes]]") -> None:
    """Pass on what the first rank sends; end where it has ended, whatever is being computed."""
    try:
        while True:
            message, blob = receive(link)
            inbox.put((message["do"], blob))
    except (EOFError, OSError, ValueError):
        _end(_FAILED)


def _end(status: int) -> NoReturn:
    """Without what threads and kernels are in the middle of: nothing here outlives the process."""
    sys.stderr.flush()
    os._exit(status)


def work(
    link: socket.socket, order: dict[str, Any], inbox: "queue.SimpleQueue[tuple[str, bytes]]"
) -> None:
    """Load what `order` says, tell `link`, and do what comes into `inbox` until that is to end."""
    config = replace(EngineConfig.resolve(**spoken(order["options"])), **order["shape"])
    set_threads(config.threads)
    devices = open_devices(config)
    room = device_budgets(devices, config) if devices else ()
    prepared = prepare(Path(order["path"]), config, None, devices, room, rank=order["rank"])
    ledger = Ledger({Tier.HOST: config.host_memory_bytes, Tier.DEVICE: room})
    tracer = Tracer(capacity=0)
    memory = allocate(prepared, config, ledger, tracer, None, devices)
    worker = _Worker(prepared, config, memory, tracer)
    send(link, {"state": "ready"})
    with closing(memory):
        while True:
            do, blob = inbox.get()
            match do:
                case "connect":
                    worker.group.connect(Path(order["folder"]), on_gpu=on_gpu(devices))
                case "step":
                    worker.step(SchedulerOutput.from_json(blob.decode()))
                case _:
                    return


class _Worker:
    """Computes steps as the first rank does, but for the output layer.

    group   of this rank
    """

    def __init__(
        self, prepared: Prepared, config: EngineConfig, memory: Memory, tracer: Tracer
    ) -> None:
        assert prepared.divided is not None
        group = prepared.divided.share.collective
        assert isinstance(group, RankGroup)
        self.group = group
        self._runner = ModelRunner(prepared, config, memory, tracer)
        self._kv = memory.kv.allocator
        self._handles: dict[int, int] = {}  # of open sequences, there and here

    def step(self, output: SchedulerOutput) -> None:
        """Compute a step.  Raises what `ModelRunner.run` raises."""
        try:
            own = repeat_operations(output, self._kv, self._handles)
        except HMTError as error:
            raise RankError(f"its KV cache differs from the first rank's: {error}") from error
        self._runner.run(own)
