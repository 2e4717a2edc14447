"""From a folder to a plan, and from a plan to memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hmt.base.errors import BudgetError, ConfigError, RequestError
from hmt.contracts.blocks import BlockId
from hmt.contracts.machine import Machine
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan
from hmt.engine.config import EngineConfig
from hmt.engine.loading.adapters import NamedAdapters, adapter_bytes, named_adapters
from hmt.engine.loading.copies import Copies, copies_within
from hmt.engine.loading.demand import (
    demand_of,
    demand_without_journal,
    dtype_for,
    is_gpu,
    kv_budgets,
    usual_format,
)
from hmt.engine.loading.division import divide
from hmt.engine.loading.kv_scales import key_ranges, with_scales
from hmt.engine.loading.planning import check_physical, planned
from hmt.engine.loading.source import Divided, Source, open_source
from hmt.hardware.machine import machine_for, with_device
from hmt.kvcache import KeyRange
from hmt.memory.device import Device
from hmt.models import DraftBlock, MixtureOfRecursions, open_model, with_vision
from hmt.planner import Demand, PlanOptions
from hmt.planner.placement.numa import on_numa_nodes
from hmt.weights import BlockLayout


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checkpoint or pack that was opened, checked and planned for; no weight has been loaded.

    headless   it has no output layer, and can be asked for embeddings only
    copies     blocks in higher precision, for which the plan leaves room; None: there are none
    adapters   by name, those that options name
    divided    what several processes compute, of which this one has a share; None: it has all
    ranges     of keys, by layer, where tiers keep them in fewer bits: see `key_ranges`
    """

    source: Source
    model: Model
    layouts: dict[BlockId, BlockLayout]
    published_bytes: int
    demand: Demand
    machine: Machine
    plan: Plan
    headless: bool = False
    copies: Copies | None = None
    adapters: NamedAdapters = field(default_factory=dict)
    divided: Divided | None = None
    ranges: Mapping[int, KeyRange] = field(default_factory=dict)

    def check_head(self, *, needed: bool) -> None:
        """Raise RequestError where an output layer is needed and there is none."""
        if needed and self.headless:
            raise RequestError(
                f"{self.source.path} has no output layer: it holds the bare model, and its "
                "configuration does not tie a head to the embedding; only embeddings can be asked "
                "of it"
            )


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What a draft model computes from besides tokens: hidden states of the model that verifies.

    kind     that its draft tokens are counted under
    layers   as many layers come before each of the hidden states, which are joined; (): those
             behind the final norm
    tokens   int64 [vocab_size of the draft model]: what each of its tokens is of the other's; None:
             the same
    block    that it drafts at once; None: it drafts one token after the other
    shares_kv   it attends to the KV cache of the model that verifies, and has none
    """

    kind: str
    layers: tuple[int, ...] = ()
    tokens: torch.Tensor | None = None
    block: DraftBlock | None = None
    shares_kv: bool = False


@dataclass(frozen=True, slots=True)
class PreparedDraft:
    """A draft model that was planned for, and its options.

    inputs   None: it computes from tokens alone
    remark   why it computes on the CPU although there is a GPU; "" where it does not
    """

    prepared: Prepared
    config: EngineConfig
    inputs: DraftInputs | None = None
    remark: str = ""

    @property
    def host_bytes(self) -> int:
        """Of the host's budget, what it takes."""
        return sum(self.prepared.plan.reserved.values())

    @property
    def device_bytes(self) -> int:
        """Of the device's budget; 0: all of it computes on the CPU."""
        return sum(sum(share.reserved.values()) for share in self.prepared.plan.devices)


