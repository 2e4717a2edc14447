"""Layers spread over real GPUs: the same bits as on one of them."""

from pathlib import Path

import pytest
import torch

import hmt
from hmt.cli.options import embedded_model
from hmt.hardware import machine
from hmt.hardware.link_rates import LinkRates
from hmt.memory.device import open_device
from hmt.profiling.random_model import Shape, write_random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE = Shape(6, 256, 256, 4, 2, vocab_size=512, experts=32, experts_per_token=4)
TOKENS = list(range(20, 100))


@pytest.fixture(autouse=True)
def _link(monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(torch.cuda.device_count()):
        # Nothing is left to the CPU but experts.
        monkeypatch.setitem(machine._links, torch.cuda.get_device_name(index), LinkRates(1e15))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    write_random_model(folder, SHAPE)
    return folder


def taken(gpus: str, weights_bytes: int) -> list[int]:
    """Memory for so many bytes of weights on each GPU, beside what the driver takes."""
    found = []
    for index in gpus.split(","):
        device = open_device(index)
        device.empty_cache()
        found.append(device.used_bytes() + weights_bytes)
    return found


def answers(
    path: Path, gpus: str, weights_bytes: int, quantization: str | None
) -> tuple[torch.Tensor, list[list[int]], hmt.LoadedModel]:
    """Logits of TOKENS, a prompt of 64 and then one by one, and what three requests get."""
    options = {"host_memory": "256MiB", "context": 512, "dtype": "float32", "gpus": gpus}
    options |= {"quantization": quantization, "gpu_memory": taken(gpus, weights_bytes)}
    with hmt.Engine(**options, max_batch=3) as engine:
        model = engine.load_model(path)
        logits = model.logits(TOKENS, range(len(TOKENS)), prefill=64)
        prompts = [list(range(first, first + 9)) for first in (20, 140, 300)]
        found = model.infer_batch([hmt.Request(input=ids, max_new_tokens=24) for ids in prompts])
        assert not model.summary().notes, "steps are captured"
        assert sum(bool(share.stages) for share in model.plan.devices) == len(gpus.split(","))
        return logits, [list(one.token_ids) for one in found], model


@pytest.mark.parametrize("quantization", [None, "w4a16:32", "w8a8"])
def test_resident_layers_give_the_bits_of_one_gpu(quantization: str | None) -> None:
    one, two = (answers(embedded_model(), gpus, 1 << 30, quantization) for gpus in ("0", "0,1"))
    assert torch.equal(one[0], two[0]) and one[1] == two[1]


def test_copied_layers_give_the_bits_of_one_gpu() -> None:
    one = answers(embedded_model(), "0", 1 << 30, None)
    two = answers(embedded_model(), "0,1", 21 << 19, None)
    assert any(share.slot_counts for share in two[2].plan.devices), "some are copied"
    assert torch.equal(one[0], two[0]) and one[1] == two[1]


def test_the_order_of_gpus_is_that_of_the_layers() -> None:
    one, two = (answers(embedded_model(), gpus, 1 << 30, "w4a16:32") for gpus in ("1,0", "0,1"))
    assert torch.equal(one[0], two[0]) and one[1] == two[1]


def test_resident_experts_give_the_bits_of_one_gpu(moe: Path) -> None:
    one, two = (answers(moe, gpus, 1 << 30, "w4a16:32") for gpus in ("0", "0,1"))
    assert torch.equal(one[0], two[0]) and one[1] == two[1]


@pytest.mark.parametrize("weights_bytes", [12 << 20, 16 << 20])
def test_experts_are_cached_on_each_gpu(weights_bytes: int, moe: Path) -> None:
    """What the CPU computes is added last: in other digits, by what is cached."""
    one = answers(moe, "0", 1 << 30, "w4a16:32")
    two = answers(moe, "0,1", weights_bytes, "w4a16:32")
    assert all(share.expert_slots for share in two[2].plan.devices)
    assert (one[0] - two[0]).norm() / one[0].norm() < 1e-3
