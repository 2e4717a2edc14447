"""What a pack is made of: the checkpoint, and how to see that it has not changed meanwhile."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError
from hmt.contracts.blocks import BlockId
from hmt.contracts.checkpoint import Checkpoint
from hmt.contracts.encoding import PACKING_VERSION
from hmt.weights.checksum import as_text, checksum
from hmt.weights.layout import BlockLayout
from hmt.weights.pack.manifest import CONFIG, FORMAT_VERSION, MANIFEST, VOCABULARY

_MAX_COPY_BYTES: Final = 100_000_000
_COPIED_SUFFIXES: Final = {".json", ".jinja", ".model", ".tiktoken", ".txt", ".md"}
_COPIED_NAMES: Final = ("LICENSE", "NOTICE")


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint and what is to become of it.

    layouts           by `lay_out_pack`, in model order
    scheme            the quantisation, as users write it
    published_bytes   of the weights that are packed
    """

    checkpoint: Checkpoint
    layouts: Mapping[BlockId, BlockLayout]
    scheme: str
    architecture: str
    published_bytes: int

    @property
    def name(self) -> str:
        """Of the checkpoint's folder."""
        return self.checkpoint.path.resolve().name

    @property
    def headers(self) -> int:
        """Checksum of all tensors' names, dtypes and shapes."""
        records = sorted(self.checkpoint.records.values(), key=lambda record: record.name)
        facts = [(record.name, record.dtype, record.shape) for record in records]
        return checksum(json.dumps(facts).encode())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """In which the checkpoint was published, sorted."""
        return tuple(sorted({record.dtype for record in self.checkpoint.records.values()}))

    def copied_files(self) -> list[Path]:
        """Files that are copied into the pack: configuration, tokenizer, template, licence.

        None of a GGUF file, which lies beside what may belong to others: see `said_files`.
        """
        if self.checkpoint.vocabulary is not None:
            return []
        return sorted(
            file
            for file in self.checkpoint.path.iterdir()
            if file.is_file() and _is_copied(file) and file.stat().st_size <= _MAX_COPY_BYTES
        )

    def said_files(self) -> dict[str, bytes]:
        """Files written from what a GGUF file says, by name; none for other checkpoints."""
        if self.checkpoint.vocabulary is None:
            return {}
        said = {CONFIG: self.checkpoint.config, VOCABULARY: self.checkpoint.vocabulary}
        return {name: json.dumps(content).encode() for name, content in said.items()}

    def identity(self) -> dict[str, Any]:
        """All that two runs must share for one to go on with what the other has written."""
        records = self.checkpoint.records.values()
        places = sorted((r.name, r.file.name, r.offset, r.nbytes) for r in records)
        files = {record.file for record in records}.union(self.copied_files())
        stats = {file.name: file.stat() for file in sorted(files)}
        return {
            "format": FORMAT_VERSION,
            "packing": PACKING_VERSION,
            "scheme": self.scheme,
            "name": self.name,
            "headers": as_text(self.headers),
            "places": as_text(checksum(json.dumps(places).encode())),
            "slots": as_text(checksum(repr(_slots(self.layouts)).encode())),
            "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        }


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], remedy: str) -> None:
    """Raise CheckpointError where two identities differ, saying how, and `remedy`."""
    if before == now:
        return
    raise CheckpointError(f"{_difference(before, now)}: {remedy}")


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    known, files = before.get("files", {}), now["files"]
    changed = sorted(name for name in {*known, *files} if known.get(name) != files.get(name))
    for what in ("name", "scheme"):
        if before.get(what) != now[what]:
            return f"the conversion was begun for {before.get(what)}, not for {now[what]}"
    if changed:
        name = changed[0]
        return (
            f"{len(changed)} files of {now['name']} changed since the conversion began, first"
            f" {name} ({_described(known.get(name))}, now {_described(files.get(name))})"
        )
    return "the conversion was begun by another version of HMT"


def _described(file: list[int] | None) -> str:
    return "absent" if file is None else f"{file[0]} bytes of {file[1]} ns"


def _is_copied(file: Path) -> bool:
    if file.name == MANIFEST or file.name.startswith(".") or file.name.endswith(".index.json"):
        return False
    return file.suffix in _COPIED_SUFFIXES or file.name.upper().startswith(_COPIED_NAMES)


def _slots(layouts: Mapping[BlockId, BlockLayout]) -> list[object]:
    return [
        (str(layout.id), layout.slot_bytes, [(p.format, p.at) for p in layout.placed])
        for layout in layouts.values()
    ]
