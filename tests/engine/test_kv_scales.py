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
from hmt.kernels.ops import PageEncoding
from hmt.kernels.reference import encode_rows
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
        found = calibrate(model, [text(1024, 0), *(text(200, n) for n in range(1, 8))])
        assert found.tokens == 2424
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
    ranged = logits(folder, "int8", tmp_path)
    assert 0 < float((ranged - exact).norm() / exact.norm()) < 0.2
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.1
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9


@pytest.fixture(scope="module")
def without(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, of whose keys nothing is known."""
    made = tmp_path_factory.mktemp("without") / "copy"
    shutil.copytree(folder, made)
    (made / SCALES).unlink()
    return made


def test_ranges_of_keys_make_fewer_bits_lose_less() -> None:
    """Channels apart by far, as keys have them: scores and values, where keys serve as these."""
    torch.manual_seed(0)
    middle, far = 8 * torch.randn(2, 64), torch.exp(torch.randn(2, 64))
    key = middle + far * torch.randn(400, 2, 64)
    calibration = Calibration()
    calibration.see(0, key[:200], None)
    calibration.see(0, key[200:], None)
    own = calibration.ranges[0]
    assert torch.allclose(own.middle, key.mean(0), atol=1e-5)
    query = torch.randn(5, 6, 64)
    assert torch.allclose(own.restored(own.normalized(key)), key, atol=1e-4)
    exact, lost = scores(query, key), []
    assert torch.allclose(scores(own.scaled_query(query), own.normalized(key)), exact, atol=1e-2)
    for kept, asked in ((key, query), (own.normalized(key), own.scaled_query(query))):
        codes, scales = encode_rows(PageEncoding.INT4, kept)
        rounded = (codes - 8.0) * scales.float().repeat_interleave(32, -1)
        lost.append(float((scores(asked, rounded) - exact).square().mean()))
    assert lost[1] < lost[0] / 4
    weights = torch.softmax(exact, -1)  # of queries' heads, three to each head of keys
    found = torch.einsum("qhk,khd->qhd", weights, own.normalized(key).repeat_interleave(3, 1))
    wanted = torch.einsum("qhk,khd->qhd", weights, key.repeat_interleave(3, 1))
    assert torch.allclose(
        own.restored_values(found)[..., :32], own.restored_values(found[..., :32])
    )
    assert torch.allclose(own.restored_values(found), wanted, atol=1e-4)


def scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[queries, heads, keys], each row's mean taken away, which softmax does not see."""
    found = torch.einsum("qhd,khd->qhk", query, key.repeat_interleave(3, 1))
    return found - found.mean(-1, keepdim=True)


@pytest.mark.parametrize("gpu", [{}, {"gpus": "fake", "gpu_memory": "64MiB"}], ids=["cpu", "gpu"])
def test_ranges_of_keys_change_no_scores(folder: Path, without: Path, gpu: dict[str, str]) -> None:
    """While all pages stay, none is in fewer bits; nor do chunks and single tokens matter."""
    found, tokens = [], text(300, 30)
    levels = {"kv_gpu_memory": "40MiB", "kv_quant": "int4", "max_prefill_tokens": 64}
    for one in (without, folder):
        with hmt.Engine(**OPTIONS, **levels, **gpu) as engine:
            model = engine.load_model(one)
            found.append(model.logits(tokens, range(200, 300), prefill=250))
            assert bool(model.prepared.ranges) == (one is folder)
            is_latent = model.prepared.model.spec.kv[0].kind == "latent"
            if not gpu and not is_latent:  # whose prompts are computed otherwise than tokens
                assert torch.equal(model.logits(tokens, range(200, 300)), found[-1])
    assert (found[0] - found[1]).abs().max() < 1e-3 * found[0].abs().max()
    assert not torch.equal(*found)


def test_keys_are_read_as_they_were_given(folder: Path, without: Path) -> None:
    tokens, seen = text(100, 31), list[dict[int, tuple[torch.Tensor, ...]]]()
    for one in (without, folder):
        with hmt.Engine(**OPTIONS, kv_gpu_memory="40MiB", kv_quant="int4") as engine:
            seen.append({})
            engine.load_model(one).keys_and_values(
                tokens, lambda n, *both: seen[-1].update({n: both})
            )
    for layer, both in seen[0].items():
        for given, found in zip(both, seen[1][layer], strict=True):
            assert torch.allclose(found, given, atol=1e-3 * float(given.abs().max()))


def test_ranges_of_other_weights_or_shorter_texts_are_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = OPTIONS | {"kv_gpu_memory": "40MiB", "kv_quant": "int4"}
    with hmt.Engine(**options | {"context": 1040}) as engine:
        assert not engine.load_model(folder).prepared.ranges
    assert "--length 1040` makes it anew" in caplog.text
    Calibration().write(tmp_path / "mark", "other")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.copy(tmp_path / "mark", other / SCALES)
    with hmt.Engine(**options) as engine:
        assert not engine.load_model(other).prepared.ranges
    assert "made for other weights" in caplog.text


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
