"""Rotary positions of tokens of images, on several axes, as transformers' models make them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from hmt.base.errors import RequestError

_KINDS: Final = "mm_token_type_ids"
_SECONDS: Final = "second_per_grid_ts"


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
        self._kinds, self._timed = _KINDS in taken, _SECONDS in taken

    def __call__(
        self,
        tokens: list[int],
        kinds: Tensor,
        images: Tensor | None,
        videos: Tensor | None = None,
        *,
        grid_s: Sequence[float] = (),
    ) -> Tensor:
        """Positions int64 [axes, tokens].

        kinds            int32 [tokens]: what a token stands for a row of: 1 an image, 2 a video
        images, videos   int64 [count, 3]: patches in time, height and width; None: there are none
        grid_s           seconds between rows in time, of each video
        Raises RequestError for tokens among which images cannot stand.
        """
        ids = torch.tensor([tokens])
        more = {_KINDS: kinds[None]} if self._kinds else {"attention_mask": torch.ones_like(ids)}
        for name, grids in (("image_grid_thw", images), ("video_grid_thw", videos)):
            if grids is not None:
                more[name] = grids
        if grid_s and self._timed:
            more[_SECONDS] = torch.tensor(grid_s)
        try:
            found, _ = self._find(ids, **more)
            positions: Tensor = found[:, 0].long()
        except Exception as error:  # of transformers' code, by tokens that it looks for
            raise RequestError(
                f"positions of images do not follow from the prompt ({error!s:.100}): let tokens "
                "that begin and end images, videos and sound stand around images only"
            ) from error
        if positions.shape[1] != len(tokens):
            raise RequestError("positions of images do not follow from the prompt")
        return positions
