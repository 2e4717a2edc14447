"""Loading's part for keys and values: each layer's where it computes, or at several levels."""

from collections.abc import Mapping
from contextlib import ExitStack

from hmt.contracts.model import KVLayer, Model
from hmt.contracts.plan import Plan
from hmt.engine.config import EngineConfig
from hmt.engine.loading.device import OnDevice, pin_pool
from hmt.kvcache import AnyKV, PagedKV, SplitKVCache, TieredKV, open_tiered, page_encoding
from hmt.memory import HostPool, ReadQueue
from hmt.memory.device import DevicePool


def open_kv(
    model: Model,
    plan: Plan,
    config: EngineConfig,
    host: HostPool,
    on_device: OnDevice | None,
    queue: ReadQueue,
    stack: ExitStack,
) -> AnyKV:
    """Keys and values, each layer's where it computes, and by the plan's levels beside that.

    One allocator serves all of them.  Layers that compute on the CPU beside a device keep all of
    theirs in host memory.  What is taken is given back by `stack`.  Raises BudgetError, and
    MachineError where the disk has no room.
    """
    kept = dict(enumerate(model.spec.kv))
    there = {index: layer for index, layer in kept.items() if index in plan.device.stages}
    here = {index: layer for index, layer in kept.items() if index not in there}

    pinned = False
    if on_device is not None and plan.kv_tiers is not None and plan.kv_tiers.host_pages:
        pinned = pin_pool(on_device.device, host, stack)  # pages are written back by the device

    encoding = page_encoding(config.kv_quant[0], model.dtype)

    def opened(layers: Mapping[int, KVLayer], pool: HostPool | DevicePool) -> PagedKV | TieredKV:
        if plan.kv_tiers is None:
            return PagedKV(layers, plan.kv_tokens, model.dtype, pool, encoding)
        return open_tiered(
            layers,
            plan.kv_tiers,
            model.dtype,
            device_pool=pool,
            host=host,
            folder=config.kv_offload_dir,
            queue=queue,
            order=config.kv_eviction,
            selection=selection_of(config),
            chunk=plan.max_prefill_tokens,
            device=None if on_device is None else on_device.device,
            pinned=pinned,
        )

    if on_device is None:
        kv = opened(here, host)
        stack.callback(kv.release)
        return kv
    on_gpu = opened(there, on_device.kv_pool) if there else None
    if on_gpu is not None:
        stack.callback(on_gpu.release)
        if not here:
            return on_gpu
    allocator = None if on_gpu is None else on_gpu.allocator
    in_host = PagedKV(here, plan.kv_tokens, model.dtype, host, encoding, allocator)
    stack.callback(in_host.release)
    return in_host if on_gpu is None else SplitKVCache(in_host, on_gpu, there)


def selection_of(config: EngineConfig) -> float | None:
    """The share of pages that decoding tokens attend to; None: to all."""
    return None if config.kv_policy == "exact" else config.kv_share
