"""From a folder to a plan, and from a plan to memory."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from hmt.base.errors import BudgetError, RequestError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import Packing
from hmt.contracts.machine import Machine
from hmt.contracts.model import EXPERT_UNPACKED_BYTES, PAGE_TOKENS, Model
from hmt.contracts.plan import Plan, Tier
from hmt.engine.config import EngineConfig
from hmt.engine.experts.predictor import Transitions, expert_count
from hmt.engine.loading.goal_plan import searched_plan
from hmt.engine.loading.kv import selection_of
from hmt.engine.loading.kv_scales import with_scales
from hmt.engine.loading.prefix_cache import prefix_bytes
from hmt.engine.loading.source import Source, open_source
from hmt.hardware.machine import machine_for, with_device
from hmt.kernels import ops
from hmt.kvcache import kv_sizes, page_bytes, page_encoding
from hmt.memory import (
    physical_host_bytes,
)
from hmt.memory.device import Device
from hmt.models import open_model
from hmt.planner import Demand, KVBudgets, KVTierSizes, PlanOptions, solve
from hmt.planner.placement.numa import on_numa_nodes
from hmt.quant import Format, component_bytes
from hmt.weights import (
    BlockLayout,
    laid_out_alike,
    row_span_bytes,
)

# Blocks whose matrices are multiplied with all of a step's tokens at once.
_PLAIN_DTYPES = frozenset(("F16", "F32", "F64"))
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
    on_gpu = device is not None and device.where.type == "cuda"
    model = open_model(source.config, source.path, dtype_for(config, source, on_gpu=on_gpu))
    weights = source.weights(
        model.spec, config.quantization, exact_activations=config.activations == "exact"
    )
    kv_quant = with_scales(config.kv_quant, source)
    demand = demand_of(model, weights.layouts, config, kv_quant)
    options = PlanOptions(
        config.host_memory_bytes if host_bytes is None else host_bytes,
        config.context,
        config.max_prefill_tokens,
        0 if config.executor == "plain" else config.prefetch_distance,
        device_bytes,
        kv_budgets(config),
    )
    machine = machine_for(path)
    if device is not None:
        machine = with_device(machine, device, _usual_format(weights.layouts))
    machine = on_numa_nodes(machine, config.numa, options.host_bytes)
    if config.goal is None and config.profile is None:
        plan = solve(demand, options, machine)
    else:
        plan = searched_plan(demand, options, machine, config)
    _check_physical(plan)
    sizes = weights.layouts, weights.published_bytes
    return Prepared(source, model, *sizes, demand, machine, plan, weights.headless)


def kv_budgets(config: EngineConfig) -> KVBudgets | None:
    """Of keys and values that do not all lie where layers compute; None where they do."""
    if config.kv_gpu_memory_bytes is None:
        return None
    disk_bytes = 0 if config.kv_offload_dir is None else config.kv_offload_disk_memory_bytes
    return KVBudgets(config.kv_gpu_memory_bytes, config.kv_host_memory_bytes, disk_bytes)


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


def _unpacked_expert_bytes(layouts: Iterable[BlockLayout], experts: int, itemsize: int) -> int:
    """What a device takes for numbers made of experts in ggml's blocks: one at least."""
    largest = 0
    for layout in layouts:
        if layout.id.kind is BlockKind.EXPERT:
            inside = (p for p in layout.placed if p.format.encoding.packing is Packing.BLOCKS)
            largest = max(largest, sum(prod(p.param.spec.shape) for p in inside) * itemsize)
    return min(max(EXPERT_UNPACKED_BYTES, largest), experts * largest)


def _check_physical(plan: Plan) -> None:
    """Refuse a plan that this machine cannot hold; a budget that is not used up may be larger."""
    needed, most = sum(plan.reserved.values()), physical_host_bytes()
    if needed > most:
        raise BudgetError(
            f"with {format_bytes(plan.budgets[Tier.HOST])} of host memory the plan takes "
            f"{format_bytes(needed)}, and this process can have {format_bytes(most)} at most; "
            "lower --host-memory"
        )


def dtype_for(config: EngineConfig, source: Source, *, on_gpu: bool) -> torch.dtype:
    """Activations follow the checkpoint, except FP16: CPUs compute it through FP32 anyway.

    A GPU multiplies quantised weights with bfloat16 (and adds up in f32): tensor cores take that,
    and it is finer than what such weights were rounded to.
    """
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if "BF16" in source.dtypes or (on_gpu and not source.dtypes <= _PLAIN_DTYPES):
        return torch.bfloat16
    return torch.float32


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
    guesses = config.expert_prefetch and config.executor == "overlapped"
    near, warm, cold = kv_quant
    number = page_encoding(near, model.dtype).dtype
    # Texts that share what is near have all of it there, windows included.
    shared = config.prefix_cache and config.kv_gpu_memory_bytes is None
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
        transition_bytes=Transitions.nbytes(expert_count(model.spec)) if guesses else 0,
        row_sums_bytes=sum(table.sums.file.nbytes for table in tables if table.sums is not None),
        parameter_bytes=sum(numbers[id(layout)] for layout in layouts.values()),
        experts_alike=laid_out_alike(
            [layout for layout in distinct if layout.id.kind is BlockKind.EXPERT]
        ),
        matrix_bytes=max(
            max(map(prod, _matrices(distinct, *_DENSE)), default=0) * model.dtype.itemsize,
            _unpacked_expert_bytes(distinct, expert_count(model.spec), model.dtype.itemsize),
        ),
        expert_token_bytes=max(map(sum, _matrices(distinct, BlockKind.EXPERT)), default=0)
        * model.spec.experts_per_token
        * model.dtype.itemsize,
        prefix_bytes=prefix_bytes(model, config),
        kv_sizes=None if shared else KVTierSizes(**pages),
    )
