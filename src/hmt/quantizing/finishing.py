"""What a quantised model's folder has besides tensors, and how to see that its source changed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hmt.contracts.checkpoint import Checkpoint
from hmt.formats.checkpoint import INDEX
from hmt.formats.safetensors import read_header
from hmt.quantizing.folder import REPORT, PartialFolder
from hmt.quantizing.options import QuantizeOptions
from hmt.quantizing.units import LayerWork
from hmt.weights.checksum import as_text, checksum

FORMAT_VERSION: Final = 2  # of what is written; raised where equal options give other bytes
_CONFIG: Final = "config.json"
_SUFFIXES: Final = {".json", ".jinja", ".model", ".tiktoken", ".txt", ".md", ".py"}
_NAMES: Final = ("LICENSE", "NOTICE")
_LEFT: Final = {_CONFIG, INDEX, REPORT, "quality.json"}  # what they say is no longer so
_MAX_BYTES: Final = 100_000_000


def copied_files(checkpoint: Checkpoint) -> list[Path]:
    """Tokenizer, template, licence and the like."""
    return sorted(
        file
        for file in checkpoint.path.iterdir()
        if file.is_file()
        and file.name not in _LEFT
        and (file.suffix in _SUFFIXES or file.name.upper().startswith(_NAMES))
        and not file.name.startswith(".")
        and not file.name.endswith(".index.json")
        and file.stat().st_size <= _MAX_BYTES
    )


def identity(checkpoint: Checkpoint, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What the result depends on, besides options."""
    records = sorted((r.name, r.dtype, r.shape) for r in checkpoint.records.values())
    files = {record.file for record in checkpoint.records.values()} | set(copied_files(checkpoint))
    files.add(checkpoint.path / _CONFIG)
    stats = {file.name: file.stat() for file in sorted(files)}
    return {
        "format": FORMAT_VERSION,
        "model": checkpoint.path.resolve().name,
        "tensors": as_text(checksum(json.dumps(records).encode())),
        "tokens": as_text(checksum(json.dumps(sequences).encode())),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


def finish(
    folder: PartialFolder,
    checkpoint: Checkpoint,
    works: Sequence[LayerWork],
    section: Mapping[str, Any],
    changed: Mapping[str, Any],
    copied: Sequence[Path],
    options: QuantizeOptions,
    tokens: int,
) -> dict[str, Any]:
    """Write config.json, the index, the report, and copies; returns the report.

    changed   of config.json, besides its `quantization_config`
    """
    holders: dict[str, str] = {}
    total = 0
    for shard in sorted(folder.model.glob("model-*.safetensors")):
        for record in read_header(shard).values():
            holders[record.name] = shard.name
            total += record.nbytes
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(holders.items()))}
    folder.write_file(folder.model / INDEX, json.dumps(index, indent=1).encode())
    # As published: what HMT adds to a configuration that it has read is not there.
    config = json.loads((checkpoint.path / _CONFIG).read_bytes())
    config["quantization_config"] = dict(section)
    config |= changed
    if isinstance(config.get("text_config"), dict):  # where some have what was true before
        config["text_config"].pop("quantization_config", None)
    for file in copied:
        folder.write_file(folder.model / file.name, file.read_bytes())
    folder.write_file(folder.model / _CONFIG, json.dumps(config, indent=1).encode())
    report = _report(folder, works, options, tokens)
    folder.write_file(folder.model / REPORT, json.dumps(report, indent=1).encode())
    return report


def _report(
    folder: PartialFolder, works: Sequence[LayerWork], options: QuantizeOptions, tokens: int
) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    for file in sorted(folder.work.glob("report-*.json")):
        lines += json.loads(file.read_bytes())
    kept = {module: why for work in works for module, why in work.kept.items()}
    asked = dict(options.identity())
    del asked["host_memory_bytes"], asked["gpu_memory_bytes"]
    return {"options": asked, "calibration_tokens": tokens, "kept": kept, "weights": lines}
