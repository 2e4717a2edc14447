"""Mixture of recursions (arXiv 2507.10524): layers that a token passes as often as a router says.

Of the paper's forms: one layer, a block of layers that is applied again and again, one layer
("middle cycle").  Before each further recursion the router scores the tokens that are still in it;
those above a threshold go on.  A threshold, and not the best of a sequence, chooses, so no token's
depth depends on later ones, and decoding computes what a whole forward pass does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from hmt.base.errors import CheckpointError, ConfigError
from hmt.contracts.blocks import BlockId, BlockKind, BlockSpec, ParamSpec, Role
from hmt.contracts.model import KVLayer
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, Weights
from hmt.kernels import ops
from hmt.layers import LayerApplications, Params, SkippingAttention
from hmt.models.config import Config, attention, norm, residual_ffn, rotary
from hmt.models.decoder import Decoder, attention_block, ffn_block

_NOT_CAPTURED = "how many tokens a layer computes is known in the step alone"
_OWN, _FIRST = "own", "first"


@dataclass(slots=True)
class _Recursion:
    """The tokens of a step that are in a further recursion.

    runs    of the step
    rows    int64: which tokens
    hidden  [rows, hidden_size]: their states so far
    """

    runs: tuple[Segment, ...]
    rows: Tensor
    hidden: Tensor


class MixtureOfRecursions(Decoder):
    """A Llama whose layers but the first and the last are those of a block, several times over.

    Layers count as often as they are applied; their weights are blocks of the first recursion.  A
    further recursion has keys of its own, which hold only the tokens that reach it
    (`recursion_kv` "own"), or attends to those of the first, which has them all ("first").
    """

    staged = False

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        self.recursions, self.block_layers = _sizes(config)
        if config.recursion_kv not in (_OWN, _FIRST):
            raise CheckpointError(
                f"recursion_kv is {config.recursion_kv!r}; it must be {_OWN!r} or {_FIRST!r}"
            )
        self._shares = config.recursion_kv == _FIRST
        self._known = _thresholds(config, self.recursions - 1)
        self._thresholds: tuple[float, ...] | None = None
        self._recursion: _Recursion | None = None
        self.applications = LayerApplications()
        self.norm = norm(config)
        self.attention = attention(config, rotary(config))
        self.skipping = SkippingAttention(self.attention)
        self.ffn = residual_ffn(config)
        layers = config.num_hidden_layers
        again = range(1 + self.block_layers, layers - 1)
        kv: list[KVLayer | None] = [self.attention.kv] * layers
        for index in again:
            kv[index] = None if self._shares else self.skipping.kv_with_holes
        super().__init__(
            config,
            dtype,
            norm=self.norm,
            kv=kv,
            kv_sources={i: self._owner(i) for i in again} if self._shares else {},
            activation_width=2 * config.hidden_size
            + max(2 * self.attention.activation_width, self.ffn.activation_width),
            uncaptured=_NOT_CAPTURED,
        )

    @override
    def notes(self) -> tuple[str, ...]:
        """What share of the layers tokens passed through, since the model was opened."""
        share, layers = self.applications.share, self.spec.layers
        return (f"tokens passed through {share:.0%} of {layers} layers on average",)

    def set_depth(self, depth: float) -> None:
        """Let tokens pass through `depth` of all layers on average: 1 is all of them.

        Raises ConfigError where the checkpoint has no thresholds for it.
        """
        if depth != 1 and depth not in self._known:
            known = ", ".join(map(str, sorted(self._known))) or "none"
            raise ConfigError(
                f"depth {depth} was asked for; the checkpoint's recursion_thresholds have {known}, "
                "and 1 is always possible"
            )
        self._thresholds = None if depth == 1 else self._known[depth]

    @override
    def layer_params(self, index: int) -> Iterator[BlockSpec]:
        if self._owner(index) != index:
            return
        published = min(index, 1 + self.block_layers)
        at = f"model.layers.{published}."
        yield attention_block(
            index,
            self.norm.param("norm", f"{at}input_layernorm.weight"),
            *self.attention.params(f"{at}self_attn."),
        )
        yield ffn_block(
            index,
            self.norm.param("norm", f"{at}post_attention_layernorm.weight"),
            *self.ffn.ffn.params(f"{at}mlp."),
            *(self._router_params() if index == self.block_layers else ()),
        )

    def _router_params(self) -> tuple[ParamSpec, ...]:
        """Of the block's last layer, behind which the router asks who goes on."""
        count = self.recursions - 1
        shape = (count, self.norm.width)
        return (
            ParamSpec("router", shape, ("model.router.weight",), Role.VECTOR),
            ParamSpec("router_bias", (count,), ("model.router.bias",), Role.VECTOR),
        )

    @override
    def layer_blocks(self, index: int) -> tuple[BlockId, ...]:
        return super().layer_blocks(self._owner(index))

    def _owner(self, index: int) -> int:
        """The layer whose weights layer `index` applies."""
        within = 0 < index <= self.recursions * self.block_layers
        return 1 + (index - 1) % self.block_layers if within else index

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        recursion, place = divmod(index - 1, self.block_layers)
        ends = place == self.block_layers - 1
        if not 0 < recursion < self.recursions:
            self.applications.count(len(hidden), len(hidden))
            with weights.lease(BlockId(index, BlockKind.ATTENTION)) as params:
                x = self.attention(hidden, index, step, params, kv)
            with weights.lease(BlockId(index, BlockKind.FFN)) as params:
                hidden = self.ffn(hidden, x, params)
                if recursion == 0 and ends:
                    rows = torch.arange(len(hidden), device=hidden.device)
                    self._recursion = self._next(0, rows, hidden, step, params)
            return hidden
        going = self._recursion
        assert going is not None and going.runs is step.segments, "layers come in their order"
        self.applications.count(len(going.rows), len(hidden))
        if place == 0:
            going.hidden = hidden[going.rows]
        if len(going.rows):
            self._apply(index, going, hidden, step, weights, kv)
        elif not self._shares:
            self.skipping.append_holes(hidden, index, step, kv)
        return hidden

    def _apply(
        self,
        index: int,
        going: _Recursion,
        hidden: Tensor,
        step: Step,
        weights: Weights,
        kv: KVCache,
    ) -> None:
        """Layer `index` to the tokens that are `going`, and at the block's end to `hidden`."""
        recursion, place = divmod(index - 1, self.block_layers)
        owner = self._owner(index)
        with weights.lease(BlockId(owner, BlockKind.ATTENTION)) as params:
            attend = (
                self.skipping.attend_shared if self._shares else self.skipping.attend_with_holes
            )
            to = owner if self._shares else index
            x = attend(going.hidden, going.rows, to, step, params, kv)
        with weights.lease(BlockId(owner, BlockKind.FFN)) as params:
            going.hidden = self.ffn(going.hidden, x, params)
            if place < self.block_layers - 1:
                return
            hidden[going.rows] = going.hidden
            if recursion < self.recursions - 1:
                self._recursion = self._next(recursion, going.rows, hidden, step, params)

    def _next(
        self, number: int, rows: Tensor, hidden: Tensor, step: Step, params: Params
    ) -> _Recursion:
        """Which of `rows` go on to further recursion `number`, by their states in `hidden`."""
        if self._thresholds is not None:
            weight, bias = params["router"].data[number], params["router_bias"].data[number]
            scores = ops.depth_scores(hidden[rows], weight, bias, self.norm.eps)
            rows = rows[scores > self._thresholds[number]]
        return _Recursion(step.segments, rows, hidden[:0])


