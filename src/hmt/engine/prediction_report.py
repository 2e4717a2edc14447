"""What a plan predicted of the steps that were computed, beside what they took."""

from dataclasses import dataclass, field

from hmt.contracts.machine import Machine
from hmt.contracts.plan import Plan
from hmt.contracts.step import SchedulerOutput
from hmt.planner import Demand
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.step_prediction import RunFactors, StepCost
from hmt.planner.cost.workload import workload_of


@dataclass(slots=True)
class StepTotals:
    """Sums over steps of one kind: those that only decode, or those that read prompts.

    sequences   in them
    positions   of these sequences, which are read
    seen        positions that tokens attended to
    disk_bytes  read while these steps ran
    """

    steps: int = 0
    tokens: int = 0
    sequences: int = 0
    positions: int = 0
    seen: float = 0.0
    seconds: float = 0.0
    disk_bytes: int = 0

    def add(self, step: SchedulerOutput, seconds: float, disk_bytes: int) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += step.num_tokens
        self.sequences += len(step.segments)
        self.positions += sum(run.context for run in step.segments)
        self.seen += sum(run.length * (run.start + (run.length + 1) / 2) for run in step.segments)
        self.seconds += seconds
        self.disk_bytes += disk_bytes

    @property
    def step_s(self) -> float:
        """Of a step, on average; 0 where there were none."""
        return self.seconds / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A decode step of so many users with so much context each, as predicted before the load.

    Without context where none was decoded.

    step_s             0 where rates were not known
    actual_s           what a step took; 0 where there were none
    host_bytes, disk_bytes   of weights and of what they attend to, per token
    actual_disk_bytes  that were read, per token
    used_bytes         the most that the plan reserved of the budget
    cost               what the step is made of
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


class Predictor:
    """Predicts steps under one plan."""

    def __init__(
        self, demand: Demand, plan: Plan, machine: Machine, factors: RunFactors | None = None
    ) -> None:
        """`factors`: what earlier runs took, over what is predicted."""
        loads = workload_of(demand, plan)
        self._costs = CostModel(loads, machine, factors)
        self._bare = CostModel(loads, machine)
        self._used_bytes = sum(plan.reserved.values())

    def decoding(self, decoded: StepTotals) -> StepPrediction:
        """What was predicted of decode steps like those that `decoded` counts."""
        users = decoded.sequences / decoded.steps if decoded.steps else 1.0
        context = decoded.positions / decoded.sequences if decoded.sequences else 0.0
        cost = self._costs.decode(max(1, round(users)), context)
        return StepPrediction(
            users=max(1, round(users)),
            context=context,
            step_s=cost.seconds,
            actual_s=decoded.step_s,
            host_bytes=(cost.nbytes["CPU"] + cost.nbytes["link"]) / users,
            disk_bytes=cost.nbytes["disk"] / users,
            actual_disk_bytes=decoded.disk_bytes / max(1, decoded.tokens),
            used_bytes=self._used_bytes,
            cost=cost,
        )

    def bare_decode_s(self, decoded: StepTotals) -> float:
        """Seconds of such a step without factors; 0: not known, or there was none."""
        if not decoded.steps:
            return 0.0
        users = max(1, round(decoded.sequences / decoded.steps))
        return self._bare.decode(users, decoded.positions / decoded.sequences).seconds

    def bare_prefill_s(self, prefilled: StepTotals) -> float:
        """The same of steps that read prompts."""
        if not prefilled.steps:
            return 0.0
        cost = self._bare.mixed(
            round(prefilled.tokens / prefilled.steps),
            max(1, round(prefilled.sequences / prefilled.steps)),
            prefilled.positions / prefilled.sequences,
            prefilled.seen / prefilled.tokens,
        )
        return cost.seconds
