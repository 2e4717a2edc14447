"""What a plan predicted of the steps that were computed, beside what they were."""

from dataclasses import dataclass, field, fields, replace

from hmt.contracts.machine import Machine
from hmt.contracts.plan import Plan
from hmt.contracts.step import Step
from hmt.planner import Demand
from hmt.planner.cost import CostModel
from hmt.planner.loads import loads_of
from hmt.planner.observed import Sighting
from hmt.planner.predicted import StepCost


@dataclass(slots=True)
class Decoded:
    """Sums over the steps in which nothing but answers was computed.

    positions   that tokens attended to, themselves included
    disk_bytes  read while these steps ran
    experts, expert_reads   leases of experts that live on the drive, and reads of them
    """

    steps: int = 0
    tokens: int = 0
    positions: int = 0
    seconds: float = 0.0
    disk_bytes: int = 0
    experts: int = 0
    expert_reads: int = 0

    def add(
        self, step: Step, seconds: float, disk_bytes: int, experts: tuple[int, int] = (0, 0)
    ) -> None:
        """Count one step; `experts` are leases and reads of them."""
        self.steps += 1
        self.tokens += len(step.runs)
        self.positions += sum(run.context for run in step.runs)
        self.seconds += seconds
        self.disk_bytes += disk_bytes
        self.experts += experts[0]
        self.expert_reads += experts[1]

    def since(self, before: "Decoded") -> "Decoded":
        """What has come since it was as `before`; all of it where it has begun anew meanwhile."""
        if self.steps < before.steps:
            return replace(self)
        names = (field.name for field in fields(self))
        return Decoded(**{name: getattr(self, name) - getattr(before, name) for name in names})

    @property
    def users(self) -> float:
        """On average; one where nothing was computed."""
        return self.tokens / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A step of so many users with so much context each, as predicted before the load.

    users, context   on average, of the steps that were computed; one user without context where
                     there were none
    step_s           0 where rates were not known
    actual_s         what a step took; 0 where there were none
    host_bytes, disk_bytes   of weights and of what they attend to, per token
    actual_disk_bytes        that were read, per token
    used_bytes       the most that the plan reserved of the budget
    cost             what the step is made of
    """

    users: float
    context: float
    step_s: float
    actual_s: float
    host_bytes: float
    disk_bytes: float
    actual_disk_bytes: float
    used_bytes: int
    cost: StepCost = field(default_factory=StepCost)

    @property
    def tokens_per_s(self) -> float:
        """Of all users; 0: not known."""
        return self.users / self.step_s if self.step_s else 0.0

    @property
    def error(self) -> float | None:
        """The time of a step over the predicted one, less 1; None where they do not compare."""
        if not self.step_s or not self.actual_s:
            return None
        return self.actual_s / self.step_s - 1


class Foreseer:
    """Predicts steps under one plan."""

    def __init__(self, demand: Demand, plan: Plan, machine: Machine) -> None:
        self._loads = loads_of(demand, plan)
        self._costs = CostModel(self._loads, machine)
        self._used_bytes = sum(plan.reserved.values())

    def sighting(self, decoded: Decoded, shared: tuple[int, int] | None = None) -> Sighting | None:
        """What the run's cache of experts did; None where there is none, or it was not used.

        `shared`: experts that were needed where a GPU has some, and those that it had not.  Host
        memory beside it is asked for these alone, and says nothing of its own.
        """
        experts = [load.experts for load in self._loads.layers if load.experts is not None]
        if shared is not None:
            needed, missed = shared
            cached = [(group.on_device, group.count) for group in experts]
        else:
            needed, missed = decoded.experts, decoded.expert_reads
            cached = [(group.in_memory, group.count) for group in experts]
        caches = [each for each in cached if 0 < each[0] < each[1]]
        if not caches or not needed:
            return None
        count, residency = caches[0][1], caches[0][0] / caches[0][1]
        return Sighting(count, self._loads.chosen, residency, decoded.users, needed, missed)

    def foreseen(self, decoded: Decoded) -> Foreseen:
        """What was predicted of steps like those that `decoded` counts."""
        users = decoded.users
        context = decoded.positions / decoded.tokens if decoded.tokens else 0.0
        cost = self._costs.decode(max(1, round(users)), context)
        return Foreseen(
            users=max(1, round(users)),
            context=context,
            step_s=cost.seconds,
            actual_s=decoded.seconds / decoded.steps if decoded.steps else 0.0,
            host_bytes=(cost.nbytes["CPU"] + cost.nbytes["link"]) / users,
            disk_bytes=cost.nbytes["disk"] / users,
            actual_disk_bytes=decoded.disk_bytes / max(1, decoded.tokens),
            used_bytes=self._used_bytes,
            cost=cost,
        )
