"""Which steps of a plan a device captures, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import Packing
from hmt.contracts.model import KVKind, Model, ModelSpec
from hmt.contracts.plan import Plan, Tier
from hmt.contracts.sharding import Collective
from hmt.contracts.store import Weights
from hmt.engine.execution.graphs.following import FollowingGraphRunner
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.engine.execution.graphs.split_runner import SplitGraphRunner
from hmt.engine.loading.device import OnDevice
from hmt.kernels import graph_ops
from hmt.kvcache import AnyKV, GraphKVCache, PagedKV, SplitKVCache, TieredKV
from hmt.memory.device import Device
from hmt.weights import BlockLayout, SplitWeights

# Tokens of a step for which the device asks the CPU for experts while it runs.
_MAX_PROMPT_LOGIT_ROWS = 32
# What captured steps read nothing of, or in front of what is captured.
_OUTSIDE = (BlockKind.EMBEDDING, BlockKind.VISION)
_RANKS_OF_EXPERTS = "several processes have experts, which each looks up by itself"
_RANKS = "several processes compute each layer, and this one has not all its weights on the GPU"


def captures_of(
    model: Model,
    weights: Weights,
    plan: Plan,
    on_devices: Sequence[OnDevice],
    kv: AnyKV,
    rows: int,
    layouts: Mapping[BlockId, BlockLayout],
    collective: Collective | None = None,
) -> GraphRunner | SplitGraphRunner | str | None:
    """What captures steps, or why nothing does, for people; None without a device.

    collective   of ranks that compute each layer together
    """
    if len(on_devices) > 1:
        return open_split_graphs(model, weights, plan, on_devices, kv, rows, layouts)
    if not on_devices:
        return None
    return open_graphs(
        model, weights, plan, on_devices[0], kv, rows, layouts, collective=collective
    )


def open_graphs(
    model: Model,
    weights: Weights,
    plan: Plan,
    on_device: OnDevice,
    kv: AnyKV,
    rows: int,
    layouts: Mapping[BlockId, BlockLayout],
    layers: range | None = None,
    collective: Collective | None = None,
) -> GraphRunner | str:
    """Captured steps, where all but embedding, head and experts is on the device.

    Experts may be elsewhere if the device can ask for them.  So may feed-forward networks of a
    model without experts, and KV pages of one whose experts are on the device.  Recurrent state is
    where its layers are.  Otherwise what prevents capturing, for people.

    rows     tokens of a step, at most
    layers   the row of them that `plan` is of; None: all
    """
    exact = _exact_batches(model.spec, layouts)
    runner = GraphRunner if model.spec.has_head else FollowingGraphRunner
    captured = partial(runner, exact_batches=exact, layers=layers, collective=collective)
    own, device = on_device.weights, on_device.device
    if model.spec.uncaptured:
        return model.spec.uncaptured
    if not graph_ops.has_kernels(device.where):
        return f"{device.name} computes in plain torch"
    seldom: tuple[BlockKind, ...] = (*_OUTSIDE, BlockKind.EXPERT)
    stages = range(model.spec.layers + 1) if layers is None else layers
    host_ffn = _leaves_only_networks(plan, stages)
    head = layers is None or layers.stop == model.spec.layers
    head &= model.spec.has_head
    head &= all(home is Tier.DEVICE for b, home in plan.homes.items() if b.kind is BlockKind.HEAD)
    seldom += () if head else (BlockKind.HEAD,)
    homes = {home for block, home in plan.homes.items() if block.kind not in seldom}
    if collective is not None and (homes != {Tier.DEVICE} or model.spec.experts_per_token):
        return _RANKS if homes != {Tier.DEVICE} else _RANKS_OF_EXPERTS
    if homes != {Tier.DEVICE} and not host_ffn:
        return "attention of some layers is not on the GPU"
    if isinstance(kv, TieredKV):
        homes = {home for b, home in plan.homes.items() if b.kind not in _OUTSIDE}
        if not (homes == {Tier.DEVICE} or host_ffn):
            return "experts are not on the GPU, and neither are all KV pages"
        there = homes == {Tier.DEVICE}
        return captured(model, own, GraphKVCache(kv, device), device, host_ffn=not there)
    if not isinstance(kv, PagedKV):
        return "the CPU computes some layers"
    if homes != {Tier.DEVICE}:
        return captured(model, own, kv, device, host_ffn=True, head=head)
    experts = [block for block in plan.homes if block.kind is BlockKind.EXPERT]
    away = {b.layer for b in experts if plan.homes[b] is not Tier.DEVICE}
    if experts and weights is not own:
        return "what routers choose is recorded"
    if not away:
        return captured(model, own, kv, device, head=head)
    if any(weights.moe_backend(layer) is None for layer in away):
        return "the CPU is not asked for experts of some layers"
    channel = own.open_channel(
        tokens=min(rows, _MAX_PROMPT_LOGIT_ROWS),
        hidden=_expert_width(model),
        top_k=model.spec.experts_per_token,
        dtype=model.dtype,
    )
    if channel is None:
        return "the GPU cannot ask the CPU for experts"
    return captured(model, own, kv, device, channel, head=head)


def open_split_graphs(
    model: Model,
    weights: Weights,
    plan: Plan,
    on_devices: Sequence[OnDevice],
    kv: AnyKV,
    rows: int,
    layouts: Mapping[BlockId, BlockLayout],
) -> SplitGraphRunner | str:
    """The same of layers on several devices: each row as if it were alone.

    weights   those of all rows
    """
    spec, devices = model.spec, plan.stage_devices
    if any(devices.get(at) != devices.get(of) for at, of in spec.kv_sources.items()):
        return "layers on several GPUs share a KV cache"
    if not isinstance(kv, SplitKVCache) or not kv.is_on_devices:
        return "the CPU computes some layers"
    if not isinstance(weights, SplitWeights):
        return "what routers choose is recorded"
    opened = list[tuple[Device, GraphRunner]]()
    for there, share in zip(on_devices, plan.devices, strict=True):
        stages = sorted(share.stages - {spec.layers})
        layers, last = range(stages[0], stages[-1] + 1), there is on_devices[-1]
        homes = {
            block: home
            for block, home in plan.homes.items()
            if block.layer in layers or (last and block.kind is BlockKind.HEAD)
        }
        own = replace(plan, homes=homes, devices=(share,))
        part = open_graphs(
            model, there.weights, own, there, kv.parts[share.index], rows, layouts, layers
        )
        if isinstance(part, str):
            return part
        opened.append((there.device, part))
    embeds = not on_devices[0].weights.looks_up_tokens and weights.looks_up_tokens
    return SplitGraphRunner(model, weights, opened, embeds=embeds)


def _expert_width(model: Model) -> int:
    """Numbers that experts take of a token, and give."""
    experts = (block for block in model.spec.blocks if block.id.kind is BlockKind.EXPERT)
    outputs = (p.shape[0] for block in experts for p in block.params if p.name == "down_proj")
    return next(outputs, model.spec.hidden_size)


def _leaves_only_networks(plan: Plan, stages: range) -> bool:
    """Whether steps of `plan` leave nothing but feed-forward networks in memory to the CPU.

    stages   layers and perhaps the head that the device must compute for it
    """
    away = {(block.kind, home) for block, home in plan.homes.items() if home is not Tier.DEVICE}
    known = {
        (BlockKind.FFN, Tier.HOST),
        (BlockKind.EMBEDDING, Tier.HOST),
        (BlockKind.EMBEDDING, Tier.DISK),
        (BlockKind.VISION, Tier.DISK),
    }
    return away <= known and plan.device.stages >= set(stages)


def _exact_batches(spec: ModelSpec, layouts: Mapping[BlockId, BlockLayout]) -> bool:
    """Whether GPU kernels give a token's products the same bits in steps of 1 to 16 tokens.

    Those of ggml's blocks with activations rounded to int8 do.  Those of experts and of latents do
    not.
    """
    latent = any(layer is not None and layer.kind is KVKind.LATENT for layer in spec.kv)
    if spec.experts_per_token or latent:
        return False
    formats = (
        placed.format
        for block, layout in layouts.items()
        if block.kind is not BlockKind.EMBEDDING
        for placed in (*layout.placed, *(staged.placed for staged in layout.staged))
        if len(placed.param.spec.shape) == 2
    )
    return all(
        one.encoding.packing is Packing.BLOCKS and one.activations.are_integers for one in formats
    )
