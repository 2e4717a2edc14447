"""Bad input: each a clear error that says what to do, and the engine lives on."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import MINI_DENSE
from safetensors.torch import load_file, save_file

import hmt
from hmt.base.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    DiskReadError,
    EmptyPromptError,
    HeaderError,
    HMTError,
    MissingFileError,
    NumericsError,
    RequestError,
    ShapeError,
    UnknownArchitectureError,
)
from hmt.contracts.request import FinishReason
from hmt.engine import LoadedModel
from hmt.engine.loading import planning

CHAT = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model that a test may damage."""
    target = tmp_path / "model"
    shutil.copytree(MINI_DENSE, target)
    return target


@pytest.fixture
def model() -> Iterator[LoadedModel]:
    # Not the reader that the probe finds fastest here: a test breaks this one.
    with hmt.Engine(host_memory="8MiB", context=512, disk_reader="direct") as engine:
        yield engine.load_model(MINI_DENSE)


def load_and_answer(folder: Path, **options: Any) -> str:
    with hmt.Engine(**{"host_memory": "8MiB", **options}) as engine:
        return engine.load_model(folder).infer(hmt.Request(CHAT, 8)).text


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="not there"):
        load_and_answer(tmp_path / "nowhere")


def test_a_folder_without_config_or_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        load_and_answer(folder)
    (folder / "config.json").unlink()
    with pytest.raises(MissingFileError, match=r"config\.json"):
        load_and_answer(folder)


def test_a_truncated_shard_says_how_much_is_missing(folder: Path) -> None:
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1000)
    with pytest.raises(HeaderError, match="1000 bytes"):
        load_and_answer(folder)


def test_a_tensor_that_is_missing_or_misshapen(folder: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(3, 4)}))
    with pytest.raises(ShapeError, match=rf"{name} has shape \[3, 4\]"):
        load_and_answer(folder)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(MissingFileError, match=name):
        load_and_answer(folder)


def test_a_config_that_contradicts_the_weights(folder: Path) -> None:
    change_config(folder, intermediate_size=1024)
    with pytest.raises(ShapeError, match="do not belong together"):
        load_and_answer(folder)


def test_an_unknown_architecture_is_named_and_the_known_are_listed(folder: Path) -> None:
    change_config(folder, architectures=["QuantumForCausalLM"], model_type="quantum")
    with pytest.raises(UnknownArchitectureError, match=r"QuantumForCausalLM.*LlamaForCausalLM"):
        load_and_answer(folder)


