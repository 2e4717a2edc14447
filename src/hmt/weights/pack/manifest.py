"""The manifest of a pack: what it holds and where, in JSON that guards itself.

The first line has the format, its version and the xxh3_64 of everything after that line, so that a
flipped byte anywhere is found before anything is believed.  docs/pack.md describes the fields.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch

from hmt.base.errors import (
    CheckpointError,
    DamagedPackError,
    MissingFileError,
    PackError,
    os_reason,
)
from hmt.contracts.blocks import BlockId, BlockKind
from hmt.contracts.encoding import PACKING_VERSION, Activations, Encoding
from hmt.quant import Format
from hmt.weights.checksum import as_text, checksum, from_text

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
CONFIG: Final = "config.json"
VOCABULARY: Final = "gguf_vocabulary.json"  # see Checkpoint.vocabulary

_HEAD: Final = re.compile(rb'\{"format":"hmt-pack","version":(\d{1,9}),"xxh3_64":"([0-9a-f]{16})",')
_AGAIN: Final = "convert the checkpoint again (`hmt convert`)"


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes of a data file; offset and length are multiples of 4 KiB.

    file   number of the data file
    seal   their xxh3_64
    """

    file: int
    offset: int
    nbytes: int
    seal: int


@dataclass(frozen=True, slots=True)
class PackedParam:
    """One parameter, how it was published, and how and where it lies in its block's extent.

    at   of each component; empty where other blocks hold the parameter (a tied embedding)
    """

    name: str
    source: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None
    published: Format
    format: Format
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """One block; `extent` is None where other blocks hold all of it."""

    id: BlockId
    extent: Extent | None
    params: tuple[PackedParam, ...]


