"""Models whose layers cannot be called one by one: their forward pass runs whole, in a thread.

It stops in front of each layer (`passage`), so that blocks come and go as in other models.  What
passes from layer to layer is the model's own business.  Each sequence of a step has its own pass,
over a cache that reads HMT's pages and recurrent state (`sequence_cache`).
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from typing_extensions import override

from hmt.base.errors import CheckpointError
from hmt.base.log import warn_once
from hmt.contracts.blocks import TRUNK, BlockId, BlockKind
from hmt.contracts.model import Model, ModelSpec
from hmt.contracts.step import Segment, Step
from hmt.contracts.store import KVCache, Weights
from hmt.models.config import Config
from hmt.models.fallback import module_tree
from hmt.models.fallback.blocks import BlockMaker
from hmt.models.fallback.call_context import (
    CallContext,
    StoppedError,
    in_context,
    inputs_of,
    positions_of,
)
from hmt.models.fallback.features import not_followed
from hmt.models.fallback.image_rehearsal import ImageCalls, rehearse_images
from hmt.models.fallback.lengths import border_in, lengths_of
from hmt.models.fallback.passage import Passage
from hmt.models.fallback.rehearsal import call_base, check_embedded, open_tree
from hmt.models.fallback.sequence_cache import Rows, SequenceCache
from hmt.models.fallback.sizes import REMARK, UNCAPTURED, longest_context
from hmt.models.fallback.whole_tree import Sight

_ALONE = "computes each sequence of a step by itself"


class _Behind(nn.Module):
    """In place of what computes hidden states: gives those that the work at hand has instead."""

    def __getattr__(self, name: str) -> Any:
        """Whatever part of it the model calls."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states, as a model returns them."""
        from hmt.models.fallback.call_context import current_context

        return _Answer(last_hidden_state=current_context().instead)


