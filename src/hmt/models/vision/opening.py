"""Whether a model sees images here, and the model that does."""

import copy
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from hmt.base.errors import CheckpointError, HMTError
from hmt.base.log import logger
from hmt.contracts.checkpoint import Checkpoint
from hmt.contracts.model import Model
from hmt.models.decoder import Decoder
from hmt.models.registry import TEXT_ONLY
from hmt.models.vision.encoder import Encoder, TowerSizes, pixel_count
from hmt.models.vision.model import VisionModel
from hmt.models.vision.processing import (
    ROWS,
    Processing,
    from_file,
    tokenizer_of,
    with_text,
    writes_text,
)
from hmt.models.vision.videos import OF_VIDEOS, VideoProcessing, video_processing
from hmt.text.small_file import read_object

# Whose image processor tells of a grid of patches, and whose positions have three axes.
_OF_GRIDS: Final = (
    "exaone4_5",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "glm46v",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
)
_ONE_AXIS: Final = ("exaone4_5",)  # of them, whose tokens of images have places as those of text
_PLAIN: Final = ("llava",)  # one row of the tower for each patch of an image of fixed size
_OF_LAYERS: Final = (*_PLAIN, "llava_next")  # whose features are those of a layer, without a norm
# Whose features take the place of embeddings, and nothing else, though their models need more to
# be called.  Of all types but these three groups it is seen by calling them.
_REPLACING: Final = ("gemma3", "gemma4", "idefics3")
# Towers that make masks.
_MASKED: Final = (ROWS, "gemma4_vision", "idefics3_vision", "smolvlm_vision")
_WIDTHS: Final = ("hidden_size", "embed_dim", "mm_embed_dim")
_OF_TIMM: Final = ("timm_wrapper", "gemma3n_vision")
_TIMM_PATCH: Final = 16  # pixels in each direction, by which such an encoder's sizes are counted
_PROBED: Final = 1536  # pixels in each direction of what stands for the largest image
IMAGES_REFUSED: Final = "images are refused"  # how the remark begins that says why
_TOKENS: Final = ("image_token_id", "image_token_index")
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
_LIBRARIES: Final = {"torchvision": "image processor", "timm": "encoder"}
# By types that are published with code of their own: what of the same makers sees.
_NEAR: Final = {"kimi_vl": "Kimi-K2.5 and its successors (kimi_k25)"}
_MOST_SIDE: Final = 1 << 14  # of what an image processor may resize images to
_WRONG: Final = (
    ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError, HMTError,
)  # fmt: skip


def with_vision(model: Model, checkpoint: Checkpoint, names: Collection[str]) -> Model:
    """`model`, with the encoder of images that its checkpoint has.

    As it is where there is none, or where HMT cannot run it; then its remarks say why, and requests
    with images are refused.

    names   of the checkpoint's tensors; of a pack, those of its tower
    """
    if checkpoint.images_refused:
        return _without(model, checkpoint.images_refused)
    config, folder = checkpoint.config, checkpoint.path
    if not isinstance(config.get("vision_config"), Mapping):
        return model
    kind = config.get("model_type")
    if not _of_images(kind):
        return _without(model, _unknown(kind))
    if not names:
        return _without(
            model,
            "the pack was made without the encoder of images; convert the checkpoint again "
            "(`hmt convert`)",
        )
    if find_spec("PIL") is None:
        return _without(
            model, "they need Pillow, which is not installed: pip install 'hmt[images]'"
        )
    written = None
    with ExitStack() as after:
        if checkpoint.processor is not None:
            folder = Path(after.enter_context(TemporaryDirectory()))
            said = dict(checkpoint.processor)
            written = said.pop("written", None)
            if "video" in said:
                (folder / OF_VIDEOS[1]).write_text(json.dumps(said.pop("video")))
            (folder / _PROCESSORS[0]).write_text(json.dumps(said))
            if written is not None and "processor" in written:
                (folder / _PROCESSORS[1]).write_text(json.dumps(written["processor"]))
                written = None
        if not any((folder / name).is_file() for name in _PROCESSORS):
            return _without(model, f"there is no preprocessor_config.json in {folder}")
        try:
            texts = tokenizer_of(folder, checkpoint)
            encoder = _opened(config, folder, model, (written, texts), names)
        except _WRONG as error:
            logger.debug("images cannot be encoded", exc_info=error)
            return _without(model, f"its encoder of images cannot be made ({_said(error)})")
    for block in encoder.tower.blocks:
        for param in block.params:
            if not any(source in names for source in param.sources):
                return _without(model, f"the checkpoint has no tensor {param.sources[0]}")
    remarks = [remark for remark in model.spec.remarks if remark != TEXT_ONLY]
    if checkpoint.mmproj is not None:
        remarks.append(f"sees images by {checkpoint.mmproj.name}")
    found = VisionModel(model, encoder)
    found.spec = replace(
        model.spec,
        blocks=(*model.spec.blocks, *encoder.tower.blocks),
        remarks=tuple(remarks),
    )
    return found


