"""From a folder to a plan, and from a plan to memory."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hmt.base import flags
from hmt.base.errors import BudgetError, MachineError
from hmt.base.log import logger
from hmt.base.trace import Tracer
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId, BlockKind, ParamSpec
from hmt.contracts.checkpoint import Checkpoint
from hmt.contracts.encoding import Encoding, Packing
from hmt.contracts.model import PAGE_TOKENS, Model
from hmt.contracts.plan import Machine, Plan, Tier
from hmt.engine.config import EngineConfig
from hmt.engine.expert_recorder import open_trace
from hmt.engine.expert_trace import TraceWriter
from hmt.engine.foresight import Transitions, expert_count
from hmt.engine.machine import cache_folder, machine_for
from hmt.formats import open_checkpoint
from hmt.kernels import ops
from hmt.kvcache import PagedKV, page_bytes
from hmt.memory import (
    Account,
    HostPool,
    Ledger,
    TransferQueue,
    open_reader,
    physical_host_bytes,
)
from hmt.models import open_model
from hmt.planner import Demand, PlanOptions, solve
from hmt.quant import Format
from hmt.weights import (
    BlockLayout,
    SpillFile,
    Surroundings,
    WeightStore,
    bind,
    lay_out,
    open_policy,
    published_bytes,
    row_span_bytes,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint that was read, checked and planned for; no weight has been loaded."""

    checkpoint: Checkpoint
    model: Model
    layouts: dict[BlockId, BlockLayout]
    published_bytes: int
    demand: Demand
    machine: Machine
    plan: Plan


@dataclass(slots=True)
class Memory:
    """Everything that holds a model's bytes while it is loaded."""

    weights: WeightStore
    kv: PagedKV
    accounts: list[Account]
    closing: ExitStack
    transitions: Transitions | None = None  # where experts are guessed
    trace: TraceWriter | None = None

    def used_bytes(self) -> dict[str, int]:
        """Bytes of host memory in use now, by purpose."""
        return {account.purpose: account.used_bytes for account in self.accounts}

    def close(self) -> None:
        """Free it all."""
        self.closing.close()


