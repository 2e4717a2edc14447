"""Packs through the engine: the same logits, whatever the scheme, the budget and the executor."""

from pathlib import Path

import pytest
import torch
from reference import MODELS

import hmt
from hmt.base.errors import ConfigError, DamagedPackError, MissingFileError, PackError
from hmt.engine import EngineConfig, prepare
from hmt.engine.loading.packs import convert
from hmt.planner import PlanOptions, smallest_budget

PACKS = [
    *(("mini-dense", scheme) for scheme in ("none", "w8a8", "w4a8:64", "mxfp4a16")),
    *(("mini-moe", scheme) for scheme in ("none", "w4a8")),
]
TOKENS = torch.randint(8, 4000, (106,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("packs")
    made = {(name, scheme): folder / f"{name}-{scheme}" for name, scheme in PACKS}
    for (name, scheme), out in made.items():
        convert(MODELS[name], out, EngineConfig.resolve(quantization=scheme))
    return made


def logits(path: Path, **options: object) -> tuple[torch.Tensor, int]:
    """And the bytes of weights that were on disk."""
    with hmt.Engine(context=128, **options) as engine:
        model = engine.load_model(path)
        return model.logits(TOKENS, range(106), prefill=100), model.summary().streamed_bytes


@pytest.mark.parametrize(("name", "scheme"), PACKS)
def test_a_pack_gives_the_logits_of_its_checkpoint(
    packs: dict[tuple[str, str], Path], name: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HMT_POISON", "on")
    pack = packs[name, scheme]
    expected, _ = logits(MODELS[name], quantization=scheme, host_memory="256MiB")
    prepared = prepare(pack, EngineConfig.resolve(host_memory="256MiB", context=128))
    least = smallest_budget(prepared.demand, PlanOptions(0, 128))
    for budget in (256 << 20, least):
        for executor in ("plain", "overlapped"):
            found, streamed = logits(
                pack, host_memory=budget, executor=executor, verify_reads="always"
            )
            assert torch.equal(found, expected), (budget, executor)
            assert (streamed > 0) == (budget == least)


def test_a_pack_answers_as_its_checkpoint_does(packs: dict[tuple[str, str], Path]) -> None:
    request = hmt.Request([{"role": "user", "content": "What is 12 + 30?"}], 8)
    with hmt.Engine(host_memory="64MiB", context=128) as engine:
        assert engine.load_model(packs["mini-dense", "none"]).infer(request).text == "42"


def test_another_quantisation_than_the_packs_is_refused(
    packs: dict[tuple[str, str], Path],
) -> None:
    for asked in ("none", "w4a8", "w8a8:64", "nvfp4a8"):
        config = EngineConfig.resolve(quantization=asked)
        with pytest.raises(ConfigError, match=r"is a pack of w8a8, and .* was asked for"):
            prepare(packs["mini-dense", "w8a8"], config)
    # Activations are no matter of the bytes.
    alike, _ = logits(packs["mini-dense", "w8a8"], quantization="w8a16", host_memory="64MiB")
    expected, _ = logits(MODELS["mini-dense"], quantization="w8a16", host_memory="64MiB")
    assert torch.equal(alike, expected)


def test_a_pack_is_no_checkpoint_to_convert(
    packs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is a pack already"):
        convert(packs["mini-dense", "none"], tmp_path / "out", EngineConfig.resolve())


def test_damage_fails_the_request_that_needs_it_and_names_it(
    packs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    pack = tmp_path / "pack"
    convert(MODELS["mini-dense"], pack, EngineConfig.resolve())
    data = pack / "data-00001.hmt"
    content = bytearray(data.read_bytes())
    content[-100_000] ^= 1  # in the head
    data.write_bytes(content)
    with pytest.raises(DamagedPackError, match="head"):
        logits(pack, host_memory="64MiB")
    with hmt.Engine(host_memory="5MiB", context=128) as engine:
        model = engine.load_model(pack)
        assert model.summary().streamed_bytes > 0
        for _ in range(2):
            with pytest.raises(DamagedPackError, match="head"):
                model.infer(hmt.Request([1, 2, 3], 4))


def test_folders_that_are_no_whole_pack_do_not_open(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    convert(MODELS["mini-dense"], pack, EngineConfig.resolve())
    (pack / "manifest.json").rename(tmp_path / "manifest.json")
    with pytest.raises(MissingFileError, match="manifest"):
        prepare(pack, EngineConfig.resolve())
    (pack / "pack").mkdir()
    (pack / "journal").touch()
    with pytest.raises(PackError, match="unfinished"):
        prepare(pack, EngineConfig.resolve())
