"""What a plan costs: seconds and bytes of a step, from sums of bytes and a machine's rates.

A roofline.  A layer waits for the one before it, and within a layer the GPU's attention and the
CPU's network follow each other: their times add up.  A layer's experts are split between GPU, CPU
and link, which work at once: the longest counts.  Dense blocks are copied or read ahead through the
whole step, so the link and the disk bound the step as a whole:

    step = max(sum over layers of (GPU + CPU + longest share of experts + overheads),
               link bytes / link rate, disk bytes / disk rate)

While link and CPU both read host memory, each has the rate that was measured for both at once.  A
rate that is not known costs nothing; but without the rates of memory, and of the disk where it is
read, nothing is predicted, and no prefill without those of arithmetic.

The error before the first run on a machine is within about 25%; `factors` of earlier runs of the
same model and kind of plan bring it to about 10% (engine/run_history.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from hmt.contracts.machine import DeviceRates, Machine
from hmt.contracts.plan import Tier
from hmt.planner.cost.attention_cost import attention_ops, attention_seconds, attention_work, over
from hmt.planner.cost.expert_hit_rate import REQUESTED_AHEAD, Needed, needed_experts
from hmt.planner.cost.gemm_cost import GemmCost
from hmt.planner.cost.step_prediction import Prediction, RunFactors, StepCost
from hmt.planner.cost.workload import ExpertWork, LayerWork, Sums, Workload

_PREFILL_TOKENS = 32  # of a step with prompts in which a device computes as with long prompts
# Of experts that are read, how many more are read on a guess that was wrong: 6 to 16% of a model of
# 32, where guesses came true in 4 to 6 of 10 cases.  They take what time of the disk is left.
_WRONG_GUESSES = 0.1
_LEAST_SHARE = 0.5  # of memory's rate that is left to the CPU while the link reads, if not measured
_NO_DEVICE = DeviceRates("", 0)


class CostModel:
    """Costs of one plan's loads on one machine."""

    def __init__(
        self, loads: Workload, machine: Machine, factors: RunFactors | None = None
    ) -> None:
        """`factors`: what runs of this model under such a plan took, over what is predicted."""
        self._loads, self._machine = loads, machine
        self._factors = factors or RunFactors()

    def predict(self, users: int, context: int, prompt_tokens: int = 0) -> Prediction:
        """Decoding for `users` with `context` positions each, after a prompt."""
        step = self.decode(users, context)
        prompt, ttft_s = StepCost(), 0.0
        if prompt_tokens:
            chunk = min(self._loads.chunk, prompt_tokens)
            before, last = divmod(prompt_tokens - 1, chunk)
            prompt = self.prompt(chunk, prompt_tokens / 2)
            ttft_s = self.prompt(last + 1, prompt_tokens - last / 2).seconds
            if before and prompt.seconds:
                # The head computes behind the last chunk alone.
                ttft_s += before * self.prompt(chunk, before * chunk / 2, last=False).seconds
        rate = users / step.seconds if step.seconds else 0.0
        return Prediction(
            users=users,
            context=context,
            prompt_tokens=prompt_tokens,
            step=step,
            prompt=prompt,
            tokens_per_s=rate,
            ttft_s=ttft_s,
        )

    def decode(self, users: int, context: float) -> StepCost:
        """One token for each of `users`, who have `context` positions each."""
        return self._cost(users, users, context, context, prefill=False)

    def prompt(self, tokens: int, context: float, *, last: bool = True) -> StepCost:
        """A chunk of one prompt, whose tokens attend to `context` positions on average.

        Behind the `last` one the first token of the answer is chosen.
        """
        return self._cost(tokens, 1, context, context, prefill=True, head=last)

    def mixed(self, tokens: int, sequences: int, context: float, seen: float) -> StepCost:
        """Chunks of prompts, and one token of each sequence that decodes: `tokens` in all.

        context   positions of each sequence on average, which are read
        seen      positions that each token attends to on average
        """
        return self._cost(tokens, sequences, context, seen, prefill=tokens >= _PREFILL_TOKENS)

    def token_share(self, context: float) -> float:
        """What a further token of a sequence adds to a decode step's time, as a share of it.

        Its new experts are in it: see `expert_hit_rate.newly_used`.  0 where nothing is known.
        """
        one, two = (
            self._cost(tokens, 1, context, context, prefill=False).seconds for tokens in (1, 2)
        )
        return max(0.0, two / one - 1) if one else 0.0

    def _cost(
        self,
        tokens: int,
        sequences: int,
        context: float,
        seen: float,
        *,
        prefill: bool,
        head: bool = True,
    ) -> StepCost:
        step = _Step(
            loads=self._loads,
            machine=self._machine,
            tokens=tokens,
            sequences=sequences,
            context=context,
            seen=seen,
            prefill=prefill,
        )
        cost = step.cost(head=head)
        cost.seconds *= self._factors.prefill if prefill else self._factors.decode
        return cost


