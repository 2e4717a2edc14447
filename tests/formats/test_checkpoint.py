"""Checkpoint folders: complete ones open, incomplete ones say what is missing."""

import json
import random
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from default_part import rounds
from safetensors import safe_open
from safetensors.torch import save_file

from hmt.base.errors import CheckpointError, HeaderError, HMTError, MissingFileError
from hmt.contracts.checkpoint import Checkpoint
from hmt.formats import open_checkpoint

MINI_DENSE = Path(str(files("hmt") / "embedded" / "mini-dense"))
MINI_MOE = Path(__file__).parents[2] / "assets" / "mini-moe"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make(
    folder: Path,
    shards: dict[str, dict[str, int]],
    index: dict[str, str] | None = None,
    **config: Any,
) -> Path:
    """A checkpoint whose tensors are given as name -> number of float32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    for file, sizes in shards.items():
        save_file({name: torch.zeros(size) for name, size in sizes.items()}, folder / file)
    if index is not None:
        document = {"weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


def places(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: record.file.name for name, record in checkpoint.records.items()}


def test_the_embedded_model() -> None:
    checkpoint = open_checkpoint(str(MINI_DENSE))
    assert checkpoint.path == MINI_DENSE
    assert checkpoint.config["hidden_size"] == 256
    assert checkpoint.fp8_tile is None
    embedding = checkpoint.records["model.embed_tokens.weight"]
    assert (embedding.dtype, embedding.shape) == ("BF16", (4096, 256))


def test_a_sharded_fp8_model() -> None:
    checkpoint = open_checkpoint(MINI_MOE)
    assert checkpoint.fp8_tile == (128, 128)
    names = set()
    for shard in MINI_MOE.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as package:
            names.update(package.keys())
    assert set(checkpoint.records) == names
    assert {record.file.name for record in checkpoint.records.values()} == {FIRST, SECOND}


@pytest.mark.parametrize("index", [None, {}, {"a": FIRST}, {"a": SECOND, "b": FIRST, "x": FIRST}])
def test_every_shard_counts_whatever_the_index_says(
    tmp_path: Path, index: dict[str, str] | None
) -> None:
    folder = make(tmp_path, {FIRST: {"a": 2}, SECOND: {"b": 3}}, index)
    assert places(open_checkpoint(folder)) == {"a": FIRST, "b": SECOND}


def test_a_shard_that_the_index_names_and_is_not_there(tmp_path: Path) -> None:
    folder = make(tmp_path, {FIRST: {"a": 2}}, {"a": FIRST, "b": SECOND, "c": SECOND})
    with pytest.raises(MissingFileError, match=rf"1 of the 2 .*first {SECOND} with 2 of 3 tensors"):
        open_checkpoint(folder)


def test_a_shard_that_the_numbers_say_is_missing(tmp_path: Path) -> None:
    folder = make(tmp_path, {"model-00001-of-000003.safetensors": {"a": 1}})
    with pytest.raises(
        MissingFileError, match=r"1 of 3 shards model-\*-of-000003\.safe.* numbers 2, 3: download"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("index", [None, {"a": FIRST}, {"a": FIRST, "b": SECOND}])
def test_mistrals_second_copy_is_left_aside(tmp_path: Path, index: dict[str, str] | None) -> None:
    copy = {"consolidated-00001-of-00002.safetensors": {"layers.0.wq": 2, "a": 2}}
    folder = make(tmp_path, {FIRST: {"a": 2}, SECOND: {"b": 3}, **copy}, index)
    assert places(open_checkpoint(folder)) == {"a": FIRST, "b": SECOND}


def test_a_consolidated_file_alone_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path, {"consolidated.safetensors": {"layers.0.wq": 2}})
    assert list(open_checkpoint(folder).records) == ["layers.0.wq"]


def test_the_listed_copy_of_a_tensor_wins_and_others_add_to_it(tmp_path: Path) -> None:
    shards = {"extra.safetensors": {"a": 9, "mtp": 1}, "model.safetensors": {"a": 2}}
    checkpoint = open_checkpoint(make(tmp_path, shards, {"a": "model.safetensors"}))
    assert places(checkpoint) == {"a": "model.safetensors", "mtp": "extra.safetensors"}
    assert checkpoint.records["a"].shape == (2,)


@pytest.mark.parametrize("index", [None, {"a": FIRST, "b": SECOND}])
def test_a_tensor_in_two_shards(tmp_path: Path, index: dict[str, str] | None) -> None:
    folder = make(tmp_path, {FIRST: {"a": 2}, SECOND: {"a": 2, "b": 3}}, index)
    with pytest.raises(HeaderError, match=rf"'a' is in .*{FIRST} and in {SECOND}"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../x"}}'],
)
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    folder = make(tmp_path, {"model.safetensors": {"a": 2}})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(HeaderError, match=r"index\.json .*download it again"):
        open_checkpoint(folder)


def test_a_folder_that_does_not_exist_or_is_a_file(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="not there"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(MissingFileError, match="is a file of another kind"):
        open_checkpoint(tmp_path / "model.bin")


def test_a_folder_without_config_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"config\.json is missing.*holds nothing"):
        open_checkpoint(tmp_path)
    for number in range(10):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(MissingFileError, match=r"holds 0\.txt, .*7\.txt and 2 more"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x80", "[" * 100_000, "9" * 5000])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    folder = make(tmp_path, {"model.safetensors": {"a": 2}})
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(HeaderError, match=r"config\.json .*download it again"):
        open_checkpoint(folder)


def test_a_config_too_large_to_be_one(tmp_path: Path) -> None:
    folder = make(tmp_path, {"model.safetensors": {"a": 2}})
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(HeaderError, match="1099511627776 bytes"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "says"),
    [("model.pt", "1 files of PyTorch"), ("pytorch_model.bin", "PyTorch pickles")],
)
def test_other_formats_are_named(tmp_path: Path, file: str, says: str) -> None:
    folder = make(tmp_path, {})
    with pytest.raises(MissingFileError, match=r"no \*\.safetensors file, only config\.json"):
        open_checkpoint(folder)
    (folder / file).touch()
    with pytest.raises(CheckpointError, match=rf"{says}.*safetensors version"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        (
            {"quant_method": "vptq", "bits": 4},
            "'vptq'.*reads auto-round, awq, .*and FP32",
        ),
        ({"bits": 4}, "None"),
        ("awq", "quantised with .*'awq', which is no object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"\[128\], which.*\[128, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"\[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": [128.0, 128]}, r"\[128\.0, 128\]"),
    ],
)
def test_other_quantisations_are_named(tmp_path: Path, quantization: Any, says: str) -> None:
    folder = make(tmp_path, {"model.safetensors": {"a": 2}}, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=rf"{says}.*another version"):
        open_checkpoint(folder)


def test_a_multimodal_config_keeps_its_quantisation_inside(tmp_path: Path) -> None:
    inner = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}}
    folder = make(tmp_path, {"model.safetensors": {"a": 2}}, text_config=inner)
    assert open_checkpoint(folder).fp8_tile == (128, 64)


def test_no_quantisation(tmp_path: Path) -> None:
    folder = make(tmp_path, {"model.safetensors": {"a": 2}}, quantization_config=None)
    assert open_checkpoint(folder).fp8_tile is None


def test_damaged_folders_never_raise_anything_but_our_errors(tmp_path: Path) -> None:
    """Random bytes changed in config, index and shard headers; files removed and emptied."""
    rng = random.Random(3)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    shards = {FIRST: {"a": 2, "b": 3}, SECOND: {"c": 4}}
    opened, count = 0, rounds(1000)
    for number in range(count):
        folder = make(tmp_path / "x", shards, {"a": FIRST, "b": FIRST, "c": SECOND}, **config)
        for _ in range(rng.choice((1, 1, 3))):
            victim = rng.choice(sorted(folder.iterdir()))
            data = bytearray(victim.read_bytes())
            if data and number % 10:
                data[rng.randrange(len(data))] = rng.choice(b'{}[]",:0019a- \x00\xff')
                victim.write_bytes(bytes(data))
            elif number % 20 and len(shards) < len(list(folder.iterdir())):
                victim.unlink()
            else:
                victim.write_bytes(data[: rng.randrange(len(data) + 1)])
        try:
            open_checkpoint(folder)
            opened += 1
        except HMTError:
            pass
        shutil.rmtree(folder)
    assert count / 100 < opened < count * 0.9