def _of_images(kind: Any) -> bool:
    """Whether transformers has models of this type that make text of images."""
    from transformers.models.auto import modeling_auto  # names only, yet it takes a second

    return kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def _unknown(kind: Any) -> str:
    """Why models of a type see nothing here that transformers has no code for."""
    import transformers

    found = (
        f"transformers {transformers.__version__} has no models of images and text of type "
        f"{kind!r:.60}, and code that comes with a model is not run"
    )
    near = _NEAR.get(kind) if isinstance(kind, str) else None
    return found + (f"; text is answered, and {near} see images" if near else "")


def _without(model: Model, why: str) -> Model:
    model.spec = replace(model.spec, remarks=(*model.spec.remarks, f"{IMAGES_REFUSED}: {why}"))
    return model


def _said(error: BaseException) -> str:
    """Why an encoder cannot be made, and what to install where that is all."""
    said = str(error)
    for name, part in _LIBRARIES.items():
        if name in said.lower() and find_spec(name) is None:
            return f"its {part} needs {name}, which is not installed: pip install {name}"
    return f"{said:.200}" if isinstance(error, HMTError) else f"{type(error).__name__}: {said:.200}"


def _opened(
    config: Mapping[str, Any],
    folder: Path,
    model: Model,
    writing: tuple[Mapping[str, Any] | None, Callable[[], Any] | None],
    names: Collection[str],
) -> Encoder:
    """The encoder of a model.

    writing   says which tokens stand for an image, where no processor of text does; and opens the
              tokenizer for one
    names     of the checkpoint's tensors
    Raises errors of many kinds where configurations are not what they should be.
    """
    from hmt.models.fallback import key_map, module_tree  # transformers' code takes a second
    from hmt.models.vision import windows
    from hmt.models.vision.tower import Tower

    written, texts = writing
    whole, kind = module_tree.read(config), config["model_type"]
    tree = module_tree.build(
        whole, config["architectures"][0], model.dtype, by_name=False, listed=False
    )
    text = tree.model.get_decoder()
    windows.use(tree.model, text)
    path = next((name for name, module in tree.model.named_modules() if module is text), None)
    named = [getattr(whole, name, None) for name in _TOKENS]
    token = next((number for number in named if isinstance(number, int)), None)
    if path is None or token is None:
        raise CheckpointError("its config.json names no token that stands for images")
    if whole.vision_config.model_type == "clip_vision_model" and kind in _OF_LAYERS:
        clip: Any = tree.model.base_model.vision_tower
        if not any("post_layernorm" in name for name in names):
            clip.post_layernorm = torch.nn.Identity()  # makes what LLaVA does not read
    taken = _taken(model, tree.model, text, kind, token)
    axes = getattr(tree.model.base_model, "get_rope_index", None) if taken.axes else None
    processor = _processor(folder)
    grid = kind in _OF_GRIDS or (axes is not None and not writes_text(kind))
    if grid or (kind in _PLAIN and whole.vision_config.model_type != ROWS):
        processing = Processing(processor, token, token)
        tower = Tower(tree.model, path, key_map.find(tree.model))
        sizes = _grid_sizes(whole, processor) if grid else _plain_sizes(whole)
        videos = _videos(whole, folder, token, texts)
        encoder = Encoder(
            tower, processing, sizes, axes=axes, together=taken.together, videos=videos
        )
        _check_processor(encoder, whole.vision_config, grid=grid)
    else:
        processing = (
            with_text(whole, folder, token, processor, texts)
            if written is None
            else from_file(whole, token, processor, written)
        )
        sizes = _probed_sizes(whole, tree.model, processing)
        tower = Tower(tree.model, path, key_map.find(tree.model), taken.written)
        processing.tokens |= taken.written
        videos = _videos(whole, folder, token, texts)
        encoder = Encoder(
            tower, processing, sizes, axes=axes, together=taken.together, videos=videos
        )
    made = encoder.prepare(torch.zeros(96, 64, 3, dtype=torch.uint8)).inputs
    if absent := [name for name in tower.needs if name not in made]:
        raise CheckpointError(
            f"its tower takes {absent[0]}, which its image processor makes none of"
        )
    return encoder


