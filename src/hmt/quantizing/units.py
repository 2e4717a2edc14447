"""What is quantised of a checkpoint, layer by layer, and what is copied as it is."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, Role
from hmt.contracts.checkpoint import Checkpoint, TensorRecord
from hmt.contracts.model import ModelSpec
from hmt.quant import Sensitive
from hmt.quant.methods.interface import Target
from hmt.quantizing.experts import expert_module, expert_record
from hmt.quantizing.options import QuantizeOptions
from hmt.quantizing.structure import ParamId, leaders
from hmt.weights.binding import BoundBlock, BoundParam

_WEIGHT: Final = ".weight"
_SCALES: Final = "_scale_inv"  # of FP8 in tiles
_LAYER: Final = re.compile(r"model\.layers\.(\d+)")
_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Unit:
    """One linear layer as it is published, which may be several parameters of a block.

    module    its name in the checkpoint, without ".weight"
    shape     (outputs, inputs) of all of it
    places    its parameters, in the order of their rows
    input     where its input is recorded
    target    its form
    scales    dtype of scales of integers, as in safetensors: f32 for such numbers, else bf16
    """

    module: str
    shape: tuple[int, int]
    places: tuple[ParamId, ...]
    input: ParamId
    target: Target
    scales: str

    @property
    def numbers(self) -> int:
        """How many weights it has."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class LayerWork:
    """A layer, or with index TRUNK everything else.

    units    that are quantised, in the order of the layer's blocks
    copied   tensors that stay as they are
    kept     modules that could have been quantised, with the reason why not
    places   of copied tensors that are parameters: of which, in the order of their rows
    """

    index: int
    units: tuple[Unit, ...]
    copied: tuple[TensorRecord, ...]
    kept: Mapping[str, str]
    places: Mapping[str, tuple[ParamId, ...]]

    @property
    def ignored(self) -> list[str]:
        """Modules that may be linear layers to others, and stay as they are."""
        matrices = (r for r in self.copied if len(r.shape) == 2 and r.name.endswith(_WEIGHT))
        head = ["lm_head"] if self.index == TRUNK else []  # there is one where it is tied, too
        return sorted({*head, *(_module(record.name) for record in matrices)})


def plan_work(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    bound: Mapping[BlockId, BoundBlock],
    sensitive: Sensitive,
    options: QuantizeOptions,
    chosen: Mapping[str, Target | str],
    *,
    rotated: bool,
) -> list[LayerWork]:
    """Work by layer, in order, and that of the trunk last.

    chosen   forms of modules where they are not the options', or why a module stays
    rotated  hidden states are: see `_with_own_head`
    Raises CheckpointError where the checkpoint is quantised already in a way that is not read as
    numbers, and ConfigError where nothing would be quantised.
    """
    _check_source(checkpoint)
    blocks = {block.id: block for block in spec.blocks}
    taken: set[str] = set()
    works = []
    for index in range(spec.layers):
        mine = [block for block in bound.values() if block.id.layer == index]
        works.append(_layer(index, mine, blocks, checkpoint, sensitive, options, chosen, taken))
    rest = [record for name, record in checkpoint.records.items() if name not in taken]
    kept = {}
    places: dict[str, tuple[ParamId, ...]] = {}
    for block in bound.values():
        if block.id.layer == TRUNK:
            for param in block.params:
                place = ParamId(block.id, param.spec.name)
                places[param.source] = (*places.get(param.source, ()), place)
                if param.spec.role is Role.LINEAR:
                    kept[_module(param.source)] = "the output layer"
    trunk = LayerWork(TRUNK, (), tuple(_numbers(rest)), kept, places)
    works.append(_with_own_head(spec, trunk) if rotated else trunk)
    if not any(work.units for work in works):
        kept_by = "some --keep" if options.keep or not options.sensitivity else "--sensitivity"
        raise ConfigError(
            f"nothing of {checkpoint.path} would be quantised: every linear layer is kept; leave "
            f"{kept_by} out"
        )
    return works


def _check_source(checkpoint: Checkpoint) -> None:
    if checkpoint.vocabulary is not None:
        raise CheckpointError(
            f"{checkpoint.path} is a GGUF file: quantise the safetensors folder of this model"
        )
    config = checkpoint.config.get("quantization_config")
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method is not None and not (method == "fp8" and checkpoint.fp8_tile):
        raise CheckpointError(
            f"{checkpoint.path} is quantised already, as {method}: quantise the model as it was "
            "first published, in 16 bits or in FP8 tiles"
        )


