"""Opening a Hugging Face checkpoint folder: its configuration and where every tensor lies."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError, HeaderError, MissingFileError, os_reason
from hmt.contracts.checkpoint import Checkpoint, TensorRecord
from hmt.formats.gguf import is_gguf, open_gguf
from hmt.formats.quantized import find_forms
from hmt.formats.safetensors import read_header

INDEX: Final = "model.safetensors.index.json"
MAX_JSON_BYTES: Final = 100_000_000  # the index of a 671B model takes 9 MB

_SHARD: Final = re.compile(r"(.+)-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")
_QUANTIZATION: Final = "hf_quant_config.json"  # of NVIDIA's ModelOpt
_WRITES: Final = "thinker."  # how names of the part that writes begin
_OTHER_FORMATS: Final = {
    ".bin": "PyTorch pickles",
    ".pt": "PyTorch pickles",
    ".pth": "PyTorch pickles",
}


def open_checkpoint(path: str | Path, mmproj: Path | None = None) -> Checkpoint:
    """The checkpoint in folder `path`, or the GGUF file there.

    Of a folder reads config.json and the header of every shard.

    mmproj   GGUF file with the encoder of images, for another GGUF file; None: one beside it

    Every `*.safetensors` file counts, whatever the index says; the index only decides which of
    two copies of a tensor is meant and reveals shards that are missing.  Raises MissingFileError
    for a missing folder, file or shard, HeaderError for a damaged one, and CheckpointError for a
    format or quantisation that is not supported.
    """
    folder = Path(path)
    if is_gguf(folder):
        return open_gguf(folder, mmproj)
    if mmproj is not None:
        raise CheckpointError(
            f"mmproj={mmproj} is for GGUF files, and {folder} has its encoder of images, if any, "
            "among its safetensors: leave it out"
        )
    if not folder.is_dir():
        found = "a file of another kind" if folder.exists() else "not there"
        raise MissingFileError(
            f"{folder} is {found}, and a model is a GGUF file or a folder: give the folder that "
            "holds config.json and the *.safetensors files (`hf download NAME --local-dir FOLDER`)"
        )
    config = _read_object(folder / "config.json")
    beside = folder / _QUANTIZATION
    hf_quant_config = _read_object(beside) if beside.exists() else None
    listed = _listed_shards(folder)
    present = sorted(file.name for file in folder.glob("*.safetensors"))
    if not present:
        raise _no_safetensors(folder)
    files = listed + _unlisted(listed, present)
    _check_shard_numbers(folder, files)
    records: dict[str, TensorRecord] = {}
    for number, file in enumerate(files):
        _add(records, read_header(folder / file), keep_known=0 < len(listed) <= number)
    if isinstance(config.get("thinker_config"), Mapping):
        records = _writing_part(records)
    quantized = find_forms(folder, config, hf_quant_config, records)
    tile, spare = _fp8_tile(quantized.config), frozenset(quantized.spare)
    return Checkpoint(folder, config, records, tile, quantized.forms, spare=spare)


def _writing_part(records: dict[str, TensorRecord]) -> dict[str, TensorRecord]:
    """Of a model that also speaks (Qwen2.5-Omni) the part that writes, by its own names."""
    own = {n.removeprefix(_WRITES): r for n, r in records.items() if n.startswith(_WRITES)}
    return {name: replace(record, name=name) for name, record in own.items()} or records


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`."""
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise HeaderError(
                f"{file} has {size} bytes, at most {MAX_JSON_BYTES} are read: download it again"
            )
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise MissingFileError(
            f"{file} is missing; the folder holds {_contents(file.parent)}: download it, "
            "or give the folder of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({os_reason(error)}): check its permissions and the disk"
        ) from error
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{file} is not valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise HeaderError(
            f"{file} holds a JSON {type(value).__name__} where an object is wanted: "
            "download it again"
        )
    return value


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more if names else "nothing"


def _no_safetensors(folder: Path) -> CheckpointError:
    others = Counter(
        _OTHER_FORMATS[file.suffix] for file in folder.iterdir() if file.suffix in _OTHER_FORMATS
    )
    if not others:
        return MissingFileError(
            f"{folder} holds no *.safetensors file, only {_contents(folder)}: download the weights"
        )
    kinds = " and ".join(f"{count} files of {kind}" for kind, count in others.items())
    return CheckpointError(
        f"{folder} holds {kinds}, and no *.safetensors or *.gguf file: download the safetensors "
        "version of this model, or convert it with transformers' save_pretrained"
    )


def _fp8_tile(section: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns per FP8 scale; None where no scales belong to blocks."""
    tile = section.get("weight_block_size")
    return (tile[0], tile[1]) if section.get("quant_method") == "fp8" and tile else None


def _listed_shards(folder: Path) -> list[str]:
    """Files that the index names, all of them present; none without an index."""
    index = folder / INDEX
    if not index.exists():
        return []
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or any(
        not isinstance(file, str) or Path(file).name != file for file in weight_map.values()
    ):
        raise HeaderError(
            f"{index} has no weight_map from tensors to file names: download it again, "
            "or delete it (HMT can do without)"
        )
    tensors = Counter(weight_map.values())
    missing = sorted(file for file in tensors if not (folder / file).is_file())
    if missing:
        raise MissingFileError(
            f"{folder} lacks {len(missing)} of the {len(tensors)} shards that its index names, "
            f"first {missing[0]} with {tensors[missing[0]]} of {len(weight_map)} tensors: "
            "download the missing shards, or delete the index where it is out of date"
        )
    return sorted(tensors)


def _check_shard_numbers(folder: Path, files: list[str]) -> None:
    """Complain about gaps in names such as model-00001-of-00003.safetensors."""
    sets: dict[tuple[str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(_SHARD.fullmatch, files)):
        sets[match[1], match[3]].add(int(match[2]))
    for (stem, total), numbers in sets.items():
        if len(numbers) < int(total):
            absent = [str(n) for n in range(1, int(total) + 1) if n not in numbers]
            raise MissingFileError(
                f"{folder} holds {len(numbers)} of {int(total)} shards {stem}-*-of-{total}"
                f".safetensors; missing are the numbers {', '.join(absent[:8])}"
                f"{' ...' if len(absent) > 8 else ''}: download them"
            )


def _unlisted(listed: list[str], present: list[str]) -> list[str]:
    """Files to read besides those that the index names.

    Mistral's repositories carry all weights a second time, under other names, in
    `consolidated*.safetensors`; those are read only where nothing else is there.
    """
    copies = {file for file in present if file.startswith("consolidated")}
    skipped = {*listed, *(copies if len(copies) < len(present) else ())}
    return [file for file in present if file not in skipped]


def _add(
    records: dict[str, TensorRecord], shard: dict[str, TensorRecord], *, keep_known: bool
) -> None:
    """Put a shard's tensors into `records`; one that is already there is kept, or refused."""
    for name, record in shard.items():
        known = records.setdefault(name, record)
        if known is not record and not keep_known:
            raise HeaderError(
                f"tensor {name!r} is in {known.file} and in {record.file.name}: one of the files "
                "belongs to another checkpoint; remove it"
            )
