"""`hmt plan`: where everything would live, and how fast it would be, without loading it."""

import json as json_format
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import format_bytes
from hmt.cli.options import EngineOptions, ModelArgument, choose_model, expand

if TYPE_CHECKING:
    from hmt.contracts.machine import Machine
    from hmt.engine import EngineConfig
    from hmt.planner.outlook import Outlook, Planned, Setting
    from hmt.planner.routing import HitCurve

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
        typer.Option(help="Trace of --trace-experts: hits of caches of experts are taken from it."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Speeds at several contexts, and what would help most."),
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw what goes where.")] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="First fit predictions to this machine's runs."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say where a model's weights would live and how fast it would be, without loading it."""
    if calibrate and _calibrated(json) and model is None:
        return
    asked = Asked(model, machine, users, prompt, routing)
    planned, outlook, notes = planned_for(engine, asked)
    if json:
        print(json_format.dumps(_as_json(planned, outlook if explain else None), indent=1))
    else:
        print("\n".join([*_text(planned, outlook, explain=explain, plot=plot), *notes]))


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan is asked for besides the engine's options: see `hmt plan`."""

    model: str | None
    machine: str | None
    users: int | None
    prompt: int | None
    routing: Path | None = None


def planned_for(engine: EngineOptions, asked: Asked) -> "tuple[Planned, Outlook, list[str]]":
    """The plan, what else could be planned, and remarks; raises BudgetError and ConfigError."""
    from hmt.cli.plan_view import options_line
    from hmt.engine import EngineConfig
    from hmt.engine.outlooks import outlook_on, setting_of
    from hmt.planner.goals import choices_of_users, plan_for_goal
    from hmt.planner.machine_file import read_machine
    from hmt.planner.nodes import on_its_nodes

    arguments = engine.arguments()
    if {"profile", "goal"} <= arguments.keys():
        EngineConfig.resolve(**arguments)  # which refuses that
    profile = arguments.pop("profile", None)  # beside it the goal's own plan is shown
    config = replace(EngineConfig.resolve(**arguments), max_batch=asked.users or 1)
    goal, config = config.goal, replace(config, goal=None)  # it is searched for below
    source = str(asked.model or choose_model(asked.model))
    hits = None if asked.routing is None else _hits(asked.routing)
    outlook = outlook_on(source, config, hits)
    if asked.machine is None:
        planned = _for_this_machine(source, config, asked.prompt, outlook, hits)
        setting = planned.setting
    else:
        described = read_machine(asked.machine)
        _check_budgets(described, arguments, config)
        given = config.host_memory_bytes if "host_memory" in arguments else described.ram_bytes
        setting = setting_of(
            config,
            on_its_nodes(described, config.numa, given),
            prompt_tokens=asked.prompt,
            host_bytes=config.host_memory_bytes if "host_memory" in arguments else None,
            device_bytes=config.gpu_memory_bytes,
        )
        planned = _or_remedies(lambda: outlook.plan(setting), outlook, setting)
    _check_prompt(asked.prompt, setting, planned.demand.spec.max_context)
    notes: list[str] = []
    if profile is not None:
        planned, notes = _with_profile(outlook, setting, profile)
    elif goal is not None:
        counts = choices_of_users(goal) if asked.users is None else ()
        planned = plan_for_goal(outlook, setting, goal, users=counts)
        notes = ["", options_line(planned, goal)]
    return planned, outlook, notes


def _check_budgets(
    machine: "Machine", arguments: "Mapping[str, Any]", config: "EngineConfig"
) -> None:
    """Refuse budgets beyond the memories of a machine that is only described."""
    for option, given, there, name in (
        ("host_memory", config.host_memory_bytes, machine.ram_bytes, "RAM"),
        ("gpu_memory", config.gpu_memory_bytes or 0, machine.device_bytes, "GPU memory"),
    ):
        if option in arguments and given > there:
            raise ConfigError(
                f"--{option.replace('_', '-')} {format_bytes(given)} was asked for, and this "
                f"machine has {format_bytes(there)} of {name} ({machine.name})"
            )


def _check_prompt(prompt: int | None, setting: "Setting", longest: int) -> None:
    """Refuse a prompt that the context does not hold."""
    most = setting.context or longest
    if prompt is not None and prompt > most:
        raise ConfigError(
            f"--prompt {prompt} is longer than the context of {most} positions that it would be "
            "in; give a shorter one, or a longer --context"
        )


def _calibrated(aside: bool) -> bool:
    """Fit predictions to this machine's runs, and say so, `aside` on stderr."""
    from hmt.cli.plan_view import calibration_lines

    print("\n".join(calibration_lines()), file=sys.stderr if aside else None)
    return True


def _hits(file: Path) -> "HitCurve":
    """Of caches of experts, on a trace."""
    from hmt.bench.traced_curve import traced_curve

    return traced_curve(file)


def _with_profile(outlook: "Outlook", setting: "Setting", name: str) -> "tuple[Planned, list[str]]":
    """A profile's plan, and what its choices cost."""
    from hmt.cli.plan_view import beside_line
    from hmt.planner.goals import plan_for_goal
    from hmt.planner.profiles import plan_profile, read_profile

    profile = read_profile(name)
    planned = plan_profile(outlook, setting, profile)
    own = plan_for_goal(outlook, replace(setting, users=planned.setting.users), profile.goal)
    return planned, ["", beside_line(planned, own, profile.goal)]


def _for_this_machine(
    model: str,
    config: "EngineConfig",
    prompt: int | None,
    outlook: "Outlook",
    hits: "HitCurve | None",
) -> "Planned":
    """The plan that `run` would make, on this machine as it was measured."""
    from hmt.engine import prepare
    from hmt.engine.device_loading import device_budget, device_for
    from hmt.engine.machine import machine_for
    from hmt.engine.outlooks import setting_of
    from hmt.planner.outlook import Planned

    path, users = Path(model).expanduser(), config.max_batch
    device = device_for(config)
    room = 0 if device is None else device_budget(device, config)
    in_all = None if config.context is None else config.context * users

    def setting(machine: "Machine", context: int | None) -> "Setting":
        return setting_of(
            replace(config, context=context),
            replace(machine, device_bytes=room),
            prompt_tokens=prompt,
            host_bytes=config.host_memory_bytes,
            device_bytes=room,
        )

    def planned() -> "Planned":
        prepared = prepare(path, replace(config, context=in_all), None, device, room)
        context = config.context or prepared.plan.kv_tokens // users
        asked = setting(prepared.machine, context)
        demand = prepared.demand if hits is None else replace(prepared.demand, hits=hits)
        return Planned(
            asked, demand, prepared.plan,
            outlook.predict(asked, demand, prepared.plan), prepared.published_bytes,
        )  # fmt: skip

    return _or_remedies(planned, outlook, setting(machine_for(path), config.context))


def _or_remedies(
    plan: "Callable[[], Planned]", outlook: "Outlook", setting: "Setting"
) -> "Planned":
    """The plan; where none can be, BudgetError says what would fit."""
    from hmt.cli.plan_view import remedy_text

    try:
        return plan()
    except BudgetError as error:
        raise BudgetError(f"{error}; {remedy_text(outlook.remedies(setting))}") from None


def _text(planned: "Planned", outlook: "Outlook", *, explain: bool, plot: bool) -> list[str]:
    from hmt.cli.plan_view import help_lines, hit_lines, speed_lines, table_lines
    from hmt.planner import explain as explained
    from hmt.planner.drawing import draw
    from hmt.planner.reasons import reasons

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


def _as_json(planned: "Planned", outlook: "Outlook | None") -> dict[str, Any]:
    from hmt.planner.reasons import reasons

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
        "prefill_chunk": plan.prefill_chunk,
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