def test_a_budget_too_small_names_one_that_works(folder: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        load_and_answer(folder, host_memory="1MiB", context=128)
    least = int(str(caught.value).split("that works is ")[1].split()[0])
    assert load_and_answer(folder, host_memory=least, context=128)
    with pytest.raises(BudgetError):
        load_and_answer(folder, host_memory=least - 1, context=128)


def test_a_plan_that_the_machine_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generous budget is fine as long as the plan does not use what is not there."""
    assert load_and_answer(MINI_DENSE, host_memory="900TiB", context=512) == "42"
    monkeypatch.setattr(planning, "physical_host_bytes", lambda: 10 << 20)
    with pytest.raises(BudgetError, match=r"can have 10\.0 MiB at most"):
        load_and_answer(MINI_DENSE, host_memory="64MiB", context=512)


def test_nan_weights_are_named(folder: Path) -> None:
    name = "model.layers.5.self_attn.k_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][7, 7] = float("nan")

    change_tensors(folder, spoil)
    for options in ({}, {"quantization": "w4a8"}, {"host_memory": "64MiB"}):
        with pytest.raises(NumericsError, match=name):
            load_and_answer(folder, **options)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (hmt.Request(""), EmptyPromptError, "prompt is empty"),
        (hmt.Request([]), EmptyPromptError, "prompt is empty"),
        ("Hi", RequestError, "hmt.Request"),
        (hmt.Request(42), RequestError, "input is int"),  # type: ignore[arg-type]
        (hmt.Request("Hi", max_new_tokens=0), RequestError, "at least 1"),
        (hmt.Request("Hi", context_size=1 << 20), ContextLengthError, "131072"),
        (hmt.Request("Hi", context_size=8, max_new_tokens=8), ContextLengthError, "context of 8"),
        (
            hmt.Request("Hi", max_new_tokens=600),
            ContextLengthError,
            "the context of 512 is what it was loaded with",
        ),
        (hmt.Request([5, 4096]), RequestError, "4096"),
        (hmt.Request("Hi", stop=("",)), RequestError, "empty"),
        (hmt.Request("Hi", sampling=hmt.Sampling(temperature=-1.0)), RequestError, "temperature"),
        (hmt.Request("Hi", sampling=hmt.Sampling(top_p=0.0)), RequestError, "top_p"),
    ],
)
def test_a_bad_request_fails_alone(
    model: LoadedModel, request_: hmt.Request, error: type[HMTError], words: str
) -> None:
    with pytest.raises(error, match=words):
        model.infer(request_)
    assert model.infer(hmt.Request(CHAT, 8)).text == "42"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantisation": "w4a8"}, "did you mean 'quantization'"),
        ({"quantization": "w3a8"}, "w4a8"),
        ({"host_memory": "many"}, "as a size"),
        ({"check_weights": "no"}, "True or False"),
        ({"dtype": "int3"}, "bfloat16"),
        ({"executor": "magic"}, "overlapped, plain"),
        ({"spill_dir": "/nonexistent"}, "folder"),
        ({"max_batch": 0}, "at least 1"),
        ({"numa": 7}, "pair"),
        ({"context": 200_000, "max_batch": 1}, "131072"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_and_answer(MINI_DENSE, **options)


def test_a_read_error_in_the_middle_fails_the_request_and_the_engine_lives(
    model: LoadedModel,
) -> None:
    reader = model._core.memory.weights._queue._reader
    whole = model.infer(hmt.Request(CHAT, 8)).text
    original = reader.read_into
    events = model.stream(hmt.Request("Once upon a time", 60, ignore_eos=True))
    for _ in range(5):
        next(events)

    def broken(path: Path, offset: int, view: memoryview) -> int:
        raise DiskReadError("injected: the disk went away")

    reader.read_into = broken  # type: ignore[method-assign]
    with pytest.raises(DiskReadError, match="disk went away"):
        for _ in events:
            pass
    reader.read_into = original  # type: ignore[method-assign]
    model.reset_summary()  # waits for the engine's thread
    free = model._core.memory.kv.allocator.free_tokens
    assert free == model._core.memory.kv.allocator.capacity_tokens, (
        "the failed request's pages came back"
    )
    assert model.infer(hmt.Request(CHAT, 8)).text == whole


def test_a_closed_model_says_so(folder: Path) -> None:
    engine = hmt.Engine(host_memory="8MiB")
    model = engine.load_model(folder)
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        model.infer(hmt.Request("Hi"))


def test_closing_the_stream_cancels(model: LoadedModel) -> None:
    events = model.stream(hmt.Request("Once", 100, ignore_eos=True))
    next(events)
    assert (
        model._core.memory.kv.allocator.free_tokens
        < model._core.memory.kv.allocator.capacity_tokens
    )
    events.close()
    model.reset_summary()  # waits for the engine's thread, which cancels first
    assert (
        model._core.memory.kv.allocator.free_tokens
        == model._core.memory.kv.allocator.capacity_tokens
    )
    assert model._core.scheduler.idle


def test_more_requests_than_memory_wait_their_turn(model: LoadedModel) -> None:
    requests = [hmt.Request(f"Number {n}:", 120, ignore_eos=True) for n in range(5)]
    answers = model.infer_batch(requests)
    assert [a.finish_reason for a in answers] == [FinishReason.LENGTH] * 5
    assert all(len(a.token_ids) == 120 for a in answers)
