"""The summary: every kind of run can be printed, in 80 columns, and says what limited it."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from hmt.cli.report import summary_json, summary_view
from hmt.contracts.machine import ComputeRates, Machine
from hmt.engine import ABResult, DeviceAccount, ExpertAccount, Phase, RunSummary, StepPrediction

MIB = 1 << 20
STREAMED = RunSummary(
    prompt=Phase(
        steps=1,
        tokens=40,
        seconds=0.5,
        waited_s=0.1,
        kernel_s=0.3,
        disk_bytes=40 * MIB,
        host_bytes=400 * MIB,
        hits=3,
        pending=4,
        misses=5,
    ),
    generation=Phase(
        steps=100,
        tokens=100,
        seconds=10.0,
        waited_s=6.0,
        disk_s=9.0,
        kernel_s=3.8,
        disk_bytes=1000 * MIB,
        useful_bytes=990 * MIB,
        host_bytes=1400 * MIB,
        hits=50,
        pending=30,
        misses=20,
    ),
    machine=Machine("a machine", 2, 1 << 34, 2e8, ComputeRates(4e10)),
    published_bytes=14 * MIB,
    budget_bytes=4 * MIB,
    used_bytes={"resident": 1 * MIB, "slots": 2 * MIB, "kv": 0},
    resident_bytes=1 * MIB,
    streamed_bytes=13 * MIB,
    peak_rss_bytes=400 * MIB,
)


def shown(summary: RunSummary) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(summary_view(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_a_run_with_a_gpu_says_who_computed_its_experts() -> None:
    used = {"resident": 5 * MIB, "experts": 2 * MIB}
    experts = ExpertAccount(found=30, brought=50, left=20, nbytes=25 * MIB)
    device = DeviceAccount("a GPU", 8 * MIB, used, 5 * MIB, 0, experts)
    text = " ".join(shown(replace(STREAMED, device=device)).split())
    assert "30% found on the GPU, 50% brought over the link, 20% left to the CPU" in text
    halves = replace(device, experts=replace(experts, cut=10.0))
    text = " ".join(shown(replace(STREAMED, device=halves)).split())
    assert "30% found on the GPU, 60% brought over the link, 10% left to the CPU" in text
    content = summary_json(replace(STREAMED, device=device))
    assert content["device"]["experts"] == {"found": 30, "brought": 50, "left": 20} | {
        "nbytes": 25 * MIB,
        "cut": 0.0,
    }
    nothing = replace(experts, found=0, brought=0, left=0)
    assert "brought" not in shown(replace(STREAMED, device=replace(device, experts=nothing)))


def test_a_run_says_what_was_predicted() -> None:
    predicted = StepPrediction(2, 100.0, 0.08, 0.1, 2e6, 1e6, 1e6, 3 * MIB)
    text = " ".join(shown(replace(STREAMED, predicted=predicted)).split())
    assert "25.0 tokens/s for 2 users with 100 positions" in text
    assert "a step took 125% of that time" in text
    content = summary_json(replace(STREAMED, predicted=predicted))["predicted"]
    assert abs(content["error"] - 0.25) < 1e-9 and content["used_bytes"] == 3 * MIB
    assert replace(predicted, actual_s=0.0).error is None, "nothing was decoded"
    assert "predicted" not in shown(replace(STREAMED, predicted=replace(predicted, step_s=0.0)))


def test_a_run_that_waited_for_conversions_says_so():
    text = shown(replace(STREAMED, generation=replace(STREAMED.generation, converted_s=5.0)))
    assert "converting weights when they are first read" in text


def test_a_run_that_streamed_names_the_drive():
    text = shown(STREAMED)
    assert "100 tokens at 10.0 tokens/s" in text
    assert "1.00 MiB in memory, 13.0 MiB on disk" in text
    assert "14.0 MiB from memory, 10.0 MiB from disk; 50% of it in time" in text
    assert "40% computing, 60% waiting for disk" in text
    assert "Python  2.00 ms per token, 2% of the time" in text
    assert "the disk, at 105 MB/s: 52% of its measured 200 MB/s" in text
    assert "A model 3.5 times the size of its memory" in text


def test_guesses_are_told_only_where_there_were_some():
    assert "guesses" not in shown(STREAMED)
    guessed = replace(
        STREAMED.generation,
        expert_prefetches=1200,
        expert_prefetch_hits=900,
        expert_prefetch_wasted_bytes=30 * MIB,
        expert_prefetch_saved_s=0.25,
    )
    untried = replace(STREAMED, generation=guessed)
    assert "75% of 1200 needed; 30.0 MiB in vain" in shown(untried)
    tried = replace(untried, expert_prefetch_gain=ABResult(True, 0.0975, 0.1, 0.001))
    assert "75% of 1200 needed; saved 2.50 ms per token; 30.0 MiB in vain" in shown(tried)
    slower = replace(STREAMED, expert_prefetch_gain=ABResult(False, 0.12, 0.1, 0.001))
    assert "off: steps took 120 ms with them, 100 ms without" in shown(slower)
    assert summary_json(slower)["expert_prefetch_gain"]["with_s"] == 0.12
    content = summary_json(replace(STREAMED, generation=guessed))
    assert content["generation"]["expert_prefetch_hit_rate"] == 0.75


def test_a_resident_run_names_memory_or_computation():
    generation = replace(
        STREAMED.generation, waited_s=0.0, disk_bytes=0, hits=0, pending=0, misses=0
    )
    resident = replace(
        STREAMED,
        generation=generation,
        budget_bytes=64 * MIB,
        resident_bytes=14 * MIB,
        streamed_bytes=0,
    )
    slow = shown(resident)
    assert "computation: memory gave 147 MB/s" in slow and "in time" not in slow
    assert "It all fits" in slow
    fast = replace(resident, generation=replace(generation, host_bytes=300_000_000_000))
    assert "memory, at 30.0 GB/s: 75% of its measured 40.0 GB/s" in shown(fast)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"machine": Machine("", 1, 1, 0.0)}, "run hmt probe"),
        ({"machine": Machine("", 1, 1, 5e7, ComputeRates(1e10))}, "above its measured 50.0 MB/s"),
        ({"generation": Phase()}, "not a word said"),
        ({"generation": Phase(), "prompt": Phase()}, "not a word said"),
        ({"streamed_bytes": 0}, "went on a diet"),
        ({"notes": ("one thing",)}, "one thing"),
    ],
)
def test_every_other_run_can_be_shown(change, expected):
    assert expected in shown(replace(STREAMED, **change))


def test_json_holds_what_follows_from_the_figures():
    content = json.loads(json.dumps(summary_json(STREAMED)))
    assert content["generation"]["tokens_per_s"] == 10.0
    assert content["generation"]["hit_rate"] == 0.5
    assert content["generation"]["overlap"] == pytest.approx((4 + 9 - 10) / 4)
    assert content["generation"]["useful_share"] == pytest.approx(0.99)
    assert content["bottleneck"]["link"] == "disk"
    assert content["bottleneck"]["share"] == pytest.approx(100 * MIB / 2e8)
    assert content["used_bytes"]["slots"] == 2 * MIB
    nothing = summary_json(replace(STREAMED, generation=Phase(), prompt=Phase()))
    assert "bottleneck" not in nothing
