"""transformers' vision tower and projector, whose parts lease their weights one after the other."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn import functional

from hmt.base.errors import RequestError
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.image import ImageFeatures
from hmt.contracts.store import Weights
from hmt.kernels.backend_registry import backend_on
from hmt.models.fallback.blocks import own_params, put
from hmt.models.fallback.call_context import CallContext, in_context
from hmt.models.fallback.device_cache import place_of
from hmt.models.fallback.key_map import Published
from hmt.models.fallback.modules import Unit, Value
from hmt.models.vision.written_rows import Written

_IDS: Final = "input_ids"


class Tower:
    """What of a model of transformers makes features of images.

    Its modules hold no numbers.  Each layer, and each other part, is a block: a call leases it,
    and lets it go before the next one is leased.  Weights are computed with as they were
    published, in the activations' dtype, where they lie.

    takes       names of what is known of an image, by which features are asked for
    needs       those of them without which there are none
    own_bytes   of parameters that are copied while features are computed
    """

    def __init__(
        self, model: Any, text: str, published: Published, written: Set[int] = frozenset()
    ) -> None:
        """`text` is the path of the language model in `model`, which is on the meta device.

        written   tokens in whose place the model puts what it makes of an image behind its encoder
                  (Llama 4, Ovis 2); none: features are all that there is

        Raises LookupError for a part that cannot be cut into blocks.
        """
        self._model = model
        base = model.base_model  # whose parameters are named; others pass them on
        whole = base if hasattr(base, "get_image_features") else model
        self._features = whole.get_image_features
        self._video_features = getattr(whole, "get_video_features", None)
        self._text = text
        self._width = model.config.get_text_config().hidden_size
        for module in model.modules():
            if isinstance(module, nn.Conv3d):
                module.forward = partial(_convolved, module, module.forward)  # type: ignore[method-assign]
        params = inspect.signature(self._features).parameters
        self.takes = tuple(params)
        self.needs = tuple(
            n for n, p in params.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        )
        if written:
            self.takes += (_IDS,)
            self._features = Written(model.base_model, model.get_submodule(text), written)
        self._own: list[tuple[nn.Module, BlockId, dict[str, Value]]] = []
        self.own_bytes = 0
        blocks = []
        for number, (path, whole) in enumerate(list(_parts(model, text))):
            module = model.get_submodule(path)
            block = BlockId(TRUNK, BlockKind.VISION, number)
            tensors = dict(_tensors(module) if whole else _direct(module))
            specs: list[ParamSpec] = []
            values: dict[str, Value] = {}
            for name, tensor in tensors.items():
                if not published.whole(f"{path}.{name}", ordered=True):
                    raise LookupError(f"{path}.{name} is published in an unknown form")
                held = published.specs(f"{path}.{name}", name, Role.VECTOR)
                names = tuple(spec.name for spec in held)
                order = published.orders.get(f"{path}.{name}")
                values[name] = Value(names, tuple(tensor.shape), tensor.dtype, order)
                specs += held
            blocks.append(BlockSpec(block, tuple(specs)))
            if whole:
                unit = Unit(module, path)
                unit.block, unit.values = block, values
                put(model, path, unit)
            else:
                self._own.append((module, block, values))
                self.own_bytes += sum(tensor.nbytes for tensor in tensors.values())
        self.blocks = tuple(blocks)

    @torch.inference_mode()
    def features(
        self, inputs: Mapping[str, Tensor], weights: Weights, tokens: int
    ) -> ImageFeatures:
        """Features of one image or video, in host memory.

        Raises RequestError where these are not `tokens` rows.
        """
        dtype = self._model.dtype
        with weights.lease(self.blocks[0].id) as params:
            where = place_of(params)
        given = {name: value.to(where) for name, value in inputs.items()}
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
        if _IDS in given:
            given[_IDS] = given[_IDS].cpu()
        with ExitStack() as after:
            self._with_own(weights, after)
            if not backend_on(where).on_host:
                after.enter_context(_exact_convolutions())
                self._with_buffers(where, after)
            after.enter_context(in_context(CallContext(weights, place=where)))
            of_video = "pixel_values_videos" in given
            asked = self._video_features if of_video else self._features
            assert asked is not None
            out = asked(**given, return_dict=True)
        rows = _rows(out.pooler_output)
        if len(rows) != tokens:
            raise RequestError(
                f"the model's tower makes {len(rows)} rows of an image that {tokens} tokens stand "
                "for: its preprocessor_config.json does not belong to its config.json"
            )
        if rows.shape[1] != self._width:
            raise RequestError(
                f"the model's tower makes features of {rows.shape[1]} numbers, and its embeddings "
                f"have {self._width}: its config.json does not belong to its weights"
            )
        layers = getattr(out, "deepstack_features", None) or ()
        return ImageFeatures(rows.cpu(), tuple(_rows(layer).cpu() for layer in layers))

    def _with_own(self, weights: Weights, after: ExitStack) -> None:
        """Until `after`, let modules that have layers hold copies of their own few parameters."""
        for module, block, values in self._own:
            with weights.lease(block) as params:
                copies = {name: value.of(params).clone() for name, value in values.items()}
            for name, copy in copies.items():
                held: dict[str, Any] = module._buffers
                if name in module._parameters:
                    held = module._parameters
                after.callback(held.__setitem__, name, held[name])
                held[name] = copy

    def _with_buffers(self, where: torch.device, after: ExitStack) -> None:
        """Until `after`, let what is around the layers find what no checkpoint has on `where`."""
        for module in _around(self._model, self._text):
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != where:
                    after.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = buffer.to(where)


def _convolved(conv: nn.Conv3d, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A convolution; of patches as large as its kernel, the product that it is.

    For 4096 patches and 320 numbers of each two cores take 0.57 s for the convolution in bf16, and
    0.026 s for the product.
    """
    if x.shape[2:] != conv.kernel_size or any(conv.padding):
        return forward(x)
    out = functional.linear(x.flatten(1), conv.weight.flatten(1), conv.bias)
    return out[..., None, None, None]


