"""Encoders of images in files of their own, which llama.cpp calls mmproj.

What their keys and names mean: llama.cpp's tools/mtmd/clip.cpp, and the vision models of its
converter.  Sizes are read from tensors where these tell them, so that a file cannot ask for more
than it holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from hmt.base.errors import CheckpointError, HeaderError
from hmt.contracts.checkpoint import (
    FileRange,
    Form,
    FormName,
    Joined,
    Published,
    PublishedPart,
    TensorRecord,
)
from hmt.formats.gguf.header import GgufHeader
from hmt.formats.gguf.keys import Keys
from hmt.formats.gguf.names import FLOATS, plain_form
from hmt.formats.gguf.projector_fields import (
    DEEPSTACK,
    FRAMES,
    IN_LAYER,
    MERGE,
    depth_of,
    size_of,
    width_of,
)
from hmt.formats.gguf.projector_types import PROJECTORS, Projector

CLIP: Final = "clip"  # general.architecture of these files
_ROWS: Final = ("mm_tokens_per_image", "image_seq_length")  # tokens of an image, or of a tile
_QUERIES: Final = ("attn_q", "attn_k", "attn_v")
_MOST_MERGE: Final = 16
_SOUND: Final = ("a.", "mm.a.")  # parts of encoders of sound, which are left aside


@dataclass(frozen=True)
class ImageEncoderFile:
    """An encoder in a file, read with that of the language model it belongs to.

    vision      vision_config of config.json
    processor   preprocessor_config.json
    forms       parameters by transformers' names
    out_width   numbers of a token's features
    deepstack   layers that are given features besides
    own         fields of config.json besides, or in the place of the type's
    """

    vision: dict[str, Any]
    processor: dict[str, Any]
    forms: dict[str, Form]
    out_width: int
    deepstack: int = 0
    own: Mapping[str, Any] = field(default_factory=dict)


_SHIFTED: Final = ("mm.soft_emb_norm.weight",)  # norms to which 1 has been added


def projector_of(header: GgufHeader) -> Projector:
    """Raises CheckpointError for a file that is no encoder of images that HMT runs."""
    kind = header.metadata.get("general.architecture")
    if kind != CLIP:
        raise CheckpointError(
            f"{header.path} is of architecture {kind!r:.60}, and encoders of images are "
            f"{CLIP!r}: give the model's mmproj file"
        )
    name = header.metadata.get("clip.vision.projector_type") or header.metadata.get(
        "clip.projector_type"
    )
    found = PROJECTORS.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"{header.path} has a projector of type {name!r:.60}; HMT reads "
            f"{', '.join(sorted(PROJECTORS))}: use the model's safetensors"
        )
    return found


def read_encoder(header: GgufHeader, projector: Projector) -> ImageEncoderFile:
    """Raises CheckpointError, HeaderError where something is missing or absurd."""
    records = header.records
    keys = Keys(header.metadata, CLIP, str(header.path), records)
    width, depth = width_of(records), depth_of(records)
    heads, patch = keys.count("vision.attention.head_count"), size_of(records, FRAMES[0], 3)
    merge = keys.count(MERGE, 2)
    if width % heads or merge > _MOST_MERGE:
        raise HeaderError(
            f"{header.path}: {heads} heads of {width} numbers, or {merge} x {merge} patches of a "
            "token, are absurd: download it again"
        )
    if keys.count("vision.block_count", depth) != depth:
        raise keys.unread("vision.block_count", f"and the file has layers 0 to {depth - 1}")
    if keys.count("vision.patch_size", patch) != patch:
        raise keys.unread("vision.patch_size", f"and its kernels are of {patch} pixels")
    vision = projector.vision(keys, records) | {"patch_size": patch}
    own: dict[str, Any] = {}
    if projector.prepared is None:
        vision |= {
            "depth": depth,
            "num_heads": heads,
            "spatial_merge_size": merge,
            "temporal_patch_size": len(FRAMES),
        }
        processor = _processor(keys, projector, patch, merge)
    else:
        vision |= {"num_hidden_layers": depth, "num_attention_heads": heads}
        own, more = projector.prepared(keys, vision, records)
        processor = {**projector.processor, **more}
    for name in ("image_mean", "image_std"):
        processor[name] = keys.by_layer(f"vision.{name}", 3)
    if "video" in processor:
        processor["video"] = processor | processor["video"]
    layers = vision.get("deepstack_visual_indexes", [])
    forms = _forms(header, projector, layers, vision.get("head_dim", 0))
    _check_all_read(header, forms, projector.unused)
    return ImageEncoderFile(
        vision, processor, forms, size_of(records, *projector.out), len(layers), own
    )


def _processor(keys: Keys, projector: Projector, patch: int, merge: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2}
    found = {**projector.processor, **sizes}
    edges = dict(found["size"])
    for edge, key in (("shortest_edge", "min"), ("longest_edge", "max")):
        edges[edge] = keys.count(f"vision.image_{key}_pixels", edges[edge])
    found["size"] = edges
    return found


def _forms(
    header: GgufHeader, projector: Projector, deepstack: list[int], dim: int
) -> dict[str, Form]:
    """Parameters by transformers' names.

    dim   numbers of a head, where rows of heads lie in llama.cpp's order
    """
    records = header.records
    forms: dict[str, Form] = {}
    swapped = _swapped(records)
    for record in records.values():
        stem, _, kind = record.name.rpartition(".")
        name, turned = projector.trunk.get(stem), 0
        if (match := IN_LAYER.fullmatch(record.name)) is not None:
            own = projector.layer.get(swapped.get(match[2], match[2]))
            name = own and f"{projector.blocks.format(match[1])}{own}"
            turned = dim if projector.turned and match[2] in _QUERIES[:2] else 0
        elif (match := DEEPSTACK.fullmatch(record.name)) is not None:
            own = projector.deepstack.get(match[2])
            name = own and f"deepstack_merger_list.{deepstack.index(int(match[1]))}.{own}"
        if name:
            minus = float(record.name in _SHIFTED)
            forms[f"{projector.at}{name}.{kind}"] = plain_form(record, minus, turned)
            continue
        layer = match[1] if match is not None and record.name.startswith("v.blk.") else ""
        whole = projector.plain.get(record.name.replace(f".{layer}.", ".{}.", 1))
        if whole is not None:
            own, sizes = whole
            forms[projector.at + own.format(layer)] = plain_form(_of_sizes(record, sizes))
    if projector.prepared is not None:
        return forms
    for layer in range(depth_of(records)):
        for kind in ("weight", "bias"):
            parts = [records.get(f"v.blk.{layer}.{part}.{kind}") for part in _QUERIES]
            there = [part for part in parts if part is not None]
            if len(there) == len(_QUERIES) and "attn_qkv" in projector.layer:
                rows = sum(part.shape[0] for part in there)
                name = f"{projector.at}blocks.{layer}.{projector.layer['attn_qkv']}.{kind}"
                pieces = tuple(plain_form(part) for part in there)
                forms[name] = Joined(pieces, (rows, *there[0].shape[1:]))
    forms[f"{projector.at}{projector.trunk['v.patch_embd']}.weight"] = _kernel(header)
    return forms


def _of_sizes(record: TensorRecord, sizes: int) -> TensorRecord:
    """The same numbers with as many sizes, of which the first are 1."""
    shape = list(record.shape)
    while len(shape) > 1 and shape[0] == 1:
        del shape[0]
    return replace(record, shape=(*[1] * (sizes - len(shape)), *shape))


def _check_all_read(header: GgufHeader, forms: Mapping[str, Form], unused: frozenset[str]) -> None:
    """Raise CheckpointError for a tensor that is no parameter: numbers would be others without."""
    used = set(unused)
    for form in forms.values():
        for piece in form.pieces if isinstance(form, Joined) else (form,):
            if isinstance(piece, TensorRecord):
                used.add(piece.name)
            else:
                used.update(part.tensor for part in piece.parts.values())
    left = [n for n in header.records if n not in used and not n.startswith(_SOUND)]
    if left:
        raise CheckpointError(
            f"{header.path} has {len(left)} tensors that HMT does not know in an encoder of this "
            f"type, first {left[0]!r}: use the model's safetensors, or a newer HMT"
        )


def _swapped(records: Mapping[str, TensorRecord]) -> dict[str, str]:
    """Files from before 2025 call a layer's first matrix ffn_down, and its second ffn_up."""
    name, width = "v.blk.0.ffn_up.weight", width_of(records)
    if size_of(records, name, 0) != width or size_of(records, name, 1) == width:
        return {}
    return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def _kernel(header: GgufHeader) -> Published:
    """The convolution over two frames, of which a file has one after the other."""
    frames = [header.records.get(name) for name in FRAMES]
    there = [frame for frame in frames if frame is not None]
    first = there[0] if there else None
    if first is None or len(there) != len(FRAMES) or len(first.shape) != 4:
        raise HeaderError(f"{header.path} has no kernels {' and '.join(FRAMES)} of 4 sizes")
    if any(
        (f.dtype, f.shape) != (first.dtype, first.shape) or f.dtype not in FLOATS for f in there
    ):
        raise HeaderError(
            f"{header.path}: {' and '.join(FRAMES)} must be alike, and in {', '.join(FLOATS)}"
        )
    form = FormName("gguf frames", (("kind", first.dtype), ("frames", len(there))))
    parts = {
        str(number): PublishedPart(f.name, FileRange(f.file, f.offset, f.nbytes), 0)
        for number, f in enumerate(there)
    }
    rows, channels, *sides = first.shape
    return Published(form, (rows, channels, len(there), *sides), parts)


