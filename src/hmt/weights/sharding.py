"""A rank's parameters: which rows of a file, and which columns of its rows, it reads and keeps.

Rows are ranges of bytes, and no others are read.  Columns lie between those of other ranks in every
row, a few KiB apart: whole rows are read, and the others' columns do not come into the slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm, prod

from hmt.base.errors import ShapeError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.checkpoint import Checkpoint, FileRange, Published
from hmt.contracts.encoding import Encoding
from hmt.contracts.model import ModelSpec
from hmt.contracts.sharding import RankShare, Span
from hmt.quant import Format
from hmt.quant.repacking import ColumnSlice, column_unit
from hmt.weights.binding import BoundBlock, BoundParam, bind
from hmt.weights.layout import Target
from hmt.weights.naming import named

_EVERYTHING = ("",)  # a regex that any name matches: what other ranks read is no surprise


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows (axis 0) or columns (axis 1) [first, end) of a parameter."""

    axis: int
    first: int
    end: int


def cut_of(whole: ParamSpec, own: ParamSpec, block: BlockId, share: RankShare) -> Cut | None:
    """What a rank has of a parameter; None: all of it.

    whole, own   as the model declares it alone, and as the rank's does
    """
    sizes = zip(whole.shape, own.shape, strict=True)
    axes = [axis for axis, (all_of_it, mine) in enumerate(sizes) if all_of_it != mine]
    if not axes:
        return None
    (axis,) = axes
    span = _span(own.name, block.kind, share)
    each, rest = divmod(whole.shape[axis], span.of)
    if rest or span.count * each != own.shape[axis]:
        raise AssertionError(f"{own.name} of {block}: {whole.shape} is not cut to {own.shape}")
    return Cut(axis, span.first * each, span.end * each)


def _span(name: str, kind: BlockKind, share: RankShare) -> Span:
    """By which of a rank's shares a parameter is cut."""
    span = share.width
    if kind is BlockKind.ATTENTION:
        span = share.kv_heads if name.startswith(("k_proj", "v_proj")) else share.heads
    assert span is not None
    return span


def units_of(
    blocks: Mapping[BlockId, BoundBlock], target: Target
) -> dict[tuple[BlockKind, str], tuple[int, int]]:
    """By kind of block and name: (rows, columns) of its parameters that cannot be taken apart.

    `target` is as in `lay_out`: what is quantised on load has groups, too.
    """
    units: dict[tuple[BlockKind, str], tuple[int, int]] = {}
    for block in blocks.values():
        for param in block.params:
            if param.spec.role is not Role.LINEAR or block.id.kind is BlockKind.EXPERT:
                continue
            forms = [param.format, target(param.spec, block.id) or param.format]
            rows, columns = units.get((block.id.kind, param.spec.name), (1, 1))
            for form in forms:
                columns = lcm(columns, column_unit(form, param.spec.shape[1]))
            rows = lcm(rows, _row_unit(param, param.format))
            units[block.id.kind, param.spec.name] = rows, columns
    return units


def _row_unit(param: BoundParam, form: Format) -> int:
    """Rows that cannot be taken apart: they share a scale, or are packed and lie interleaved."""
    if form.encoding is Encoding.FP8_BLOCK:
        return form.tile[0] if form.tile[0] < param.spec.shape[0] else 1
    return form.encoding.panel_rows if param.form is None else 1


def bind_share(
    whole: ModelSpec, own: ModelSpec, share: RankShare, checkpoint: Checkpoint
) -> dict[BlockId, BoundBlock]:
    """`bind` for what a rank has: the blocks of `own`, cut out of parameters of `whole`."""
    cuts: dict[tuple[BlockId, str], Cut] = {}
    wanted = []
    for mine, block in _both(whole, own):
        params = []
        for param, part in zip(block.params, mine.params, strict=True):
            cut = cut_of(param, part, block.id, share)
            if cut is not None and cut.axis == 0:
                first = 0 if param.rows is None else param.rows[0]
                params.append(replace(part, rows=(first + cut.first, first + cut.end)))
                continue
            params.append(param)
            if cut is not None:
                cuts[block.id, param.name] = cut
        wanted.append(BlockSpec(block.id, tuple(params)))
    spec = replace(whole, blocks=tuple(wanted), ignored=_EVERYTHING)
    bound = bind(spec, _with_rows(whole, named(whole, checkpoint).checkpoint))
    return {b: _with_columns(block, cuts) for b, block in bound.items()}


