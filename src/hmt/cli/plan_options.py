"""What `hmt plan` and `hmt simulate` plan, on this machine or on another; and what is refused."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hmt.base.errors import BudgetError, ConfigError, HMTError
from hmt.base.units import format_bytes
from hmt.cli.options import EngineOptions, choose_model

if TYPE_CHECKING:
    from hmt.contracts.machine import Machine
    from hmt.engine import EngineConfig
    from hmt.memory.device import Device
    from hmt.planner.cost.expert_hit_rate import HitCurve
    from hmt.planner.what_if.profiles import Profile
    from hmt.planner.what_if.scenario import PlanResult, Scenario, ScenarioPlanner


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is asked for besides the engine's options: see `hmt plan`."""

    model: str | None
    machine: str | None
    users: int | None
    prompt: int | None
    routing: Path | None = None


def planned_for(
    engine: EngineOptions, asked: PlanRequest
) -> "tuple[PlanResult, ScenarioPlanner, list[str]]":
    """The plan, what else could be planned, and remarks; raises BudgetError and ConfigError."""
    from hmt.cli.plan_view import NO_WEIGHTS, options_line
    from hmt.engine.loading.what_if import has_weights, scenarios_for
    from hmt.memory.numa import choose
    from hmt.planner.what_if.objectives import choices_of_users, plan_for_objective

    config, profile, goal = _resolved(engine, asked)
    if goal is not None or profile is not None:
        _refuse_several(config, "goals and profiles are searched for")
    if asked.machine is None and isinstance(config.numa, tuple):
        choose(config.numa, host_bytes=0)  # which refuses nodes that are not there
    source = str(asked.model or choose_model(asked.model))
    hits = None if asked.routing is None else _hits(asked.routing)
    outlook = scenarios_for(source, config, hits)
    notes: list[str] = []
    if asked.machine is not None:
        setting = _setting_there(asked.machine, engine, config, asked.prompt)
        planned = _or_remedies(lambda: outlook.plan(setting), outlook, setting)
    elif has_weights(Path(source).expanduser()):
        planned = _for_this_machine(source, config.of_rank(0), asked.prompt, outlook, hits)
    else:
        notes = ["", NO_WEIGHTS]
        here = _here(Path(), config, asked.prompt)
        planned = _or_remedies(lambda: outlook.plan(here), outlook, here)
    _check_positions(asked.prompt, planned)
    if profile is not None:
        planned, more = _with_profile(outlook, planned.setting, profile)
        notes += more
    if goal is not None:
        counts = choices_of_users(goal) if asked.users is None else ()
        planned = plan_for_objective(outlook, planned.setting, goal, users=counts)
        notes += ["", options_line(planned, goal)]
    # What is planned besides (other machines) is for sequences as long.
    alike = replace(planned.setting, context=planned.prediction.context)
    return replace(planned, setting=alike), outlook, notes


