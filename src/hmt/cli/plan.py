"""`hmt plan`: where everything would live, and how fast it would be, without loading it."""

import json as json_format
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hmt.cli.options import EngineOptions, ModelArgument, expand
from hmt.cli.plan_options import PlanRequest, planned_for
from hmt.cli.plan_ranks import other_ranks, refuse_ranks

if TYPE_CHECKING:
    from hmt.planner.what_if.scenario import PlanResult, ScenarioPlanner

_CONTEXTS = (1024, 8192, 32768, 131072)
_USERS = (1, 4, 16)


@expand
def plan(
    engine: EngineOptions,
    model: ModelArgument = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="Plan for another machine: a TOML file (`hmt probe --toml` writes one), or a name "
            "such as rtx-4090-desktop. The model may then be a config.json, or a name such as "
            "deepseek-v3; an unknown name lists what there is."
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, help="Requests at once, each with --context positions; 1 usually."),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the prompt whose time is predicted.")
    ] = None,
    routing: Annotated[
        Path | None,
        typer.Option(help="Trace of --expert-trace: hits of caches of experts are taken from it."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Speeds at several contexts, and what would help most."),
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw what goes where.")] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", hidden=True),  # runs calibrate by themselves
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say where a model's weights would live and how fast it would be, without loading it."""
    asked = PlanRequest(model, machine, users, prompt, routing)
    if explain:
        refuse_ranks(engine, "--explain looks at other plans")
    planned, outlook, notes = planned_for(engine, asked)
    if json:
        print(json_format.dumps(_as_json(planned, outlook if explain else None), indent=1))
    else:
        others = other_ranks(engine, model, planned.plan)
        print("\n".join([*_text(planned, outlook, explain=explain, plot=plot), *notes, *others]))


def _text(
    planned: "PlanResult", outlook: "ScenarioPlanner", *, explain: bool, plot: bool
) -> list[str]:
    from hmt.cli.plan_view import help_lines, hit_lines, speed_lines, table_lines
    from hmt.planner import explain as explained
    from hmt.planner.what_if.placement_reasons import reasons
    from hmt.planner.what_if.plan_drawing import draw

    setting = planned.setting
    lines = [f"machine: {setting.machine.name}"]
    if setting.machine.note:
        lines.append(f"  ({setting.machine.note})")
    lines += ["", explained(planned.plan, planned.demand, setting.machine)]
    lines += speed_lines(planned)
    if plot:
        lines += ["", draw(planned.plan, planned.demand)]
    if explain:
        lines += [
            "",
            "why:",
            *(f"  {reason}" for reason in reasons(planned.plan, planned.demand, setting.machine)),
            *hit_lines(planned),
        ]
        longest = planned.demand.spec.max_context
        context = planned.prediction.context
        contexts = sorted({min(longest, each) for each in (*_CONTEXTS, context)})
        users = sorted({*_USERS, setting.users})
        rows = outlook.at(replace(setting, prompt_tokens=None), contexts, users)
        lines += table_lines(rows, users)
        lines += help_lines(outlook.helpful(planned))
    return lines


def _as_json(planned: "PlanResult", outlook: "ScenarioPlanner | None") -> dict[str, Any]:
    from hmt.planner.what_if.placement_reasons import reasons

    plan, spec = planned.plan, planned.demand.spec
    counts: Counter[tuple[str, str]] = Counter()
    for block, home in plan.homes.items():
        counts[block.kind.value, home.value] += 1
    content = {
        "architecture": spec.architecture,
        "layers": spec.layers,
        "published_bytes": planned.published_bytes,
        "weight_bytes": planned.demand.weight_bytes,
        "budgets": dict(plan.budgets),
        "reserved": dict(plan.reserved),
        "blocks": [
            {"kind": kind, "home": home, "count": count}
            for (kind, home), count in sorted(counts.items())
        ],
        "device": {
            "stages": sorted(plan.device.stages),
            "reserved": dict(plan.device.reserved),
            "expert_slots": plan.device.expert_slots,
            "staging_slots": plan.device.staging_slots,
        },
        "homes": {str(block): home for block, home in plan.homes.items()},
        "prefetch_distance": plan.prefetch_distance,
        "max_prefill_tokens": plan.max_prefill_tokens,
        "kv_tokens": plan.kv_tokens,
        "host_bytes_per_token": plan.host_bytes_per_token,
        "disk_bytes_per_token": plan.disk_bytes_per_token,
        "predicted_token_s": plan.predicted_token_s,
        "expert_hits": asdict(planned.demand.hit_curve) if spec.experts_per_token else None,
        "prediction": asdict(planned.prediction),
        "machine": asdict(planned.setting.machine),
    }
    if outlook is not None:
        content["why"] = reasons(plan, planned.demand, planned.setting.machine)
        content["would_help"] = [
            {"change": change.text, "gain": change.gain, "tokens_per_s": after.tokens_per_s}
            for change in outlook.helpful(planned)
            if (after := change.planned.prediction)
        ]
    return content
