"""Models with recurrent state in the engine: chunks, batches, choices, preemption, memory."""

import logging
import random
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_memory import published, random_reference
from random_configs import cases
from transformers import PreTrainedModel

import hmt
from hmt.base.errors import BudgetError
from hmt.contracts.plan import Tier
from hmt.engine import LoadedModel
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.kvcache import SplitKVCache

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_prefill_tokens": 16, "host_memory": "64MiB"}
POSITIONS = 400
NEVER = "no model writes this"


@pytest.fixture(scope="module", params=["qwen3_next-0", "qwen3_5_text-0"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, PreTrainedModel]]:
    [case] = (case for case in cases() if case.name == request.param)
    case.config.max_position_embeddings = POSITIONS
    reference = random_reference(case.config, case.seed)
    folder = tmp_path_factory.mktemp(case.name)
    published(reference, folder)
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), folder)
    yield folder, reference


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 250) for _ in range(count)]


def drawn(tokens: list[int], seed: int, new: int = 12, **options: Any) -> hmt.Request:
    sampling = hmt.Sampling(temperature=1.5, seed=seed)
    return hmt.Request(tokens, new, sampling=sampling, ignore_eos=True, **options)


def is_free(model: LoadedModel) -> bool:
    kv = model._core.memory.kv.allocator
    return model._loop.call(lambda: kv.free_tokens) == kv.capacity_tokens and not kv.sequences


