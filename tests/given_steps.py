"""Tokens of one sequence in steps of given sizes."""

from collections.abc import Sequence
from typing import Any

import torch

from hmt.contracts.step import SchedulerOutput, SegmentRequest


def in_steps(model: Any, tokens: Sequence[int], sizes: Sequence[int], rows: int) -> torch.Tensor:
    """Logits of the last `rows` tokens, f32 [rows, vocab], of an engine's idle model."""

    def run() -> torch.Tensor:
        core = model._core
        kv, window = core.scheduler.kv.open(len(tokens)), core._spec.token_window
        parts, at = [], 0
        try:
            for size in sizes:
                given, before = (
                    list(tokens[at : at + size]),
                    tuple(tokens[max(0, at - window) : at]),
                )
                segment = SegmentRequest(
                    kv, at, given, 0, len(tokens), whole=len(tokens), preceding=before
                )
                wanted = tuple(i for i in range(size) if at + i >= len(tokens) - rows)
                step = SchedulerOutput((segment,), logit_rows=wanted)
                parts.append(core._run_alone(step, size > 1).clone())
                at += size
        finally:
            core.scheduler.kv.close(kv)
        return torch.cat(parts)

    return model._loop.call(run)
