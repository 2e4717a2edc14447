"""What a model of transformers writes in the place of tokens of an image, where that is its own.

Some models' encoders return what only their forward pass makes features of (Llama 4), or features
of tokens around an image's rows as well (Ovis 2).  It is called up to its language model then.
"""

import inspect
from collections.abc import Iterator, Set
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Called(Exception):
    """Ends a forward pass at the language model.

    given   by name, what that is called with
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given


class PlainTable(nn.Module):
    """In place of a table of embeddings: each token has the same numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] to f32 [..., width]."""
        return ids[..., None].float().expand(*ids.shape, self.weight.shape[1]) + 0.5


@contextmanager
def stopped_at(text: Any, table: PlainTable) -> Iterator[None]:
    """In the body a call of `text` raises Called, and its embeddings are those of `table`."""

    def record(*args: Any, **kwargs: Any) -> None:
        names = inspect.signature(type(text).forward).parameters
        raise Called(dict(zip(names, args, strict=False)) | kwargs)

    own = text.get_input_embeddings()
    text.set_input_embeddings(table)
    text.forward = record
    try:
        yield
    finally:
        del text.forward
        text.set_input_embeddings(own)


class Written:
    """In place of a model's `get_image_features`: features of each of some tokens."""

    def __init__(self, base: Any, text: Any, tokens: Set[int]) -> None:
        """`text` is the language model of `base`."""
        self._base, self._text = base, text
        self._tokens = torch.tensor(sorted(tokens))
        self._table = PlainTable(text.get_input_embeddings().weight.shape[1])
        self._takes = inspect.signature(base.forward).parameters

    def __call__(self, input_ids: Tensor, return_dict: bool = True, **inputs: Any) -> Any:
        """What is written in the place of tokens of `input_ids` int64 [1, tokens].

        Its `pooler_output` is [rows, hidden_size], in order.
        """
        given = {name: value for name, value in inputs.items() if name in self._takes}
        where = given["pixel_values"].device
        found: Tensor | None = None
        with stopped_at(self._text, self._table):
            try:
                self._base(input_ids=input_ids.to(where), **given)
            except Called as called:
                found = called.given["inputs_embeds"]
        assert found is not None
        of_image = torch.isin(input_ids[0], self._tokens).to(where)
        return SimpleNamespace(pooler_output=found[0][of_image])
