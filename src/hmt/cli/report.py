"""The summary at the end of a run, for people and as JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hmt.base.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from hmt.contracts.kv import KVAccount
    from hmt.engine import (
        ABResult,
        DeviceAccount,
        DriftAccount,
        ExpertAccount,
        Phase,
        RunSummary,
        SpeculationAccount,
        StepPrediction,
    )

_BAR_CELLS = 16
_LEVELS = {"near": "near", "host": "in host memory", "disk": "on the disk"}


def summary_view(summary: "RunSummary") -> RenderableType:
    """A short table, and one line on what it means."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
    for name, phase in (("prompt", summary.prompt), ("answer", summary.generation)):
        if phase.tokens:
            table.add_row(name, _speed(phase))
    phase = summary.generation if summary.generation.tokens else summary.prompt
    table.add_row("weights", _homes(summary))
    table.add_row("memory", _memory(summary))
    if summary.device is not None:
        table.add_row("GPU", _device(summary.device, phase))
        if (experts := summary.device.experts) is not None and experts.needed:
            table.add_row("experts", _experts(experts))
    if summary.kv is not None:
        table.add_row("KV", _kv(summary.kv, summary.prompt.tokens + summary.generation.tokens))
    if summary.prefixes is not None:
        table.add_row("prefixes", _prefixes(summary.prefixes))
    table.add_row("per token", _traffic(phase))
    if (predicted := summary.predicted) is not None and predicted.step_s:
        table.add_row("predicted", _predicted(predicted))
    if summary.speculation.proposed:
        table.add_row("speculation", _speculation(summary.speculation))
    if summary.drift is not None and summary.drift.requests:
        table.add_row("precision", _drift(summary.drift))
    if phase.expert_prefetches or summary.expert_prefetch_gain is not None:
        table.add_row("expert prefetch", _expert_prefetch(phase, summary.expert_prefetch_gain))
    table.add_row("time", _time(phase))
    if phase.host_s is not None:
        table.add_row("Python", _host(phase, phase.host_s))
    if (limit := summary.bottleneck) is not None:
        table.add_row("limit", limit.text)
    table.add_row(
        "process", f"{format_bytes(summary.peak_rss_bytes)} at its peak, Python and torch included"
    )
    for note in summary.notes:
        table.add_row("note", note)
    return Group(Text(), table, Text(), Text(f"  {_moral(summary)}", style="italic"))


def summary_json(summary: "RunSummary") -> dict[str, Any]:
    """All of the summary's figures, and those that follow from them."""
    content = asdict(summary)
    for name, phase in (("prompt", summary.prompt), ("generation", summary.generation)):
        content[name] |= {
            "tokens_per_s": phase.tokens_per_s,
            "hit_rate": phase.hit_rate,
            "overlap": phase.overlap,
            "useful_share": phase.useful_share,
            "expert_prefetch_hit_rate": phase.expert_prefetch_hit_rate,
            "host_s": phase.host_s,
        }
    if summary.predicted is not None:
        content["predicted"]["error"] = summary.predicted.error
    if (limit := summary.bottleneck) is not None:
        content["bottleneck"] = asdict(limit) | {"share": limit.share}
    return content


def _speed(phase: "Phase") -> Text:
    each = format_seconds(phase.seconds / phase.tokens)
    return Text.assemble(
        f"{phase.tokens} tokens at ",
        (f"{phase.tokens_per_s:.1f} tokens/s", "bold"),
        (f"  ({format_seconds(phase.seconds)}, {each} each)", "dim"),
    )


def _homes(summary: "RunSummary") -> Text:
    weights = summary.resident_bytes + summary.streamed_bytes
    return Text.assemble(
        _bar(summary.resident_bytes / weights if weights else 1.0, "green", "yellow"),
        f"  {format_bytes(summary.resident_bytes)} in memory, "
        f"{format_bytes(summary.streamed_bytes)} on disk",
    )


def _memory(summary: "RunSummary") -> Text:
    used = sum(summary.used_bytes.values())
    return Text.assemble(
        _bar(used / summary.budget_bytes if summary.budget_bytes else 0.0, "green", "dim"),
        f"  {format_bytes(used)} used of {format_bytes(summary.budget_bytes)}",
    )


def _device(device: "DeviceAccount", phase: "Phase") -> Text:
    used = sum(device.used_bytes.values())
    text = f"  {format_bytes(used)} used of {format_bytes(device.budget_bytes)} of {device.name}"
    if device.copied_bytes:
        text += f"; {format_bytes(device.copied_bytes)} copied there per step"
    if phase.link_bytes and phase.seconds:
        rate = format_rate(phase.link_bytes / phase.seconds)
        text += f"; link busy {phase.link_s / phase.seconds:.0%} of the time, at {rate}"
        text += f", the CPU's kernels {phase.kernel_s / phase.seconds:.0%}"
    return Text.assemble(
        _bar(used / device.budget_bytes if device.budget_bytes else 0.0, "green", "dim"), text
    )