def prepare(
    path: Path,
    config: EngineConfig,
    host_bytes: int | None = None,
    devices: Sequence[Device] = (),
    device_bytes: Sequence[int] = (),
    rank: int = 0,
) -> Prepared:
    """Read headers and configuration of a checkpoint or pack, and decide where everything goes.

    `host_bytes` and `device_bytes` are what is left of the budgets for this model; None: all of the
    host's.  `devices` are those that the model may use.  `rank` is this process, of those that
    compute the model together; it has its own part of the budgets.

    Raises CheckpointError, ConfigError or BudgetError; see hmt.base.errors.
    """
    source, model = open_parts(path, config, on_gpu=is_gpu(devices))
    if config.ranks > 1:
        model, divided = divide(source, model, config, rank)
        own = prepare_model(source, model, config, host_bytes, devices, device_bytes, divided)
        return replace(own, divided=divided)
    copies, left = None, host_bytes
    if config.fallback_model is not None:
        copies, left = copies_within(config, model, host_bytes, on_cpu=not device_bytes)
    prepared = prepare_model(source, model, config, left, devices, device_bytes)
    return replace(prepared, copies=copies)


def open_parts(path: Path, config: EngineConfig, *, on_gpu: bool) -> tuple[Source, Model]:
    """A checkpoint or pack, and its model.  Raises as `prepare`."""
    source = open_source(path, config.mmproj)
    dtype = dtype_for(config, source, on_gpu=on_gpu)
    model = open_model(source.config, source.path, dtype)
    if isinstance(model, MixtureOfRecursions):
        model.set_depth(config.depth)
    elif config.depth != 1:
        raise ConfigError(
            f"depth={config.depth}, but {path} is no mixture of recursions: all of its layers are "
            "applied to each token; leave it out"
        )
    return source, with_vision(model, source.checkpoint, source.tensors)


def prepare_model(
    source: Source,
    model: Model,
    config: EngineConfig,
    host_bytes: int | None = None,
    devices: Sequence[Device] = (),
    device_bytes: Sequence[int] = (),
    divided: Divided | None = None,
) -> Prepared:
    """`prepare` for a model whose tensors a checkpoint has; `divided`: see Source.weights."""
    exact = config.activations == "exact"
    weights = source.weights(
        model.spec, config.quantization, exact_activations=exact, divided=divided
    )
    kv_quant = with_scales(config.kv_quant, source)
    adapters = named_adapters(config, source, model)
    reserved = adapter_bytes(config, adapters)
    demand = demand_of(model, weights.layouts, config, kv_quant, reserved)
    options = PlanOptions(
        config.host_memory_bytes if host_bytes is None else host_bytes,
        config.context,
        config.max_prefill_tokens,
        0 if config.executor == "plain" else config.prefetch_distance,
        next(iter(device_bytes), 0),
        kv_budgets(config),
        other_device_bytes=tuple(device_bytes[1:]),
    )
    machine = machine_for(source.path)
    if len(devices) > 1 and model.encoder is not None:
        raise ConfigError(
            f"{source.path} sees images, and {len(devices)} GPUs were asked for: images are "
            "encoded beside the layers of one GPU alone; name one GPU"
        )
    if devices:
        form = usual_format(weights.layouts)
        each = [with_device(machine, device, form).devices for device in devices]
        machine = replace(machine, devices=tuple(rates for found in each for rates in found))
    machine = on_numa_nodes(machine, config.numa, options.host_bytes)
    try:
        plan = planned(demand, options, machine, config)
    except BudgetError:
        if not demand.draft_tokens or config.draft_tokens is not None:
            raise
        # The journal of recurrent state is a matter of speed: without it the model may fit.
        demand = demand_without_journal(demand)
        plan = planned(demand, options, machine, config)
    check_physical(plan)
    sizes = weights.layouts, weights.published_bytes
    ranges: Mapping[int, KeyRange] = {}
    if plan.kv_tiers is not None:
        context = min(config.context or plan.kv_tokens, model.spec.max_context)
        ranges = key_ranges(kv_quant, source, model.spec.kv_layers, context)
    return Prepared(
        source, model, *sizes, demand, machine, plan, weights.headless,
        adapters=adapters, ranges=ranges,
    )  # fmt: skip
