"""Checkpoints as quantisation packages write them, against these packages' own numbers.

checkpoints.safetensors.gz holds both: see record_checkpoints.py.  A case is a folder with the
tensors of one module; it is opened as a user's folder is.
"""

import gzip
import json
import random
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from default_part import rounds
from safetensors.torch import load_file, save_file

from hmt.base.errors import CheckpointError, HMTError
from hmt.contracts.checkpoint import Published
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.formats import open_checkpoint
from hmt.kernels import ops, reference
from hmt.quant import empty_weight
from hmt.quant.packed import view_weight
from hmt.quant.repacking import InPlaceImporter, open_importer

WEIGHT = "model.layers.0.mlp.up_proj.weight"
ROWS = 32
FILE = Path(__file__).with_name("checkpoints.safetensors.gz")
Tensors = dict[str, torch.Tensor]
INT4, INT8, ROW8 = Encoding.INT4_GROUP, Encoding.INT8_GROUP, Encoding.INT8_CHANNEL
FP8 = Encoding.FP8_BLOCK
ENCODINGS = {
    "auto-round-gptq": INT4,
    "auto-round-gptq-zeros": INT4,
    "auto-round-gptq-3": INT4,
    "auto-round-gptq-5-zeros": INT8,
    "auto-round-gptq-6-by-pattern": INT8,
    "auto-round-mixed": INT8,
    "auto-round-plain-zeros": INT4,
    "auto-round-awq": INT4,
    "auto-round-awq-zeros": INT4,
    "auto-round-unsaid": INT4,
    "auto-round-unsaid-zeros": INT4,
    "auto-round-unsaid-plain": INT4,
    "auto-round-mxfp4": Encoding.MXFP4,
    "auto-round-mxfp8": FP8,
    "hqq-8": INT8,
    "hqq-4": INT4,
    "hqq-4-as-floats": INT4,
    "hqq-4-rows": INT4,
    "hqq-3": INT4,
    "hqq-2": INT4,
    "hqq-1": INT4,
    "hqq-4-columns": Encoding.BF16,
    "hqq-8-columns": Encoding.F16,
    "torchao-int8": ROW8,
    "torchao-int8-dynamic": ROW8,
    "torchao-int8-group": INT8,
    "torchao-int8-tensor": ROW8,
    "torchao-intx-4": INT4,
    "torchao-intx-4-zeros": INT4,
    "torchao-intx-8-zeros": INT8,
    "torchao-int4": INT4,
    "torchao-float8": FP8,
    "torchao-nvfp4": Encoding.NVFP4,
    "torchao-mxfp8": FP8,
    "quanto-int8": ROW8,
    "quanto-int4": INT4,
    "quanto-int4-groups": INT4,
    "quanto-int4-zeros": INT4,
    "quanto-int2": INT4,
    "quanto-float8": FP8,
    "mxfp8": FP8,
    "mxfp8-modelopt": FP8,
    "mxfp8-sglang": FP8,
}


