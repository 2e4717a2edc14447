"""Sizes that the planner and the cache of keys and values agree on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hmt.contracts.model import PAGE_TOKENS

GROUP_PAGES = 16  # what is written to the disk and read from it at once, for each layer
DISK_BUFFERS = 4  # pieces of the disk's pages that are in memory at once


@dataclass(frozen=True, slots=True)
class PinnedPages:
    """Pages of a sequence that never move away: the first `sinks`, and the `recent` last."""

    sinks: int = 1
    recent: int = 4

    @property
    def pages(self) -> int:
        """Of one sequence."""
        return self.sinks + self.recent


@dataclass(frozen=True, slots=True)
class KVTiers:
    """Where KV pages lie, if not all in one place.

    device_pages   of layers without a window, where these compute
    staged_pages   as many more of these there, for what a device fetches from host memory in a step
    host_pages     in host memory
    disk_groups    of `GROUP_PAGES`, on the disk
    ring_pages     of layers with a window, by window
    device_format  how numbers are kept where layers compute: "exact" (in the model's type) or "fp8"
    host_format, disk_format   how numbers are kept there: "exact" (as device_format), "fp8", "int8"
                   or "int4"; disk_format also by a codec's name, and with another one for pages of
                   little attention
    chunk_bytes    read from the disk at once
    """

    device_pages: int
    host_pages: int = 0
    disk_groups: int = 0
    ring_pages: Mapping[int, int] = field(default_factory=dict)
    host_format: str = "exact"
    disk_format: str = "exact"
    chunk_bytes: int = 0
    staged_pages: int = 0
    device_format: str = "exact"

    @property
    def pages(self) -> int:
        """At all levels."""
        return self.device_pages + self.host_pages + self.disk_groups * GROUP_PAGES


@dataclass(slots=True)
class KVAccount:
    """What happened to a KV cache over several tiers, since it was opened.

    capacity            pages that there is room for, by level: "near", "host", "disk"
    used                of them, those that are taken now; filled in when it is looked at
    peak                pages that were there at once
    moved               pages that went from level to level, as "near to host"
    written_back_pages  of those that went to the disk, those of which it had a copy before their
                        room was needed
    stalled_s           in which steps waited for others to be written there
    failed_writes       groups of pages that could not be, and stayed where they were
    low_pages           of those that went to the disk, pages of so little attention that they are
                        kept in fewer bytes there
    disk_bytes          read from the disk for attention
    host_bytes          read by the CPU in host memory for it
    host_s              the time that took, the disk's pages included
    fetched_bytes       read by a device in host memory for attention, while the CPU read the others
    waited_s            in which the CPU waited for what a device asks it, in captured steps
    pages, tokens       of sequences that have ended: what they took, and what they held
    """

    capacity: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    written_back_pages: int = 0
    stalled_s: float = 0.0
    failed_writes: int = 0
    low_pages: int = 0
    disk_bytes: int = 0
    host_bytes: int = 0
    host_s: float = 0.0
    fetched_bytes: int = 0
    waited_s: float = 0.0
    pages: int = 0
    tokens: int = 0

    @property
    def fragmentation(self) -> float | None:
        """Of the positions that ended sequences took, those that held nothing; None without any."""
        return 1 - self.tokens / (self.pages * PAGE_TOKENS) if self.pages else None


def min_device_pages(chunk: int, sequences: int, stay: PinnedPages) -> int:
    """Hot pages that a cache of so many sequences needs at least.

    What they keep, what a step appends (`chunk` tokens, and one of each sequence besides), and a
    group that may move away.
    """
    appended = -(-chunk // PAGE_TOKENS) + 2 * sequences
    return sequences * stay.pages + appended + GROUP_PAGES


def ring_pages(window: int, chunk: int) -> int:
    """Pages that a window takes, when up to `chunk` tokens are appended before they are read."""
    return -(-(window - 1 + chunk) // PAGE_TOKENS) + 1
