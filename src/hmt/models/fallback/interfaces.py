"""What transformers' modules call by name: attention, masks, experts and the cache, all HMT's."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from hmt.contracts.step import Segment
from hmt.contracts.store import Priority
from hmt.kernels import ops
from hmt.layers import GatedFFN, Routing, request_experts, routed_experts
from hmt.models.fallback.call_context import StoppedError, current_context
from hmt.models.fallback.device_cache import place_of

NAME = "hmt"  # of `attn_implementation` and `experts_implementation`

# Class names of transformers' activations -> what kernels call them.
ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
}
_FAR = 1 << 30  # a position behind which every window ends


def register() -> None:
    """Make transformers' modules find these functions."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)


class Mask:
    """Stands for a mask while a model is looked at.

    window   positions that one sees, itself included; 0: all before it
    usual    whether that is all there is to say
    """

    def __init__(self, window: int, usual: bool) -> None:
        self.window = window
        self.usual = usual


def describe_mask(*, mask_function: Any, **sizes: Any) -> Mask | None:
    """What a mask would hide; None once that is known."""
    if current_context().weights is not None:
        return None
    try:
        sees = [_first_seen(mask_function, at) for at in (_FAR, _FAR + 1, _FAR + 12345)]
        windows = {at - first + 1 for at, first in sees}
        causal = not any(_sees(mask_function, at, at + 1) for at, _ in sees)
    except Exception:
        return Mask(0, usual=False)
    if all(first == 0 for _, first in sees):
        return Mask(0, usual=causal)
    return Mask(windows.pop(), usual=causal and len(windows) == 0)


def _first_seen(mask_function: Any, at: int) -> tuple[int, int]:
    """The position, and the first that it sees, if all behind that one are."""
    low, high = 0, at
    if _sees(mask_function, at, 0):
        return at, 0
    while low < high:
        middle = (low + high) // 2
        if _sees(mask_function, at, middle):
            high = middle
        else:
            low = middle + 1
    return at, low


def _sees(mask_function: Any, at: int, other: int) -> bool:
    zero = torch.tensor(0)
    return bool(mask_function(zero, zero, torch.tensor(at), torch.tensor(other)))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of query [1, heads, tokens, dim] to all that the sequences hold.

    key and value [1, kv heads, tokens, dim] are those of the step's tokens.  Returns [1, tokens,
    heads, value dim].  Windows are those that the model's masks had when it was looked at.
    """
    work = current_context()
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if work.weights is None:
        work.record.attention(module, query, key, value, attention_mask, options)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    assert work.step is not None and work.kv is not None
    q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
    sinks = options.get("s_aux")
    if sinks is not None:
        sinks = sinks.float().contiguous()
    softcap = float(options.get("softcap") or 0.0)
    work.kv.append(work.layer, work.step, k, v)
    found = work.kv.attend(work.layer, work.step, q, scale=scale, softcap=softcap, sinks=sinks)
    return found[None], None


class OneSequence(Cache):
    """The cache of one sequence, for models whose own code computes attention.

    Its layers give what HMT's pages hold; what is new is kept until the step has all of it.
    """

    is_sliding = ()  # type: ignore[assignment]  # every layer keeps everything: masks have windows
    is_compileable = False  # type: ignore[assignment]

    def __init__(self, run: Segment | None, layers: int) -> None:
        """`run` None: an empty sequence, while the model is looked at."""
        super().__init__(layers=[])
        self._start = 0 if run is None else run.start
        self._count = layers
        self.is_sliding = [False] * layers  # type: ignore[assignment]

    def __len__(self) -> int:
        return self._count

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values of the sequence in a layer: [1, heads, context, dim] each.

        Zeros while the model is looked at: no token sees another one through attention then.
        """
        work = current_context()
        if work.weights is None:
            work.record.cached(key_states, value_states)
            return torch.zeros_like(key_states), torch.zeros_like(value_states)
        assert work.kv is not None and work.run is not None
        work.new.append(tuple(x[0].transpose(0, 1) for x in (key_states, value_states)))  # type: ignore[arg-type]
        start = work.run.start
        if not start:
            return key_states, value_states
        before = work.kv.read(work.layer, Segment(work.run.sequence, 0, 0, start))
        whole = (
            torch.cat((old.transpose(0, 1)[None].to(new), new), dim=2)
            for old, new in zip(before, (key_states, value_states), strict=True)
        )
        key, value = whole
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before this step."""
        return self._start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The first position of this step."""
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Positions that are attended to, and where they begin."""
        return self._start + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """None is known."""
        return -1


def compute_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The chosen experts' outputs, scaled and added up: [tokens, hidden_size] in x.dtype.

    top_k_index int64 and top_k_weights [tokens, top_k]; experts beyond the last one stand for none.
    """
    work = current_context()
    if work.weights is None:
        work.record.experts(module, top_k_index.shape[-1])
        return hidden_states.clone()
    if work.predicting:
        work.chosen = top_k_index
        raise StoppedError
    if work.passage is not None:
        work.passage.chosen[work.layer] = top_k_index
    home = hidden_states.device
    hidden_states, top_k_index, top_k_weights = (
        tensor.to(work.place or home) for tensor in (hidden_states, top_k_index, top_k_weights)
    )
    return _computed(module, hidden_states, top_k_index, top_k_weights).to(home)


