"""Low-rank adapters of every kind of layer, beside peft."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import CONFIG, WEIGHTS, answers, tensors_of, write_adapter
from plain_memory import published, put_tokenizer, random_reference
from random_configs import case_of
from safetensors.torch import save_file

import hmt
from hmt.base.errors import AdapterError, ShapeError
from hmt.contracts.step import Step
from hmt.kernels.cpu import extension
from hmt.layers.stack import FusedLayers

TOLERANCE = 1e-4
OPTIONS = {"dtype": "float32", "context": 64, "max_prefill_tokens": 16, "max_batch": 4}
TOKENS = 29
# Attention with biases, all in one matrix, with windows and more norms, latent, and recurrent.
FAMILIES = ["llama-0", "phi3-0", "gemma3_text-0", "qwen3_moe-0", "deepseek_v3-0", "qwen3_next-0"]
FAMILIES += ["qwen3_5_text-0", "lfm2-0", "mixtral-0", "glm4_moe-0"]
ALONE = {"deepseek_v3-0", "lfm2-0", "glm4_moe-0"}  # layer by layer, with adapters or without


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_pefts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every budget and chunk, and of rows without an adapter those without any."""
    together, fused = list[bool](), FusedLayers.__call__

    def counted(self: FusedLayers, hidden: torch.Tensor, step: Step, adapters: Any = None) -> bool:
        done = fused(self, hidden, step, adapters)
        if adapters is not None:
            together.append(done)
        return done

    monkeypatch.setattr(FusedLayers, "__call__", counted)
    case = case_of(name)
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path / "model")
    put_tokenizer(tmp_path / "model")
    adapted = write_adapter(reference, tmp_path / "own", case.seed)
    rng = random.Random(case.seed)
    tokens = [rng.randrange(case.config.vocab_size) for _ in range(TOKENS)]
    wanted = answers(adapted, tokens, **case.options)
    bare = answers(reference, tokens, **case.options)
    found = []
    for executor in ("overlapped", "plain"):
        with hmt.Engine(
            host_memory="64MiB", executor=executor, adapters=[f"own={tmp_path}/own"], **OPTIONS
        ) as engine:
            model = engine.load_model(tmp_path / "model")
            found.append(model.logits(tokens, range(TOKENS), prefill=20, adapter="own"))
            without = model.logits(tokens, range(TOKENS), prefill=20)
    scale = max(1.0, float(wanted.std()))
    torch.testing.assert_close(found[0], wanted, atol=TOLERANCE * scale, rtol=0)
    torch.testing.assert_close(without, bare, atol=TOLERANCE * scale, rtol=0)
    assert float((wanted - bare).abs().max()) > 100 * TOLERANCE, "the adapter changes something"
    if extension.load() is not None:
        assert torch.equal(found[0], found[1])
        # In one call for all layers, where the family has kernels for that.
        assert all(together) and bool(together) is (name not in ALONE)


def test_experts_have_adapters_of_their_own(tmp_path: Path) -> None:
    """As peft wrote them while experts were modules: each expert's matrices by its number."""
    case = case_of("qwen3_moe-0")
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path / "model")
    put_tokenizer(tmp_path / "model")
    (tmp_path / "own").mkdir()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["gate_proj"]}
    (tmp_path / "own" / CONFIG).write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(1), {}
    for layer, block in enumerate(reference.model.layers):
        if not hasattr(block.mlp, "experts"):
            continue
        experts = block.mlp.experts
        width = experts.down_proj.shape[2]
        for expert in range(0, len(experts.down_proj), 2):
            at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}."
            gate_up, down = experts.gate_up_proj.data[expert], experts.down_proj.data[expert]
            parts = {"gate_proj": gate_up[:width], "up_proj": gate_up[width:], "down_proj": down}
            for name, weight in parts.items():
                low = torch.randn(3, weight.shape[1], generator=generator) * 0.2
                high = torch.randn(weight.shape[0], 3, generator=generator) * 0.2
                tensors[f"{at}{name}.lora_A.weight"] = low
                tensors[f"{at}{name}.lora_B.weight"] = high
                weight += 2.0 * high @ low  # in place: of the reference
    assert tensors
    save_file(tensors, tmp_path / "own" / WEIGHTS)
    tokens = list(range(40, 40 + TOKENS))
    with hmt.Engine(host_memory="64MiB", adapters=[f"own={tmp_path}/own"], **OPTIONS) as engine:
        model = engine.load_model(tmp_path / "model")
        bare = model.logits(tokens, range(TOKENS))
        found = model.logits(tokens, range(TOKENS), prefill=20, adapter="own")
        both = [
            hmt.Request(input=tokens[: 9 + n], max_new_tokens=8, adapter=adapter, ignore_eos=True)
            for n, adapter in enumerate(["own", "", "own", ""])
        ]
        alone = [model.infer(request).token_ids for request in both]
        assert [one.token_ids for one in model.infer_batch(both)] == alone
        assert torch.equal(model.logits(tokens, range(TOKENS)), bare)
    torch.testing.assert_close(found, answers(reference, tokens), atol=TOLERANCE, rtol=0)


def test_experts_in_one_tensor_have_adapters(tmp_path: Path) -> None:
    """As peft writes them since experts are no modules: `target_parameters`."""
    case = case_of("qwen3_moe-0")
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path / "model")
    put_tokenizer(tmp_path / "model")
    adapted = write_adapter(
        reference, tmp_path / "own", 3, rank=3, targets=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    tokens = list(range(40, 40 + TOKENS))
    with hmt.Engine(host_memory="64MiB", adapters=[f"own={tmp_path}/own"], **OPTIONS) as engine:
        model = engine.load_model(tmp_path / "model")
        bare = model.logits(tokens, range(TOKENS))
        found = model.logits(tokens, range(TOKENS), prefill=20, adapter="own")
    torch.testing.assert_close(found, answers(adapted, tokens), atol=TOLERANCE, rtol=0)
    assert float((found - bare).abs().max()) > 100 * TOLERANCE
    expert = [name for name in tensors_of(tmp_path / "own") if ".experts." in name]
    assert any("base_layer" in name for name in expert), "both parameters are adapted"
    config = json.loads((tmp_path / "own" / CONFIG).read_text())
    (tmp_path / "own" / CONFIG).write_text(json.dumps(config | {"r": 1}))
    with (
        hmt.Engine(host_memory="64MiB", adapters=[f"own={tmp_path}/own"], **OPTIONS) as engine,
        pytest.raises((AdapterError, ShapeError)),
    ):
        engine.load_model(tmp_path / "model")


def test_what_is_computed_in_another_way_is_refused(tmp_path: Path) -> None:
    """Not left out silently: one half of latent attention's projections is taken apart."""
    case = case_of("deepseek_v3-0")
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path / "model")
    put_tokenizer(tmp_path / "model")
    write_adapter(reference, tmp_path / "own", 1, targets=["kv_b_proj"])
    with (
        hmt.Engine(host_memory="64MiB", adapters=[f"own={tmp_path}/own"], **OPTIONS) as engine,
        pytest.raises(AdapterError, match="takes apart"),
    ):
        engine.load_model(tmp_path / "model")