def _sizes(config: Config) -> tuple[int, int]:
    """Recursions, and layers of the block.  Raises CheckpointError."""
    counts = config.num_recursions, config.recursion_layers
    if not all(type(count) is int and count > 0 for count in counts) or counts[0] < 2:
        raise CheckpointError(
            f"num_recursions is {counts[0]!r} of {counts[1]!r} recursion_layers; they must be at "
            "least 2 and 1"
        )
    if counts[0] * counts[1] + 2 != config.num_hidden_layers:
        raise CheckpointError(
            f"{counts[0]} recursions of {counts[1]} layers, one before and one behind them are "
            f"{counts[0] * counts[1] + 2} layers, and num_hidden_layers is "
            f"{config.num_hidden_layers}"
        )
    return counts


def _thresholds(config: Config, count: int) -> dict[float, tuple[float, ...]]:
    """Thresholds of further recursions, `count` of them, by depth.  Raises CheckpointError."""
    known: dict[float, tuple[float, ...]] = {}
    for depth, given in config.recursion_thresholds.items():
        thresholds = tuple(float(one) for one in given)
        if len(thresholds) != count:
            raise CheckpointError(
                f"recursion_thresholds of depth {depth} are {len(thresholds)}; {count} further "
                "recursions need one each"
            )
        known[float(depth)] = thresholds
    return known