def _videos(
    config: Any, folder: Path, token: int, tokenizer: Callable[[], Any] | None
) -> VideoProcessing | str:
    """What prepares videos, or why nothing does."""
    try:
        return video_processing(config, folder, token, tokenizer)
    except _WRONG as error:
        logger.debug("videos cannot be encoded", exc_info=error)
        return f"{error if isinstance(error, LookupError | ValueError) else _said(error)}"


@dataclass(frozen=True)
class _Taken:
    """How a language model takes features.

    axes       of rotary positions; 0: they count tokens
    together   an image's tokens see each other
    written    tokens that its forward pass writes features for by itself; (): its encoder does
    """

    axes: int = 0
    together: bool = False
    written: frozenset[int] = frozenset()


def _taken(model: Model, tree: Any, text: Any, kind: str, token: int) -> _Taken:
    """How `model` takes features where `token` stands.  Raises CheckpointError where it does not.

    tree   transformers' model without numbers, whose language model is `text`
    """
    from hmt.models.fallback.whole import WholeForward
    from hmt.models.vision.observing import (
        FeaturesError,
        axes_of,
        check_replaces,
        tokens_written,
    )

    if isinstance(model, WholeForward) and model.has_encoder:
        axes = 0 if kind in _ONE_AXIS else axes_of(tree, token)
        calls = model.take_images(token, axes)
        return _Taken(axes, any(calls.masks.values()))
    axes, written = 0, frozenset[int]()
    if kind in _OF_GRIDS:
        axes = 0 if kind in _ONE_AXIS else 3
    elif kind not in _PLAIN + _REPLACING:
        try:
            axes = check_replaces(tree, text, token)
        except FeaturesError:
            written = tokens_written(tree, text, token)
    _check_text(model, axes=axes)
    if not isinstance(model, Decoder) and (_together(tree.config) or _added(tree.config)):
        raise CheckpointError(
            "its language model runs through transformers' modules, in which tokens of "
            "images see no later ones, and features are added behind no layer"
        )
    return _Taken(axes, _together(tree.config), written)


def _together(config: Any) -> bool:
    """Whether an image's tokens see each other."""
    seen = getattr(config.get_text_config(), "use_bidirectional_attention", None)
    return config.model_type == "gemma3" or (config.model_type == "gemma4" and seen == "vision")


def _check_text(model: Model, *, axes: int) -> None:
    """Raise CheckpointError unless features can take the place of a language model's embeddings.

    axes   that its positions must have; 0: one
    """
    if not isinstance(model, Decoder):
        from hmt.models.fallback.model import Fallback
        from hmt.models.fallback.whole import WholeForward

        assert isinstance(model, Fallback | WholeForward)
        model.check_embedded(axes=axes)
        return
    if model.spec.row_lookups:
        raise CheckpointError("its layers look tokens up by themselves")
    if axes and not model.rotaries:
        raise CheckpointError("its language model has no rotary positions")
    for rotary in model.rotaries if axes else ():
        rotary.axes()


def _processor(folder: Path) -> Any:
    """transformers' image processor, by Pillow and numpy: the same wherever torchvision is."""
    from transformers import AutoImageProcessor

    for name in _PROCESSORS:
        read_object(folder / name)  # raises where it has no bounded size
    processor = AutoImageProcessor.from_pretrained(
        str(folder), backend="pil", local_files_only=True, trust_remote_code=False
    )
    for name in ("size", "crop_size"):
        for key, value in dict(getattr(processor, name, None) or {}).items():
            most = _MOST_SIDE if key in ("height", "width") else _MOST_SIDE**2
            if value is not None and not 0 < value <= most:
                raise ValueError(f"{name} of its image processor has {key} {value}")
    return processor


