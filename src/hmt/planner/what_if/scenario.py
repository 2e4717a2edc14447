"""Plans for machines and loads that may not be there: what would be, how fast, what would help.

Nothing here reads or measures anything.  A `Scenario` is everything that a plan depends on; each
answer is found by planning, and every change that is proposed has been planned, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import GIB, format_bytes, round_down, round_up, shown_at_least
from hmt.contracts.machine import ComputeRates, Machine
from hmt.contracts.model import PAGE_TOKENS
from hmt.contracts.plan import Plan
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.demand import Demand
from hmt.planner.cost.step_prediction import Prediction, RunFactors, plan_kind
from hmt.planner.cost.workload import workload_of
from hmt.planner.placement.device import DeviceChoice
from hmt.planner.placement.footprint import default_chunk
from hmt.planner.placement.kv_tiers import KVBudgets
from hmt.planner.placement.numa import faster
from hmt.planner.placement.solver import PlanOptions, solve

_OURS = 0.9  # of a described machine's memories; the rest is the system's and the driver's
_LEAST_GAIN = 0.01  # what gains less does not help
_SCHEMES = ("w8a8", "w4a8")  # in the order of the bytes that they save
_MOST_MEMORY = 1 << 44

DemandFor = Callable[[str | None, int], Demand]
"""The model's demand in an encoding (None: as published), for so many users at once."""


