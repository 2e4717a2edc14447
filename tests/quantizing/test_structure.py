"""Which layers share an input, and what can be folded into what makes it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import DENSE, MOE, checkpoint
from transformers import AutoModelForCausalLM

from hmt.models import open_model
from hmt.profiling.random_model import Shape
from hmt.quantizing.structure import foldings, leaders

SAME_HEADS = Shape(layers=2, hidden_size=64, intermediate_size=96, heads=4, kv_heads=4)


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([list(range(40, 72))])).logits


@pytest.mark.parametrize(
    ("shape", "count"), [(DENSE, 3), (SAME_HEADS, 4), (MOE, 2 + MOE.experts)], ids=str
)
def test_factors_that_move_leave_logits_as_they_were(shape: Shape, count: int, tmp_path: Path):
    folder = checkpoint(tmp_path / "model", shape)
    before = logits(folder)
    config = json.loads((folder / "config.json").read_text())
    spec = open_model(config, folder, torch.float32).spec
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    names = {(b.id, p.name): p.sources[0] for b in spec.blocks for p in b.params}
    generator = torch.Generator().manual_seed(3)
    for layer in range(spec.layers):
        blocks = [block for block in spec.blocks if block.id.layer == layer]
        found = foldings(spec.architecture, blocks)
        assert len(found) == count
        for folding in found:
            made = tensors[names[folding.before.block, folding.before.name]]
            factors = 0.5 + torch.rand(len(made), generator=generator)
            made /= factors if made.dim() == 1 else factors[:, None]
            for place in folding.behind:
                tensors[names[place.block, place.name]] *= factors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(folder), before, atol=1e-5, rtol=0)


def test_a_family_that_is_not_known_has_nothing_to_fold():
    assert foldings("Gemma3ForCausalLM", ()) == ()


def test_the_first_that_a_block_has_stands_for_all():
    assert leaders(["norm", "up_proj", "down_proj"]) == {
        "norm": "norm",
        "up_proj": "up_proj",
        "down_proj": "down_proj",
    }
    assert leaders(["kv_a_proj", "q_a_proj", "q_b_proj"])["kv_a_proj"] == "q_a_proj"
