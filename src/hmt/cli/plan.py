"""`hmt plan`: where everything would live, without loading it."""

import json as json_format
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hmt.cli.options import EngineOptions, ModelArgument, choose_model, expand

if TYPE_CHECKING:
    from hmt.engine import Prepared


@expand
def plan(
    engine: EngineOptions,
    model: ModelArgument = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say where a model's weights would live and what a token would cost, without loading it."""
    from hmt.engine import EngineConfig, prepare
    from hmt.engine.device_loading import device_budget, device_for
    from hmt.planner import explain

    config = EngineConfig.resolve(**engine.arguments())
    device = device_for(config)
    room = 0 if device is None else device_budget(device, config)
    prepared = prepare(choose_model(model), config, device=device, device_bytes=room)
    if json:
        print(json_format.dumps(_as_json(prepared), indent=1))
    else:
        print(explain(prepared.plan, prepared.demand, prepared.machine))


def _as_json(prepared: "Prepared") -> dict[str, Any]:
    from dataclasses import asdict

    plan, spec = prepared.plan, prepared.model.spec
    counts: Counter[tuple[str, str]] = Counter()
    for block, home in plan.homes.items():
        counts[block.kind.value, home.value] += 1
    return {
        "architecture": spec.architecture,
        "layers": spec.layers,
        "published_bytes": prepared.published_bytes,
        "weight_bytes": prepared.demand.weight_bytes,
        "budgets": dict(plan.budgets),
        "reserved": dict(plan.reserved),
        "blocks": [
            {"kind": kind, "home": home, "count": count}
            for (kind, home), count in sorted(counts.items())
        ],
        "device": {
            "stages": sorted(plan.device.stages),
            "reserved": dict(plan.device.reserved),
        },
        "homes": {str(block): home for block, home in plan.homes.items()},
        "prefetch_distance": plan.prefetch_distance,
        "prefill_chunk": plan.prefill_chunk,
        "kv_tokens": plan.kv_tokens,
        "host_bytes_per_token": plan.host_bytes_per_token,
        "disk_bytes_per_token": plan.disk_bytes_per_token,
        "predicted_token_s": plan.predicted_token_s,
        "machine": asdict(prepared.machine),
    }
