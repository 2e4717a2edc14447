"""What bringing experts costs is measured with a limit under which they are brought."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hmt.engine.device_models import dense_model, expert_model

from hmt.contracts.blocks import BlockKind
from hmt.contracts.plan import Tier
from hmt.contracts.request import Request
from hmt.engine import device_prompts

GPU = {"gpu_id": "pretended", "host_memory": "512MiB", "quantization": "w4a16:32"}


@pytest.mark.parametrize(("layers", "gpu_memory"), [(2, "1GiB"), (3, "8GiB")])
def test_a_limit_is_found_under_which_experts_are_brought(layers: int, gpu_memory: str) -> None:
    options = {**GPU, "gpu_memory": gpu_memory}
    # As the probe does, with others beside it: the link has been measured, which takes memory.
    with expert_model(layers) as folder, device_prompts.opened(folder, options):
        limit = device_prompts._limit_that_brings(folder, options)
        assert limit is not None
        limited = {**options, **device_prompts._BRINGING, "gpu_memory": limit}
        with device_prompts.opened(folder, limited) as model:
            assert device_prompts._brings_experts(model.prepared)
            homes = set(model.plan.homes.values())
            assert Tier.HOST in homes and model.plan.device.slot_counts


def test_a_model_without_experts_has_none() -> None:
    with dense_model(2) as folder:
        assert device_prompts._limit_that_brings(folder, {**GPU, "gpu_memory": "8GiB"}) is None


def test_experts_that_stay_tell_nothing() -> None:
    with (
        expert_model(2) as folder,
        device_prompts.opened(folder, {**GPU, "gpu_memory": "8GiB"}) as model,
    ):
        assert not device_prompts._brings_experts(model.prepared)
        none = replace(model.prepared.demand, blocks=())
        assert not device_prompts._brings_experts(replace(model.prepared, demand=none))


def test_what_a_prompt_takes_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    request, piece, layer, expert = 0.5, 1.25, 3.0, 0.125
    brought = {"few": 10, "many": 18}  # not alike in each layer, as slots are not

    def model(layers: int, brought: int = 0) -> Any:
        spec = SimpleNamespace(layers=layers)
        return SimpleNamespace(
            prepared=SimpleNamespace(model=SimpleNamespace(spec=spec), brought=brought)
        )

    def by_turns(prompts: Sequence[tuple[Any, int]], seconds: float) -> list[float]:
        return [
            request
            + tokens // device_prompts.PIECE * (piece + one.prepared.model.spec.layers * layer)
            + one.prepared.brought * expert
            for one, tokens in prompts
        ]

    @contextmanager
    def opened(folder: Path, options: object) -> Iterator[Any]:
        yield model({"few": 2, "many": 6}[folder.name], brought[folder.name])

    limits: list[int | None] = [1, 1]
    monkeypatch.setattr(device_prompts, "_by_turns", by_turns)
    monkeypatch.setattr(device_prompts, "_limit_that_brings", lambda *given: limits.pop())
    monkeypatch.setattr(device_prompts, "opened", opened)
    monkeypatch.setattr(device_prompts, "_brought", lambda prepared: prepared.brought)
    few, many, folders = model(2), model(6), (Path("few"), Path("many"))
    found = device_prompts.launched(few, many, 1.0, folders)
    assert found == device_prompts.Launched(request + piece, piece, layer, expert)
    assert device_prompts.launched(few, many, 1.0).expert == 0.0
    limits = [None, 1]
    assert device_prompts.launched(few, many, 1.0, folders).expert == 0.0, "one of them brings none"


def test_experts_in_the_cache_are_not_brought() -> None:
    options = {**GPU, "gpu_memory": "8GiB"}
    with expert_model(2) as folder, device_prompts.opened(folder, options) as whole:
        assert device_prompts._brought(whole.prepared) == 0
        limit = device_prompts._limit_that_brings(folder, options)
        limited = {**options, **device_prompts._BRINGING, "gpu_memory": limit}
        with device_prompts.opened(folder, limited) as model:
            model.infer(Request(input=list(range(20, 320)), max_new_tokens=1))
            nbytes = next(
                block.slot_bytes for block in model.prepared.demand.of_kind(BlockKind.EXPERT)
            )
            copied = model.summary().prompt.link_bytes
            assert device_prompts._brought(model.prepared) == pytest.approx(
                copied / nbytes, rel=0.3
            )
