"""Profiles: choices written down in YAML, checked, and planned with.

    goal: latency
    memory:
      gpu_layers: 2          # layers that compute on the GPU, their dense networks included
      prefetch: 1            # layers read ahead from the disk
      expert_threshold: 0.2  # an expert that a token chooses with this probability is kept there
    compute:
      batch_size: 32         # users at once

`parallel` reads ahead while layers compute.  `auto_tune` leaves to the goal's search how large
prompts' pieces are, and what the GPU gets where gpu_layers is left out.  `fusion`, `cuda_graph` and
`dynamic_batch` are what HMT always does, and cannot be turned off.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import yaml

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import format_bytes
from hmt.contracts.blocks import BlockKind
from hmt.contracts.model import PAGE_TOKENS
from hmt.planner.builtin import builtin_names, builtin_text
from hmt.planner.cost.demand import Demand
from hmt.planner.cost.expert_hit_rate import HitCurve
from hmt.planner.placement.device import DeviceChoice
from hmt.planner.what_if.objectives import GOALS, plan_for_objective
from hmt.planner.what_if.scenario import PlanResult, Scenario, ScenarioPlanner

_SECTIONS = {
    "memory": ("gpu_layers", "prefetch", "expert_threshold"),
    "compute": (*("fusion", "cuda_graph", "parallel", "batch_size", "auto_tune", "dynamic_batch"),),
}
_ALWAYS = ("fusion", "cuda_graph", "dynamic_batch")
_BRINGS = (8, 2, 1)  # slots for experts that are on their way
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile says; None where it says nothing."""

    goal: str = "balanced"
    gpu_layers: int | None = None
    prefetch: int | None = None
    expert_threshold: float | None = None
    fusion: bool = True
    cuda_graph: bool = True
    parallel: bool = True
    batch_size: int | None = None
    auto_tune: bool = False
    dynamic_batch: bool = True


def profile_names() -> list[str]:
    """Profiles that come with HMT."""
    return builtin_names("profiles", ".yaml")


def read_profile(source: str) -> Profile:
    """The profile of a YAML file, or one of `profile_names`.

    Raises MissingFileError, and ConfigError for a key that is unknown or makes no sense.
    """
    try:
        content = yaml.safe_load(builtin_text(source, "profiles", ".yaml", "profiles")) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of a 13th month, too
        raise ConfigError(f"{source} is not valid YAML: {error}") from None
    return profile_of(content, source)


def profile_of(content: object, source: str) -> Profile:
    """The profile of parsed YAML; `source` is its name, for messages.  Raises ConfigError."""
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must be a mapping with goal, memory and compute")
    values: dict[str, Any] = {}
    for key, given in content.items():
        if key == "goal":
            values["goal"] = given
        elif key in _SECTIONS:
            known = _SECTIONS[key]
            if not (given is None or isinstance(given, dict)):
                raise ConfigError(f"{source}: {key} is {given!r}; it must have {', '.join(known)}")
            for name, value in (given or {}).items():
                if name not in known:
                    raise ConfigError(f"{source}: {key}.{name} is unknown; {', '.join(known)}")
                values[name] = value
        else:
            raise ConfigError(f"{source}: {key} is unknown; give goal, memory and compute")
    for name, value in values.items():
        _check(name, value, source)
    return Profile(**values)


def settled(profile: Profile, setting: Scenario) -> Profile:
    """The profile without what the setting already says of it, or its user instead."""
    return replace(profile, batch_size=None, prefetch=setting.prefetch_distance, parallel=True)


def plan_profile(outlook: ScenarioPlanner, setting: Scenario, profile: Profile) -> PlanResult:
    """The plan that a profile asks for.  Raises BudgetError where it does not fit, ConfigError."""
    setting = replace(
        setting,
        users=profile.batch_size or setting.users,
        prefetch_distance=profile.prefetch if profile.parallel else 0,
    )
    if profile.gpu_layers is None or not setting.device_budget():
        if profile.auto_tune:
            return plan_for_objective(outlook, setting, profile.goal)
        return outlook.plan(setting)
    choices = _choices(outlook.demand(setting), profile)
    tried = (_with_smaller_chunks(outlook, replace(setting, device=each)) for each in choices)
    # Those that leave little room to map host memory would read from the disk what it could hold.
    fitting = [planned for planned in tried if planned is not None]
    found = min(fitting, key=lambda planned: planned.plan.disk_bytes_per_token, default=None)
    if found is None:
        outlook.plan(setting)  # a context that no plan can have is refused as that
        raise BudgetError(
            f"gpu_layers {profile.gpu_layers} does not fit {format_bytes(setting.device_budget())} "
            "of GPU memory; give fewer layers, or leave gpu_layers out"
        )
    if profile.auto_tune:
        return plan_for_objective(
            outlook, replace(found.setting, max_prefill_tokens=None), profile.goal
        )
    return found


def _choices(demand: Demand, profile: Profile) -> Iterator[DeviceChoice]:
    """What the profile wants on the device, and less and less of the experts."""
    assert profile.gpu_layers is not None
    layers = min(profile.gpu_layers, demand.spec.layers)
    experts = [block.id.layer for block in demand.of_kind(BlockKind.EXPERT)]
    if not experts:
        if layers == demand.spec.layers:
            yield DeviceChoice(layers, head=True, staying=layers)
        yield DeviceChoice(layers, staying=layers)
        return
    count = experts.count(experts[0])
    slots = likely_experts(
        count, demand.spec.experts_per_token, profile.expert_threshold or 0.0,
        demand.hit_curve,
    )  # fmt: skip
    for eighths in range(8, 0, -1):
        yield DeviceChoice(
            layers, staying=layers, expert_slots=slots * eighths // 8, staging_slots=_BRINGS[0]
        )
    for staging in _BRINGS:
        yield DeviceChoice(layers, staying=layers, staging_slots=staging)
    yield DeviceChoice(layers, staying=layers)


def likely_experts(count: int, chosen: int, threshold: float, curve: HitCurve) -> int:
    """How many of a layer's experts a token chooses with a probability of `threshold` at least."""
    found = 0
    for number in range(count):
        gained = curve.hits((number + 1) / count) - curve.hits(number / count)
        if chosen * gained < threshold - _ROUNDING:
            break
        found = number + 1
    return found


def _with_smaller_chunks(outlook: ScenarioPlanner, setting: Scenario) -> PlanResult | None:
    """The setting's plan, if need be with prompts in smaller pieces, which take less memory."""
    found = outlook.fits(setting)
    if found is None and setting.max_prefill_tokens is None:
        return outlook.fits(replace(setting, max_prefill_tokens=PAGE_TOKENS))
    return found


def _check(name: str, value: object, source: str) -> None:
    wanted: Mapping[str, str] = {field.name: str(field.type) for field in fields(Profile)}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "goal":
        good, what = value in GOALS, f"one of {', '.join(GOALS)}"
    elif name == "expert_threshold":
        good = number and 0 <= value <= 1  # type: ignore[operator]
        what = "a probability, 0 to 1"
    elif wanted[name].startswith("int"):
        least = 0 if name == "prefetch" else 1
        good = isinstance(value, int) and number and value >= least
        what = f"a whole number of at least {least}"
    elif name in _ALWAYS:
        good, what = value is True, "true: HMT always does that"
    else:
        good, what = isinstance(value, bool), "true or false"
    if not good:
        raise ConfigError(f"{source}: {name} is {value!r}; it must be {what}")