@dataclass(frozen=True, slots=True)
class PackedSums:
    """Checksums of a table's rows, by runs of `run_rows`: see RowSums."""

    block: BlockId
    name: str
    run_rows: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A small file of the checkpoint (configuration, tokenizer, template), as it was there."""

    nbytes: int
    seal: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything there is to know about a pack.

    packing           PACKING_VERSION of the HMT that made it
    scheme            the quantisation, as users write it
    architecture      of the model
    name              of the checkpoint's folder
    headers           checksum of all tensors' names, dtypes and shapes
    dtypes            in which the checkpoint was published
    published_bytes   of its weights
    files             data files in order, with their bytes
    copies            the checkpoint's other files by name
    """

    packing: int
    scheme: str
    architecture: str
    name: str
    headers: int
    dtypes: tuple[str, ...]
    published_bytes: int
    files: Mapping[str, int]
    copies: Mapping[str, CopiedFile]
    blocks: tuple[PackedBlock, ...]
    sums: tuple[PackedSums, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(self.files.values())

    def extents(self) -> list[tuple[str, Extent]]:
        """Every extent and what it holds, in the order of the files."""
        found = [(str(block.id), block.extent) for block in self.blocks if block.extent is not None]
        found += [(f"checksums of {sums.block} {sums.name}", sums.extent) for sums in self.sums]
        return sorted(found, key=lambda entry: (entry[1].file, entry[1].offset))

    def file_name(self, extent: Extent) -> str:
        """The data file that holds `extent`."""
        return list(self.files)[extent.file]


def encode(manifest: Manifest) -> bytes:
    """The content of manifest.json; equal manifests give equal bytes."""
    # Thousands of experts share a handful of formats: these are listed once, and named by number.
    used = (f for b in manifest.blocks for p in b.params for f in (p.published, p.format))
    formats = {form: number for number, form in enumerate(dict.fromkeys(used))}
    content = {
        "packing": manifest.packing,
        "scheme": manifest.scheme,
        "architecture": manifest.architecture,
        "name": manifest.name,
        "headers": as_text(manifest.headers),
        "dtypes": manifest.dtypes,
        "published_bytes": manifest.published_bytes,
        "files": dict(manifest.files),
        "copies": {
            name: {"bytes": copy.nbytes, "xxh3_64": as_text(copy.seal)}
            for name, copy in manifest.copies.items()
        },
        "formats": [_format_json(form) for form in formats],
    }
    lines = [f"{_json(key)}:{_json(value)}," for key, value in content.items()]
    lines += [
        '"blocks":[',
        ",\n".join(_json(_block_json(b, formats)) for b in manifest.blocks),
        "],",
    ]
    lines += ['"sums":[', ",\n".join(_json(_sums_json(s)) for s in manifest.sums), "]}"]
    body = "\n".join(lines).encode() + b"\n"
    head = f'{{"format":"hmt-pack","version":{FORMAT_VERSION},"xxh3_64":"{as_text(checksum(body))}"'
    return head.encode() + b",\n" + body


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the pack in `folder`.

    Raises MissingFileError without one, DamagedPackError where a byte of it has changed, PackError
    where another version of HMT made the pack.
    """
    file = folder / MANIFEST
    try:
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if not any(folder.glob("data-*.hmt")):
            raise MissingFileError(
                f"{folder} is no pack, a folder that `hmt convert MODEL PACK` makes: name one, or "
                "make one of it"
            ) from None
        raise MissingFileError(
            f"{file} is missing: the pack is unfinished or was copied in part; {_AGAIN}"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({os_reason(error)}): check its permissions and the disk"
        ) from error
    return decode(raw, file)


def decode(raw: bytes, file: Path) -> Manifest:
    """The manifest that `encode` made `raw` of; `file` is for messages.  Errors: read_manifest."""
    line, _, body = raw.partition(b"\n")
    head = _HEAD.fullmatch(line)
    if head is None:
        raise DamagedPackError(f"{file}: its first line is not that of a pack; {_AGAIN}")
    if int(head[1]) != FORMAT_VERSION:
        raise PackError(
            f"{file}: the pack has format version {int(head[1])}, and this HMT reads "
            f"{FORMAT_VERSION}: use the HMT that made it, or {_AGAIN}"
        )
    if as_text(checksum(body)).encode() != head[2]:
        raise DamagedPackError(
            f"{file}: its {len(body)} bytes from offset {len(line) + 1} on are not those that were "
            f"written; {_AGAIN}"
        )
    try:
        manifest = _manifest(json.loads(raw))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise PackError(f"{file} cannot be understood ({error!r}); {_AGAIN}") from error
    if manifest.packing != PACKING_VERSION:
        raise PackError(
            f"{file}: weights are packed for kernels of version {manifest.packing}, and this HMT "
            f"has version {PACKING_VERSION}; {_AGAIN}"
        )
    return manifest


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _block_json(block: PackedBlock, formats: Mapping[Format, int]) -> dict[str, Any]:
    return {
        "id": _id_json(block.id),
        "extent": None if block.extent is None else _extent_json(block.extent),
        "params": [
            {
                "name": param.name,
                "source": param.source,
                "shape": param.shape,
                "rows": param.rows,
                "published": formats[param.published],
                "format": formats[param.format],
                "at": param.at,
            }
            for param in block.params
        ],
    }


def _sums_json(sums: PackedSums) -> dict[str, Any]:
    return {
        "block": _id_json(sums.block),
        "name": sums.name,
        "run_rows": sums.run_rows,
        "extent": _extent_json(sums.extent),
    }


def _id_json(block: BlockId) -> list[Any]:
    return [block.layer, block.kind.value, block.index]


def _extent_json(extent: Extent) -> list[Any]:
    return [extent.file, extent.offset, extent.nbytes, as_text(extent.seal)]


def _format_json(form: Format) -> dict[str, Any]:
    """What differs from a plain Format; activations change no byte and are left out."""
    plain = Format(form.encoding)
    entries: dict[str, Any] = {"encoding": form.encoding.value}
    for field in fields(Format):
        value = getattr(form, field.name)
        if field.name != "activations" and value != getattr(plain, field.name):
            entries[field.name] = str(value) if isinstance(value, torch.dtype) else value
    return entries


def _manifest(content: dict[str, Any]) -> Manifest:
    formats = [_format(form) for form in content["formats"]]
    return Manifest(
        packing=int(content["packing"]),
        scheme=content["scheme"],
        architecture=content["architecture"],
        name=content["name"],
        headers=from_text(content["headers"]),
        dtypes=tuple(content["dtypes"]),
        published_bytes=int(content["published_bytes"]),
        files={_plain_name(name): int(size) for name, size in content["files"].items()},
        copies={
            _plain_name(name): CopiedFile(int(copy["bytes"]), from_text(copy["xxh3_64"]))
            for name, copy in content["copies"].items()
        },
        blocks=tuple(_block(block, formats) for block in content["blocks"]),
        sums=tuple(
            PackedSums(_id(s["block"]), s["name"], int(s["run_rows"]), _extent(s["extent"]))
            for s in content["sums"]
        ),
    )


def _plain_name(name: str) -> str:
    if not name or name == ".." or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file in the pack")
    return name


def _block(content: dict[str, Any], formats: list[Format]) -> PackedBlock:
    extent = content["extent"]
    return PackedBlock(
        _id(content["id"]),
        None if extent is None else _extent(extent),
        tuple(
            PackedParam(
                name=param["name"],
                source=param["source"],
                shape=tuple(param["shape"]),
                rows=None if param["rows"] is None else (param["rows"][0], param["rows"][1]),
                published=formats[param["published"]],
                format=formats[param["format"]],
                at=tuple(param["at"]),
            )
            for param in content["params"]
        ),
    )


def _id(content: list[Any]) -> BlockId:
    layer, kind, index = content
    return BlockId(layer, BlockKind(kind), index)


def _extent(content: list[Any]) -> Extent:
    file, offset, nbytes, seal = content
    return Extent(file, offset, nbytes, from_text(seal))


def _format(content: dict[str, Any]) -> Format:
    values = dict(content)
    values["encoding"] = Encoding(values["encoding"])
    if "tile" in values:
        values["tile"] = tuple(values["tile"])
    if "scale_dtype" in values:
        values["scale_dtype"] = getattr(torch, values["scale_dtype"].removeprefix("torch."))
    return Format(activations=Activations.FLOAT, **values)
