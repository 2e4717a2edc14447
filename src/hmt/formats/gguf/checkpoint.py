"""A GGUF file, or the files of a split one, as a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hmt.base.errors import CheckpointError, HeaderError, MissingFileError
from hmt.contracts.checkpoint import Checkpoint, TensorRecord
from hmt.formats.gguf.config import read_config
from hmt.formats.gguf.header import SPLIT, GgufHeader, read_gguf
from hmt.formats.gguf.names import forms_of, names_of, spare_of
from hmt.formats.gguf.projector_types import PROJECTORS
from hmt.formats.gguf.projectors import beside, config_with_encoder, is_mmproj

_FACTORS: Final = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_MOST_FACTORS: Final = 4096
_MOST_SPLITS: Final = 10_000
_TOLD_TOKENIZERS: Final = ("general.architecture", "general.name")  # on which spaces may depend


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a folder with some and no safetensors.

    A file is one by its name or its first bytes: Ollama's are named after their checksum.
    """
    if not path.is_dir():
        return path.suffix == ".gguf" or _begins_as_gguf(path)
    suffixes = {file.suffix for file in path.iterdir()}
    return ".gguf" in suffixes and ".safetensors" not in suffixes


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def open_gguf(path: Path, mmproj: Path | None = None) -> Checkpoint:
    """The checkpoint in a GGUF file, one of several split files, or a folder that holds them.

    mmproj   file with its encoder of images; None: mmproj*.gguf beside it, if one belongs to it
    Raises MissingFileError for a missing file, HeaderError for a damaged one, CheckpointError for
    what is not supported.
    """
    headers = [read_gguf(file) for file in _files(path)]
    first = headers[0]
    _check_splits(headers)
    records: dict[str, TensorRecord] = {}
    for header in headers:
        for name, record in header.records.items():
            if name in records:
                raise HeaderError(
                    f"tensor {name!r} is in {records[name].file} and in {header.path.name}: one of "
                    "the files belongs to another model"
                )
            records[name] = record
    if not records:
        raise CheckpointError(
            f"{first.path} holds {len(first.metadata)} entries of metadata and no tensor, as files "
            "of a vocabulary alone and the first of some split models do: download the model "
            "itself, or the other files under the names they were published with"
        )
    factors = _factors(records)
    architecture, config = read_config(first.metadata, records, factors, str(first.path))
    names = names_of(architecture, config)
    vocabulary = {
        key: value
        for key, value in first.metadata.items()
        if key.startswith("tokenizer.") or key in _TOLD_TOKENIZERS
    }
    checkpoint = Checkpoint(
        first.path,
        config,
        records,
        None,
        forms_of(records, names),
        vocabulary,
        spare=_in_config(config, factors, architecture.proportional) | spare_of(records, names),
    )
    return _with_encoder(checkpoint, first.metadata, mmproj)


def _with_encoder(
    checkpoint: Checkpoint, metadata: Mapping[str, Any], mmproj: Path | None
) -> Checkpoint:
    """The checkpoint with its encoder of images, or the reason why it has none."""
    if mmproj is not None:
        return _joined(checkpoint, metadata, read_gguf(mmproj))
    why = ""
    if _sees(metadata):
        why = (
            f"there is no mmproj*.gguf beside {checkpoint.path.name}, with its encoder of images, "
            "such as mmproj-F16.gguf: download it, or say where it is (--mmproj)"
        )
    for file in beside(checkpoint.path):
        try:
            return _joined(checkpoint, metadata, read_gguf(file))
        except CheckpointError as error:
            why = str(error)
    return replace(checkpoint, images_refused=why)


def _sees(metadata: Mapping[str, Any]) -> bool:
    """Whether a language model is one that is published with an encoder of images.

    By its architecture, or, where others have that too, by a token for images.
    """
    kinds = [p for p in PROJECTORS.values() if metadata["general.architecture"] in p.models]
    tokens = metadata.get("tokenizer.ggml.tokens")
    known = tokens if isinstance(tokens, list) else []
    return any(not p.also_blind or next(iter(p.tokens.values())) in known for p in kinds)


