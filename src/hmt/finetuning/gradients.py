"""Loss and gradients of a step: layer by layer forward, and layer by layer back.

What goes into each layer is kept, and everything within a layer computed again on the way back
(checkpointing, arXiv 1604.06174).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn import functional

from hmt.contracts.model import Model
from hmt.contracts.step import SegmentRequest, Step
from hmt.finetuning.differentiable import TrainingWeights
from hmt.finetuning.examples import Example
from hmt.finetuning.memory_plan import MemoryPlan
from hmt.quantizing import WholeSequences


@dataclass(frozen=True, slots=True)
class _Group:
    """Examples that are computed together.

    rows, targets   int64 [learned tokens]: the rows that predict them, and which they are
    """

    step: Step
    rows: Tensor
    targets: Tensor


class Gradients:
    """Computes losses of a model whose adapters are trained, and their gradients."""

    def __init__(
        self,
        model: Model,
        weights: TrainingWeights,
        plan: MemoryPlan,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """`done` is called behind each layer."""
        self._model, self._weights = model, weights
        self._plan, self._done = plan, done

    def add(self, examples: Sequence[Example]) -> float:
        """Add to the gradients of all adapters those of the mean loss of `examples`.

        The mean of all tokens that are learned.  Returns it, in nats.
        """
        groups = [_group(some) for some in self._groups(examples)]
        count = sum(len(group.targets) for group in groups)
        inputs = list[list[Tensor]]()
        with torch.no_grad():
            hidden = [self._model.embed(group.step, self._weights).float() for group in groups]
            for layer in range(self._model.spec.layers):
                inputs.append(hidden)
                hidden = [
                    self._layer(layer, x, group) for x, group in zip(hidden, groups, strict=True)
                ]
                self._done()
        self._weights.check()
        loss, grads = 0.0, []
        for x, group in zip(hidden, groups, strict=True):
            own, grad = self._head(x, group, count)
            loss += own
            grads.append(grad)
        self._done()
        for layer in reversed(range(self._model.spec.layers)):
            grads = [
                self._back(layer, x, group, grad)
                for x, group, grad in zip(inputs.pop(), groups, grads, strict=True)
            ]
            self._done()
        return loss

    def _groups(self, examples: Sequence[Example]) -> list[list[Example]]:
        groups, tokens = list[list[Example]](), 0
        for example in examples:
            if not groups or tokens + len(example.tokens) > self._plan.tokens:
                groups.append([])
                tokens = 0
            groups[-1].append(example)
            tokens += len(example.tokens)
        return groups

    def _layer(self, layer: int, hidden: Tensor, group: _Group) -> Tensor:
        # Layers may change what they are given.
        kv = WholeSequences(self._model.spec)
        return self._model.layer(layer, hidden.clone(), group.step, self._weights, kv)

    def _head(self, hidden: Tensor, group: _Group, count: int) -> tuple[float, Tensor]:
        """The examples' part of the mean over `count` tokens, and its gradient of `hidden`."""
        grad, loss = torch.zeros_like(hidden), 0.0
        most = self._plan.logit_rows
        pieces = zip(group.rows.split(most), group.targets.split(most), strict=True)
        for rows, targets in pieces:
            x = hidden[rows].requires_grad_()
            with allow_mutation_on_saved_tensors():
                logits = self._model.head(x.clone(), self._weights)
                part = functional.cross_entropy(logits, targets, reduction="sum") / count
                part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            assert x.grad is not None
            grad[rows] += x.grad
        return loss, grad

    def _back(self, layer: int, hidden: Tensor, group: _Group, grad: Tensor) -> Tensor:
        """The gradient of what goes into `layer`, from that of what comes out."""
        x = hidden.requires_grad_()
        with allow_mutation_on_saved_tensors():
            out = self._layer(layer, x, group)
            torch.autograd.backward(out, grad)
        assert x.grad is not None
        return x.grad


def _group(examples: Sequence[Example]) -> _Group:
    requests = [
        SegmentRequest(number, 0, list(one.tokens), 0, len(one.tokens), whole=len(one.tokens))
        for number, one in enumerate(examples)
    ]
    rows, targets, first = list[int](), list[int](), 0
    for one in examples:
        learned = [n for n, wanted in enumerate(one.learned) if wanted]
        rows += [first + n - 1 for n in learned]
        targets += [one.tokens[n] for n in learned]
        first += len(one.tokens)
    return _Group(Step.build(requests), torch.tensor(rows), torch.tensor(targets))
