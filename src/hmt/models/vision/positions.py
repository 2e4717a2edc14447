"""Rotary positions of tokens of images, on several axes, as transformers' models make them."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from hmt.base.errors import RequestError

_KINDS: Final = "mm_token_type_ids"


class RopeIndex:
    """A model's `get_rope_index`, in whichever way it knows images.

    By the kinds of tokens, or by the tokens in front of them alone, as Qwen2.5-Omni's.
    """

    def __init__(self, find: Callable[..., Any]) -> None:
        """Raises LookupError for one that asks for something else."""
        taken = inspect.signature(find).parameters
        if not {"input_ids", "image_grid_thw"} <= set(taken):
            raise LookupError("positions do not follow from tokens and grids")
        self._find = find
        self._kinds = _KINDS in taken

    def __call__(self, tokens: list[int], of_image: Tensor, grids: Tensor) -> Tensor:
        """Positions int64 [axes, tokens].

        of_image   int32 [tokens]: 1 where a token stands for a row of features
        grids      int64 [images, 3]: patches in time, height and width
        Raises RequestError for tokens among which images cannot stand.
        """
        ids = torch.tensor([tokens])
        more = {_KINDS: of_image[None]} if self._kinds else {"attention_mask": torch.ones_like(ids)}
        try:
            found, _ = self._find(ids, image_grid_thw=grids, **more)
            positions: Tensor = found[:, 0].long()
        except Exception as error:  # of transformers' code, by tokens that it looks for
            raise RequestError(
                f"positions of images do not follow from the prompt ({error!s:.100}): let tokens "
                "that begin and end images, videos and sound stand around images only"
            ) from error
        if positions.shape[1] != len(tokens):
            raise RequestError("positions of images do not follow from the prompt")
        return positions
