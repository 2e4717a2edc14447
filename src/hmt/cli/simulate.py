"""`hmt simulate`: what a plan would do under many requests, on this machine or on another."""

import json as json_format
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hmt.base.errors import ConfigError
from hmt.base.units import format_bytes, format_seconds
from hmt.cli.options import EngineOptions, ModelArgument, expand

if TYPE_CHECKING:
    from hmt.planner.what_if.scenario import PlanResult
    from hmt.simulator.traffic import Traffic

_PROMPT, _ANSWER, _SECONDS = 512, 128, 600.0


@expand
def simulate(
    engine: EngineOptions,
    model: ModelArgument = None,
    machine: Annotated[
        str | None, typer.Option(help="Another machine: a TOML file or a name, as for hmt plan.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            help="File with requests: a JSON object per line with due_s, prompt_tokens and tokens, "
            "or what hmt bench serve --json wrote."
        ),
    ] = None,
    cell: Annotated[
        int | None, typer.Option(min=1, help="Of that file's results: which, from 1.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, at random moments.")
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests at once, 1 usually. Without --requests and --rate: users that ask "
            "again once they have an answer.",
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of a prompt; {_PROMPT} when left out.")
    ] = None,
    answer: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of an answer; {_ANSWER} when left out.")
    ] = None,
    spread: Annotated[
        float,
        typer.Option(min=0, max=2, help="Sigma of log-normal lengths; 0: all are equally long."),
    ] = 0.0,
    seconds: Annotated[
        float, typer.Option(min=0.001, help="How long requests come; all are answered.")
    ] = _SECONDS,
    seed: Annotated[int, typer.Option(help="Of moments and lengths.")] = 0,
    routing: Annotated[Path | None, typer.Option(help="Trace of experts, as for hmt plan.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Answer requests by a plan and its predicted steps, without loading or computing anything."""
    from dataclasses import replace

    from hmt.cli.plan_options import PlanRequest, planned_for
    from hmt.cli.plan_ranks import refuse_ranks
    from hmt.planner.cost.cost_model import CostModel
    from hmt.planner.cost.step_costs import StepCosts
    from hmt.planner.cost.workload import workload_of
    from hmt.simulator.simulator import simulate as simulated

    refuse_ranks(engine, "requests are simulated through the plan")
    traffic = _traffic(requests, cell, rate, users, prompt, answer, spread, seconds, seed)
    if engine.context is None:
        engine = replace(engine, context=traffic.longest)
    asked = PlanRequest(model, machine, users, prompt, routing)
    planned, _, _ = planned_for(engine, asked)
    costs = CostModel(workload_of(planned.demand, planned.plan), planned.setting.machine)
    found = simulated(
        traffic, StepCosts(costs), positions=planned.plan.kv_tokens,
        max_prefill_tokens=planned.plan.max_prefill_tokens, max_batch=planned.setting.users,
    )  # fmt: skip
    summary = found.summary()
    if json:
        print(json_format.dumps({"machine": planned.setting.machine.name} | summary, indent=1))
    else:
        print("\n".join(_lines(planned, summary)))


def _traffic(
    requests: Path | None,
    cell: int | None,
    rate: float | None,
    users: int | None,
    prompt: int | None,
    answer: int | None,
    spread: float,
    seconds: float,
    seed: int,
) -> "Traffic":
    from hmt.simulator.traffic import Lengths, arrivals, closed_loop, read_requests

    if requests is not None:
        if rate is not None or prompt is not None or answer is not None or spread:
            raise ConfigError("--requests says when they come and how long they are: leave out "
                              "--rate, --prompt, --answer and --spread")  # fmt: skip
        return read_requests(requests.expanduser(), cell)
    if not seconds < inf:
        raise ConfigError(f"--seconds {seconds} would never end")
    lengths = Lengths(prompt or _PROMPT, answer or _ANSWER, spread)
    if rate is None:
        return closed_loop(users or 1, seconds, lengths, seed)
    if not 0 < rate < inf:
        raise ConfigError(f"--rate {rate} must be more than 0")
    return arrivals(rate, seconds, lengths, seed)


def _lines(planned: "PlanResult", summary: dict[str, Any]) -> list[str]:
    from hmt.planner.what_if.explain import LIMITS

    setting, batch, queue = planned.setting, summary["batch"], summary["queue"]
    users = f"{setting.users} request{'s' if setting.users > 1 else ''}"
    lines = [
        f"{planned.demand.spec.architecture} on {setting.machine.name}: {users} at once at most, "
        f"{planned.plan.kv_tokens} positions, "
        f"prompts in chunks of {planned.plan.max_prefill_tokens}",
        f"{summary['answered']} answers of {summary['requests']} requests in "
        f"{format_seconds(summary['wall_s'])}: {summary['tokens_per_s']:.1f} tokens/s, "
        f"{summary['requests_per_s']:.3g} answers/s",
    ]
    if summary["refused"]:
        lines.append(f"{summary['refused']} were refused: longer than the plan has positions for")
    if not summary["answered"]:
        return lines
    lines += ["", f"{'':22}{'P50':>12}{'P90':>12}{'P99':>12}"]
    for name, key in (
        ("waits", "waiting_s"), ("first token after", "ttft_s"),
        ("each token after it", "tpot_s"), ("whole answer", "e2e_s"),
    ):  # fmt: skip
        found = summary[key]
        if found is not None:
            cells = "".join(f"{format_seconds(value):>12}" for value in found.values())
            lines.append(f"{name:22}{cells}")
    lines += [
        "",
        f"batch {batch['mean']:.1f} on average, {batch['most']} at most; queue {queue['mean']:.1f} "
        f"on average, {queue['most']} at most; {summary['steps']} steps; "
        f"{summary['preemptions']} times one gave way",
        f"{'':22}{'busy':>12}{'read':>14}{'per second':>16}",
    ]
    for part, share in summary["utilisation"].items():
        nbytes, rate = summary["bytes"].get(part, 0.0), summary["bytes_per_s"].get(part, 0.0)
        if share or nbytes:
            read = f"{format_bytes(nbytes):>14}{format_bytes(rate) + '/s':>16}" if nbytes else ""
            lines.append(f"{part:22}{share:>12.1%}{read}")
    lines.append(f"{'nothing to do':22}{summary['idle']:>12.1%}")
    bound = summary["bound_by"][summary["bottleneck"]]
    lines.append(f"bound by {LIMITS[summary['bottleneck']]} {bound:.0%} of the time")
    return lines
