"""What the planner is asked: a model's demand, and what options say of dtypes and KV budgets."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import Packing
from hmt.contracts.model import EXPERT_UNPACKED_BYTES, PAGE_TOKENS, Model
from hmt.engine.config import EngineConfig
from hmt.engine.experts.predictor import expert_count
from hmt.engine.loading.draft_journal import journaled_drafts, without_journal
from hmt.engine.loading.kv import selection_of
from hmt.engine.loading.prefix_cache import prefix_bytes, spare_states
from hmt.engine.loading.source import Source
from hmt.kernels import ops
from hmt.kernels.backend_registry import backend_on
from hmt.kvcache import kv_sizes, page_bytes, page_encoding
from hmt.memory.device import Device
from hmt.planner import Demand, KVBudgets, KVTierSizes
from hmt.quant import Format, component_bytes
from hmt.weights import BlockLayout, experts_alike_by_layer, row_span_bytes

_PLAIN_DTYPES = frozenset(("F16", "F32", "F64"))
# Blocks whose matrices are multiplied with all of a step's tokens at once.
_DENSE = (BlockKind.ATTENTION, BlockKind.FFN, BlockKind.ROUTER)


def kv_budgets(config: EngineConfig) -> KVBudgets | None:
    """Of a KV cache that does not all lie where layers compute; None where it does."""
    if config.kv_gpu_memory_bytes is None:
        return None
    disk_bytes = 0 if config.kv_offload_dir is None else config.kv_offload_disk_memory_bytes
    return KVBudgets(config.kv_gpu_memory_bytes, config.kv_host_memory_bytes, disk_bytes)


def usual_format(layouts: Mapping[BlockId, BlockLayout]) -> Format | None:
    """The format of most bytes of networks and experts, where it is one for matrices."""
    sizes: Counter[Format] = Counter()
    for block, layout in layouts.items():
        if block.kind in (BlockKind.FFN, BlockKind.EXPERT):
            for placed in layout.placed:
                shape = placed.param.spec.shape
                if len(shape) == 2:
                    sizes[placed.format] += sum(component_bytes(placed.format, shape))
    return sizes.most_common(1)[0][0] if sizes else None


def is_gpu(devices: Sequence[Device]) -> bool:
    """Whether devices compute with kernels of their own: there are some, and not fake ones."""
    return any(not backend_on(device.where).on_host for device in devices)


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
    adapter_bytes: int = 0,
) -> Demand:
    """The model as the planner sees it.  Blocks that are laid out alike may share a layout.

    adapter_bytes   that low-rank adapters may take together

    Raises ConfigError where `config` asks for what the model cannot do.
    """
    distinct = list({id(layout): layout for layout in layouts.values()}.values())
    sizes = {id(layout): layout.size for layout in distinct}
    numbers = {id(layout): layout.parameter_bytes for layout in distinct}
    blocks = [replace(sizes[id(layout)], id=b) for b, layout in layouts.items()]
    vision = tuple(block for block in blocks if block.id.kind is BlockKind.VISION)
    tables = [table for layout in layouts.values() for table in layout.tables.values()]
    on_device, on_host, on_disk = kv_quant
    number = page_encoding(on_device, model.dtype).dtype
    # Sequences that share device pages have all of them there, windows included.
    shared = config.prefix_cache and config.kv_gpu_memory_bytes is None
    drafts, spec = journaled_drafts(model.spec, config, spare_states(model, config))
    layers = spec.kv_layers
    pages = kv_sizes(layers, model.dtype, on_host, on_disk, selection_of(config), on_device)
    return Demand(
        spec=spec,
        blocks=tuple(block for block in blocks if block.id.kind is not BlockKind.VISION),
        vision=vision,
        passing_bytes=max((block.slot_bytes for block in vision), default=0),
        adapter_bytes=adapter_bytes,
        image_bytes=0 if model.encoder is None else model.encoder.most_bytes,
        encoding_bytes=(0, 0) if model.encoder is None else model.encoder.device_bytes,
        staging_bytes=max(layout.staging_bytes for layout in distinct),
        row_bytes=max((row_span_bytes(table) for table in tables), default=0),
        kv_token_bytes=page_bytes(layers.values(), number) // PAGE_TOKENS,
        kv_layer_bytes=max((layer.row_width for layer in layers.values()), default=0)
        * model.dtype.itemsize,
        sequence_bytes=spec.state_bytes + spec.journal_bytes(range(spec.layers), drafts),
        draft_tokens=drafts,
        spare_states=spare_states(model, config),
        score_bytes=ops.ATTENTION_WORKSPACE_BYTES,
        batch=config.max_batch,
        prefetch_experts=config.expert_prefetch and config.executor == "overlapped",
        row_sums_bytes=sum(table.sums.kept_bytes for table in tables if table.sums is not None),
        parameter_bytes=sum(
            numbers[id(layout)] for b, layout in layouts.items() if b.kind is not BlockKind.VISION
        ),
        experts_alike=experts_alike_by_layer(layouts),
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


def demand_without_journal(demand: Demand) -> Demand:
    """The same where drafts cannot be taken back from recurrent state, which its remarks say."""
    spec = demand.spec
    each = spec.journal_bytes(range(spec.layers), demand.draft_tokens)
    return replace(
        demand,
        spec=without_journal(spec, demand.state_slots * each),
        sequence_bytes=demand.sequence_bytes - each,
        draft_tokens=0,
    )


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