def _computed(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The same, where experts are computed."""
    work = current_context()
    assert work.weights is not None
    count = int(module.num_experts)
    scales = top_k_weights.float()
    if int(top_k_index.max()) >= count:
        none = top_k_index >= count
        top_k_index, scales = top_k_index.masked_fill(none, 0), scales.masked_fill(none, 0.0)
    routing = Routing(top_k_index, scales)
    residual = hidden_states if work.residual is None else work.residual
    residual = residual.reshape(len(hidden_states), -1)
    if (activation := usual_activation(module)) is not None:
        expert = GatedFFN(hidden_states.shape[-1], 0, activation)
        request_experts(hidden_states, routing, residual, work.layer, expert, work.weights)
        return routed_experts(hidden_states, routing, work.layer, expert, work.weights)
    return _other_experts(module, hidden_states, routing, residual)


def usual_activation(module: Any) -> str | None:
    """How kernels call the activation of experts that they know whole; None if they do not."""
    plain = module.has_gate and module.is_concatenated and not module.is_transposed
    odd = module.has_bias or getattr(module, "has_post_expert_norm", False)
    own_gate = type(module)._apply_gate is not _default_apply_gate
    if not plain or odd or own_gate:
        return None
    return ACTIVATIONS.get(type(module.act_fn).__name__)


def _other_experts(module: Any, x: Tensor, routing: Routing, residual: Tensor) -> Tensor:
    """Experts with biases, other activations or transposed matrices, one after the other."""
    work = current_context()
    assert work.weights is not None
    blocks = routing.blocks(work.layer)
    work.weights.request(blocks, Priority.DEMAND)
    work.weights.routed(work.layer, residual, routing.experts, routing.scales)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    with work.weights.lease_each(blocks) as groups:
        for group in groups:
            for block, params in group:
                tokens, places = torch.where(routing.experts == block.index)
                y = _other_expert(module, x[tokens].to(place_of(params)), params).to(x.device)
                out.index_add_(0, tokens, y.float() * routing.scales[tokens, places, None])
    return out.to(x.dtype)


def _other_expert(module: Any, x: Tensor, params: Any) -> Tensor:
    """One expert's output, as transformers' module puts it together."""

    def times(name: str, given: Tensor) -> Tensor:
        w = params[name]
        y = given @ w.data.to(given.dtype) if module.is_transposed else ops.linear(given, w)
        bias = params.get(f"{name}_bias")
        return y if bias is None else y + bias.data.to(y.dtype)

    first = "gate_up_proj" if module.has_gate else "up_proj"
    y = times(first, x)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    return times("down_proj", y)
