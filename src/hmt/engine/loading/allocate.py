"""From a plan to memory: pools, stores, caches, filled with what lives there."""

import copy
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from hmt.base import flags
from hmt.base.errors import Cancelled, MachineError
from hmt.base.folders import cache_folder
from hmt.base.log import logger
from hmt.base.trace import Tracer
from hmt.base.units import format_bytes
from hmt.contracts.kv import KVAccount
from hmt.contracts.plan import Plan, Tier
from hmt.engine.config import EngineConfig
from hmt.engine.engine_thread import EngineThread
from hmt.engine.experts.predictor import Transitions, expert_count
from hmt.engine.experts.trace import TraceWriter
from hmt.engine.experts.trace_recorder import open_trace
from hmt.engine.loading.device import OnDevice, load_on_device
from hmt.engine.loading.kv import open_kv
from hmt.engine.loading.prefix_cache import open_prefixes
from hmt.engine.loading.prepare import Prepared
from hmt.engine.run_summary import DeviceAccount, ExpertAccount
from hmt.hardware.machine import remembered
from hmt.kvcache import AnyKV, SplitKVCache, TieredKV
from hmt.kvcache.prefix import PrefixCache
from hmt.memory import (
    Account,
    DiskRate,
    HostPool,
    Ledger,
    PoolStats,
    ReadQueue,
    open_reader,
    usual_rate,
)
from hmt.memory.device import Device
from hmt.weights import (
    PolicyContext,
    SpillFile,
    WeightStore,
    host_homes,
    open_policy,
)


@dataclass(slots=True)
class Memory:
    """Everything that holds a model's bytes while it is loaded."""

    weights: WeightStore
    kv: AnyKV
    accounts: list[Account]
    pools: list[HostPool]
    closing: ExitStack
    transitions: Transitions | None = None  # where experts are guessed
    trace: TraceWriter | None = None
    on_device: OnDevice | None = None
    prefixes: PrefixCache | None = None

    def used_bytes(self) -> dict[str, int]:
        """Bytes of host memory in use now, by purpose."""
        return {account.purpose: account.used_bytes for account in self.accounts}

    def pool_stats(self) -> tuple[PoolStats, ...]:
        """What the pools that may hold anything hold now."""
        return tuple(pool.stats() for pool in self.pools if pool.account.limit_bytes)

    def kv_account(self) -> KVAccount | None:
        """Keys and values at several levels; None where they all lie near."""
        kv = self.kv.there if isinstance(self.kv, SplitKVCache) else self.kv
        return (
            replace(copy.deepcopy(kv.account), used=kv.held()) if isinstance(kv, TieredKV) else None
        )

    def device_account(self, plan: Plan) -> DeviceAccount | None:
        """The GPU's part; None without one."""
        if self.on_device is None:
            return None
        sizes = {b: self.weights.slot_bytes(b) for b in plan.device.computes}
        stays = sum(nbytes for b, nbytes in sizes.items() if plan.homes[b] is Tier.DEVICE)
        return DeviceAccount(
            name=self.on_device.device.name,
            budget_bytes=plan.budgets[Tier.DEVICE],
            used_bytes={a.purpose: a.used_bytes for a in self.on_device.accounts},
            resident_bytes=stays,
            copied_bytes=sum(sizes.values()) - stays,
            experts=self._expert_account(),
        )

    def _expert_account(self) -> ExpertAccount | None:
        assert self.on_device is not None
        teams = self.on_device.weights.moe_backends
        counts = teams.counts()
        if counts is None:
            return None
        found, brought, left, cut = counts
        return ExpertAccount(found, brought, left, teams.nbytes, cut)

    def close(self) -> None:
        """Free it all."""
        self.closing.close()


