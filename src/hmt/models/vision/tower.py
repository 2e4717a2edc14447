"""transformers' vision tower and projector, whose parts lease their weights one after the other."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hmt.base.errors import RequestError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.image import ImageFeatures
from hmt.contracts.store import Weights
from hmt.models.fallback.blocks import own_params, put
from hmt.models.fallback.call_context import CallContext, in_context
from hmt.models.fallback.key_map import Published
from hmt.models.fallback.modules import Unit, Value


class Tower:
    """What of a model of transformers makes features of images.

    Its modules hold no numbers.  Each layer, and each other part, is a block: a call leases it,
    and lets it go before the next one is leased.  Weights are computed with as they were
    published, in the activations' dtype.
    """

    def __init__(self, model: Any, text: str, published: Published) -> None:
        """`text` is the path of the language model in `model`, which is on the meta device.

        Raises LookupError for a part that cannot be cut into blocks.
        """
        self._model = model
        parts = [name for name in _parts(model, text)]
        blocks = []
        for number, path in enumerate(parts):
            module = model.get_submodule(path)
            unit = Unit(module, path)
            unit.block = BlockId(TRUNK, BlockKind.VISION, number)
            specs: list[ParamSpec] = []
            for name, tensor in _tensors(module):
                if not published.whole(f"{path}.{name}"):
                    raise LookupError(f"{path}.{name} is published in an unknown form")
                held = published.specs(f"{path}.{name}", name, Role.VECTOR)
                names = tuple(spec.name for spec in held)
                unit.values[name] = Value(names, tuple(tensor.shape), tensor.dtype)
                specs += held
            blocks.append(BlockSpec(unit.block, tuple(specs)))
            put(model, path, unit)
        self.blocks = tuple(blocks)

    @torch.inference_mode()
    def features(
        self, inputs: Mapping[str, Tensor], weights: Weights, tokens: int
    ) -> ImageFeatures:
        """Features of one image.  Raises RequestError where these are not `tokens` rows."""
        with in_context(CallContext(weights)):
            out = self._model.get_image_features(**inputs, return_dict=True)
        rows = _rows(out.pooler_output)
        if len(rows) != tokens:
            raise RequestError(
                f"the model's tower makes {len(rows)} rows of an image that {tokens} tokens stand "
                "for: its preprocessor_config.json does not belong to its config.json"
            )
        layers = getattr(out, "deepstack_features", None) or ()
        return ImageFeatures(rows, tuple(map(_rows, layers)))


def _rows(features: Any) -> Tensor:
    """Features of one image, as [tokens, hidden_size]."""
    joined = features if isinstance(features, Tensor) else torch.cat(list(features))
    return joined.reshape(-1, joined.shape[-1])


def _parts(model: nn.Module, text: str) -> Iterator[str]:
    """Paths of modules that are leased whole: layers of lists, and what has none in it."""
    output = model.get_output_embeddings()  # type: ignore[operator]
    for path, module in model.named_children():
        if module is not output:
            yield from _inside(module, path, text)


def _inside(module: nn.Module, path: str, text: str) -> Iterator[str]:
    if path == text or next(_tensors(module), None) is None:
        return
    holds_text = text.startswith(f"{path}.")
    lists = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
    if not lists and not holds_text:
        yield path
        return
    if own_params(module):
        raise LookupError(f"{path} has parameters ({', '.join(own_params(module))}) and layers")
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList):
            if next(_tensors(child), None) is not None:
                yield f"{path}.{name}"
        else:
            yield from _inside(child, f"{path}.{name}", text)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that checkpoints have, by name."""
    for path, inner in module.named_modules():
        for name in own_params(inner):
            tensor = inner._parameters.get(name)
            held = inner._buffers[name] if tensor is None else tensor
            assert held is not None
            yield (f"{path}.{name}" if path else name), held
