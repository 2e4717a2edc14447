"""A small llama in every format that others publish, through the engine, against transformers.

Every file is read block by block in the least memory that works.
"""

import json
import random
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from publishers import PUBLISHERS
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import hmt
from hmt.engine import EngineConfig, prepare
from hmt.planner import PlanOptions, smallest_budget

OPTIONS = {"dtype": "float32", "context": 32, "prefill_chunk": 16, "max_batch": 1}
VOCAB = 300
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(1 if "norm" in name else torch.randn(tensor.shape) * 0.15)
    return model


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    everything = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]} | config
    (folder / "config.json").write_text(json.dumps(everything, default=str))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    shutil.copy(str(files("hmt") / "embedded" / "mini-dense" / "tokenizer.json"), folder)


@pytest.mark.parametrize("name", PUBLISHERS)
def test_logits_equal_those_of_the_numbers_that_are_published(
    name: str, llama: LlamaForCausalLM, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    publisher = PUBLISHERS[name]
    torch.manual_seed(6)
    tensors, plain = {}, {}
    for key, tensor in llama.state_dict().items():
        if key.startswith("model.layers") and tensor.dim() == 2:
            parts, plain[key] = publisher.publish(tensor)
            assert (plain[key] - tensor).norm() < 0.2 * tensor.norm()
            module = key.removesuffix(".weight")
            tensors |= {f"{module}.{end}": part for end, part in parts.items()}
        else:
            tensors[key] = plain[key] = tensor
    write(tmp_path, {"quantization_config": publisher.config}, tensors)
    reference = LlamaForCausalLM(CONFIG).eval()
    reference.load_state_dict(plain)
    rng = random.Random(7)
    tokens = [rng.randrange(VOCAB) for _ in range(20)]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    config = EngineConfig.resolve(host_memory="64MiB", **OPTIONS)
    least = smallest_budget(prepare(tmp_path, config).demand, PlanOptions(0, 32, 16))
    with hmt.Engine(host_memory=least, **OPTIONS) as engine:
        found = engine.load_model(tmp_path).logits(tokens, range(len(tokens)), prefill=16)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
