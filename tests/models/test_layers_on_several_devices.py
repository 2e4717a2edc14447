"""Families whose layers are spread over two fake devices: the same bits as on one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from plain_memory import published, put_tokenizer, random_reference
from random_configs import case_of

import hmt
from hmt.base.errors import MachineError
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HMT_POISON", "on")
    monkeypatch.setitem(machine._links, "a fake device", LinkRates(40e9, 30e9, 90e9))
    yield


def random_model(name: str, folder: Path) -> Path:
    case = case_of(name)
    published(random_reference(case.config, case.seed), folder)
    put_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "gemma3_text-0",  # windows
        "qwen3_next-0",  # recurrent state
        *(
            pytest.param(name, marks=pytest.mark.whole)
            for name in ("deepseek_v3-0", "gemma4_text-0", "deepseek_v4-0", "gpt_oss-0", "mamba2-0")
        ),
    ],
)
def test_families_give_the_bits_of_one_device(name: str, tmp_path: Path) -> None:
    folder, found = random_model(name, tmp_path), []
    for gpus in ("fake", "fake,fake"):
        options = {"gpu_memory": "64MiB", "max_prefill_tokens": 16, "dtype": "float32"}
        with hmt.Engine(context=64, host_memory="64MiB", gpus=gpus, **options) as engine:
            model = engine.load_model(folder)
            found.append(model.logits([1 + n % 200 for n in range(40)], range(40), prefill=24))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["llama-0", "qwen3_next-0"])
def test_a_row_that_cannot_be_captured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are computed layer by layer; where state has advanced, from the next request on."""
    folder = random_model(name, tmp_path)
    options = {
        "gpu_memory": "64MiB",
        "max_batch": 1,
        "dtype": "float32",
        "speculate": "off",
        "gpus": "fake,fake",
    }
    request = hmt.Request(input=list(range(20, 29)), max_new_tokens=6, ignore_eos=True)
    with hmt.Engine(context=64, host_memory="64MiB", **options) as engine:
        wanted = engine.load_model(folder).infer(request).token_ids
    with hmt.Engine(context=64, host_memory="64MiB", **options) as engine:
        model = engine.load_model(folder)

        def fails(compute: object) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(model._core.memory.on_devices[1].device, "capture", fails)
        if name == "qwen3_next-0":
            with pytest.raises(MachineError, match="injected"):
                model.infer(request)
        assert model.infer(request).token_ids == wanted
        assert any("injected" in note for note in model.summary().notes)
