"""What transformers' model does with features of images, seen by calling it without numbers."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hmt.base.errors import CheckpointError

_ROWS = 3
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

    model   on the meta device, whose language model is `text`; as it was, when this returns
    """
    base = model.base_model
    names = inspect.signature(base.forward).parameters
    odd = [name for name in ("token_type_ids", "mm_token_type_ids") if name in names]
    if odd or hasattr(base, "get_rope_index"):
        raise CheckpointError("what its tokens of images see, or their positions, are unknown here")
    width = model.config.get_text_config().hidden_size
    features = torch.arange(_ROWS * width, dtype=torch.float32).view(_ROWS, width) - 1e6
    ids = torch.tensor([[2, *[token] * _ROWS, 3]])
    forms: tuple[Any, ...] = (features[None], [features])
    for form in forms:
        try:
            given = _given(base, text, ids, form, width)
            break
        except CheckpointError:
            raise
        except Exception as error:  # of transformers' code
            failed = error
    else:
        raise CheckpointError("it takes more than pixels and features to be called") from failed
    wanted = _Embedding(width)(ids)[0]
    wanted[1 : 1 + _ROWS] = features
    found = given.pop("inputs_embeds", None)
    if found is None or found.shape[1:] != wanted.shape or not torch.equal(found[0], wanted):
        raise CheckpointError("its language model is given other numbers than features")
    order = torch.arange(ids.shape[1])
    for name, value in given.items():
        if value is None or value is False or name in _HARMLESS or name.startswith("output_"):
            continue
        if name in ("position_ids", "cache_position") and torch.equal(value.flatten(), order):
            continue
        raise CheckpointError(f"its language model is also given {name}")


def _given(base: Any, text: Any, ids: Tensor, features: Any, width: int) -> dict[str, Any]:
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
        base(input_ids=ids, pixel_values=torch.zeros(1, 3, 1, 1))
    except _Called as called:
        return called.given
    finally:
        del text.forward, base.get_image_features
        text.set_input_embeddings(table)
    raise CheckpointError("its language model is not called")
