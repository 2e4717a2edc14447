"""Families whose tokens attend to what an indexer selects: ties, what is read, and what is said."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_memory import Bench, PlainKV, bench_of, published, put_tokenizer, random_reference
from random_configs import Case, cases

import hmt
from hmt.base.errors import BudgetError, CheckpointError
from hmt.contracts.model import KVKind
from hmt.contracts.step import Segment
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.models import open_model

# With more, threads would only wait for one another.
pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 32
OPTIONS: dict[str, Any] = {
    "context": 128, "dtype": "float32", "max_batch": 1, "host_memory": "64MiB",
}  # fmt: skip
SELECTING = cases("deepseek_v32", "glm_moe_dsa", "glm5_next_text")


def case_of(name: str) -> Case:
    return next(case for case in SELECTING if case.name == name)


def step_by_step(reference: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits of tokens that come one by one."""
    rows, cache = [], None
    with torch.inference_mode():
        for token in tokens:
            out = reference(torch.tensor([[token]]), cache=cache, use_cache=True)
            cache = out.cache
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


@pytest.mark.each_once
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["all scores equal", "some"])
@pytest.mark.parametrize(
    "name", ["deepseek_v32-0", "deepseek_v32-2", "glm_moe_dsa-0", "glm5_next_text-0"]
)
def test_equal_scores_are_selected_as_transformers_does(
    name: str, share: float, tmp_path: Path
) -> None:
    """Token by token, for its selection depends on how many positions a forward pass has."""
    case = case_of(name)
    reference = random_reference(case.config, case.seed)
    with torch.no_grad():
        for key, tensor in reference.named_parameters():
            if key.endswith("weights_proj.weight"):
                tensor[int(share * len(tensor)) :] = 0
            if key.endswith("wq_b.weight"):  # few heads have a score that is not 0
                tensor[int(0.2 * len(tensor)) :] = 0
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(TOKENS)]
    wanted = step_by_step(reference, tokens)
    bench = bench_of(reference, tmp_path)
    for chunks in ([TOKENS], [7, 1, 14, 2, 8], [1] * TOKENS):
        bench.kv = PlainKV(bench.model.spec)
        at, found = 0, []
        for length in chunks:
            found.append(bench.run((0, at, tokens[at : at + length])))
            at += length
        torch.testing.assert_close(torch.cat(found), wanted, atol=1e-4, rtol=0)


