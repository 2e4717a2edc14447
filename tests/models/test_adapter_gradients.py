"""Losses and gradients of one step, beside peft's, of every kind of layer."""

import random
from pathlib import Path

import pytest
import torch
from adapter_files import write_adapter
from plain_memory import published, put_tokenizer, random_reference
from random_configs import case_of
from torch.nn import functional

from hmt.engine.loading.source import open_source
from hmt.finetuning import FinetuneOptions
from hmt.finetuning.adapters import find_modules
from hmt.finetuning.examples import Example, Examples
from hmt.finetuning.training import opened_run
from hmt.models import open_model

# Attention all in one matrix, beside experts, latent, and recurrent.
FAMILIES = ["phi3-0", "qwen3_moe-0", "deepseek_v3-0", "qwen3_next-0"]
OTHERS = ["llama-0", "gemma3_text-0", "lfm2-0", "glm4_moe-0", "mixtral-0", "qwen3_5_text-0"]
WHOLE = [pytest.param(name, marks=pytest.mark.whole) for name in OTHERS]


@pytest.mark.parametrize("name", [*FAMILIES, *WHOLE])
def test_gradients_equal_pefts(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    reference = random_reference(case.config, case.seed)
    published(reference, tmp_path / "model")
    put_tokenizer(tmp_path / "model")
    source = open_source(tmp_path / "model")
    model = open_model(source.config, source.path, torch.float32)
    modules = find_modules(model.spec, frozenset(source.tensors), ())
    assert len(modules) >= 2 * model.spec.layers
    adapted = write_adapter(
        reference, tmp_path / "own", case.seed, rank=3, targets=[m.name for m in modules]
    )
    rng = random.Random(case.seed)
    texts = [[rng.randrange(case.config.vocab_size) for _ in range(n)] for n in (14, 9)]
    examples = [Example(tuple(text), tuple(n > 4 for n in range(len(text)))) for text in texts]
    options = FinetuneOptions(rank=3, alpha=9, batch=2, host_memory_bytes=64 << 20)
    with opened_run(source, model, modules, Examples(tuple(examples), 0, 0), options) as run:
        named = dict(adapted.named_parameters())
        trained = {}
        for module in modules:
            for which, matrices in (("A", run.adapters.down), ("B", run.adapters.up)):
                own = named[f"base_model.model.{module.name}.lora_{which}.default.weight"]
                matrices[module.name].data.copy_(own)
                trained[f"{module.name} {which}"] = own.requires_grad_(), matrices[module.name]
        loss = run.gradients.add(examples)
    count = sum(example.count for example in examples)
    wanted = torch.zeros(())
    for example in examples:
        logits = adapted(torch.tensor([example.tokens]), **case.options).logits[0]
        learned = torch.tensor(example.learned)
        targets = torch.tensor(example.tokens).masked_fill(~learned, -100)
        wanted = wanted + functional.cross_entropy(logits[:-1], targets[1:], reduction="sum")
    (wanted / count).backward()
    assert loss == pytest.approx(float(wanted.detach() / count), abs=1e-4)
    assert trained
    for place, (own, ours) in trained.items():
        assert own.grad is not None and ours.grad is not None, place
        scale = float(own.grad.abs().max())
        assert scale > 0, place
        torch.testing.assert_close(ours.grad, own.grad, atol=2e-3 * scale, rtol=0, msg=place)
