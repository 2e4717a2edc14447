"""Which parameters of a model an adapter changes, and reading what it adds to them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

import torch

from hmt.base.errors import AdapterError, DiskReadError, NumericsError, ShapeError, os_reason
from hmt.contracts.adapter import LowRank
from hmt.contracts.blocks import BlockId, BlockKind, ParamSpec, Role
from hmt.contracts.checkpoint import TensorRecord
from hmt.contracts.model import ModelSpec
from hmt.formats.adapters import AdapterFile, AdapterMatrices
from hmt.quant.repacking.bits import DTYPES
from hmt.quant.repacking.row_order import turn_back

# What an adapter adds, by block and by the name of the parameter in it.
Parts = Mapping[BlockId, Mapping[str, LowRank]]

_ADAPTED: Final = (BlockKind.ATTENTION, BlockKind.FFN, BlockKind.ROUTER, BlockKind.EXPERT)
# Which attention does not multiply with, but takes apart: see layers/latent.
_TAKEN_APART: Final = ("kv_b_proj",)
_ROUTER: Final = "router"
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class BoundPart:
    """What is added to one parameter: rows of `up` that are its own, and all of `down`."""

    block: BlockId
    name: str
    matrices: AdapterMatrices

    @property
    def dtype(self) -> torch.dtype:
        """In which both matrices are kept: one that holds the numbers of either."""
        return torch.promote_types(DTYPES[self.matrices.down.dtype], DTYPES[self.matrices.up.dtype])


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """An adapter whose every matrix belongs to a parameter of the model.

    fingerprint   of its numbers and their places: alike for adapters that compute alike
    stamps        sizes and times of its files, by which it is known that they have not changed
    """

    file: AdapterFile
    parts: tuple[BoundPart, ...]
    fingerprint: str
    stamps: Mapping[Path, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Memory that it takes, and as much on each device that computes with it."""
        return sum(itemsize * numbers for numbers, itemsize in self._kept())

    @property
    def most_rank(self) -> int:
        """The largest of its ranks."""
        return max(part.matrices.rank for part in self.parts)

    def _kept(self) -> Iterator[tuple[int, int]]:
        """Numbers of each matrix, and bytes of one; parts of a fused layer share `down`."""
        seen = set()
        for part in self.parts:
            matrices, itemsize = part.matrices, part.dtype.itemsize
            yield matrices.up.shape[0] * matrices.rank, itemsize
            down = matrices.down
            if (down.name, down.offset) not in seen:
                seen.add((down.name, down.offset))
                yield prod(down.shape), itemsize

    def read(self) -> Parts:
        """Its numbers.

        Raises DiskReadError, AdapterError where a file is another than it was, and NumericsError
        where some numbers are not finite.
        """
        if _stamps(self.parts) != self.stamps:
            raise AdapterError(
                f"{self.file.path} has changed since it was loaded: unload the adapter, and load "
                "it again"
            )
        downs: dict[tuple[str, int], torch.Tensor] = {}
        copies: dict[tuple[str, int], dict[torch.device, torch.Tensor]] = {}
        ups = _Ups()
        found: dict[BlockId, dict[str, LowRank]] = {}
        for part in self.parts:
            matrices = part.matrices
            place = matrices.down.name, matrices.down.offset
            if place not in downs:
                downs[place], copies[place] = _read(matrices.down).to(part.dtype), {}
            up = ups.of(matrices).to(part.dtype)
            if matrices.turned:
                up = turn_back(up, matrices.turned)
            added = LowRank(downs[place], up.T.contiguous(), matrices.scale, copies[place])
            found.setdefault(part.block, {})[part.name] = added
        return found


class _Ups:
    """Reads what outputs are made of; that of all experts once, while it is theirs that come."""

    def __init__(self) -> None:
        self._all: tuple[object, torch.Tensor] | None = None

    def of(self, matrices: AdapterMatrices) -> torch.Tensor:
        """[out, rank], as published."""
        if not matrices.experts:
            return _read(matrices.up)
        place = matrices.up.name, matrices.up.offset
        if self._all is None or self._all[0] != place:
            self._all = place, _read(matrices.up)
        numbers = self._all[1].view(matrices.up.shape[0], matrices.rank, matrices.experts)
        return numbers[:, :, matrices.expert]