def _experts(experts: "ExpertAccount") -> str:
    needed, cut = experts.needed, experts.cut
    return (
        f"{experts.found / needed:.0%} found on the GPU, "
        f"{(experts.brought + cut) / needed:.0%} brought over the link, "
        f"{(experts.left - cut) / needed:.0%} left to the CPU; "
        f"{format_bytes(experts.nbytes)} each"
    )


def _speculation(account: "SpeculationAccount") -> str:
    return (
        f"{account.accepted} of {account.proposed} draft tokens were accepted; {account.steps} "
        f"steps with drafts gave {account.tokens / account.steps:.1f} tokens each and saved "
        f"{format_seconds(account.saved_s)}"
    )


def _drift(account: "DriftAccount") -> str:
    return (
        f"{account.requests} requests left the text of calibration (divergence up to "
        f"{account.largest_kl:.2f}); {account.tokens} of their tokens were computed with exact "
        "activations"
    )


def _kv(kv: "KVAccount", tokens: int) -> str:
    levels = [
        f"{kv.peak.get(name, 0)} of {pages} pages {_LEVELS[name]}"
        for name, pages in kv.capacity.items()
        if pages
    ]
    moved = sum(kv.moved.values())
    text = f"at most {', '.join(levels)}; {moved} moved"
    if kv.low_pages:
        text += f", {kv.low_pages} of them, of little attention, in fewer bytes"
    if kv.disk_bytes:
        text += f"; {format_bytes(kv.disk_bytes / (tokens or 1))} from the disk per token"
    if kv.stalled_s:
        text += f"; waited {kv.stalled_s:.2f} s for the disk to take pages"
    if kv.failed_writes:
        text += f"; {kv.failed_writes} times it did not take them"
    if kv.fragmentation is not None:
        text += f"; {kv.fragmentation:.1%} of pages empty"
    return text


def _prefixes(counters: dict[str, int]) -> str:
    text = f"{counters['hit_tokens']} tokens of prompts were held"
    if counters.get("drive_read_pages"):
        text += f", {counters['drive_read_pages']} pages came from the disk"
    if counters.get("drive_written_pages"):
        text += f"; {counters['drive_written_pages']} pages kept there"
    return text


def _traffic(phase: "Phase") -> str:
    tokens = phase.tokens or 1
    text = (
        f"{format_bytes(phase.host_bytes / tokens)} from memory, "
        f"{format_bytes(phase.disk_bytes / tokens)} from disk"
    )
    hit_rate = phase.hit_rate
    return text if hit_rate is None else f"{text}; {hit_rate:.0%} of it in time"


def _predicted(predicted: "StepPrediction") -> str:
    for_whom = "one user" if predicted.users == 1 else f"{predicted.users:.0f} users"
    text = (
        f"{predicted.tokens_per_s:.1f} tokens/s for {for_whom} with {predicted.context:.0f} "
        f"positions, {format_bytes(predicted.host_bytes)} from memory, "
        f"{format_bytes(predicted.disk_bytes)} from disk"
    )
    error = predicted.error
    return text if error is None else f"{text}; a step took {1 + error:.0%} of that time"


def _expert_prefetch(phase: "Phase", verdict: "ABResult | None") -> str:
    if verdict is not None and not verdict.faster:
        took, without = format_seconds(verdict.with_s), format_seconds(verdict.without_s)
        return f"off: steps took {took} with them, {without} without"
    text = f"{phase.expert_prefetch_hit_rate or 0:.0%} of {phase.expert_prefetches} needed"
    if verdict is not None:
        saved_s = phase.expert_prefetch_saved_s / (phase.tokens or 1)
        text += f"; saved {format_seconds(saved_s)} per token"
    return f"{text}; {format_bytes(max(0, phase.expert_prefetch_wasted_bytes))} in vain"


def _time(phase: "Phase") -> Text:
    waiting = phase.waited_s / phase.seconds if phase.seconds else 0.0
    text = f"  {1 - waiting:.0%} computing, {waiting:.0%} waiting for disk"
    if waiting and phase.overlap is not None:
        text += f"; overlap {phase.overlap:.0%}"
    return Text.assemble(_bar(1.0 - waiting, "green", "yellow"), text)


def _host(phase: "Phase", host_s: float) -> str:
    share = host_s / phase.seconds if phase.seconds else 0.0
    return f"{format_seconds(host_s / (phase.tokens or 1))} per token, {share:.0%} of the time"


def _bar(share: float, full: str, rest: str) -> Text:
    cells = round(min(1.0, max(0.0, share)) * _BAR_CELLS)
    return Text.assemble(("█" * cells, full), ("░" * (_BAR_CELLS - cells), rest))


def _moral(summary: "RunSummary") -> str:
    """What to remember of it all."""
    ratio = summary.published_bytes / summary.budget_bytes if summary.budget_bytes else 0.0
    if not summary.generation.tokens:
        return "All ears, and not a word said."
    if ratio >= 1.05 and summary.streamed_bytes:
        return f"A model {ratio:.1f} times the size of its memory.  It did not fit; it answered."
    if ratio >= 1.05:
        return f"It came {ratio:.1f} times too large, went on a diet, and fits."
    return "It all fits in memory.  Give it less (--host-memory) and watch it cope."