def prepare(path: Path, config: EngineConfig, host_bytes: int | None = None) -> Prepared:
    """Read headers and configuration, and decide where everything goes.

    `host_bytes` is what is left of the budget for this model; None: all of it.  Raises
    CheckpointError, ConfigError or BudgetError; see hmt.base.errors.
    """
    checkpoint = open_checkpoint(path)
    model = open_model(checkpoint.config, checkpoint.path, _dtype(config, checkpoint))
    bound = bind(model.spec, checkpoint)
    layouts = lay_out(bound, _target(config))
    demand = _demand(model, layouts, config)
    options = PlanOptions(
        config.host_memory_bytes if host_bytes is None else host_bytes,
        config.context,
        config.prefill_chunk,
        0 if config.executor == "plain" else config.prefetch_distance,
    )
    machine = machine_for(path)
    plan = solve(demand, options, machine)
    _check_physical(plan)
    return Prepared(checkpoint, model, layouts, published_bytes(bound), demand, machine, plan)


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
) -> Memory:
    """Take the memory that the plan reserved and load the blocks that live in it.

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
        pools = {name: HostPool(accounts[name]) for name in accounts if name != "activations"}
        for pool in pools.values():
            stack.callback(pool.close)
        streamed = [layout for b, layout in prepared.layouts.items() if plan.homes[b] is Tier.DISK]
        spill = _spill_file(streamed, config)
        if spill is not None:
            stack.callback(spill.close)
        kv = PagedKV(model.spec.kv, plan.kv_tokens, model.dtype, pools["kv"])
        stack.callback(kv.release)
        weights = WeightStore(
            prepared.layouts,
            plan,
            _transfer_queue(config, tracer),
            tracer,
            resident=pools["resident"],
            slots=pools["slots"],
            staging=pools["staging"],
            rows=pools["rows"],
            policy=open_policy(config.cache_policy, _surroundings(prepared, pools["slots"])),
            spill=spill,
            check=config.check_weights,
            poison=flags.read(flags.POISON) == "on",
        )
        stack.callback(weights.close)
        weights.load_residents(progress)
        trace = None
        if config.trace_experts is not None:
            name, blocks = prepared.checkpoint.path.name, prepared.demand.blocks
            trace = open_trace(config.trace_experts, name, model.spec, blocks)
            stack.callback(trace.close)
        transitions = None
        if plan.reserved["guesses"]:
            counts = pools["guesses"].allocate(plan.reserved["guesses"])
            stack.callback(pools["guesses"].free, counts)
            transitions = Transitions(counts.tensor, expert_count(model.spec))
        return Memory(weights, kv, list(accounts.values()), stack.pop_all(), transitions, trace)


def _surroundings(prepared: Prepared, slots: HostPool) -> Surroundings:
    """What cache policies weigh."""
    around = Surroundings(
        block_bytes={b: layout.read_bytes for b, layout in prepared.layouts.items()},
        pressure=lambda: slots.in_use_bytes / max(1, slots.account.limit_bytes),
    )
    rate = prepared.machine.disk_read_rate
    return replace(around, read_rate=rate) if rate else around


def _transfer_queue(config: EngineConfig, tracer: Tracer) -> TransferQueue:
    """Disk workers, each computing (checks, conversions) on its own thread alone.

    Torch gives every thread that computes a team of OpenMP threads as large as the machine: eight
    workers on 64 cores would be 512 threads beside those of the step that they are to help.
    """
    threads = torch.get_num_threads()
    queue = TransferQueue(
        open_reader(config.disk_reader),
        tracer,
        threads=config.disk_threads,
        chunk_bytes=config.disk_chunk_bytes,
        worker_starts=lambda: torch.set_num_threads(1),
    )
    # The setting is kept per thread and, as the default of new threads, once for all.
    torch.set_num_threads(threads)
    return queue


def _spill_file(streamed: Sequence[BlockLayout], config: EngineConfig) -> SpillFile | None:
    """Where converted blocks that do not stay in memory are kept; None where none are, or no room.

    Without it they would be converted whenever they are read: 0.13 instead of 2 tokens/s for 1.2 GB
    at 4 bits in a quarter of the memory.
    """
    wanted = sum(layout.slot_bytes for layout in streamed if layout.staged)
    if not wanted:
        return None
    folder = config.disk_path or cache_folder()
    try:
        if config.disk_path is None:
            folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < 2 * wanted:  # half of what is free is not ours to take
            raise MachineError(f"{folder} has {format_bytes(free)} free")
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


def _dtype(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Activations follow the checkpoint, except FP16: CPUs compute it through FP32 anyway."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    stored = {record.dtype for record in checkpoint.records.values()}
    return torch.bfloat16 if "BF16" in stored else torch.float32


def _target(config: EngineConfig) -> Callable[[ParamSpec, BlockKind], Format | None]:
    scheme = config.quantization

    def target(param: ParamSpec, kind: BlockKind) -> Format | None:
        wanted = scheme.format_for(param)
        four_bits = wanted is not None and wanted.encoding.packing is Packing.PANELS
        if wanted is not None and kind is BlockKind.HEAD and four_bits:
            # The output layer loses most at 4 bits and is a small part of the bytes.
            return Format(Encoding.INT8_CHANNEL, activations=wanted.activations)
        return wanted

    return target


def _demand(model: Model, layouts: dict[BlockId, BlockLayout], config: EngineConfig) -> Demand:
    tables = [table for layout in layouts.values() for table in layout.tables.values()]
    guesses = config.guesses and config.executor == "overlapped"
    return Demand(
        spec=model.spec,
        blocks=tuple(layout.size for layout in layouts.values()),
        staging_bytes=max(layout.staging_bytes for layout in layouts.values()),
        row_bytes=max((row_span_bytes(table.param) for table in tables), default=0),
        kv_token_bytes=page_bytes(model.spec.kv, model.dtype) // PAGE_TOKENS,
        kv_layer_bytes=max(layer.row_width for layer in model.spec.kv) * model.dtype.itemsize,
        score_bytes=ops.ATTENTION_WORKSPACE_BYTES,
        batch=config.max_batch,
        guess_bytes=Transitions.nbytes(expert_count(model.spec)) if guesses else 0,
    )
