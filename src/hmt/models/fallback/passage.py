"""A forward pass that stops in front of each layer until that is wanted.

Nothing is assumed of what a model computes between its layers and hands from one to another: the
pass runs in a thread, and the executor's thread waits meanwhile.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from hmt.models.fallback.call_context import CallContext, StoppedError, in_context


class Passage:
    """One forward pass.  Only one of both threads runs at any time.

    result   what the pass returned; None before its end
    chosen   by layer: the experts of its tokens, int64 [tokens, top_k]
    """

    def __init__(self, forward: Callable[[], Tensor], work: CallContext) -> None:
        """`forward` is called in the thread, about `work`."""
        self.result: Tensor | None = None
        self.chosen: dict[int, Tensor] = {}
        self._forward, self._work = forward, work
        self._inference = torch.is_inference_mode_enabled()
        self._allowed, self._waits_for = -1, 0
        self._closed = False
        self._error: BaseException | None = None
        self._wanted, self._returned = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def advance(self, stage: int) -> None:
        """Run until a layer behind `stage` is reached, or the end.  Raises what the pass raises."""
        self._allowed = stage
        if self.result is not None or self._waits_for > stage:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="forward pass", daemon=True)
            self._thread.start()
        else:
            self._wanted.release()
        self._returned.acquire()
        if self._error is not None:
            raise self._error

    def reach(self, index: int) -> None:
        """Called in front of layer `index`, by the pass: returns when that is wanted."""
        if index <= self._allowed:
            return
        self._work.release()
        self._waits_for = index
        self._returned.release()
        self._wanted.acquire()
        if self._closed:
            raise StoppedError

    def close(self) -> None:
        """End a pass that is not wanted any more."""
        self._closed = True
        if self._thread is not None and self._thread.is_alive():
            self._wanted.release()
            self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode(self._inference), in_context(self._work):
                self.result = self._forward()
        except BaseException as error:  # which belongs to the executor's thread
            self._error = error
        finally:
            self._returned.release()
