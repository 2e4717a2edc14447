"""What a step has cost: the counters of store, disk, link and kernels, read lap by lap."""

from dataclasses import replace

from hmt.base.trace import Tracer
from hmt.engine.experts.prefetcher import ExpertPrefetcher
from hmt.engine.loading.memory import Memory
from hmt.engine.run_summary import Phase
from hmt.kernels import ops
from hmt.weights import DeviceCounters


class StepMeter:
    """Reads what store, tracer and kernels have counted, lap by lap; for one thread."""

    def __init__(
        self, memory: Memory, tracer: Tracer, expert_prefetcher: ExpertPrefetcher | None
    ) -> None:
        self._counters = memory.weights.counters
        self._disk_counters = memory.weights.disk_counters
        self._prefetch_counters = memory.weights.prefetch_counters
        self._on_devices = [there.weights for there in memory.on_devices]
        self._expert_prefetcher = expert_prefetcher
        self._tracer = tracer
        self._last = self._read()

    def lap(self, seconds: float) -> Phase:
        """All that was counted since the last lap, and a step's own `seconds`.

        Reads that end between two steps (prefetches for the next one) count with the next.
        """
        now, before = self._read(), self._last
        self._last = now
        return replace(now.since(before), steps=1, seconds=seconds)

    def _read(self) -> Phase:
        counters, prefetches, disk = self._counters, self._prefetch_counters, self._disk_counters()
        link = DeviceCounters()
        for there in self._on_devices:  # their links carry at once
            own = there.counters
            link.copied_bytes += own.copied_bytes
            link.link_s = max(link.link_s, own.link_s)
            link.waited_s += own.waited_s
        return Phase(
            waited_s=counters.waited_s,
            disk_s=disk.busy_s,
            converted_s=self._tracer.total("convert", "host").seconds,
            kernel_s=ops.kernel_seconds(),
            link_s=link.link_s,
            device_s=link.waited_s,
            disk_bytes=disk.read_bytes,
            useful_bytes=disk.useful_bytes,
            host_bytes=counters.host_bytes,
            link_bytes=link.copied_bytes,
            hits=counters.hits,
            pending=counters.pending,
            misses=counters.misses,
            expert_prefetches=prefetches.begun,
            expert_prefetch_hits=prefetches.in_time + prefetches.late,
            expert_prefetch_wasted_bytes=prefetches.unneeded_bytes,
            experts=prefetches.experts,
            expert_reads=prefetches.expert_reads,
            expert_prefetch_saved_s=0.0
            if self._expert_prefetcher is None
            else self._expert_prefetcher.saved_s,
        )