@dataclass(slots=True)
class _Work:
    """What a layer, or a whole step, adds up to.

    gpu_s, cpu_s   dense products and attention, one after the other
    experts_s      the longest share of each layer's experts, and what is waited for
    gpu_experts_s, cpu_experts_s, link_experts_s, disk_experts_s   the shares, which overlap
    overhead_s     of layers, calls and handing over
    launch_s       what the CPU takes to launch a prefill's kernels, while the GPU computes
    gpu_bytes, cpu_bytes, link_bytes, disk_bytes   that are read
    link_ahead_bytes, disk_ahead_bytes   of them, those that come while others compute
    cpu_reading_s  of cpu_s, what reading weights takes
    """

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    experts_s: float = 0.0
    gpu_experts_s: float = 0.0
    cpu_experts_s: float = 0.0
    link_experts_s: float = 0.0
    disk_experts_s: float = 0.0
    overhead_s: float = 0.0
    launch_s: float = 0.0
    gpu_bytes: float = 0.0
    cpu_bytes: float = 0.0
    link_bytes: float = 0.0
    disk_bytes: float = 0.0
    link_ahead_bytes: float = 0.0
    disk_ahead_bytes: float = 0.0
    cpu_reading_s: float = 0.0

    def add(self, other: "_Work", times: int = 1) -> None:
        """Count `other`, so many times."""
        for name in _WORK_FIELDS:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


_WORK_FIELDS = tuple(entry.name for entry in fields(_Work))


