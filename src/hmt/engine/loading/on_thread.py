"""Loading on the thread of the engine, with the other processes that compute a model."""

import threading
from collections.abc import Callable, Sequence

from hmt.base.errors import Cancelled
from hmt.base.trace import Tracer
from hmt.engine.config import EngineConfig
from hmt.engine.engine_thread import EngineThread
from hmt.engine.loading.allocate import allocate
from hmt.engine.loading.memory import LoadedDraft, Memory
from hmt.engine.loading.prepared import Prepared, PreparedDraft
from hmt.engine.ranks import RankWorkers, start_workers
from hmt.memory import Ledger
from hmt.memory.device import Device


def allocate_on(
    loop: EngineThread,
    prepared: Prepared,
    config: EngineConfig,
    ledger: Ledger,
    tracer: Tracer,
    progress: Callable[[int, int], None] | None,
    devices: Sequence[Device],
) -> Memory:
    """`allocate` on the loop's thread; whatever interrupts the waiting caller ends it cleanly.

    `config` is that of all ranks, where several compute the model: the others load their parts
    meanwhile.
    """
    ranks = _start_ranks(prepared, config)
    interrupted = threading.Event()

    def report(done: int, total: int) -> None:
        if interrupted.is_set():
            raise Cancelled("loading was interrupted")
        if progress is not None:
            progress(done, total)

    loading = loop.begin(lambda: allocate(prepared, config, ledger, tracer, report, devices))
    try:
        memory = loading.result()
        if ranks is not None:
            ranks.connect(devices)
            memory.ranks = ranks
        return memory
    except BaseException:
        interrupted.set()
        loop.stop()
        if ranks is not None:
            ranks.close()
        if loading.exception() is None:  # it had just ended
            loading.result().close()
        raise


def _start_ranks(prepared: Prepared, config: EngineConfig) -> RankWorkers | None:
    """The other processes that compute the model; None: there are none."""
    if prepared.divided is None:
        return None
    plan = prepared.plan
    return start_workers(
        prepared.source.path,
        config,
        prepared.divided.share.collective,
        kv_tokens=plan.kv_tokens,
        max_prefill_tokens=plan.max_prefill_tokens,
    )


def allocate_draft(
    loop: EngineThread,
    draft: PreparedDraft,
    ledger: Ledger,
    tracer: Tracer,
    memory: Memory,
    devices: Sequence[Device],
) -> None:
    """Load a small model beside the one that has `memory`, which holds it from now on.

    Where that fails, `memory` is closed and the loop ends.
    """
    try:
        own = allocate_on(loop, draft.prepared, draft.config, ledger, tracer, None, devices)
    except BaseException:
        memory.close()
        raise
    memory.draft = LoadedDraft(draft.prepared, draft.config, draft.inputs, draft.remark, memory=own)
