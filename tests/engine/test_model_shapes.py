"""Planning from a configuration alone: the same bytes as with weights, and measured speeds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hmt.base.errors import CheckpointError, ConfigError, MissingFileError
from hmt.base.units import MIB, parse_bytes
from hmt.contracts.blocks import BlockKind
from hmt.contracts.machine import Machine
from hmt.engine.config import EngineConfig
from hmt.engine.loading.model_shapes import read_shape, shape_demand, shape_names
from hmt.engine.loading.what_if import scenarios_for
from hmt.hardware.machine_file import read_machine
from hmt.planner import PlanOptions, solve
from hmt.planner.catalogue import known_models
from hmt.planner.cost.cost_model import CostModel
from hmt.planner.cost.workload import workload_of
from hmt.profiling.random_model import Shape
from hmt_bench.random_gguf import write_random_gguf

pytestmark = pytest.mark.each_once

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DRIVER_BYTES = 600 * MIB  # of a GPU's memory, before anything is loaded


def options(quantization: str | None = None, **more: Any) -> EngineConfig:
    return EngineConfig.resolve(quantization=quantization, host_memory="1GiB", **more)


def demand(shape: str, quantization: str, users: int = 1) -> Any:
    return shape_demand(read_shape(shape), options(quantization, max_batch=users))


@pytest.mark.parametrize("quantization", [None, "w4a8"])
def test_a_configuration_needs_what_its_weights_need(quantization: str | None) -> None:
    folder = ROOT / "assets" / "mini-moe"
    config = options(quantization, max_batch=2, context=1024)
    with_weights = scenarios_for(str(folder), config)._demand_for(quantization, 2)
    alone = shape_demand(read_shape(str(folder)), config)
    assert [b.id for b in alone.blocks] == [b.id for b in with_weights.blocks]
    for mine, other in zip(alone.blocks, with_weights.blocks, strict=True):
        assert (mine.numbers, mine.encoding) == (other.numbers, other.encoding)
        # Slots of a checkpoint hold whole pages of files, and its sizes are made alike.
        assert abs(mine.slot_bytes - other.slot_bytes) <= max(8192 * 8, mine.slot_bytes // 4)
    # Checkpoints keep the routers' biases in f32, which no configuration says.
    assert alone.parameter_bytes == pytest.approx(with_weights.parameter_bytes, rel=1e-4)
    assert alone.kv_token_bytes == with_weights.kv_token_bytes


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q4_0", "IQ2_XXS", "Q8_0"])
@pytest.mark.parametrize("experts", [0, 8])
def test_a_shape_as_a_gguf_file_needs_what_that_file_needs(
    file_type: str, experts: int, tmp_path: Path
) -> None:
    shape = Shape(
        8, 512, 256, 8, 2, 64, vocab_size=4096, experts=experts, experts_per_token=min(2, experts)
    )
    write_random_gguf(tmp_path / "model.gguf", shape, file_type)
    (tmp_path / "config.json").write_text(json.dumps(shape.config(4096)))
    config = options(None, max_batch=2, context=1024)
    in_file = scenarios_for(str(tmp_path / "model.gguf"), config)._demand_for(None, 2)
    alone = shape_demand(read_shape(f"{tmp_path}/config.json:{file_type.lower()}"), config)
    assert [b.id for b in alone.blocks] == [b.id for b in in_file.blocks]
    for mine, other in zip(alone.blocks, in_file.blocks, strict=True):
        assert (mine.numbers, mine.encoding) == (other.numbers, other.encoding), mine.id
        assert abs(mine.slot_bytes - other.slot_bytes) <= max(8192 * 8, mine.slot_bytes // 4)
    with pytest.raises(ConfigError, match=r"Q9_K.*IQ2_XXS"):
        read_shape("deepseek-v3:Q9_K")


def test_a_configuration_that_describes_nothing_is_refused(tmp_path: Path) -> None:
    good = read_shape(str(ROOT / "assets" / "mini-moe"))
    tiles = [{"quant_method": "fp8", "weight_block_size": side} for side in (3, "x", [0, 128])]
    for change in (
        {"dtype": [1]}, {"kv_lora_rank": 33}, {"hidden_size": 0}, {"architectures": ["None"]},
        *({"quantization_config": tile} for tile in tiles),
    ):  # fmt: skip
        with pytest.raises(CheckpointError):
            shape_demand(good | change, options(), tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path / "config.json")):
        shape_demand(good | {"architectures": None}, options(), tmp_path)
    (tmp_path / "config.json").write_text("[" * 5000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_shape(str(tmp_path))


BILLIONS = {
    "deepseek-v3": 671, "deepseek-v4-flash": 284, "llama-3.1-405b": 406, "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.0, "gemma-3-27b": 27.0, "mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235, "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-4-31b": 30.7,
    "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "llama-3.2-3b": 3.21, "phi-4": 14.7,
    "mistral-small-3.2-24b": 23.6, "qwen3-0.6b": 0.6, "qwen3-4b": 4.02, "qwen3-8b": 8.19,
    "qwen3-14b": 14.8, "qwen3-32b": 32.8, "qwen3.5-4b": 4.2, "qwen3.5-9b": 8.95,
    "qwen3.6-27b": 26.9,
    "glm-5.3-flash": 313.2,  # 320 with the layer that predicts several tokens
}  # fmt: skip
MORE_BILLIONS = {  # of thousands of experts
    "gemma-4-26b-a4b": 25.2, "glm-4.5-air": 106.8, "minimax-m2": 228.7, "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-397b-a17b": 396, "qwen3.6-35b-a3b": 34.7,
}  # fmt: skip


@pytest.mark.parametrize(
    "billions", [BILLIONS, pytest.param(MORE_BILLIONS, marks=pytest.mark.whole)], ids=["", "more"]
)
def test_known_shapes_have_the_sizes_that_they_are_known_for(billions: dict[str, float]) -> None:
    assert {*BILLIONS, *MORE_BILLIONS} == set(shape_names())
    for name, expected in billions.items():
        found = shape_demand(read_shape(name), options())
        numbers = sum(block.numbers for block in found.blocks)
        # A table is looked up and not multiplied; a tied one is the head's.
        if not read_shape(name)["tie_word_embeddings"]:
            numbers += found.spec.vocab_size * found.spec.hidden_size
        assert numbers / 1e9 == pytest.approx(expected, rel=0.01), name
        if name == "deepseek-v3":
            assert len(found.of_kind(BlockKind.EXPERT)) == 58 * 256
            assert {block.encoding for block in found.blocks} == {"fp8", "bf16", ""}
    with pytest.raises(MissingFileError, match="mixtral-8x7b"):
        read_shape("no-such-model")


def test_sizes_of_the_list_of_models_are_those_of_their_shapes() -> None:
    known = {model.name: model for model in known_models()}
    assert len(known) == len(known_models()) >= 25 and set(known) <= set(shape_names())
    for name in ("qwen3-0.6b", "gpt-oss-20b"):
        for kind, size in known[name].sizes.items():
            demand = shape_demand(read_shape(known[name].shape(kind)), options())
            assert demand.weight_bytes == size
    # As published: Q4_K_M of 14.3 GB (Mistral), 13.8 GB (gpt-oss).
    assert known["mistral-small-3.2-24b"].sizes["Q4_K_M"] == pytest.approx(14.3e9, rel=0.01)
    assert known["gpt-oss-20b"].sizes[""] == pytest.approx(13.8e9, rel=0.01)
    for model in known.values():
        sizes = list(model.sizes.values())
        assert sizes == sorted(sizes, reverse=True)
        assert model.largest_within(sizes[0]) == model.types[0]
        assert model.largest_within(sizes[0] - 1) == model.types[min(1, len(sizes) - 1)]
        assert model.largest_within(0) == model.types[-1]


def measured_machine(result: dict[str, Any]) -> Machine:
    """The described H200 with the rates that this run measured."""
    rates, known = result["rates"], read_machine("h200-16-cores")
    (gpu,) = known.devices
    encoding = rates["encoding"].split(":")[0]
    gpu = replace(
        gpu,
        link_rate=rates["link"],
        shared_link_rate=rates["shared_link"],
        shared_cpu_rate=rates["shared_cpu"],
        compute=replace(gpu.compute, read_rate=rates["device"]),
    )
    gemm = {**known.cpu.gemm, f"{encoding}@1": rates["cpu"]}
    return replace(known, devices=(gpu,), cpu=replace(known.cpu, gemm=gemm))


@pytest.mark.parametrize(
    ("file", "shape", "chunk"),
    [
        ("gpu-8b-16gib-h200", "llama-3.1-8b", None),
        ("gpu-70b-16gib-h200", "llama-3.1-70b", 2048),
        ("gpu-30b-moe-8gib-h200-beside-llama-cpp", "qwen3-30b-a3b", None),
    ],
)
def test_what_was_measured_on_a_gpu_is_predicted(file: str, shape: str, chunk: int | None) -> None:
    result = json.loads((RESULTS / f"{file}.json").read_text())
    machine = measured_machine(result)
    needs = demand(shape, result["quantization"])
    room = parse_bytes(result["results"][0]["gpu_memory"]) - DRIVER_BYTES
    asked = PlanOptions(110 << 30, 4096, chunk, device_bytes=room)
    costs = CostModel(workload_of(needs, solve(needs, asked, machine)), machine)
    for case in result["results"][0]["cases"]:
        if case["batch"] > 1:
            continue  # kernels for a few dozen tokens reach a third of what is assumed here
        if case["batch"]:
            rate = costs.predict(1, result["task"]["tokens"] // 2).tokens_per_s
        else:
            rate = 2048 / costs.predict(1, 2048, 2048).ttft_s
        assert rate == pytest.approx(case["tokens_per_s"], rel=0.25), case["name"]
