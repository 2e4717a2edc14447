"""Each of llama.cpp's architectures answers as transformers does of the checkpoint it was made of.

The files are those of llama.cpp's converter, written again to the bit: see gguf_conventions.py.
"""

from pathlib import Path

import pytest
import torch
import transformers
from gguf_conventions import VOCABULARY, conventions

import hmt
from hmt.engine.loading.inspection import inspect

PROMPT = torch.randint(
    0, VOCABULARY - 3, (19,), generator=torch.Generator().manual_seed(5)
).tolist()


def logits_of(path: Path) -> torch.Tensor:
    with hmt.Engine(
        host_memory="256MiB", context=64, dtype="float32", activations="exact"
    ) as engine:
        return engine.load_model(path).logits(PROMPT, range(len(PROMPT)))


def transformers_logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize("name", conventions())
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    one = conventions()[name]
    path = one.write(tmp_path / "model.gguf", "Q8_0")
    expected = transformers_logits(one.write_checkpoint(tmp_path / "checkpoint"))
    spread = float(expected.std())
    torch.testing.assert_close(logits_of(path), expected, rtol=0, atol=2e-4 * spread)
    assert not inspect(path).extra
