"""Outlooks on models: from a folder with weights, or from a configuration alone."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from hmt.contracts.machine import Machine
from hmt.engine.config import EngineConfig
from hmt.engine.loading.demand import demand_of, dtype_for, kv_budgets
from hmt.engine.loading.kv_scales import with_scales
from hmt.engine.loading.model_shapes import read_shape, shape_demand
from hmt.engine.loading.source import open_source
from hmt.formats import is_gguf
from hmt.models import open_model, with_vision
from hmt.planner import Demand
from hmt.planner.cost.expert_hit_rate import HitCurve
from hmt.planner.what_if.scenario import DemandFor, Scenario, ScenarioPlanner
from hmt.quant import parse_scheme
from hmt.weights.pack import looks_like_pack


def scenarios_for(
    model: str, config: EngineConfig, hits: HitCurve | None = None
) -> ScenarioPlanner:
    """Plans of a model that need no weights: of a checkpoint or pack only headers are read.

    model   see `has_weights`; or without weights a folder, a config.json, or a name of
            `shape_names`
    hits    of caches of experts, where a trace tells them; None: as usual
    """
    path = Path(model).expanduser()
    if has_weights(path):
        return ScenarioPlanner(_from_weights(path, config, hits))
    folder = path if path.is_dir() else path.parent
    return ScenarioPlanner(_from_shape(read_shape(model), folder, config, hits))


def has_weights(path: Path) -> bool:
    """Whether there is a checkpoint, a pack or a GGUF file; else a configuration, or nothing."""
    if is_gguf(path):
        return True
    return path.is_dir() and (looks_like_pack(path) or any(path.glob("*.safetensors")))


def scenario_of(
    config: EngineConfig,
    machine: Machine,
    *,
    prompt_tokens: int | None,
    host_bytes: int | None,
    device_bytes: int | None,
) -> Scenario:
    """What `config` asks of `machine`; see Setting for the rest."""
    return Scenario(
        machine=machine,
        scheme=None if config.quantization is None else str(config.quantization),
        users=config.max_batch,
        context=config.context,
        max_prefill_tokens=config.max_prefill_tokens,
        prefetch_distance=0 if config.executor == "plain" else config.prefetch_distance,
        kv=kv_budgets(config),
        prompt_tokens=prompt_tokens,
        host_bytes=host_bytes,
        device_bytes=device_bytes,
    )


def _from_shape(
    shape: Mapping[str, object], folder: Path, config: EngineConfig, hits: HitCurve | None
) -> DemandFor:
    @cache
    def demand(scheme: str | None) -> Demand:
        found = shape_demand(shape, _in_scheme(config, scheme), folder)
        return found if hits is None else replace(found, hits=hits)

    return lambda scheme, users: replace(demand(scheme), batch=users)


def _from_weights(path: Path, config: EngineConfig, hits: HitCurve | None) -> DemandFor:
    source = open_source(path, config.mmproj)
    on_gpu = any(config.gpu_memory_bytes or ())
    model = open_model(source.config, source.path, dtype_for(config, source, on_gpu=on_gpu))
    model = with_vision(model, source.checkpoint, source.tensors)

    @cache
    def demand(scheme: str | None) -> Demand:
        wanted = _in_scheme(config, scheme)
        layouts = source.weights(
            model.spec, wanted.quantization, exact_activations=wanted.activations == "exact"
        ).layouts
        found = demand_of(model, layouts, wanted, with_scales(config.kv_quant, source))
        return found if hits is None else replace(found, hits=hits)

    return lambda scheme, users: replace(demand(scheme), batch=users)


def _in_scheme(config: EngineConfig, scheme: str | None) -> EngineConfig:
    return replace(config, quantization=None if scheme is None else parse_scheme(scheme))
