"""Loading's part for the KV cache: each layer's where it computes, or over several tiers."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from hmt.contracts.model import Model
from hmt.contracts.plan import Plan
from hmt.engine.config import EngineConfig
from hmt.engine.loading.device import OnDevice, pin_pool
from hmt.engine.loading.prefix_cache import spare_states
from hmt.kvcache import (
    AnyKV,
    KeyRange,
    PagedKV,
    SequenceSlots,
    SplitKVCache,
    StateStore,
    TieredKV,
    open_tiered,
    page_encoding,
)
from hmt.memory import HostPool, ReadQueue
from hmt.memory.device import Device, DevicePool


def open_kv(
    model: Model,
    plan: Plan,
    config: EngineConfig,
    host: HostPool,
    on_devices: Sequence[OnDevice],
    queue: ReadQueue,
    stack: ExitStack,
    drafts: int,
    ranges: Mapping[int, KeyRange],
) -> AnyKV:
    """The KV cache, each layer's where it computes, and in the plan's tiers beside that.

    One allocator serves all of them.  Layers that compute on the CPU beside a device keep all of
    theirs in host memory.  Recurrent state lies where its layers compute; `drafts` of a sequence
    can be taken back from it.  Tiers keep keys as `ranges` say, by layer.  `stack` gives all back.
    Raises BudgetError and MachineError.
    """
    spec, stage_devices = model.spec, plan.stage_devices
    spare = spare_states(model, config)
    slots = SequenceSlots(config.max_batch, 1, spare) if spec.state_bytes else None
    pinned = False
    if on_devices and plan.kv_tiers is not None and plan.kv_tiers.host_pages:
        pinned = pin_pool(on_devices[0].device, host, stack)  # devices write pages back

    caches: dict[int | None, PagedKV | TieredKV] = {}  # by device; None: of layers of the CPU
    encoding = page_encoding(config.kv_quant[0], model.dtype)

    def opened(
        members: Collection[int], pool: HostPool | DevicePool, *, device: Device | None = None
    ) -> PagedKV | TieredKV:
        allocator = next((cache.allocator for cache in caches.values()), None)
        layers = spec.kv_layers_of(members)
        state = None
        if slots is not None:
            state = StateStore(
                spec.state_layers_of(members),
                slots,
                pool,
                inputs={i: n for i, n in spec.state_inputs.items() if i % spec.layers in members},
                drafts=drafts,
                checkpoints=config.prefix_cache,
                chunk=plan.max_prefill_tokens,
            )
        if plan.kv_tiers is None or allocator is not None:
            return PagedKV(layers, plan.kv_tokens, model.dtype, pool, encoding, allocator, state)
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
            device=device,
            pinned=pinned,
            state=state,
            ranges={i: own for i, own in ranges.items() if i in layers},
        )

    here = [index for index in range(spec.layers) if index not in stage_devices]
    if not on_devices:
        caches[None] = opened(here, host)
        stack.callback(caches[None].release)
    for part in on_devices:
        there = [i for i in range(spec.layers) if stage_devices.get(i) == part.index]
        if there:
            caches[part.index] = opened(there, part.kv_pool, device=part.device)
            stack.callback(caches[part.index].release)
    if on_devices and here:
        caches[None] = opened(here, host)
        stack.callback(caches[None].release)
    if len(caches) == 1:
        return caches.popitem()[1]
    return SplitKVCache(caches, spec.by_kv_layer(stage_devices))


def selection_of(config: EngineConfig) -> float | None:
    """The share of pages that decoding tokens attend to; None: to all."""
    return None if config.kv_policy == "exact" else config.kv_share
