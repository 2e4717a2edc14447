"""llama.cpp's names of tensors, and what Hugging Face's checkpoints call the same.

As llama.cpp's convert_hf_to_gguf.py writes them.  It changes some numbers, which is undone: see
Architecture.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, NamedTuple

from hmt.base.errors import AdapterError, CheckpointError, HeaderError
from hmt.contracts.checkpoint import (
    FileRange,
    Form,
    FormName,
    Joined,
    Published,
    PublishedPart,
    TensorRecord,
)
from hmt.contracts.encoding import BLOCK_SHAPES
from hmt.formats.gguf.architecture import LAYER, Architecture

FLOATS: Final = ("F32", "F16", "BF16")
CODES: Final = ("Q4_0", "Q4_1", *(encoding.name for encoding in BLOCK_SHAPES), "MXFP4")

# Tensors that say what the configuration says, or what is computed from it.
IGNORED: Final = re.compile(r"rope_freqs|rope_factors_(long|short)|blk\.\d+\.attn_rot_embd")
_SPLIT_KEYS: Final = re.compile(r"blk\.(\d+)\.attn_k_b\.weight")
# The number is an expert's, in files from before experts were stacked.
_IN_LAYER: Final = re.compile(
    r"blk\.(\d+)\.((?:shortconv|indexer|nextn)\.\w+|\w+?)(?:\.(\d+))?(?:\.(weight|bias|scale))?"
)
_FUSED: Final = "attn_qkv"
_FUSED_EXPERTS: Final = ("ffn_gate_exps", "ffn_up_exps")  # in ffn_gate_up_exps
_PERMUTED: Final = ("attn_q", "attn_k")
_CONVOLUTIONS: Final = ("ssm_conv1d", "shortconv.conv")
_APART: Final = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")  # in self_attn.conv1d
_COLUMNS: Final = ("ssm_a", "ssm_d")  # of Mamba-2, whose norm of results has rows by group
_BY_VALUE_HEAD: Final = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")


@dataclass(frozen=True, slots=True)
class Names:
    """How the tensors of one file are called, and what was done to their numbers.

    layers   of the model; tensors of further ones are not its own
    heads    of queries and of keys
    dim      numbers of a head
    latent   attention is latent, so that kv_b may be two tensors
    gated    queries have a gate each, in the same tensor
    recurs   layers with delta nets
    tiles    (rows before values, heads of keys, numbers of a value) where values of delta nets are
             tiled: see hybrid.py; else 0 heads
    scales   shape of the decays' scales in the model, where the file's may be another
    """

    architecture: Architecture
    layers: int
    heads: tuple[int, int]
    dim: int
    latent: bool = False
    gated: bool = False
    recurs: frozenset[int] = frozenset()
    tiles: tuple[int, int, int] = (0, 0, 0)
    scales: tuple[int, ...] = ()

    @property
    def layer(self) -> Mapping[str, str]:
        """Names in a layer by llama.cpp's."""
        return {**LAYER, **self.architecture.names}


