"""Every family with its keys and values at several levels: the same logits as at one."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from default_part import first_of_each
from plain_memory import published, put_tokenizer, random_reference
from random_configs import Case, case_of, cases

import hmt
from hmt.contracts.kv import ring_pages
from hmt.contracts.plan import Tier
from hmt.engine import EngineConfig, prepare
from hmt.engine.execution.graphs.runner import GraphRunner
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.planner import PlanOptions, smallest_budget

NEAR = 1e-5  # relative: parts of a row's attention are added in f32, in another order
# At 16 bits host and device round attention weights in different places, and layers make more of
# that.  Now and then a router chooses another expert then: so much for nine rows of ten.
NEAR_16 = 0.03
OPTIONS = {"max_prefill_tokens": 16, "max_batch": 1, "host_memory": "64MiB"}
POSITIONS = 700
# Grouped queries, one head for each query, windows, a mixture of experts, latents.
ON_A_GPU = ("llama-0", "llama-2", "phi3-1", "gemma3_text-0", "qwen3_moe-0", "deepseek_v3-1")


def longer(case: Case) -> Case:
    """The same, for texts that do not fit near."""
    case.config.max_position_embeddings = POSITIONS
    return case


def check(
    case: Case, folder: Path, dtype: str, near: float, tried: Sequence[int], **where: Any
) -> None:
    """Logits of a random model with all keys and values in one place, and at several levels.

    tried   numbers of the ways to have levels: host memory, a disk, or both
    """
    published(random_reference(longer(case).config, case.seed), folder)
    put_tokenizer(folder)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(POSITIONS)]
    rows, prefill = range(POSITIONS - 40, POSITIONS), POSITIONS - 20
    options: dict[str, Any] = OPTIONS | {"context": POSITIONS, "dtype": dtype} | where
    with hmt.Engine(**options) as engine:
        model = engine.load_model(folder)
        wanted = model.logits(tokens, rows, prefill=prefill)
        sizes = model.prepared.demand.kv_sizes
    rings = [ring_pages(window, 16) * page for window, page in sizes.ring_pages.items()]
    near_bytes = sum(rings) + 25 * sizes.device_page
    host = 10 * sizes.host_page
    ways = [{}, {"kv_offload_dir": str(folder), "kv_host_memory": 0}]
    ways += [{"kv_offload_dir": str(folder), "kv_host_memory": host}]
    for way in (ways[number % 3] for number in tried):
        with hmt.Engine(kv_gpu_memory=near_bytes, **way, **options) as engine:
            model = engine.load_model(folder)
            found = model.logits(tokens, rows, prefill=prefill)
            kv = model.summary().kv
            captured: Any = getattr(model._core.runner.executor, "graphs", None)
        assert kv is not None
        assert kv.peak.get("near", 0) < POSITIONS // 16 or not sizes.device_page
        assert all(kv.peak[name] for name in kv.capacity if kv.capacity[name] and sizes.device_page)
        if dtype == "bfloat16":
            rows_apart = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
            error = float(rows_apart.quantile(0.9))
        else:
            error = float((found - wanted).norm() / wanted.norm())
        assert error <= near, way
        if where:
            assert isinstance(captured, GraphRunner) and captured.works
            assert captured.graphs[True] and (kv.host_s or not sizes.device_page)


ATTENDING = [case for case in cases() if hasattr(case.config, "num_attention_heads")]


@pytest.mark.parametrize("case", first_of_each(ATTENDING), ids=lambda case: case.name)
def test_logits_do_not_depend_on_where_keys_and_values_lie(case: Case, tmp_path: Path) -> None:
    # Each tries one of the ways: a third of the families has the same one first.
    check(case, tmp_path, "float32", NEAR, [case.seed])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The first GPU, whose link is not measured."""
    monkeypatch.setitem(machine._links, torch.cuda.get_device_name(0), LinkRates(40e9))
    return "0"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_nor_do_they_on_a_gpu(name: str, dtype: str, gpu: str, tmp_path: Path) -> None:
    case = case_of(name)
    near = NEAR if dtype == "float32" else NEAR_16
    tried = [ON_A_GPU.index(name)]  # each compiles kernels of its own, which takes half a minute
    check(case, tmp_path, dtype, near, tried, gpus=gpu, gpu_memory="8GiB")


def test_nor_do_they_on_a_pretended_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    for name in ("gemma3_text-0", "deepseek_v3-1", "phi3-1"):
        case = case_of(name)
        where = {"gpus": "fake", "gpu_memory": "64MiB"}
        check(case, tmp_path / name, "float32", NEAR, range(3), **where)


