"""A model's part of the disk: the queue that reads it, and the file of converted weights."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import torch

from hmt.base.errors import MachineError
from hmt.base.folders import cache_folder
from hmt.base.log import logger
from hmt.base.trace import Tracer
from hmt.base.units import format_bytes
from hmt.contracts.plan import Tier
from hmt.engine.config import EngineConfig
from hmt.engine.loading.prepared import Prepared
from hmt.hardware.machine import remembered
from hmt.memory import Account, HostPool, Ledger, ReadQueue, open_reader, usual_rate
from hmt.weights import SpillFile, WeightStore


def transfer_queue(config: EngineConfig, tracer: Tracer, path: Path | None = None) -> ReadQueue:
    """The queue of the disk that has `path`, as measured; what `config` says of it comes first.

    Its threads compute (checks, conversions) alone: torch gives every thread that computes a team
    of OpenMP threads as large as the machine, and eight of them on 64 cores would be 512 threads
    beside those of the step that they are to help.
    """
    threads = torch.get_num_threads()
    disk = (None if path is None else remembered(path).disk) or usual_rate()
    queue = ReadQueue(
        open_reader(config.disk_reader or disk.reader),
        tracer,
        depth=config.disk_depth or disk.depth,
        chunk_bytes=config.disk_chunk_bytes or disk.block_bytes,
        worker_starts=lambda: torch.set_num_threads(1),
    )
    # The setting is kept per thread and, as the default of new threads, once for all.
    torch.set_num_threads(threads)
    return queue


def spill_file(prepared: Prepared, config: EngineConfig) -> SpillFile | None:
    """Where converted blocks that do not stay in memory are kept; None where none are, or no room.

    Without it they would be converted whenever they are read: 0.13 instead of 2 tokens/s for 1.2 GB
    at 4 bits in a quarter of the memory.
    """
    homes, layouts = prepared.plan.homes, prepared.layouts
    streamed = [layout for b, layout in layouts.items() if homes[b] is Tier.DISK]
    wanted = sum(layout.slot_bytes for layout in streamed if layout.staged)
    if not wanted:
        return None
    folder = config.spill_dir or cache_folder()
    try:
        if config.spill_dir is None:
            folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < 2 * wanted:  # half of what is free is not ours to take
            raise MachineError(
                f"{folder} has {format_bytes(free)} free, and {format_bytes(2 * wanted)} are "
                f"wanted, of which {format_bytes(wanted)} would be used: half of what is free is "
                "left to others"
            )
        return SpillFile(folder, streamed)
    except (OSError, MachineError) as error:
        if config.spill_dir is not None and isinstance(error, MachineError):
            raise
        logger.warning(
            "%s of converted weights cannot be kept on disk (%s): they are converted again "
            "whenever they are read, which is slow; name a folder with --spill-dir",
            format_bytes(wanted),
            error,
        )
        return None


def open_copies(
    prepared: Prepared,
    config: EngineConfig,
    ledger: Ledger,
    tracer: Tracer,
    accounts: dict[str, Account],
    stack: ExitStack,
) -> WeightStore | None:
    """A store that reads copies in higher precision, until `stack` ends; None: there are none.

    Its memory is added to `accounts`.  Raises BudgetError.
    """
    copies = prepared.copies
    if copies is None:
        return None
    pools = {}
    sizes = {layout.slot_bytes for layout in copies.layouts.values()}
    for purpose, nbytes in copies.sizes.items():
        name = f"fallback {purpose}"
        accounts[name] = account = ledger.open(Tier.HOST, name, nbytes)
        stack.callback(account.close)
        pools[purpose] = HostPool(account, sizes if purpose == "slots" else ())
        stack.callback(pools[purpose].close)
    store = WeightStore(
        copies.layouts,
        [],
        transfer_queue(config, tracer),  # which the store closes
        tracer,
        resident=pools["resident"],
        slots=pools["slots"],
        staging=pools["staging"],
        rows=pools["rows"],
        verify=config.verify_reads,
    )
    stack.callback(store.close)
    return store
