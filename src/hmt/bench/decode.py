"""Decoding with all weights in memory, and with a quarter of the memory they need.

Three cases of one model: everything resident; a quarter of its size, read when needed (plain);
and the same read ahead (overlapped).  All are loaded at once and take turns, so that a slow minute
of the machine hits them alike, and the median of each is reported.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hmt.base.units import round_down
from hmt.bench.environment import describe
from hmt.contracts.machine import Machine
from hmt.contracts.request import Request
from hmt.engine import Engine, LoadedModel, RunSummary
from hmt.engine.loading.source import open_source

PROMPT = list(range(1, 17))
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """One way of running the model; `share` of its published size is the memory budget."""

    name: str
    share: float
    executor: str


CASES = (
    Case("resident", 1.5, "overlapped"),  # the rest is room for KV and activations
    Case("quarter plain", 0.25, "plain"),
    Case("quarter overlapped", 0.25, "overlapped"),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over the runs of one case.

    link      what the case is bound by: "memory" when all is resident, else "disk"
    rate      bytes per second over that link, waiting and computing included
    share     rate / the link's measured rate; None when that is unknown
    """

    case: str
    budget_bytes: int
    tokens_per_s: float
    runs_tokens_per_s: tuple[float, ...]
    host_bytes_per_token: float
    disk_bytes_per_token: float
    hit_rate: float | None
    waiting_share: float
    link: str
    rate: float
    share: float | None
    peak_rss_bytes: int


def run(
    folder: Path,
    *,
    tokens: int = 16,
    runs: int = 3,
    options: dict[str, Any] | None = None,
    machine: Machine | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure the checkpoint or pack in `folder`; the content of a benchmark file.

    `tokens` are decoded in each of `runs` runs per case.  `options` are the engine's, the same for
    all cases.  `machine` has the measured rates; the remembered ones when None.  Raises what
    loading raises.
    """
    size = open_source(folder).published_bytes
    summaries: dict[Case, list[RunSummary]] = {case: [] for case in CASES}
    with ExitStack() as stack:
        models = {}
        for case in CASES:
            progress(f"loading: {case.name}")
            models[case] = _load(stack, folder, case, size, options or {})
            _decode(models[case], tokens)  # once for caches and page faults
        for number in range(1, runs + 1):
            for case, model in models.items():
                progress(f"{case.name}: run {number} of {runs}")
                summaries[case].append(_decode(model, tokens))
        machine = machine or models[CASES[0]].prepared.machine
        layers = models[CASES[0]].prepared.model.spec.layers
    results = [_result(case, own, machine) for case, own in summaries.items()]
    return {
        "benchmark": "decode",
        "machine": describe(machine),
        "model": {"published_bytes": size, "layers": layers},
        "options": {name: str(value) for name, value in (options or {}).items()},
        "tokens": tokens,
        "results": [asdict(result) for result in results],
    }


def _load(
    stack: ExitStack, folder: Path, case: Case, size: int, options: dict[str, Any]
) -> LoadedModel:
    budget = round_down(int(size * case.share), _PAGE_BYTES)
    given = {
        "context": 256,
        "max_batch": 1,
        **options,
        "host_memory": budget,
        "executor": case.executor,
    }
    if case.executor == "plain" or case.share > 1:
        given.pop("expert_trace", None)  # one file holds one model's
    engine = stack.enter_context(Engine(**given))
    return engine.load_model(folder)


def _decode(model: LoadedModel, tokens: int) -> RunSummary:
    model.reset_summary()
    model.infer(Request(input=PROMPT, max_new_tokens=tokens + 1, ignore_eos=True))
    return model.summary()


def _result(case: Case, summaries: list[RunSummary], machine: Machine) -> Result:
    def middle(figure: Callable[[RunSummary], float]) -> float:
        return median(figure(summary) for summary in summaries)

    link = "disk" if summaries[0].streamed_bytes else "memory"
    ceiling = machine.disk_read_rate if link == "disk" else machine.cpu.read_rate

    def rate_of(summary: RunSummary) -> float:
        phase = summary.generation
        return (phase.disk_bytes if link == "disk" else phase.host_bytes) / phase.seconds

    rate = middle(rate_of)
    hit_rates = [s.generation.hit_rate for s in summaries if s.generation.hit_rate is not None]
    return Result(
        case=case.name,
        budget_bytes=summaries[0].budget_bytes,
        tokens_per_s=middle(lambda s: s.generation.tokens_per_s),
        runs_tokens_per_s=tuple(s.generation.tokens_per_s for s in summaries),
        host_bytes_per_token=middle(lambda s: s.generation.host_bytes / s.generation.tokens),
        disk_bytes_per_token=middle(lambda s: s.generation.disk_bytes / s.generation.tokens),
        hit_rate=median(hit_rates) if hit_rates else None,
        waiting_share=middle(lambda s: s.generation.waited_s / s.generation.seconds),
        link=link,
        rate=rate,
        share=rate / ceiling if ceiling else None,
        peak_rss_bytes=max(summary.peak_rss_bytes for summary in summaries),
    )
