"""The random model: an ordinary checkpoint of the size that was asked for, the same every time."""

import math
from pathlib import Path

import pytest
import torch

import hmt
from hmt.formats import open_checkpoint
from hmt.profiling.random_model import Shape, write_random_model

EXPERTS = Shape(2, 64, 32, 4, 2, 32, vocab_size=96, experts=4, experts_per_token=2)
SMALL = Shape(3, 64, 128, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "model"
    write_random_model(folder, SMALL, shard_bytes=200_000)
    return folder


def test_it_is_a_checkpoint_in_shards(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    assert len({record.file for record in checkpoint.records.values()}) > 2
    assert checkpoint.records["model.layers.2.mlp.down_proj.weight"].shape == (64, 128)
    assert len(checkpoint.records) == 3 + 9 * SMALL.layers


def test_it_tells_its_size(tmp_path: Path) -> None:
    nbytes = write_random_model(tmp_path, SMALL)
    records = open_checkpoint(tmp_path).records.values()
    assert nbytes == sum(record.nbytes for record in records)
    assert nbytes == 2 * sum(math.prod(record.shape) for record in records)


def test_a_seed_repeats_every_byte_and_another_does_not(model: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        write_random_model(tmp_path / name, SMALL, seed=seed, shard_bytes=200_000)
    for file in model.iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes()
    for shard in model.glob("*.safetensors"):
        assert (tmp_path / "other" / shard.name).read_bytes() != shard.read_bytes()


def test_weights_are_spread_as_llamas_are(model: Path) -> None:
    record = open_checkpoint(model).records["lm_head.weight"]
    with record.file.open("rb") as file:
        file.seek(record.offset)
        data = bytearray(file.read(record.nbytes))
    weights = torch.frombuffer(data, dtype=torch.bfloat16).float()
    assert weights.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(weights.mean().item()) < 1e-3


def test_it_computes_finite_logits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HMT_CACHE", str(model.parent))
    with hmt.Engine(host_memory="16MiB", context=64, threads=1) as engine:
        loaded = engine.load_model(model)
        logits = loaded.logits([1, 2, 3, 4], [0, 3])
        assert torch.isfinite(logits).all() and logits.std() > 0
        assert loaded.tokenizer.has_chat_template


def test_experts_make_it_a_qwen3_moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HMT_CACHE", str(tmp_path))
    write_random_model(tmp_path / "model", EXPERTS)
    records = open_checkpoint(tmp_path / "model").records
    assert records["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (64, 32)
    assert records["model.layers.0.self_attn.q_norm.weight"].shape == (32,)
    with hmt.Engine(host_memory="16MiB", context=64, threads=1) as engine:
        logits = engine.load_model(tmp_path / "model").logits([1, 2, 95], [2])
        assert logits.shape == (1, 96) and torch.isfinite(logits).all()