class _Answer(BaseModelOutputWithPast):  # type: ignore[misc]
    """A model's output, in which everything else is None."""

    def __getattr__(self, name: str) -> Any:
        """None for all that was not computed."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@dataclass(frozen=True)
class _Pass:
    """The forward pass of one sequence of a step."""

    run: Segment
    cache: SequenceCache
    work: CallContext
    passage: Passage


class WholeForward(Model):
    """Implements Model around a module tree of transformers that is run as it is."""

    def __init__(self, config: Config, architecture: str, dtype: torch.dtype) -> None:
        """Raises UnknownArchitectureError for a model that cannot run so, and CheckpointError."""
        self.dtype = dtype
        self._border = border_in(config.get_text_config())
        whole = open_tree(config, architecture, dtype)
        self._whole, self._tree = whole, whole.tree
        traces = list(whole.sight.layers.values())
        maker = BlockMaker(whole.tree, whole.parts, whole.published, architecture)
        maker.values()
        layers = len(traces)
        blocks = (
            *maker.trunk(whole.tied),
            *(block for i in range(layers) for block in maker.layer(i, traces[i])),
            *maker.head(whole.tied),
        )
        self._layer_blocks: list[list[BlockId]] = [[] for _ in range(layers)]
        for block in blocks:
            if block.id.layer != TRUNK and block.id.kind is not BlockKind.EXPERT:
                self._layer_blocks[block.id.layer].append(block.id)
        widest = max(max(trace.widths.values(), default=0) for trace in traces)
        states = tuple(tuple(slot.tensor for slot in slots.states) for slots in whole.slots)
        self.spec = ModelSpec(
            architecture=architecture,
            layers=layers,
            hidden_size=whole.hidden_size,
            vocab_size=whole.parts.head.out_features,
            max_context=longest_context(whole.tree.model.config.get_text_config())
            - whole.tree.first_position,
            blocks=blocks,
            kv=tuple(slots.kv for slots in whole.slots),
            activation_width=8 * max(whole.hidden_size, whole.sight.width) + 2 * widest,
            attention_heads=_heads(whole.tree.model.config.get_text_config()),
            experts_per_token=max(trace.top_k for trace in traces),
            ignored=whole.ignored,
            uncaptured=UNCAPTURED,
            together=False,
            exact_runs=False,
            remarks=(REMARK, _ALONE),
            rotary_border=self._border,
            state=states if any(states) else (),
        )
        self._images: ImageCalls | None = None
        self._stage_of = {
            slot.layer: stage for stage, slots in enumerate(whole.slots) for slot in slots.rows
        }
        self._passes: tuple[tuple[Segment, ...], list[_Pass]] = ((), [])
        self._chosen: dict[int, Tensor] = {}  # by layer: experts of the last step
        for name, child in list(self._tree.model.named_children()):
            if child is self._tree.base:
                setattr(self._tree.model, name, _Behind())
        self._try_behind()
        warn_once(f"fallback {architecture}", f"{architecture} {REMARK}")

    def check_embedded(self, *, axes: int) -> None:
        """Raise CheckpointError unless it computes from embeddings, too, as those of images."""
        try:
            check_embedded(self._tree, axes=axes)
        except CheckpointError:
            raise
        except Exception as error:  # of transformers' code
            raise CheckpointError(f"its language model takes tokens alone ({error})") from error

    @property
    def has_encoder(self) -> bool:
        """Whether it is a whole model of images and text, and not the language model of one."""
        return hasattr(self._tree.base, "get_image_features")

    def take_images(self, token: int, axes: int) -> ImageCalls:
        """Let its forward pass be given features where `token` stands, in steps that have any.

        axes   of rotary positions; 0: they count tokens
        Returns how it takes them.  Raises CheckpointError where that is not known.
        """
        if axes and not self._tree.takes_positions:
            raise CheckpointError("its language model counts positions by itself")
        self._images = rehearse_images(self._tree, token, axes)
        return self._images

    @override
    def embed(self, step: Step, weights: Weights) -> Tensor:
        """Nothing yet: the pass begins with the first layer, which keeps the cache's state."""
        for each in self._passes[1]:
            each.passage.close()
        self._passes = (step.segments, [self._begin(step, run) for run in step.segments])
        return torch.zeros(len(step.token_ids), self.spec.hidden_size, dtype=self.dtype)

    @override
    def layer(
        self, index: int, hidden: Tensor, step: Step, weights: Weights, kv: KVCache
    ) -> Tensor:
        segments, passes = self._passes
        assert segments is step.segments
        slots = self._whole.slots[index]
        for each in passes:
            each.work.weights, each.work.kv, each.work.place = weights, kv, hidden.device
            self._put_states(each, index, step, kv)
            each.passage.advance(index)
            self._take_states(each, index, step, kv)
            for layer, chosen in each.passage.chosen.items():
                self._chosen[layer] = chosen
        if slots.rows:
            rows = [slots.packed(each.cache) for each in passes]
            key, value = (torch.cat(side).to(hidden.device) for side in zip(*rows, strict=True))
            kv.append(index, step, key, value)
        if index < self.spec.layers - 1:
            return hidden
        results = [each.passage.result for each in passes]
        self._passes = ((), [])
        return torch.cat([rows for rows in results if rows is not None]).to(hidden.device)

    def fused_layers(self, layers: range, weights: Weights, kv: KVCache) -> None:
        """See Model: there are none, as modules of transformers have no kernels for this."""
        return None

    @override
    def normed(self, hidden: Tensor, weights: Weights) -> Tensor:
        with in_context(CallContext(weights, instead=hidden[None], stops=True)) as work:
            with suppress(StoppedError):
                self._behind(len(hidden))
            assert work.seen is not None
            return work.seen[0].float()

    @override
    def head(self, hidden: Tensor, weights: Weights) -> Tensor:
        with in_context(CallContext(weights, instead=hidden[None])):
            return self._behind(len(hidden))[0].float()

    def angles(self, step: Step) -> tuple[int, ...]:
        """See Model: those of keys never change, and steps are not captured."""
        return ()

    def expected_experts(self, index: int, hidden: Tensor, weights: Weights) -> Tensor:
        """See Model: those of the last token that came by; no router can be called by itself."""
        first = torch.arange(max(1, self.spec.experts_per_token))[None]
        return self._chosen.get(index, first)[-1:].cpu().expand(len(hidden), -1)

    @override
    def layer_blocks(self, index: int) -> tuple[BlockId, ...]:
        return tuple(self._layer_blocks[index])

    def _begin(self, step: Step, run: Segment) -> _Pass:
        positions = positions_of(step, run.tokens)
        lengths = None if self._border is None else lengths_of((run,))
        work = CallContext(None, step=step, run=run, lengths=lengths)

        def read(layer: int) -> Rows:
            assert work.kv is not None
            stage = self._stage_of[layer]
            before = work.kv.read(stage, Segment(run.sequence, 0, 0, run.start))
            key, value = (rows.cpu() for rows in before)
            return self._whole.slots[stage].unpacked(key, value, layer)

        cache = SequenceCache(self._tree.model.config, run.start, read)

        def forward() -> Tensor:
            if self._images is None:
                inputs = inputs_of(self._tree.base, step, run.tokens)
            else:
                inputs = self._with_images(self._images, step, run)
            return call_base(self._tree, inputs, positions, cache)[0]

        work.passage = Passage(forward, work)
        return _Pass(run, cache, work, work.passage)

    def _with_images(self, images: ImageCalls, step: Step, run: Segment) -> dict[str, Any]:
        """What its forward pass is called with for a run."""
        ids = step.token_ids[run.tokens].cpu()[None]
        if step.image_rows is None or step.image_features is None:
            return {"input_ids": ids}
        rows = step.image_rows.cpu()
        own = (rows >= run.tokens.start) & (rows < run.tokens.stop)
        if not bool(own.any()):
            return {"input_ids": ids}
        features = step.image_features.to("cpu", self.dtype)[own]
        layers = tuple(layer.to("cpu", self.dtype)[own] for layer in step.layer_features)
        return images.inputs(ids, features, layers, run)

    def _put_states(self, each: _Pass, index: int, step: Step, kv: KVCache) -> None:
        slots = self._whole.slots[index].states
        if not slots or not each.run.start:
            return
        state = kv.state(index, step)
        place = next(run.slot for run in state.runs if run.offset == each.run.offset)
        for slot in slots:
            each.cache.put_state(slot, state.tensors[slot.tensor.name][place])

    def _take_states(self, each: _Pass, index: int, step: Step, kv: KVCache) -> None:
        slots = self._whole.slots[index].states
        if not slots:
            return
        state = kv.state(index, step)
        run = next(run for run in state.runs if run.offset == each.run.offset)
        for slot in slots if run.stays else ():
            held = state.tensors[slot.tensor.name]
            held[run.slot] = each.cache.state(slot)[0].to(held)

    def _behind(self, tokens: int) -> Tensor:
        """Logits [1, tokens, vocabulary] of the hidden states that the work at hand has instead."""
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        found = self._tree.model(input_ids=ids, use_cache=False, return_dict=True)
        logits: Tensor = found.logits
        return logits

    def _try_behind(self) -> None:
        """Raise UnknownArchitectureError where what is behind the layers cannot be run alone."""
        hidden = torch.zeros(1, 2, self.spec.hidden_size, dtype=self.dtype)
        work = CallContext(None, record=Sight(), instead=hidden, stops=True)
        try:
            with in_context(work), suppress(StoppedError), torch.no_grad():
                self._behind(2)
        except Exception as error:
            raise module_tree.refused(self.spec.architecture, not_followed(error)) from error
        if work.seen is None:
            raise module_tree.refused(self.spec.architecture, "its output layer is not reached")


def _heads(config: Config) -> int:
    """Query heads of a layer at most."""
    for name in ("num_attention_heads", "n_head", "num_heads"):
        try:
            heads = getattr(config, name, None)
        except RuntimeError:  # of configurations in which layers differ
            heads = [getattr(each, name) for each in config.per_layer_config]
        if isinstance(heads, int):
            return heads
        if isinstance(heads, Sequence):
            return max(heads)
    return 1
