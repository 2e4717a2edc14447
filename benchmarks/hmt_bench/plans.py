"""Are searched plans better than chance, and than what people do by hand?  All of it predicted.

For each model on each described machine: the plan that the goal's search finds, beside random plans
that fit and beside rules of thumb.  Every one of them is planned whole, and what it costs is what
the model of cost says of it, with the weights the goal gives to prompts and answers.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hmt
from hmt.base.errors import BudgetError
from hmt.contracts.blocks import BlockKind
from hmt.engine import EngineConfig
from hmt.engine.loading.what_if import scenarios_for
from hmt.hardware.machine_file import read_machine
from hmt.planner.cost.demand import Demand
from hmt.planner.placement.device import DeviceChoice, DeviceRoom
from hmt.planner.what_if.objectives import plan_for_objective, seconds_for
from hmt.planner.what_if.scenario import PlanResult, Scenario, ScenarioPlanner

RULES = ("all on the CPU", "first layers on the GPU", "experts or networks on the CPU")
_CHUNKS = (64, 256, 512, 1024, 2048, 4096)
_DRAWN = 100  # for each that is wanted: where memory is short, few fit
_EQUAL = 1 - 1e-9  # of a cost: plans that are alike differ by the order of a sum
_SMALL = 4  # power of a share of experts: small caches are what fits


@dataclass(frozen=True, slots=True)
class Case:
    """What is planned: `users` with `context` positions each, and prompts of so many tokens."""

    model: str
    machine: str
    goal: str
    users: int = 1
    context: int = 8192
    prompt_tokens: int = 2048
    scheme: str = "w4a8"


def cases(models: Sequence[str], machines: Sequence[str]) -> list[Case]:
    """Every model on every machine, for one user who waits, and for eight who share."""
    found = []
    for model in models:
        for machine in machines:
            found.append(Case(model, machine, "latency"))
            found.append(Case(model, machine, "throughput", users=8, context=4096))
    return found


def compare(case: Case, count: int, seed: int = 0) -> dict[str, Any]:
    """The searched plan beside `count` random ones that fit, and beside `RULES`.

    beaten   share of the random plans that cost as much or more; None where none was found
    best_random, rules   cost over the searched plan's: below 1 is better than it.  None: does not
             fit
    refused  why there is no plan at all; the rest is then missing
    """
    config = EngineConfig.resolve(quantization=case.scheme, max_batch=case.users)
    plans = scenarios_for(case.model, config)
    setting = Scenario(
        read_machine(case.machine), case.scheme, case.users, case.context, case.prompt_tokens
    )
    content: dict[str, Any] = {"model": case.model, "machine": case.machine, "goal": case.goal,
                               "users": case.users, "context": case.context}  # fmt: skip
    try:
        found = plan_for_objective(plans, setting, case.goal)
    except BudgetError as error:
        return content | {"refused": str(error)}

    def ratio(planned: PlanResult | None) -> float | None:
        if planned is None:
            return None
        return seconds_for(case.goal, planned.prediction) / seconds_for(case.goal, found.prediction)

    chance = random.Random(f"{seed} {case}")
    others = [ratio(planned) for planned in random_plans(plans, setting, count, chance)]
    known = [one for one in others if one is not None]
    return content | {
        "tokens_per_s": found.prediction.tokens_per_s,
        "ttft_s": found.prediction.ttft_s,
        "random_plans": len(known),
        "beaten": sum(one >= _EQUAL for one in known) / len(known) if known else None,
        "best_random": min(known, default=None),
        "rules": {
            name: ratio(planned)
            for name, planned in by_hand(plans, setting, found.plan.max_prefill_tokens).items()
        },
    }


def random_plans(
    plans: ScenarioPlanner, setting: Scenario, count: int, chance: random.Random
) -> Iterator[PlanResult]:
    """At most `count` plans that fit, of what may be chosen: the device's part, pieces, memory."""
    demand = plans.demand(setting)
    rooms = {
        chunk: DeviceRoom(
            demand, setting.device_budget(), chunk=chunk,
            context=(setting.context or 0) * setting.users, host_bytes=setting.host_budget(),
        )
        for chunk in _CHUNKS
    }  # fmt: skip
    made = 0
    for _ in range(_DRAWN * count):
        if made == count:
            return
        wanted = replace(setting, max_prefill_tokens=chance.choice(_CHUNKS))
        if setting.device_budget():
            choice = _random_choice(demand, chance)
            if rooms[wanted.max_prefill_tokens or 0].taken(choice) is None:
                continue
            wanted = replace(wanted, device=choice)
        else:
            given = int(setting.host_budget() * chance.uniform(0.3, 1.0))
            wanted = replace(wanted, host_bytes=given, prefetch_distance=chance.randint(0, 3))
        planned = plans.fits(wanted)
        if planned is not None:
            made += 1
            yield planned


