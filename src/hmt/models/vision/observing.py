"""What transformers' model does with features of images, seen by calling it without numbers."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hmt.base.errors import CheckpointError, RequestError
from hmt.models.vision.positions import RopeIndex
from hmt.models.vision.written_rows import Called, PlainTable, stopped_at

# Rows that may stand for a grid of 2 x 2 tokens: with some models a row has one more, an image two.
_ROWS = (4, 6, 8)
_KINDS = ("token_type_ids", "mm_token_type_ids")
# What a language model may be called with besides embeddings, by any value.
_HARMLESS = ("use_cache", "return_dict", "past_key_values", "cache", "logits_to_keep")
_AXES = (3, 4)


class FeaturesError(CheckpointError):
    """A model's forward pass asks its encoder for more than features."""


class _Made(BaseModelOutputWithPooling):  # type: ignore[misc]
    """What an encoder returns; by names that are unknown here, rows that no image has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        width = self["last_hidden_state"].shape[-1]
        return torch.arange(64 * width, dtype=torch.float32).view(64, width) - 2e6


def check_replaces(model: Any, text: Any, token: int) -> int:
    """Raise CheckpointError unless features replace embeddings of `token`, and change nothing else.

    Where the model gives its language model positions on several axes, these must be what its
    `get_rope_index` makes of tokens and grid.

    model   on the meta device, whose language model is `text`; as it was, when this returns
    Returns how many axes positions have; 0: they count tokens.
    """
    base = model.base_model
    if not hasattr(base, "get_image_features"):
        raise CheckpointError("transformers' model makes no features of images by themselves")
    width = model.config.get_text_config().hidden_size
    ids, positions, grid = _sample(model, base, token)
    given, features = _answer(base, text, _inputs(base, ids, token, grid), ids, token, width)
    wanted = PlainTable(width)(ids)[0]
    wanted[ids[0] == token] = features
    found = given.pop("inputs_embeds", None)
    if found is None or found.shape[1:] != wanted.shape or not torch.equal(found[0], wanted):
        raise CheckpointError("its language model is given other numbers than features")
    _check_others(given, positions)
    if positions.dim() > 1 and "position_ids" not in given:
        raise CheckpointError("its language model is not given the positions of its tokens")
    return len(positions) if positions.dim() > 1 else 0


def axes_of(model: Any, token: int) -> int:
    """How many axes positions have; 0: they count tokens.

    Raises CheckpointError where they do not follow from tokens and grid.
    """
    positions = _sample(model, model.base_model, token)[1]
    return len(positions) if positions.dim() > 1 else 0


def _sample(model: Any, base: Any, token: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens among which is an image, their positions, and the image's grid."""
    find = getattr(base, "get_rope_index", None)
    begins = getattr(model.config, "vision_start_token_id", None)
    front = [2, begins] if isinstance(begins, int) else [2]
    if find is None:
        ids = torch.tensor([[*front, *[token] * _ROWS[0], 3]])
        return ids, torch.arange(ids.shape[1]), None
    side = 2 * int(getattr(model.config.vision_config, "spatial_merge_size", 1))
    grid = torch.tensor([[1, side, side]])
    failed: Exception | None = None
    for rows in _ROWS:
        ids = torch.tensor([[*front, *[token] * rows, 3]])
        try:
            of_image = (ids[0] == token).int()
            positions = RopeIndex(find)(ids[0].tolist(), of_image, grid)
            break
        except (LookupError, RequestError) as error:
            failed = failed or error
    else:
        raise CheckpointError("how its positions follow from images is unknown here") from failed
    if len(positions) not in _AXES:
        raise CheckpointError(f"its positions have {len(positions)} axes, and HMT computes with 3")
    return ids, positions, grid


def _inputs(base: Any, ids: Tensor, token: int, grid: Tensor | None) -> dict[str, Tensor]:
    """What `base` is called with."""
    names = inspect.signature(base.forward).parameters
    taken = inspect.signature(base.get_image_features).parameters
    found = {
        n: torch.zeros(1, 3, 1, 1)
        for n, p in taken.items()
        if n in names and p.default is p.empty and p.kind is not p.VAR_KEYWORD
    }
    found |= {name: (ids == token).int() for name in _KINDS if name in names}
    if grid is not None:
        found["image_grid_thw"] = grid
    return found | {"input_ids": ids, "pixel_values": torch.zeros(1, 3, 1, 1)}


