"""How far ahead of the computation to read: learned from what reads and layers take.

A stage is a layer, or last the head; after the last comes the first, for the next token.  Reads of
a stage are requested early enough when the computation until it begins takes longer than they do.
For layers that are all alike that is ceil(transfer / compute * MARGIN) layers ahead; where some are
resident, the time that they compute counts, too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan, Tier
from hmt.planner.cost.expert_hit_rate import REQUESTED_AHEAD
from hmt.weights import BlockLayout, WeightStore

MARGIN = 1.2  # reads are sometimes slower than usual, and layers faster

_KEPT = 0.7  # of a measured time, when the next measurement comes
_CLEAN_PASSES = 8  # without a wait, before what was added for waits is taken back
_NOTICED = 0.02  # of a pass: a wait that is shorter does not count
_LEAST_TOKENS = 32  # of a step that may need nearly all experts


@dataclass(slots=True)
class _Pace:
    """What steps of one size have shown, and the distances that follow from it, by stage."""

    distances: list[int]
    compute_s: list[float | None]  # None: not measured
    extra: int = 0  # stages added because of waits
    clean_passes: int = 0  # since the last wait
    waited_s: float = 0.0  # in this pass
    passed_s: float = 0.0


@dataclass(slots=True)
class PrefetchDistance:
    """Streamed stages to request ahead of each stage: at least one, as many as there is room for.

    read_bytes   by stage, what comes from the disk; 0 for a stage that is resident
    slot_bytes   by stage, the memory that it takes
    room_bytes   memory for a stage and those ahead of it
    first        the distance while nothing has been measured
    rate         bytes per second of the disk; 0: unknown

    Steps of different sizes compute at different paces, so what is measured is kept by size: by the
    power of two of a step's tokens.
    """

    read_bytes: Sequence[int]
    slot_bytes: Sequence[int]
    room_bytes: int
    first: int
    rate: float = 0.0
    _following: list[list[int]] = field(init=False)
    _fits: list[int] = field(init=False)
    _paces: dict[int, _Pace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stages = range(len(self.read_bytes))
        self._following = [self._streamed_after(stage) for stage in stages]
        self._fits = [self._fitting(stage) for stage in stages]

    def of(self, stage: int, tokens: int) -> int:
        """How many of the streamed stages after `stage` to request, in a step of `tokens`."""
        return self._pace(tokens).distances[stage]

    def stage_took(self, stage: int, tokens: int, compute_s: float, waited_s: float) -> None:
        """A stage of a step of `tokens` computed for `compute_s`, and waited besides."""
        pace = self._pace(tokens)
        pace.compute_s[stage] = _blend(pace.compute_s[stage], compute_s)
        pace.waited_s += waited_s if self.read_bytes[stage] else 0.0
        pace.passed_s += compute_s + waited_s

    def pass_ended(self, tokens: int) -> None:
        """All stages have been computed once: learn from what that took."""
        pace = self._pace(tokens)
        if pace.waited_s > _NOTICED * pace.passed_s:
            pace.clean_passes = 0
            if any(map(int.__lt__, pace.distances, self._fits)):
                pace.extra += 1
        else:
            pace.clean_passes += 1
            if pace.extra and pace.clean_passes % _CLEAN_PASSES == 0:
                pace.extra -= 1
        pace.waited_s = pace.passed_s = 0.0
        pace.distances = self._distances(pace)

    def disk_gave(self, nbytes: int, busy_s: float) -> None:
        """The disk read `nbytes` in `busy_s` seconds in which it had something to read."""
        if nbytes > 0 and busy_s > 0:
            self.rate = _blend(self.rate or None, nbytes / busy_s)

    def _pace(self, tokens: int) -> _Pace:
        size = tokens.bit_length()
        if size not in self._paces:
            pace = self._paces[size] = _Pace([], [None] * len(self.read_bytes))
            pace.distances = self._distances(pace)
        return self._paces[size]

    def _distances(self, pace: _Pace) -> list[int]:
        distances = []
        for stage, (following, fits) in enumerate(zip(self._following, self._fits, strict=True)):
            wanted = self._wanted(stage, pace) + pace.extra
            distances.append(max(min(1, len(following)), min(wanted, fits)))
        return distances

    def _wanted(self, stage: int, pace: _Pace) -> int:
        """The first stage that is far enough ahead to be read in time."""
        until_s, at, count = 0.0, stage, len(self.read_bytes)
        for distance, ahead in enumerate(self._following[stage], 1):
            while at != ahead:
                compute_s = pace.compute_s[at]
                if compute_s is None or not self.rate:
                    return self.first
                until_s, at = until_s + compute_s, (at + 1) % count
            if until_s >= MARGIN * self.read_bytes[ahead] / self.rate:
                return distance
        return len(self._following[stage])

    def _streamed_after(self, stage: int) -> list[int]:
        """The other streamed stages, in the order in which they will be computed."""
        count = len(self.read_bytes)
        around = [(stage + n) % count for n in range(1, count)]
        return [ahead for ahead in around if self.read_bytes[ahead]]

    def _fitting(self, stage: int) -> int:
        """How many of them there is room for beside `stage`."""
        room = self.room_bytes - self.slot_bytes[stage]
        for distance, ahead in enumerate(self._following[stage]):
            room -= self.slot_bytes[ahead]
            if room < 0:
                return distance
        return len(self._following[stage])


class ReadAhead:
    """The blocks to request when a stage begins, at a distance that is given or learned."""

    def __init__(
        self,
        stages: Sequence[Sequence[BlockId]],
        distance: int | PrefetchDistance,
        *,
        experts: Sequence[Sequence[BlockId]] = (),
        used: Callable[[], int] = lambda: 0,
        waited_s: Callable[[], float] = lambda: 0.0,
        disk: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """What is learned comes from running totals.

        experts   by layer, those that are read from the disk.  Where steps of a size have needed
                  nearly all of them, they are asked for ahead, a layer at a time
        used      of them, once for each layer and step
        waited_s  seconds that the computation waited for blocks
        disk      bytes read, and seconds in which something was being read
        """
        self._stages = stages
        self._experts, self._used = experts, used
        self._share: dict[int, float] = {}  # of experts that steps have used, by size
        self._last_used = used()
        self._distance = distance
        self._waited_s = waited_s
        self._disk = disk
        self._clock = clock
        self._known: dict[tuple[int, int, bool], list[BlockId]] = {}
        self._tokens = 1
        self._last = (0.0, 0.0)  # clock and waits when the last stage ended
        self._last_disk = disk()

    def step_begins(self, tokens: int) -> None:
        """A step of `tokens` tokens begins."""
        self._tokens, self._last_used = tokens, self._used()
        self._last = (self._clock(), self._waited_s())

    @property
    def asks_for_experts(self) -> bool:
        """Whether this step needs nearly all of those that there are."""
        return self._share.get(self._tokens.bit_length(), 0.0) >= REQUESTED_AHEAD

    def blocks(self, stage: int) -> list[BlockId]:
        """What to request when `stage` begins: its own blocks, and those of the stages ahead."""
        if isinstance(self._distance, PrefetchDistance):
            distance = self._distance.of(stage, self._tokens)
        else:
            distance = self._distance
        key = (stage, distance, self.asks_for_experts)
        if key not in self._known:
            count = len(self._stages)
            around = [self._stages[(stage + n) % count] for n in range(1, count)]
            ahead = [blocks for blocks in around if blocks][:distance]
            own, following = self._experts_of(stage), self._experts_of(stage + 1)
            dense = [block for blocks in ahead for block in blocks]
            self._known[key] = [*self._stages[stage], *own, *dense, *following]
        return self._known[key]

    def _experts_of(self, stage: int) -> Sequence[BlockId]:
        return self._experts[stage] if self.asks_for_experts and stage < len(self._experts) else ()

    def stage_ends(self, stage: int) -> None:
        """`stage` has been computed; what was before it in this step counts with it."""
        if isinstance(self._distance, PrefetchDistance):
            now = (self._clock(), self._waited_s())
            seconds, waited_s = now[0] - self._last[0], now[1] - self._last[1]
            self._distance.stage_took(stage, self._tokens, max(0.0, seconds - waited_s), waited_s)
            self._last = now

    def step_ends(self) -> None:
        """All stages of the step have been computed."""
        if isinstance(self._distance, PrefetchDistance):
            (nbytes, busy_s), before = self._disk(), self._last_disk
            self._distance.disk_gave(nbytes - before[0], busy_s - before[1])
            self._last_disk = nbytes, busy_s
            self._distance.pass_ended(self._tokens)
        if self._experts and self._tokens >= _LEAST_TOKENS:
            size, used = self._tokens.bit_length(), self._used() - self._last_used
            share = used / max(1, sum(map(len, self._experts)))
            self._share[size] = _blend(self._share.get(size), share)


def streamed_stages(model: Model, plan: Plan) -> list[list[BlockId]]:
    """For each layer, and last for the head: blocks that every token reads from the disk."""
    spec = model.spec
    stages = [list(model.layer_blocks(index)) for index in range(spec.layers)]
    stages.append([block.id for block in spec.blocks if block.id.kind is BlockKind.HEAD])
    return [[b for b in stage if plan.homes[b] is Tier.DISK] for stage in stages]


def streamed_experts(model: Model, plan: Plan) -> list[list[BlockId]]:
    """For each layer those of its experts that are read from the disk."""
    found: list[list[BlockId]] = [[] for _ in range(model.spec.layers)]
    for block in model.spec.blocks:
        if block.id.kind is BlockKind.EXPERT and plan.homes[block.id] is Tier.DISK:
            found[block.id.layer].append(block.id)
    return found


def read_ahead(
    model: Model,
    plan: Plan,
    layouts: Mapping[BlockId, BlockLayout],
    store: WeightStore,
    given: int | None,
    rate: float,
) -> ReadAhead:
    """At the distance that the user has `given`, or one that is learned from `store`'s counters.

    rate   bytes per second of the disk; 0: unknown
    """
    stages, experts = streamed_stages(model, plan), streamed_experts(model, plan)
    distance: int | PrefetchDistance = plan.prefetch_distance
    if given is None and any(stages):
        slots, sizes = plan.reserved["slots"], {b: each.size for b, each in layouts.items()}
        distance = PrefetchDistance(
            read_bytes=[sum(sizes[b].read_bytes for b in blocks) for blocks in stages],
            slot_bytes=[sum(sizes[b].slot_bytes for b in blocks) for blocks in stages],
            room_bytes=slots // 2 if any(experts) else slots,  # experts need room as well
            first=plan.prefetch_distance,
            rate=rate,
        )

    def disk_account() -> tuple[int, float]:
        counters = store.disk_counters()
        return counters.read_bytes, counters.busy_s

    reads = any(experts) and given != 0
    return ReadAhead(
        stages, distance,
        experts=experts if reads else (),
        used=lambda: store.prefetch_counters.experts,
        waited_s=lambda: store.counters.waited_s,
        disk=disk_account,
    )  # fmt: skip


def _blend(before: float | None, new: float) -> float:
    return new if before is None else _KEPT * before + (1 - _KEPT) * new
