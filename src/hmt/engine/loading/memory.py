"""What holds a loaded model's bytes, and what it tells of them."""

import copy
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace

from hmt.contracts.kv import KVAccount
from hmt.contracts.plan import Plan, Tier
from hmt.engine.experts.trace import TraceWriter
from hmt.engine.images import ImageStore
from hmt.engine.loading.adapters import Adapters
from hmt.engine.loading.device import OnDevice
from hmt.engine.loading.prepared import PreparedDraft
from hmt.engine.ranks import RankWorkers
from hmt.engine.run_summary import DeviceAccount, ExpertAccount
from hmt.kvcache import AnyKV, SplitKVCache, TieredKV
from hmt.kvcache.prefix import PrefixCache
from hmt.memory import Account, HostPool, PoolStats
from hmt.weights import DeviceWeights, SplitWeights, WeightStore


@dataclass(slots=True)
class Memory:
    """Everything that holds a model's bytes while it is loaded."""

    weights: WeightStore
    kv: AnyKV
    adapters: Adapters
    accounts: list[Account]
    pools: list[HostPool]
    closing: ExitStack
    trace: TraceWriter | None = None
    on_devices: tuple[OnDevice, ...] = ()
    prefixes: PrefixCache | None = None
    draft: "LoadedDraft | None" = None
    images: ImageStore | None = None
    copies: WeightStore | None = None
    ranks: RankWorkers | None = None

    @property
    def on_device(self) -> OnDevice | None:
        """What the model has on the first device that takes part; None without one."""
        return self.on_devices[0] if self.on_devices else None

    def layer_weights(self, plan: Plan) -> WeightStore | DeviceWeights | SplitWeights:
        """Those that layers compute with, wherever they do."""
        if len(self.on_devices) > 1:
            members = {there.index: (there.weights, there.device) for there in self.on_devices}
            return SplitWeights(self.weights, members, plan)
        return self.weights if self.on_device is None else self.on_device.weights

    def used_bytes(self) -> dict[str, int]:
        """Bytes of host memory in use now, by purpose; those of a small model are "draft"."""
        used = {account.purpose: account.used_bytes for account in self.accounts}
        if self.draft is not None:
            used["draft"] = sum(self.draft.memory.used_bytes().values())
        return used

    def pool_stats(self) -> tuple[PoolStats, ...]:
        """What the pools that may hold anything hold now."""
        return tuple(pool.stats() for pool in self.pools if pool.account.limit_bytes)

    def kv_account(self) -> KVAccount | None:
        """Of a KV cache over several tiers; None where all of it lies where layers compute."""
        kv = self.kv.there if isinstance(self.kv, SplitKVCache) else self.kv
        return (
            replace(copy.deepcopy(kv.account), used=kv.held()) if isinstance(kv, TieredKV) else None
        )

    def device_account(self, plan: Plan) -> DeviceAccount | None:
        """The GPU's part, or that of several together; None without one."""
        if self.on_device is None:
            return None
        computed = (block for share in plan.devices for block in share.computes)
        sizes = {b: self.weights.slot_bytes(b) for b in computed}
        stays = sum(nbytes for b, nbytes in sizes.items() if plan.homes[b] is Tier.DEVICE)
        return DeviceAccount(
            name=" + ".join(there.device.name for there in self.on_devices),
            budget_bytes=plan.budgets[Tier.DEVICE]
            + (0 if self.draft is None else self.draft.device_bytes),
            used_bytes=self._used_on_device(),
            resident_bytes=stays,
            copied_bytes=sum(sizes.values()) - stays,
            experts=self._expert_account(),
        )

    def _used_on_device(self) -> dict[str, int]:
        """As `used_bytes`, of the devices' memory."""
        used = Counter[str]()
        for account in (account for there in self.on_devices for account in there.accounts):
            used[account.purpose] += account.used_bytes
        if self.draft is not None and (there := self.draft.memory.on_device) is not None:
            used["draft"] = sum(account.used_bytes for account in there.accounts)
        return dict(used)

    def _expert_account(self) -> ExpertAccount | None:
        backends = [there.weights.moe_backends for there in self.on_devices]
        counted = [counts for each in backends if (counts := each.counts()) is not None]
        if not counted:
            return None
        found, brought, left, cut = map(sum, zip(*counted, strict=True))
        return ExpertAccount(found, brought, left, max(each.nbytes for each in backends), cut)

    def close(self) -> None:
        """Free it all."""
        if self.ranks is not None:
            self.ranks.close()
        if self.draft is not None:
            self.draft.memory.close()
        self.closing.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft(PreparedDraft):
    """A draft model with its memory."""

    memory: Memory