def bind_adapter(spec: ModelSpec, file: AdapterFile) -> BoundAdapter:
    """Find what each matrix of `file` changes.  Reads all of it, for its fingerprint.

    Raises AdapterError where the model has no such layer or HMT does not adapt it, ShapeError where
    it has another size, DiskReadError.
    """
    layers = _Layers(spec)
    parts = [part for matrices in file.matrices for part in layers.parts(matrices, file)]
    places: set[tuple[BlockId, str]] = set()
    for part in parts:
        place = part.block, part.name
        if place in places:
            raise AdapterError(f"{file.path} changes {part.name} of {part.block} twice")
        places.add(place)
    stamps = _stamps(parts)
    return BoundAdapter(file, tuple(parts), _fingerprint(parts), stamps)


def is_adapted(block: BlockId, param: ParamSpec) -> bool:
    """Whether a parameter can have adapters."""
    is_matrix = param.role is not Role.TABLE and len(param.shape) == 2
    takes_some = is_matrix and block.kind in _ADAPTED and param.name != _ROUTER
    return takes_some and param.name not in _TAKEN_APART


class _Layers:
    """A model's linear layers by the names of checkpoints."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._by_name: dict[str, list[tuple[BlockId, ParamSpec]]] = {}
        for block in spec.blocks:
            for param in block.params:
                for source in param.sources:
                    if source.endswith(".weight"):
                        name = source.removesuffix(".weight")
                        self._by_name.setdefault(name, []).append((block.id, param))
        # Checkpoints of models that see begin their names in another way: "language_model.".
        self._by_tail = {_tail(name): name for name in self._by_name if _tail(name)}

    def parts(self, matrices: AdapterMatrices, file: AdapterFile) -> Iterator[BoundPart]:
        """What `matrices` change: one parameter, or several that are parts of one layer."""
        if matrices.experts:
            yield from self._of_experts(matrices, file)
            return
        name = matrices.module
        if name not in self._by_name:
            name = self._by_tail.get(_tail(name), name)
        found = self._by_name.get(name)
        if found is None:
            raise AdapterError(
                f"{file.path} changes {matrices.module}, which {self._spec.architecture} with "
                f"{self._spec.layers} layers has not"
                + (f": it was made for {file.base}" if file.base else "")
            )
        rows = max(param.rows[1] if param.rows else param.shape[0] for _, param in found)
        for block, param in found:
            self._check(block, param, matrices, rows, file)
            first, end = param.rows or (0, param.shape[0])
            if matrices.turned and (first % matrices.turned or end % matrices.turned):
                raise ShapeError(f"{file.path}: {matrices.up.name!r} does not hold whole heads")
            own = matrices.up.rows(first, end - first)
            yield BoundPart(block, param.name, replace(matrices, up=own))

    def _of_experts(self, matrices: AdapterMatrices, file: AdapterFile) -> Iterator[BoundPart]:
        """What a tensor of all experts changes, told by its sizes: gate and up, or down."""
        names = [(name,) for name in ("down_proj",)] + [("gate_proj", "up_proj")]
        sizes = matrices.up.shape[0], matrices.down.shape[1]
        for group in names:
            # One behind the other, so that what all experts share is read once for each parameter.
            first = 0
            bound = list[BoundPart]()
            for name in group:
                for expert in range(matrices.experts):
                    found = self._expert(f"{matrices.module}.{expert}.{name}")
                    if found is None or sizes != (
                        len(group) * found[1].shape[0],
                        found[1].shape[1],
                    ):
                        break
                    block, param = found
                    own = matrices.of_expert(expert, first, param.shape[0])
                    bound.append(BoundPart(block, param.name, own))
                first = sizes[0] // len(group)
            if len(bound) == len(group) * matrices.experts:
                yield from bound
                return
        raise ShapeError(
            f"{file.path} changes {matrices.module} as {matrices.experts} experts of {sizes[1]} "
            f"inputs and {sizes[0]} outputs, which {self._spec.architecture} has not in this model"
        )

    def _expert(self, name: str) -> tuple[BlockId, ParamSpec] | None:
        if name not in self._by_name:
            name = self._by_tail.get(_tail(name), name)
        found = self._by_name.get(name, [])
        return found[0] if len(found) == 1 and found[0][0].kind is BlockKind.EXPERT else None

    def _check(
        self,
        block: BlockId,
        param: ParamSpec,
        matrices: AdapterMatrices,
        rows: int,
        file: AdapterFile,
    ) -> None:
        at = f"{file.path} changes {matrices.module}"
        if param.name in _TAKEN_APART:
            raise AdapterError(
                f"{at}, which latent attention takes apart and multiplies with from both sides; "
                "HMT adapts its other projections alone"
            )
        if not is_adapted(block, param):
            raise AdapterError(
                f"{at}, the {block}; HMT adapts linear layers of attention, networks and experts "
                "alone: no embeddings, output layers, routers or norms"
            )
        out, inputs = matrices.up.shape[0], matrices.down.shape[1]
        if (out, inputs) != (rows, param.shape[1]):
            raise ShapeError(
                f"{at} as a layer of {inputs} inputs and {out} outputs; in this model it has "
                f"{param.shape[1]} and {rows}"
            )


def _tail(name: str) -> str:
    """What is behind the first "layers." of a name; "" where there is none, or not of text."""
    before, _, behind = name.partition("layers.")
    return "" if any(word in before for word in ("vis", "audio", "mtp")) else behind


def _stamps(parts: Iterable[BoundPart]) -> dict[Path, tuple[int, int]]:
    """Size and time of change of each file.  Raises DiskReadError."""
    files = {part.matrices.up.file for part in parts} | {part.matrices.down.file for part in parts}
    try:
        found = {file: file.stat() for file in files}
    except OSError as error:
        raise DiskReadError(f"an adapter's file cannot be read ({os_reason(error)})") from error
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in found.items()}


def _fingerprint(parts: list[BoundPart]) -> str:
    total = hashlib.blake2b(digest_size=16)
    read: set[tuple[str, int, int]] = set()
    for part in sorted(parts, key=lambda part: (str(part.block), part.name)):
        matrices = part.matrices
        said = (str(part.block), part.name, matrices.scale, matrices.turned, matrices.rank)
        total.update(repr(said).encode())
        if matrices.experts:
            total.update(repr((matrices.experts, matrices.expert)).encode())
        for record in (matrices.down, matrices.up):
            total.update(record.dtype.encode())
            place = record.name, record.offset, record.nbytes
            if place in read and matrices.experts:  # all experts', which was read for the first one
                continue
            read.add(place)
            _pieces(record, total.update)
    return total.hexdigest()


def _pieces(record: TensorRecord, take: Callable[[bytes], None]) -> None:
    """Read a tensor, and give its bytes to `take`, some at a time.  Raises DiskReadError."""
    left = record.nbytes
    try:
        with record.file.open("rb") as file:
            file.seek(record.offset)
            while left:
                piece = file.read(min(left, _READ_BYTES))
                if not piece:
                    raise DiskReadError(
                        f"{record.file} ends {left} bytes before the end of {record.name!r}: it "
                        "has changed"
                    )
                take(piece)
                left -= len(piece)
    except OSError as error:
        raise DiskReadError(f"{record.file} cannot be read ({os_reason(error)})") from error


def _read(record: TensorRecord) -> torch.Tensor:
    """A matrix as published."""
    raw = bytearray()
    _pieces(record, raw.extend)
    numbers = torch.frombuffer(raw, dtype=DTYPES[record.dtype]).view(record.shape)
    if not bool(torch.isfinite(numbers).all()):
        raise NumericsError(f"{record.file}: {record.name!r} holds numbers that are none")
    return numbers
