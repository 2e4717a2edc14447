"""What a model is loaded from: a published checkpoint, or a pack that was made of one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import BlockId, BlockKind, ParamSpec
from hmt.contracts.checkpoint import Checkpoint
from hmt.contracts.encoding import Encoding, Packing
from hmt.contracts.model import ModelSpec
from hmt.formats import open_checkpoint
from hmt.models import open_model, with_architecture
from hmt.quant import Format, Scheme, Sensitive, parse_scheme, read_sensitive
from hmt.text import Tokenizer
from hmt.weights import (
    BlockLayout,
    bind,
    lay_out,
    named,
    published_bytes,
    with_int8_activations,
)
from hmt.weights.layout import Target
from hmt.weights.pack import Pack, looks_like_pack, open_pack

_COPIED_NOT: Final = (BlockKind.EMBEDDING, BlockKind.VISION)  # tables are the model's own
_COPY_SLOTS: Final = 2  # some families lease two at a time


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
        self, spec: ModelSpec, asked: Scheme | None, *, exact_activations: bool = False
    ) -> Weights:
        """The blocks of `spec` in the scheme that was asked for; None: as they are.

        Weights that were published in 8 bits and fewer are multiplied with int8 activations, unless
        `exact_activations`, or the scheme says what they are multiplied with.
        Raises CheckpointError where the folder does not hold them, or names sensitive ones that are
        not there, and ConfigError where a pack holds another scheme.
        """
        if self.pack is None:
            bound = bind(spec, self.checkpoint)
            layouts = lay_out(bound, target(asked or Scheme(), sensitive_of(self.path, spec)))
            headless = named(spec, self.checkpoint).headless
            if (asked is None or asked.weights is None) and not exact_activations:
                layouts = with_int8_activations(layouts)
            return Weights(layouts, published_bytes(bound), headless)
        manifest = self.pack.manifest
        held = parse_scheme(manifest.scheme)
        wanted = held if asked is None else asked
        if wanted.bytes_alike != held.bytes_alike:
            raise ConfigError(
                f"{self.path} is a pack of {held}, and {wanted} was asked for: leave --quant out, "
                f"or convert the checkpoint to {wanted} (`hmt convert`)"
            )
        layouts = self.pack.layouts(spec, target(wanted, sensitive_of(self.path, spec)))
        if wanted.weights is None and not exact_activations:
            layouts = with_int8_activations(layouts)
        return Weights(layouts, manifest.published_bytes)


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


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks of another checkpoint of the same model, in higher precision.

    They are read from the disk when they are needed, and nothing of them stays.
    """

    path: Path
    layouts: Mapping[BlockId, BlockLayout]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of host memory by purpose."""
        sizes = sorted((layout.slot_bytes for layout in self.layouts.values()), reverse=True)
        staging = max(layout.staging_bytes for layout in self.layouts.values())
        return {"slots": sum(sizes[:_COPY_SLOTS]), "staging": staging, "rows": 0, "resident": 0}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(self.sizes.values())


def find_copies(path: Path, spec: ModelSpec, dtype: torch.dtype) -> Copies:
    """Blocks of the model `spec` in the checkpoint or pack `path`, as they are there.

    Raises ConfigError where it is another model, and CheckpointError.
    """
    source = open_source(path)
    model = open_model(source.config, source.path, dtype)
    if _shapes(model.spec) != _shapes(spec):
        raise ConfigError(
            f"fallback_model={path} is another model: its layers have other shapes than those of "
            "the model that was asked for; name the checkpoint that it was quantised from"
        )
    layouts = source.weights(model.spec, None, exact_activations=True).layouts
    return Copies(path, {b: one for b, one in layouts.items() if b.kind not in _COPIED_NOT})


def _shapes(spec: ModelSpec) -> dict[BlockId, list[tuple[str, tuple[int, ...]]]]:
    return {
        block.id: [(param.name, tuple(param.shape)) for param in block.params]
        for block in spec.blocks
        if block.id.kind not in _COPIED_NOT
    }
