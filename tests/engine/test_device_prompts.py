"""What bringing experts costs is measured with a limit under which they are brought."""

from dataclasses import replace

import pytest

from hmt.contracts.plan import Tier
from hmt.engine import device_prompts
from hmt.engine.device_models import dense_model, expert_model

GPU = {"gpu_id": "pretended", "host_memory": "512MiB", "quantization": "w4a16:32"}


@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("gpu_memory", ["1GiB", "8GiB"])
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
