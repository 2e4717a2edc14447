"""Quantised checkpoints are recognised by their configuration, or refused by module and field."""

import copy
import json
import random
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from publishers import PUBLISHERS

from hmt.base.errors import CheckpointError, HMTError
from hmt.contracts.checkpoint import Published, TensorRecord
from hmt.formats.quantized import find_forms
from hmt.quant.repacking import open_importer

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
MODULE = "model.layers.0.mlp.up_proj"
Records = dict[str, TensorRecord]
Cases = dict[str, tuple[dict[str, Any], Records]]


def records_of(
    tensors: dict[str, torch.Tensor], file: Path, about: dict[str, Any] | None
) -> Records:
    """Records of tensors by name, and a file that holds them behind its metadata."""
    header: dict[str, Any] = {"__metadata__": {f"{MODULE}.weight": json.dumps(about)}}
    start = json.dumps(header).encode()
    records, raw = {}, len(start).to_bytes(8, "little") + start
    for name, tensor in tensors.items():
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
        records[name] = TensorRecord(name, dtype, shape, file, len(raw), len(content))
        raw += content
    file.write_bytes(raw)
    return records


def found(config: dict[str, Any], records: Records) -> dict[str, Published]:
    section = {"quantization_config": config}
    forms = find_forms(Path("some/where"), section, None, records).forms
    for form in forms.values():
        shape = (96, 64) if form.shape == (96 * 64,) else form.shape
        if len(shape) == 2:  # or the file does not say, and the model's is another
            open_importer(form.form).format(shape)
    return forms


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory,
) -> Cases:
    """Every publisher's configuration, and the records of one weight [96, 64]."""
    tmp_path = tmp_path_factory.mktemp("published")
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=random) * 0.1
    cases = {}
    for name, publisher in PUBLISHERS.items():
        parts, _ = publisher.publish(weight)
        tensors = {f"{MODULE}.{end}": part for end, part in parts.items()}
        cases[name] = (
            copy.deepcopy(publisher.config),
            records_of(tensors, tmp_path / name, publisher.about),
        )
    return cases


def test_every_weight_is_found_and_no_tensor_is_left_over(published: Any) -> None:
    for name, (config, records) in published.items():
        result = find_forms(Path("x"), {"quantization_config": config}, None, records)
        [(weight, form)] = result.forms.items()
        assert weight == f"{MODULE}.weight" and form.shape in ((96, 64), (96 * 64,)), name
        used = {part.tensor for part in form.parts.values()} | result.spare
        assert used >= set(records), name


def test_modelopts_own_file(published: Any) -> None:
    config, records = published["modelopt-nvfp4"]
    theirs = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    forms = find_forms(Path("x"), {}, theirs, records).forms
    assert forms == found(config, records)


def test_a_checkpoint_without_quantisation_has_no_forms(published: Any) -> None:
    _, records = published["int8"]
    assert not find_forms(Path("x"), {}, None, records).forms


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("awq", {"version": "gemv"}, r"version 'gemv', which HMT does not read; it reads 'gemm'"),
        ("awq", {"bits": 3}, "bits 3"),
        ("awq", {"group_size": 48}, "up_proj.qweight"),
        ("awq", {"group_size": "x"}, "group_size 'x'"),
        ("gptq", {"bits": 5}, "bits 5 .* for model.layers.0.mlp.up_proj"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"group_size": 64}, r"up_proj.qzeros is I32 \[2, 12\]; .* I32 \[1, 12\]"),
        ("gptq", {"dynamic": {"+:.*up": {"bits": 6}}}, "bits 6"),
        ("pack", {"config_groups": {}}, "up_proj has quantised weights, and no config_groups"),
        ("pack", {"sparsity_config": {"format": "sparse-24"}}, "sparsity format 'sparse-24'"),
        ("float", {"config_groups": {"g": {"targets": ["Linear"]}}}, "strategy None for .*weight"),
        ("modelopt-nvfp4", {"quant_algo": "W4A16_AWQ"}, "quant_algo 'w4a16_awq'"),
        ("fp8-blocks", {"weight_block_size": [64, 64]}, r"weight_scale_inv is BF16 \[3, 2\]; .*"),
        ("fp8", {"quant_method": "quip"}, "quantised with 'quip', .*reads auto-round, awq, bits"),
        ("awq", {"quant_method": "auto-round", "packing_format": "mlx"}, "packing_format 'mlx'"),
        ("auto-round", {"rotation_config": {"hadamard_type": "hadamard"}}, "rotation_config"),
        ("auto-round", {"extra_config": {"layers": {"bits": 9}}}, "bits 9 for model.layers.0"),
        (
            "int8",
            {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
            "transform_config at location 'input'",
        ),
    ],
)
def test_what_is_not_read_is_named(
    name: str, changes: dict[str, Any], words: str, published: Any
) -> None:
    config, records = published[name]
    with pytest.raises(CheckpointError, match=f"^some/where.*{words}"):
        found(config | changes, records)


@pytest.mark.parametrize("name", PUBLISHERS)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(name: str, published: Any) -> None:
    config, records = published[name]
    [form] = found(config, records).values()
    for part in form.parts.values():
        record = records[part.tensor]
        others = (
            {key: one for key, one in records.items() if key != record.name},
            records | {record.name: with_shape(record, (*record.shape[:-1], 7))},
            records | {record.name: with_shape(record, (3, *record.shape))},
        )
        for broken in others:
            try:
                forms = found(config, broken)
            except CheckpointError as error:
                assert MODULE in str(error) and "some/where" in str(error)
            else:  # what the module is recognised by is not there, or its width is another
                assert not forms or [one.shape for one in forms.values()] != [(96, 64)]


def with_shape(record: TensorRecord, shape: tuple[int, ...]) -> TensorRecord:
    nbytes = record.nbytes // prod(record.shape) * prod(shape)
    return TensorRecord(record.name, record.dtype, shape, record.file, record.offset, nbytes)


SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
JUNK: list[Any] = [None, 0, -1, 3, 1 << 70, "x", "re:(", [], [0], {}, {"a": 1}, True, 1.5]


def test_nothing_but_our_errors(published: Any) -> None:
    """Fields changed, lost and added; tensors lost, and of other dtypes and shapes."""
    rng = random.Random(2)
    for turn in range(10000):
        name = rng.choice(list(published))
        config, records = copy.deepcopy(published[name][0]), dict(published[name][1])
        for _ in range(rng.randrange(3) if config else 0):
            place: Any = config
            while True:
                key = rng.choice(list(place))
                if not isinstance(place[key], dict) or not place[key] or rng.random() < 0.2:
                    break
                place = place[key]
            place[key] = rng.choice(JUNK)
        for _ in range(rng.randrange(2)):
            key = rng.choice(list(records))
            record = records.pop(key)
            if rng.random() < 0.7:
                shape = [rng.choice([0, 1, 2, 96, 64]) for _ in range(rng.randrange(5))]
                dtype = rng.choice(list(DTYPES.values()))
                nbytes = prod(shape) * SIZES[dtype]
                records[key] = TensorRecord(key, dtype, tuple(shape), record.file, 0, nbytes)
        try:
            found(config, records)
        except HMTError:
            pass
        except Exception as error:
            raise AssertionError(f"{turn}: {name} {json.dumps(config, default=str)}") from error
