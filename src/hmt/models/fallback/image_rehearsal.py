"""Looking at how a model of transformers takes features of images, whatever it makes of them.

Its own forward pass is given them where its encoder would have made them (`mm_encoder_outputs`).
As with tokens (`rehearsal`), it is run with made-up numbers over a short sequence, once as a whole
and once in parts that cut an image: both must give the same.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hmt.base.errors import CheckpointError
from hmt.base.log import logger
from hmt.contracts.step import Segment
from hmt.models.fallback.call_context import CallContext, in_context
from hmt.models.fallback.rehearsal import PARTS, TOKENS, call_base, differ, run_parts, some_tokens
from hmt.models.fallback.sequence_cache import SequenceCache
from hmt.models.fallback.whole_tree import Sight, WholeTree

_IMAGES = (range(5, 8), range(9, 11))  # tokens of each, of which PARTS cut one
_UNCUT = (range(4), range(4, 9), range(9, 11), range(11, 12))
_PLACES = [place for image in _IMAGES for place in image]
_TYPES = ("token_type_ids", "mm_token_type_ids")  # by which models hide less within an image
_WINDOWED = "sliding_attention"
_LAYERS = 3  # behind which features are added, in a model that adds any

Form = Callable[[Tensor], Any]
# How models take features of all images, and those that are added behind layers.
_FORMS: tuple[tuple[Form, Form], ...] = (
    (lambda rows: [rows], lambda rows: rows),
    (lambda rows: [rows], lambda rows: [rows]),
    (lambda rows: rows, lambda rows: rows),
    (lambda rows: rows[None], lambda rows: rows),
)


class _Features(BaseModelOutputWithPooling):  # type: ignore[misc]
    """What an encoder of images returns; the rest of it is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@dataclass(frozen=True)
class ImageCalls:
    """How a model's forward pass is called where tokens are of images.

    form     of features, in _FORMS
    added    features are added behind layers, too
    masks    by kind of mask, whether tokens of an image see each other there; "" stands for the
             only one; {}: no token sees a later one
    window   of masks called _WINDOWED
    """

    form: int
    added: bool
    masks: Mapping[str, bool] = field(default_factory=dict)
    window: int = 0

    def inputs(
        self, ids: Tensor, rows: Tensor, layers: tuple[Tensor, ...], run: Segment | None = None
    ) -> dict[str, Any]:
        """What it is called with.

        ids      int64 [1, tokens]
        rows     [features, hidden_size]: of those of the tokens that are of images, in order
        layers   the same, to be added behind layers
        run      of the tokens
        """
        whole, part = _FORMS[self.form]
        made = _Features(pooler_output=whole(rows), last_hidden_state=rows)
        if self.added:
            made["deepstack_features"] = [part(layer) for layer in layers]
        given = {"input_ids": ids, "mm_encoder_outputs": {"image": made}}
        if self.masks and run is not None and run.blocks:
            given["attention_mask"] = self._mask(run, rows.dtype)
        return given

    def _mask(self, run: Segment, dtype: torch.dtype) -> Any:
        """As attention takes it: what is added to scores, [1, 1, tokens, positions]."""
        at, other = torch.arange(run.start, run.context)[:, None], torch.arange(run.context)
        block = torch.zeros(len(at), run.context, dtype=torch.bool)
        for first, end in run.blocks:
            block |= ((at >= first) & (at < end)) & ((other >= first) & (other < end))
        found = {}
        for kind, sees in self.masks.items():
            seen = other <= at
            if kind == _WINDOWED and self.window:
                seen = seen & (other > at - self.window)
            seen = seen | block if sees else seen
            hidden = torch.zeros(seen.shape, dtype=dtype)
            found[kind] = hidden.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
        return found.get("", found)


def rehearse_images(tree: WholeTree, token: int, axes: int) -> ImageCalls:
    """How `tree` is called with features of images, for which tokens `token` stand.

    axes   of rotary positions; 0: they count tokens
    Raises CheckpointError where it does something else with them than step by step can be done.
    """
    names = inspect.signature(tree.base.forward).parameters
    if "mm_encoder_outputs" not in names:
        raise CheckpointError("transformers' model takes no features of images by themselves")
    failed: Exception | None = None
    for form in range(len(_FORMS)):
        try:
            return _tried(tree, ImageCalls(form, added=True), token, axes)
        except CheckpointError:
            raise
        except Exception as error:  # of transformers' code
            logger.debug("features are not taken so", exc_info=error)
            failed = failed or error
    raise CheckpointError(f"it does not take features of images ({failed!s:.80})") from failed


