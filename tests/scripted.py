"""Answers that a test wrote beforehand."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hmt.engine.outputs import sampler


@contextmanager
def saying(ids: list[int], *, unless_forced: bool = False) -> Iterator[None]:
    """Every answer consists of these tokens; or where only one is allowed, of that."""
    choose = sampler.SamplerState.choose

    def scripted(self: Any, logits: Any, *others: Any) -> Any:
        chosen = choose(self, logits, *others)
        number = sum(self._output.values()) - 1
        if unless_forced and others[-1] is not None:
            return chosen
        return dataclasses.replace(chosen, token_id=ids[number])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler.SamplerState, "choose", scripted)
        yield
