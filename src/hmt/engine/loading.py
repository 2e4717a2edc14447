"""From a folder to a plan, and from a plan to memory."""

import copy
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from hmt.base import flags
from hmt.base.errors import BudgetError, Cancelled, MachineError, RequestError
from hmt.base.log import logger
from hmt.base.trace import Tracer
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.kv import KVAccount
from hmt.contracts.machine import Machine
from hmt.contracts.model import PAGE_TOKENS, Model
from hmt.contracts.plan import Plan, Tier
from hmt.engine.config import EngineConfig
from hmt.engine.device_loading import OnDevice, load_on_device
from hmt.engine.expert_recorder import open_trace
from hmt.engine.expert_trace import TraceWriter
from hmt.engine.foresight import Transitions, expert_count
from hmt.engine.goal_plan import searched_plan
from hmt.engine.kv_loading import open_kv, selection_of
from hmt.engine.kv_scales import with_scales
from hmt.engine.loop import StepLoop
from hmt.engine.machine import cache_folder, machine_for, remembered, with_device
from hmt.engine.prefixes import open_prefixes, prefix_bytes
from hmt.engine.source import Source, open_source
from hmt.engine.summary import DeviceAccount, ExpertAccount
from hmt.kernels import ops
from hmt.kvcache import AnyKV, PlacedKV, TieredKV, encoding_of, kv_sizes, page_bytes
from hmt.kvcache.prefix import PrefixCache
from hmt.memory import (
    Account,
    DiskRate,
    HostPool,
    Ledger,
    PoolStats,
    TransferQueue,
    open_reader,
    physical_host_bytes,
    usual_rate,
)
from hmt.memory.device import Device
from hmt.models import open_model
from hmt.planner import Demand, KVBudgets, KVSizes, PlanOptions, solve
from hmt.planner.nodes import on_its_nodes
from hmt.quant import Format, component_bytes
from hmt.weights import (
    BlockLayout,
    SpillFile,
    Surroundings,
    WeightStore,
    inner_homes,
    laid_out_alike,
    open_policy,
    row_span_bytes,
)

# Blocks whose matrices are multiplied with all of a step's tokens at once.
_DENSE = (BlockKind.ATTENTION, BlockKind.FFN, BlockKind.ROUTER)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint or pack that was opened, checked and planned for; no weight has been loaded.

    headless   it has no output layer, and can be asked for embeddings only
    """

    source: Source
    model: Model
    layouts: dict[BlockId, BlockLayout]
    published_bytes: int
    demand: Demand
    machine: Machine
    plan: Plan
    headless: bool = False

    def check_head(self, *, needed: bool) -> None:
        """Raise RequestError where an output layer is needed and there is none."""
        if needed and self.headless:
            raise RequestError(
                f"{self.source.path} has no output layer: it holds the bare model, and its "
                "configuration does not tie a head to the embedding; only embeddings can be asked "
                "of it"
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
        kv = self.kv.there if isinstance(self.kv, PlacedKV) else self.kv
        return (
            replace(copy.deepcopy(kv.account), held=kv.held()) if isinstance(kv, TieredKV) else None
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
        teams = self.on_device.weights.teams
        counts = teams.counts()
        if counts is None:
            return None
        found, brought, left, cut = counts
        return ExpertAccount(found, brought, left, teams.nbytes, cut)

    def close(self) -> None:
        """Free it all."""
        self.closing.close()


def prepare(
    path: Path,
    config: EngineConfig,
    host_bytes: int | None = None,
    device: Device | None = None,
    device_bytes: int = 0,
) -> Prepared:
    """Read headers and configuration of a checkpoint or pack, and decide where everything goes.

    `host_bytes` and `device_bytes` are what is left of the budgets for this model; None: all of the
    host's.  Raises CheckpointError, ConfigError or BudgetError; see hmt.base.errors.
    """
    source = open_source(path)
    model = open_model(source.config, source.path, dtype_for(config, source))
    weights = source.weights(model.spec, config.quantization)
    kv_quant = with_scales(config.kv_quant, source)
    demand = demand_of(model, weights.layouts, config, kv_quant)
    options = PlanOptions(
        config.host_memory_bytes if host_bytes is None else host_bytes,
        config.context,
        config.prefill_chunk,
        0 if config.executor == "plain" else config.prefetch_distance,
        device_bytes,
        kv_budgets(config),
    )
    machine = machine_for(path)
    if device is not None:
        machine = with_device(machine, device, _usual_format(weights.layouts))
    machine = on_its_nodes(machine, config.numa, options.host_bytes)
    if config.goal is None and config.profile is None:
        plan = solve(demand, options, machine)
    else:
        plan = searched_plan(demand, options, machine, config)
    _check_physical(plan)
    sizes = weights.layouts, weights.published_bytes
    return Prepared(source, model, *sizes, demand, machine, plan, weights.headless)


def kv_budgets(config: EngineConfig) -> KVBudgets | None:
    """Of keys and values that do not all lie where layers compute; None where they do."""
    if config.kv_device_memory_bytes is None:
        return None
    disk_bytes = 0 if config.kv_disk is None else config.kv_disk_memory_bytes
    return KVBudgets(config.kv_device_memory_bytes, config.kv_host_memory_bytes, disk_bytes)


def _usual_format(layouts: Mapping[BlockId, BlockLayout]) -> Format | None:
    """The format of most bytes of networks and experts, where it is one for matrices."""
    sizes: Counter[Format] = Counter()
    for block, layout in layouts.items():
        if block.kind in (BlockKind.FFN, BlockKind.EXPERT):
            for placed in layout.placed:
                shape = placed.param.spec.shape
                if len(shape) == 2:
                    sizes[placed.format] += sum(component_bytes(placed.format, shape))
    return sizes.most_common(1)[0][0] if sizes else None


def _matrices(layouts: Iterable[BlockLayout], *kinds: BlockKind) -> Iterator[tuple[int, ...]]:
    """Shapes of the matrices of some kinds of blocks."""
    for layout in layouts:
        if layout.id.kind in kinds:
            shapes = (placed.param.spec.shape for placed in layout.placed)
            yield from (shape for shape in shapes if len(shape) == 2)


def _check_physical(plan: Plan) -> None:
    """Refuse a plan that this machine cannot hold; a budget that is not used up may be larger."""
    needed, most = sum(plan.reserved.values()), physical_host_bytes()
    if needed > most:
        raise BudgetError(
            f"with {format_bytes(plan.budgets[Tier.HOST])} of host memory the plan takes "
            f"{format_bytes(needed)}, and this process can have {format_bytes(most)} at most; "
            "lower --host-memory"
        )


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
            replace(plan, homes=inner_homes(plan)),
            queue,
            tracer,
            resident=pools["resident"],
            slots=pools["slots"],
            staging=pools["staging"],
            rows=pools["rows"],
            policy=open_policy(config.cache_policy, _surroundings(prepared, pools["slots"])),
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
        if config.trace_experts is not None:
            name, blocks = prepared.source.path.name, prepared.demand.blocks
            trace = open_trace(config.trace_experts, name, model.spec, blocks)
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
    loop: StepLoop,
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


def _surroundings(prepared: Prepared, slots: HostPool) -> Surroundings:
    """What cache policies weigh."""
    around = Surroundings(
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
) -> TransferQueue:
    """The queue of the drive that was `measured`; what `config` says of it comes first.

    Its threads compute (checks, conversions) alone: torch gives every thread that computes a team
    of OpenMP threads as large as the machine, and eight of them on 64 cores would be 512 threads
    beside those of the step that they are to help.
    """
    threads = torch.get_num_threads()
    disk = measured or usual_rate()
    queue = TransferQueue(
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
    folder = config.disk_path or cache_folder()
    try:
        if config.disk_path is None:
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
        if config.disk_path is not None and isinstance(error, MachineError):
            raise
        logger.warning(
            "%s of converted weights cannot be kept on disk (%s): they are converted again "
            "whenever they are read, which is slow; name a folder with --disk-path",
            format_bytes(wanted),
            error,
        )
        return None


def dtype_for(config: EngineConfig, source: Source) -> torch.dtype:
    """Activations follow the checkpoint, except FP16: CPUs compute it through FP32 anyway."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return torch.bfloat16 if "BF16" in source.dtypes else torch.float32