def beside(path: Path) -> list[Path]:
    """Files of encoders beside a model's, or in its folder."""
    folder = path if path.is_dir() else path.parent
    return sorted(file for file in folder.glob("*.gguf") if is_mmproj(file))


def is_mmproj(file: Path) -> bool:
    """By its name."""
    return file.name.lower().startswith("mmproj")


def config_with_encoder(
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    header: GgufHeader,
) -> tuple[dict[str, Any], ImageEncoderFile]:
    """The config.json of a model that sees, of its language model's; and its encoder.

    config, metadata   of the file with the language model
    header             of the file with the encoder
    Raises CheckpointError, HeaderError where they do not belong together, or are not read.
    """
    projector = projector_of(header)
    architecture = metadata["general.architecture"]
    model = projector.models.get(architecture)
    if model is None:
        raise CheckpointError(
            f"{header.path} belongs to models of architecture "
            f"{' or '.join(sorted(projector.models))}, and this one is {architecture!r}"
        )
    encoder = read_encoder(header, projector)
    wanted = config["hidden_size"], config.get("deepstack_layers", encoder.deepstack)
    if (encoder.out_width, encoder.deepstack) != wanted:
        raise CheckpointError(
            f"{header.path} belongs to another model: it makes features of {encoder.out_width} "
            f"numbers, for {encoder.deepstack} layers besides the first, and this model's "
            f"embeddings have {wanted[0]}, with {wanted[1]} such layers"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    there = tokens if isinstance(tokens, list) else []
    numbers = {token: number for number, token in enumerate(there)}
    named = {key: numbers[t] for key, t in projector.tokens.items() if t in numbers}
    first, text = next(iter(projector.tokens.items()))
    if first not in named:
        raise CheckpointError(
            f"the model's vocabulary has no token {text}, for images: use the model's safetensors"
        )
    kind, causal = model
    rope = dict(config["rope_parameters"])
    processor = dict(encoder.processor)
    if any(projector.around):
        processor["written"] = _written(projector, encoder, numbers, named[first])
    sections = metadata.get(f"{architecture}.rope.dimension_sections")
    if isinstance(sections, list):
        rope["mrope_section"] = sections[:3]
    if kind.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    text_kind = config["model_type"] if projector.also_blind else f"{kind}_text"
    changed = {"model_type": text_kind, "rope_parameters": rope}
    text_config = {k: v for k, v in config.items() if k != "architectures"} | changed
    return {
        "architectures": [causal],
        "model_type": kind,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": text_config,
        "vision_config": encoder.vision,
        **named,
        **encoder.own,
    }, replace(encoder, processor=processor)


def _written(
    projector: Projector, encoder: ImageEncoderFile, numbers: Mapping[str, int], token: int
) -> dict[str, Any]:
    """Which tokens stand for an image in a prompt: see models/vision/processing.py."""
    front, behind = ([numbers[t] for t in side if t in numbers] for side in projector.around)
    if not projector.around[0]:
        if len(behind) != len(projector.around[1]):
            raise CheckpointError(
                f"the model's vocabulary has not both of {' and '.join(projector.around[1])}, for "
                "images"
            )
        return {"behind_rows": behind}
    for text in (*projector.around[0], *projector.around[1]):
        if text not in numbers and text.strip():
            raise CheckpointError(f"the model's vocabulary has no token {text}, for images")
    mark = numbers.get(projector.mark, token)
    rows = next(n for key, n in encoder.own.items() if key in _ROWS)
    return {"mark": mark, "front": front, "rows": rows, "behind": behind}