def _check_processor(encoder: Encoder, vision: Any, *, grid: bool) -> None:
    """Raise ValueError where the image processor prepares images for another tower."""
    pixels = encoder.prepare(torch.zeros(96, 64, 3, dtype=torch.uint8)).inputs["pixel_values"]
    if grid:
        wanted = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
        if pixels[0].numel() != wanted:
            raise ValueError(
                f"its image processor makes patches of {pixels[0].numel()}, not {wanted}"
            )
    elif pixels.shape != (1, 3, vision.image_size, vision.image_size):
        raise ValueError(f"its image processor makes images of {list(pixels.shape)}")


def _added(config: Any) -> int:
    """Layers behind which features are added (DeepStack)."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


def _grid_sizes(config: Any, processor: Any) -> TowerSizes:
    vision = config.vision_config
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    if config.vision_config.model_type != "qwen2_vl_vision":
        width = vision.hidden_size
    return TowerSizes(
        width=width,
        wide=getattr(vision, "intermediate_size", None) or int(4 * width),
        out_width=config.get_text_config().hidden_size * (1 + _added(config)),
        patch=vision.patch_size,
        most_patches=int(processor.size["longest_edge"]) // vision.patch_size**2,
        merge=vision.spatial_merge_size,
    )


def _plain_sizes(config: Any) -> TowerSizes:
    vision = config.vision_config
    first = 1 if vision.model_type == "clip_vision_model" else 0
    cut = 1 if config.vision_feature_select_strategy == "default" else 0
    return TowerSizes(
        width=vision.hidden_size,
        wide=vision.intermediate_size,
        out_width=config.get_text_config().hidden_size,
        patch=vision.patch_size,
        most_patches=(vision.image_size // vision.patch_size) ** 2,
        extra=first - cut,
    )


def _probed_sizes(config: Any, tree: Any, processing: Processing) -> TowerSizes:
    """By what the image processor makes of a large image.

    tree   transformers' model without numbers
    """
    vision = config.vision_config
    made = processing.made(torch.zeros(_PROBED, _PROBED, 3, dtype=torch.uint8))
    if "pixel_values" not in made:
        raise LookupError("its image processor makes no pixel_values")
    pixels = pixel_count(made)
    out_width = config.get_text_config().hidden_size
    if vision.model_type in _OF_TIMM:
        return _timm_sizes(tree, made["pixel_values"], out_width)
    parts = [vision, *(getattr(vision, name) for name in vision.sub_configs)]
    patch, width = _largest(parts, ("patch_size",)), _largest(parts, _WIDTHS)
    if not patch or not width:
        raise LookupError("its config.json does not say how large its encoder is")
    kept = getattr(config, "vision_feature_layer", -1) != -1
    return TowerSizes(
        width=width,
        wide=_largest(parts, ("intermediate_size", "mlp_dim")) or 4 * width,
        out_width=out_width * (1 + _added(config)),
        patch=patch,
        most_patches=pixels // (3 * patch**2),
        kept=_largest(parts, ("num_hidden_layers",)) if kept else 0,
        squares=2 if vision.model_type in _MASKED else 0,
    )


def _timm_sizes(tree: Any, pixels: torch.Tensor, out_width: int) -> TowerSizes:
    """Of an encoder of timm's, whose configuration says no more than a name: by calling it.

    tree   transformers' model without numbers
    """
    encoder = copy.deepcopy(next(m for m in tree.modules() if hasattr(m, "timm_model"))).to("meta")
    largest = 0

    def called(_: Any, __: Any, out: Any) -> None:
        nonlocal largest
        if isinstance(out, torch.Tensor):
            largest = max(largest, out.numel())

    for module in encoder.modules():
        module.register_forward_hook(called)
    encoder.timm_model.forward_features(pixels.to("meta").reshape(-1, *pixels.shape[-3:]))
    patches = pixels.numel() // (3 * _TIMM_PATCH**2)
    # A layer's result, what it is made of and one in between take less than 12 of `width`.
    width = -(-largest // (4 * patches))
    return TowerSizes(width, 0, out_width, _TIMM_PATCH, patches)


def _largest(parts: list[Any], names: tuple[str, ...]) -> int:
    """The largest of the sizes that configurations have by these names; 0 without any."""
    found = [getattr(part, name, None) for part in parts for name in names]
    sizes = [max(size) if isinstance(size, list | tuple) else size for size in found if size]
    return max((int(size) for size in sizes), default=0)
