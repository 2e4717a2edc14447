"""Multi-token prediction layers of GGUF files predict as those of the checkpoint do.

What the checkpoint's predict is compared with transformers in tests/models/test_next_token.py.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_conventions import Conventions, Numbers, conventions
from reference import MINI_DENSE
from safetensors.numpy import load_file, save_file

import hmt
from hmt.base.errors import ConfigError
from hmt.engine import EngineConfig
from hmt.engine.loading.packs import convert
from hmt.engine.speculation.model_proposers import FirstOf, NextTokenProposer
from hmt.kernels.cpu import extension

OPTIONS: dict[str, Any] = {
    "host_memory": "256MiB", "context": 512, "dtype": "float32", "activations": "exact",
    "speculate": "mtp",
}  # fmt: skip
# In a GGUF file, in DeepSeek's and GLM's checkpoints, and in Qwen's.
PARTS = {
    "eh_proj": ("eh_proj", "mtp.fc"),
    "enorm": ("enorm", "mtp.pre_fc_norm_embedding"),
    "hnorm": ("hnorm", "mtp.pre_fc_norm_hidden"),
    "shared_head_norm": ("shared_head.norm", "mtp.norm"),
}
IDS = [5, 9, 200, 31, 77, 12, 140]
needs_kernels = pytest.mark.skipif(extension.load() is None, reason="nothing is drafted then")


def parts(one: Conventions) -> dict[str, Numbers]:
    """What joins a token with a hidden state, and the last norm, by llama.cpp's names."""
    rng, hidden = np.random.default_rng(7), int(one.config["hidden_size"])
    shapes = dict.fromkeys(PARTS, (hidden,)) | {"eh_proj": (hidden, 2 * hidden)}
    return {
        name: (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def written(name: str, folder: Path) -> tuple[Path, Path]:
    """A GGUF file and a checkpoint of one model, whose last layer is its prediction layer, too."""
    one, qwen = conventions()[name], name.startswith("qwen")
    numbers = parts(one)
    # As the converter writes norms of Qwen's, which count from 1.
    in_file = {n: x + 1 if qwen and n.endswith("norm") else x for n, x in numbers.items()}
    made = {f"blk.2.nextn.{n}.weight": x.tolist() for n, x in in_file.items()}
    changed: dict[str, tuple[str, Any] | None] = {
        "block_count": ("UINT32", 3), "nextn_predict_layers": ("UINT32", 1),
    }  # fmt: skip
    if qwen:
        changed["attention.recurrent_layers"] = ("ARRAY BOOL", [True, False, False])
    file = replace(one, made={**one.made, **made}).write(
        folder / "model.gguf", "F32", changed, guessing=True
    )
    checkpoint = one.write_checkpoint(folder / "checkpoint")
    shutil.copy(MINI_DENSE / "tokenizer.json", checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    at = "mtp.layers.0." if qwen else "model.layers.2."
    [first] = {n.partition("layers.1.")[0] for n in tensors if "layers.1." in n}
    begin = f"{first}layers.1."
    tensors |= {n.replace(begin, at): x for n, x in tensors.items() if n.startswith(begin)}
    tensors |= {
        f"{PARTS[n][1]}.weight" if qwen else f"{at}{PARTS[n][0]}.weight": x
        for n, x in numbers.items()
    }
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    config = dict(one.config) | ({} if qwen else {"num_nextn_predict_layers": 1})
    (checkpoint / "config.json").write_text(json.dumps(config))
    return file, checkpoint


def predicted(path: Path) -> list[torch.Tensor]:
    """Logits of three predictions in a row."""
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(path)
        proposer = model._core.speculator._proposer
        assert isinstance(proposer, FirstOf)
        [own] = (each for each in proposer._proposers if isinstance(each, NextTokenProposer))
        width = model.prepared.model.spec.hidden_size
        hidden = torch.randn(len(IDS), width, generator=torch.Generator().manual_seed(3))
        found = []
        for part in (slice(0, 5), slice(5, 6), slice(6, 7)):
            fed = model._loop.call(lambda p=part: own._model.feed(1, IDS[p], hidden[p]))
            assert fed is not None
            found.append(fed[0].clone())
        return found


@needs_kernels
@pytest.mark.parametrize("name", ["glm4moe", "qwen35, wide"])
def test_predictions_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    file, checkpoint = written(name, tmp_path)
    for found, wanted in zip(predicted(file), predicted(checkpoint), strict=True):
        assert float(wanted.std()) > 0
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4 * float(wanted.std()))


def test_files_without_prediction_layers_and_packs_say_so(tmp_path: Path) -> None:
    plain = conventions()["glm4moe"].write(tmp_path / "plain.gguf", "F32")
    with pytest.raises(ConfigError, match="GGUF files where they were converted with them"):
        hmt.Engine(**OPTIONS).load_model(plain)
    pack = tmp_path / "pack"
    convert(plain, pack, EngineConfig.resolve(host_memory="256MiB"))
    with pytest.raises(ConfigError, match="is a pack, which holds the layers that answers need"):
        hmt.Engine(**OPTIONS).load_model(pack)
