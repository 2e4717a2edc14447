"""What transformers' model does with features of images, seen by calling it without numbers."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hmt.base.errors import CheckpointError

_ROWS = 4
_KINDS = ("token_type_ids", "mm_token_type_ids")
# What a language model may be called with besides embeddings, by any value.
_HARMLESS = ("use_cache", "return_dict", "past_key_values", "cache", "logits_to_keep")


class _Called(Exception):
    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


class _Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return ids[..., None].float().expand(*ids.shape, self.weight.shape[1]) + 0.5


def check_replaces(model: Any, text: Any, token: int) -> None:
    """Raise CheckpointError unless features replace embeddings of `token`, and change nothing else.

    Where the model gives its language model positions on three axes, these must be what its
    `get_rope_index` makes of tokens, types and grid.

    model   on the meta device, whose language model is `text`; as it was, when this returns
    """
    base = model.base_model
    if not hasattr(base, "get_image_features"):
        raise CheckpointError("transformers' model makes no features of images by themselves")
    width = model.config.get_text_config().hidden_size
    features = torch.arange(_ROWS * width, dtype=torch.float32).view(_ROWS, width) - 1e6
    ids = torch.tensor([[2, *[token] * _ROWS, 3]])
    more, positions = _surroundings(model, base, ids, token)
    forms: tuple[Any, ...] = (features[None], [features])
    for form in forms:
        try:
            given = _given(base, text, {"input_ids": ids} | more, form, width)
            break
        except CheckpointError:
            raise
        except Exception as error:  # of transformers' code
            failed = error
    else:
        raise CheckpointError(
            f"it takes more than pixels and features to be called ({failed!s:.80})"
        ) from failed
    wanted = _Embedding(width)(ids)[0]
    wanted[1 : 1 + _ROWS] = features
    found = given.pop("inputs_embeds", None)
    if found is None or found.shape[1:] != wanted.shape or not torch.equal(found[0], wanted):
        raise CheckpointError("its language model is given other numbers than features")
    for name, value in given.items():
        if value is None or value is False or name in _HARMLESS or name.startswith("output_"):
            continue
        if name in ("position_ids", "cache_position") and torch.equal(value.squeeze(), positions):
            continue
        raise CheckpointError(f"its language model is also given {name}")
    if positions.dim() > 1 and "position_ids" not in given:
        raise CheckpointError("its language model is not given the positions of its tokens")


def _surroundings(
    model: Any, base: Any, ids: Tensor, token: int
) -> tuple[dict[str, Tensor], Tensor]:
    """What `base` is called with beside tokens, and the positions that they then must have."""
    names = inspect.signature(base.forward).parameters
    find = getattr(base, "get_rope_index", None)
    if find is None:
        if odd := [name for name in _KINDS if name in names]:
            raise CheckpointError(f"what its tokens of images see is unknown here ({odd[0]})")
        taken = inspect.signature(base.get_image_features).parameters
        others = {
            n: torch.zeros(1, 3, 1, 1)
            for n, p in taken.items()
            if n in names and p.default is p.empty and p.kind is not p.VAR_KEYWORD
        }
        return {"pixel_values": torch.zeros(1, 3, 1, 1)} | others, torch.arange(ids.shape[1])
    asked = inspect.signature(find).parameters
    if not {"mm_token_type_ids", "image_grid_thw"} <= set(asked):
        raise CheckpointError("how its positions follow from images is unknown here")
    vision = model.config.vision_config
    side = 2 * int(getattr(vision, "spatial_merge_size", 1))
    more = {
        "mm_token_type_ids": (ids == token).int(),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }
    try:
        positions = find(ids, **more)[0].squeeze(1)
    except Exception as error:  # of transformers' code
        raise CheckpointError("how its positions follow from images is unknown here") from error
    if positions.shape != (3, ids.shape[1]):
        raise CheckpointError(f"its positions have {len(positions)} axes, and HMT computes with 3")
    return more | {"pixel_values": torch.zeros(1, 3, 1, 1)}, positions


def _given(
    base: Any, text: Any, inputs: dict[str, Tensor], features: Any, width: int
) -> dict[str, Any]:
    """What `text` is called with where an image has `features`."""
    out = BaseModelOutputWithPooling(pooler_output=features)

    def record(*args: Any, **kwargs: Any) -> None:
        raise _Called(
            dict(zip(inspect.signature(type(text).forward).parameters, args, strict=False)) | kwargs
        )

    table = text.get_input_embeddings()
    text.set_input_embeddings(_Embedding(width))
    base.get_image_features = lambda *_, **__: out
    text.forward = record
    try:
        base(**inputs)
    except _Called as called:
        return called.given
    finally:
        del text.forward, base.get_image_features
        text.set_input_embeddings(table)
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = None
    raise CheckpointError("its language model is not called")
