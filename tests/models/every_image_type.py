"""A small random model of every type that transformers has for images and text, asked about images.

Each is made of its type's own defaults, as those of `every_type`, with small towers and image
processors; what else its code needs is written down below.
"""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import every_type
import torch
import transformers
from image_type_configs import (
    ADDED,
    ALIKE,
    AROUND,
    FIRST,
    IMAGES,
    MORE,
    NAMED,
    NAMES,
    PROCESSOR,
    ROW,
    SIDE,
    TOWER,
    VISION,
    VOCABULARY,
)
from PIL import Image
from transformers import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from vision_models import BEGIN, END, IMAGE, logprobs_of, picture, scored_request

import hmt
from hmt.base.errors import HMTError


@dataclass(frozen=True)
class Outcome:
    """What became of a type.

    kind   "equal" has transformers' numbers; "refused" was refused, with `reason`; "unbuilt" is
           not built so small, or not asked, by transformers itself; "wrong" should not be
    """

    model_type: str
    kind: str
    reason: str = ""


def types() -> tuple[str, ...]:
    """Every model_type of images and text."""
    return tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def config_of(kind: str) -> Any:
    """A small configuration."""
    made = CONFIG_MAPPING[kind]
    base = made()
    fields = every_type._small(base)
    _lengthen(fields)
    for name in base.sub_configs:
        inner = getattr(base, name, None)
        if inner is None or not hasattr(inner, "to_dict"):
            continue
        if "vision" in name or "image" in name:
            fields[name] |= {
                key: _like(getattr(inner, key), size)
                for key, size in TOWER.items()
                if getattr(inner, key, None) is not None and key in inner.to_dict()
            }
            fields[name] |= VISION.get(kind, {})
        elif name == "text_config":
            fields[name]["vocab_size"] = VOCABULARY
    named = NAMED | {name: _row(kind) for name in NAMED if name.startswith("image_token_")}
    for name, token in named.items():
        if isinstance(getattr(base, name, None), int):
            fields[name] = token
    if "text_config" not in base.sub_configs:
        fields["vocab_size"] = VOCABULARY
    for name, value in [*every_type._MORE.get(kind, {}).items(), *MORE.get(kind, {}).items()]:
        own = fields.get(name)
        fields[name] = own | value if isinstance(own, dict) else value
    config = made(**fields)
    config._attn_implementation = "eager"
    return config


def _lengthen(fields: dict[str, Any]) -> None:
    """Room for images, in each configuration."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _lengthen(value)
        elif value == every_type._SMALL["max_position_embeddings"] and "embeddings" in name:
            fields[name] = 2048


def _row(kind: str) -> int:
    """The token of a row of features."""
    return FIRST + ADDED.index(ROW[kind]) if kind in ROW else IMAGE


def _like(value: Any, size: Any) -> Any:
    """`size`, for each direction where the default has several."""
    if isinstance(value, list | tuple) and isinstance(size, int):
        return [size] * len(value)
    return size


def model_of(kind: str) -> Any:
    """In f32, with random numbers."""
    config = config_of(kind)
    made = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    torch.manual_seed(len(kind))
    model = made(config).float().eval()
    with torch.no_grad():
        for param in model.parameters():
            if not torch.isfinite(param).all():
                param.zero_()
            param.add_(torch.randn_like(param), alpha=0.1)
    model.tie_weights()
    return model


def images_of(kind: str, config: Any) -> dict[str, Any]:
    """preprocessor_config.json: the defaults of its image processor, for small images."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {}
    name = names.get("pil") or names.get("torchvision")
    if name is None:
        return {"image_processor_type": "Qwen2VLImageProcessor"} | IMAGES.get(kind, {})
    fields: dict[str, Any] = {"image_processor_type": name.removesuffix("Pil")}
    made = getattr(transformers, name, None)
    if getattr(made, "is_dummy", False):  # of a library that is not there
        return fields | IMAGES.get(kind, {})
    for field in ("size", "crop_size", "max_image_size"):
        size = getattr(made, field, None) if made else None
        if size is not None:
            fields[field] = _size(dict(size) if not isinstance(size, int) else size)
    vision = getattr(config, "vision_config", None)
    for field in ("patch_size", "temporal_patch_size"):
        if made and getattr(made, field, None) is not None:
            fields[field] = getattr(vision, field, None) or getattr(made, field)
    for field in ("min_pixels", "max_pixels"):
        if made and getattr(made, field, None) is not None:
            fields[field] = 256 if field[1] == "i" else 4096
    return fields | IMAGES.get(kind, {})