@cache
def recorded() -> dict[str, tuple[dict[str, Any], Tensors, torch.Tensor]]:
    """By case: what lies beside the tensors, the tensors, and the package's own numbers."""
    raw = gzip.decompress(FILE.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    cases: dict[str, Tensors] = {}
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        Path(file.name).write_bytes(raw)
        loaded = load_file(file.name)  # `load` of bytes knows no powers of two
    for name, tensor in loaded.items():
        case, _, end = name.partition("/")
        cases.setdefault(case, {})[end] = tensor
    about = json.loads(header["__metadata__"]["cases"])
    return {case: (about[case], tensors, tensors.pop("wanted")) for case, tensors in cases.items()}


def write(case: str, folder: Path) -> torch.Tensor:
    """The case as a checkpoint in `folder`; the numbers that its package makes of it."""
    about, tensors, wanted = recorded()[case]
    (folder / "config.json").write_text(json.dumps(about["config"]))
    for name, content in about["files"].items():
        (folder / name).write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", metadata=about["metadata"] or None)
    return wanted


def rows_of(form: Published, first: int, end: int) -> WeightTensor:
    """Rows [first, end) as the engine reads and unpacks them: parts of rows by their rows."""
    parts = {}
    for name, part in form.parts.items():
        begin, size = part.file.offset, part.file.nbytes
        if part.row_bytes:
            begin += first // part.row_step * part.row_bytes
            size = -(-(end - first) // part.row_step) * part.row_bytes
        content = b"\0" + part.file.path.read_bytes()[begin : begin + size]
        parts[name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)[1:]
    importer, shape = open_importer(form.form), (end - first, *form.shape[1:])
    if isinstance(importer, InPlaceImporter):
        own = [parts[one.name].clone() for one in importer.format(shape).components(shape)]
        return view_weight(importer.format(shape), shape, *own)
    target = empty_weight(importer.format(shape), shape)
    importer.unpack(parts, target, first)
    return target


def numbers(w: WeightTensor) -> torch.Tensor:
    """In f32; reference and compiled kernels agree."""
    exact = reference.dequantize(w, torch.float32)
    assert torch.equal(ops.dequantize(w, torch.float32), exact)
    return exact


def test_every_case_is_expected() -> None:
    assert recorded().keys() == ENCODINGS.keys()


@pytest.mark.parametrize("case", ENCODINGS)
def test_numbers_are_the_packages_own(case: str, tmp_path: Path) -> None:
    wanted = write(case, tmp_path).float()
    checkpoint = open_checkpoint(tmp_path)
    form = checkpoint.forms[WEIGHT]
    assert isinstance(form, Published) and form.shape in (wanted.shape, (wanted.numel(),))
    used = {part.tensor for part in form.parts.values()} | checkpoint.spare
    assert used >= checkpoint.records.keys()
    form = replace(form, shape=tuple(wanted.shape))
    rows = len(wanted)
    w = rows_of(form, 0, rows)
    assert w.encoding is ENCODINGS[case]
    assert torch.equal(numbers(w), wanted)
    for first, end in ((16, rows), (3, 20)):
        assert torch.equal(numbers(rows_of(form, first, end)), wanted[first:end])


def changed(tensor: torch.Tensor, content: bytes) -> torch.Tensor:
    """The same dtype and shape with other content, or content in a vector."""
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(tensor.dtype)
    return flat.view(tensor.shape) if flat.numel() == tensor.numel() else flat


MODULE = WEIGHT.removesuffix(".weight")
ONE = (1).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("case", "tensor", "content", "words"),
    [
        ("hqq-4", "packing", b"4bit_i32", "packing '4bit_i32' for model.layers.0.mlp.up_proj"),
        ("hqq-4", "axis", 2 * ONE[:1] + bytes(2), "axis"),
        ("hqq-4", "group_size", (48).to_bytes(4, "little"), "group_size 48"),
        ("hqq-4", "channel_wise", b"\0", "one scale for all of model.layers.0.mlp.up_proj"),
        ("hqq-4", "shape", bytes(16), r"shape \[0, 0\]"),
        ("hqq-4", "shape", (32).to_bytes(8, "little") + (128).to_bytes(8, "little"), "W_q"),
        ("torchao-int4", "_weight_act_pre_scale", b"\0" * 4, "_weight_act_pre_scale"),
    ],
)
def test_what_is_not_read_is_named(
    case: str, tensor: str, content: bytes, words: str, tmp_path: Path
) -> None:
    about, tensors, _ = recorded()[case]
    name = f"{MODULE}.{tensor}"
    old = tensors.get(name, torch.zeros(len(content), dtype=torch.uint8))
    (tmp_path / "config.json").write_text(json.dumps(about["config"]))
    other = {**tensors, name: changed(old, content)}
    save_file(other, tmp_path / "model.safetensors", metadata=about["metadata"] or None)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_type": "Int4TilePackedTo4dTensor"}, "as Int4TilePackedTo4dTensor, .* reads Int8Tensor"),
        ({"_type": None}, "as None"),
        ({"_data": {"block_size": [2, 32]}}, r"block_size \[2, 32\]"),
        ({"_data": {"block_size": [1, 48]}}, r"block_size \[1, 48\]"),
        ({"_data": {}}, "block_size None"),
    ],
)
def test_classes_of_torchao_that_are_not_read(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    about, tensors, _ = recorded()["torchao-int4"]
    (tmp_path / "config.json").write_text(json.dumps(about["config"]))
    entry = json.loads(about["metadata"][WEIGHT]) | change
    save_file(tensors, tmp_path / "model.safetensors", metadata={WEIGHT: json.dumps(entry)})
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={WEIGHT: "{"})
    with pytest.raises(CheckpointError, match=r"does not say what .*up_proj.weight is"):
        open_checkpoint(tmp_path)