def _tried(tree: WholeTree, calls: ImageCalls, token: int, axes: int) -> ImageCalls:
    names = inspect.signature(tree.base.forward).parameters
    types = next((name for name in _TYPES if name in names), None)
    ids = some_tokens(tree, torch.arange(TOKENS))
    ids[_PLACES] = token
    width = tree.model.config.get_text_config().hidden_size
    waves = torch.arange(1, 1 + len(_PLACES) * width, dtype=torch.float32).view(-1, width).sin()
    rows = waves.to(tree.model.dtype)
    blocks = tuple((image.start, image.stop) for image in _IMAGES)

    def part(calls: ImageCalls, rows: Tensor) -> Callable[[range], dict[str, Any]]:
        def inputs(at: range) -> dict[str, Any]:
            own = [number for number, place in enumerate(_PLACES) if place in at]
            tokens = ids[at.start : at.stop][None]
            if not own:
                return {"input_ids": tokens}
            added = tuple(rows[own] * (2 + n) for n in range(_LAYERS))
            run = Segment(0, at.start, 0, len(at), blocks=blocks)
            return calls.inputs(tokens, rows[own], added, run)

        return inputs

    with torch.no_grad():
        if types is not None:
            text = tree.model.config.get_text_config()
            window = int(getattr(text, "sliding_window", None) or 0)
            masks = _masks(tree, types, ids == token, part(calls, rows), axes, window)
            calls = replace(calls, masks=masks, window=window)
        whole, _ = run_parts(tree, [range(TOKENS)], Sight(), part(calls, rows), axes)
        other, _ = run_parts(tree, [range(TOKENS)], Sight(), part(calls, rows.flip(0)), axes)
        try:
            bare = part(replace(calls, added=False), rows)
            alone, _ = run_parts(tree, [range(TOKENS)], Sight(), bare, axes)
            if not differ(whole, alone):
                calls = replace(calls, added=False)
        except Exception as error:  # of transformers' code, which wants them
            logger.debug("features are added behind layers", exc_info=error)
        cut = _UNCUT if any(calls.masks.values()) else PARTS
        parts, _ = run_parts(tree, cut, Sight(), part(calls, rows), axes)
    if not differ(whole[:, _PLACES], other[:, _PLACES]):
        raise CheckpointError("its language model is given other numbers than features")
    if differ(whole, parts):
        raise CheckpointError("its tokens of images depend on more than what came before them")
    return calls


def _masks(
    tree: WholeTree,
    types: str,
    of_image: Tensor,
    inputs: Callable[[range], dict[str, Any]],
    axes: int,
    window: int,
) -> dict[str, bool]:
    """Which masks hide less where a model is told by `types` which tokens are of images."""
    given = inputs(range(TOKENS))
    given[types] = of_image[None].int()
    positions = torch.arange(TOKENS)
    seen: list[Any] = []
    text = cast(PreTrainedModel, tree.base).get_decoder()

    def noted(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("attention_mask"))

    hook = text.register_forward_pre_hook(noted, with_kwargs=True)
    try:
        cache = SequenceCache(tree.model.config, 0, lambda layer: ())
        work = CallContext(None, record=Sight(), lengths=positions + 1)
        with in_context(work):
            places = positions.expand(axes, -1) if axes else positions
            call_base(tree, given, places, cache)
    finally:
        hook.remove()
    if not seen or seen[0] is None:
        return {}
    found = seen[0] if isinstance(seen[0], dict) else {"": seen[0]}
    at, other = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    block = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for image in _IMAGES:
        block[image.start : image.stop, image.start : image.stop] = True
    masks = {}
    for kind, mask in found.items():
        if mask is None:  # as causal masks are where the attention knows it
            masks[kind] = False
            continue
        usual = other <= at
        if kind == _WINDOWED and window:
            usual = usual & (other > at - window)
        sees = mask[0, 0] if mask.dtype is torch.bool else mask[0, 0] >= 0
        if not torch.equal(sees, usual) and not torch.equal(sees, usual | block):
            raise CheckpointError("what its tokens of images see is unknown here")
        masks[kind] = not torch.equal(sees, usual)
    return masks if any(masks.values()) else {}
