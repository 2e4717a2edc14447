"""Answers whose last token waits for their form: a child process says what may follow it."""

import time
from collections.abc import Callable
from typing import Final

from hmt.engine.outputs.output_processor import OutputProcessor

# A step waits so long in all for forms that have just been asked: usual ones need 0.2 ms, and so
# take part in the next step.  Requests whose forms are later are left out of steps until then.
_GRACE_S: Final = 0.005
_IDLE_S: Final = 0.02  # waited at a time where nothing else is to be done


class UnsettledForms:
    """Requests that have chosen a token and wait for their form.  For the engine's thread."""

    def __init__(self) -> None:
        self._new: list[OutputProcessor] = []
        self._late: list[OutputProcessor] = []

    def add(self, output: OutputProcessor) -> None:
        """Wait for its form, if it does."""
        if output.unsettled is not None and not output.state.finished:
            self._new.append(output)

    def is_settled(self, output: OutputProcessor) -> bool:
        """Whether it waits for no form, after a moment for that.  It may end with its form.

        Raises RequestError where the form does.
        """
        if output.unsettled is None:
            return True
        if output.constraint is not None:
            output.constraint.wait(_GRACE_S)
            if not output.constraint.ready:
                return False
        output.settle()
        return True

    def settle(self, ended: Callable[[OutputProcessor, Exception | None], None]) -> None:
        """Let all go on whose form is ready, after a moment for new ones.

        `ended` is told of those that end with it, with the error if there was one.
        """
        deadline_s = time.perf_counter() + _GRACE_S
        for output in self._new:
            if output.constraint is not None:
                output.constraint.wait(max(0.0, deadline_s - time.perf_counter()))
        waiting, self._new, self._late = [*self._late, *self._new], [], []
        for output in waiting:
            if output.state.finished:  # cancelled, or its time was over
                continue
            if output.constraint is not None and not output.constraint.ready:
                self._late.append(output)
                continue
            try:
                output.settle()
            except Exception as error:
                ended(output, error)
            else:
                if output.state.finished:
                    ended(output, None)

    def idle(self) -> bool:
        """Whether any request waits for its form.  Waits a moment for the first of them."""
        waiting = [*self._late, *self._new]
        if waiting and waiting[0].constraint is not None:
            waiting[0].constraint.wait(_IDLE_S)
        return bool(waiting)