@dataclass(slots=True)
class _Step:
    """Adds up one step of `tokens` of `sequences`; see CostModel.mixed."""

    loads: Workload
    machine: Machine
    tokens: int
    sequences: int
    context: float
    seen: float
    prefill: bool
    unknown: bool = False
    device: DeviceRates = field(init=False)
    cpu: GemmCost = field(init=False)
    gpu: GemmCost = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.machine.device or _NO_DEVICE
        self.cpu = GemmCost(self.machine.cpu.gemm, self.machine.spread_read_rate)
        self.gpu = GemmCost(self.device.compute.gemm, self.device.compute.read_rate)

    def cost(self, *, head: bool) -> StepCost:
        """The step's; `head`: whether logits are computed."""
        work = _Work()
        for load, times, after_device in self._alike():
            layer = self._layer(load)
            handovers = int(load.attention_device != after_device)
            if load.attention_device is not None and (layer.cpu_s or layer.cpu_experts_s):
                handovers += 2
            layer.overhead_s += handovers * self.device.sync_overhead_s
            work.add(layer, times)
        if head:
            self._dense(work, self.loads.head.few, self.sequences)
            places = (place.device for place, _ in self.loads.head.few)
            head_device = next((device for device in places if device is not None), None)
            if self.device.name and self.loads.layers:
                crosses = head_device != self.loads.layers[-1].attention_device
                work.overhead_s += crosses * self.device.sync_overhead_s
        if self.loads.row_bytes:
            work.overhead_s += self.machine.disk_block_overhead_s
            work.disk_ahead_bytes += self.tokens * self.loads.row_bytes
            work.disk_bytes += self.tokens * self.loads.row_bytes
        return self._sum(work)

    def _alike(self) -> Iterator[tuple[LayerWork, int, int | None]]:
        """Layers, how often they occur, and the device on which the layer before attends.

        Estimates of device choices share the objects of equal layers, which are added up once.
        """
        counts: dict[tuple[int, int | None], int] = {}
        known: dict[int, LayerWork] = {}
        before: int | None = None
        for load in self.loads.layers:
            known[id(load)] = load
            key = id(load), before
            counts[key] = counts.get(key, 0) + 1
            before = load.attention_device
        for (name, after_device), times in counts.items():
            yield known[name], times, after_device

    def _layer(self, load: LayerWork) -> _Work:
        work, cpu, gpu = _Work(), self.machine.cpu, self.device.compute
        self._dense(work, load.many if self.prefill else load.few, self.tokens)
        self._attention(work, load)
        if load.experts is not None:
            self._experts(work, load, load.experts)
        if work.gpu_s or work.gpu_experts_s or load.attention_device is not None:
            if self.prefill:
                work.launch_s += gpu.prefill_layer_overhead_s or gpu.layer_overhead_s
            else:
                work.gpu_s += gpu.layer_overhead_s
        if work.cpu_s or work.cpu_experts_s:
            prefill_s = cpu.prefill_layer_overhead_s or cpu.layer_overhead_s
            work.overhead_s += prefill_s if self.prefill else cpu.layer_overhead_s
        return work

    def _dense(self, work: _Work, sums: Sums, tokens: int) -> None:
        for (place, encoding), weights in sums.items():
            side = self.cpu if place.device is None else self.gpu
            self._needs_arithmetic(side, weights.numbers)
            seconds = side.seconds(weights.nbytes, weights.numbers, encoding, tokens)
            if place.device is not None:
                work.gpu_s += seconds
                work.gpu_bytes += weights.nbytes
            else:
                work.cpu_s += seconds
                work.cpu_reading_s += min(seconds, self.cpu.reading_s(weights.nbytes, encoding))
                work.cpu_bytes += weights.nbytes
            if place.copied:
                work.link_ahead_bytes += weights.nbytes
                work.link_bytes += weights.nbytes
            if place.read:
                work.overhead_s += weights.blocks * self.machine.disk_block_overhead_s
                work.disk_ahead_bytes += weights.read_bytes
                work.disk_bytes += weights.read_bytes

    def _attention(self, work: _Work, load: LayerWork) -> None:
        """Of this step's tokens to the positions before them, in the tiers where these are."""
        kv, cpu, gpu = self.loads.kv, self.machine.cpu, self.device.compute
        whole = attention_work(load, self.tokens, self.sequences, self.context, self.seen)
        on_device = load.attention_device is not None
        near, host = kv.on_device, kv.on_host + kv.on_disk
        if load.window or not on_device:
            near, host = kv.on_device + kv.on_host, kv.on_disk
            if load.window:
                near, host = 1.0, 0.0
        # The CPU attends to what is in host memory, beside the device.
        host_s = attention_seconds(cpu, whole.times(host), self.machine.spread_read_rate)
        work.cpu_bytes += host * whole.nbytes
        if on_device:
            near_s = attention_seconds(gpu, whole.times(near), gpu.read_rate)
            work.gpu_s += near_s
            work.gpu_bytes += near * whole.nbytes
            work.cpu_s += max(0.0, host_s - near_s)
        else:
            near_s = attention_seconds(cpu, whole.times(near), self.machine.spread_read_rate)
            work.cpu_s += near_s + host_s
            work.cpu_bytes += near * whole.nbytes
        if self.prefill and whole.operations:
            rates = gpu if on_device else cpu
            self.unknown |= not attention_ops(rates)
        disk_bytes = 0.0 if load.window else kv.on_disk * kv.disk_ratio * whole.nbytes
        work.disk_ahead_bytes += disk_bytes
        work.disk_bytes += disk_bytes

    def _experts(self, work: _Work, load: LayerWork, experts: ExpertWork) -> None:
        """Shares of a layer's routed experts: cached on the device, copied there, and the CPU's."""
        count, each = experts.count, experts.each
        # Prefill steps bring all in turn that are not cached, whichever they need.
        by_device = self.prefill and load.many_experts_device is not None
        in_turn = by_device and experts.home is not Tier.DEVICE
        cached = experts.on_device
        needed = Needed(cached, count - cached) if in_turn else self._needed(count, cached)
        copied = 0.0
        if by_device:
            copied = needed.absent
        elif experts.fetched:
            copied = min(needed.absent * self.loads.link_share, experts.fetched)
        read = 0.0
        if experts.home is Tier.DISK:
            read = self._needed(count, max(experts.in_memory, experts.on_device)).absent
        on_cpu, on_gpu = needed.absent - copied, needed.cached + copied
        # Each token multiplies with those it has chosen, however many share one.
        uses = self.tokens * self.loads.chosen / max(1e-9, needed.cached + needed.absent)
        gpu_s, cpu_s = (
            self._expert_s(side, amount, experts, uses)
            for side, amount in ((self.gpu, on_gpu), (self.cpu, on_cpu))
        )
        link_s = over(copied * each.nbytes, self.device.link_rate)
        disk_s = self._disk_s(read * each.read_bytes)
        reading_s = min(cpu_s, self.cpu.reading_s(on_cpu * each.nbytes, experts.encoding))
        cpu_s, link_s = self._at_once(cpu_s, reading_s, link_s)
        work.gpu_experts_s, work.cpu_experts_s = gpu_s, cpu_s
        if self.prefill:
            # Most experts are wanted: link and disk go ahead of the layers, but where the router
            # has to choose first.
            used = (needed.cached + needed.absent) / count
            waits = used < REQUESTED_AHEAD
            work.experts_s = max(gpu_s, cpu_s, disk_s if waits else 0.0)
            work.link_ahead_bytes += copied * each.nbytes
            work.disk_ahead_bytes += read * each.read_bytes
        else:
            # What the disk brings is waited for behind what is in memory already.
            work.experts_s = max(gpu_s, cpu_s, link_s) + disk_s
            work.link_experts_s, work.disk_experts_s = link_s, disk_s
        work.overhead_s += read * self.machine.disk_block_overhead_s
        work.gpu_bytes += on_gpu * each.nbytes
        work.cpu_bytes += on_cpu * each.nbytes
        work.link_bytes += copied * each.nbytes
        guessed = _WRONG_GUESSES * read if self.loads.prefetch_experts and not self.prefill else 0.0
        work.disk_bytes += (read + guessed) * each.read_bytes

    def _expert_s(self, side: GemmCost, amount: float, experts: ExpertWork, uses: float) -> float:
        weights = experts.each.times(amount)
        self._needs_arithmetic(side, weights.numbers)
        return side.seconds(weights.nbytes, weights.numbers, experts.encoding, uses)

    def _needed(self, count: int, cached: float) -> Needed:
        """Of `count` experts of a layer, `cached` of which are in a cache."""
        loads = self.loads
        return needed_experts(count, loads.chosen, self.tokens, cached, loads.hits, self.sequences)

    def _sum(self, work: _Work) -> StepCost:
        cpu, gpu = self.machine.cpu, self.device.compute
        host_s = cpu.step_overhead_s + self.sequences * cpu.sequence_overhead_s
        links = self.loads.links if self.prefill else 1  # in decode steps rows come in turn
        link_s = over(work.link_ahead_bytes, links * self.device.link_rate)
        cpu_s, link_s = self._at_once(work.cpu_s, work.cpu_reading_s, link_s)
        link_s += work.link_experts_s
        disk_s = self._disk_s(work.disk_ahead_bytes) + work.disk_experts_s
        gpu_s = work.gpu_s
        if gpu_s and not self.prefill:
            gpu_s += gpu.step_overhead_s
        gpu_chain_s = gpu_s + work.experts_s
        if cpu_s or work.cpu_experts_s or not gpu_s:
            in_turn_s = gpu_chain_s + cpu_s + host_s
            overhead_s = host_s
        else:
            # A GPU computes a step while the CPU looks at the one before, and launches the next.
            in_turn_s, overhead_s = max(gpu_chain_s, host_s), max(0.0, host_s - gpu_chain_s)
        launch_s = max(0.0, work.launch_s - gpu_chain_s)
        in_turn_s += work.overhead_s + launch_s
        overhead_s += work.overhead_s + launch_s
        seconds = max(in_turn_s, link_s, disk_s)
        busy = {
            "GPU": gpu_s + work.gpu_experts_s,
            "CPU": cpu_s + work.cpu_experts_s,
            "link": link_s,
            "disk": disk_s,
            "overhead": overhead_s,
        }
        nbytes = {
            "GPU": work.gpu_bytes,
            "CPU": work.cpu_bytes,
            "link": work.link_bytes,
            "disk": work.disk_bytes,
        }
        unknown = self.unknown or not cpu.read_rate
        return StepCost(0.0 if unknown else seconds, busy, nbytes, _limit(busy))

    def _at_once(self, cpu_s: float, reading_s: float, link_s: float) -> tuple[float, float]:
        """Seconds of CPU and link where they begin together: slower until one ends, then as alone.

        Of the CPU's only `reading_s` get longer, which may hide behind its arithmetic.
        """
        if not reading_s or not link_s:
            return cpu_s, link_s
        memory, link = self.machine.spread_read_rate, self.device.link_rate
        shared = self.device.shared_cpu_rate or max(_LEAST_SHARE * memory, memory - link)
        cpu_share = min(1.0, shared / memory) if memory else 1.0
        link_share = min(1.0, self.device.shared_link_rate / link) or 1.0
        both_s = min(reading_s / cpu_share, link_s / link_share)
        return max(cpu_s, reading_s + both_s * (1 - cpu_share)), link_s + both_s * (1 - link_share)

    def _needs_arithmetic(self, side: GemmCost, numbers: float) -> None:
        """A prefill is arithmetic: without its rates nothing is predicted."""
        self.unknown |= self.prefill and bool(numbers) and not side.knows_prefill

    def _disk_s(self, nbytes: float) -> float:
        self.unknown |= bool(nbytes) and not self.machine.disk_read_rate
        return over(nbytes, self.machine.disk_read_rate)


def _limit(busy: dict[str, float]) -> str:
    """The part that takes longest."""
    return max(busy, key=lambda name: busy[name])
