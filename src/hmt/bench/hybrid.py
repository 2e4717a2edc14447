"""A mixture of experts of which a GPU holds all but the experts, and a cache of those.

The model is a tiled pack; keys and values of earlier positions are random numbers, so that a long
context costs no prompt.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hmt.contracts.step import Part, Step
from hmt.engine import LoadedModel

_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class HybridStep:
    """Medians over steps of one decoding batch.

    step_s        all of it
    computed_s    in which the CPU computed experts, and
    waited_s      in which it waited for questions
    found, brought, left   experts, over all layers: in the cache, over the link, for the CPU
    expert_bytes  of one
    """

    batch: int
    context: int
    step_s: float
    computed_s: float
    waited_s: float
    found: float
    brought: float
    left: float
    expert_bytes: int

    def allowed_s(self, link_rate: float, cpu_rate: float) -> float:
        """What the experts that were missing take, if link and CPU share them perfectly."""
        missing = (self.brought + self.left) * self.expert_bytes
        return missing / (link_rate + cpu_rate)

    def told(self) -> str:
        """A line of a table."""
        brought, left = (n * self.expert_bytes / 1e9 for n in (self.brought, self.left))
        cpu = left / self.computed_s if self.computed_s else 0.0
        return (
            f"batch {self.batch:3} context {self.context:7} {self.batch / self.step_s:8.2f} tok/s "
            f"step {self.step_s * 1e3:8.2f} ms, CPU {self.computed_s * 1e3:8.2f} ms "
            f"({cpu:5.1f} GB/s), waits {self.waited_s * 1e3:7.2f} ms, experts: found "
            f"{self.found:6.1f}, brought {self.brought:6.1f} ({brought:5.2f} GB), "
            f"left {self.left:6.1f}"
        )


def fill_context(model: LoadedModel) -> None:
    """Random numbers for keys and values of all positions."""
    core: Any = model._core
    kv = core.memory.kv

    def fill() -> None:
        for kept in {id(kept.pages): kept for kept in kv._layers.values()}.values():
            memory = kept.pages.memory
            for page in memory.split(1024):
                page.view(model.prepared.model.dtype).normal_(0, 0.5)

    model._loop.call(fill)


def decode_steps(model: LoadedModel, batch: int, context: int, steps: int) -> HybridStep:
    """Decode `batch` sequences from `context` positions on."""
    return model._loop.call(lambda: _decode_steps(model, batch, context, steps))


def _decode_steps(model: LoadedModel, batch: int, context: int, steps: int) -> HybridStep:
    core: Any = model._core
    kv, teams = core.memory.kv, core.memory.on_device.weights.teams
    captured = core._executor._captured
    total = context + steps + _WARM_STEPS + 1
    sequences = [kv.open(total) for _ in range(batch)]
    tokens = [17 + 13 * n for n in range(batch)]
    times: list[tuple[float, float, float]] = []
    counts = (0, 0, 0)
    try:
        for number in range(_WARM_STEPS + steps):
            if number == _WARM_STEPS:
                counts = teams.counts() or counts
            parts = [
                Part(sequence, context + number, [token], 1, total)
                for sequence, token in zip(sequences, tokens, strict=True)
            ]
            served = captured.served if captured is not None else None
            begin = time.perf_counter()
            logits = core._executor.run(Step.build(parts))
            elapsed = time.perf_counter() - begin
            # Random weights end in loops; other tokens keep the routing alive.
            tokens = [(int(row.argmax()) + 31 * number) % len(row) for row in logits]
            computed = waited = 0.0
            if captured is not None and served is not None:
                computed = captured.served.computed_s - served.computed_s
                waited = captured.served.waited_s - served.waited_s
            times.append((elapsed, computed, waited))
        found, brought, left = (
            (now - then) / steps for now, then in zip(teams.counts() or counts, counts, strict=True)
        )
    finally:
        for sequence in sequences:
            kv.close(sequence)
    step_s, computed_s, waited_s = (
        median(column) for column in zip(*times[_WARM_STEPS:], strict=True)
    )
    return HybridStep(
        batch, context, step_s, computed_s, waited_s, found, brought, left, teams.nbytes
    )


def set_link_share(model: LoadedModel, share: float) -> None:
    """Bring another share of the missing experts from now on."""
    teams = model._core.memory.on_device.weights.teams  # type: ignore[union-attr]

    def change() -> None:
        for team in teams.by_layer.values():
            team._share.fill_(share)  # type: ignore[union-attr]

    model._loop.call(change)


def measure(
    model: LoadedModel, batches: Sequence[int], contexts: Sequence[int], steps: int
) -> list[dict[str, Any]]:
    """Steps of all batches and contexts."""
    return [
        asdict(decode_steps(model, batch, context, steps))
        for batch in batches
        for context in contexts
    ]