def _with_rows(whole: ModelSpec, checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` where forms that say how many numbers they have say in which rows, too."""
    forms = dict(checkpoint.forms)
    for param in (param for block in whole.blocks for param in block.params):
        found = forms.get(param.sources[0])
        if isinstance(found, Published) and found.shape == (prod(param.shape),):
            forms[param.sources[0]] = replace(found, shape=param.shape)
    return replace(checkpoint, forms=forms)


def cut_packed(
    blocks: Mapping[BlockId, BoundBlock], whole: ModelSpec, own: ModelSpec, share: RankShare
) -> dict[BlockId, BoundBlock]:
    """What a rank has of the blocks of a pack, whose parameters lie as they will in memory."""
    found: dict[BlockId, BoundBlock] = {}
    for mine, block in _both(whole, own):
        specs = {param.name: param for param in block.params}
        parts = {param.name: param for param in mine.params}
        cuts: dict[tuple[BlockId, str], Cut] = {}
        params = []
        for param in blocks[block.id].params:
            name = param.table or param.spec.name
            cut = cut_of(specs[name], parts[name], block.id, share)
            if cut is not None and cut.axis == 0:
                param = _packed_rows(param, cut)
            elif cut is not None:
                cuts[block.id, name] = cut
            params.append(param)
        found[block.id] = _with_columns(BoundBlock(block.id, tuple(params)), cuts)
    return found


def _both(whole: ModelSpec, own: ModelSpec) -> list[tuple[BlockSpec, BlockSpec]]:
    """Each block of a rank's model, and the same of the whole model."""
    by_id = {block.id: block for block in whole.blocks}
    return [(block, by_id[block.id]) for block in own.blocks]


def _packed_rows(param: BoundParam, cut: Cut) -> BoundParam:
    """Rows of a parameter in the form of a pack: ranges of each of its components."""
    rows = param.spec.shape[0]
    unit = _row_unit(param, param.format)
    if cut.first % unit or (cut.end % unit and cut.end != rows):
        raise ShapeError(
            f"rows {cut.first} to {cut.end} of {param.source} cut through what lies together in "
            f"the pack: {unit} rows"
        )
    parts = []
    for part, component in zip(param.parts, param.format.components(param.spec.shape), strict=True):
        lines = component.shape[0]
        height = -(-rows // lines)
        if component.name == "factor" or height == rows:  # for all rows at once
            parts.append(part)
            continue
        each = component.nbytes // lines
        first, end = cut.first // height, -(-cut.end // height)
        own = FileRange(part.file.path, part.file.offset + first * each, (end - first) * each)
        parts.append(replace(part, file=own))
    spec = replace(param.spec, shape=(cut.end - cut.first, *param.spec.shape[1:]), rows=None)
    form = param.format
    if form.tile[0] >= rows:
        form = replace(form, tile=(spec.shape[0], form.tile[1]))
    return replace(param, spec=spec, parts=tuple(parts), format=form)


def _with_columns(block: BoundBlock, cuts: Mapping[tuple[BlockId, str], Cut]) -> BoundBlock:
    params = (_columns(param, cuts.get((block.id, param.spec.name))) for param in block.params)
    return BoundBlock(block.id, tuple(params))


def _columns(param: BoundParam, cut: Cut | None) -> BoundParam:
    if cut is None:
        return param
    rows, columns = param.spec.shape
    by_rows = all(part.row_bytes * rows == part.file.nbytes for part in param.parts)
    form = ColumnSlice(param.form, param.format, cut.first, cut.end, columns, by_rows)
    spec = replace(param.spec, shape=(rows, cut.end - cut.first))
    return replace(param, spec=spec, form=form, format=form.format(spec.shape))
