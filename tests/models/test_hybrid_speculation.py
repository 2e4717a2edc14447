"""Models with recurrent state draft by default: the same answers, in one compiled call a step."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_oracle import Oracle, always_guess
from hybrid_models import drawn, ids, publish

import hmt
from hmt.base.errors import ConfigError
from hmt.contracts.step import Step
from hmt.engine import EngineConfig, prepare
from hmt.kernels.cpu import extension
from hmt.layers.stack import FusedLayers

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_prefill_tokens": 16, "host_memory": "96MiB", "context": 800,
    "max_batch": 3,
}  # fmt: skip
NAMES = ["qwen3_next-0", "qwen3_5_text-0", "kimi_linear-0", "mamba2-1", "lfm2-0", "jamba-0"]
COMPILED = ["qwen3_next-0", "qwen3_5_text-0"]  # all layers in one call
REQUESTS = [drawn(ids(30, 1), 1, 40), drawn(ids(9, 2), 2, 40), drawn(ids(30, 1) + ids(9, 3), 3, 40)]
needs_kernels = pytest.mark.skipif(extension.load() is None, reason="nothing is drafted then")


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(name, tmp_path, 400)
    with hmt.Engine(**OPTIONS, speculate="off") as engine:
        model = engine.load_model(tmp_path)
        assert not model.prepared.demand.draft_tokens
        wanted = [model.infer(one) for one in REQUESTS]
    calls: Counter[tuple[bool, bool]] = Counter()  # (computed, drafts) of fused layers
    fused = FusedLayers.__call__

    def counted(self: FusedLayers, hidden: torch.Tensor, step: Step, *adapters: Any) -> bool:
        done = fused(self, hidden, step, *adapters)
        calls[done, any(run.drafts for run in step.segments)] += 1
        return done

    monkeypatch.setattr(FusedLayers, "__call__", counted)
    for prefixes in (False, True):
        with hmt.Engine(**OPTIONS, prefix_cache=prefixes) as engine:
            model = engine.load_model(tmp_path)
            assert model.prepared.demand.draft_tokens == 8
            always_guess(model, oracle_of(wanted))
            streams = [model.stream(one) for one in REQUESTS]
            assert [stream.completion() for stream in streams] == wanted
            assert model.infer(REQUESTS[0]) == wanted[0]  # goes on from a prefix, if there are any
            account = model.summary().speculation
            assert account.accepted > 20 and account.proposed > account.accepted + 5
        if not prefixes and name in COMPILED:
            assert calls[True, True] > 5 and calls[True, False] > 5
            assert not calls[False, True] and not calls[False, False]


@pytest.mark.parametrize("speculate", ["mtp", "draft=nowhere"])
def test_a_gpu_verifies_nothing_of_them_and_says_so(speculate: str, tmp_path: Path) -> None:
    publish("qwen3_next-0", tmp_path, 400)
    gpu = {"gpu_memory": "96MiB", "gpus": "fake"}
    said = r"have recurrent state.*run without a GPU"
    with (
        hmt.Engine(**OPTIONS, **gpu, speculate=speculate) as engine,
        pytest.raises(ConfigError, match=said),
    ):
        engine.load_model(tmp_path)


def oracle_of(answers: list[hmt.Completion]) -> Oracle:
    return Oracle(
        [[*one.input, *answer.token_ids] for one, answer in zip(REQUESTS, answers, strict=True)],
        seed=3,
    )


@needs_kernels
def test_memory_that_has_no_room_for_a_journal_drafts_nothing(tmp_path: Path) -> None:
    """And says so; what is asked for in numbers is given, or refused."""
    publish("qwen3_5_text-0", tmp_path, 400)

    def planned(host_memory: int, **more: Any) -> Any:
        options = OPTIONS | {"host_memory": host_memory} | more
        return prepare(tmp_path, EngineConfig.resolve(**options))

    large = planned(96 << 20)
    demand, spec = large.demand, large.demand.spec
    journal = spec.journal_bytes(range(spec.layers), 8) * demand.state_slots
    assert demand.draft_tokens == 8 and not spec.remarks
    assert 0 < journal <= (96 << 20) // 64
    bare = planned(96 << 20, draft_tokens=0)
    assert large.plan.reserved["kv"] - bare.plan.reserved["kv"] <= journal + 4096
    # A budget that is just enough for the model: the journal gives way.
    least = next(n for n in range(1 << 18, 96 << 20, 1 << 18) if fits(tmp_path, n))
    small = planned(least)
    assert small.demand.draft_tokens < 8
    if not small.demand.draft_tokens:
        [remark] = small.demand.spec.remarks
        assert "drafts no tokens" in remark and "more host memory" in remark
    with hmt.Engine(**OPTIONS | {"host_memory": least}) as engine:
        model = engine.load_model(tmp_path)
        model.infer(drawn(ids(9, 2), 2, 4))
        assert model.summary().notes[: len(small.demand.spec.remarks)] == small.demand.spec.remarks


def fits(folder: Path, host_memory: int) -> bool:
    try:
        prepare(
            folder,
            EngineConfig.resolve(**OPTIONS | {"host_memory": host_memory, "draft_tokens": 0}),
        )
    except hmt.HMTError:
        return False
    return True
