"""Scales of keys and values beside a model: made once, used, refused for other weights."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from reference import MINI_DENSE, MINI_MOE

import hmt
from hmt.base.errors import ConfigError
from hmt.engine.loading.kv_scales import SCALES, calibrate, identity
from hmt.engine.loading.packs import convert
from hmt.engine.loading.source import open_source
from hmt.kvcache.codecs import Calibration, read_scales, weights_of

OPTIONS = {"host_memory": "256MiB", "context": 1024, "max_batch": 1, "dtype": "float32"}
FAR = {"kv_host_memory": 0, "max_prefill_tokens": 32}
STATIC = "exact,int8-static+shared-parts"


def text(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 500) for _ in range(tokens)]


@pytest.fixture(scope="module", params=[MINI_DENSE, MINI_MOE], ids=["dense", "moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "copy"
    shutil.copytree(request.param, made)
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(made)
        found = calibrate(model, [text(200, n) for n in range(8)])
        assert found.tokens == 1600
        rows = sum(k.heads * (1 if k.kind == "latent" else 2) for k in model.prepared.model.spec.kv)
        assert found.rows == 400 * rows
        assert 0 < found.beyond < found.rows / 8
        found.scales.write(made / SCALES, identity(model.prepared.source))
    return made


def logits(folder: Path, quant: str, disk: Path) -> torch.Tensor:
    near = "5MiB" if "Llama" in (folder / "config.json").read_text() else "2MiB"
    levels = FAR | {"kv_gpu_memory": near, "kv_quant": quant, "kv_offload_dir": disk}
    with hmt.Engine(**OPTIONS, **levels) as engine:
        return engine.load_model(folder).logits(text(1000, 20), range(900, 1000))


def test_scales_beside_the_weights_are_used(folder: Path, tmp_path: Path) -> None:
    found = logits(folder, STATIC, tmp_path)
    shutil.copy(folder / SCALES, tmp_path / "elsewhere")
    assert torch.equal(logits(folder, f"{STATIC}@{tmp_path}/elsewhere", tmp_path), found)
    exact = logits(folder, "exact", tmp_path)
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.1
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


def test_scales_of_other_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert identity(open_source(other)) == identity(open_source(folder))
    os.utime(other / "config.json")
    logits(other, STATIC, tmp_path)  # a copy is the same model
    for file in other.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[len(data) // 4 :] = bytes(byte ^ 1 for byte in data[len(data) // 4 :])
        file.write_bytes(data)
    with pytest.raises(ConfigError, match="made for other weights"):
        logits(other, STATIC, tmp_path)
    with pytest.raises(ConfigError, match="made for other weights"):
        logits(other, f"{STATIC}@{folder / SCALES}", tmp_path)
    (other / SCALES).unlink()
    with pytest.raises(ConfigError, match=f"`hmt calibrate kv {other}` makes it"):
        logits(other, STATIC, tmp_path)
    (other / SCALES).write_text("nothing")
    with pytest.raises(ConfigError, match="does not hold scales"):
        logits(other, STATIC, tmp_path)


def test_a_pack_has_scales_of_its_own(tmp_path: Path) -> None:
    config = hmt.engine.EngineConfig.resolve(quantization="w8a8", host_memory="256MiB")
    pack = tmp_path / "pack"
    convert(MINI_DENSE, pack, config)
    assert identity(open_source(pack)) != identity(open_source(MINI_DENSE))
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(pack)
        found = calibrate(model, [text(200, n) for n in range(3)])
        assert (found.rows, found.beyond) == (0, 0), "of three texts none is held out"
        found.scales.write(pack / SCALES, identity(model.prepared.source))
    assert logits(pack, STATIC, tmp_path).isfinite().all()


def test_nothing_to_read_is_told() -> None:
    with hmt.Engine(**OPTIONS) as engine:
        model = engine.load_model(MINI_DENSE)
        for texts in ([], [[]]):
            with pytest.raises(ConfigError, match="nothing to calibrate with"):
                calibrate(model, texts)


def test_rows_beyond_what_was_seen_are_counted(tmp_path: Path) -> None:
    calibration = Calibration()
    ones = torch.ones(3, 2, 4)
    assert calibration.beyond(0, ones, None) == (6, 6), "nothing has been seen"
    calibration.see(0, ones, 2 * ones)
    other = ones.clone()
    other[1, 1, 3] = -1.5
    assert calibration.beyond(0, other, 2 * ones) == (1, 12)
    calibration.write(tmp_path / "marked", "mine")
    calibration.write(tmp_path / "unmarked")
    assert weights_of(tmp_path / "marked") == "mine" and weights_of(tmp_path / "unmarked") is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["marked", "unmarked"]
    assert read_scales(tmp_path / "marked", {}) == {}
