"""sensitive_layers.json: what it names stays as published where the rest is rounded."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import hmt
from hmt.base.errors import CheckpointError
from hmt.cli.options import embedded_model
from hmt.contracts.blocks import BlockId, BlockKind, Role
from hmt.engine import EngineConfig
from hmt.engine.loading import packs
from hmt.quant import Format

MODELS = {"dense": embedded_model(), "moe": Path(__file__).parents[2] / "assets" / "mini-moe"}
OPTIONS = {"host_memory": "64MiB", "context": 64, "threads": 1}
TOKENS = list(range(20, 40))
ENTRIES = [
    {"layer": 0, "flag": "bf16", "kl": 0.03, "R": 18.7, "energy": 0.47},
    {"layer": 1, "op": "ffn_up", "flag": "bf16"},
    {"layer": 2, "op": "attention"},
    {"layer": 3, "op": "o_proj"},
]


def with_file(kind: str, folder: Path, content: str) -> Path:
    shutil.copytree(MODELS[kind], folder)
    (folder / "sensitive_layers.json").write_text(content)
    return folder


def run(folder: Path, scheme: str | None) -> tuple[torch.Tensor, dict[tuple[BlockId, str], Format]]:
    """Logits, and what matrices are in memory."""
    with hmt.Engine(quantization=scheme, **OPTIONS) as engine:
        model = engine.load_model(folder)
        formats = {
            (block, placed.param.spec.name): placed.format
            for block, layout in model.prepared.layouts.items()
            for placed in layout.placed
            if placed.param.spec.role is Role.LINEAR
        }
        return model.logits(TOKENS, range(len(TOKENS)), prefill=16), formats


def is_named(block: BlockId, name: str) -> bool:
    """By ENTRIES."""
    whole = {0: True, 1: name.endswith("up_proj"), 2: block.kind is BlockKind.ATTENTION}
    return whole.get(block.layer, (block.layer, name) == (3, "o_proj"))


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_named_stays_and_the_rest_is_rounded(kind: str, tmp_path: Path) -> None:
    """In a checkpoint, and in a pack that is made of it."""
    folder = with_file(kind, tmp_path / "model", json.dumps(ENTRIES))
    exact, published = run(MODELS[kind], None)
    rounded, fewer = run(MODELS[kind], "w4a16")
    found, mixed = run(folder, "w4a16")
    assert {key[0].layer for key in fewer if fewer[key] != published[key]} >= {0, 1, 2, 3}
    assert mixed == {key: (published if is_named(*key) else fewer)[key] for key in fewer}
    assert (found - exact).norm() < (rounded - exact).norm()
    if kind == "dense":
        return
    config = EngineConfig.resolve(quantization="w4a16", **OPTIONS)
    packs.convert(folder, tmp_path / "pack", config)
    packed, same = run(tmp_path / "pack", None)
    assert torch.equal(packed, found) and same == mixed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot be read"),
        ("{}", "holds a JSON dict, not a list"),
        ('[{"layer": "1"}]', "has the entry"),
        ('[{"layer": 0, "flag": "int8"}]', "one of bf16"),
        ('[{"layer": 99}]', "names layer 99, where"),
        ('[{"layer": 0, "op": "nothing"}]', "op 'nothing' of layer 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused(content: str, says: str, tmp_path: Path) -> None:
    folder = with_file("dense", tmp_path / "model", content)
    with hmt.Engine(**OPTIONS) as engine, pytest.raises(CheckpointError, match=says):
        engine.load_model(folder)
