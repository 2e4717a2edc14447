"""Codecs by name, and what they make of a layer's keys and values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hmt.base.errors import ConfigError
from hmt.contracts.kv import GROUP_PAGES
from hmt.contracts.model import PAGE_TOKENS, KVLayer
from hmt.kvcache.codecs.calibration import read_scales
from hmt.kvcache.codecs.integers import Int4, Int8PerChannel, Int8PerToken, Int8Static
from hmt.kvcache.codecs.interface import Codec
from hmt.kvcache.codecs.residual import Residual
from hmt.kvcache.codecs.sparse import Sparse24, Sparse24Int8

CODECS: dict[str, Callable[[int, int], Codec]] = {
    "int8": Int8PerToken,
    "int8-channel": Int8PerChannel,
    "int4": Int4,
    "sparse24": Sparse24,
    "sparse24-int8": Sparse24Int8,
}
STATIC = "int8-static"  # has scales from a file
LOW_SCORE = 0.3  # below which pages are of low attention
RESIDUALS: dict[str, Callable[[Codec], Codec]] = {
    "parts": Residual,
    "shared-parts": partial(Residual, pages=GROUP_PAGES),
}


@dataclass(frozen=True, slots=True)
class CodecName:
    """How keys and values are kept, as users write it: KEYS/VALUES+RESIDUAL@FILE.

    keys, values   in CODECS, or "int8-static"; "int8" stands for "int8/int8"
    residual       in RESIDUALS: of parts of rows with outliers, chosen in each page or in a group
                   of pages; empty: none
    file           with the scales of "int8-static": see Calibration; None: the engine's own
    """

    keys: str
    values: str
    residual: str = ""
    file: Path | None = None

    @property
    def lacks_file(self) -> bool:
        """Whether there are scales to be found in a file that is not named."""
        return self.file is None and STATIC in (self.keys, self.values)

    @staticmethod
    def parse(name: str) -> "CodecName":
        """Raises ConfigError for what is no name of a codec."""
        kinds, _, file = name.partition("@")
        kinds, _, residual = kinds.lower().partition("+")
        keys, _, values = kinds.partition("/")
        found = CodecName(keys, values or keys, residual, Path(file) if file else None)
        known = [*CODECS, STATIC]
        if found.keys not in known or found.values not in known:
            raise ConfigError(
                f"{name!r} is no way to keep keys and values: choose {', '.join(known)}, or two of "
                "them as in int8/sparse24, for keys and for values"
            )
        if residual not in ("", *RESIDUALS) or kinds.endswith("/") or name.endswith("+"):
            raise ConfigError(f"{name!r}: after + comes {' or '.join(RESIDUALS)}, as in int8+parts")
        if file and STATIC not in (keys, found.values):
            raise ConfigError(f"{name!r}: only {STATIC} takes a file with scales: {STATIC}@FILE")
        return found


@dataclass(frozen=True, slots=True)
class DiskCodecName:
    """How pages are kept on the disk, as users write it: USUAL~LOW@SCORE.

    usual   an encoding of pages, or a `CodecName`
    low     a `CodecName` of single pages, for those that tokens hardly attend to; None: none
    below   the score of A2CR that makes a page one of these: 1 is what a page has that gets its
            equal share of attention
    """

    usual: str
    low: str | None = None
    below: float = LOW_SCORE

    @staticmethod
    def parse(name: str) -> "DiskCodecName":
        """Raises ConfigError where there is a ~, and behind it no codec of single pages."""
        usual, tilde, rest = name.rpartition("~")
        if not tilde:
            return DiskCodecName(name)
        low, _, score = rest.partition("@")
        try:
            below = float(score or LOW_SCORE)
        except ValueError:
            below = 0.0
        chosen = CodecName.parse(low)
        shares = "shared-parts" in (chosen.residual, usual.partition("@")[0].partition("+")[2])
        if chosen.lacks_file or shares or not 0 < below <= 1:
            raise ConfigError(
                f"{name!r}: behind ~ comes how pages of little attention are kept, and the score "
                f"below which they are, above 0 and at most 1, as in exact~sparse24@{LOW_SCORE}; "
                f"{STATIC} and shared-parts cannot"
            )
        return DiskCodecName(usual, low.lower(), below)

    def __str__(self) -> str:
        return self.usual if self.low is None else f"{self.usual}~{self.low}@{self.below}"


class LayerCodec:
    """Pages of one layer: bytes of keys, then of values, for each unit of `pages`.

    values   None where the value of a token is the first `value_dim` numbers of its key
    """

    def __init__(self, keys: Codec, values: Codec | None, value_dim: int) -> None:
        assert values is None or values.pages == keys.pages
        self.keys = keys
        self.values = values
        self.pages = keys.pages
        self._value_dim = value_dim
        self.unit_bytes = keys.unit_bytes + (values.unit_bytes if values is not None else 0)

    @property
    def group_bytes(self) -> int:
        """Of `GROUP_PAGES`, which are whole units."""
        assert GROUP_PAGES % self.pages == 0
        return GROUP_PAGES // self.pages * self.unit_bytes

    def encode(self, key: Tensor, value: Tensor | None) -> Tensor:
        """Bytes uint8 [units, unit_bytes] of key and value [tokens, heads, dim] of whole pages.

        Pages that are missing in the last unit are filled with zeros.
        """
        encoded = self.keys.encode(self._filled(key))
        if self.values is None:
            return encoded
        assert value is not None
        return torch.cat((encoded, self.values.encode(self._filled(value))), dim=1)

    def decode(self, data: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Key and value [tokens of all units, heads, dim] in `dtype`."""
        key = self.keys.decode(data[:, : self.keys.unit_bytes], dtype)
        if self.values is None:
            return key, key[..., : self._value_dim]
        return key, self.values.decode(data[:, self.keys.unit_bytes :], dtype)

    def _filled(self, rows: Tensor) -> Tensor:
        missing = -len(rows) % (self.pages * PAGE_TOKENS)
        return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows


def layer_codecs(name: str, layers: Mapping[int, KVLayer]) -> dict[int, LayerCodec]:
    """The codec called `name` for each of `layers`, by index.  Raises ConfigError."""
    chosen = CodecName.parse(name)
    if chosen.lacks_file:
        raise ConfigError(f"{name!r}: {STATIC} needs a file with scales: {STATIC}@FILE")
    scales = {} if chosen.file is None else read_scales(chosen.file, layers)
    finish = RESIDUALS.get(chosen.residual, lambda codec: codec)

    def side(kind: str, heads: int, dim: int, scale: str) -> Codec:
        if kind == STATIC:
            return finish(Int8Static(heads, dim, scales[scale]))
        return finish(CODECS[kind](heads, dim))

    found = {}
    for index, layer in layers.items():
        keys = side(chosen.keys, layer.heads, layer.key_dim, f"{index}.key")
        values = None
        if layer.has_values:
            values = side(chosen.values, layer.heads, layer.value_dim, f"{index}.value")
        found[index] = LayerCodec(keys, values, layer.value_dim)
    return found
