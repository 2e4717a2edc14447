"""The plan: where everything lives, decided before a byte is loaded."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from hmt.contracts.blocks import BlockId


class Tier(enum.StrEnum):
    """Kinds of memory, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of this machine (rates in bytes per second; 0 means not measured)."""

    name: str
    cores: int
    ram_bytes: int
    ram_read_rate: float
    disk_read_rate: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Frozen placement.  A pure function of model, machine and options.

    homes               each block's tier
    budgets             bytes that may be used per tier
    reserved            of the host budget, by purpose: "resident" and "slots" (weights), "kv",
                        "activations", "staging", "rows", "guesses"
    prefetch_distance   dense layers that are requested ahead of the one being computed, until the
                        executor has learned better; what slots are sized for
    prefill_chunk       prompt tokens per step
    kv_tokens           positions that fit in the KV reservation, over all sequences
    host_bytes_per_token, disk_bytes_per_token   predicted weight bytes that one decoded token reads
    predicted_token_s   predicted seconds of one decoded token, or 0 when rates are unknown
    slot_counts         slots by size in bytes, for blocks on disk; empty: sizes share the memory
    """

    homes: Mapping[BlockId, Tier]
    budgets: Mapping[Tier, int]
    reserved: Mapping[str, int]
    prefetch_distance: int
    prefill_chunk: int
    kv_tokens: int
    host_bytes_per_token: float
    disk_bytes_per_token: float
    predicted_token_s: float
    slot_counts: Mapping[int, int] = field(default_factory=dict)

    def blocks_in(self, tier: Tier) -> list[BlockId]:
        """Blocks whose home is `tier`, in model order."""
        return [block for block, home in self.homes.items() if home is tier]