def positions_of(users: int, context: int) -> int:
    """Of the KV cache, for so many sequences of that length: each takes whole pages."""
    return context if users == 1 else users * round_up(context, PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is planned for.

    scheme         how weights are encoded; None: as published
    context        positions of each user; None: the solver's choice for all of them together
    prompt_tokens  of the prompt whose time is predicted; None: the whole context
    host_bytes, device_bytes   budgets; None: 90% of the machine's
    kv             keys and values that do not all lie where layers compute
    device         what a GPU gets; None: as much as fits, attention first
    factors        what runs of the model took over what is predicted, by kind of plan
    """

    machine: Machine
    scheme: str | None = None
    users: int = 1
    context: int | None = None
    prompt_tokens: int | None = None
    max_prefill_tokens: int | None = None
    prefetch_distance: int | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    kv: KVBudgets | None = None
    device: DeviceChoice | None = None
    factors: Mapping[str, RunFactors] = field(default_factory=dict)

    def host_budget(self) -> int:
        """Host memory that a plan may use."""
        given = int(self.machine.ram_bytes * _OURS)
        return given if self.host_bytes is None else min(self.host_bytes, self.machine.ram_bytes)

    def device_budget(self) -> int:
        """Memory of the GPU that a plan may use; 0 without one."""
        given = int(self.machine.device_bytes * _OURS)
        if self.device_bytes is None:
            return given
        return min(self.device_bytes, self.machine.device_bytes)

    def options(self) -> PlanOptions:
        """The same for the solver."""
        return PlanOptions(
            host_bytes=self.host_budget(),
            context=None if self.context is None else positions_of(self.users, self.context),
            max_prefill_tokens=self.max_prefill_tokens,
            prefetch_distance=self.prefetch_distance,
            device_bytes=self.device_budget(),
            kv=self.kv,
            device=self.device,
        )


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A setting with its plan, and what is predicted for it.

    published_bytes   of the checkpoint; 0 where there is none
    """

    setting: Scenario
    demand: Demand
    plan: Plan
    prediction: Prediction
    published_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ScenarioChange:
    """Another setting.

    text    what is different, for people
    gain    tokens/s over those of the setting before, less 1
    """

    text: str
    planned: PlanResult
    gain: float = 0.0


class ScenarioPlanner:
    """Plans settings of one model."""

    def __init__(self, demand_for: DemandFor) -> None:
        self._demand_for = demand_for
        self._demands: dict[tuple[str | None, int], Demand] = {}

    def demand(self, setting: Scenario) -> Demand:
        """What the model needs."""
        key = setting.scheme, setting.users
        if key not in self._demands:
            self._demands[key] = self._demand_for(*key)
        return self._demands[key]

    def plan(self, setting: Scenario) -> PlanResult:
        """The setting's plan.  Raises BudgetError and ConfigError."""
        demand = self.demand(setting)
        machine = setting.machine
        if machine.disk_bytes and demand.weight_bytes > machine.disk_bytes:
            raise BudgetError(
                f"{demand.spec.architecture} takes {format_bytes(demand.weight_bytes)} on a disk, "
                f"and this one has {format_bytes(machine.disk_bytes)}"
            )
        plan = solve(demand, setting.options(), machine)
        return PlanResult(setting, demand, plan, self.predict(setting, demand, plan))

    def predict(self, setting: Scenario, demand: Demand, plan: Plan) -> Prediction:
        """What a plan for the setting would reach."""
        context = setting.context or plan.kv_tokens // setting.users
        prompt = context if setting.prompt_tokens is None else setting.prompt_tokens
        costs = CostModel(
            workload_of(demand, plan), setting.machine, setting.factors.get(plan_kind(plan))
        )
        return costs.predict(setting.users, context, prompt)

    def fits(self, setting: Scenario) -> PlanResult | None:
        """The same; None where it cannot be."""
        try:
            return self.plan(setting)
        except (BudgetError, ConfigError):
            return None

    def at(
        self, setting: Scenario, contexts: Sequence[int], users: Sequence[int]
    ) -> list[list[PlanResult | None]]:
        """Plans for several contexts (rows) and numbers of users (columns)."""
        return [
            [self.fits(replace(setting, context=context, users=count)) for count in users]
            for context in contexts
        ]

    def helpful(self, planned: PlanResult) -> list[ScenarioChange]:
        """What would make it faster, the most helpful first."""
        before = planned.prediction.tokens_per_s
        found = []
        for text, setting in _richer(planned.setting):
            after = self.fits(setting)
            if after is None or not before:
                continue
            gain = after.prediction.tokens_per_s / before - 1
            if gain >= _LEAST_GAIN:
                found.append(ScenarioChange(text, after, gain))
        return sorted(found, key=lambda change: -change.gain)

    def remedies(self, setting: Scenario, count: int = 3) -> list[ScenarioChange]:
        """The smallest changes with which a setting that does not fit does, the smallest first."""
        found = [*self._remedies(setting)]
        if not found:
            for text, base in self._bases(setting):
                found += [
                    (size, replace(change, text=f"{text} and {change.text}"))
                    for size, change in self._remedies(base)
                ]
        return [change for _, change in sorted(found, key=lambda one: one[0])[:count]]

    def _bases(self, setting: Scenario) -> Iterator[tuple[str, Scenario]]:
        """Settings that are nearer to what fits, for changes of two things."""
        machine = setting.machine
        if setting.device_budget():
            yield "the CPU alone (GPU memory 0)", replace(setting, device_bytes=0)
        for scheme in _SCHEMES:
            wanted = replace(setting, scheme=scheme)
            needed = self.demand(wanted).weight_bytes
            if needed >= self.demand(setting).weight_bytes:
                continue
            yield f"weights in {scheme}", wanted
        needed = self.demand(setting).weight_bytes
        if machine.disk_bytes and needed > machine.disk_bytes:
            needed = shown_at_least(needed)
            larger = replace(setting, machine=replace(machine, disk_bytes=needed))
            yield f"a disk of {format_bytes(needed)}", larger

    def _remedies(self, setting: Scenario) -> Iterator[tuple[float, ScenarioChange]]:
        """Changes of one thing that suffice, each with its size: the share that it changes."""
        machine, demand = setting.machine, self.demand(setting)
        context = setting.context

        def change(
            text: str, wanted: Scenario, size: float
        ) -> Iterator[tuple[float, ScenarioChange]]:
            if (planned := self.fits(wanted)) is not None:
                yield size, ScenarioChange(text, planned)

        def host(nbytes: int) -> Scenario:
            ram = max(machine.ram_bytes, int(nbytes / _OURS) + 1)
            return replace(setting, host_bytes=nbytes, machine=replace(machine, ram_bytes=ram))

        def device(nbytes: int) -> Scenario:
            most = max(machine.device_bytes, int(nbytes / _OURS) + 1)
            larger = machine.with_device_bytes(most)
            return replace(setting, device_bytes=nbytes, machine=larger)

        if (more := self._least(host, setting.host_budget())) is not None:
            size = more / max(1, setting.host_budget()) - 1
            yield from change(f"{format_bytes(more)} of host memory", host(more), size)
        if machine.devices:
            if (more := self._least(device, setting.device_budget())) is not None:
                size = more / max(1, setting.device_budget()) - 1
                yield from change(f"{format_bytes(more)} of GPU memory", device(more), size)
            alone = replace(setting, device_bytes=0)
            yield from change("the CPU alone (GPU memory 0)", alone, 1.0)
        if context is not None and (shorter := self._most(setting, context)) is not None:
            wanted = replace(setting, context=shorter)
            size = context / shorter - 1
            each = " for each user" if setting.users > 1 else ""
            yield from change(f"a context of {shorter} positions{each}", wanted, size)
        if users := self._greatest(lambda n: replace(setting, users=n), 1, setting.users - 1):
            text = f"{users} user{'s' if users > 1 else ''} at once"
            yield from change(text, replace(setting, users=users), setting.users / users - 1)
        chunk = setting.max_prefill_tokens or default_chunk(demand)
        pages = self._greatest(
            lambda n: replace(setting, max_prefill_tokens=n * PAGE_TOKENS),
            1,
            (chunk - 1) // PAGE_TOKENS,
        )
        if pages:
            pieces = pages * PAGE_TOKENS
            wanted = replace(setting, max_prefill_tokens=pieces)
            yield from change(f"prompts in pieces of {pieces} tokens", wanted, chunk / pieces - 1)
        if (kv := setting.kv) is not None:

            def changed_to(nbytes: int) -> Scenario:
                return replace(setting, kv=replace(kv, device_bytes=nbytes))

            if (more := self._least(changed_to, kv.device_bytes)) is not None:
                size = more / max(1, kv.device_bytes) - 1
                text = f"--kv-gpu-memory {format_bytes(more)}"
                yield from change(text, changed_to(more), size)
        for scheme in _SCHEMES:
            if scheme != setting.scheme:
                wanted = replace(setting, scheme=scheme)
                for _, found in change(f"weights in {scheme}", wanted, 0.0):
                    ratio = demand.weight_bytes / max(1, found.planned.demand.weight_bytes)
                    if ratio > 1:
                        yield ratio - 1, found
        if machine.disk_bytes and demand.weight_bytes > machine.disk_bytes:
            needed = shown_at_least(demand.weight_bytes)
            larger = replace(machine, disk_bytes=needed)
            text = f"a disk of {format_bytes(needed)}"
            size = needed / machine.disk_bytes - 1
            yield from change(text, replace(setting, machine=larger), size)

    def _least(self, setting: Callable[[int], Scenario], least: int) -> int | None:
        """The least memory above `least` with which `setting` fits, to 1 part in 256.

        Rounded up to what three digits can say: that is what people are told, and will give.
        """
        low, high = least, max(least, GIB)
        while self.fits(setting(high)) is None:
            low, high = high, 2 * high
            if high > _MOST_MEMORY:
                return None
        while high - low > max(1, high // 256):
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(setting(middle)) is not None else (middle, high)
        return shown_at_least(high)

    def _greatest(self, setting: Callable[[int], Scenario], low: int, high: int) -> int:
        """The greatest number from `low` to `high` with which `setting` fits; 0: none does."""
        if high < low or self.fits(setting(low)) is None:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.fits(setting(middle)) is not None else (low, middle - 1)
            )
        return low

    def _most(self, setting: Scenario, context: int) -> int | None:
        """The longest context below `context` that fits, in whole pages; None: no context does."""
        low, high = 0, round_up(context, PAGE_TOKENS)
        while high - low > max(PAGE_TOKENS, high // 64):
            middle = round_down((low + high) // 2, PAGE_TOKENS)
            if middle <= low:
                break
            fits = self.fits(replace(setting, context=middle)) is not None
            low, high = (middle, high) if fits else (low, middle)
        return low or None


def _richer(setting: Scenario) -> Iterator[tuple[str, Scenario]]:
    """The setting with more of one thing."""
    machine = setting.machine

    def with_machine(text: str, **values: object) -> tuple[str, Scenario]:
        return text, replace(setting, machine=replace(machine, **values))  # type: ignore[arg-type]

    if setting.host_bytes is None:
        for more in (32 * GIB, machine.ram_bytes):
            yield with_machine(f"{format_bytes(more)} more RAM", ram_bytes=machine.ram_bytes + more)
    else:
        more = shown_at_least(2 * setting.host_budget())
        ram = max(machine.ram_bytes, more)
        larger = replace(setting, host_bytes=more, machine=replace(machine, ram_bytes=ram))
        yield f"{format_bytes(more)} of host memory", larger
    yield with_machine("a disk twice as fast", disk_read_rate=2 * machine.disk_read_rate)
    yield with_machine(
        "memory twice as fast (more channels)",
        cpu=_twice_the_reading(machine.cpu),
        devices=tuple(
            replace(each, shared_cpu_rate=2 * each.shared_cpu_rate) for each in machine.devices
        ),
    )
    if (device := machine.device) is not None:

        def with_device(text: str, **values: object) -> tuple[str, Scenario]:
            richer = replace(device, **values)  # type: ignore[arg-type]
            return with_machine(text, devices=(richer, *machine.devices[1:]))

        if setting.device_bytes is None:
            for more in (8 * GIB, machine.device_bytes):
                yield with_device(
                    f"{format_bytes(more)} more GPU memory",
                    memory_bytes=device.memory_bytes + more,
                )
        elif setting.device_bytes:
            more = shown_at_least(2 * setting.device_budget())
            text = f"{format_bytes(more)} of GPU memory"
            _, larger = with_device(text, memory_bytes=max(device.memory_bytes, more))
            yield text, replace(larger, device_bytes=more)
        yield with_device(
            "a link twice as fast",
            link_rate=2 * device.link_rate,
            shared_link_rate=2 * device.shared_link_rate,
        )
        yield with_device("a GPU twice as fast", compute=faster(device.compute, 2))
    for scheme in ("w8a8", "w4a8"):
        if scheme != setting.scheme:
            yield f"weights in {scheme}", replace(setting, scheme=scheme)


def _twice_the_reading(rates: ComputeRates) -> ComputeRates:
    """The processor with memory that is twice as fast: products of one token are bound by it."""
    return replace(
        rates,
        read_rate=2 * rates.read_rate,
        gemm={n: 2 * rate if n.endswith("@1") else rate for n, rate in rates.gemm.items()},
        attention_read_rate=2 * rates.attention_read_rate,
    )