class CountingKV(PlainKV):
    """Notes how many rows of latents and of index keys are read."""

    latents = keys_read = 0

    def read(self, layer: int, run: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layers[layer].kind is KVKind.INDEX:
            self.keys_read += run.context
        else:
            self.latents += run.context
        return super().read(layer, run)

    def gather(
        self, layer: int, run: Segment, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.latents += len(positions)
        return super().gather(layer, run, positions)


@pytest.mark.parametrize("case", SELECTING, ids=lambda case: case.name)
def test_a_decoding_token_reads_the_rows_that_it_selects(case: Case, tmp_path: Path) -> None:
    bench = bench_of(random_reference(case.config, case.seed), tmp_path)
    spec, top_k = bench.model.spec, case.config.index_topk
    pool = getattr(case.config, "index_kpool", 1)
    attending, indexers = (
        sum(one is not None for one in kept) for kept in (spec.kv, spec.index_keys)
    )
    for context in (top_k + 1, 3 * top_k, 60):
        bench.kv = PlainKV(spec)
        bench.run((0, 0, [5] * context))
        counting = CountingKV(spec)
        counting.keys, counting.values = bench.kv.keys, bench.kv.values
        bench.kv = counting
        bench.run((0, context, [3]))
        seen = context + 1
        selects = seen > top_k + pool - 1
        assert counting.latents == (top_k + seen % pool if selects else seen) * attending
        assert counting.keys_read == (seen * indexers if selects else 0)


def engine_logits(folder: Path, tokens: list[int], **options: Any) -> tuple[torch.Tensor, Any]:
    with hmt.Engine(**OPTIONS | options) as engine:
        model = engine.load_model(folder)
        rows = range(len(tokens))
        return model.logits(tokens, rows, prefill=len(tokens) - 6), model.summary()


def written(case: Case, folder: Path) -> list[int]:
    published(random_reference(case.config, case.seed), folder)
    put_tokenizer(folder)
    rng = random.Random(case.seed)
    return [rng.randrange(case.config.vocab_size) for _ in range(60)]


def test_steps_are_not_captured_and_the_summary_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    tokens = written(case_of("glm_moe_dsa-0"), tmp_path)
    wanted, _ = engine_logits(tmp_path, tokens)
    found, summary = engine_logits(tmp_path, tokens, gpus="fake", gpu_memory="64MiB")
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    assert "indexer" in str(summary)


@pytest.mark.parametrize(
    ("name", "most"), [("glm_moe_dsa-0", 700), ("deepseek_v32-2", 700), ("glm5_next_text-2", 1100)]
)
def test_layers_may_be_divided_between_a_device_and_the_cpu(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where a layer uses what one in the other place has selected."""
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9))
    case = case_of(name)
    tokens = written(case, tmp_path)
    wanted, _ = engine_logits(tmp_path, tokens)
    layers, split = range(case.config.num_hidden_layers), 0
    for memory in range(most, most - 600, -100):  # KiB
        with hmt.Engine(**OPTIONS, gpus="fake", gpu_memory=memory << 10) as engine:
            try:
                model = engine.load_model(tmp_path)
            except BudgetError:
                continue
            split += len({model.plan.stage_devices.get(layer) for layer in layers}) > 1
            found = model.logits(tokens, range(len(tokens)), prefill=len(tokens) - 6)
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    assert split, "none of these budgets divides the layers"


def test_index_keys_may_be_kept_in_fewer_bits(tmp_path: Path) -> None:
    case = case_of("deepseek_v32-0")
    tokens = written(case, tmp_path)
    wanted, _ = engine_logits(tmp_path, tokens)
    found, _ = engine_logits(tmp_path, tokens, kv_quant="fp8")
    # Where all that a token sees is selected, only rounding differs.
    few = case.config.index_topk
    assert 0 < (found - wanted)[:few].norm() < 0.2 * wanted[:few].norm()
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("index_topk", 0, "index_topk"),
        ("index_n_heads", -1, "index_n_heads"),
        ("index_head_dim", 2, "qk_rope_head_dim"),
        ("q_lora_rank", None, "q_lora_rank"),
        ("indexer_types", ["shared", "full", "full", "full"], "first layer"),
        ("indexer_types", ["full", "other", "full", "full"], "indexer_types"),
        ("mlp_layer_types", ["dense"], "mlp_layer_types"),
    ],
)
def test_sizes_that_no_indexer_has_are_refused(
    field: str, value: Any, says: str, tmp_path: Path
) -> None:
    config, _ = published(random_reference(case_of("glm_moe_dsa-0").config, 0), tmp_path)
    with pytest.raises(CheckpointError, match=says):
        open_model(config | {field: value}, tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("index_kpool_always_select_tail", False, "always_select_tail"),
        ("indexer_types", ["full", "full", "full", "shared"], "layer 3 shares"),
        ("indexer_types", ["shared", "full", "full", "full"], "layer 0 shares"),
        ("index_kpool", 0, "index_kpool"),
        ("index_kpool", 3, "index_kpool is 3"),
        ("index_topk", 7, "index_topk"),
        ("qk_rope_head_dim", 4, "NoPE"),
        ("swiglu_limit", 7.0, "swiglu_limit"),
        ("linear_lower_bound", 0.0, "linear_lower_bound"),
        ("hc_mult", 0, "hc_mult"),
        ("hc_sinkhorn_iters", 1 << 20, "hc_sinkhorn_iters"),
    ],
)
def test_pools_that_are_not_computed_are_refused(
    field: str, value: Any, says: str, tmp_path: Path
) -> None:
    config, _ = published(random_reference(case_of("glm5_next_text-2").config, 0), tmp_path)
    with pytest.raises(CheckpointError, match=says):
        open_model(config | {field: value}, tmp_path, torch.float32)


def test_a_layer_without_an_indexer_has_none_of_its_weights(tmp_path: Path) -> None:
    case = case_of("glm_moe_dsa-0")
    bench: Bench = bench_of(random_reference(case.config, case.seed), tmp_path)
    kinds = case.config.indexer_types
    assert kinds == ["full", "shared", "full", "shared"]
    assert [keys is not None for keys in bench.model.spec.index_keys] == [
        k == "full" for k in kinds
    ]
    assert not any("layers.1.self_attn.indexer" in name for name in bench.weights.used)