def test_chunks_do_not_change_a_bit(made: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = made
    tokens = ids(150)
    rows = range(len(tokens))
    found = []
    for chunk, prefill in ((16, 150), (7, 150), (13, 90), (1, 20), (150, 150)):
        options = OPTIONS | {"max_prefill_tokens": chunk, "context": POSITIONS, "max_batch": 1}
        with hmt.Engine(**options) as engine:
            found.append(engine.load_model(folder).logits(tokens, rows, prefill=prefill))
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert all(torch.equal(found[0], other) for other in found[1:4])
    # More than 16 tokens at once are multiplied with f32 weights by torch, which adds otherwise.
    for logits in (found[0], found[4]):
        assert float((logits - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.std()))


def test_requests_that_run_together_answer_as_alone(made: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = made
    requests = [drawn(ids(count, count), count) for count in (3, 40, 17, 90, 1)]
    with hmt.Engine(**OPTIONS, context=1024, max_batch=3) as engine:
        model = engine.load_model(folder)
        alone = [model.infer(request).token_ids for request in requests]
        assert [answer.token_ids for answer in model.infer_batch(requests)] == alone
        assert is_free(model)


WAYS: dict[str, dict[str, Any]] = {
    "near": {},
    "few at once": {"max_batch": 2},
    "levels": {"kv_gpu_memory": "1MiB"},
    "gpu": {"gpu_id": "fake", "gpu_memory": "64MiB"},
    "both": {"gpu_id": "fake"},
}


@pytest.mark.parametrize("way", WAYS)
def test_choices_share_a_prompt(
    way: str, made: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    folder, _ = made
    options = OPTIONS | {"context": 2 * POSITIONS, "max_batch": 4} | WAYS[way]
    prompt = ids(151, 5)
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=1) as engine:
        model = engine.load_model(folder)
        apart = [model.infer(drawn(prompt, seed)).token_ids for seed in range(7, 12)]
    if way == "both":
        options["gpu_memory"] = least_gpu_memory(folder, options)
    with hmt.Engine(**options) as engine:
        model = engine.load_model(folder)
        assert isinstance(model._core.memory.kv, SplitKVCache) == (way == "both")
        answers = model.infer_choices(drawn(prompt, 7), 5)
        assert [answer.token_ids for answer in answers] == apart
        assert model.summary().prompt.tokens == len(prompt)
        assert is_free(model)


def least_gpu_memory(folder: Path, options: dict[str, Any]) -> int:
    """With which some layers compute on the device, and some do not."""
    for nbytes in range(200_000, 4_000_000, 50_000):
        try:
            with hmt.Engine(**options, gpu_memory=nbytes) as engine:
                stages = engine.load_model(folder).plan.device.stages
                if stages:
                    assert len(stages) < 4
                    return nbytes
        except BudgetError:
            continue
    raise AssertionError("no budget of the device is between all and nothing")


def test_sequences_that_give_way_are_computed_again(made: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = made
    requests = [drawn(ids(60, seed), seed, 100, stop=NEVER, priority=seed % 2) for seed in range(4)]
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=3) as engine:
        model = engine.load_model(folder)
        alone = [model.infer(request).token_ids for request in requests]
        for _ in range(8):  # as after answers of one token
            model._core.scheduler._forecast.note("", 1, whole=True)
        assert [answer.token_ids for answer in model.infer_batch(requests)] == alone
        load = model._core.scheduler.load
        assert load.dropped and not load.parked, "all began although not all fit"
        assert is_free(model)


def test_beams_are_those_of_transformers(made: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = made
    prompt = ids(33, 3)
    wanted = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=3, num_return_sequences=3, max_new_tokens=8, do_sample=False,
        early_stopping=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=3) as engine:
        model = engine.load_model(folder)
        found = model.beam_search(hmt.Request(prompt, 8, ignore_eos=True), 3)
        assert [list(one.token_ids) for one in found] == wanted[:, len(prompt) :].tolist()
        assert is_free(model)


def test_state_is_part_of_the_budget(made: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = made
    reserved = []
    for batch in (1, 5):
        with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=batch) as engine:
            model = engine.load_model(folder)
            spec = model.prepared.model.spec
            matrices = sum(one.nbytes for state in spec.state for one in state)
            assert spec.state_bytes == matrices > 0
            reserved.append(model.plan.reserved["kv"])
            used = model._core.memory.used_bytes()["kv"]
            pages = model.plan.kv_tokens * model.prepared.demand.kv_token_bytes
            assert pages + batch * spec.state_bytes <= used <= reserved[-1]
            assert engine._ledger.reserved_bytes(Tier.HOST) <= 64 << 20
    assert abs(reserved[1] - reserved[0] - 4 * spec.state_bytes) < 3 * 4096


def test_prefixes_are_not_shared(
    made: tuple[Path, PreTrainedModel], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder, _ = made
    prompt = ids(100, 4)
    options = OPTIONS | {"context": POSITIONS, "max_batch": 2, "prefix_cache_dir": str(tmp_path)}
    with caplog.at_level(logging.WARNING), hmt.Engine(**options) as engine:
        model = engine.load_model(folder)
        answers = [model.infer(drawn(prompt, 1)).token_ids for _ in range(2)]
        assert answers[0] == answers[1]
        assert model.summary().prompt.tokens == 2 * len(prompt)
    assert not [*tmp_path.iterdir()]


def test_a_step_that_failed_is_not_gone_on_from(
    made: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers before the one that failed have advanced their state: no request may use it."""
    folder, _ = made
    with hmt.Engine(**OPTIONS, context=POSITIONS, max_batch=3) as engine:
        model = engine.load_model(folder)
        alone = [model.infer(drawn(ids(40, seed), seed)).token_ids for seed in range(3)]
        computed, layer = 0, type(model.prepared.model).layer

        def fails(self: Any, index: int, *args: Any) -> torch.Tensor:
            nonlocal computed
            computed += 1
            if computed == 30 and index:
                raise BudgetError("a layer fails")
            return layer(self, index, *args)

        monkeypatch.setattr(type(model.prepared.model), "layer", fails)
        with pytest.raises(BudgetError, match="a layer fails"):
            model.infer(drawn(ids(40, 0), 0))
        assert is_free(model)
        requests = [drawn(ids(40, seed), seed) for seed in range(3)]
        assert [answer.token_ids for answer in model.infer_batch(requests)] == alone
