"""Loading's part for keys and values: each layer's where it computes, or at several levels."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from hmt.contracts.model import KVLayer, Model
from hmt.contracts.plan import Plan
from hmt.engine.config import EngineConfig
from hmt.engine.device_loading import OnDevice
from hmt.kvcache import AnyKV, PagedKV, PlacedKV, TieredKV, open_tiered
from hmt.kvcache.prefix import SharingKV, SharingPagedKV
from hmt.memory import HostPool, TransferQueue


def open_kv(
    model: Model,
    plan: Plan,
    config: EngineConfig,
    host: HostPool,
    on_device: OnDevice | None,
    queue: TransferQueue,
    stack: ExitStack,
) -> AnyKV:
    """Keys and values, each layer's where it computes, and by the plan's levels beside that.

    Layers that compute on the CPU beside a device keep all of theirs in host memory.  What is taken
    is given back by `stack`.  Raises BudgetError, and MachineError where the drive has no room.
    """
    kept = dict(enumerate(model.spec.kv))
    there = {index: layer for index, layer in kept.items() if index in plan.device.stages}
    here = {index: layer for index, layer in kept.items() if index not in there}

    def tiered(layers: Mapping[int, KVLayer], near: Any) -> TieredKV:
        assert plan.kv_levels is not None
        return open_tiered(
            SharingKV if config.prefix_cache else TieredKV,
            layers,
            plan.kv_levels,
            model.dtype,
            near=near,
            host=host,
            folder=config.kv_disk,
            queue=queue,
            order=config.kv_order,
            selection=_selection(config),
            chunk=plan.prefill_chunk,
        )

    paged = SharingPagedKV if config.prefix_cache else PagedKV
    caches: list[PagedKV | TieredKV] = []
    if on_device is None:
        all_here = plan.kv_levels is None
        cache = paged(here, plan.kv_tokens, model.dtype, host) if all_here else tiered(here, host)
        stack.callback(cache.release)
        return cache
    if here:
        caches.append(PagedKV(here, plan.kv_tokens, model.dtype, host))
        stack.callback(caches[-1].release)
    if there:
        pool = on_device.kv_pool
        all_there = plan.kv_levels is None
        caches.append(
            paged(there, plan.kv_tokens, model.dtype, pool) if all_there else tiered(there, pool)
        )
        stack.callback(caches[-1].release)
    return caches[0] if len(caches) == 1 else PlacedKV(caches[0], caches[1], there)


def _selection(config: EngineConfig) -> tuple[str, float] | None:
    """How decoding tokens choose pages, and the share of them; None: they attend to all."""
    return None if config.kv_policy == "exact" else (config.kv_select, config.kv_share)