def by_hand(plans: ScenarioPlanner, setting: Scenario, chunk: int) -> dict[str, PlanResult | None]:
    """What rules of thumb give, with prompts in pieces of `chunk` tokens; None: nothing that fits.

    The GPU gets as many layers as fit, with all that belongs to them, and the head where all do; or
    their attention alone, and the head.
    """
    setting = replace(setting, max_prefill_tokens=chunk)
    found: dict[str, PlanResult | None] = {RULES[0]: plans.fits(replace(setting, device_bytes=0))}
    if not setting.device_budget():
        return found
    demand = plans.demand(setting)
    layers, experts = demand.spec.layers, _experts(demand)

    def whole(count: int) -> DeviceChoice:
        staging = 1 if experts else 0
        return DeviceChoice(count, staying=count, expert_slots=experts, staging_slots=staging)

    def attention(count: int) -> DeviceChoice:
        return DeviceChoice(count, head=True)

    for name, make in ((RULES[1], whole), (RULES[2], attention)):
        choices = [replace(make(layers), head=True), *map(make, range(layers, 0, -1))]
        fitting = (plans.fits(replace(setting, device=choice)) for choice in choices)
        found[name] = next((planned for planned in fitting if planned is not None), None)
    return found


def _experts(demand: Demand) -> int:
    """Of a layer."""
    layers = [block.id.layer for block in demand.of_kind(BlockKind.EXPERT)]
    return layers.count(layers[-1]) if layers else 0


def _random_choice(demand: Demand, chance: random.Random) -> DeviceChoice:
    layers, experts = chance.randint(1, demand.spec.layers), _experts(demand)
    return DeviceChoice(
        layers,
        chance.random() < 0.5,
        chance.randint(0, layers),
        chance.randint(0, layers),
        int(experts * chance.random() ** _SMALL),
        chance.randint(0, 8) if experts else 0,
    )


def content_of(results: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    """A benchmark's file; nothing in it depends on the machine that it was made on."""
    return {
        "benchmark": "plans",
        "hmt": hmt.__version__,
        "random_plans": count,
        "summary": summary(results),
        "results": list(results),
    }


def table(content: dict[str, Any]) -> str:
    """For Markdown: a row for each machine and one for all, over models and goals.

    Costs are the least of all, over those of the searched plans: below 1 is better than these.
    """
    head = ["machine", "plans", "random ones", "beaten, at least", "best of chance", *RULES]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    machines = dict.fromkeys(one["machine"] for one in content["results"])
    for name in (*machines, "all"):
        own = [one for one in content["results"] if name in (one["machine"], "all")]
        found = summary(own)
        rules = [
            _cost(
                min((cost for one in own if (cost := _rule(one, rule)) is not None), default=None)
            )
            for rule in RULES
        ]
        least = found["least_beaten"]
        cells = [
            name, str(found["planned"]), str(found["random_plans"]),
            "-" if least is None else f"{least:.1%}", _cost(found["best_random"]), *rules,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rule(one: dict[str, Any], rule: str) -> float | None:
    cost: float | None = one.get("rules", {}).get(rule)
    return cost


def _cost(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all comparisons: how often chance and rules of thumb were beaten."""
    planned = [one for one in results if "refused" not in one]
    shares = [one["beaten"] for one in planned if one["beaten"] is not None]
    rules = [cost for one in planned for cost in one["rules"].values() if cost is not None]
    return {
        "planned": len(planned),
        "refused": len(results) - len(planned),
        "random_plans": sum(one["random_plans"] for one in planned),
        "least_beaten": min(shares, default=None),
        "mean_beaten": sum(shares) / len(shares) if shares else None,
        "best_random": min(
            (one["best_random"] for one in planned if one["best_random"] is not None), default=None
        ),
        "rules": len(rules),
        "rules_that_win": sum(cost < _EQUAL for cost in rules),
    }
