"""Traces of experts: which ones the routers chose, step by step, in a file.

JSON lines, compressed with gzip where the name ends in .gz.  The first line is the header:

    {"format": "hmt-experts", "version": 1, "model": NAME, "experts": 128, "top_k": 8,
     "block_bytes": {"3": 2359296, ...}}

with an entry in `block_bytes` for each layer that has experts: the bytes of a read of one of them,
or a list of the bytes of each.  Then a line for each layer of each step, in the order of
computation:

    {"step": 0, "layer": 3, "experts": [[7, 90], ...], "scales": [[0.61, 0.39], ...]}

with a list per token, and where the engine guessed, "guess": [[7, 12], ...], what it foresaw.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import torch

from hmt.base.errors import ConfigError, os_reason
from hmt.base.locked_file import open_locked
from hmt.contracts.blocks import BlockId, BlockKind

_FORMAT, _VERSION = "hmt-experts", 1
# What reading and parsing raise when a file is not what it should be.
_DAMAGE = (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError)
_DIGITS = 2  # of scales: they rank experts, and nobody computes with them


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace was recorded from.

    block_bytes   bytes of a read of each expert, by layer: [experts]
    """

    model: str
    experts: int
    top_k: int
    block_bytes: Mapping[int, Sequence[int]]

    @property
    def layers(self) -> list[int]:
        """Layers that have experts, ascending."""
        return sorted(self.block_bytes)

    @property
    def total_bytes(self) -> int:
        """Of all experts."""
        return sum(map(sum, self.block_bytes.values()))

    def as_json(self) -> dict[str, Any]:
        """The first line of a file."""
        sizes = {
            str(layer): own[0] if len(set(own)) == 1 else list(own)
            for layer, own in self.block_bytes.items()
        }
        named = {"model": self.model, "experts": self.experts, "top_k": self.top_k}
        return {"format": _FORMAT, "version": _VERSION, **named, "block_bytes": sizes}

    def block_sizes(self) -> dict[BlockId, int]:
        """Bytes of a read of every expert."""
        return {
            BlockId(layer, BlockKind.EXPERT, expert): nbytes
            for layer, own in self.block_bytes.items()
            for expert, nbytes in enumerate(own)
        }


class Routed(NamedTuple):
    """What a layer's router chose in a step: one list per token.

    guess   experts that were predicted, the likeliest first; None without a prediction
    """

    step: int
    layer: int
    experts: list[list[int]]
    scales: list[list[float]]
    guess: list[list[int]] | None = None

    def blocks(self) -> list[BlockId]:
        """The chosen experts, each once, ascending."""
        chosen = sorted({expert for token in self.experts for expert in token})
        return [BlockId(self.layer, BlockKind.EXPERT, expert) for expert in chosen]


class TraceWriter:
    """Writes a trace.  A step ends when a layer comes again, or one before the last."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Replaces the file.  Raises ConfigError where it cannot, or another model writes it."""
        raw = open_locked(path, "the trace of experts")
        self._raw = raw
        packed = gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) if path.suffix == ".gz" else raw
        self._file = cast(Any, packed)
        self._step, self._layer = 0, -1
        self._write(header.as_json())

    def routed(
        self,
        layer: int,
        experts: torch.Tensor,
        scales: torch.Tensor,
        guess: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Add what a router chose: experts int64 [tokens, top_k], scales f32 [tokens, top_k]."""
        if layer <= self._layer:
            self._step += 1
        self._layer = layer
        line: dict[str, Any] = {"step": self._step, "layer": layer, "experts": experts.tolist()}
        line["scales"] = [[round(s, _DIGITS) for s in token] for token in scales.tolist()]
        if guess is not None:
            line["guess"] = [list(token) for token in guess]
        self._write(line)

    def close(self) -> None:
        """Finish the file.  Does nothing twice."""
        self._file.close()
        self._raw.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


class TraceFile:
    """A trace on disk; iterate to get its records, as often as wanted."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where it cannot be read or is none."""
        self.path = path
        with self._open() as file:
            try:
                data = json.loads(file.readline())
                if (data["format"], data["version"]) != (_FORMAT, _VERSION):
                    raise ValueError(f"format {data['format']} {data['version']}")
                count = data["experts"]
                sizes = {
                    int(layer): tuple(own) if isinstance(own, list) else (own,) * count
                    for layer, own in data["block_bytes"].items()
                }
                self.header = TraceHeader(data["model"], count, data["top_k"], sizes)
            except _DAMAGE as error:
                raise self._not_a_trace(1, error) from error

    def __iter__(self) -> Iterator[Routed]:
        """Raises ConfigError at a line that is damaged or names an expert that does not exist."""
        with self._open() as file:
            number = 1
            try:
                for number, line in enumerate(file, 1):
                    if number > 1:
                        yield self._record(json.loads(line))
            except _DAMAGE as error:
                raise self._not_a_trace(number, error) from error

    def _record(self, data: dict[str, Any]) -> Routed:
        experts, guess = data["experts"], data.get("guess")
        if data["layer"] not in self.header.block_bytes:
            raise ValueError(f"layer {data['layer']} is not in the header")
        for token in (*experts, *(guess or [])):
            if not all(0 <= expert < self.header.experts for expert in token):
                raise ValueError(f"experts {token} are not all in 0..{self.header.experts - 1}")
        return Routed(data["step"], data["layer"], experts, data["scales"], guess)

    def _open(self) -> TextIO:
        try:
            if self.path.suffix == ".gz":
                return cast(TextIO, gzip.open(self.path, "rt", encoding="utf-8"))
            return self.path.open(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the trace {self.path} cannot be read ({os_reason(error)})"
            ) from error

    def _not_a_trace(self, number: int, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.path} is not a trace of experts, as --expert-trace writes it: line {number}: "
            f"{error}"
        )