def demand_of(
    model: Model,
    layouts: Mapping[BlockId, BlockLayout],
    config: EngineConfig,
    kv_quant: tuple[str, str, str],
) -> Demand:
    """The model as the planner sees it.  Blocks that are laid out alike may share a layout."""
    distinct = list({id(layout): layout for layout in layouts.values()}.values())
    sizes = {id(layout): layout.size for layout in distinct}
    numbers = {id(layout): layout.parameter_bytes for layout in distinct}
    tables = [table for layout in layouts.values() for table in layout.tables.values()]
    guesses = config.guesses and config.executor == "overlapped"
    near, warm, cold = kv_quant
    number = encoding_of(near, model.dtype).dtype
    # Texts that share what is near have all of it there, windows included.
    shared = config.prefix_cache and config.kv_device_memory_bytes is None
    pages = kv_sizes(model.spec.kv, model.dtype, warm, cold, selection_of(config), near)
    return Demand(
        spec=model.spec,
        blocks=tuple(replace(sizes[id(layout)], id=b) for b, layout in layouts.items()),
        staging_bytes=max(layout.staging_bytes for layout in distinct),
        row_bytes=max((row_span_bytes(table) for table in tables), default=0),
        kv_token_bytes=page_bytes(model.spec.kv, number) // PAGE_TOKENS,
        kv_layer_bytes=max(layer.row_width for layer in model.spec.kv) * model.dtype.itemsize,
        score_bytes=ops.ATTENTION_WORKSPACE_BYTES,
        batch=config.max_batch,
        guess_bytes=Transitions.nbytes(expert_count(model.spec)) if guesses else 0,
        row_sums_bytes=sum(table.sums.file.nbytes for table in tables if table.sums is not None),
        parameter_bytes=sum(numbers[id(layout)] for layout in layouts.values()),
        experts_alike=laid_out_alike(
            [layout for layout in distinct if layout.id.kind is BlockKind.EXPERT]
        ),
        matrix_bytes=max(map(prod, _matrices(distinct, *_DENSE)), default=0) * model.dtype.itemsize,
        expert_token_bytes=max(map(sum, _matrices(distinct, BlockKind.EXPERT)), default=0)
        * model.spec.experts_per_token
        * model.dtype.itemsize,
        prefix_bytes=prefix_bytes(model, config),
        kv_sizes=None if shared else KVSizes(**pages),
    )
