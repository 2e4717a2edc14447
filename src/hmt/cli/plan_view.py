"""What `hmt plan` says besides the plan: speeds, what bounds them, what would help."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hmt.base.units import format_bytes, format_seconds
from hmt.planner.what_if.explain import LIMITS

if TYPE_CHECKING:
    from hmt.planner.cost.step_prediction import StepCost
    from hmt.planner.what_if.scenario import PlanResult, ScenarioChange

NO_WEIGHTS = "no weights are there to be read: planned as a pack of them (hmt convert)"
_SHOWN = 5  # of what would help
_RESIDENCIES = (0.06, 0.25, 0.5)


def speed_lines(planned: "PlanResult") -> list[str]:
    """The prediction for what was asked, and what bounds it."""
    found = planned.prediction
    if not found.tokens_per_s:
        return ["no speed is predicted: rates of memory, GPU or disk are not known (hmt probe)"]
    users, each = (f"{found.users} users", " each") if found.users > 1 else ("one user", "")
    lines = [
        f"predicted: {_number(found.tokens_per_s)} tokens/s for {users} with {found.context} "
        f"positions{each}, bound by {LIMITS[found.step.limit]}"
    ]
    if found.ttft_s:
        lines.append(
            f"  a prompt of {found.prompt_tokens} tokens: first token after "
            f"{format_seconds(found.ttft_s)}, bound by {LIMITS[found.prompt.limit]}"
        )
    lines.append(f"  a step of {format_seconds(found.step.seconds)}: {_parts(found.step)}")
    return lines


def hit_lines(planned: "PlanResult") -> list[str]:
    """Where the hits of caches of experts come from; nothing of a dense model."""
    curve = planned.demand.hit_curve
    if not planned.demand.spec.experts_per_token:
        return []
    some = ", ".join(f"{curve.hits(share):.0%} with {share:.0%}" for share in _RESIDENCIES)
    return ["", f"hits of caches with a share of the experts, from {curve.origin}: {some}"]


def table_lines(rows: "Sequence[Sequence[PlanResult | None]]", users: Sequence[int]) -> list[str]:
    """Tokens/s of all users together, by context; and the time of a prompt as long as it."""
    lines = [
        "",
        f"{'tokens/s':>10}"
        + "".join(f"{_users(count):>12}" for count in users)
        + "      first token",
    ]
    for row in rows:
        known = [planned for planned in row if planned is not None]
        if not known:
            continue
        cells = [
            "-" if planned is None else _number(planned.prediction.tokens_per_s) for planned in row
        ]
        first = known[0].prediction
        wait = format_seconds(first.ttft_s) if first.ttft_s else "-"
        lines.append(
            f"{first.context:>10}" + "".join(f"{cell:>12}" for cell in cells) + f"{wait:>17}"
        )
    return lines


def help_lines(changes: "Sequence[ScenarioChange]") -> list[str]:
    """What would make it faster."""
    if not changes:
        return ["", "nothing that was tried would make it faster by 1%"]
    lines = ["", "what would help most:"]
    return lines + [f"  {change.text}: {change.gain:+.0%}" for change in changes[:_SHOWN]]


def options_line(planned: "PlanResult", goal: str) -> str:
    """How to run a plan that was searched for."""
    users, positions = planned.setting.users, planned.plan.kv_tokens
    shared = f" --max-batch {users} --context {positions}" if users > 1 else ""
    command = "serve" if shared else "run"
    return f"to run so, on this machine: hmt {command} --goal {goal}{shared}"


def beside_line(planned: "PlanResult", own: "PlanResult", goal: str) -> str:
    """A plan with somebody's choices, beside the planner's own."""
    asked, found = planned.prediction, own.prediction
    return (
        f"with these choices {_number(asked.tokens_per_s)} tokens/s and a first token after "
        f"{format_seconds(asked.ttft_s)}; without them (--goal {goal}) "
        f"{_number(found.tokens_per_s)} tokens/s and {format_seconds(found.ttft_s)}"
    )


def remedy_text(changes: "Sequence[ScenarioChange]") -> str:
    """The end of a refusal: what would fit."""
    if not changes:
        return "no change of one thing would make it fit"
    return "these would fit: " + "; ".join(change.text for change in changes)


def _parts(step: "StepCost") -> str:
    parts = []
    for name, seconds in step.busy_s.items():
        if seconds:
            nbytes = step.nbytes.get(name, 0.0)
            what = f" ({format_bytes(nbytes)})" if nbytes else ""
            parts.append(f"{name} {format_seconds(seconds)}{what}")
    return ", ".join(parts)


def _users(count: int) -> str:
    return f"{count} user{'s' if count > 1 else ''}"


def _number(rate: float) -> str:
    if not rate:
        return "-"
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"
