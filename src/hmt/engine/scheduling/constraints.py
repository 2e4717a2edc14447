"""Answers whose last token waits for their form: a child process says what may follow it."""

import time
from collections.abc import Callable
from typing import Final

from hmt.engine.scheduling.sequence import Sequence

# A step waits so long in all for forms that have just been asked: usual ones need 0.2 ms, and so
# take part in the next step.  Sequences whose forms are later are left out of steps until then.
_GRACE_S: Final = 0.005
_IDLE_S: Final = 0.02  # waited at a time where nothing else is to be done


class UnsettledForms:
    """Sequences that have chosen a token and wait for their form.  For the engine's thread."""

    def __init__(self) -> None:
        self._new: list[Sequence] = []
        self._late: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Wait for its form, if it does."""
        if sequence.unsettled is not None and not sequence.finished:
            self._new.append(sequence)

    def settle(self, ended: Callable[[Sequence, Exception | None], None]) -> None:
        """Let all go on whose form is ready, after a moment for new ones.

        `ended` is told of those that end with it, with the error if there was one.
        """
        deadline_s = time.perf_counter() + _GRACE_S
        for sequence in self._new:
            if sequence.constraint is not None:
                sequence.constraint.wait(max(0.0, deadline_s - time.perf_counter()))
        waiting, self._new, self._late = [*self._late, *self._new], [], []
        for sequence in waiting:
            if sequence.finished:  # cancelled, or its time was over
                continue
            if sequence.constraint is not None and not sequence.constraint.ready:
                self._late.append(sequence)
                continue
            try:
                sequence.settle()
            except Exception as error:
                ended(sequence, error)
            else:
                if sequence.finished:
                    ended(sequence, None)

    def idle(self) -> bool:
        """Whether any sequence waits for its form.  Waits a moment for the first of them."""
        waiting = [*self._late, *self._new]
        if waiting and waiting[0].constraint is not None:
            waiting[0].constraint.wait(_IDLE_S)
        return bool(waiting)