def _layer(
    index: int,
    bound: Iterable[BoundBlock],
    specs: Mapping[BlockId, BlockSpec],
    checkpoint: Checkpoint,
    sensitive: Sensitive,
    options: QuantizeOptions,
    chosen: Mapping[str, Target | str],
    taken: set[str],
) -> LayerWork:
    units: list[Unit] = []
    kept: dict[str, str] = {}
    records: dict[str, TensorRecord] = {}
    places: dict[str, tuple[ParamId, ...]] = {}
    for block in bound:
        leading = leaders([param.name for param in specs[block.id].params])
        for params in _by_tensor(block):
            names = [name for param in params for name in param.tensors]
            own = {name: checkpoint.records[name] for name in names if name not in taken}
            found = _unit(block.id, params, leading, checkpoint, sensitive, options, chosen)
            if isinstance(found, Unit):
                units.append(found)
                taken.update(own)
                continue
            stack = checkpoint.records[params[0].tensors[0]]
            module = expert_module(block.id, params[0], stack)
            if module is not None:  # is written by itself, as all of its stack
                taken.add(stack.name)
                record = expert_record(module, block.id, params[0], stack)
                own = {record.name: record}
            if found:
                kept[module or _module(stack.name)] = found
            for name in own:
                places[name] = _places(block.id, params)
            records |= own
    taken.update(records)
    return LayerWork(index, tuple(units), tuple(_numbers(records.values())), kept, places)


def _with_own_head(spec: ModelSpec, trunk: LayerWork) -> LayerWork:
    """The trunk's work where hidden states are rotated.

    The last norm moves into the output layer, which then is another matrix than the embedding.
    Layers that predict further tokens have a norm of their own in front of it: they are left out.
    """
    embedding = ParamId(BlockId(TRUNK, BlockKind.EMBEDDING), "weight")
    copied, kept, places = [], dict(trunk.kept), dict(trunk.places)
    for record in trunk.copied:
        layer = _LAYER.match(record.name)
        if layer is not None and int(layer[1]) >= spec.layers:
            kept[layer[0]] = "left out: it shares the output layer, which a norm moved into"
            continue
        copied.append(record)
        own = places.get(record.name, ())
        if len(own) > 1 and embedding in own:
            copied.append(replace(record, name=_HEAD))
            places[record.name] = (embedding,)
            places[_HEAD] = tuple(place for place in own if place != embedding)
    return replace(trunk, copied=tuple(copied), kept=kept, places=places)


def _by_tensor(block: BoundBlock) -> list[list[BoundParam]]:
    """A block's parameters, those together that are rows of one tensor."""
    found: dict[str, list[BoundParam]] = {}
    for param in block.params:
        found.setdefault(param.source, []).append(param)
    return list(found.values())


def _unit(
    block: BlockId,
    params: list[BoundParam],
    leading: Mapping[str, str],
    checkpoint: Checkpoint,
    sensitive: Sensitive,
    options: QuantizeOptions,
    chosen: Mapping[str, Target | str],
) -> Unit | str:
    """What is quantised; else why a linear layer is not, or "" where it is none."""
    first = params[0]
    if any(param.spec.role is not Role.LINEAR for param in params):
        return ""
    record = checkpoint.records[first.tensors[0]]
    rows = sum(param.spec.shape[0] for param in params)
    columns = first.spec.shape[1]
    expert = expert_module(block, first, record)
    plain = record.shape == (rows, columns) and record.name.endswith(_WEIGHT)
    if expert is None and not plain:
        return "published in another form than one matrix"
    if any(sensitive.keeps(param.spec, block) for param in params):
        return "named in sensitive_layers.json"
    module = expert or _module(record.name)
    target = options.target_of(module, columns)
    if target is None:
        return "kept as asked" if columns % max(1, options.target.group_size) == 0 else "its width"
    form = chosen.get(module, target)
    if isinstance(form, str):
        return form
    places = _places(block, params)
    # Methods give scales that bf16 has; f16 has not all of them.
    scales = "F32" if record.dtype == "F32" else "BF16"
    leader = ParamId(block, leading[places[0].name])
    return Unit(module, (rows, columns), places, leader, form, scales)


def _places(block: BlockId, params: Iterable[BoundParam]) -> tuple[ParamId, ...]:
    ordered = sorted(params, key=lambda param: param.spec.rows or (0, 0))
    return tuple(ParamId(block, param.spec.name) for param in ordered)


def _module(tensor: str) -> str:
    return tensor.removesuffix(_WEIGHT)


def _numbers(records: Iterable[TensorRecord]) -> list[TensorRecord]:
    """Without scales of FP8, which is written in 16 bits."""
    return [record for record in records if not record.name.endswith(_SCALES)]
