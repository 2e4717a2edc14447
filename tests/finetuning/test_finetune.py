"""Training a small model's adapters under a third of its size, beside peft and torch."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import LINEARS, answers
from torch.nn import functional
from transformers import AutoModelForCausalLM

import hmt
from hmt.engine.loading.source import open_source
from hmt.finetuning import Finetuned, FinetuneOptions, finetune
from hmt.finetuning.adapters import Adapters
from hmt.finetuning.examples import Example, batches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it imports warns of what is to go
    from peft import LoraConfig, PeftModel, get_peft_model

MODEL = Path(hmt.__file__).parent / "embedded/mini-dense"
SIZE_BYTES = sum(file.stat().st_size for file in MODEL.glob("*.safetensors"))
OPTIONS = FinetuneOptions(
    rank=2, alpha=4, batch=1, length=40, epochs=5, learning_rate=5e-3, seed=3,
    targets=("q_proj", "v_proj", "down_proj"), host_memory_bytes=SIZE_BYTES // 3,
)  # fmt: skip
CHATS = (("Who?", "Nobody."), ("What now?", "A tale."), ("Two and two?", "Five."), ("Hm?", "Yes."))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finetuned, Path]:
    folder = tmp_path_factory.mktemp("trained")
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in CHATS
    ]
    data = folder / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    return finetune(MODEL, folder / "own", data, OPTIONS), folder / "own"


def reference() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def test_losses_equal_those_of_peft_and_torch(trained: tuple[Finetuned, Path]) -> None:
    done, _ = trained
    assert done.plan.total <= SIZE_BYTES // 3
    wanted = _train_with_peft(done)
    assert len(done.losses) == len(wanted) == 20
    assert done.losses == pytest.approx(wanted, abs=1e-3)
    assert sum(done.losses[-4:]) < 0.5 * sum(done.losses[:4])


def _train_with_peft(done: Finetuned) -> list[float]:
    """The losses of the same steps, all of the model in memory."""
    first = Adapters(done.modules, OPTIONS)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=[m.name for m in done.modules])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(reference(), config)
    named = dict(adapted.named_parameters())
    parameters = []
    for module in done.modules:
        for which, matrices in (("A", first.down), ("B", first.up)):
            own = named[f"base_model.model.{module.name}.lora_{which}.default.weight"]
            own.data.copy_(matrices[module.name].detach())
            parameters.append(own)
    optimizer = torch.optim.AdamW(parameters, lr=OPTIONS.learning_rate, weight_decay=0.0)
    losses, examples = [], done.examples.all
    for epoch in range(OPTIONS.epochs):
        for chosen in batches(len(examples), OPTIONS.batch, OPTIONS.seed, epoch):
            optimizer.zero_grad()
            loss = _loss(adapted, [examples[n] for n in chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def _loss(adapted: Any, examples: list[Example]) -> torch.Tensor:
    total = torch.zeros(())
    for one in examples:
        logits = adapted(torch.tensor([one.tokens])).logits[0]
        targets = torch.tensor(one.tokens).masked_fill(~torch.tensor(one.learned), -100)
        total = total + functional.cross_entropy(logits[:-1], targets[1:], reduction="sum")
    return total / sum(one.count for one in examples)


def test_the_folder_loads_in_peft_and_in_hmt(trained: tuple[Finetuned, Path]) -> None:
    done, folder = trained
    tokens = list(done.examples.all[0].tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(reference(), folder).eval()
    wanted = answers(adapted, tokens)
    options: dict[str, Any] = {"dtype": "float32", "host_memory": "96MiB", "context": 128}
    with hmt.Engine(adapters=[f"own={folder}"], **options) as engine:
        model = engine.load_model(MODEL)
        found = model.logits(tokens, range(len(tokens)), adapter="own")
        bare = model.logits(tokens, range(len(tokens)))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert float((found - bare).abs().max()) > 1, "something was learned"
    assert set(json.loads((folder / "adapter_config.json").read_text())["target_modules"]) == {
        module.name for module in done.modules
    }
    assert {m.name.rpartition(".")[2] for m in done.modules} == {*OPTIONS.targets} <= {*LINEARS}


def test_answers_alone_are_learned(trained: tuple[Finetuned, Path]) -> None:
    tokenizer = open_source(MODEL).tokenizer()
    for (question, answer), one in zip(CHATS, trained[0].examples.all, strict=True):
        learned = [t for t, wanted in zip(one.tokens, one.learned, strict=True) if wanted]
        text = tokenizer.decode(learned)
        assert answer in text and question not in text
        assert learned == list(one.tokens[-len(learned) :]), "the answer's end as well"