def _joined(checkpoint: Checkpoint, metadata: Mapping[str, Any], header: GgufHeader) -> Checkpoint:
    config, encoder = config_with_encoder(checkpoint.config, metadata, header)
    if twice := checkpoint.records.keys() & header.records.keys():
        raise HeaderError(f"tensor {min(twice)!r} is in {checkpoint.path} and in {header.path}")
    return replace(
        checkpoint,
        config=config,
        records={**checkpoint.records, **header.records},
        forms={**checkpoint.forms, **encoder.forms},
        processor=encoder.processor,
        mmproj=header.path,
        spare=checkpoint.spare | header.records.keys(),  # packs and drafts hold text alone
    )


def _in_config(
    config: Mapping[str, Any], factors: Mapping[str, list[float]], proportional: bool
) -> frozenset[str]:
    """Names of the small tensors whose numbers the configuration has.

    proportional   it has what rope_freqs tells, in other words
    """
    rope = config.get("rope_parameters", {})
    used = [value for value in rope.values() if isinstance(value, list)]
    return frozenset(
        f"{name}.weight" for name, numbers in factors.items() if proportional or numbers in used
    )


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(
            file for file in path.iterdir() if file.suffix == ".gguf" and not is_mmproj(file)
        )
        split = [file for file in found if SPLIT.fullmatch(file.name)]
        stems = {SPLIT.sub(r"\1", file.name) for file in split}
        if not found:
            raise MissingFileError(f"{path} holds encoders of images alone: download the model")
        if len(found) != 1 and (len(split) < len(found) or len(stems) != 1):
            shown = ", ".join(file.name for file in found[:4])
            raise CheckpointError(
                f"{path} holds {len(found)} GGUF files ({shown}{', ...' if found[4:] else ''}): "
                "give the one that is wanted, of split files any"
            )
        path = found[0]
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 0 < count <= _MOST_SPLITS:
        raise HeaderError(f"{path} is one of {count} files, by its name")
    files = [
        path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise MissingFileError(
            f"{path.parent} lacks {len(missing)} of the {count} files that {path.name} is one of, "
            f"first {missing[0]}: download them"
        )
    return files


def _check_splits(headers: list[GgufHeader]) -> None:
    """Raise HeaderError where files say that they belong to others than these."""
    for number, header in enumerate(headers):
        said = header.metadata.get("split.count", len(headers)) or 1
        at = header.metadata.get("split.no", number)
        if said != len(headers) or at != number:
            raise HeaderError(
                f"{header.path} is file {at} of {said} by its metadata, and file {number} of "
                f"{len(headers)} by its name: give the names back that the files came with"
            )
    stated = headers[0].metadata.get("split.tensors.count")
    held = sum(len(header.records) for header in headers)
    if stated is not None and stated != held:
        raise HeaderError(
            f"{headers[0].path} says that there are {stated} tensors, and its {len(headers)} files "
            f"hold {held}: download them again"
        )


def _factors(records: Mapping[str, TensorRecord]) -> dict[str, list[float]]:
    """Numbers of the small tensors that belong to the configuration."""
    found = {}
    for name in _FACTORS:
        record = records.get(f"{name}.weight")
        if record is None:
            continue
        if record.dtype != "F32" or len(record.shape) != 1 or record.shape[0] > _MOST_FACTORS:
            raise HeaderError(
                f"{record.file}: {name} is {record.dtype} {list(record.shape)}; wanted are at most "
                f"{_MOST_FACTORS} numbers in F32"
            )
        with record.file.open("rb") as file:
            file.seek(record.offset)
            numbers = np.frombuffer(file.read(record.nbytes), "<f4").tolist()
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise HeaderError(f"{record.file}: {name} holds numbers that are none: download it")
        found[name] = numbers
    return found
