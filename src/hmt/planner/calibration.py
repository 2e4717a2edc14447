"""Factors that make predictions agree with runs: one for each kind of time.

A run tells only how long its steps took, not which part of the prediction was wrong.  Runs that
are bound by different parts tell them apart: the factors are those with which most runs agree best.
A part that no run depends on keeps its factor of 1, and few runs move factors little.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, log
from statistics import fmean, median

from hmt.contracts.machine import Machine
from hmt.planner.predicted import StepCost

PARTS = ("CPU", "GPU", "link", "disk", "fixed")

_MOST = log(4.0)  # a factor beyond it is a mistake, not a calibration
_STEPS = tuple(sign * size for size in (0.4, 0.1, 0.02, 0.005) for sign in (-1, 1))
# One part alone, or two together: where two share the time of most runs, neither alone gets better.
_MOVES: tuple[Mapping[str, int], ...] = (
    *({part: 1} for part in PARTS),
    *({one: 1, other: sign} for one, other in combinations(PARTS, 2) for sign in (1, -1)),
)
_ROUNDS = 60
_DOUBT = 0.02  # what a factor must gain, per run, for each part of its logarithm


@dataclass(frozen=True, slots=True)
class StepRun:
    """Steps of one run.

    parts      seconds predicted, by PARTS, before any factor
    at_once    of the CPU's and the GPU's, seconds in which both were to compute
    actual_s   of a step, on average
    """

    parts: Mapping[str, float]
    at_once: float
    actual_s: float

    @staticmethod
    def of(step: StepCost, actual_s: float, factors: Mapping[str, float]) -> "StepRun":
        """From a prediction that was made with `factors`."""
        busy = dict(step.busy_s)
        busy["fixed"] = busy.pop("handing over", 0.0)
        in_turn = busy["CPU"] + busy["GPU"] + busy["fixed"]
        ahead = max(busy["link"], busy["disk"])
        at_once = max(0.0, in_turn - step.seconds) if step.seconds > ahead else 0.0
        raw = {part: busy[part] / factors.get(part, 1.0) for part in PARTS}
        return StepRun(raw, at_once, actual_s)

    def seconds(self, factors: Mapping[str, float]) -> float:
        """Predicted with `factors`."""
        taken = {part: self.parts[part] * factors.get(part, 1.0) for part in PARTS}
        in_turn = taken["CPU"] + taken["GPU"] + taken["fixed"] - self.at_once
        return max(in_turn, taken["link"], taken["disk"], 1e-9)

    def error(self, factors: Mapping[str, float]) -> float:
        """The logarithm of predicted over actual."""
        return log(self.seconds(factors) / self.actual_s)


def fitted(runs: Sequence[StepRun]) -> dict[str, float]:
    """The factors that suit `runs` best, by part."""
    logs = dict.fromkeys(PARTS, 0.0)

    def loss(tried: Mapping[str, float]) -> float:
        # Absolute errors: a few runs beside a busy neighbour do not count for more than they are.
        factors = {part: exp(value) for part, value in tried.items()}
        wrong = sum(abs(run.error(factors)) for run in runs)
        return wrong + _DOUBT * sum(map(abs, tried.values()))

    best = loss(logs)
    for _ in range(_ROUNDS):
        before = best
        for move in _MOVES:
            for step in _STEPS:
                tried = logs | {
                    part: max(-_MOST, min(_MOST, logs[part] + sign * step))
                    for part, sign in move.items()
                }
                if (found := loss(tried)) < best - 1e-12:
                    logs, best = tried, found
        if before - best < 1e-9:
            break
    return {part: exp(value) for part, value in logs.items()}


def beyond(factors: Mapping[str, float]) -> list[str]:
    """Parts whose factor is as far from 1 as any may be: something else made these runs so slow."""
    return [part for part in factors if abs(log(factors[part])) > _MOST - 1e-6]


def errors(runs: Iterable[StepRun], factors: Mapping[str, float]) -> tuple[float, float, float]:
    """Median, mean and worst of |predicted / actual - 1|; all 0 without runs."""
    found = [abs(run.seconds(factors) / run.actual_s - 1) for run in runs]
    if not found:
        return 0.0, 0.0, 0.0
    return median(found), fmean(found), max(found)


def calibrated(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The machine with times of each kind multiplied by its factor."""
    cpu, gpu, link, disk, fixed = (factors.get(part, 1.0) for part in PARTS)
    if all(factor == 1.0 for factor in factors.values()):
        return machine

    def slower(rates: Mapping[str, float], factor: float) -> dict[str, float]:
        return {name: rate / factor for name, rate in rates.items()}

    def longer(times: Mapping[str, float], factor: float) -> dict[str, float]:
        return {name: each * factor for name, each in times.items()}

    return replace(
        machine,
        ram_read_rate=machine.ram_read_rate / cpu,
        core_read_rate=machine.core_read_rate / cpu,
        shared_cpu_rate=machine.shared_cpu_rate / cpu,
        cpu_rates=slower(machine.cpu_rates, cpu),
        cpu_ops=slower(machine.cpu_ops, cpu),
        cpu_row_s=slower(machine.cpu_row_s, 1 / cpu),
        cpu_cached_row_s=slower(machine.cpu_cached_row_s, 1 / cpu),
        cached_rates=slower(machine.cached_rates, cpu),
        cpu_cached_rates=slower(machine.cpu_cached_rates, cpu),
        cpu_attention_rate=machine.cpu_attention_rate / cpu,
        cpu_attention_ops=machine.cpu_attention_ops / cpu,
        cpu_attention_short_ops=machine.cpu_attention_short_ops / cpu,
        cpu_cached_attention_rate=machine.cpu_cached_attention_rate / cpu,
        cpu_attention_short_rate=machine.cpu_attention_short_rate / cpu,
        cpu_cached_attention_short_rate=machine.cpu_cached_attention_short_rate / cpu,
        cpu_attention_cold_s=machine.cpu_attention_cold_s * cpu,
        number_s=machine.number_s * cpu,
        device_read_rate=machine.device_read_rate / gpu,
        device_rates=slower(machine.device_rates, gpu),
        device_ops=slower(machine.device_ops, gpu),
        device_attention_rate=machine.device_attention_rate / gpu,
        device_attention_ops=machine.device_attention_ops / gpu,
        device_attention_several=machine.device_attention_several / gpu,
        device_number_s=machine.device_number_s * gpu,
        link_rate=machine.link_rate / link,
        shared_link_rate=machine.shared_link_rate / link,
        disk_read_rate=machine.disk_read_rate / disk,
        step_s=machine.step_s * fixed,
        row_s=machine.row_s * fixed,
        draw_s=machine.draw_s * fixed,
        draw_row_s=machine.draw_row_s * fixed,
        logit_s=machine.logit_s * fixed,
        layer_s=machine.layer_s * fixed,
        apart_layer_s=machine.apart_layer_s * fixed,
        read_block_s=machine.read_block_s * fixed,
        read_alone_s=machine.read_alone_s * fixed,
        apart_experts_s=machine.apart_experts_s * fixed,
        apart_latent_s=machine.apart_latent_s * fixed,
        apart_latent_row_s=machine.apart_latent_row_s * fixed,
        held_experts_s=machine.held_experts_s * fixed,
        missed_expert_s=machine.missed_expert_s * fixed,
        lookup_s=machine.lookup_s * fixed,
        prompt_layer_s=machine.prompt_layer_s * fixed,
        piece_s=machine.piece_s * fixed,
        prompt_latent_s=machine.prompt_latent_s * fixed,
        prompt_experts_s=machine.prompt_experts_s * fixed,
        latent_number_s=machine.latent_number_s * cpu,
        expert_number_s=machine.expert_number_s * cpu,
        device_step_s=machine.device_step_s * gpu,
        device_layers=longer(machine.device_layers, gpu),
        device_launches=longer(machine.device_launches, fixed),
        bring_s=machine.bring_s * fixed,
        prompt_s=machine.prompt_s * fixed,
        launch_s=machine.launch_s * fixed,
        prompt_launch_s=machine.prompt_launch_s * fixed,
        sync_s=machine.sync_s * fixed,
    )
