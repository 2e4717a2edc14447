"""AdamW on FP32 copies of BF16 parameters, and the weighted loss."""

from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

_ROWS_PER_CHUNK = 65536  # logits of a whole batch at once would take gigabytes


class MasterAdamW:
    """BF16 rounds away updates below 1/256 of a weight, so they are summed in FP32 copies."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, weight_decay: float) -> None:
        """`weight_decay` is for matrices; norm weights are not decayed."""
        self._parameters = list(parameters)
        self._master = [parameter.detach().float() for parameter in self._parameters]
        groups = [
            {"params": [m for m in self._master if m.dim() > 1], "weight_decay": weight_decay},
            {"params": [m for m in self._master if m.dim() <= 1], "weight_decay": 0.0},
        ]
        on_gpu = self._master[0].is_cuda
        self._adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=on_gpu)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the parameters' gradients (clipped to norm 1), and drop them."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for parameter, master in zip(self._parameters, self._master, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._master, 1.0)
        self._adamw.step()
        for parameter, master in zip(self._parameters, self._master, strict=True):
            parameter.copy_(master)


def weighted_loss(
    states: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Mean cross entropy of predicting `ids` one position ahead, by the targets' weights.

    `states` is [batch, length, width]; `ids` and `weights` are [batch, length].
    """
    states = states[:, :-1].flatten(0, 1)
    targets, weights = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    total = states.new_zeros((), dtype=torch.float32)
    for begin in range(0, len(states), _ROWS_PER_CHUNK):
        chunk = slice(begin, begin + _ROWS_PER_CHUNK)
        logits = head(states[chunk]).float()
        losses = functional.cross_entropy(logits, targets[chunk], reduction="none")
        total = total + (losses * weights[chunk]).sum()
    return total / weights.sum()
