"""Which observers a step has: a trace of experts, and their prefetcher."""

from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import Model
from hmt.contracts.plan import Plan, Tier
from hmt.engine.experts.observers import StepObserver
from hmt.engine.experts.predictor import RouterPredictor
from hmt.engine.experts.prefetcher import ExpertPrefetcher
from hmt.engine.experts.trace_recorder import ExpertRecorder
from hmt.engine.loading.memory import Memory


def open_observers(
    model: Model, plan: Plan, memory: Memory, *, prefetch: bool
) -> tuple[list[StepObserver], ExpertPrefetcher | None]:
    """All of them, and of these the prefetcher: with `prefetch`, where experts are on the disk."""
    store, observers = memory.weights, list[StepObserver]()
    if memory.trace is not None:
        observers.append(ExpertRecorder(memory.trace, RouterPredictor(model, store, plan)))
    streams = any(block.kind is BlockKind.EXPERT for block in plan.blocks_in(Tier.DISK))
    if not prefetch or not streams:
        return observers, None
    prefetcher = ExpertPrefetcher(model, store, plan)
    return [*observers, prefetcher], prefetcher