def check_chosen(name: str, folder: Path, **where: Any) -> None:
    """Logits of tokens that choose pages: captured steps give what others give."""
    case = case_of(name)
    published(random_reference(longer(case).config, case.seed), folder)
    put_tokenizer(folder)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(POSITIONS)]
    options: dict[str, Any] = OPTIONS | {"context": POSITIONS, "dtype": "float32"} | where
    with hmt.Engine(**options) as engine:
        near = 25 * engine.load_model(folder).prepared.demand.kv_sizes.device_page
    # Which pages are near must not depend on how long steps take.
    options |= {"kv_gpu_memory": near, "kv_policy": "select", "kv_eviction": "lru"}
    found, read = {}, {}
    for executor, share in (("plain", 0.4), ("overlapped", 0.4), ("overlapped", 1.0)):
        with hmt.Engine(executor=executor, kv_share=share, **options) as engine:
            model = engine.load_model(folder)
            rows = range(POSITIONS - 25, POSITIONS)
            found[executor, share] = model.logits(tokens, rows, prefill=POSITIONS - 24)
            read[executor, share] = model.summary().kv.host_bytes
            captured: Any = getattr(model._core.runner.executor, "graphs", None)
            assert isinstance(captured, GraphRunner) == (executor == "overlapped")
            assert captured is None or (captured.works and captured.graphs[True])
    wanted, kept, every = found.values()
    assert (kept - wanted).norm() <= NEAR * wanted.norm() < (kept - every).norm()
    assert read["overlapped", 0.4] < read["overlapped", 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-0", "deepseek_v3-1"])
def test_steps_in_which_tokens_choose_pages_are_captured(
    name: str, gpu: str, tmp_path: Path
) -> None:
    check_chosen(name, tmp_path, gpus=gpu, gpu_memory="8GiB")


def test_so_they_are_on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    check_chosen("llama-0", tmp_path, gpus="fake", gpu_memory="64MiB")


@pytest.mark.parametrize("name", ["gemma3_text-0", "gpt_oss-0"])
def test_windows_keep_rings_where_memory_is_short(name: str, tmp_path: Path) -> None:
    """By itself: the plan with all positions in all layers would stream more, or not fit at all."""
    case = case_of(name)
    published(random_reference(longer(case).config, case.seed), tmp_path)
    put_tokenizer(tmp_path)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(POSITIONS)]
    rows, prefill = range(POSITIONS - 60, POSITIONS), POSITIONS - 30
    options: dict[str, Any] = OPTIONS | {"context": POSITIONS, "dtype": "float32"}
    with hmt.Engine(**options) as engine:
        model = engine.load_model(tmp_path)
        wanted, demand = model.logits(tokens, rows, prefill=prefill), model.prepared.demand
        assert model.plan.kv_tiers is None, "everything fits"
    least = smallest_budget(demand, PlanOptions(0, POSITIONS, 16))
    for budget in (least - 4096, least + 4096):
        with hmt.Engine(**options | {"host_memory": budget}) as engine:
            model = engine.load_model(tmp_path)
            levels = model.plan.kv_tiers
            assert levels is not None and levels.pages == levels.device_pages == -(-POSITIONS // 16)
            assert max(levels.ring_pages.values()) < levels.pages
            found = model.logits(tokens, rows, prefill=prefill)
            assert engine._ledger.reserved_bytes(Tier.HOST) <= budget
            request = hmt.Request(tokens[:60], 20, ignore_eos=True)
            assert len(model.infer(request).token_ids) == 20
        assert float((found - wanted).norm() / wanted.norm()) <= NEAR
    sharing = EngineConfig.resolve(**options | {"host_memory": least + 4096}, prefix_cache=True)
    assert prepare(tmp_path, sharing).plan.kv_tiers is None, "sequences share whole pages"


@pytest.mark.parametrize("batch", [2, 3])
def test_choices_share_a_prompt_that_windows_forget(batch: int, tmp_path: Path) -> None:
    """More of them than run at once: one that waits keeps a copy, as long as there are others."""
    case = case_of("gemma3_text-0")
    published(random_reference(longer(case).config, case.seed), tmp_path)
    put_tokenizer(tmp_path)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(151)]
    options = OPTIONS | {"context": POSITIONS, "dtype": "float32", "kv_gpu_memory": "1MiB"}
    requests = [
        hmt.Request(tokens, 40, ignore_eos=True, sampling=hmt.Sampling(temperature=1.5, seed=seed))
        for seed in range(7, 13)
    ]
    with hmt.Engine(**options | {"max_batch": batch}) as engine:
        model = engine.load_model(tmp_path)
        kv = model._core.memory.kv
        assert not kv.allocator.can_rewind(), "layers with a window have rings"
        apart = [model.infer(request).token_ids for request in requests]
        before = model.summary().prompt.tokens
        answers = model.infer_choices(requests[0], len(requests))
        assert [answer.token_ids for answer in answers] == apart
        assert model.summary().prompt.tokens - before == len(tokens)
        assert kv.allocator.free_tokens == kv.allocator.capacity_tokens
