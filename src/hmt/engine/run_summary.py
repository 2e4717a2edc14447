"""What a run cost: tokens, time, bytes by tier, and which link was the bottleneck."""

from dataclasses import dataclass, field, fields

from hmt.base.units import format_rate
from hmt.contracts.kv import KVAccount
from hmt.contracts.machine import Machine
from hmt.engine.drift.account import DriftAccount
from hmt.engine.experts.ab_gate import ABResult
from hmt.engine.prediction_report import StepPrediction
from hmt.engine.speculation.account import SpeculationAccount
from hmt.memory import PoolStats

_SURPRISE = 1.1  # more than this share of a measured rate means that it was measured badly
_LINKS = {"disk": "the disk", "memory": "memory", "computation": "computation"}
_WAITING = 0.25  # of the time: from here on the disk is what a faster machine would need


@dataclass(slots=True)
class Phase:
    """Sums over the steps of one phase (prompts, or generation).

    seconds                  time in steps, choosing tokens included
    waited_s                 of it, time in which the computation waited for the disk
    disk_s                   time in which the disk had something to read
    converted_s              time that disk workers spent converting blocks to the wanted encoding
    kernel_s                 of `seconds`, time inside compiled kernels; 0 where there are none
    link_s                   time in which weights were on their way to a GPU
    device_s                 of `seconds`, time in which the CPU waited for a GPU before it computed
    disk_bytes               read from the disk while these steps ran
    useful_bytes             of them, bytes of parameters: no padding, no gaps
    host_bytes               bytes of weight blocks that the kernels were given
    link_bytes               of weights that were copied to a GPU
    hits, pending, misses    leases of blocks that do not live in memory
    expert_prefetches, expert_prefetch_hits   experts read on a guess, and those of them that were
                             needed then
    expert_prefetch_wasted_bytes  of predictions that no step needed, less those needed after they
                             had counted
    expert_prefetch_saved_s  time that they saved, as steps with and without them told
    experts, expert_reads    leases of experts that live on the disk, and reads of them
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    disk_s: float = 0.0
    converted_s: float = 0.0
    kernel_s: float = 0.0
    link_s: float = 0.0
    device_s: float = 0.0
    disk_bytes: int = 0
    useful_bytes: int = 0
    host_bytes: int = 0
    link_bytes: int = 0
    hits: int = 0
    pending: int = 0
    misses: int = 0
    expert_prefetches: int = 0
    expert_prefetch_hits: int = 0
    expert_prefetch_wasted_bytes: int = 0
    expert_prefetch_saved_s: float = 0.0
    experts: int = 0
    expert_reads: int = 0

    def since(self, before: "Phase") -> "Phase":
        """What has come since it was as `before`; all of it where it has begun anew meanwhile."""
        if self.steps < before.steps:
            before = Phase()
        return Phase(**{name: getattr(self, name) - getattr(before, name) for name in _TYPES})

    def add(self, cost: "Phase", tokens: int, of_tokens: int) -> None:
        """Add the share of a step's `cost` that `tokens` of its `of_tokens` tokens caused."""
        if not tokens:
            return
        self.tokens += tokens
        self.steps += cost.steps
        for name, kind in _TYPES.items():
            if name not in ("steps", "tokens"):
                caused = getattr(cost, name) * tokens
                share = caused // of_tokens if kind is int else caused / of_tokens
                setattr(self, name, getattr(self, name) + share)

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def host_s(self) -> float | None:
        """Time that was neither kernels nor waiting: Python and torch; None if not counted."""
        return max(0.0, self.seconds - self.waited_s - self.kernel_s) if self.kernel_s else None

    @property
    def overlap(self) -> float | None:
        """Of the shorter of computing and reading, the share that ran beside the longer."""
        computing = self.seconds - self.waited_s
        shorter = min(computing, self.disk_s)
        if shorter <= 0:
            return None
        return min(1.0, max(0.0, (computing + self.disk_s - self.seconds) / shorter))

    @property
    def useful_share(self) -> float | None:
        """Of the bytes that were read, those of parameters; None where nothing was read."""
        return self.useful_bytes / self.disk_bytes if self.disk_bytes else None

    @property
    def hit_rate(self) -> float | None:
        """Share of leases of streamed blocks that had not to wait; None without any."""
        leases = self.hits + self.pending + self.misses
        return self.hits / leases if leases else None

    @property
    def expert_prefetch_hit_rate(self) -> float | None:
        """Share of the experts read on a guess that were needed; None without any."""
        return (
            self.expert_prefetch_hits / self.expert_prefetches if self.expert_prefetches else None
        )


