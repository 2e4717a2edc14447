"""Binding: missing tensors, wrong shapes and dtypes, FP8 scales, and how layouts read files."""

from math import prod
from pathlib import Path

import pytest
import torch
from doubles import WIDTH, model_spec, open_store, write_checkpoint
from safetensors.torch import save_file

from hmt.base.errors import MissingFileError, ShapeError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.checkpoint import Checkpoint
from hmt.contracts.model import ModelSpec
from hmt.formats import open_checkpoint
from hmt.weights import bind, lay_out, published_bytes

BLOCK = BlockId(0, BlockKind.FFN)


def spec_of(*params: ParamSpec) -> ModelSpec:
    return ModelSpec("Test", 1, WIDTH, 8, 128, (BlockSpec(BLOCK, params),), (), 1)


def checkpoint_of(
    folder: Path, tensors: dict[str, torch.Tensor], tile: tuple[int, int] | None = None
) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    opened = open_checkpoint(folder)
    return Checkpoint(opened.path, opened.config, opened.records, tile)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["1.2.down"]

    write_checkpoint(tmp_path, change=drop)
    with pytest.raises(MissingFileError, match=r"layer 1 expert 2 needs tensor 1\.2\.down"):
        bind(model_spec(), open_checkpoint(tmp_path))


def test_a_shape_that_contradicts_the_config_is_named(tmp_path: Path) -> None:
    def stretch(tensors: dict[str, torch.Tensor]) -> None:
        tensors["0.q"] = torch.zeros(7, 5)

    write_checkpoint(tmp_path, change=stretch)
    with pytest.raises(ShapeError, match=r"0\.q has shape \[7, 5\], but config.json says"):
        bind(model_spec(), open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("role", "dtype"), [(Role.LINEAR, torch.int32), (Role.TABLE, torch.float8_e4m3fn)]
)
def test_a_dtype_that_cannot_be_is_named(tmp_path: Path, role: Role, dtype: torch.dtype) -> None:
    checkpoint = checkpoint_of(tmp_path, {"w": torch.ones(4, 4).to(dtype)}, (128, 128))
    with pytest.raises(ShapeError, match="w has dtype"):
        bind(spec_of(ParamSpec("w", (4, 4), ("w",), role)), checkpoint)


def test_the_first_source_that_exists_is_taken(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"b": torch.ones(2, 2), "c": torch.ones(2, 2)})
    bound = bind(spec_of(ParamSpec("w", (2, 2), ("a", "b", "c"))), checkpoint)
    assert bound[BLOCK].params[0].source == "b"


@pytest.mark.parametrize("shape", [(), (1,), (1, 4)], ids=str)
def test_one_number_and_one_row_are_bound(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As Apertus keeps beta of its activations: with no dimension at all."""
    checkpoint = checkpoint_of(tmp_path, {"w": torch.full(shape, 3.0)})
    [param] = bind(spec_of(ParamSpec("w", shape, ("w",), Role.VECTOR)), checkpoint)[BLOCK].params
    assert (param.source, param.data.nbytes) == ("w", 4 * prod(shape))


def fp8_tensors(rows: int, columns: int) -> dict[str, torch.Tensor]:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128))
    return {"w": weight, "w_scale_inv": scales}


def test_fp8_rows_take_their_scales_along(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, fp8_tensors(300, 200), (128, 128))
    param = ParamSpec("w", (172, 200), ("w",), rows=(128, 300))
    (bound,) = bind(spec_of(param), checkpoint)[BLOCK].params
    assert bound.data.nbytes == 172 * 200
    scales = bound.parts[1].file
    assert scales.nbytes == 2 * 2 * 4
    assert scales.offset == checkpoint.records["w_scale_inv"].offset + 2 * 4


@pytest.mark.parametrize("role", [Role.LINEAR, Role.VECTOR])
def test_fp8_without_its_scales_or_with_wrong_ones_is_refused(tmp_path: Path, role: Role) -> None:
    tensors = fp8_tensors(256, 256)
    param = ParamSpec("w", (256, 256), ("w",), role)
    with pytest.raises(MissingFileError, match="weight_block_size"):
        bind(spec_of(param), checkpoint_of(tmp_path, tensors))
    with pytest.raises(MissingFileError, match="w_scale_inv are not in"):
        bind(spec_of(param), checkpoint_of(tmp_path, {"w": tensors["w"]}, (128, 128)))
    tensors["w_scale_inv"] = torch.ones(3, 2)
    with pytest.raises(ShapeError, match=r"needs F32 \[2, 2\]"):
        bind(spec_of(param), checkpoint_of(tmp_path, tensors, (128, 128)))
    cut = ParamSpec("w", (100, 256), ("w",), rows=(100, 200))
    with pytest.raises(ShapeError, match="cut through an FP8 tile"):
        bind(spec_of(cut), checkpoint_of(tmp_path, fp8_tensors(256, 256), (128, 128)))


def test_neighbours_become_one_read_and_little_is_read_for_nothing(tmp_path: Path) -> None:
    tensors = {name: torch.ones(100, 128) for name in ("a", "b", "c")}
    checkpoint = checkpoint_of(tmp_path, tensors)
    spec = spec_of(*(ParamSpec(name, (100, 128), (name,)) for name in tensors))
    layout = lay_out(bind(spec, checkpoint), lambda param, kind: None)[BLOCK]
    assert len(layout.reads) == 1
    assert layout.read_bytes <= 3 * 100 * 128 * 4 + 2 * 4096
    assert layout.slot_bytes == layout.read_bytes


def test_numbers_at_odd_offsets_are_copied_into_place(tmp_path: Path) -> None:
    """A header of odd length is legal; torch cannot view bf16 there."""
    tensors = write_checkpoint(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = raw[8 : 8 + length].rstrip(b" ")
        header += b" " * ((length - len(header)) | 1)
        header += b" " * (1 - len(header) % 2)
        file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    bench = open_store(tmp_path, slots_bytes=1 << 18)
    for layer in range(3):
        with bench.store.lease(BlockId(layer, BlockKind.ATTENTION)) as views:
            assert torch.equal(views["q_proj"].data, tensors[f"{layer}.q"])
            assert torch.equal(views["norm"].data, tensors[f"{layer}.norm"])
    bench.close()


@pytest.mark.parametrize("tied", [True, False])
def test_published_bytes_count_every_tensor_once(tmp_path: Path, tied: bool) -> None:
    tensors = write_checkpoint(tmp_path, tied=tied)
    bound = bind(model_spec(tied), open_checkpoint(tmp_path))
    assert published_bytes(bound) == sum(tensor.nbytes for tensor in tensors.values())