def _size(size: Any) -> Any:
    if not isinstance(size, dict):
        return SIDE
    if set(size) == {"shortest_edge", "longest_edge"} and size["shortest_edge"] >= 3000:
        return {"shortest_edge": 256, "longest_edge": 4096}  # pixels
    return {key: value and SIDE for key, value in size.items()}


def publish(kind: str, model: Any, folder: Path) -> None:
    """Write a checkpoint with everything that images need."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    images = images_of(kind, model.config)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    if kind in PROCESSOR:
        (folder / "processor_config.json").write_text(json.dumps(PROCESSOR[kind]))
    tokenizer = json.loads(
        (files("hmt") / "embedded" / "mini-dense" / "tokenizer.json").read_text()
    )
    for number, name in enumerate(ADDED):
        token = dict(tokenizer["added_tokens"][0], id=FIRST + number, content=name, special=True)
        tokenizer["added_tokens"].append(token)
    named = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {
        "image_token": IMAGE, "boi_token": BEGIN, "eoi_token": END, "start_image_token": BEGIN,
        "end_image_token": END, "context_image_token": IMAGE, "video_token": 7, "audio_token": 3,
        "boa_token": 1, "eoa_token": 2, "image_start_token": BEGIN, "image_end_token": END,
        "image_break_token": 3, "vision_bos_token": BEGIN, "vision_eos_token": END,
        "pad_token": 0,
    }  # fmt: skip
    names |= {name: FIRST + ADDED.index(word) for name, word in NAMES.get(kind, {}).items()}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "extra_special_tokens": {k: named[n] for k, n in names.items()},
            }
        )
    )


@torch.inference_mode()
def reference_logits(model: Any, processing: Any, tokens: list[int], images: Any) -> torch.Tensor:
    """transformers' logits of `tokens`, in which images are written: f32 [tokens, vocabulary]."""
    known = inspect.signature(model.forward).parameters
    known = dict(known) | dict(inspect.signature(model.base_model.forward).parameters)
    inputs = dict(_processed(processing, images))
    ids = torch.tensor([tokens])
    inputs["attention_mask"] = torch.ones_like(ids)
    if "mm_token_type_ids" in known:
        inputs["mm_token_type_ids"] = (ids == processing.token).int()
    if "token_type_ids" in known:
        inputs["token_type_ids"] = (ids == processing.token).int()
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            inputs[name] = value.to(model.dtype)
    names = [n for n in inputs if n in known and n != "input_ids"]
    seen: list[Any] = []
    hook = model.get_decoder().register_forward_hook(lambda *called: seen.append(called[2]))
    try:
        out = model(input_ids=ids, **{n: inputs[n] for n in names}, use_cache=False)
    except AttributeError:  # Llama 4's, behind its language model
        out = seen[0]
    finally:
        hook.remove()
    logits: torch.Tensor = out.logits[0].float()
    return logits


def _processed(processing: Any, images: list[Image.Image]) -> Any:
    """What transformers' processor makes of all images at once."""
    processor = processing._processor
    if not hasattr(processor, "tokenizer"):
        side = getattr(processing, "_side", None)
        more = {"patch_size": {"height": side, "width": side}} if side else {}
        return processor(images=images, return_tensors="pt", **more)
    options = {"text": [processing._place * len(images)], "padding": False, "return_tensors": "pt"}
    try:
        return processor(images=images, **options)
    except ValueError:  # it takes images by prompt
        return processor(images=[images], **options)