def _exact_convolutions() -> AbstractContextManager[None]:
    """In the body a GPU convolves f32 as f32, and in the same way each time."""
    found: AbstractContextManager[None] = cudnn.flags(
        enabled=True, deterministic=True, allow_tf32=False
    )
    return found


def _rows(features: Any) -> Tensor:
    """Features of one image, as [tokens, hidden_size]."""
    joined = features if isinstance(features, Tensor) else torch.cat(list(features))
    return joined.reshape(-1, joined.shape[-1])


def _around(module: nn.Module, text: str, path: str = "") -> Iterator[nn.Module]:
    """`module` and those in it, but for the language model and what is leased whole."""
    yield module
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if inside != text and not isinstance(child, Unit):
            yield from _around(child, text, inside)


def _parts(model: nn.Module, text: str) -> Iterator[tuple[str, bool]]:
    """Paths of modules that are leased: whole, or with nothing but their own parameters.

    Whole are layers of lists, and what has no list in it.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    for path, module in model.named_children():
        if module is not output:
            yield from _inside(module, path, text)


def _inside(module: nn.Module, path: str, text: str) -> Iterator[tuple[str, bool]]:
    if path == text or "audio" in path or next(_tensors(module), None) is None:
        return
    holds_text = text.startswith(f"{path}.")
    lists = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
    if not lists and not holds_text:
        yield path, not isinstance(module, nn.Embedding)  # which others may read, as DeepSeek-OCR 2
        return
    if own_params(module):
        yield path, False
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList):
            if next(_tensors(child), None) is not None:
                yield f"{path}.{name}", True
        else:
            yield from _inside(child, f"{path}.{name}", text)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that checkpoints have, by name."""
    for path, inner in module.named_modules():
        for name, tensor in _direct(inner):
            yield (f"{path}.{name}" if path else name), tensor


def _direct(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of a module itself."""
    for name in own_params(module):
        tensor = module._parameters.get(name)
        held = module._buffers[name] if tensor is None else tensor
        assert held is not None
        yield name, held