def allocate(
    prepared: Prepared,
    config: EngineConfig,
    ledger: Ledger,
    tracer: Tracer,
    progress: Callable[[int, int], None] | None = None,
    device: Device | None = None,
) -> Memory:
    """Take the memory that the plan reserved and load the blocks that live in it.

    `device` is the one that the plan is for, if it is for one.

    Whatever `progress` raises ends the loading.  Nothing stays allocated after an error.
    """
    plan, model = prepared.plan, prepared.model
    with ExitStack() as stack:
        accounts = {
            purpose: ledger.open(Tier.HOST, purpose, nbytes)
            for purpose, nbytes in plan.reserved.items()
        }
        for account in accounts.values():
            stack.callback(account.close)
        # Torch allocates these itself; the account keeps their share from everyone else.
        activations = accounts["activations"]
        activations.charge(activations.limit_bytes)
        stack.callback(activations.release, activations.limit_bytes)
        pools = _pools(accounts, prepared)
        for pool in pools.values():
            stack.callback(pool.close)
        spill = _spill_file(prepared, config)
        if spill is not None:
            stack.callback(spill.close)
        queue = transfer_queue(config, tracer, remembered(prepared.source.path).disk)
        weights = WeightStore(
            prepared.layouts,
            replace(plan, homes=host_homes(plan)),
            queue,
            tracer,
            resident=pools["resident"],
            slots=pools["slots"],
            staging=pools["staging"],
            rows=pools["rows"],
            policy=open_policy(config.expert_cache_policy, _context(prepared, pools["slots"])),
            spill=spill,
            check=config.check_weights,
            verify=config.verify_reads,
        )
        stack.callback(weights.close)
        weights.load_residents(progress)
        on_device = None
        if device is not None and plan.device.stages:  # a search may find the CPU alone faster
            on_device = load_on_device(
                device, plan, model, prepared.layouts, weights, pools["resident"], ledger, stack,
                progress,
            )  # fmt: skip
        kv = open_kv(model, plan, config, pools["kv"], on_device, queue, stack)
        prefixes = open_prefixes(model, prepared.source, config, kv, pools["prefixes"], stack)
        pools["staging"].trim()  # seldom wanted again: converted blocks are read as they were kept
        trace = None
        if config.expert_trace is not None:
            name, blocks = prepared.source.path.name, prepared.demand.blocks
            trace = open_trace(config.expert_trace, name, model.spec, blocks)
            stack.callback(trace.close)
        transitions = None
        if plan.reserved["guesses"]:
            counts = pools["guesses"].allocate(plan.reserved["guesses"])
            stack.callback(pools["guesses"].free, counts)
            transitions = Transitions(counts.tensor, expert_count(model.spec))
        return Memory(
            weights,
            kv,
            list(accounts.values()),
            list(pools.values()),
            stack.pop_all(),
            transitions,
            trace,
            on_device,
            prefixes,
        )


def allocate_on(
    loop: EngineThread,
    prepared: Prepared,
    config: EngineConfig,
    ledger: Ledger,
    tracer: Tracer,
    progress: Callable[[int, int], None] | None,
    device: Device | None,
) -> Memory:
    """`allocate` on the loop's thread; whatever interrupts the waiting caller ends it cleanly."""
    interrupted = threading.Event()

    def report(done: int, total: int) -> None:
        if interrupted.is_set():
            raise Cancelled("loading was interrupted")
        if progress is not None:
            progress(done, total)

    loading = loop.begin(lambda: allocate(prepared, config, ledger, tracer, report, device))
    try:
        return loading.result()
    except BaseException:
        interrupted.set()
        loop.stop()
        if loading.exception() is None:  # it had just ended
            loading.result().close()
        raise


def _context(prepared: Prepared, slots: HostPool) -> PolicyContext:
    """What cache policies weigh."""
    around = PolicyContext(
        block_bytes={b: layout.read_bytes for b, layout in prepared.layouts.items()},
        pressure=lambda: slots.in_use_bytes / max(1, slots.account.limit_bytes),
    )
    rate = prepared.machine.disk_read_rate
    return replace(around, read_rate=rate) if rate else around


def _pools(accounts: Mapping[str, Account], prepared: Prepared) -> dict[str, HostPool]:
    """A pool for every account but the activations', which are torch's."""
    homes = prepared.plan.homes
    sizes = {
        tier: {layout.slot_bytes for b, layout in prepared.layouts.items() if homes[b] is tier}
        for tier in (Tier.HOST, Tier.DISK)
    }
    announced = {"resident": sizes[Tier.HOST], "slots": sizes[Tier.DISK]}
    poison = flags.read(flags.POISON) == "on"
    return {
        purpose: HostPool(
            account, announced.get(purpose, ()), poison=poison, packed=purpose == "kv"
        )
        for purpose, account in accounts.items()
        if purpose != "activations"
    }


def transfer_queue(
    config: EngineConfig, tracer: Tracer, measured: DiskRate | None = None
) -> ReadQueue:
    """The queue of the disk that was `measured`; what `config` says of it comes first.

    Its threads compute (checks, conversions) alone: torch gives every thread that computes a team
    of OpenMP threads as large as the machine, and eight of them on 64 cores would be 512 threads
    beside those of the step that they are to help.
    """
    threads = torch.get_num_threads()
    disk = measured or usual_rate()
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


def _spill_file(prepared: Prepared, config: EngineConfig) -> SpillFile | None:
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
