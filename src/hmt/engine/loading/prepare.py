"""From a folder to a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hmt.base.errors import BudgetError, ConfigError
from hmt.contracts.model import Model
from hmt.engine.config import EngineConfig
from hmt.engine.loading.adapters import adapter_bytes, named_adapters
from hmt.engine.loading.copies import copies_within
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
from hmt.engine.loading.prepared import Prepared
from hmt.engine.loading.source import Divided, Source, open_source
from hmt.hardware.machine import machine_for, with_device
from hmt.kvcache import KeyRange
from hmt.memory.device import Device
from hmt.models import MixtureOfRecursions, open_model, with_vision
from hmt.planner import PlanOptions
from hmt.planner.placement.numa import on_numa_nodes


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
        own = _prepare_rank(source, model, config, host_bytes, devices, device_bytes, rank=rank)
        others = range(config.ranks // config.pp, config.ranks, config.ranks // config.pp)
        if rank or config.context is not None or not others:
            return own
        # Stages differ in layers, and so in what they have room for: all keep the same positions.
        plans = [
            _prepare_rank(source, model, config, None, devices, device_bytes, rank=other).plan
            for other in others
        ]
        context = min(plan.kv_tokens for plan in (own.plan, *plans))
        if context == own.plan.kv_tokens:
            return own
        config = replace(config, context=context)
        return _prepare_rank(source, model, config, host_bytes, devices, device_bytes, rank=rank)
    copies, left = None, host_bytes
    if config.fallback_model is not None:
        copies, left = copies_within(config, model, host_bytes, on_cpu=not device_bytes)
    prepared = prepare_model(source, model, config, left, devices, device_bytes)
    return replace(prepared, copies=copies)


def _prepare_rank(
    source: Source,
    whole: Model,
    config: EngineConfig,
    host_bytes: int | None,
    devices: Sequence[Device],
    device_bytes: Sequence[int],
    *,
    rank: int,
) -> Prepared:
    """`prepare` for one of the processes that compute a model."""
    model, divided = divide(source, whole, config, rank)
    if divided.share.stages > 1 and whole.spec.state_bytes:  # see ModelRunner.verifies
        config = replace(config, draft_tokens=0)
    own = prepare_model(source, model, config, host_bytes, devices, device_bytes, divided)
    return replace(own, divided=divided)


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
