"""How much of the missing experts the link brings, learned from who is ready first."""

import torch
from torch import Tensor

_PACE = 1.05  # in a step after which one side was always first
_LEAST, _MOST = 0.25, 1.5  # times what was planned


class LinkShare:
    """A share that devices read, by the number of tokens of a step.

    It is planned from rates of link and CPU that are measured at once.  In a step both are slower,
    not by the same part: on an H200 whose link gave 42 GB/s beside a CPU that multiplied, kernels
    fetched experts at 33 GB/s in a step, 1.5 ms a layer where the CPU took 1.2.  So each layer
    leaves a note whether its answer had come when the device was ready for it, and the share moves
    until as many come before as after.
    """

    def __init__(self, share: Tensor, notes: Tensor) -> None:
        """Both are changed.

        share   f32 [1] on the device: what was planned
        notes   int32 [layers] in host memory: 1 where the answer had come, 0 where not; -1: nothing
                was asked
        """
        self._share, self._notes = share, notes
        self._planned = self._set = float(share)
        self._learned: dict[int, float] = {}  # by tokens
        self._tokens = 0

    def begin(self, tokens: int) -> None:
        """A step of `tokens` tokens comes next on the device's queue."""
        self._tokens = tokens
        wanted = self._learned.setdefault(tokens, self._planned)
        if wanted != self._set:
            self._share.fill_(wanted)
            self._set = wanted

    def learned(self, tokens: int) -> float:
        """The share for steps of `tokens` tokens."""
        return self._learned.get(tokens, self._planned)

    def learn(self) -> None:
        """Move the share by the notes of a step that has ended, of as many tokens as the last."""
        noted = self._notes[self._notes >= 0]
        if not self._tokens or not len(noted):
            return
        first = float(noted.to(torch.float32).mean())  # how often the CPU was
        found = self._learned[self._tokens] * _PACE ** (1 - 2 * first)
        self._learned[self._tokens] = min(
            max(found, _LEAST * self._planned), _MOST * self._planned, 1.0
        )
        self._notes.fill_(-1)