def test_float8_of_other_mantissas_is_refused(tmp_path: Path) -> None:
    _, tensors, _ = recorded()["quanto-float8"]
    (tmp_path / "config.json").write_text("{}")
    name = f"{WEIGHT}._data"
    other = tensors | {name: tensors[name].view(torch.float8_e5m2)}
    save_file(other, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight._data in F8_E5M2"):
        open_checkpoint(tmp_path)


def test_numbers_that_contradict_what_is_said_are_refused(tmp_path: Path) -> None:
    """Codes beyond their bits, and a zero point far behind others that are all 0."""
    about, tensors, _ = recorded()["torchao-intx-4"]
    (tmp_path / "config.json").write_text(json.dumps(about["config"]))
    name = f"{MODULE}._weight_qdata"
    wide = tensors[name].clone()
    wide[20, 3] = 8
    file = tmp_path / "model.safetensors"
    save_file(tensors | {name: wide}, file, metadata=about["metadata"])
    form = open_checkpoint(tmp_path).forms[WEIGHT]
    assert isinstance(form, Published)
    with pytest.raises(CheckpointError, match=r"codes outside \[-8, 7\]"):
        rows_of(form, 0, ROWS)
    name, rows = f"{MODULE}._weight_zero_point", 5000
    about, tensors, _ = recorded()["torchao-int8-group"]
    tall = {key: part.repeat(rows // len(part) * 8, 1) for key, part in tensors.items()}
    tall[name][-1, -1] = 1
    save_file(tall, file, metadata=about["metadata"])
    form = open_checkpoint(tmp_path).forms[WEIGHT]
    assert isinstance(form, Published)
    rows_of(form, 0, ROWS)
    with pytest.raises(CheckpointError, match="zero point of 129 where"):
        rows_of(form, form.shape[0] - 16, form.shape[0])


JUNK: list[Any] = [None, 0, -1, 3, 1 << 70, "x", [], [0], [1, 0], [1, 2.5], {}, {"a": 1}, True]


def test_nothing_but_our_errors(tmp_path: Path) -> None:
    """Tensors lost, and of other dtypes, shapes and content; metadata changed."""
    rng = random.Random(3)
    dtypes = (torch.uint8, torch.int8, torch.int32, torch.float16, torch.float32, torch.int64)
    for turn in range(rounds(1500)):
        case = rng.choice(list(ENCODINGS))
        about, tensors, wanted = recorded()[case]
        tensors, metadata = dict(tensors), dict(about["metadata"])
        name = rng.choice(list(tensors))
        lost = tensors.pop(name)
        if rng.random() < 0.8:
            shape = rng.choice([list(lost.shape), [], [1], [2, 2], [0, 4], [32, 64], [64, 1]])
            dtype = rng.choice([lost.dtype, *dtypes])
            size = torch.Size(shape).numel() * dtype.itemsize
            tensors[name] = (
                torch.frombuffer(bytearray(rng.randbytes(size) or b"\0" * 8), dtype=torch.uint8)[
                    :size
                ]
                .view(dtype)
                .view(shape)
            )
        if WEIGHT in metadata and rng.random() < 0.7:
            entry = json.loads(metadata[WEIGHT])
            place = rng.choice([entry, entry["_data"]])
            place[rng.choice(list(place))] = rng.choice(JUNK)
            metadata[WEIGHT] = json.dumps(entry)
        (tmp_path / "config.json").write_text(json.dumps(about["config"]))
        save_file(tensors, tmp_path / "model.safetensors", metadata=metadata or None)
        try:
            form = open_checkpoint(tmp_path).forms.get(WEIGHT)
            if isinstance(form, Published) and form.shape in (wanted.shape, (wanted.numel(),)):
                rows_of(replace(form, shape=tuple(wanted.shape)), 0, ROWS)
        except HMTError:
            pass
        except Exception as error:
            raise AssertionError(f"{turn}: {case} {name} {metadata}") from error
