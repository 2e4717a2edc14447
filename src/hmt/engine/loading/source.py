"""What a model is loaded from: a published checkpoint, or a pack that was made of one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import BlockId, BlockKind, ParamSpec
from hmt.contracts.checkpoint import Checkpoint
from hmt.contracts.encoding import Encoding, Packing
from hmt.contracts.model import ModelSpec
from hmt.contracts.sharding import RankShare
from hmt.formats import open_checkpoint
from hmt.models import with_architecture
from hmt.quant import Format, Scheme, Sensitive, parse_scheme, read_sensitive
from hmt.text import Tokenizer
from hmt.weights import (
    BlockLayout,
    bind,
    bind_share,
    cut_packed,
    lay_out,
    named,
    published_bytes,
    units_of,
    with_int8_activations,
)
from hmt.weights.layout import Target
from hmt.weights.pack import Pack, looks_like_pack, open_pack


@dataclass(frozen=True, slots=True)
class Weights:
    """A source's blocks, laid out for loading.

    published_bytes   of the checkpoint's weights
    headless          there is no output layer: see `hmt.weights.Named`
    """

    layouts: dict[BlockId, BlockLayout]
    published_bytes: int
    headless: bool = False


@dataclass(frozen=True, slots=True)
class Divided:
    """What is divided among ranks, and what one of them has of it."""

    whole: ModelSpec
    share: RankShare


@dataclass(frozen=True, slots=True)
class Source:
    """An opened folder; no weight has been read.  `pack` is None for a checkpoint."""

    checkpoint: Checkpoint
    dtypes: frozenset[str]
    pack: Pack | None = None

    @property
    def path(self) -> Path:
        """The folder."""
        return self.checkpoint.path

    @property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.json."""
        return self.checkpoint.config

    @property
    def published_bytes(self) -> int:
        """Of all tensors of the checkpoint, used or not; of a pack, those that it was made of."""
        if self.pack is not None:
            return self.pack.manifest.published_bytes
        return sum(record.nbytes for record in self.checkpoint.records.values())

    @property
    def tensors(self) -> Collection[str]:
        """Names of the checkpoint's tensors; of a pack, those of its vision tower."""
        if self.pack is None:
            return {*self.checkpoint.records, *self.checkpoint.forms}
        tower = (b for b in self.pack.manifest.blocks if b.id.kind is BlockKind.VISION)
        return frozenset(param.source for block in tower for param in block.params)

    def tokenizer(self) -> Tokenizer:
        """Of the model.  Raises CheckpointError."""
        if self.checkpoint.vocabulary is None:
            return Tokenizer.open(self.path)
        return Tokenizer.of_gguf(self.path, self.checkpoint.vocabulary)

    def weights(
        self,
        spec: ModelSpec,
        asked: Scheme | None,
        *,
        exact_activations: bool = False,
        divided: Divided | None = None,
    ) -> Weights:
        """The blocks of `spec` in the scheme that was asked for; None: as they are.

        divided   `spec` has a rank's share of this

        Weights that were published in 8 bits and fewer are multiplied with int8 activations, unless
        `exact_activations`, or the scheme says what they are multiplied with.
        Raises CheckpointError where the folder does not hold them, or names sensitive ones that are
        not there, and ConfigError where a pack holds another scheme.
        """
        every = spec if divided is None else divided.whole
        sensitive = sensitive_of(self.path, every)
        if self.pack is None:
            if divided is None:
                bound = bind(spec, self.checkpoint)
            else:
                bound = bind_share(every, spec, divided.share, self.checkpoint)
            layouts = lay_out(bound, target(asked or Scheme(), sensitive))
            headless = named(every, self.checkpoint).headless
            if (asked is None or asked.weights is None) and not exact_activations:
                layouts = with_int8_activations(layouts)
            return Weights(layouts, published_bytes(bound), headless)
        manifest, wanted = self.pack.manifest, self._packed_scheme(asked)
        own = target(wanted, sensitive)
        if divided is None:
            layouts = self.pack.layouts(spec, own)
        else:
            packed = self.pack.bound(every, own)
            layouts = lay_out(cut_packed(packed, every, spec, divided.share), _as_it_lies)
        if wanted.weights is None and not exact_activations:
            layouts = with_int8_activations(layouts)
        return Weights(layouts, manifest.published_bytes)

    def units(
        self, spec: ModelSpec, asked: Scheme | None
    ) -> dict[tuple[BlockKind, str], tuple[int, int]]:
        """What of the parameters of `spec` cannot be taken apart: see `units_of`.

        Raises as `weights`.
        """
        sensitive = sensitive_of(self.path, spec)
        if self.pack is None:
            wanted = target(asked or Scheme(), sensitive)
            return units_of(bind(spec, self.checkpoint), wanted)
        packed = self.pack.bound(spec, target(self._packed_scheme(asked), sensitive))
        return units_of(packed, _as_it_lies)

    def _packed_scheme(self, asked: Scheme | None) -> Scheme:
        """The scheme of a pack, multiplied with what was asked for."""
        assert self.pack is not None
        held = parse_scheme(self.pack.manifest.scheme)
        wanted = held if asked is None else asked
        if wanted.bytes_alike != held.bytes_alike:
            raise ConfigError(
                f"{self.path} is a pack of {held}, and {wanted} was asked for: leave --quant out, "
                f"or convert the checkpoint to {wanted} (`hmt convert`)"
            )
        return wanted


def _as_it_lies(param: ParamSpec, block: BlockId) -> Format | None:
    """A `Target` that converts nothing."""


def open_source(path: Path, mmproj: Path | None = None) -> Source:
    """The checkpoint or pack in folder `path`; see `open_checkpoint`.  Raises CheckpointError."""
    if looks_like_pack(path):
        if mmproj is not None:
            raise CheckpointError(f"mmproj={mmproj} is for GGUF files, and {path} is a pack")
        pack = open_pack(path)
        config = with_architecture(pack.config)
        checkpoint = Checkpoint(path, config, {}, vocabulary=pack.vocabulary)
        return Source(checkpoint, frozenset(pack.manifest.dtypes), pack)
    checkpoint = opened(path, mmproj)
    return Source(checkpoint, frozenset(record.dtype for record in checkpoint.records.values()))


def opened(path: Path, mmproj: Path | None = None) -> Checkpoint:
    """The checkpoint in `path`, whose configuration names an architecture if it tells its type."""
    checkpoint = open_checkpoint(path, mmproj)
    return replace(checkpoint, config=with_architecture(checkpoint.config))


def sensitive_of(path: Path, spec: ModelSpec) -> Sensitive:
    """Weights of the model in folder `path` that stay as published.  Raises CheckpointError."""
    sensitive = read_sensitive(path)
    sensitive.check(spec.blocks)
    return sensitive


def target(scheme: Scheme, sensitive: Sensitive | None = None) -> Target:
    """What `scheme` makes of each parameter that is not `sensitive`."""

    def wanted_format(param: ParamSpec, block: BlockId) -> Format | None:
        if sensitive is not None and sensitive.keeps(param, block):
            return None
        wanted = scheme.format_for(param)
        four_bits = wanted is not None and wanted.encoding.packing is Packing.PANELS
        if wanted is not None and block.kind is BlockKind.HEAD and four_bits:
            # The output layer loses most at 4 bits and is a small part of the bytes.
            return Format(Encoding.INT8_CHANNEL, activations=wanted.activations)
        return wanted

    return wanted_format
