"""A GPU's part of loading: its memory, the weights that live there, and its KV pages."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.log import logger
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockId
from hmt.contracts.model import Model
from hmt.contracts.plan import DevicePlan, Plan, Tier
from hmt.engine.config import EngineConfig
from hmt.hardware.machine import driver_bytes
from hmt.memory import Account, HostPool, Ledger
from hmt.memory.device import Device, DevicePool, open_device
from hmt.weights import BlockLayout, DeviceWeights, WeightStore

# Of what a limit leaves: kernels' code, graphs, and what lies between torch's own buffers took
# 89 MB of 16 GiB with a Llama of 70 billion parameters.
_OURS = 0.99
_SHARE_OF_FREE = 0.9  # of a GPU's memory, when no limit is given


def open_devices(config: EngineConfig) -> tuple[Device, ...]:
    """The GPUs that `config` asks for.  Raises MachineError where one cannot be used.

    Raises ConfigError where memory is given for another number of GPUs, or `check_several` does.
    """
    if not config.on_gpu:
        return ()
    names, sizes = config.gpus or ("0",), config.gpu_memory_bytes or ()
    if len(sizes) > 1 and len(sizes) != len(names):
        raise ConfigError(
            f"gpu_memory has {len(sizes)} sizes, and {len(names)} GPUs are asked for "
            f"({', '.join(names)}): give one size for each, or one for all"
        )
    if len(names) > 1:
        check_several(config)
    return tuple(map(open_device, names))


def device_budgets(devices: Sequence[Device], config: EngineConfig) -> tuple[int, ...]:
    """What is left of each GPU's memory for weights, KV and activations.  Raises BudgetError."""
    sizes = config.gpu_memory_bytes or (None,)
    each = sizes if len(sizes) == len(devices) else sizes * len(devices)
    return tuple(map(device_budget, devices, each))


def device_budget(device: Device, limit_bytes: int | None) -> int:
    """The same of one GPU, of whose memory `limit_bytes` may be taken; None: 90% of what is free.

    Raises BudgetError.
    """
    device.empty_cache()  # of what others in this process have computed
    used, free = device.used_bytes(), device.free_bytes()
    # The driver loads kernels when they are first called: 200 MiB of an H200 come after this.
    more = max(0, driver_bytes(device.name) - (used - device.reserved_bytes()))
    taken, free = used + more, free - more
    if limit_bytes is None:
        return int(free * _SHARE_OF_FREE)
    if limit_bytes <= taken:
        raise BudgetError(
            f"--gpu-memory {format_bytes(limit_bytes)} is less than the driver takes for any "
            f"program on {device.name} ({format_bytes(taken)}); give more, or 0 for the CPU alone"
        )
    return min(int((limit_bytes - taken) * _OURS), free)


def check_several(config: EngineConfig) -> None:
    """Raise ConfigError for options that several GPUs do not have yet."""
    refused = {
        "goal": config.goal is not None,
        "profile": config.profile is not None,
        "kv_gpu_memory": config.kv_gpu_memory_bytes is not None,
        "speculate": config.speculate.startswith(("mtp", "draft")),
    }
    reasons = {
        "goal": "the search for a plan chooses for one GPU",
        "profile": "a profile says what one GPU gets",
        "kv_gpu_memory": "keys and values that do not fit leave one GPU alone",
        "speculate": "a draft model computes beside a model on one GPU",
    }
    for name, given in refused.items():
        if given:
            raise ConfigError(
                f"{name} and gpus={','.join(config.gpus or ())} were asked for, and "
                f"{reasons[name]}: leave {name} out, or name one GPU"
            )


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What a model has on a device.

    index          of the device among the machine's
    host_is_pinned whether its kernels and copies find host memory pinned
    """

    index: int
    device: Device
    weights: DeviceWeights
    kv_pool: DevicePool
    accounts: list[Account]
    host_is_pinned: bool = False


def load_on_devices(
    devices: Sequence[Device],
    plan: Plan,
    model: Model,
    layouts: dict[BlockId, BlockLayout],
    store: WeightStore,
    host: HostPool,
    ledger: Ledger,
    stack: ExitStack,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[OnDevice, ...]:
    """`load_on_device` for each device that has a part in the plan: a search may leave any."""
    found: tuple[OnDevice, ...] = ()
    for share in (share for share in plan.devices if share.stages):
        pinned = found[0].host_is_pinned if found else None
        there = load_on_device(
            devices[share.index], plan, share, model, layouts, store, host, ledger, stack, progress,
            pinned,
        )  # fmt: skip
        found += (there,)
    return found


def load_on_device(
    device: Device,
    plan: Plan,
    share: DevicePlan,
    model: Model,
    layouts: dict[BlockId, BlockLayout],
    store: WeightStore,
    host: HostPool,
    ledger: Ledger,
    stack: ExitStack,
    progress: Callable[[int, int], None] | None = None,
    pinned: bool | None = None,
) -> OnDevice:
    """Take the device's memory that the plan reserved, and load the blocks that live there.

    `share` is the part of the plan for this device.
    `host` holds the resident blocks that are copied in every step; `pinned` says whether another
    device has pinned it, None: none has tried.  What is taken is given back by `stack`.

    Raises BudgetError, and what reading raises.
    """
    accounts = {}  # that of an encoder of images is used when the first one comes
    for purpose, nbytes in share.reserved.items():
        accounts[purpose] = ledger.open(Tier.DEVICE, purpose, nbytes, share.index)
        stack.callback(accounts[purpose].close)
    for purpose in ("activations", "mapping"):  # torch and the driver allocate these themselves
        account = accounts[purpose]
        account.charge(account.limit_bytes)
        stack.callback(account.release, account.limit_bytes)
    stack.callback(device.close)
    names = ("resident", "slots", "experts", "kv")
    pools = {name: DevicePool(device, accounts[name]) for name in names}
    for pool in pools.values():
        stack.callback(pool.close)
    weights = DeviceWeights(
        store, layouts, plan, share, device, resident=pools["resident"], slots=pools["slots"]
    )
    stack.callback(weights.close)
    with device.compute_stream(), torch.inference_mode():
        weights.load_residents(progress)
    if pinned is None:
        pinned = bool(host.account.used_bytes) and pin_pool(device, host, stack)
    with device.compute_stream(), torch.inference_mode():
        weights.form_backends(pools["experts"], host_is_pinned=pinned)
        weights.find_tokens(host_is_pinned=pinned)
    return OnDevice(share.index, device, weights, pools["kv"], list(accounts.values()), pinned)


def pin_pool(device: Device, host: HostPool, stack: ExitStack) -> bool:
    """Pin a pool's memory, so that copies run beside the CPU and at the link's full rate.

    Kernels can read and write what is pinned, too.  False where the system refuses.
    """
    pinned: list[torch.Tensor] = []

    def unpin() -> None:
        while pinned:
            device.unpin(pinned.pop())

    pieces = [torch.frombuffer(piece, dtype=torch.uint8) for piece in host.pin(unpin)]
    stack.callback(unpin)
    for memory in pieces:
        if not device.pin(memory):
            unpin()
            logger.warning(
                "the system refuses to pin %s of host memory (ulimit -l): copies to the GPU will "
                "be slower",
                format_bytes(memory.nbytes),
            )
            return False
        pinned.append(memory)
    return bool(pinned)
