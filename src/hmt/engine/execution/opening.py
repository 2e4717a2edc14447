"""Opens the executors of a loaded model: of its steps, and of sequences in higher precision."""

from hmt.base.trace import Tracer
from hmt.contracts.model import MOST_DRAFTS, Model
from hmt.contracts.store import Weights
from hmt.engine.config import EngineConfig
from hmt.engine.execution.executor import DeviceStages, Executor, OverlappedExecutor, PlainExecutor
from hmt.engine.execution.graphs.selection import captures_of
from hmt.engine.execution.prefetch import read_ahead
from hmt.engine.loading.memory import Memory
from hmt.engine.loading.prepared import Prepared
from hmt.planner import scored_rows
from hmt.weights import PreciseView, WeightsView


def open_executor(
    prepared: Prepared,
    config: EngineConfig,
    memory: Memory,
    tracer: Tracer,
    model: Model,
    weights: Weights,
) -> Executor:
    """The executor of a model's steps: `model` over `weights`, which may be observed."""
    plan, kv = prepared.plan, memory.kv
    places = DeviceStages(memory.on_devices, plan.stage_devices)
    rows = scored_rows(prepared.demand, plan.max_prefill_tokens)
    share = None if prepared.divided is None else prepared.divided.share
    if config.executor == "plain":
        view = WeightsView(weights, prefetch=False)
        return PlainExecutor(
            model, view, kv, tracer, places, rows, adapters=memory.adapters.store, share=share
        )
    ahead = read_ahead(
        prepared.model, plan, prepared.layouts, memory.weights,
        config.prefetch_distance, prepared.machine.disk_read_rate,
    )  # fmt: skip
    tokens = max(config.max_batch, MOST_DRAFTS if config.speculate != "off" else 0)
    collective = None if share is None else share.collective
    graphs = captures_of(
        model, weights, plan, memory.on_devices, kv, tokens, prepared.layouts, collective
    )
    inputs = None if memory.draft is None else memory.draft.inputs
    layers = () if inputs is None else inputs.layers
    return OverlappedExecutor(
        model,
        weights,
        kv,
        ahead,
        tracer,
        places,
        graphs,
        rows,
        layers,
        adapters=memory.adapters.store,
        share=share,
    )


def open_precise_executor(
    prepared: Prepared, memory: Memory, tracer: Tracer, weights: Weights
) -> Executor:
    """The same of steps whose sequences are computed in higher precision, layer by layer.

    It appends to the same KV cache.
    """
    places = DeviceStages(memory.on_devices, prepared.plan.stage_devices)
    rows = scored_rows(prepared.demand, prepared.plan.max_prefill_tokens)
    blocks = () if prepared.copies is None else prepared.copies.layouts.keys()
    view = PreciseView(weights, memory.copies, blocks)
    return PlainExecutor(
        prepared.model, view, memory.kv, tracer, places, rows, adapters=memory.adapters.store
    )
