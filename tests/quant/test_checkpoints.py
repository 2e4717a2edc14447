"""Checkpoints as quantisation packages write them, against these packages' own numbers.

checkpoints.safetensors.gz holds both: see record_checkpoints.py.  A case is a folder with the
tensors of one module; it is opened as a user's folder is.
"""

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from hmt.contracts.checkpoint import Published
from hmt.contracts.encoding import Encoding, WeightTensor
from hmt.formats import open_checkpoint
from hmt.kernels import ops, reference
from hmt.quant import empty_weight
from hmt.quant.importers import InPlaceImporter, open_importer
from hmt.quant.packed import view_weight

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
    "quanto-int8": ROW8,
    "quanto-int4": INT4,
    "quanto-int4-groups": INT4,
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
    for name, tensor in load(raw).items():
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
    w = rows_of(form, 0, ROWS)
    assert w.encoding is ENCODINGS[case]
    assert torch.equal(numbers(w), wanted)
    for first, end in ((16, 32), (3, 20)):
        assert torch.equal(numbers(rows_of(form, first, end)), wanted[first:end])