def outcome_of(kind: str, folder: Path) -> Outcome:
    """Build it, and ask it about two images, and about one, beside transformers."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        model = model_of(kind)
        publish(kind, model, folder)
    except Exception as error:
        return Outcome(kind, "unbuilt", repr(error)[:300])
    options = {"host_memory": "1GiB", "dtype": "float32", "context": 2048, "max_batch": 1}
    with hmt.Engine(**options, max_prefill_tokens=256, threads=1) as engine:
        try:
            loaded = engine.load_model(folder)
        except HMTError as error:
            said = str(error).split("config.json: ")[-1].replace(str(folder), "the checkpoint")
            return Outcome(kind, "refused", said)
        if why := loaded._input.images_refused:
            return Outcome(kind, "refused", why)
        pictures = (picture(37, 21), picture(*((37, 21) if kind in ALIKE else (18, 50)), 1))
        try:
            apart, allowed = _difference(kind, loaded, model, pictures)
            if apart <= allowed:
                return Outcome(kind, "equal")
            # Some of transformers' towers compute other numbers of several images at once.
            alone, allowed = _difference(kind, loaded, model, pictures[:1])
        except Exception as error:
            return Outcome(kind, "unbuilt", repr(error)[:300])
    if alone <= allowed:
        return Outcome(kind, "equal", "transformers computes others of several images together")
    return Outcome(kind, "wrong", f"{apart:.1e} apart, {allowed:.1e} allowed")


def _difference(
    kind: str, loaded: Any, model: Any, images: tuple[Image.Image, ...]
) -> tuple[float, float]:
    """How far log-probabilities of text and images are apart, and how far they may be."""
    processing = loaded._input._prepared.model.encoder._processing
    prompt = [300, 17]
    for number, _ in enumerate(images):
        begin, end = ([BEGIN], [END]) if kind in AROUND else ([], [])
        prompt += [*begin, processing.mark, *end, 81 + number, 2000]
    request = scored_request(prompt, images, max_new_tokens=3)
    answer = loaded.infer(request)
    tokens = [*loaded._input.process(request, None).state.tokens, *answer.token_ids]
    wanted = reference_logits(model, processing, tokens, list(images))
    own = _logprobs(wanted, tokens)
    apart = float((torch.tensor(logprobs_of(answer)) - own).abs().max())
    allowed = 1e-4 * max(1.0, float(wanted.std()))
    if apart > allowed:  # as far as transformers' f32 is from its f64
        other = reference_logits(model.double(), processing, tokens, list(images))
        model.float()
        allowed = max(allowed, min(1e-3, 2 * float((_logprobs(other, tokens) - own).abs().max())))
    return apart, allowed


def _logprobs(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Of each token behind the first."""
    return logits[: len(tokens) - 1].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


def table(outcomes: Sequence[Outcome]) -> str:
    """What became of each type, in Markdown."""
    equal = [o for o in outcomes if o.kind == "equal"]
    others = [o for o in outcomes if o.kind != "equal"]
    bare = [o.model_type for o in equal if not needs_torchvision(o.model_type)]
    more = [o.model_type for o in equal if needs_torchvision(o.model_type)]
    alone = [o.model_type for o in equal if o.reason]
    rows = [f"| {o.model_type} | {_clause(o)} |" for o in others]
    return "\n".join(
        [
            f"With transformers {transformers.__version__}, by `model_type`: {len(equal)} of "
            f"{len(outcomes)} types see images.",
            "",
            f"**Equal to transformers** ({len(bare)}):",
            "",
            *every_type.by_initial(bare),
            "",
            f"**Equal, where torchvision is installed** ({len(more)}), since their image "
            "processors have no version for Pillow:",
            "",
            *every_type.by_initial(more),
            "",
            f"Of {', '.join(alone) or 'none'} transformers computes other numbers where a prompt "
            "has several images than of each alone; HMT encodes each alone.",
            "",
            f"**Refused, or not tried** ({len(others)}):",
            "",
            "| type | why |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def needs_torchvision(kind: str) -> bool:
    """Whether transformers prepares its images by torchvision alone."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind) or {"pil": ""}
    return "pil" not in names


def _clause(outcome: Outcome) -> str:
    if outcome.kind == "unbuilt":
        return "not tried: transformers builds none of random numbers in this size"
    reason = outcome.reason.partition("either: ")[2] or outcome.reason
    for said in ("images are refused: ", "its encoder of images cannot be made "):
        reason = reason.rpartition(said)[2]
    said = " ".join(reason.split()).replace("|", "/")
    if said.startswith("("):
        said = said[1:-1]
    return said.partition("; their names begin")[0]