def names_of(architecture: Architecture, config: Mapping[str, Any]) -> Names:
    """The names of the file with this configuration."""
    if not architecture.attends:
        return Names(architecture, config["num_hidden_layers"], (0, 0), 0)
    heads = config["num_attention_heads"]
    keys = config.get("num_kv_heads", config["num_key_value_heads"])
    dim = config.get("head_dim", config["hidden_size"] // heads)
    latent = "kv_lora_rank" in config
    names = Names(architecture, config["num_hidden_layers"], (heads, keys), dim, latent)
    if "linear_num_key_heads" not in config and "linear_num_heads" not in config:
        return names
    kinds = enumerate(config["layer_types"])
    recurs = frozenset(layer for layer, kind in kinds if kind == "linear_attention")
    if "linear_num_heads" in config:
        kimi, own = config["model_type"] == "kimi_linear", config["linear_num_heads"]
        return replace(names, recurs=recurs, scales=(1, 1, own, 1) if kimi else (own,))
    tiles, groups = (0, 0, 0), config["linear_num_key_heads"]
    if config.get("linear_value_heads_tiled"):
        tiles = (
            2 * groups * config["linear_key_head_dim"],
            groups,
            config["linear_value_head_dim"],
        )
    return replace(names, gated=True, recurs=recurs, tiles=tiles)


@dataclass(frozen=True, slots=True)
class _Change:
    """What was done to a tensor's numbers.

    turned       numbers of a head whose rows lie in llama.cpp's order; else 0
    minus        is to be subtracted
    groups       heads of keys by which rows of queries, keys and values belong together; else 0
    width        of these heads
    transposed   it is [in, out]
    tiles        (rows before them, heads of keys, rows of a head) of heads of values whose first
                 ones of each head of keys come first; else 0 heads
    decay        its size is exp of what models know
    """

    turned: int = 0
    minus: float = 0.0
    groups: int = 0
    width: int = 0
    transposed: bool = False
    tiles: tuple[int, int, int] = (0, 0, 0)
    decay: bool = False


_AS_IT_IS: Final = _Change()


def forms_of(records: Mapping[str, TensorRecord], names: Names) -> dict[str, Form]:
    """Every parameter by Hugging Face's name, and how it is published.

    Tensors that are called otherwise keep their names.  Raises CheckpointError for a type that is
    not read, HeaderError for parts that do not belong together.
    """
    forms: dict[str, Form] = {}
    for record in records.values():
        for name, part, change in _parameters(record, names):
            forms[name] = _form(record, part, change)
        match = _SPLIT_KEYS.fullmatch(record.name)
        if match is not None and names.latent:
            name = f"model.layers.{match[1]}.self_attn.kv_b_proj.weight"
            values = records.get(f"blk.{match[1]}.attn_v_b.weight")
            forms[name] = _latent(record, values, names.heads[0])
    for layer in _layers_of(records, names):
        convolutions = [records.get(f"blk.{layer}.{part}.weight") for part in _APART]
        parts = [record for record in convolutions if record is not None]
        if len(parts) == len(_APART):
            forms[names.architecture.at.format(layer) + "self_attn.conv1d.weight"] = _one_conv(
                parts
            )
        for name, halves in names.architecture.joined.items():
            found = [records.get(f"blk.{layer}.{half}.weight") for half in halves]
            joined = _joined([record for record in found if record is not None])
            if joined is not None:
                forms[names.architecture.at.format(layer) + name] = joined
    return forms


class AdaptedPart(NamedTuple):
    """What an adapter of a tensor adds to one linear layer.

    module   its name in Hugging Face's checkpoints
    rows     of `lora_b`, [out, rank]
    turned   numbers of a head whose rows lie in llama.cpp's order; else 0
    expert   of a stack
    """

    module: str
    rows: TensorRecord
    turned: int
    expert: int


def adapted_parts(up: TensorRecord, names: Names) -> Iterator[AdaptedPart]:
    """Layers that an adapter changes by its `lora_b`, which has the name of the adapted tensor.

    Raises AdapterError where the numbers of these layers were changed in other ways than that.
    """
    stacked = len(up.shape) == 3 and up.shape[0] > 0
    each = up.nbytes // up.shape[0] if stacked else 0
    for name, part, change in _parameters(up, names):
        if change != _Change(turned=change.turned):
            raise AdapterError(
                f"{up.file}: llama.cpp reorders the numbers of {up.name!r} in a way that HMT does "
                "not undo for adapters: give peft's own folder"
            )
        expert = (part.offset - up.offset) // each if each else 0
        yield AdaptedPart(name.removesuffix(".weight"), part, change.turned, expert)


def _layers_of(records: Mapping[str, TensorRecord], names: Names) -> list[int]:
    """The model's layers that have a tensor: files may say that there are billions."""
    matches = map(_IN_LAYER.fullmatch, records)
    layers = {int(match[1]) for match in matches if match is not None}
    return sorted(layer for layer in layers if layer < names.layers)


def spare_of(records: Mapping[str, TensorRecord], names: Names) -> frozenset[str]:
    """Tensors of layers that the model has besides its own, which guess further tokens."""
    matches = {name: _IN_LAYER.fullmatch(name) for name in records}
    return frozenset(
        name for name, match in matches.items() if match and int(match[1]) >= names.layers
    )


def _joined(halves: Sequence[TensorRecord]) -> Joined | None:
    """Gate and up projections as one tensor: one after the other, of each expert where stacked."""
    if len(halves) != 2:
        return None
    gate, up = halves
    if gate.shape != up.shape:
        raise HeaderError(
            f"{gate.file}: {gate.name!r} is {list(gate.shape)} and {up.name!r} {list(up.shape)}; "
            "they must be alike"
        )
    *experts, rows, columns = gate.shape
    stacks = [[half] if not experts else list(_stacked(half)) for half in halves]
    pieces = tuple(
        _form(half, part, _AS_IT_IS)
        for pair in zip(*stacks, strict=True)
        for half, part in zip(halves, pair, strict=True)
    )
    return Joined(pieces, (*experts, 2 * rows, columns))


def _one_conv(parts: Sequence[TensorRecord]) -> Joined:
    """Convolutions of queries, keys and values, whatever dimensions of one they have besides."""
    taps = parts[0].shape[-1]
    if any(part.shape[-1:] != (taps,) for part in parts):
        raise HeaderError(
            f"{parts[0].file}: {' and '.join(repr(part.name) for part in parts)} must be as wide"
        )
    plain = [replace(part, shape=(prod(part.shape[:-1]), 1, taps)) for part in parts]
    pieces = tuple(_form(part, part, _AS_IT_IS) for part in plain)
    return Joined(pieces, (sum(part.shape[0] for part in plain), 1, taps))


def _latent(keys: TensorRecord, values: TensorRecord | None, heads: int) -> Published:
    """kv_b_proj of keys [heads, kv_rank, nope_dim] and values [heads, value_dim, kv_rank]."""
    if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
        raise HeaderError(f"{keys.file}: {keys.name!r} has no attn_v_b beside it, each of 3 sizes")
    _, rank, nope = keys.shape
    if (keys.shape[0], *values.shape[::2]) != (heads, heads, rank):
        raise HeaderError(
            f"{keys.file}: {keys.name!r} is {list(keys.shape)} and {values.name!r} "
            f"{list(values.shape)}, which do not belong to one another, or not to {heads} heads"
        )
    for record in (keys, values):
        _check_kind(record)
    parts = {
        name: PublishedPart(r.name, FileRange(r.file, r.offset, r.nbytes), 0)
        for name, r in (("keys", keys), ("values", values))
    }
    sizes = (("heads", heads), ("nope_dim", nope), ("value_dim", values.shape[1]), ("rank", rank))
    form = FormName("gguf latent", (("keys", keys.dtype), ("values", values.dtype), *sizes))
    return Published(form, (heads * (nope + values.shape[1]), rank), parts)


def _parameters(record: TensorRecord, names: Names) -> Iterator[tuple[str, TensorRecord, _Change]]:
    """(name, bytes and shape, what was done to it) of all parameters that a tensor holds."""
    architecture = names.architecture
    stem, _, kind = record.name.rpartition(".")
    shifted = (
        architecture.shifted
        and record.name.endswith("norm.weight")
        and not record.name.endswith(".ssm_norm.weight")
    )
    change = _Change(minus=1.0) if shifted else _AS_IT_IS
    if stem in architecture.trunk:
        yield f"{architecture.trunk[stem]}.{kind}", record, change
        return
    match = _IN_LAYER.fullmatch(record.name)
    if match is None:
        return
    layer, what, expert, kind = match.groups()
    at = architecture.at.format(layer)
    recurs = int(layer) in names.recurs
    if recurs and not shifted:
        change = _delta_change(what, names)
    elif what == "ssm_a":
        change = _Change(decay=True)
    if what in _CONVOLUTIONS and len(record.shape) == 2:
        record = replace(record, shape=(record.shape[0], 1, record.shape[1]))
    if (what in _COLUMNS and record.shape[1:] == (1,)) or what == "ssm_norm":
        record = replace(record, shape=(prod(record.shape),))
    if what == "ssm_a" and prod(record.shape) == prod(names.scales or (0,)):
        record = replace(record, shape=names.scales)
    whole = names.layer.get(f"{what}.{kind or 'bias'}")
    if whole is not None:
        yield at + whole, record, change
        return
    if what == _FUSED and (_FUSED not in names.layer or (names.recurs and not recurs)):
        for head, own in _heads_of(record, names):
            yield f"{at}{names.layer[head]}.{kind}", own, _change(head, record, names)
        return
    if what == "ffn_gate_up_exps":
        for index, both in enumerate(_stacked(record)):
            for half, own in zip(_FUSED_EXPERTS, _halves(both), strict=True):
                yield f"{at}{names.layer[half].format(index)}.{kind}", own, _AS_IT_IS
        return
    own_name = names.layer.get(what if expert is None else f"{what}_exps")
    if own_name is None:
        return
    if "{}" in own_name and expert is None:
        for index, part in enumerate(_stacked(record)):
            yield f"{at}{own_name.format(index)}.{kind}", part, change
        return
    changed = _change(what, record, names) if change == _AS_IT_IS else change
    yield f"{at}{own_name.format(expert)}.{kind}", record, changed


def _change(what: str, record: TensorRecord, names: Names) -> _Change:
    """What was done to a tensor of a layer that is no norm."""
    architecture = names.architecture
    if architecture.turned and what in _PERMUTED:
        return _Change(turned=names.dim)
    if architecture.grouped and what == _FUSED:
        return _Change(groups=names.heads[1], width=names.dim)
    if architecture.transposed and len(record.shape) == 2:
        return _Change(transposed=True)
    return _AS_IT_IS


def _delta_change(what: str, names: Names) -> _Change:
    """What was done to a tensor of a layer with a delta net."""
    before, groups, width = names.tiles
    if not groups or what not in (_FUSED, "ssm_conv1d", *_BY_VALUE_HEAD):
        return _Change(decay=what == "ssm_a")
    tiles = (0, groups, 1) if what in _BY_VALUE_HEAD else (before, groups, width)
    return _Change(tiles=tiles, decay=what == "ssm_a")


def _heads_of(record: TensorRecord, names: Names) -> Iterator[tuple[str, TensorRecord]]:
    """Queries, keys and values that a file has in one tensor and the model in three."""
    query, key = (heads * names.dim for heads in names.heads)
    query *= 2 if names.gated else 1
    if record.shape[0] != query + 2 * key:
        raise HeaderError(
            f"{record.file}: {record.name!r} has {record.shape[0]} rows, and {names.heads[0]} "
            f"heads of queries with {names.heads[1]} of keys and of values, of {names.dim} numbers "
            f"each, have {query + 2 * key}"
        )
    at = 0
    for part, rows in (("attn_q", query), ("attn_k", key), ("attn_v", key)):
        yield part, record.rows(at, rows)
        at += rows


def _halves(record: TensorRecord) -> tuple[TensorRecord, TensorRecord]:
    rows = record.shape[0] // 2
    return record.rows(0, rows), record.rows(rows, rows)


def _stacked(record: TensorRecord) -> Iterator[TensorRecord]:
    for index in range(record.shape[0]):
        one = record.rows(index, 1)
        yield replace(one, shape=record.shape[1:])


def _form(record: TensorRecord, part: TensorRecord, change: _Change) -> TensorRecord | Published:
    if part.dtype in FLOATS and change == _AS_IT_IS:
        return part
    _check_kind(record)
    place = FileRange(part.file, part.offset, part.nbytes)
    if change.groups or change.transposed:
        rows, *columns = part.shape
        shape = (*columns, rows) if change.transposed else part.shape
        options = (
            ("kind", part.dtype), ("rows", rows), ("columns", columns[0] if columns else 0),
            ("groups", change.groups), ("width", change.width),
        )  # fmt: skip
        whole = {"blocks": PublishedPart(record.name, place, 0)}
        return Published(FormName("gguf reordered", options), shape, whole)
    if change.tiles[1]:
        before, groups, width = change.tiles
        tiled: tuple[tuple[str, str | int | float], ...] = (
            ("kind", part.dtype), ("rows", part.shape[0]), ("before", before), ("groups", groups),
            ("width", width), ("decay", change.decay),
        )  # fmt: skip
        whole = {"blocks": PublishedPart(record.name, place, 0)}
        return Published(FormName("gguf tiled", tiled), part.shape, whole)
    row_bytes = part.nbytes // (prod(part.shape[:-1]) if len(part.shape) > 1 else part.shape[0])
    parts = {"blocks": PublishedPart(record.name, place, row_bytes)}
    if part.dtype in FLOATS:
        floats = (
            ("dtype", part.dtype), ("turned", change.turned), ("minus", change.minus),
            ("decay", change.decay),
        )  # fmt: skip
        return Published(FormName("floats", floats), part.shape, {"data": parts["blocks"]})
    name = FormName("gguf", (("kind", part.dtype), ("turned", change.turned)))
    return Published(name, part.shape, parts)


def plain_form(
    record: TensorRecord, minus: float = 0.0, turned: int = 0
) -> TensorRecord | Published:
    """A tensor whose numbers, less `minus`, are the model's in their order.

    turned   numbers of a head whose rows lie in llama.cpp's order; else 0
    Raises CheckpointError for a type that is not read.
    """
    return _form(record, record, replace(_AS_IT_IS, minus=minus, turned=turned))


def _check_kind(record: TensorRecord) -> None:
    if record.dtype not in FLOATS + CODES:
        raise CheckpointError(
            f"{record.file}: tensor {record.name!r} is {record.dtype}; HMT reads "
            f"{', '.join(FLOATS + CODES)}: download another quantisation of this model"
        )