def _answer(
    base: Any, text: Any, inputs: dict[str, Tensor], ids: Tensor, token: int, width: int
) -> tuple[dict[str, Any], Tensor]:
    """What `text` is called with where an image has features, and these."""
    rows = int((ids == token).sum())
    features = torch.arange(rows * width, dtype=torch.float32).view(rows, width) - 1e6
    forms: tuple[Any, ...] = (features[None], [features])
    failed: Exception | None = None
    for form in forms:
        try:
            made = BaseModelOutputWithPooling(pooler_output=form)
            return _given(base, text, inputs, made, width), features
        except CheckpointError:
            raise
        except Exception as error:  # of transformers' code
            failed = error
    raise FeaturesError(
        f"it takes more than pixels and features to be called ({failed!s:.80})"
    ) from failed


def _is_causal(mask: Any) -> bool:
    """Whether each of a model's masks shows a token all before it, and no more."""
    masks = mask.values() if isinstance(mask, dict) else (mask,)
    for each in masks:
        if each is None:
            continue
        sees = each[0, 0] if each.dtype is torch.bool else each[0, 0] >= 0
        if not torch.equal(sees, torch.ones_like(sees).tril()):
            return False
    return True


def tokens_written(model: Any, text: Any, token: int) -> frozenset[int]:
    """Tokens in whose place a model writes what it makes of images, `token` among them.

    It is called with an encoder whose result is known, and linear layers behind that which make
    known numbers.  Raises CheckpointError where it changes anything else, or nothing.

    model   as `check_replaces` takes it
    """
    base, width = model.base_model, model.config.get_text_config().hidden_size
    lists = [v for name, v in model.config.to_dict().items() if name.endswith("token_ids")]
    others = [n for each in lists if isinstance(each, list) for n in each if isinstance(n, int)]
    ids = torch.tensor([[2, *others, *[token] * _ROWS[0], 3]])
    features = torch.arange(_ROWS[0] * width, dtype=torch.float32).view(1, -1, width) - 1e6
    made = _Made(pooler_output=features, last_hidden_state=features)
    inside = {id(module) for module in text.modules()}
    linear = [m for m in base.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    for module in linear:
        module.forward = partial(_known, module.out_features)  # type: ignore[method-assign]
    try:
        given = _given(base, text, _inputs(base, ids, token, None), made, width)
    except CheckpointError:
        raise
    except Exception as error:  # of transformers' code
        raise CheckpointError(
            f"it takes more than pixels and features to be called ({error!s:.80})"
        ) from error
    finally:
        for module in linear:
            del module.forward
    found = given.pop("inputs_embeds", None)
    plain = PlainTable(width)(ids)
    if found is None or found.shape != plain.shape:
        raise CheckpointError("its language model is not given embeddings")
    _check_others(given, torch.arange(ids.shape[1]))
    changed = (found != plain).any(-1)[0]
    written = frozenset(ids[0][changed].tolist())
    if token not in written or not written <= {token, *others}:
        raise CheckpointError("its language model is given other numbers than features")
    return written


def _known(width: int, x: Tensor) -> Tensor:
    return x[..., :1].float().expand(*x.shape[:-1], width)


def _check_others(given: dict[str, Any], positions: Tensor) -> None:
    """Raise CheckpointError for what a language model is given besides embeddings."""
    for name, value in given.items():
        if value is None or value is False or name in _HARMLESS or name.startswith("output_"):
            continue
        if name in ("position_ids", "cache_position") and torch.equal(value.squeeze(), positions):
            continue
        if name == "attention_mask":
            if _is_causal(value):
                continue
            raise CheckpointError("its tokens see those behind them, as HMT does not compute here")
        raise CheckpointError(f"its language model is also given {name}")


def _given(
    base: Any, text: Any, inputs: dict[str, Tensor], made: Any, width: int
) -> dict[str, Any]:
    """What `text` is called with where the encoder returns `made`."""
    base.get_image_features = lambda *_, **__: made
    try:
        with stopped_at(text, PlainTable(width)):
            base(**inputs)
    except Called as called:
        return called.given
    finally:
        del base.get_image_features
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = None
    raise CheckpointError("its language model is not called")
