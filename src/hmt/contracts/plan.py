"""The plan: where everything lives, decided before a byte is loaded."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from hmt.contracts.blocks import BlockId
from hmt.contracts.kv import KVTiers


class Tier(enum.StrEnum):
    """Kinds of memory, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A plan's part for one device.

    index        of the device among the machine's
    computes     blocks that compute there: those that live there, and those that are copied there
                 in every step
    computes_prompts   the same in steps of many tokens
    stages       layers whose attention computes there, and with their number the head
    reserved     of the device's budget, by purpose: "resident", "slots", "experts", "kv",
                 "activations", "mapping" (page tables of the host's memory), and where it encodes
                 images "encoder" (slots, taken when the first one comes)
    slot_counts  slots by size in bytes, for blocks that are copied
    expert_slots   of each layer whose experts live in host memory: experts that are cached there
    staging_slots  for experts that are brought for one step, as many as may be in the slots of
                 prompts' experts; 0: the CPU computes all of them
    link_share   of the experts that a step needs and that are not cached, those that are brought
    """

    index: int = 0
    computes: frozenset[BlockId] = frozenset()
    computes_prompts: frozenset[BlockId] = frozenset()
    stages: frozenset[int] = frozenset()
    reserved: Mapping[str, int] = field(default_factory=dict)
    slot_counts: Mapping[int, int] = field(default_factory=dict)
    expert_slots: int = 0
    staging_slots: int = 0
    link_share: float = 0.0


_NO_DEVICE = DevicePlan()


@dataclass(frozen=True, slots=True)
class Plan:
    """Frozen placement.  A pure function of model, machine and options.

    homes               each block's tier
    budgets             bytes that may be used per tier
    reserved            of the host budget, by purpose: "resident" and "slots" (weights), "kv",
                        "activations", "staging", "rows", "prefixes", "images", "adapters"
    prefetch_distance   dense layers that are requested ahead of the one being computed, until the
                        executor has learned better; what slots are sized for
    max_prefill_tokens  prompt tokens per step
    kv_tokens           positions that fit in the KV reservation, over all sequences
    host_bytes_per_token, disk_bytes_per_token   predicted weight bytes that one decoded token reads
    predicted_token_s   predicted seconds of one decoded token before there is any context, or 0
                        when rates are unknown
    slot_counts         slots by size in bytes, for blocks on disk; empty: sizes share the memory
    devices             what each device does that takes part, in the order of their indices
    kv_tiers            where KV pages lie, if not all in one place
    """

    homes: Mapping[BlockId, Tier]
    budgets: Mapping[Tier, int]
    reserved: Mapping[str, int]
    prefetch_distance: int
    max_prefill_tokens: int
    kv_tokens: int
    host_bytes_per_token: float = 0.0
    disk_bytes_per_token: float = 0.0
    predicted_token_s: float = 0.0
    slot_counts: Mapping[int, int] = field(default_factory=dict)
    devices: tuple[DevicePlan, ...] = ()
    kv_tiers: KVTiers | None = None

    @property
    def device(self) -> DevicePlan:
        """What the first device does; nothing where none takes part."""
        return self.devices[0] if self.devices else _NO_DEVICE

    def device_of(self, block: BlockId) -> int | None:
        """The device that computes `block`, in steps of many tokens at least; None: the host."""
        found = (share.index for share in self.devices if block in share.computes_prompts)
        return next(found, None)

    @property
    def stage_devices(self) -> Mapping[int, int]:
        """The devices on which stages begin: layers by index, and with their number the head."""
        return {stage: share.index for share in self.devices for stage in share.stages}

    def blocks_in(self, tier: Tier) -> list[BlockId]:
        """Blocks whose home is `tier`, in model order."""
        return [block for block, home in self.homes.items() if home is tier]
