"""Layers in one call give what their kernels give one by one, to the bit."""

from pathlib import Path

import pytest
import torch
from default_part import first_of_each
from hybrid_models import drawn, ids, publish

import hmt
from hmt.kernels import ops
from hmt.kernels.cpu import extension

pytestmark = [
    pytest.mark.skipif(extension.load() is None, reason="plain torch has no such call"),
    pytest.mark.each_once,
]

POSITIONS = 400
TOGETHER = [
    *(f"qwen3_next-{number}" for number in range(3)),
    *(f"qwen3_5_text-{number}" for number in range(3)),
    *(f"qwen3_5_moe_text-{number}" for number in range(3)),
    "qwen3_moe-0",
]
# Only their delta rules are one call.
DELTA = [
    f"{name}-{number}"
    for name in ("kimi_linear", "bailing_hybrid", "olmo_hybrid")
    for number in (0, 1)
]
OPTIONS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16", "quantization": "w8a8"},
]


def found(
    folder: Path, executor: str, options: dict[str, str]
) -> tuple[bool, torch.Tensor, list[list[int]]]:
    """Whether layers were one call, logits by chunks and tokens, and answers side by side."""
    given = {"host_memory": "64MiB", "max_prefill_tokens": 17, "context": 3 * POSITIONS}
    with hmt.Engine(**given, **options, executor=executor, max_batch=3) as engine:
        model = engine.load_model(folder)
        together = bool(getattr(model._core.runner.executor, "_together", ()))
        tokens = ids(60)
        logits = model.logits(tokens, range(len(tokens)), prefill=45)
        answers = model.infer_batch([drawn(ids(count, count), count) for count in (3, 30, 17, 1)])
        return together, logits, [answer.token_ids for answer in answers]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("name", first_of_each(TOGETHER + DELTA))
def test_one_call_gives_the_bits_of_its_kernels(
    name: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(name, tmp_path, POSITIONS)
    with monkeypatch.context() as one_by_one:
        one_by_one.setattr(ops, "delta_layer", lambda *_: None)
        _, expected, answers = found(tmp_path, "plain", options)
    for executor in ("plain", "overlapped"):
        together, logits, others = found(tmp_path, executor, options)
        assert together == (executor == "overlapped" and name in TOGETHER)
        assert torch.equal(logits, expected) and others == answers


def test_one_call_takes_prompts_apart_alike(tmp_path: Path) -> None:
    """Of more than 64 tokens kernels are called one by one."""
    publish("qwen3_next-0", tmp_path, POSITIONS)
    logits = []
    for chunk in (100, 13):
        options = {"max_prefill_tokens": chunk, "context": POSITIONS, "max_batch": 1}
        with hmt.Engine(
            host_memory="64MiB", dtype="bfloat16", quantization="w8a8", **options
        ) as engine:
            model = engine.load_model(tmp_path)
            logits.append(model.logits(ids(110), range(110), prefill=105))
    assert torch.equal(*logits)
