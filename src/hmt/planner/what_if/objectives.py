"""Plans for a goal: soon, much, or both."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from hmt.base.errors import BudgetError, ConfigError
from hmt.base.units import round_down
from hmt.contracts.model import PAGE_TOKENS
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.step_prediction import Prediction
from hmt.planner.placement.device_estimate import DeviceEstimate
from hmt.planner.placement.footprint import default_chunk
from hmt.planner.placement.kv_tiers import KVBudgets
from hmt.planner.what_if.scenario import PlanResult, Scenario, ScenarioPlanner
from hmt.planner.what_if.search import cheapest

GOALS: Final = ("latency", "throughput", "balanced")
ANSWER_TOKENS = 256  # of the answer that goals weigh against its prompt

_CHUNKS = (512, 1024, 2048, 4096, 8192)
_USERS = (1, 4, 16, 32)
_KV_SHARES = (1.0, 0.5, 0.25, 0.1)  # of keys and values, near
_MUCH = 0.25  # of a GPU's memory
_LESS = (0.85, 0.7, 0.5)  # of memories
_SEARCHED = 1  # sizes of pieces for which the share of the device is searched for


def seconds_for(goal: str, found: Prediction) -> float:
    """What a goal wants little of.

    latency      seconds of one prompt and its answer, other users decoding beside it
    throughput   seconds of the machine for each answer, prompts included
    balanced     the geometric mean of both

    Endless where no speed is predicted: what is not known is not better than what is.
    """
    step = found.step
    if not step.seconds and (step.nbytes.get("disk") or any(step.busy_s.values())):
        return inf
    answer = ANSWER_TOKENS * found.step.seconds
    latency = found.ttft_s + answer
    throughput = found.ttft_s + answer / found.users
    match goal:
        case "latency":
            return latency
        case "throughput":
            return throughput
    return float((latency * throughput) ** 0.5)


def plan_for_objective(
    outlook: ScenarioPlanner, setting: Scenario, goal: str, *, users: Sequence[int] = ()
) -> PlanResult:
    """The best plan that is found for a goal; what the setting says stays as it says.

    users   numbers of users to choose from; none: as the setting says

    Where the setting leaves the context open, it is that of the plan without a goal: a shorter one
    would look faster, and be none.

    Raises BudgetError where nothing fits, and ConfigError for an unknown goal.
    """
    if goal not in GOALS:
        raise ConfigError(f"goal {goal!r} is unknown; choose {', '.join(GOALS)}")
    if setting.context is None and (usual := outlook.fits(setting)) is not None:
        whole = round_down(usual.prediction.context, PAGE_TOKENS)
        setting = replace(setting, context=whole or None)
    best: PlanResult | None = None
    for count in users or (setting.users,):
        wanted = replace(setting, users=count)
        if best is not None:  # what was right for fewer users is near to it
            wanted = replace(wanted, max_prefill_tokens=best.plan.max_prefill_tokens)
        found = _best_chunk(outlook, wanted, goal)
        if found is not None and (best is None or _worth(goal, found) < _worth(goal, best)):
            best = found
    if best is None:
        return outlook.plan(setting)  # which says why not
    return min(_with_less(outlook, best), key=lambda planned: _worth(goal, planned))


def _with_less(outlook: ScenarioPlanner, best: PlanResult) -> Iterator[PlanResult]:
    """The plan, and what plans for smaller memories would be.

    The solver fills what it is given by rules, which may be worse with more: a larger part of a
    network on the device, or dense blocks in the room of experts' slots in host memory.
    """
    yield best
    setting = best.setting
    host, device = setting.host_budget(), setting.device_budget()
    less = [replace(setting, host_bytes=int(share * host)) for share in _LESS]
    if device and setting.kv is None:
        less += [replace(setting, device_bytes=int(share * device), device=None) for share in _LESS]
    yield from _fitting(outlook, less)


def _fitting(outlook: ScenarioPlanner, settings: Iterable[Scenario]) -> Iterator[PlanResult]:
    for setting in settings:
        if (planned := outlook.fits(setting)) is not None:
            yield planned


def choices_of_users(goal: str) -> tuple[int, ...]:
    """Numbers of users at once that a goal may choose from, where nobody says how many."""
    return _USERS if goal == "throughput" else (1, 4) if goal == "balanced" else (1,)


def _best_chunk(outlook: ScenarioPlanner, setting: Scenario, goal: str) -> PlanResult | None:
    """Over the sizes of prompts' pieces; larger ones cost memory, which may be worth more.

    What the device gets is searched for where the solver's own choice is best.
    """
    found = [*_fitting(outlook, [setting])]
    demand = outlook.demand(setting)
    prompt = setting.prompt_tokens or setting.context
    sizes = {default_chunk(demand), *(c for c in _CHUNKS if prompt is None or c < 2 * prompt)}
    chunks = sorted(sizes) if setting.max_prefill_tokens is None else [setting.max_prefill_tokens]
    ranked: list[tuple[float, int]] = []
    for chunk in chunks:
        wanted = replace(setting, max_prefill_tokens=chunk)
        planned = outlook.fits(wanted)
        plans = [] if planned is None else [planned]
        plans += _by_levels(outlook, wanted, planned)
        found += plans
        ranked.append((min((_worth(goal, one) for one in plans), default=inf), chunk))
    if setting.device_budget() and setting.kv is None and setting.device is None:
        for _, chunk in sorted(ranked)[:_SEARCHED]:
            one = searched(outlook, replace(setting, max_prefill_tokens=chunk), goal)
            found += [] if one is None else [one]
    return min(found, key=lambda planned: _worth(goal, planned), default=None)


def _by_levels(
    outlook: ScenarioPlanner, setting: Scenario, planned: PlanResult | None
) -> Iterator[PlanResult]:
    """With a part of the keys and values where layers compute, and layers with windows in rings.

    Only where that could matter: keys and values are much of the GPU's memory, or have windows.
    """
    demand, room = outlook.demand(setting), setting.device_budget()
    tokens = planned.plan.kv_tokens if planned else (setting.context or 0) * setting.users
    total = tokens * demand.kv_token_bytes
    windows = any(layer.window for layer in demand.spec.kv_layers.values())
    if demand.kv_sizes is None or setting.kv is not None or setting.device is not None or not room:
        return
    if not total or not (windows or total > _MUCH * room):
        return
    for share in _KV_SHARES:
        if share < 1 or windows:
            near = replace(setting, kv=KVBudgets(int(total * share)))
            found = outlook.fits(near)
            if found is not None:
                yield found


def searched(outlook: ScenarioPlanner, setting: Scenario, goal: str) -> PlanResult | None:
    """The plan of the cheapest choice for the device; None where it does not fit."""
    demand = outlook.demand(setting)
    options = setting.options()
    context = options.context or 0
    if not context:
        known = outlook.fits(setting)
        context = 0 if known is None else known.plan.kv_tokens
    chunk = setting.max_prefill_tokens or default_chunk(demand)
    try:
        draft = DeviceEstimate(
            demand, setting.machine, device_bytes=options.device_bytes,
            host_bytes=options.host_bytes, chunk=chunk, context=context,
        )  # fmt: skip
    except BudgetError:
        return None
    each = max(1, context // setting.users)
    prompt = setting.prompt_tokens or each
    weigh = _weigher(goal, setting.users, each, prompt)
    found = []
    for choice in dict.fromkeys(cheapest(draft, setting.machine, weigh)):
        wanted = replace(setting, device=choice if choice.layers else None)
        found.append(outlook.fits(wanted if choice.layers else replace(wanted, device_bytes=0)))
    fitting = [planned for planned in found if planned is not None]
    return min(fitting, key=lambda planned: _worth(goal, planned), default=None)


def _weigher(goal: str, users: int, context: int, prompt: int) -> Callable[[CostModel], float]:
    def weigh(costs: CostModel) -> float:
        return seconds_for(goal, costs.predict(users, context, prompt))

    return weigh


def _worth(goal: str, planned: PlanResult) -> float:
    return seconds_for(goal, planned.prediction)
