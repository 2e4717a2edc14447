"""From a plan to memory: pools, stores, caches, filled with what lives there."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing

from hmt.base import flags
from hmt.base.trace import Tracer
from hmt.contracts.plan import Plan, Tier
from hmt.engine.config import EngineConfig
from hmt.engine.experts.trace_recorder import open_trace
from hmt.engine.images import open_images
from hmt.engine.loading.adapters import open_adapters
from hmt.engine.loading.device import load_on_devices
from hmt.engine.loading.disk import open_copies, spill_file, transfer_queue
from hmt.engine.loading.kv import open_kv
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prefix_cache import open_prefixes
from hmt.engine.loading.prepared import Prepared
from hmt.memory import Account, HostPool, Ledger, keep_freed_activations
from hmt.memory.device import Device
from hmt.weights import WeightStore, open_policy

_NO_POOLS = ("activations", "images", "adapters")  # torch's memory, of which accounts keep count


def allocate(
    prepared: Prepared,
    config: EngineConfig,
    ledger: Ledger,
    tracer: Tracer,
    progress: Callable[[int, int], None] | None = None,
    devices: Sequence[Device] = (),
) -> Memory:
    """Take the memory that the plan reserved and load the blocks that live in it.

    `devices` are those of the machine that the plan is for.

    Whatever `progress` raises ends the loading.  Nothing stays allocated after an error.
    """
    plan, model = prepared.plan, prepared.model
    with ExitStack() as stack:
        accounts = _accounts(plan, ledger, stack)
        _leave_to_torch(accounts["activations"], stack)
        pools = _pools(accounts, prepared)
        for pool in pools.values():
            stack.callback(pool.close)
        spill = spill_file(prepared, config)
        if spill is not None:
            stack.callback(spill.close)
        queue = transfer_queue(config, tracer, prepared.source.path)
        weights = WeightStore(
            prepared.layouts,
            plan.blocks_in(Tier.HOST),
            queue,
            tracer,
            resident=pools["resident"],
            slots=pools["slots"],
            staging=pools["staging"],
            rows=pools["rows"],
            slot_counts=plan.slot_counts,
            policy=open_policy(config.expert_cache_policy),
            spill=spill,
            check=config.check_weights,
            verify=config.verify_reads,
        )
        stack.callback(weights.close)
        weights.load_residents(progress)
        on_devices = load_on_devices(
            devices, plan, model, prepared.layouts, weights, pools["resident"], ledger, stack,
            progress,
        )  # fmt: skip
        drafts, ranges = prepared.demand.draft_tokens, prepared.ranges
        kv = open_kv(model, plan, config, pools["kv"], on_devices, queue, stack, drafts, ranges)
        prefixes = open_prefixes(
            model, prepared.source, config, kv, pools["prefixes"], stack, ranges
        )
        for on_device in reversed(on_devices):  # the first is the current one
            # What this thread does to KV pages and recurrent state between steps (forks, prefixes)
            # comes before the next step then.
            stack.enter_context(on_device.device.compute_stream())
        pools["staging"].trim()  # seldom wanted again: converted blocks are read as they were kept
        images = open_images(prepared, config, accounts, weights, pools["slots"], on_devices, stack)
        adapters = open_adapters(
            prepared.adapters, prepared.source, model, accounts, ledger, on_devices
        )
        stack.callback(adapters.store.close)
        copies = open_copies(prepared, config, ledger, tracer, accounts, stack)
        trace = None
        if (path := config.expert_trace) is not None:
            name, blocks = prepared.source.path.name, prepared.demand.blocks
            trace = stack.enter_context(closing(open_trace(path, name, model.spec, blocks)))
        return Memory(
            weights=weights,
            kv=kv,
            adapters=adapters,
            accounts=list(accounts.values()),
            pools=list(pools.values()),
            closing=stack.pop_all(),
            trace=trace,
            on_devices=on_devices,
            prefixes=prefixes,
            images=images,
            copies=copies,
        )


def _accounts(plan: Plan, ledger: Ledger, stack: ExitStack) -> dict[str, Account]:
    """One for each purpose of the host's memory, as large as the plan says."""
    return {
        purpose: stack.enter_context(closing(ledger.open(Tier.HOST, purpose, nbytes)))
        for purpose, nbytes in plan.reserved.items()
    }


def _leave_to_torch(activations: Account, stack: ExitStack) -> None:
    """Torch allocates activations itself: the account keeps their share from everyone else."""
    activations.charge(activations.limit_bytes)
    stack.callback(activations.release, activations.limit_bytes)
    keep_freed_activations(activations.limit_bytes)


def _pools(accounts: Mapping[str, Account], prepared: Prepared) -> dict[str, HostPool]:
    """A pool for every account but those of torch's memory."""
    homes = prepared.plan.homes
    sizes = {
        tier: {layout.slot_bytes for b, layout in prepared.layouts.items() if homes[b] is tier}
        for tier in (Tier.HOST, Tier.DISK)
    }
    announced = {"resident": sizes[Tier.HOST], "slots": sizes[Tier.DISK]}
    poison = flags.read(flags.POISON) == "on"
    return {
        purpose: HostPool(
            account, announced.get(purpose, ()), poison=poison, packed=purpose == "kv"
        )
        for purpose, account in accounts.items()
        if purpose not in _NO_POOLS
    }