@contextmanager
def suggesting(model: Path, arguments: dict[str, Any]) -> Iterator[None]:
    """Add to a BudgetError what would fit, as `hmt plan` says it.

    arguments   of hmt.Engine
    """
    try:
        yield
    except BudgetError as error:
        from hmt.engine import EngineConfig
        from hmt.engine.loading.what_if import scenarios_for

        told = error
        with suppress(HMTError):
            config = EngineConfig.resolve(**arguments)
            if config.context is not None:  # an engine's is for all requests together
                config = replace(config, context=max(1, config.context // config.max_batch))
            outlook = scenarios_for(str(model), config)
            told = _with_remedies(error, outlook, _here(model, config, None))
        raise told from None


def _resolved(
    engine: EngineOptions, asked: PlanRequest
) -> "tuple[EngineConfig, Profile | None, str | None]":
    """The options, with users at once as `max_batch`; and what a goal or a profile is to choose."""
    from hmt.engine import EngineConfig

    arguments = engine.arguments()
    del arguments["max_batch"]
    if asked.users is not None:
        arguments["max_batch"] = asked.users
    config = EngineConfig.resolve(**arguments)
    profile, users = config.profile, asked.users or 1
    if profile is not None and profile.batch_size is not None:
        users = config.max_batch  # the profile's, unless --users says otherwise
    return replace(config, max_batch=users, goal=None, profile=None), profile, config.goal


def _setting_there(
    name: str, engine: EngineOptions, config: "EngineConfig", prompt: int | None
) -> "Scenario":
    """What is asked of a machine that is described.  Raises ConfigError for what it has not."""
    from hmt.engine.loading.what_if import scenario_of
    from hmt.hardware.machine_file import read_machine
    from hmt.planner.placement.numa import on_numa_nodes

    machine, arguments = read_machine(name), engine.arguments()
    _refuse_several(config, "machines that are described are planned for")
    _check_budgets(machine, arguments, config)
    if isinstance(config.numa, tuple) and not set(config.numa) <= set(range(machine.numa_nodes)):
        raise ConfigError(
            f"--numa-node {engine.numa} was asked for, and this machine has nodes 0 to "
            f"{machine.numa_nodes - 1} ({machine.name})"
        )
    given = config.host_memory_bytes if "host_memory" in arguments else None
    return scenario_of(
        config,
        on_numa_nodes(machine, config.numa, machine.ram_bytes if given is None else given),
        prompt_tokens=prompt,
        host_bytes=given,
        device_bytes=None if config.gpu_memory_bytes is None else sum(config.gpu_memory_bytes),
    )


def _refuse_several(config: "EngineConfig", what: str) -> None:
    """Raise ConfigError for several GPUs or processes: so far `what` is for one."""
    if config.ranks > 1:
        raise ConfigError(
            f"{config.ranks} processes were asked for (tp={config.tp}, ep={config.ep}, "
            f"pp={config.pp}), and {what} with one of them: leave --tp, --ep and --pp out"
        )
    if len(config.gpus or ()) > 1 or len(config.gpu_memory_bytes or ()) > 1:
        raise ConfigError(
            f"several GPUs were asked for, and {what} with one of them: name one with --gpus, and "
            "give --gpu-memory one size"
        )


def _check_budgets(machine: "Machine", arguments: dict[str, Any], config: "EngineConfig") -> None:
    """Refuse budgets beyond the memories of a machine that is only described."""
    for option, given, there, name in (
        ("host_memory", config.host_memory_bytes, machine.ram_bytes, "RAM"),
        ("gpu_memory", sum(config.gpu_memory_bytes or ()), machine.device_bytes, "GPU memory"),
    ):
        if option in arguments and given > there:
            raise ConfigError(
                f"--{option.replace('_', '-')} {format_bytes(given)} was asked for, and this "
                f"machine has {format_bytes(there)} of {name} ({machine.name})"
            )


def _check_positions(prompt: int | None, planned: "PlanResult") -> None:
    """Refuse users for whom no position is left, and a prompt that the context does not hold."""
    users, each = planned.setting.users, planned.prediction.context
    if not each:
        raise ConfigError(
            f"{users} users were asked for, and the plan has {planned.plan.kv_tokens} positions "
            "for all of them: say with --context how many each of them has"
        )
    if prompt is not None and prompt > each:
        raise ConfigError(
            f"--prompt {prompt} is longer than the context of {each} positions that it would be "
            "in; give a shorter one, or a longer --context"
        )


def _hits(file: Path) -> "HitCurve":
    """Of caches of experts, on a trace."""
    from hmt.bench.traced_curve import traced_curve

    return traced_curve(file)


def _with_profile(
    outlook: "ScenarioPlanner", setting: "Scenario", profile: "Profile"
) -> "tuple[PlanResult, list[str]]":
    """A profile's plan, and what its choices cost."""
    from hmt.cli.plan_view import beside_line
    from hmt.planner.what_if.objectives import plan_for_objective
    from hmt.planner.what_if.profiles import plan_profile, settled

    planned = plan_profile(outlook, setting, settled(profile, setting))
    alike = replace(setting, context=planned.prediction.context)
    own = plan_for_objective(outlook, alike, profile.goal)
    return planned, ["", beside_line(planned, own, profile.goal)]


def _room(config: "EngineConfig") -> "tuple[Sequence[Device], tuple[int, ...]]":
    """The GPUs that are asked for, and what HMT may take of the memory of each."""
    from hmt.engine.loading.device import device_budgets, open_devices

    devices = open_devices(config)
    return devices, device_budgets(devices, config) if devices else ()


def _here(path: Path, config: "EngineConfig", prompt: int | None) -> "Scenario":
    """What is asked of this machine, and of the disk that holds `path`."""
    from hmt.hardware.machine import machine_for, with_device
    from hmt.planner.placement.numa import on_numa_nodes

    _refuse_several(config, "alternatives, and models without weights, are planned for")
    devices, room = _room(config)  # before anything is measured there, which takes memory
    machine = machine_for(path)
    if devices:
        machine = with_device(machine, devices[0])
    machine = on_numa_nodes(machine, config.numa, config.host_memory_bytes)
    return _setting_here(machine, config, prompt, sum(room[:1]))


def _setting_here(
    machine: "Machine", config: "EngineConfig", prompt: int | None, room: int
) -> "Scenario":
    """The same of a machine that is known; `room` is what of a GPU's memory may be taken."""
    from hmt.engine.loading.what_if import scenario_of

    return scenario_of(
        config,
        machine.with_device_bytes(room),
        prompt_tokens=prompt,
        host_bytes=config.host_memory_bytes,
        device_bytes=room,
    )


def _for_this_machine(
    model: str,
    config: "EngineConfig",
    prompt: int | None,
    outlook: "ScenarioPlanner",
    hits: "HitCurve | None",
) -> "PlanResult":
    """The plan that `run` would make, on this machine as it was measured."""
    from hmt.engine import prepare
    from hmt.planner.what_if.scenario import PlanResult, positions_of

    path = Path(model).expanduser()
    in_all = None if config.context is None else positions_of(config.max_batch, config.context)
    devices, room = _room(config)

    def planned() -> "PlanResult":
        prepared = prepare(path, replace(config, context=in_all), None, devices, room)
        asked = _setting_here(prepared.machine, config, prompt, sum(room[:1]))
        demand = prepared.demand if hits is None else replace(prepared.demand, hits=hits)
        return PlanResult(
            asked, demand, prepared.plan,
            outlook.predict(asked, demand, prepared.plan), prepared.published_bytes,
        )  # fmt: skip

    try:
        return planned()
    except BudgetError as error:
        if len(devices) > 1 or config.ranks > 1:  # remedies are for one GPU and one process
            raise
        raise _with_remedies(error, outlook, _here(path, config, prompt)) from None


def _or_remedies(
    plan: "Callable[[], PlanResult]", outlook: "ScenarioPlanner", setting: "Scenario"
) -> "PlanResult":
    """The plan; where none can be, BudgetError says what would fit."""
    try:
        return plan()
    except BudgetError as error:
        raise _with_remedies(error, outlook, setting) from None


def _with_remedies(
    error: BudgetError, outlook: "ScenarioPlanner", setting: "Scenario"
) -> BudgetError:
    from hmt.cli.plan_view import remedy_text

    if outlook.fits(setting) is not None:  # something else than the plan was refused
        return error
    return BudgetError(f"{error}; {remedy_text(outlook.remedies(setting))}")
