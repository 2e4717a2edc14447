"""Which observers a step has: a trace of experts, and their prefetcher."""

from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan, Tier
from hmt.engine.experts.observers import StepObserver
from hmt.engine.experts.predictor import RouterPredictor
from hmt.engine.experts.prefetcher import ExpertPrefetcher
from hmt.engine.experts.trace_recorder import ExpertRecorder
from hmt.engine.loading.allocate import Memory


def open_observers(
    model: Model, plan: Plan, memory: Memory
) -> tuple[list[StepObserver], ExpertPrefetcher | None]:
    """All of them, and of these the prefetcher, where experts are read from the disk."""
    store, observers = memory.weights, list[StepObserver]()
    if memory.trace is not None:
        observers.append(ExpertRecorder(memory.trace, RouterPredictor(model, store, plan)))
    streams = any(block.kind is BlockKind.EXPERT for block in plan.blocks_in(Tier.DISK))
    if memory.transitions is None or not streams:
        return observers, None
    prefetcher = ExpertPrefetcher(model, store, plan, memory.transitions)
    return [*observers, prefetcher], prefetcher