_TYPES = {entry.name: entry.type for entry in fields(Phase)}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What bounded a phase.

    link       "disk", "conversion", "memory" or "computation"
    rate       bytes per second that the link moved
    ceiling    bytes per second that it was measured to move; 0 when unknown
    """

    link: str
    rate: float
    ceiling: float

    @property
    def share(self) -> float | None:
        """rate / ceiling; None when the ceiling is unknown."""
        return self.rate / self.ceiling if self.ceiling else None

    @property
    def text(self) -> str:
        """The same for people."""
        rate, ceiling = format_rate(self.rate), format_rate(self.ceiling)
        if self.link == "conversion":
            return f"converting weights when they are first read (the disk gave {rate})"
        if self.share is None:
            return f"{_LINKS[self.link]}, at {rate} (run hmt probe to learn what it could give)"
        if self.share > _SURPRISE:
            return f"{_LINKS[self.link]}, at {rate}, above its measured {ceiling}: run hmt probe"
        if self.link == "computation":
            return f"computation: memory gave {rate}, {self.share:.0%} of its measured {ceiling}"
        return f"{_LINKS[self.link]}, at {rate}: {self.share:.0%} of its measured {ceiling}"


def bottleneck(phase: Phase, machine: Machine) -> Bottleneck | None:
    """Which link bounded `phase`; None when nothing was computed.

    The disk, where the computation waited for it for a quarter of the time; or the conversion of
    what had been read, where that took most of the waiting.  Else memory, where
    the kernels read at half of its rate or more.  Else the computation itself (the rate is then
    still memory's, to show how far away it is).
    """
    if not phase.seconds:
        return None
    if phase.waited_s > _WAITING * phase.seconds:
        link = "conversion" if phase.converted_s > phase.waited_s / 2 else "disk"
        return Bottleneck(link, phase.disk_bytes / phase.seconds, machine.disk_read_rate)
    busy = phase.seconds - phase.waited_s
    rate = phase.host_bytes / busy
    near = machine.cpu.read_rate and rate >= 0.5 * machine.cpu.read_rate
    return Bottleneck("memory" if near else "computation", rate, machine.cpu.read_rate)


@dataclass(frozen=True, slots=True)
class ExpertAccount:
    """Who computed the experts that steps of few tokens needed, since the load.

    found    on a GPU, which had them already
    brought  on it, over the link
    left     to the CPU, wholly or but for a part
    nbytes   of one
    cut      such parts, which came over the link, as whole ones
    """

    found: int
    brought: int
    left: int
    nbytes: int
    cut: float = 0.0

    @property
    def needed(self) -> int:
        """All of them."""
        return self.found + self.brought + self.left


@dataclass(frozen=True, slots=True)
class DeviceAccount:
    """What a model has on a GPU.

    budget_bytes      that HMT may take, without the driver's share
    used_bytes        by purpose, of the budget
    resident_bytes    of weights that stay there
    copied_bytes      of weights that are copied there in every step
    experts           where a layer's experts are shared out; None where they are not
    """

    name: str
    budget_bytes: int
    used_bytes: dict[str, int]
    resident_bytes: int
    copied_bytes: int
    experts: ExpertAccount | None = None


@dataclass(frozen=True, slots=True)
class RankAccount:
    """Another process that computes a model with this one.

    number    of the rank; this process is 0
    failure   why no step can be computed any more; "" while steps can
    """

    number: int
    pid: int
    alive: bool
    failure: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run's account.

    published_bytes       the checkpoint's weights as published
    budget_bytes          the host memory that was allowed
    used_bytes            by purpose, of the budget
    resident_bytes, streamed_bytes   weights by home, in memory form
    expert_prefetch_gain  what the last trial of guesses found; None where there was none
    peak_rss_bytes        largest resident size of the process, as the kernel counted it
    pools                 how full and how fragmented the pools of host memory are now
    device                the GPU's part; None without one
    prefixes              what was shared with earlier sequences, as hmt.kvcache.prefix counts
                          it; None without a prefix cache
    kv                    a KV cache over several tiers; None where all lies where layers compute
    predicted             what the plan predicted of the steps that were computed
    speculation           what guesses of next tokens gave
    drift                 requests whose activations left those of calibration; None: not watched
    ranks                 other processes that compute the model; empty where this one does alone
    """

    prompt: Phase
    generation: Phase
    machine: Machine
    published_bytes: int
    budget_bytes: int
    used_bytes: dict[str, int]
    resident_bytes: int
    streamed_bytes: int
    peak_rss_bytes: int
    pools: tuple[PoolStats, ...] = ()
    notes: tuple[str, ...] = field(default=())
    expert_prefetch_gain: ABResult | None = None
    device: DeviceAccount | None = None
    kv: KVAccount | None = None
    prefixes: dict[str, int] | None = None
    predicted: StepPrediction | None = None
    speculation: SpeculationAccount = field(default_factory=SpeculationAccount)
    drift: DriftAccount | None = None
    ranks: tuple[RankAccount, ...] = ()

    @property
    def bottleneck(self) -> Bottleneck | None:
        """Of the generation; of the prompt when nothing was generated."""
        phase = self.generation if self.generation.tokens else self.prompt
        return bottleneck(phase, self.machine)
